"""Rotary positions: the rotation, the rate for each pair, and the published scalings of the rates.
numpy computes the rates in float64, and they become constants in the compiled program."""

import functools
import json
import math
from typing import Any, Callable, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from zigzag.core.errors import ConfigError, one_line
from zigzag.core.parts import has_part, part


def rotary_rates(dim: int, theta: float, scaling: str = "", length: int = 0
                 ) -> tuple[np.ndarray, float]:
    """Return (rates [dim / 2], factor): the angle by which each pair turns per position, and a
    factor for sine and cosine. `scaling` is JSON, as in a published config.json. Some scalings
    depend on `length`, the sequence length."""
    known = parse_scaling(scaling)
    scaling_of = SCALINGS[known["rope_type"]]
    rates = scaling_of.rates(dim, theta, known, length)
    return rates.astype(np.float32), scaling_of.factor(known)


def rotate(x: Array, positions: Array, rates: Array, factor: Any = None) -> Array:
    """Rotate each pair (x[i], x[i + N/2]) in a head of x [B, T, H, N] by its rate times the
    position, so that q.k depends on the distance between q and k. If the rates cover only part of a
    head, rotate only the head's first numbers. `factor` multiplies sine and cosine."""
    half = rates.shape[-1]
    angle = positions[:, :, None, None].astype(jnp.float32) * rates             # [B, T, 1, N/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if factor is not None:
        sin, cos = sin * factor, cos * factor
    a, b = jnp.split(x[..., :2 * half].astype(jnp.float32), 2, -1)
    parts = [jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)]
    return jnp.concatenate([*parts, x[..., 2 * half:]], -1) if x.shape[-1] > 2 * half else parts[0]


@functools.cache
def parse_scaling(scaling: str) -> dict[str, Any]:
    """Parse a scaling into a dict."""
    known = json.loads(scaling or '{"rope_type": "default"}')
    if known["rope_type"] not in SCALINGS and has_part("published"):
        part("published.positions", "")         # importing it registers more types
    if known["rope_type"] not in SCALINGS:
        raise ConfigError(f"--rope_scaling: the type {known['rope_type']!r:.80} is not known; "
                          f"expected one of {', '.join(SCALINGS)}")
    return known


def scaling_type(scaling: str) -> Any:
    """Return a scaling's rope_type, or "default" if the text isn't a valid scaling."""
    try:
        return parse_scaling(scaling)["rope_type"]
    except (ValueError, TypeError, KeyError):
        return "default"        # check_rotary rejects it with a reason


def scaled_length(scaling: str, length: int) -> int:
    """Return the maximum sequence length if the config allows `length` before scaling."""
    known = parse_scaling(scaling)
    return SCALINGS[known["rope_type"]].positions(known, length)


def check_rotary(c: Any, dim: int = 0) -> None:
    """Reject an invalid scaling for heads with `dim` rotated numbers (0: all of them)."""
    try:
        with np.errstate(all="ignore"):
            for length in (1, 2**30):
                rates, factor = rotary_rates(dim or c.head_dim, c.rope_theta, c.rope_scaling,
                                             length)
                if not (np.isfinite(rates) & (rates > 0)).all() or not 0 < factor < math.inf:
                    raise ValueError("its rates are not finite or not above 0")
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"--rope_scaling {c.rope_scaling:.200}: expected JSON as in a published "
                          f'config.json, {{"rope_type": "linear", "factor": 2}} for example '
                          f"({one_line(e)})") from None


def plain_rates(dim: int, theta: float, known: Any = None, length: int = 0) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2) / dim)


def _linear(dim, theta, known, length):
    """Divide every position by the factor."""
    return plain_rates(dim, theta) / known["factor"]


def _llama3(dim, theta, known, length):
    """Stretch long wavelengths by the factor, leave short ones unchanged, and blend in between."""
    rates = plain_rates(dim, theta)
    turns = known["original_max_position_embeddings"] * rates / (2 * math.pi)
    low, high = known["low_freq_factor"], known["high_freq_factor"]
    if not low < high:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (keep + (1 - keep) / known["factor"])


class Scaling(NamedTuple):
    """A way to scale the rates. `known` is the parsed scaling, a dict."""
    rates: Callable                             # dim, theta, known, length -> rates [dim / 2]
    factor: Callable = lambda known: 1.0        # known -> the factor for sine and cosine
    positions: Callable = lambda known, length: length      # known, the config's length
    #                                             -> the maximum sequence length


# {rope_type: Scaling}. published/positions.py adds scalings that the plain decoder lacks.
SCALINGS = {"default": Scaling(plain_rates), "linear": Scaling(_linear), "llama3": Scaling(_llama3)}
