"""--overlap, a collective matmul: a device multiplies one part of a row while it sends another.

    all_gather(x) @ w           A device multiplies its own part of x and sends it to both
                                neighbors. It multiplies the two parts that arrive, and passes each
                                along. After half a lap, it has seen every part.
    reduce_scatter(h @ w)       The reverse: a device multiplies the parts of h that belong to the
                                farthest devices on both sides, and sends each product toward its
                                owner. It adds its own products to the two sums that arrive, and so
                                on. The last two arrivals are for its own part of the sequence.

If n is even, the farthest device is the same on both sides, so one direction is a step shorter.
Each of the two is the other's transpose, and both send as many bytes as the plain collectives. A
device multiplies the parts in a different order than they have in the row, so `_in_order` reorders
the products afterwards, which costs a copy.

`product(weights, x)` is any function of activations x, for any part of the sequence, that treats
each token independently and is linear in x except for a bias.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from zigzag.core.mesh import add_to, axis_size, float32_zeros, mark_varying, send, trace_settings


def is_on(x: Array, parts: int = 1) -> bool:
    """Return whether to multiply x [B, T, ...] in parts: if --overlap is set and `parts` divides T.
    `parts` is 1 if each device already holds just its part of the sequence."""
    return trace_settings().overlap and axis_size("tensor") > 1 and x.shape[1] % parts == 0


def gathered(product: Callable, weights: Any, x: Array) -> Any:
    """Return product(weights, x's whole sequence), given an x whose sequence tensor splits."""
    @jax.custom_vjp
    def run(weights, x):
        return forward(weights, x)[0]

    def forward(weights, x):
        parts = _pass_around(x)
        products = {k: product(weights, part) for k, part in parts.items()}
        return _in_order(products), (weights, parts)

    def backward(kept, cotangents):
        weights, parts = kept
        of_part = _transpose(product, weights, parts[0])
        return (_gradient(product, weights, parts, {k: _part(cotangents, k) for k in parts}),
                _sum_at_home(lambda k: of_part(_part(cotangents, k))))

    run.defvjp(forward, backward)
    return run(*mark_varying((weights, x), weights, x))


def scattered(product: Callable, weights: Any, h: Any) -> Array:
    """Sum product(weights, h) over tensor and return this device's part of the sequence."""
    @jax.custom_vjp
    def run(weights, h):
        return _sum_at_home(lambda k: product(weights, _part(h, k)))

    def backward(kept, cotangent):
        weights, h = kept
        parts = _pass_around(cotangent)
        transpose = _transpose(product, weights, _part(h, 0))
        return (_gradient(product, weights, {k: _part(h, k) for k in parts}, parts),
                _in_order({k: transpose(part) for k, part in parts.items()}))

    run.defvjp(lambda weights, h: (run(weights, h), (weights, h)), backward)
    return run(*mark_varying((weights, h), weights, h))


def _transpose(product, weights, x):
    """Return a function that maps the cotangent of a part's product to the part's cotangent."""
    return lambda cotangent: jax.vjp(lambda x: product(weights, x), x)[1](cotangent)[0]


def _gradient(product, weights, parts, cotangents):
    """Return the weights' gradient, summed over all parts in float32."""
    total = float32_zeros(weights)
    for k, part in parts.items():
        _, of_weights = jax.vjp(lambda weights, part=part: product(weights, part), weights)
        total = add_to(total, *of_weights(cotangents[k]))
    return jax.tree.map(lambda g, w: g.astype(w.dtype), total, weights)


# Parts by distance: {0: this device's part, -1: the previous device's, 1: the next device's ...}.

def _pass_around(x):
    """Pass each device's part x around, and return all devices' parts."""
    n = axis_size("tensor")
    parts = {0: x}
    for k in range(1, n // 2 + 1):
        parts[-k] = send(parts[1 - k], "tensor", 1)
        if 2 * k < n:
            parts[k] = send(parts[k - 1], "tensor", -1)
    return parts


def _sum_at_home(of_part):
    """Return the sum of what each device's of_part(k) computes for this device."""
    n = axis_size("tensor")
    up = down = 0
    for k in range(n // 2, 0, -1):
        up = send(up + of_part(k), "tensor", 1)
        if 2 * k < n:
            down = send(down + of_part(-k), "tensor", -1)
    return of_part(0) + up + down


def _part(tree, distance):
    """Return the part of the sequence that belongs to the device at this distance."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(
        x, _place(distance) * (x.shape[1] // axis_size("tensor")),
        x.shape[1] // axis_size("tensor"), 1), tree)


def _in_order(parts):
    """Join all devices' parts in device order."""
    def whole(*values):
        B, T, *others = values[0].shape
        out = mark_varying(jnp.zeros((B, axis_size("tensor") * T, *others), values[0].dtype),
                           values)
        for distance, value in zip(parts, values):
            out = lax.dynamic_update_slice_in_dim(out, value, _place(distance) * T, 1)
        return out

    return jax.tree.map(whole, *parts.values())


def _place(distance):
    return (lax.axis_index("tensor") + distance) % axis_size("tensor")
