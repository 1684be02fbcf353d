"""Multiplying tokens by the weights of their experts. No token is dropped.

    tokens           a b c d      sort by expert,       [ a c | b | d ]     groups of rows
    their experts    0 1 0 2  ->  multiply each group    w[0] w[1] w[2]
                                  by its expert's w

R rows (tokens), K experts per row, D model, F feed-forward, E experts on this device.

What to change at scale: `shard.experts` sends every other device an array as large as all of this
device's tokens. So bytes and memory grow with the number of devices, and most rows are zeros when
each token visits only a few devices. Sending only the needed rows takes two exchanges: first the
row count for each device, then the rows (lax.ragged_all_to_all, where the compiler supports it).
But the compiled program must fix the size of the receive buffer. Sized for the worst case, it is as
large as today's array. Sized for a capacity, it drops tokens, and the loss depends on the mesh.
"""

import functools
import math
from typing import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from zigzag.core.mesh import ambient, mark_varying, platform, zeros_of
from zigzag.parallel.products import LoraWeight


def mixture(x: Array, chosen: Array, shares: Array, up: Sequence[Array], activation: Callable,
            down: Array, expected: int) -> Array:
    """Return the output [R, D] of this device's experts for the rows x [R, D]: the sum over each
    row's experts, weighted by shares [R, K]. `chosen` [R, K] holds the indices of a row's experts,
    or E for an expert on a different device. An expert multiplies by its weights in each of `up`
    ([E, D, F]), applies activation(...), and multiplies by `down` [E, F, D]. `expected` is how
    many choices this device's experts would get if all experts were equally busy."""
    R, K = chosen.shape
    flat = chosen.reshape(-1)
    # A stable sort puts choices of other devices' experts last. They belong to no group, and a
    # product may leave anything in their rows (zeros on CPU, whatever was in memory on TPU).
    order = jnp.argsort(flat)
    counts = (flat == jnp.arange(down.shape[0])[:, None]).sum(-1, dtype=jnp.int32)
    ours = (jnp.arange(R * K) < counts.sum())[:, None]

    multiply = functools.partial(grouped_product, counts=counts, expected=expected)

    def product(x, w):
        is_lora = isinstance(w, LoraWeight)
        y = multiply(x, w.w) + multiply(product(x, w.a), w.b) if is_lora else multiply(x, w)
        return checkpoint_name(y, "product")

    rows = jnp.where(ours, x[order // K], 0)
    out = jnp.where(ours, product(activation(*[product(rows, w) for w in up]), down), 0)
    out = out[jnp.argsort(order)].reshape(R, K, -1)
    return (out * shares[..., None]).sum(1)


def grouped_product(x: Array, w: Array, counts: Array, expected: int) -> Array:
    """Multiply rows x [R, D], sorted by expert (counts [E] rows each), by their expert's weights
    [E, D, F] -> [R, F]. Use lax.ragged_dot on a TPU or if a compiler splits the rows; otherwise
    loop over blocks."""
    x, w, counts = mark_varying((x, w, counts), x, w)
    sizes, manual = ambient()
    if platform() in ("", "tpu") or not (manual or math.prod(sizes.values()) == 1):
        return lax.ragged_dot(x, w, counts)
    return _by_blocks(x, w, counts, expected)


def _blocks(counts, rows, expected):
    """Cut the groups of rows into blocks of up to `size` rows, each within a single group. Return
    `size`, a power of two from 8 to 2048 and, above 8, at most a quarter of the expected group; and
    arrays [n] with each block's group, first row and row count. n is static, so it is an upper
    bound: the last blocks may have 0 rows."""
    E = len(counts)
    size = 1 << min(2048, max(8, expected // (4 * E))).bit_length() - 1
    needed, ends = -(-counts // size), jnp.cumsum(counts)
    number, last = jnp.arange(-(-rows // size) + E), jnp.cumsum(needed)
    group = jnp.minimum((number[:, None] >= last).sum(1), E - 1)
    first = (ends - counts)[group] + (number - (last - needed)[group]) * size
    own = jnp.where(number < last[-1], jnp.minimum(ends[group] - first, size), 0)
    return size, (group, first, own)


def _loop(size, blocks, make, put, start, *rows):
    """Loop over the blocks. Each iteration computes made = make(group, *rows of the block) and
    replaces the carry `out` (initially `start`) with put(out, group, first row, made). The slices
    of `rows` always have `size` rows, with zeros for rows outside the block. Empty blocks skip
    `make`."""
    rows = [jnp.pad(a, ((0, size), (0, 0))) for a in rows]

    def turn(out, block):
        group, first, count = block

        def work():
            own = (jnp.arange(size) < count)[:, None]
            return make(group, *[jnp.where(own, lax.dynamic_slice_in_dim(a, first, size), 0)
                                 for a in rows])

        with jax.named_scope("ragged"):         # hlo.executed looks for this name
            made = lax.cond(count > 0, work, lambda: zeros_of(work))
        return put(out, group, first, made), None

    return lax.scan(turn, mark_varying(start, *rows), blocks)[0]


def _by_blocks(x, w, counts, expected):
    """Compute grouped_product on CPU and GPU, where XLA's ragged_dot would multiply rows by the
    weights of every group. This loops over blocks (`_blocks`) instead; each is a dense matmul of up
    to `size` rows with a single group's weights. A group of the expected size has about four.

    The gradient is written by hand. For x it is the same loop with transposed weights; for w, each
    block adds its x^T g [D, F] to its group's entry, in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def product(x, w, counts, contract):
        size, blocks = _blocks(counts, len(x), expected)

        def make(group, x):
            return jnp.tensordot(x, w[group], (1, contract))

        def put(out, group, first, made):
            # A block always writes `size` rows. Blocks run in row order, so later blocks overwrite
            # anything a block writes past its own rows.
            return lax.dynamic_update_slice_in_dim(out, made, first, 0)

        start = jnp.zeros((len(x) + size, w.shape[2 - contract]), x.dtype)
        return _loop(size, blocks, make, put, start, x)[:len(x)]

    def backward(saved, cotangent):
        x, w, counts = saved

        def make(group, x, g):
            return jnp.tensordot(x, g, (0, 0), preferred_element_type=wide)

        def put(out, group, first, made):
            return out.at[group].add(made)

        dw = _loop(*_blocks(counts, len(x), expected), make, put, jnp.zeros(w.shape, wide), x,
                   cotangent)
        return product(cotangent, w, counts, 1), dw.astype(w.dtype), None

    def forward(x, w, counts):
        return product(x, w, counts, 0)

    by_blocks = jax.custom_vjp(forward)
    by_blocks.defvjp(lambda *args: (forward(*args), args), backward)
    return by_blocks(x, w, counts)


def keep_local(chosen: Array, shares: Array, own: int) -> tuple[Array, Array]:
    """Keep only this device's experts, numbered 0 ... own - 1, in (chosen, shares) [R, K]. Replace
    every other choice with `own`. In the results, K is at most `own`."""
    chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
    if chosen.shape[1] > own:       # a row chooses each expert at most once
        first = jnp.argsort(chosen, -1)[:, :own]
        chosen, shares = (jnp.take_along_axis(a, first, -1) for a in (chosen, shares))
    return chosen, shares
