"""Where a token stands, as numbers: rotary positions and their published scalings, windows,
sinusoids, ALiBi's slopes. What no array decides is numpy's, in float64: constants of a program.

c is a model's configuration, i the number of a layer.
"""

import functools
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zigzag.errors import ConfigError

# -------------------------------------------------------------------------------------------
# Rotary positions

def rotary_rates(dim: int, theta: float, scaling: str = "", length: int = 0
                 ) -> tuple[np.ndarray, float]:
    """By how much a step turns each of dim / 2 pairs, and a factor of sine and cosine. `scaling` is
    JSON, as in a published config.json; some follow from the sequence's length."""
    known = parse_scaling(scaling)
    rates = _SCALINGS[known["rope_type"]](dim, theta, known, length)
    return rates.astype(np.float32), _attention_factor(known)


@functools.cache
def parse_scaling(scaling: str) -> dict[str, Any]:
    """A scaling as a dict."""
    known = json.loads(scaling or '{"rope_type": "default"}')
    if known["rope_type"] not in _SCALINGS:
        raise ConfigError(f"--rope_scaling: the type {known['rope_type']!r:.80} is not known; "
                          f"expected one of {', '.join(_SCALINGS)}")
    return known


def check_rotary(c: Any) -> None:
    """Refuse a scaling that is none."""
    try:
        with np.errstate(all="ignore"):
            for length in (1, 2**30):
                rates, factor = _rates(c, length)
                if not (np.isfinite(rates) & (rates > 0)).all() or not 0 < factor < math.inf:
                    raise ValueError("it makes numbers that are not finite or not above 0")
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"--rope_scaling {c.rope_scaling:.200}: expected JSON as in a published "
                          f'config.json, {{"rope_type": "linear", "factor": 2}} for example '
                          f"({e!r})") from None


def _plain(dim, theta, known=None, length=0):
    return theta ** (-np.arange(0, dim, 2) / dim)


def _linear(dim, theta, known, length):
    """All positions closer together."""
    return _plain(dim, theta) / known["factor"]


def _dynamic(dim, theta, known, length):
    """A longer base, beyond the length that it was trained at."""
    factor, trained = known["factor"], known["original_max_position_embeddings"]
    grown = factor * max(length, trained) / trained - (factor - 1)
    return _plain(dim, theta * grown ** (dim / max(dim - 2, 1)))


def _llama3(dim, theta, known, length):
    """Long waves closer together, short ones as they are, and in between a mean of both."""
    rates = _plain(dim, theta)
    turns = known["original_max_position_embeddings"] * rates / (2 * math.pi)
    low, high = known["low_freq_factor"], known["high_freq_factor"]
    if low == high:
        raise ValueError("low_freq_factor and high_freq_factor are equal")
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (keep + (1 - keep) / known["factor"])


def _yarn(dim, theta, known, length):
    """The same, with a ramp over the pairs' numbers."""
    trained = known["original_max_position_embeddings"]

    def pair(turns):        # whose rate makes so many turns over the trained length
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(known.get("beta_fast") or 32), pair(known.get("beta_slow") or 1)
    if known.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    scaled = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return _plain(dim, theta) * (1 - scaled + scaled / known["factor"])


def _longrope(dim, theta, known, length):
    """A factor for each pair: of two lists, by the length."""
    is_long = length > known["original_max_position_embeddings"]
    factors = known[name := "long_factor" if is_long else "short_factor"]
    if len(factors) != dim // 2:
        raise ValueError(f"{name} has {len(factors)} numbers for {dim // 2} pairs")
    return _plain(dim, theta) / np.array(factors)


_SCALINGS = {"default": _plain, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3,
             "yarn": _yarn, "longrope": _longrope}


