"""Positions for the general transformer: per-layer windows, rotary rates, sinusoids, ALiBi's
slopes, learned distance biases. We compute whatever doesn't depend on an array in numpy, in
float64, so that it becomes a constant of the program.

c is a network's config, and i a layer's number.
"""

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zigzag.parallel.attention import Token
from zigzag.parallel.rotary import SCALINGS, Scaling, parse_scaling, plain_rates, rotary_rates

# -------------------------------------------------------------------------------------------
# Windows and rotary rates, which differ from layer to layer

def _has_window(c):
    """Return a list that says for each layer whether it has the window."""
    kinds = (c.local_layers or "l") * c.layers
    return [c.window > 0 and kind == "l" for kind in kinds[:c.layers]]


def layer_slots(c: Any, i: int) -> int:
    """Return how many keys a query in layer i sees at most; 0 if it sees all earlier keys."""
    return c.window if _has_window(c)[i] else 0


def layer_is_local(c: Any, i: Array) -> Array:
    """Return whether layer i has the window; i may be traced."""
    return jnp.array(_has_window(c))[i]


def layer_rates(c: Any, i: Array) -> tuple[Any, Any]:
    """Return (rates [N / 2], factor on sine and cosine) for layer i's rotary positions."""
    dim = c.rotary_dim or c.head_dim
    rates, factor = rotary_rates(dim, c.rope_theta, c.rope_scaling, c.seq_len)
    if c.local_theta:
        local, _ = rotary_rates(dim, c.local_theta)
        is_local = layer_is_local(c, i)
        rates, factor = jnp.where(is_local, local, rates), jnp.where(is_local, 1.0, factor)
    if "n" in c.rotary_layers:      # layers without rotary positions have rates of 0
        is_turned = jnp.array([kind == "r" for kind in (c.rotary_layers * c.layers)[:c.layers]])[i]
        rates, factor = jnp.where(is_turned, rates, 0.0), jnp.where(is_turned, factor, 1.0)
    return rates, factor


def max_positions(c: Any) -> int:
    """Return the maximum number of positions, which only a learned position table limits."""
    return c.position_rows - c.position_offset if c.positions == "learned" else sys.maxsize


def decoding_length(c: Any, tokens: int, slots: int) -> int:
    """Return the length that the scaling of rotary positions depends on, for rows that end with
    `tokens` tokens in a cache of `slots`. If the scaling doesn't depend on the token count, return
    the slot count, so that jax compiles fewer programs."""
    known = parse_scaling(c.rope_scaling)
    trained = known.get("original_max_position_embeddings", 0)
    if c.positions == "learned":        # not scaled, but limited by the table
        return min(slots, max_positions(c))
    if known["rope_type"] not in ("dynamic", "longrope"):
        return slots
    if tokens <= trained:
        return min(slots, trained)
    return slots if known["rope_type"] == "longrope" else tokens


# -------------------------------------------------------------------------------------------
# Other positions

def alibi_slopes(heads: int) -> np.ndarray:
    """Return each head's slope [H]: how much a key's score drops per step of distance. If H isn't a
    power of two, the first heads get the slopes for the largest power of two below H, and the rest
    get every other slope for twice that power."""
    power = 2 ** math.floor(math.log2(heads))

    def slopes(n):
        return 2.0 ** (-8 / n * np.arange(1, n + 1))

    return np.concatenate([slopes(power), slopes(2 * power)[::2][:heads - power]]).astype(
        np.float32)


def alibi_bias(c: Any, slopes: Array, position: Array) -> Array:
    """Return the score bias [B, H, 1, S] for keys at these positions [B, 1, 1, S]. It depends on
    the key instead of the distance, because softmax ignores a term common to a query's scores."""
    if c.positions == "alibi":
        return slopes[:, None, None] * position
    # Falcon rounded slopes, positions and their product, and scaled them with the scores. We round
    # explicitly because in bfloat16 a compiler may skip a rounding between two operations.
    rounded = _to_bfloat16(_to_bfloat16(slopes[:, None, None]) * _to_bfloat16(position))
    return rounded * c.head_dim**-0.5


def _to_bfloat16(x):
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def relative_rows(c: Any) -> int:
    """Return J, the number of learned biases per head, one for each kind of distance."""
    if c.relative == "grid":
        return (2 * c.side - 1) ** 2 + 3
    return c.relative_buckets


def relative_ids(c: Any, query: Token, key: Token) -> Array:
    """Return the learned bias's index [1, T, S] for each query and key, the same in all rows."""
    query, key = query.slot[:1], key.slot[:1]
    return (patch_ids if c.relative == "grid" else _bucket_ids)(c, query, key)


