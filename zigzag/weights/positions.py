"""Rotary positions: the rotation, and the rate of each pair with the published scalings of these
rates, which are computed by numpy in float64, as constants of a program."""

import functools
import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from zigzag.core.errors import ConfigError, one_line


def rotary_rates(dim: int, theta: float, scaling: str = "", length: int = 0
                 ) -> tuple[np.ndarray, float]:
    """(rates [dim / 2], factor): the angle by which one position rotates each pair, and a factor on
    sine and cosine. `scaling` is JSON, as in a published config.json; `length` is the length of the
    sequence, on which some scalings depend."""
    known = parse_scaling(scaling)
    rates = _SCALINGS[known["rope_type"]](dim, theta, known, length)
    return rates.astype(np.float32), _attention_factor(known)


def rotate(x: Array, positions: Array, rates: Array, factor: Any = None) -> Array:
    """Rotary positions: x [B, T, H, N] with each pair (x[i], x[i + N/2]) of a head rotated by its
    rate times the position, so that q.k depends on their distance. If there are rates for only
    a part of a head, its first numbers are rotated. `factor` is one on sine and cosine."""
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
    """A scaling as a dict."""
    known = json.loads(scaling or '{"rope_type": "default"}')
    if known["rope_type"] not in _SCALINGS:
        raise ConfigError(f"--rope_scaling: the type {known['rope_type']!r:.80} is not known; "
                          f"expected one of {', '.join(_SCALINGS)}")
    return known


def scaling_type(scaling: str) -> Any:
    """The rope_type of a scaling; "default" if the text is not a scaling."""
    try:
        return parse_scaling(scaling)["rope_type"]
    except (ValueError, TypeError, KeyError):
        return "default"        # (check_rotary refuses it, and says why)


def scaled_length(scaling: str, length: int) -> int:
    """How many positions a sequence may have whose configuration says `length`: more, if the
    scaling adapts to longer ones."""
    known = parse_scaling(scaling)
    if known["rope_type"] == "dynamic":
        return max(length, int(known["factor"] * known["original_max_position_embeddings"]))
    return length


def check_rotary(c: Any, dim: int = 0) -> None:
    """Refuse an invalid scaling, for heads of which `dim` numbers are rotated (0: all)."""
    try:
        with np.errstate(all="ignore"):
            for length in (1, 2**30):
                rates, factor = rotary_rates(dim or c.head_dim, c.rope_theta, c.rope_scaling,
                                             length)
                if not (np.isfinite(rates) & (rates > 0)).all() or not 0 < factor < math.inf:
                    raise ValueError("it makes numbers that are not finite or not above 0")
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"--rope_scaling {c.rope_scaling:.200}: expected JSON as in a published "
                          f'config.json, {{"rope_type": "linear", "factor": 2}} for example '
                          f"({one_line(e)})") from None


def _plain(dim, theta, known=None, length=0):
    return theta ** (-np.arange(0, dim, 2) / dim)


def _linear(dim, theta, known, length):
    """Every position divided by the factor."""
    return _plain(dim, theta) / known["factor"]


def _dynamic(dim, theta, known, length):
    """A larger base for sequences longer than the trained length."""
    factor, trained = known["factor"], known["original_max_position_embeddings"]
    grown = factor * max(length, trained) / trained - (factor - 1)
    return _plain(dim, theta * grown ** (dim / max(dim - 2, 1)))


def _llama3(dim, theta, known, length):
    """Long wavelengths stretched by the factor, short ones unchanged, and in between a mix."""
    rates = _plain(dim, theta)
    turns = known["original_max_position_embeddings"] * rates / (2 * math.pi)
    low, high = known["low_freq_factor"], known["high_freq_factor"]
    if not low < high:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (keep + (1 - keep) / known["factor"])


def _yarn(dim, theta, known, length):
    """As llama3, but the mix is a linear ramp over the indices of the pairs."""
    trained = known["original_max_position_embeddings"]

    def pair(turns):        # the index of the pair that makes so many turns in the trained length
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(known.get("beta_fast") or 32), pair(known.get("beta_slow") or 1)
    if known.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    scaled = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return _plain(dim, theta) * (1 - scaled + scaled / known["factor"])


def _longrope(dim, theta, known, length):
    """A factor for each pair, from one of two lists (short_factor, long_factor) by the length."""
    is_long = length > known["original_max_position_embeddings"]
    factors = known[name := "long_factor" if is_long else "short_factor"]
    if len(factors) != dim // 2:
        raise ValueError(f"{name} has {len(factors)} numbers for {dim // 2} pairs")
    return _plain(dim, theta) / np.array(factors)


_SCALINGS = {"default": _plain, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3,
             "yarn": _yarn, "longrope": _longrope}


def mscale(factor: float, by: float) -> float:
    """The factor by which yarn (and DeepSeek's attention) sharpens scores."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _attention_factor(known):
    kind, given, factor = known["rope_type"], known.get("attention_factor"), known.get("factor", 1)
    if kind not in ("yarn", "longrope") or given is not None:
        return given if kind in ("yarn", "longrope") else 1.0
    if kind == "longrope":
        trained = known["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    by, by_all = known.get("mscale"), known.get("mscale_all_dim")
    return mscale(factor, by) / mscale(factor, by_all) if by and by_all else mscale(factor, 1.0)