def mscale(factor: float, by: float) -> float:
    """By how much yarn, and DeepSeek's attention with it, sharpens scores."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _attention_factor(known):
    kind, given, factor = known["rope_type"], known.get("attention_factor"), known.get("factor", 1)
    if kind not in ("yarn", "longrope") or given:
        return given if kind in ("yarn", "longrope") else 1.0
    if kind == "longrope":
        trained = known["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    by, by_all = known.get("mscale"), known.get("mscale_all_dim")
    return mscale(factor, by) / mscale(factor, by_all) if by and by_all else mscale(factor, 1.0)


# -------------------------------------------------------------------------------------------
# What differs from layer to layer

def _has_window(c):
    """Of each layer, whether it has the window."""
    kinds = (c.local_layers or "l") * c.layers
    return [c.window > 0 and kind == "l" for kind in kinds[:c.layers]]


def layer_slots(c: Any, i: int) -> int:
    """How many keys any query of a layer sees at most; 0 where all before it are seen."""
    return c.window if _has_window(c)[i] else 0


def layer_window(c: Any, i: Array) -> Any:
    """How many keys a query sees in a layer."""
    if "g" not in c.local_layers:
        return c.window
    return jnp.where(jnp.array(_has_window(c))[i], c.window, 2**30)


def _rates(c, length):
    return rotary_rates(c.rotary_dim or c.head_dim, c.rope_theta, c.rope_scaling, length)


def layer_rates(c: Any, i: Array) -> tuple[Any, Any]:
    """The rates of a layer's rotary positions, and the factor of sine and cosine."""
    rates, factor = _rates(c, c.seq_len)
    if not c.local_theta:
        return rates, factor
    local, _ = rotary_rates(c.rotary_dim or c.head_dim, c.local_theta)
    is_local = jnp.array(_has_window(c))[i]
    return jnp.where(is_local, local, rates), jnp.where(is_local, 1.0, factor)


def max_positions(c: Any) -> int:
    """How many positions there are: learned ones are a table, which ends."""
    return c.position_rows - c.position_offset if c.positions == "learned" else sys.maxsize


def decoding_length(c: Any, tokens: int, slots: int) -> int:
    """The length that scales rotary positions, for rows that end with so many tokens in so many
    slots. The scaling may depend on the tokens; else any length does, and that of the slots
    compiles fewer programs."""
    known = parse_scaling(c.rope_scaling)
    trained = known.get("original_max_position_embeddings", 0)
    if c.positions == "learned":        # not scaled, but no longer than the table
        return min(slots, max_positions(c))
    if known["rope_type"] not in ("dynamic", "longrope"):
        return slots
    if tokens <= trained:
        return min(slots, trained)
    return slots if known["rope_type"] == "longrope" else tokens


def rotate(x: Array, positions: Array, rates: Array, factor: Any = 1.0) -> Array:
    """Rotary positions: each pair (x[i], x[i + N/2]) of a head turned by its own rate times the
    position, so that q.k depends on how far apart they are. x: [B, T, H, N]. Of a head with more
    numbers than there are rates for, the beginning."""
    half = rates.shape[-1]
    angle = positions[:, :, None, None].astype(jnp.float32) * rates             # [B, T, 1, N/2]
    sin, cos = jnp.sin(angle) * factor, jnp.cos(angle) * factor
    a, b = x[..., :half].astype(jnp.float32), x[..., half:2 * half].astype(jnp.float32)
    parts = [jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)]
    return jnp.concatenate([*parts, x[..., 2 * half:]], -1) if x.shape[-1] > 2 * half else parts[0]


# -------------------------------------------------------------------------------------------
# Others

def alibi_slopes(heads: int) -> np.ndarray:
    """For each head by how much a key's score falls with each step away. Of a number of heads that
    is no power of two, the others lie between those of the next power."""
    power = 2 ** math.floor(math.log2(heads))

    def slopes(n):
        return 2.0 ** (-8 / n * np.arange(1, n + 1))

    return np.concatenate([slopes(power), slopes(2 * power)[::2][:heads - power]]).astype(
        np.float32)


