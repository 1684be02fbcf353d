"""The product of activations and weights, and sums over chunks of it.

A CPU multiplies faster where the gradient of the weights has the activations on the left: autodiff
would have them on the right, and a CPU would transpose the left operand in memory first, a gradient
of the product's size, anew for each product.
"""

import dataclasses
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from zigzag.core.mesh import add_to, mark_varying, platform, vary_like, zeros_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight w [F, ..., D, ...] to which a [F, ..., r] times b [r, D, ...] is to be added, r few.
    The sum is never made: x w + (x a) b costs less, and the gradients of a and b then need no
    gradient of the weight. (Experts have a dimension of their own before these.)"""
    w: Array
    a: Array
    b: Array

    @property
    def shape(self) -> tuple[int, ...]:     # (an override may have split one of them alone)
        return min(len(self.w), len(self.a)), *self.w.shape[1:]

    @property
    def ndim(self) -> int:
        return self.w.ndim


def on_columns(fn: Callable, tree: Any) -> Any:
    """A tree of weights with fn of each array in it that has their columns."""
    return jax.tree.map(
        lambda w: Adapted(fn(w.w), w.a, fn(w.b)) if isinstance(w, Adapted) else fn(w), tree,
        is_leaf=lambda w: isinstance(w, Adapted))


def on_rows(fn: Callable, w: Array | Adapted) -> Any:
    """A weight with fn of each array in it that has its rows."""
    return Adapted(fn(w.w), fn(w.a), w.b) if isinstance(w, Adapted) else fn(w)


def whole(w: Array | Adapted) -> Array:
    """A weight as one array."""
    return w.w + jnp.tensordot(w.a, w.b, 1) if isinstance(w, Adapted) else w


def matmul(x: Array, w: Array | Adapted, contract: int = 1, dtype: Any = None) -> Array:
    """x [B, T, F, ...] times w [F, ..., D]: the last `contract` dimensions of x with the first of
    w. `dtype` is the result's, if not x's."""
    if isinstance(w, Adapted):
        beside = matmul(matmul(x, w.a, contract), w.b, 1, dtype)
        # (By its name --remat selective keeps the sum, and not both products.)
        return checkpoint_name(matmul(x, w.w, contract, dtype) + beside, "product")

    def plain(x, w):
        return jnp.tensordot(x, w, contract, preferred_element_type=dtype)

    if platform() != "cpu":
        return plain(x, w)

    def backward(saved, cotangent):
        x, w = saved
        dx, = jax.linear_transpose(lambda x: plain(x, w), x)(cotangent)
        rows = tuple(range(x.ndim - contract))
        dw = lax.dot_general(x, cotangent, ((rows, rows), ((), ())),
                             preferred_element_type=dtype)
        return dx, dw.astype(w.dtype)

    product = jax.custom_vjp(plain)
    product.defvjp(lambda x, w: (plain(x, w), (x, w)), backward)
    # Marked outside: the sum over devices that a mark is in the backward pass stays autodiff's.
    return product(*mark_varying((x, w), x, w))


# As many logits are in memory at once; of a longer or wider batch, those of some of its time.
LOGITS = 2**25


def loss_chunks(rows: int, time: int, vocabulary: int) -> int:
    """In how many chunks of their time the loss of so many rows is computed."""
    size = rows * time * vocabulary
    return min(n for n in range(1, time + 1)
               if time % n == 0 and (size <= n * LOGITS or n == time))


def chunked_sum(fn: Callable, weights: Any, chunks: Any) -> Array:
    """The sum of the scalar fn(weights, *chunk) over chunks (arrays [count, ...]), with one chunk
    in memory at a time. Where it is differentiated, a chunk's gradients are made with the chunk in
    the forward pass: the backward pass only scales them, and computes nothing again."""
    weights, chunks = mark_varying(weights, chunks), vary_like(chunks, weights, chunks)
    zero = zeros_of(fn, weights, *[a[0] for a in chunks])

    @jax.custom_vjp
    def total(weights, chunks):
        return lax.scan(lambda s, chunk: (s + fn(weights, *chunk), None), zero, chunks)[0]

    def forward(weights, chunks):
        def one(carry, chunk):
            s, grads = carry
            value, vjp = jax.vjp(fn, weights, *chunk)
            grad, *dchunk = vjp(jnp.ones_like(value))
            # Integers have no gradient, which is None here.
            dchunk = [None if d.dtype == jax.dtypes.float0 else d for d in dchunk]
            return (s + value, add_to(grads, grad)), dchunk

        wide = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights)
        (s, grads), dchunks = lax.scan(one, (zero, wide), chunks)
        return s, (grads, dchunks)

    def backward(saved, cotangent):
        grads, dchunks = saved
        return (jax.tree.map(lambda g, w: (g * cotangent).astype(w.dtype), grads, weights),
                jax.tree.map(lambda d: (d * cotangent).astype(d.dtype), dchunks))

    total.defvjp(forward, backward)
    return total(weights, chunks)


def time_chunks(a: Array, count: int, n: int) -> Array:
    """a [B, T, ...] as [count, B, T / count, ...]: the chunks of a stream whose time n devices
    split, so that a chunk has a part of each device's time."""
    B, T = a.shape[:2]
    a = a.reshape(B, n, count, T // (n * count), *a.shape[2:])
    return jnp.moveaxis(a, 2, 0).reshape(count, B, T // count, *a.shape[4:])
