"""Products of tokens with the weights of their experts, without dropping any token.

    tokens       a b c d           sort by expert      [ a c | b | d ]      groups of rows
    experts of   0 1 0 2      ->   and multiply each   w[0] w[1] w[2]
    each                           group with its own

R rows, D model, F feed-forward, E experts of this device.
"""

import functools
import math
from typing import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from zigzag.core.mesh import ambient, mark_varying, platform, zeros_of
from zigzag.parallel.products import Adapted


def mixture(x: Array, chosen: Array, shares: Array, into: Sequence[Array],
            between: Callable, back: Array, usual: int) -> Array:
    """Rows x [R, D] through the experts that they have chosen [R, K] (E where it is none of these),
    summed by shares [R, K]: columns `into`, each [E, D, F], then between(...), then rows `back`
    [E, F, D]. About `usual` of the choices are of experts here."""
    R, K = chosen.shape
    flat = chosen.reshape(-1)
    # Sorted stably. Those of others' experts come last: they are in no group, and a product may
    # leave anything in their place (zeros on CPU, what was there on TPU).
    order = jnp.argsort(flat)
    counts = (flat == jnp.arange(back.shape[0])[:, None]).sum(-1, dtype=jnp.int32)
    ours = (jnp.arange(R * K) < counts.sum())[:, None]

    multiply = functools.partial(grouped_product, counts=counts, usual=usual)

    def product(x, w):
        is_adapted = isinstance(w, Adapted)
        y = multiply(x, w.w) + multiply(product(x, w.a), w.b) if is_adapted else multiply(x, w)
        return checkpoint_name(y, "product")

    rows = jnp.where(ours, x[order // K], 0)
    out = jnp.where(ours, product(between(*[product(rows, w) for w in into]), back), 0)
    out = out[jnp.argsort(order)].reshape(R, K, -1)
    return (out * shares[..., None]).sum(1)


def grouped_product(x: Array, w: Array, counts: Array, usual: int) -> Array:
    """Rows x [R, D], sorted into groups of so many, times the weights [E, D, F] of their group."""
    x, w, counts = mark_varying((x, w, counts), x, w)
    sizes, manual = ambient()
    if platform() in ("", "tpu") or not (manual or math.prod(sizes.values()) == 1):
        return lax.ragged_dot(x, w, counts)     # (or a compiler splits the rows)
    return _by_blocks(x, w, counts, usual)


def _blocks(counts, rows, usual):
    """The size of blocks of rows, each of one group; and of each block [n] the group, its first
    row, and how many rows are its own. (There may be more blocks than are needed: none is.)"""
    E = len(counts)
    size = 1 << min(2048, max(8, usual // (4 * E))).bit_length() - 1
    needed, ends = -(-counts // size), jnp.cumsum(counts)
    number, last = jnp.arange(-(-rows // size) + E), jnp.cumsum(needed)
    group = jnp.minimum((number[:, None] >= last).sum(1), E - 1)
    first = (ends - counts)[group] + (number - (last - needed)[group]) * size
    own = jnp.where(number < last[-1], jnp.minimum(ends[group] - first, size), 0)
    return size, (group, first, own)


def _loop(size, blocks, make, put, start, *rows):
    """What put(all, group, first, made) makes of made = make(group, *the block's rows)."""
    rows = [jnp.pad(a, ((0, size), (0, 0))) for a in rows]

    def turn(out, block):
        group, first, count = block

        def work():
            own = (jnp.arange(size) < count)[:, None]
            return make(group, *[jnp.where(own, lax.dynamic_slice_in_dim(a, first, size), 0)
                                 for a in rows])

        with jax.named_scope("ragged"):         # (hlo.arithmetic looks for it)
            made = lax.cond(count > 0, work, lambda: zeros_of(work))
        return put(out, group, first, made), None

    return lax.scan(turn, mark_varying(start, *rows), blocks)[0]


def _by_blocks(x, w, counts, usual):
    """grouped_product where XLA has none and multiplies every row with every group's weights: a
    loop over blocks of rows of one group. A group of the usual length has about four blocks."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def product(x, w, counts, contract):
        size, blocks = _blocks(counts, len(x), usual)

        def make(group, x):
            return jnp.tensordot(x, w[group], (1, contract))

        def put(out, group, first, made):
            # In order: what a block writes beyond its own rows, the next ones write over.
            return lax.dynamic_update_slice_in_dim(out, made, first, 0)

        start = jnp.zeros((len(x) + size, w.shape[2 - contract]), x.dtype)
        return _loop(size, blocks, make, put, start, x)[:len(x)]

    def backward(saved, cotangent):
        x, w, counts = saved

        def make(group, x, g):
            return jnp.tensordot(x, g, (0, 0), preferred_element_type=wide)

        def put(out, group, first, made):
            return out.at[group].add(made)

        dw = _loop(*_blocks(counts, len(x), usual), make, put, jnp.zeros(w.shape, wide), x,
                   cotangent)
        return product(cotangent, w, counts, 1), dw.astype(w.dtype), None

    def forward(x, w, counts):
        return product(x, w, counts, 0)

    by_blocks = jax.custom_vjp(forward)
    by_blocks.defvjp(lambda *args: (forward(*args), args), backward)
    return by_blocks(x, w, counts)


def own_choices(chosen: Array, shares: Array, own: int) -> tuple[Array, Array]:
    """Choices among this device's experts, numbered from 0; `own` is another device's."""
    chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
    if chosen.shape[1] > own:       # no row has more choices here than there are experts
        first = jnp.argsort(chosen, -1)[:, :own]
        chosen, shares = (jnp.take_along_axis(a, first, -1) for a in (chosen, shares))
    return chosen, shares