def alibi_bias(c: Any, slopes: Array, place: Array) -> Array:
    """What keys at these positions [B, 1, 1, S] add to each head's scores [B, H, 1, S]. (Only
    distances count: a softmax does not see what all of a query's scores have in common.)"""
    if c.positions == "alibi":
        return slopes[:, None, None] * place
    # Falcon rounded it, and divided it with the scores.
    rounded = slopes.astype(jnp.bfloat16)[:, None, None] * place.astype(jnp.bfloat16)
    return rounded.astype(jnp.float32) * c.head_dim**-0.5


def relative_rows(c: Any) -> int:
    """How many numbers a head has for distances."""
    if c.relative == "grid":
        return (2 * (c.image_size // c.patch_size) - 1) ** 2 + 3
    return c.relative_buckets


def relative_ids(c: Any, query: Array, key: Array) -> Array:
    """Which of them is for a query and a key at these places [B, T] and [B, S]: [1, T, S]. (In all
    rows the same.)"""
    query, key = query[:1, :, None], key[:1, None, :]
    return (_grid_ids if c.relative == "grid" else _bucket_ids)(c, query, key)


def _bucket_ids(c, query, key):
    """T5's: small distances each by itself, larger ones by their logarithm. Where tokens see both
    ways, half of the buckets is for later keys."""
    far, half = key - query, c.relative_buckets // (1 if c.causal else 2)
    exact, steps = half // 2, np.arange(c.relative_distance)
    ratio = np.log(np.maximum(steps, 1).astype(np.float32) / np.float32(exact))
    scaled = ratio / np.float32(math.log(c.relative_distance / exact)) * np.float32(half - exact)
    bucket = np.where(steps < exact, steps, np.minimum(exact + scaled.astype(int), half - 1))
    bucket = np.append(bucket, half - 1)
    begins = np.searchsorted(bucket, np.arange(1, half))    # each bucket's smallest distance
    distance = jnp.maximum(-far, 0) if c.causal else jnp.abs(far)
    # (Not a sum of as many terms, at which the compiler for CPUs of jax 0.10 stops.)
    ids = jnp.sum(distance[..., None] >= jnp.asarray(begins), -1, dtype=jnp.int32)
    return ids if c.causal else ids + jnp.where(far > 0, half, 0)


def _grid_ids(c, query, key):
    """BEiT's: by how many patches two are apart in both directions; and three more of the class
    token (place 0): from it, to it, and with itself."""
    side = c.image_size // c.patch_size
    (i, j), (k, m) = (divmod(place - 1, side) for place in (query, key))
    ids, last = (i - k + side - 1) * (2 * side - 1) + j - m + side - 1, relative_rows(c) - 1
    ids = jnp.where(key == 0, last - 1, ids)
    return jnp.where(query == 0, jnp.where(key == 0, last, last - 2), ids)


def relative_bias(c: Any, table: Array, ids: Array) -> Array:
    """What a table [J, H] adds to the scores [1, H, T, S] of those ids. (A product: the gradient of
    a lookup would be a sum over all scores, one after the other.)"""
    chosen = jax.nn.one_hot(ids, table.shape[0])        # (a CPU has no such product in bfloat16)
    return jnp.einsum("btsj,jh->bhts", chosen, table.astype(jnp.float32))


def counted(flags: Array, place: Array) -> Array:
    """The positions of tokens that have a flag, counted from 0 along whole rows [B, T], at these
    places; -1 for the others."""
    position = jnp.where(flags, jnp.cumsum(flags, 1), 0) - 1
    return jnp.take_along_axis(position, place, 1)


def sinusoids(rows: int, width: int) -> np.ndarray:
    """A table [rows, width] of sines (even columns) and cosines (odd ones) of each position."""
    angle = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    table = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(rows, -1)
    return table[:, :width].astype(np.float32)
