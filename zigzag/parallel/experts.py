"""Multiplying tokens by the weights of their experts. No token is dropped.

    tokens           a b c d      sort by expert,       [ a c | b | d ]     groups of rows
    their experts    0 1 0 2  ->  multiply each group    w[0] w[1] w[2]
                                  by its expert's w

R rows (tokens), K experts per row, D model, F feed-forward, E experts on this device.

`shard.exchange` sends tokens between devices in rounds. The last section says how much room a
round has (`room_of`), how many rounds there are (`rounds_of`), and adds them up (`in_rounds`).
"""

import functools
import math
import sys
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from zigzag.core.mesh import ambient, mark_varying, platform, zeros_of
from zigzag.parallel.products import LoraWeight

# The logged sum that depends on the mesh: only a mesh that splits experts needs several rounds.
ROUNDS = "expert_rounds"


def mixture(x: Array, chosen: Array, shares: Array, up: Sequence[Array], down: Array,
            activation: Callable, expected: int, most: int = sys.maxsize) -> Array:
    """Return the output [R, D] of this device's experts for the rows x [R, D]: the sum over each
    row's experts, weighted by shares [R, K]. `chosen` [R, K] holds the indices of a row's experts,
    or E for an expert on a different device. An expert multiplies by its weights in each of `up`
    ([E, D, F]), applies activation(...), and multiplies by `down` [E, F, D]. `expected` is how
    many choices this device's experts would get if all experts were equally busy, and `most` is
    how many they may get."""
    R, K = chosen.shape
    flat, most = chosen.reshape(-1), min(most, R * K)
    # A stable sort puts choices of other devices' experts last. They belong to no group, and a
    # product may leave anything in their rows (zeros on CPU, whatever was in memory on TPU).
    order = jnp.argsort(flat)
    place, order = jnp.argsort(order), order[:most]
    counts = (flat == jnp.arange(down.shape[0])[:, None]).sum(-1, dtype=jnp.int32)
    ours = (jnp.arange(most) < counts.sum())[:, None]

    multiply = functools.partial(grouped_product, counts=counts, expected=expected)

    def product(x, w):
        is_lora = isinstance(w, LoraWeight)
        y = multiply(x, w.w) + multiply(product(x, w.a), w.b) if is_lora else multiply(x, w)
        return checkpoint_name(y, "product")

    rows = jnp.where(ours, x[order // K], 0)
    out = jnp.where(ours, product(activation(*[product(rows, w) for w in up]), down), 0)
    out = out * shares.reshape(-1)[order, None]
    return out.at[place].get(mode="fill", fill_value=0).reshape(R, K, -1).sum(1)


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
    """Keep only this device's experts, numbered 0 ... own - 1, in (chosen, shares) [..., K].
    Replace every other choice with `own`. In the results, K is at most `own`."""
    chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
    if chosen.shape[-1] > own:      # a row chooses each expert at most once
        first = jnp.argsort(chosen, -1)[..., :own]
        chosen, shares = (jnp.take_along_axis(a, first, -1) for a in (chosen, shares))
    return chosen, shares


# -------------------------------------------------------------------------------------------
# Rounds: how many tokens travel at a time

class Room(NamedTuple):
    """What fits into a round of shard.exchange."""
    tokens: int     # tokens from one device to another in the first round
    choices: int    # choices that a device's experts compute in a round
    safe: int       # tokens from one device to another that fit, whichever experts they chose


def room_of(tokens: int, best: int, own: int, n: int, factor: float) -> Room:
    """Return the room for `factor` times what travels if all experts are equally likely. Each of n
    devices has `own` experts and this many tokens, which choose `best` experts each."""
    most = min(best, own)               # of a token's choices on one device
    room = min(tokens, math.ceil(factor * tokens * visits(best, own, n)))
    choices = min(room * most, max(most, math.ceil(factor * tokens * best / n)))
    return Room(room, n * choices, choices // most)


def visits(best: int, own: int, n: int) -> float:
    """Return the fraction of tokens with at least one of their `best` experts on a given device, if
    all experts are equally likely. Each of n devices has `own` experts."""
    return 1 - math.comb(n * own - own, best) / math.comb(n * own, best)


def rounds_of(room: Room, tokens: Array, choices: Array) -> tuple[Array, Array]:
    """Return how many tokens the first round takes from each device to each other device, and the
    number of rounds. `tokens` is the most that go from one device to another, and `choices` the
    most that a device gets in all."""
    first = jnp.where(choices <= room.choices, room.tokens, room.safe)
    return first, 1 + -(-jnp.maximum(tokens - first, 0) // room.safe)


def in_rounds(first: Callable, further: Callable, rounds: Array, *operands: Any) -> Array:
    """Return first(*operands) + further(1, *operands) + ... + further(rounds - 1, *operands).

    Only the running program knows `rounds`, and autodiff can't go back through such a loop. So the
    gradient is written by hand. The first round keeps what --remat asks for. A further round keeps
    nothing, and the backward pass computes it again."""
    operands = mark_varying(operands, operands)     # its transpose is a sum: do it once, here
    leaves, structure = jax.tree.flatten(operands)

    def traced(fn, *i):
        return jax.make_jaxpr(lambda i, leaves: fn(*i, *jax.tree.unflatten(structure, leaves)))(
            i, leaves)

    # A custom_vjp must not close over arrays. So make all of them arguments: first the arrays with
    # a gradient, then the others.
    one, more = traced(first), traced(further, jnp.int32(1))
    arrays = [*one.consts, *more.consts, *leaves]
    has_gradient = [jnp.issubdtype(a.dtype, jnp.floating) for a in arrays]
    split, end = len(one.consts), len(one.consts) + len(more.consts)

    def evaluate(trained, others, i=None):
        trained, others = iter(trained), iter(others)
        arrays = [next(trained if yes else others) for yes in has_gradient]
        if i is None:
            return jax.core.eval_jaxpr(one.jaxpr, arrays[:split], *arrays[end:])[0]
        return jax.core.eval_jaxpr(more.jaxpr, arrays[split:end], i, *arrays[end:])[0]

    def add_further(rounds, total, term):
        with jax.named_scope("further_rounds"):     # hlo.executed looks for this name
            return lax.while_loop(
                lambda carry: carry[0] < rounds,
                lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], term(carry[0]))),
                (jnp.int32(1), total))[1]

    @jax.custom_vjp
    def total(trained, others, rounds):
        return add_further(rounds, evaluate(trained, others),
                           lambda i: evaluate(trained, others, i))

    def forward(trained, others, rounds):
        y, pull_back = jax.vjp(lambda trained: evaluate(trained, others), trained)
        y = add_further(rounds, y, lambda i: evaluate(trained, others, i))
        return y, (pull_back, trained, others, rounds)

    def backward(saved, cotangent):
        pull_back, trained, others, rounds = saved

        def gradients(i):
            return jax.vjp(lambda trained: evaluate(trained, others, i), trained)[1](cotangent)

        return *add_further(rounds, pull_back(cotangent), gradients), None, None

    total.defvjp(forward, backward)
    return total([a for a, yes in zip(arrays, has_gradient) if yes],
                 [a for a, yes in zip(arrays, has_gradient) if not yes], rounds)
