"""--overlap, a collective matmul: a device multiplies one part of a row while it sends another.

    all_gather(x) @ w           A device multiplies its own part of x, and sends it to both
                                neighbors. It multiplies the two parts that arrive, and sends each
                                on. After half a turn it has seen all parts.
    reduce_scatter(h @ w)       The same backwards: a device multiplies the parts of h that belong
                                to the farthest devices on both sides, and sends each product their
                                way. It adds its own to the two that arrive, and so on. The last two
                                that arrive belong to its own part of the sequence.

If n is even, the farthest device is the same on both sides, and one way is a step shorter. Each of
the two is the other's transpose, and they send as many bytes as the plain collectives do. A device
multiplies the parts in a different order than they have in the row. `_in_order` puts the products
in order afterwards, which costs a copy.

`product(weights, x)` is any function of activations x, of any part of the sequence, that treats
each token by itself and, except for a bias, is linear in x.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from zigzag.core.mesh import add_to, around, axis_size, float32_zeros, mark_varying


def asked(x: Array, parts: int = 1) -> bool:
    """Whether products with x [B, T, ...] run in parts: if --overlap asks for it, and `parts`
    divides T. `parts` is 1 if each device already has its own part of the sequence."""
    return around().overlap and axis_size("tensor") > 1 and x.shape[1] % parts == 0


def gathered(product: Callable, weights: Any, x: Array) -> Any:
    """Return product(weights, the whole sequence of x), where tensor splits the sequence of x."""
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
    """Sum product(weights, h) over tensor, and return this device's part of the sequence."""
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
    """Return a function from the cotangent of a part's products to the cotangent of the part."""
    return lambda cotangent: jax.vjp(lambda x: product(weights, x), x)[1](cotangent)[0]


def _gradient(product, weights, parts, cotangents):
    """The gradient of the weights from all parts, added up in float32."""
    total = float32_zeros(weights)
    for k, part in parts.items():
        _, of_weights = jax.vjp(lambda weights, part=part: product(weights, part), weights)
        total = add_to(total, *of_weights(cotangents[k]))
    return jax.tree.map(lambda g, w: g.astype(w.dtype), total, weights)


# Parts by distance: {0: this device's part, -1: that of the device below, 1: of the one above ...}.

def _pass_around(x):
    """Pass each device's part x around, and return the parts of all devices."""
    n = axis_size("tensor")
    parts = {0: x}
    for k in range(1, n // 2 + 1):
        parts[-k] = _send(parts[1 - k], 1)
        if 2 * k < n:
            parts[k] = _send(parts[k - 1], -1)
    return parts


def _sum_at_home(of_part):
    """Sum over all devices the of_part(k) that each computes for this one."""
    n = axis_size("tensor")
    up = down = 0
    for k in range(n // 2, 0, -1):
        up = _send(up + of_part(k), 1)
        if 2 * k < n:
            down = _send(down + of_part(-k), -1)
    return of_part(0) + up + down


def _send(x, by):
    n = axis_size("tensor")
    return lax.ppermute(x, "tensor", [(i, (i + by) % n) for i in range(n)])


def _part(tree, distance):
    """The part of the sequence that belongs to the device at this distance."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(
        x, _place(distance) * (x.shape[1] // axis_size("tensor")),
        x.shape[1] // axis_size("tensor"), 1), tree)


def _in_order(parts):
    """Join the parts of all devices, in the order of the devices."""
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
