"""Stems turn images or sound into the vectors [B, T, D] that an encoder's first layer reads. They
are small, so every device computes the whole stem.

    patches   cut an image [B, C, height, width] into squares and multiply each by the same matrix;
              the class token, a learned vector, comes first
    frames    run two convolutions over sound [B, C, time], which has C numbers per frame; each
              convolution covers three frames, and the second has stride 2
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from published.positions import waves
from zigzag.core.errors import ConfigError
from zigzag.parallel.network import Params


def length(c: Any) -> int:
    """Return T, the number of vectors that a stem produces."""
    if c.stem == "patches":
        return c.side ** 2 + 1
    return c.source_len


def source_shape(c: Any, rows: int) -> tuple[int, ...]:
    """Return the shape of a stem's input for a batch of `rows` rows."""
    if c.stem == "patches":
        return rows, c.channels, c.image_size, c.image_size
    return rows, c.channels, 2 * c.source_len


def weight_table(c: Any, table: Any) -> Params:
    """Return the table of a stem's weights, in the letters of tables.py."""
    if c.stem == "patches":
        return patch_weights(c, table) | {"class_token": table("D", 0.02)}
    return {"conv1": table("k C D/fsdp", (3 * c.channels) ** -0.5), "conv1_bias": table("D", 0.0),
            "conv2": table("k d/fsdp D", (3 * c.d_model) ** -0.5), "conv2_bias": table("D", 0.0)}


def patch_weights(c: Any, table: Any) -> Params:
    bias = {"patch_bias": table("D", 0.0)} if "embed" in c.biases.split(",") else {}
    return {"patch": table("C y x D/fsdp", (c.channels * c.patch_size**2) ** -0.5), **bias}


def check_source(source: Array, c: Any) -> None:
    if source.shape != (shape := source_shape(c, len(source))):
        raise ConfigError(f"a source has the shape {list(source.shape)}; this model reads "
                          f"{list(shape)}")


def stream(params: Params, source: Array, c: Any) -> Array:
    """Turn images or sound into vectors [B, T, D]."""
    check_source(source, c)
    return (_patches if c.stem == "patches" else _frames)(params, source, c)


def _patches(params, pictures, c):
    """Images [B, C, height, width] -> [B, 1 + patches, D]."""
    B, size, side = len(pictures), c.patch_size, c.side
    w = params["patch"]
    x = pictures[:, :, :side * size, :side * size].astype(w.dtype)
    x = x.reshape(B, c.channels, side, size, side, size)
    x = jnp.einsum("bchywz,cyzd->bhwd", x, w).reshape(B, side * side, -1)
    x = x + params["patch_bias"] if "patch_bias" in params else x
    first = jnp.broadcast_to(params["class_token"], (B, 1, c.d_model))
    return jnp.concatenate([first.astype(x.dtype), x], 1)


def _frames(params, sound, c):
    """Sound [B, C, 2 T] -> [B, T, D]."""
    x = sound.swapaxes(1, 2).astype(params["conv1"].dtype)
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = jax.lax.conv_general_dilated(x, params[name], (stride,), [(1, 1)],
                                         dimension_numbers=("NWC", "WIO", "NWC"))
        x = jax.nn.gelu(x + params[f"{name}_bias"], approximate=False)
    return x


def sound_positions(rows: int, width: int) -> np.ndarray:
    """Return Whisper's position table [rows, width]: each row has sines in its first half and
    cosines in its second."""
    rates = 10000.0 ** (-np.arange(width // 2) / max(width // 2 - 1, 1))
    return waves(rows, rates).astype(np.float32)
