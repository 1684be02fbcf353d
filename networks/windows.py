"""Pictures of tokens cut into square windows, each a short row of its own for attention.

    [B, 4, 6, D], windows of 2     +--+--+--+
                                   |0 |1 |2 |      -> [6 B, 4, D]: the windows of the first
                                   +--+--+--+         picture, row by row, then of the next
                                   |3 |4 |5 |
                                   +--+--+--+
"""

import jax.numpy as jnp
from jax import Array


def padded(x: Array, size: int) -> Array:
    """Pictures [B, height, width, ...] padded with zeros below and on the right to a multiple of
    the window size."""
    more = ((0, -n % size) for n in x.shape[1:3])
    return jnp.pad(x, ((0, 0), *more, *((0, 0),) * (x.ndim - 3)))


def cut(x: Array, size: int) -> Array:
    """[B, height, width, ...] -> [B * windows, size * size, ...]."""
    B, height, width, *rest = x.shape
    x = x.reshape(B, height // size, size, width // size, size, *rest)
    return x.swapaxes(2, 3).reshape(-1, size * size, *rest)


def join(x: Array, size: int, height: int, width: int) -> Array:
    """The inverse of `cut`: [B, height, width, ...]."""
    x = x.reshape(-1, height // size, width // size, size, size, *x.shape[2:])
    return x.swapaxes(2, 3).reshape(-1, height, width, *x.shape[5:])
