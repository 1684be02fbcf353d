"""The product of activations and weights, and sums over chunks of it.

A CPU multiplies faster where the gradient of the weights has the activations on the left: autodiff
would have them on the right, and a CPU would transpose the left operand in memory first, a gradient
of the product's size, anew for each product.
"""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from zigzag.mesh import mark_alike, mark_varying, platform, zeros_of


def matmul(x: Array, w: Array, contract: int = 1, dtype: Any = None) -> Array:
    """x [B, T, F, ...] times w [F, ..., D]: the last `contract` dimensions of x with the first of
    w. `dtype` is the result's, if not x's."""
    first = x.ndim - contract
    dims = ((tuple(range(first, x.ndim)), tuple(range(contract))), ((), ()))

    def plain(x, w):
        return lax.dot_general(x, w, dims, preferred_element_type=dtype)

    if platform() != "cpu":
        return plain(x, w)

    def backward(saved, cotangent):
        x, w = saved
        dx, = jax.linear_transpose(lambda x: plain(x, w), x)(cotangent)
        rows = tuple(range(first))
        dw = lax.dot_general(x, cotangent, ((rows, rows), ((), ())),
                             preferred_element_type=dtype)
        return dx, dw.astype(w.dtype)

    product = jax.custom_vjp(plain)
    product.defvjp(lambda x, w: (plain(x, w), (x, w)), backward)
    # Marked outside: the sum over devices that a mark is in the backward pass stays autodiff's.
    return product(mark_varying(x, w), mark_varying(w, x))


def chunked_sum(fn: Callable, weights: Any, chunks: Any) -> Array:
    """The sum of the scalar fn(weights, *chunk) over chunks (arrays [count, ...]), with one chunk
    in memory at a time. Where it is differentiated, a chunk's gradients are made with the chunk in
    the forward pass: the backward pass only scales them, and computes nothing again."""
    weights, chunks = mark_varying(weights, chunks), mark_alike(chunks, weights, chunks)
    zero = zeros_of(fn, weights, *[a[0] for a in chunks])
    dtypes = jax.tree.map(lambda w: w.dtype, weights)

    @jax.custom_vjp
    def total(weights, chunks):
        return lax.scan(lambda s, chunk: (s + fn(weights, *chunk), None), zero, chunks)[0]

    def forward(weights, chunks):
        def one(carry, chunk):
            s, grads = carry
            floats = {i: a for i, a in enumerate(chunk) if jnp.issubdtype(a.dtype, jnp.floating)}

            def of_floats(weights, floats):
                return fn(weights, *(floats.get(i, a) for i, a in enumerate(chunk)))

            value, vjp = jax.vjp(of_floats, weights, floats)
            grad, dfloats = vjp(jnp.ones_like(value))
            grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, grad)
            return (s + value, grads), dfloats

        wide = jax.tree.map(lambda w: mark_varying(jnp.zeros(w.shape, jnp.float32), w), weights)
        (s, grads), dfloats = lax.scan(one, (zero, wide), chunks)
        return s, (grads, dfloats)

    def backward(saved, cotangent):
        grads, dfloats = saved
        return (jax.tree.map(lambda g, dtype: (g * cotangent).astype(dtype), grads, dtypes),
                [(dfloats[i] * cotangent).astype(dfloats[i].dtype) if i in dfloats else
                 np.zeros(a.shape, jax.dtypes.float0) for i, a in enumerate(chunks)])

    total.defvjp(forward, backward)
    return total(weights, chunks)
