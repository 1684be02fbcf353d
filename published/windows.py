"""Windowed attention, shared by Swin and SAM: cut a grid of tokens into square windows, and attend
within each window as if it were a separate short row.

    [B, 4, 6, D], windows of 2     +--+--+--+
                                   |0 |1 |2 |      -> [6 B, 4, D]: the first image's windows,
                                   +--+--+--+         row by row, then the next image's
                                   |3 |4 |5 |
                                   +--+--+--+
"""

from typing import Any, Callable

import jax.numpy as jnp
from jax import Array, lax

import shard
from published import transformer


def patches(params: Any, pictures: Array, c: Any) -> Array:
    """Turn images [B, C, height, width] into grids of tokens [B, h, w, D]. Zero-pad the images
    to whole patches."""
    w, p = params["patch"], c.patch_size
    x = lax.conv_general_dilated(
        pictures.astype(w.dtype), w, (p, p), [(0, -n % p) for n in pictures.shape[2:]],
        dimension_numbers=("NCHW", "IHWO", "NHWC"))
    return x + params["patch_bias"]


def block(w: Any, x: Array, size: tuple[int, int], window: int, c: Any, attend: Callable,
          shift: Any = None) -> Array:
    """Run a block with windowed attention on the stream x [B, T, D] of images with `size` = (h,
    w) tokens. Roll each image by `shift` before cutting it. attend(w, q, k, v, size) computes
    attention for each window's tokens [B W, t, H, N], where `size` includes the padding."""
    def in_windows(w, h, *_):
        picture = shard.time_of_block(h).reshape(len(h), *size, h.shape[-1])
        picture = padded(picture, window)           # tokens see the padding (zeros plus bias)
        whole = picture.shape[1:3]
        picture = picture if shift is None else jnp.roll(picture, (-shift, -shift), (1, 2))
        q, k, v = shard.columns(cut(picture, window), gathered=True, *[
            transformer.with_bias(w, name) for name in ("wq", "wk", "wv")])
        out = join(attend(w, q, k, v, whole), window, *whole)
        out = out if shift is None else jnp.roll(out, (shift, shift), (1, 2))
        out = out[:, :size[0], :size[1]].reshape(len(h), -1, *out.shape[3:])    # [B, T, H, N]
        return shard.row((out, w["wo"])) + w["wo_bias"], None

    return transformer.block(w, x, 0, c, {}, attend=in_windows)[0]


def padded(x: Array, size: int) -> Array:
    """Zero-pad images [B, height, width, D] at the bottom and right to a multiple of the window
    size."""
    return jnp.pad(x, ((0, 0), *((0, -n % size) for n in x.shape[1:3]), (0, 0)))


def cut(x: Array, size: int) -> Array:
    """[B, height, width, ...] -> [B * windows, size * size, ...]."""
    B, height, width, *rest = x.shape
    x = x.reshape(B, height // size, size, width // size, size, *rest)
    return x.swapaxes(2, 3).reshape(-1, size * size, *rest)


def join(x: Array, size: int, height: int, width: int) -> Array:
    """Undo `cut`: return [B, height, width, ...]."""
    x = x.reshape(-1, height // size, width // size, size, size, *x.shape[2:])
    return x.swapaxes(2, 3).reshape(-1, height, width, *x.shape[5:])