def _bucket_ids(c, query, key):
    """Return each pair's bucket, as in T5: there is one for each small distance, and logarithmic
    buckets for larger ones. If tokens see in both directions, half are for later keys."""
    far, half = key - query, c.relative_buckets // (1 if c.causal else 2)
    exact, steps = half // 2, np.arange(c.relative_distance)
    ratio = np.log(np.maximum(steps, 1).astype(np.float32) / np.float32(exact))
    scaled = ratio / np.float32(math.log(c.relative_distance / exact)) * np.float32(half - exact)
    bucket = np.where(steps < exact, steps, np.minimum(exact + scaled.astype(int), half - 1))
    bucket = np.append(bucket, half - 1)
    begins = np.searchsorted(bucket, np.arange(1, half))    # each bucket's smallest distance
    distance = jnp.maximum(-far, 0) if c.causal else jnp.abs(far)
    # The CPU compiler of jax 0.10 fails on a Python sum of len(begins) terms.
    ids = jnp.sum(distance[..., None] >= jnp.asarray(begins), -1, dtype=jnp.int32)
    return ids if c.causal else ids + jnp.where(far > 0, half, 0)


def patch_ids(c: Any, query: Any, key: Any) -> Any:
    """Return BEiT's index for each pair of slots: one for each distance in rows and columns of
    patches, and three for the class token (slot 0): from it, to it, and with itself."""
    ids, last = grid_ids(query - 1, key - 1, c.side), relative_rows(c) - 1
    ids = jnp.where(key == 0, last - 1, ids)
    return jnp.where(query == 0, jnp.where(key == 0, last, last - 2), ids)


def grid_ids(query: Any, key: Any, side: int) -> Any:
    """Return the index of the distance in rows and columns between two of side * side patches."""
    (i, j), (k, m) = (divmod(patch, side) for patch in (query, key))
    return (i - k + side - 1) * (2 * side - 1) + j - m + side - 1


def relative_bias(c: Any, table: Array, ids: Array) -> Array:
    """Return the score bias [1, H, T, S] from a table [J, H] and ids [1, T, S]. We multiply by
    one-hot rows, because a lookup's gradient would add up all scores one by one."""
    chosen = jax.nn.one_hot(ids, table.shape[0])        # float32: CPUs have no bfloat16 product
    return jnp.einsum("btsj,jh->bhts", chosen, table.astype(jnp.float32))


def counted(flags: Array, slots: Array) -> Array:
    """Return the positions, from 0, of the tokens in these slots, counting only flagged tokens; -1
    for tokens without a flag. `flags` [B, T] covers the whole sequence."""
    position = jnp.where(flags, jnp.cumsum(flags, 1), 0) - 1
    return jnp.take_along_axis(position, slots, 1)


def waves(rows: int, rates: np.ndarray) -> np.ndarray:
    """Return the sines of each position times the rates, then the cosines."""
    angle = np.arange(rows)[:, None] * rates
    return np.concatenate([np.sin(angle), np.cos(angle)], 1)


def sinusoids(rows: int, width: int) -> np.ndarray:
    """Return a table [rows, width] of positions' sines (even columns) and cosines (odd columns)."""
    angle = np.arange(rows)[:, None] * plain_rates(width, 10000.0)
    table = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(rows, -1)
    return table[:, :width].astype(np.float32)


# -------------------------------------------------------------------------------------------
# Scalings of rotary rates that the plain decoder lacks

def _dynamic(dim, theta, known, length):
    """Use a larger base for sequences longer than the trained length."""
    factor, trained = known["factor"], known["original_max_position_embeddings"]
    grown = factor * max(length, trained) / trained - (factor - 1)
    return plain_rates(dim, theta * grown ** (dim / max(dim - 2, 1)))


def _yarn(dim, theta, known, length):
    """Scale the rates as llama3 does, but blend by a linear ramp over the pairs' indices."""
    trained = known["original_max_position_embeddings"]

    def pair(turns):        # the index of the pair that makes this many turns in the trained length
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(known.get("beta_fast") or 32), pair(known.get("beta_slow") or 1)
    if known.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    scaled = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return plain_rates(dim, theta) * (1 - scaled + scaled / known["factor"])


def _longrope(dim, theta, known, length):
    """Divide each pair's rate by its factor in short_factor or long_factor, chosen by length."""
    is_long = length > known["original_max_position_embeddings"]
    factors = known[name := "long_factor" if is_long else "short_factor"]
    if len(factors) != dim // 2:
        raise ValueError(f"{name} has {len(factors)} numbers for {dim // 2} pairs")
    return plain_rates(dim, theta) / np.array(factors)


def mscale(factor: float, by: float) -> float:
    """Return the factor by which yarn and DeepSeek's attention sharpen scores."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _sharpens(known):
    """Return the factor on sine and cosine in yarn and longrope."""
    factor, by, by_all = known.get("factor", 1), known.get("mscale"), known.get("mscale_all_dim")
    if (given := known.get("attention_factor")) is not None:
        return given
    if known["rope_type"] == "longrope":
        trained = known["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return mscale(factor, by) / mscale(factor, by_all) if by and by_all else mscale(factor, 1.0)


def _longer(known, length):
    return max(length, int(known["factor"] * known["original_max_position_embeddings"]))


SCALINGS.update({"dynamic": Scaling(_dynamic, positions=_longer),
                 "yarn": Scaling(_yarn, _sharpens), "longrope": Scaling(_longrope, _sharpens)})
