"""How a model is split over devices, and every collective that it needs.

                 x [B, T, D]          whole on every device of the tensor axis
                   |
       w_up   [D, F | F | F | F]      column: each device makes its own part of F, sends nothing
                   |
          h [B, T, F | F | F | F]     split
                   |
       w_down [F | F | F | F, D]      row: each device has a partial sum of the whole y
                   |
                 y [B, T, D]          whole again, after one all-reduce

Column, row, column, row: two matrix products for one reduction. `infer_specs` finds that
alternation in any function (zigzag/rule/trace.py, zigzag/rule/rule.py): it decides what is split.
The functions below send what that decision needs. Each parallelism is one section, readable alone:
data, fsdp, tensor (and its vocabulary), seq, expert, pipe.

B batch, T time, D model, H heads, K kv heads, N per head, F feed-forward, V vocabulary, L layers,
E experts. Outside a mesh each function is the plain computation.

Varying types: half a page that everything rests on
----------------------------------------------------
In a shard_map with check_vma=True the type of an array says over which mesh axes it may differ
from device to device: it *varies* over them. Nothing about layout, only "may differ".

    def f(w, x):                    # w has the spec P(), x the spec P("data")
        varying(w)                  # set()           every device has the same w
        varying(x)                  # {"data"}        each has its own rows
        y = w * x                   # {"data"}        what meets a varying value varies
        return lax.psum(y.sum(), "data")    # set()   summed over data: the same everywhere

Collectives change types, and their transposes, which autodiff applies to gradients, are fixed by
them:

    collective                        type                transpose
    psum                              varying -> not      mark_varying (no communication)
    pmean: psum divided by n          varying -> not      mark_varying, divided by n
    mark_varying (lax.pcast)          not -> varying      psum
    all_gather                        varying -> varying  psum_scatter
    all_gather(to="invarying")        varying -> not      this device's slice
    psum_scatter                      varying -> varying  all_gather

In the second row lies the rule of gradients: w above does not vary, and where it met x it was
marked as varying (jax does so by itself). So the gradient of w is a psum over data. We do it by
hand for large weights: train.py marks them before it differentiates, so their gradients stay local
through all micro-batches, and sums them once (`sum_gradients`). A norm scale under tensor
parallelism needs nothing: it does not vary over tensor, the time-split stream that it multiplies
does, so autodiff adds up what the devices found for their parts of the time.

A value that all n devices compute alike must be counted once. There are two cases.
- Its type says that it varies, as it was made of gathered parts. Then pmean makes it one value, and
  gives each device 1/n of its gradient; a psum would make both n times too large.
- Its type says that it does not vary, but a sum with values that do is to come: with seq, the loss
  of a first token alone (read with `whole_time`). Then the first device keeps it and the others
  have 0 (`keep_on_first`, called by `local_sums` in zigzag/run/plan.py), and a psum counts it once.
"""

import math
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError
from zigzag.core.flags import run_main
from zigzag.core.mesh import (
    ambient,
    beside_auto_tensor,
    is_single_cpu,
    keep_on_first,
    mark_varying,
    pmean_over,
    spec_axes,
    vary_like,
    varying,
)
from zigzag.core.mesh import make_mesh as make_mesh
from zigzag.measure.hlo import collectives as collectives  # (names as they are: part of this file)
from zigzag.parallel import attention, pipeline
from zigzag.parallel import experts as dispatch
from zigzag.parallel.collectives import reduce_scatter, with_reduce_scatter
from zigzag.parallel.products import (
    chunked_sum,
    loss_chunks,
    matmul,
    on_columns,
    on_rows,
    time_chunks,
)
from zigzag.parallel.remat import POLICIES
from zigzag.rule.jaxprs import named, names_in
from zigzag.rule.rule import TENSOR_SIZE
from zigzag.rule.rule import explain as explain
from zigzag.rule.rule import infer_specs as infer_specs
from zigzag.rule.rule import plan_sharding as plan_sharding


def _size(axis):
    """The size of an axis that is split by hand here, else 1."""
    sizes, manual = ambient()
    return sizes[axis] if axis in manual else 1


def is_split(x: Array) -> bool:
    return "tensor" in varying(x)


def own_part(x: Array, dim: int) -> Array:
    """This device's part of an array that every device of tensor has."""
    size = x.shape[dim] // _size("tensor")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)


# -------------------------------------------------------------------------------------------
# data
#
#   split       the rows of a batch; every device has all weights
#   collective  one all-reduce of the gradients in an update (lax.psum); with --zero 1 a
#               reduce-scatter, as each device updates its part, and an all-gather of the weights
#               (the compiler's, for the places that train.py's step must give back)
#   bytes       2 (n-1)/n of the gradients, float32, however many micro-batches
#   correct     a loss is a sum and a count, and the sum over all rows is the sum of the devices'
#               sums: so is its gradient. Divided once, by the count of all
#   more        train.make_step calls it; README "The parallelisms"

def sum_gradients(tree: Any, axes: set[str], specs: Any = None, moments: Any = None) -> Any:
    """Each leaf summed over `axes` (all over which devices have other rows, layers or time), but
    for those that its spec names: there devices have different parts of it, and fsdp's gather has
    already summed them. Where `moments`, the specs of the optimizer's state, split a leaf over
    data, each device gets its part of the sum."""
    def total(x, spec, part):
        over = axes - spec_axes(spec)
        if "data" in over & spec_axes(part):        # first: what is left to sum is less
            dim = list(part).index("data")
            x = beside_auto_tensor(lambda x: reduce_scatter(x, "data", dim), spec)(x)
            over = over - {"data"}
        return lax.psum(x, tuple(sorted(over)))

    specs = jax.tree.map(lambda _: P(), tree) if specs is None else specs
    return jax.tree.map(total, tree, specs, specs if moments is None else moments)


# -------------------------------------------------------------------------------------------
# fsdp
#
#   split       the rows of a batch, and every large weight along one dimension
#   collective  an all-gather of a layer's weights where it uses them, and again in the backward
#               pass; its transpose is a reduce-scatter of their gradient
#   bytes       3 (n-1)/n of the weights, in the compute dtype, in each micro-batch
#   correct     the gathered weight is the whole weight; the reduce-scatter adds up the gradients
#               that the devices found for their rows, and leaves each its own part
#   more        zigzag/parallel/collectives.py (TPU), zigzag/parallel/remat.py (why no gathered
#               weight is kept)

def gather(weights: Any, specs: Any, sum_dtype: str = "") -> Any:
    """Whole weights of those that are split over fsdp. Their gradients are sent and added up in
    `sum_dtype`, or if that is empty in their own."""
    if specs is None or _size("fsdp") == 1:
        return weights

    def whole(w, spec):
        if "fsdp" not in spec:
            return w
        dim = list(spec).index("fsdp")

        def all_gather(w):
            return lax.all_gather(w, "fsdp", axis=dim, tiled=True)

        return beside_auto_tensor(
            with_reduce_scatter(all_gather, "fsdp", dim, sum_dtype), spec)(w)

    return jax.tree.map(whole, weights, specs)


# -------------------------------------------------------------------------------------------
# tensor, with sequence parallelism
#
#   split       the columns F of weights into a block and the rows F of those out of it, by their
#               specs; between blocks the time of the residual stream, where it divides
#   collective  into a block an all-gather over time, out of it a reduce-scatter over time; each is
#               the other's transpose
#   bytes       8 (n-1)/n X a layer (forward and backward, attention and MLP), X the stream
#   correct     the rows' partial sums add up to the whole product. Weights that are whole do not
#               vary over tensor, so autodiff adds their gradients up over the parts of the time
#   more        zigzag/rule/rule.py decides which weights are split; README "The parallelisms"
#
# Types carry that decision: a weight whose spec names tensor varies over it, a stream whose time is
# split does too. They say whether, not along which dimension: only `columns`, `row` and
# `embed_lookup` may make a stream vary over tensor, and only `whole_time` may pick positions of it.

def columns(x: Array, *weights: Array | tuple[Array, Array], dtype: Any = None,
            gathered: bool = False) -> list[Array]:
    """Into a block: the stream x [B, T, D] times weights [D, F, ...], or pairs of a weight and a
    bias [1, F, ...]. Time is whole in the results, F split where the weights' is. `dtype` is the
    products', if not x's; `gathered` says that x is what time_of_block gave."""
    weights = [w if isinstance(w, tuple) else (w,) for w in weights]
    n, some = _size("tensor"), any(map(is_split, jax.tree.leaves(weights)))
    if is_split(x) and not gathered:
        x = lax.all_gather(x, "tensor", axis=1, tiled=True)
    elif some:              # its transpose: one all-reduce for all the weights
        x = mark_varying(x, also={"tensor"})
    if some:                # of a whole weight beside split ones, this device's columns
        weights = on_columns(
            lambda w: w if is_split(w) or w.shape[1] % n else own_part(w, 1), weights)
    return [named(sum(bias, matmul(x, w, 1, dtype)), "columns") for w, *bias in weights]


def row(*pairs: tuple[Array, Array]) -> Array:
    """Out of a block: the sum of the products of activations [B, T, F, ...] with weights
    [F, ..., D], as the stream [B, T, D]. All of them share one reduction."""
    return named(_into_stream(*_products(pairs)), "row")


def _products(pairs):
    """Those that are partial sums over tensor, and those that every device has whole."""
    partial, whole = [], []
    for h, w in pairs:
        if h.shape[2] > w.shape[0]:         # one of them is split: the other's own part
            h = own_part(h, 2)
        w = on_rows(lambda w: own_part(w, 0) if h.shape[2] < w.shape[0] else w, w)
        (partial if is_split(w) else whole).append(matmul(h, w, w.ndim - 1))
    return partial, whole


def _into_stream(partial, whole):
    """The residual stream of partial sums over tensor, and of what every device has whole."""
    n, total = _size("tensor"), []
    split_time = n > 1 and (partial or whole)[0].shape[1] % n == 0
    if partial:
        y = sum(partial)
        total.append(lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True) if split_time
                     else lax.psum(y, "tensor"))
    if whole:
        y = sum(whole)
        if split_time:
            y = own_part(y, 1)
        elif is_split(y):
            y = lax.pmean(y, "tensor")
        total.append(y)
    y = sum(total)
    return checkpoint_name(y, "stream") if n > 1 else y


def residual_stream(x: Array) -> Array:
    """An array [B, T, D] that every device of tensor has whole, as the residual stream."""
    return _into_stream([], [x])


def whole_time(x: Array, in_parts: bool = False) -> Array:
    """The stream [B, T, D] with all of its time on every device, in order: the only way to pick or
    pool positions. Its transpose keeps this device's time. `in_parts`: it began as own_time's."""
    if is_split(x):
        x = lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")
    if "seq" in varying(x):
        x = lax.all_gather(x, "seq", axis=1, tiled=True, to="invarying")
        x = x if in_parts else x[:, np.argsort(zigzag_order(x.shape[1], _size("seq")))]
    return named(x, "whole_time", always=True)


def time_of_block(x: Array) -> Array:
    """An array [B, T, ...] beside the stream, with all time, as a block has it."""
    return lax.all_gather(x, "tensor", axis=1, tiled=True) if is_split(x) else x


def my_time_slice(tree: Any, x: Array) -> Any:
    """The part of arrays [B, T, ...] whose time this device has in the stream x."""
    def part(a):
        if a.shape[1] != x.shape[1] * _size("tensor"):
            raise ValueError(f"time {a.shape[1]} beside a stream that has {x.shape[1]} on each of "
                             f"{_size('tensor')} devices of tensor")
        return own_part(a, 1)

    return jax.tree.map(part, tree) if is_split(x) else tree


# The vocabulary, over the same axis
#
#   split       the rows V of the table of tokens, the columns V of the head
#   collective  a reduce-scatter of the rows looked up; of the logits a max and two sums, [B, T],
#               or, to choose a token, an all-gather
#   bytes       4 (n-1)/n X and 3 all-reduces of [B, T] float32 in an update
#   correct     a token's row is on one device, zeros on the others; a softmax needs of the others
#               only their largest logit and their sum of exponentials
#   more        zigzag/parallel/products.py (chunks of the time, for memory)

def embed_lookup(table: Array, ids: Array) -> Array:
    """The rows of a table [V, D] for ids [B, T], as the stream [B, T, D]."""
    if not is_split(table):
        return residual_stream(table[ids])
    here = ids - lax.axis_index("tensor") * len(table)      # others' rows are zeros
    rows = table.at[here].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return _into_stream([rows], [])


def vocab_logits(x: Array, head: Array, vocab_size: int, softcap: float = 0.0) -> Array:
    """float32 logits [B, T, V] of a head [D, V], with all of the vocabulary on every device, to
    choose from. Columns of the head beyond vocab_size are padding, which no token has. The head may
    be a pair of it and of a bias [1, V]; a softcap keeps logits between it and its negative."""
    logits = _capped(*columns(x, head, dtype=jnp.float32), softcap)
    logits = jnp.where(_vocab_ids(head) < vocab_size, logits, -1e30)
    return lax.all_gather(logits, "tensor", axis=2, tiled=True,
                          to="invarying") if is_split(jax.tree.leaves(head)[0]) else logits


def _capped(logits, softcap):
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def _vocab_ids(head):
    head = jax.tree.leaves(head)[0]
    first = lax.axis_index("tensor") * head.shape[1] if is_split(head) else 0
    return first + jnp.arange(head.shape[1])


def token_loss(x: Array, head: Array | tuple[Array, Array], targets: Array, weights: Array,
               vocab_size: int, chunks: int = 0, softcap: float = 0.0) -> Array:
    """The sum over tokens of weights [B, T] times the cross-entropy of targets [B, T], for a
    stream x and a head as `vocab_logits` takes it. The logits are computed in so many chunks of the
    time, one in memory at a time (0: as many as memory needs)."""
    split_vocab, ids = is_split(jax.tree.leaves(head)[0]), _vocab_ids(head)
    own_time = is_split(x) and not split_vocab      # each device all logits of its time: no gather
    if own_time:
        targets, weights = my_time_slice((targets, weights), x)

    def chunk_loss(head, x, targets, weights):
        if own_time:
            head, *bias = head if isinstance(head, tuple) else (head,)
            logits = sum(bias, matmul(x, head, 1, jnp.float32))
        else:
            logits, = columns(x, head, dtype=jnp.float32)
        logits = jnp.where(ids < vocab_size, _capped(logits, softcap), -1e30)   # [B, T, V]
        top = lax.stop_gradient(logits.max(-1))                                 # [B, T]
        top = lax.pmax(top, "tensor") if split_vocab else top
        total = jnp.exp(logits - top[..., None]).sum(-1)
        # Not a gather of the target's logit, whose gradient a compiler may send around.
        target = jnp.where(ids == targets[..., None], logits, 0).sum(-1)
        if split_vocab:
            total, target = lax.psum((total, target), "tensor")
        return jnp.sum((jnp.log(total) + top - target) * weights)

    rows, time = x.shape[:2]
    chunks = chunks or loss_chunks(rows, time, len(ids) * (_size("tensor") if split_vocab else 1))
    if chunks == 1:
        loss = chunk_loss(head, x, targets, weights)
    else:
        n = _size("tensor") if is_split(x) and not own_time else 1
        loss = chunked_sum(chunk_loss, head, [time_chunks(x, chunks, 1), *(
            time_chunks(a, chunks, n) for a in (targets, weights))])
    return _sum_over_tensor(loss)


def _sum_over_tensor(x):
    return lax.psum(x, "tensor") if is_split(x) else x


# -------------------------------------------------------------------------------------------
# seq
#
#   split       the time of everything, in zigzag order: device i has the i-th part of 2 n and the
#               i-th from the end, so that all have as many keys to see
#   collective  keys and values go around a ring: n - 1 collective-permutes to the next device. The
#               transpose of a step forward is a step back: their gradients return
#   bytes       4 (n-1) K a layer, K the keys of a device
#   correct     attention to some keys, normalised by itself, and the logarithm of its weights' sum
#               join to attention to all of them; all else in a layer is token by token
#   more        zigzag/parallel/attention.py; `shard_time` orders a batch; README "The parallelisms"

def zigzag_order(time: int, devices: int) -> np.ndarray:
    """The order in which `devices` hold a causal sequence."""
    parts = np.arange(time).reshape(2 * devices, -1)
    return np.concatenate([p for i in range(devices) for p in (parts[i], parts[-1 - i])])


def whole_length(tokens: Array) -> int:
    """How long the rows of tokens [B, T] are, of which seq may have given a device a part."""
    return tokens.shape[1] * _size("seq")


def shard_time(batch: dict[str, Array], mesh: Any) -> tuple[dict, dict]:
    """A batch as seq splits it, and its specs: the time of what has as much of it as the tokens
    (but not of a source, which is another sequence) in zigzag order, with the places that the
    tokens had. The devices of seq have the batch whole: nothing is sent."""
    n = mesh.shape["seq"]
    if n == 1 or "source" in batch and "tokens" not in batch:   # (of which the loss has own_time)
        return batch, {k: P(None) for k in batch}
    if np.ndim(batch.get("tokens")) != 2:
        raise ConfigError(f"mesh axis seq={n}: a batch of this task has no 'tokens' [B, T] whose "
                          f"time could be split")
    B, T = batch["tokens"].shape
    if T % (2 * n):
        raise ConfigError(f"mesh axis seq={n}: {T} tokens do not divide into {2 * n} parts, an "
                          f"early and a late one for each device")
    place = jnp.broadcast_to(jnp.arange(T), (B, T))
    batch, order = {**batch, "places": place}, zigzag_order(T, n)
    timed = {k for k, x in batch.items() if x.shape[1:2] == (T,) and not k.startswith("source")}
    return ({k: x[:, order] if k in timed else x for k, x in batch.items()},
            {k: P(None, "seq") if k in timed else P(None) for k in batch})


def attend(attention_fn: Callable, q: Array, k: Array, v: Array, mask: Callable,
           query_info: Any, key_info: Any, causal: bool = False, kernel: bool = False) -> Array:
    """attention_fn(q, k, v, mask) over whole heads; q [B, T, H, N], k and v [B, S, K, N]. It gives
    [B, T, H, N] and the logarithm of its weights' sum [B, H, T]. The mask is mask(query_info,
    key_info), of what is known of each query and each key (trees of [B, T] and [B, S]). `causal`
    says that no query sees a later key, `kernel` that causal softmax attention is all there is,
    for which a device may have a kernel of its own."""
    known = jax.tree.leaves(query_info)[0].shape[1]
    if q.shape[1] != known:
        raise ValueError(f"queries of {q.shape[1]} tokens beside info of {known}: time must be "
                         f"whole here")
    queries, keys = (q, query_info), (k, v, key_info)
    n = _size("seq")

    def attend_to(queries, keys):
        (q, query_info), (k, v, key_info) = queries, keys
        return attention_fn(q, k, v, mask(query_info, key_info))

    def send_around(keys):
        return lax.ppermute(keys, "seq", [(i, (i + 1) % n) for i in range(n)])

    if "seq" in varying(q):     # (to generate, time is not split)
        ring = attention.causal_ring if causal else attention.full_ring
        out = ring(attend_to, queries, vary_like(keys, q), send_around, n)
    elif kernel and attention.kernel_fits(q, k, v):
        out = attention.by_kernel(q, k, v)
    else:
        out = attention.in_blocks(attend_to, queries, keys, causal)
    # (The second name tells the start of a run what was asked for.)
    return named(named(out, "attend"), attention.name_of(q, k, v, causal, kernel))


def own_time(tree: Any) -> Any:
    """This device's part of the time of arrays [B, T, ...] that every device of seq has whole (a
    source, a picture: not what shard_time splits)."""
    def part(a):
        parts = a.reshape(a.shape[0], _size("seq"), -1, *a.shape[2:])
        return lax.dynamic_index_in_dim(parts, lax.axis_index("seq"), 1, keepdims=False)

    return jax.tree.map(part, tree) if _size("seq") > 1 else tree


def sum_over_time(x: Array) -> Array:
    """What each device has summed over its part of the time, summed over all of it."""
    return lax.psum(x, tuple(sorted(varying(x) & {"seq", "tensor"})))


# -------------------------------------------------------------------------------------------
# expert
#
#   split       the rows of a batch, and the experts of every layer
#   collective  an all-to-all: each token to the devices that have one of its experts; and one back,
#               each device's part of the sum. The transpose of an all-to-all is an all-to-all
#   bytes       4 (n-1) X a layer: there is room for every token on every device, none is dropped
#   correct     an expert computes a token by itself, and the sum over its experts is the same
#               wherever they are
#   more        zigzag/parallel/experts.py (sorting, grouped products); README "The parallelisms"

def experts(x: Array, chosen: Array, shares: Array, into: Sequence[Array],
            between: Callable, back: Array, *beside: tuple[Array, Array]) -> Array:
    """Each token of the stream x [B, T, D] through the experts that it has chosen [B, T, K], into
    the stream: the sum of what they make, by shares [B, T, K]. An expert is columns `into`, each
    [E, D, F], then between(...), then rows `back` [E, F, D]. `beside` are pairs as `row` takes
    them, of what all tokens visit: they share its reduction."""
    shares = shares.astype(x.dtype)
    if any(map(is_split, (*into, back))):       # of a whole weight beside split ones, our part
        into = on_columns(lambda w: w if is_split(w) else own_part(w, 2), into)
        back = on_rows(lambda w: w if is_split(w) else own_part(w, 1), back)
    if is_split(x):
        x, chosen, shares = lax.all_gather((x, chosen, shares), "tensor", axis=1, tiled=True)
    elif is_split(back):
        x, shares = mark_varying((x, shares), also={"tensor"})
    B, T, D = x.shape
    n, own, usual = _size("expert"), back.shape[0], chosen.size
    rows, chosen, shares = (a.reshape(B * T, -1) for a in (x, chosen, shares))

    def exchange(a):        # a[j] to device j; from device j its own
        return beside_auto_tensor(lambda a: lax.all_to_all(a, "expert", 0, 0, tiled=True), P())(a)

    def of_all(a):
        return lax.all_gather(a, "expert", tiled=True)

    if n > 1:
        here = (chosen // own == jnp.arange(n)[:, None, None]).any(-1)          # [n, B T]
        rows = exchange(jnp.where(here[..., None], rows, 0)).reshape(-1, D)     # [n B T, D]
        chosen, shares = of_all(chosen), with_reduce_scatter(of_all, "expert", 0)(shares)
        chosen, shares = dispatch.own_choices(chosen - lax.axis_index("expert") * own, shares, own)
    out = dispatch.mixture(rows, chosen, shares, into, between, back, usual)
    if n > 1:
        out = exchange(out.reshape(n, -1, D)).sum(0, dtype=jnp.float32).astype(x.dtype)
    out = named(out, "experts").reshape(B, T, D)
    partial, whole = _products(beside)
    (partial if is_split(back) else whole).append(out)
    return _into_stream(partial, whole)


# -------------------------------------------------------------------------------------------
# Attention within a row, and dropout: what a block has beside its products

def slots_of(tokens: Array) -> Array:
    """Where in its row each of this device's tokens [B, T, ...] lies: [1, T]."""
    T, n = tokens.shape[1], _size("seq")
    if n == 1:
        return jnp.arange(T)[None]
    order = jnp.asarray(zigzag_order(T * n, n).reshape(n, 1, T))
    return lax.dynamic_index_in_dim(order, lax.axis_index("seq"), 0, keepdims=False)


def self_attend(q: Array, k: Array, v: Array, mask: Callable | None = None,
                scores: Callable | None = None, *, causal: bool = True, heads: int = 0,
                positions: Array | None = None, documents: Array | None = None,
                slots: Array | None = None, kernel: bool = True) -> Array:
    """Softmax attention within each row: q [B, T, H, N], k and v [B, T, K, N] -> q's shape.

    A query sees the keys of its own document (documents [B, T]) up to its own slot; all of them
    where causal is False. mask(query, key) takes some of them away: a window of 100 tokens is
    query.slot - key.slot < 100. scores(s, query, key, heads) changes the scores s [B, H, T, S]:
    of this device's query heads, whose numbers `heads` [H] has (the argument `heads` is how many
    there are on all devices). query and key are attention.Token: slot, position, document, arrays
    [B, T, 1] and [B, 1, S].

    The device's own kernel computes causal attention and nothing else, so it is used only where
    nothing else was asked for."""
    is_usual = causal and mask is None and scores is None and documents is None
    slots = slots_of(q) if slots is None else slots
    positions = slots if positions is None else positions
    documents = jnp.zeros_like(slots) if documents is None else documents
    tokens = attention.Token(*[jnp.broadcast_to(a, q.shape[:2])
                               for a in (slots, positions, documents)])
    return attend(attention.self_attention(mask, scores, causal, heads), q, k, v, attention.both,
                  tokens, tokens, causal, kernel and is_usual)


def repeat_kv(w: Any, heads: int) -> Any:
    """Weights [D, K, N] of keys or values beside `heads` query heads (or a tuple: the weight and
    its bias [1, K, N]). Where tensor divides the query heads but not K, each head is repeated until
    it divides, and a device has only those that its own queries use. Gradients are summed over a
    head's copies and over tensor."""
    return on_columns(lambda w: _repeat_kv(w, heads), w)


def _repeat_kv(w, heads):
    count = math.lcm(w.shape[1], max(_size("tensor"), TENSOR_SIZE.value))
    if is_split(w) or count == w.shape[1] or heads % count:
        return w
    times = count // w.shape[1]
    if _size("tensor") > 1:
        return own_part(jnp.repeat(mark_varying(w, also={"tensor"}), times, 1), 1)
    # Only the rule comes here, when it plans for a mesh of TENSOR_SIZE: it can follow a product.
    return jnp.einsum("dkn,kj->djn", w, jnp.repeat(jnp.eye(w.shape[1], dtype=w.dtype), times, 1))


def dropout(x: Array, rate: float, seeds: Array | None, site: Any, slots: Array | None = None
            ) -> Array:
    """Dropout of a stream [B, T, D] where there are seeds [B]: in training. The bits follow from
    the row's seed, the site in the network and the slot in the row: not from the mesh, nor from how
    the batch was cut."""
    if not rate or seeds is None:
        return x

    def keep(seed, slot):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), site), slot)
        return jax.random.bernoulli(key, 1 - rate, x.shape[-1:])

    if slots is None:
        time = x.shape[1] * (_size("tensor") if is_split(x) else 1)
        slots = slots_of(jax.ShapeDtypeStruct((1, time), jnp.int32))
    slots = jnp.broadcast_to(my_time_slice(slots, x), x.shape[:2])
    kept = jax.vmap(jax.vmap(keep, (None, 0)))(seeds, slots)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


# -------------------------------------------------------------------------------------------
# The stack of layers

# Up to so many layers are no loop on a single CPU: 5 to 10% faster with 6, 12 and 16 layers
# (measured), for half a second to two of compiling.
UNROLLED = 16


def layers(block: Callable, weights: Any, x: Any, xs: Any = None, specs: Any = None,
           remat: str = "none", sum_dtype: str = "") -> tuple[Any, Any]:
    """x through a stack of identical layers: x, out = block(w, x, e) for the weights w of each
    layer, which `weights` have as their leading dimension, and its entry e of xs. Gives the last x
    and all the outs, stacked.

    Under fsdp each layer's weights are gathered here, where they are used, and again in the
    backward pass: no device keeps them. remat: none keeps what the backward pass needs; selective
    keeps the products with weights; full keeps a layer's input alone (zigzag/parallel/remat.py)."""
    layer_specs = jax.tree.map(lambda s: P(*s[1:]), specs)

    def body(x, layer):
        w, e = layer
        return block(gather(w, layer_specs, sum_dtype), x, e)

    if remat != "none" or layer_specs is not None and _size("fsdp") > 1:
        body = jax.checkpoint(body, prevent_cse=False, policy=POLICIES[remat])

    def step(x, layer):        # its input has a name, for a pipeline to keep
        return body(jax.tree.map(lambda a: checkpoint_name(a, "stream"), x), layer)

    # A loop keeps what layers leave for the backward pass in arrays of all layers.
    few = remat == "none" and jax.tree.leaves((weights, xs))[0].shape[0] <= UNROLLED
    return lax.scan(step, x, (weights, xs), unroll=few and is_single_cpu())


def loss_of_layers(embed: Callable, block: Callable, head: Callable, params: Any, batch: Any,
                   specs: Any, c: Any, all_time: bool = False) -> tuple:
    """pipelined_loss with the layers params["layers"], computed as the configuration c says."""
    others = {name: w for name, w in params.items() if name != "layers"}
    return pipelined_loss(embed, block, head, others, params["layers"], batch,
                          specs and specs["layers"], c.remat, c.microbatches, c.schedule, c.chunks,
                          c.sum_dtype, all_time)


def _layers_of_stage(block, weights, specs, remat, sum_dtype, is_1f1b=False):
    """Layers of a stage, as zigzag/parallel/pipeline.py calls them, and how many there are in all
    stages."""
    count = jax.tree.leaves(weights)[0].shape[0]
    if is_1f1b and count == 1 < _size("pipe"):
        remat = "none"      # it goes back right after it went forward: nothing to save

    def stack(weights, x, indices, batch):
        x, aux = layers(lambda w, x, i: block(w, x, i, batch), weights, x, indices, specs, remat,
                        sum_dtype)
        return x, jax.tree.map(lambda a: _sum_over_tensor(a.sum(0)), aux)

    return stack, count * _size("pipe")


# -------------------------------------------------------------------------------------------
# pipe
#
#   split       the layers, and the rows of a device into microbatches that go from stage to stage
#   collective  a collective-permute of the activations to the next stage in every tick; its
#               transpose sends their gradients back. At the end a reduce-scatter over time: the
#               last stage's activations to all stages, which share the loss head (or an all-reduce:
#               an encoder's output, and what a head takes whole_time of)
#   bytes       2 X times ticks / microbatches, and 2 (n-1)/n X
#   correct     a stage applies its layers to every microbatch, in their order; a loss is a sum over
#               microbatches and tokens, so each stage adds its part
#   more        zigzag/parallel/pipeline.py (gpipe, interleaved, 1f1b, and what each keeps in
#               memory)

def pipelined_loss(embed: Callable, block: Callable, head: Callable, params: Any, weights: Any,
                   batch: Any, specs: Any = None, remat: str = "none", microbatches: int = 1,
                   schedule: str = "gpipe", chunks: int = 1, sum_dtype: str = "",
                   all_time: bool = False) -> tuple:
    """A loss with a stack of layers in the middle, as a sum and a count:

        x = embed(params, batch)
        x, aux = block(w, x, i, batch)      for layer i, weights w
        sum, count = head(params, x, batch)     third, if it likes, a dict of other sums

    `weights` have the layers as their leading dimension, `specs` are theirs. `batch` is a tree of
    [B, ...]. aux is None, or a pair: what the layer adds to the sum, and a dict of other sums,
    without gradients, which are then given third. Without pipe it is just that. Under pipe, head is
    given a part of the time of x and of the batch, so that all stages share it: its sum and count
    are of that part. A head that needs all of the time (it calls whole_time) says so by `all_time`:
    every stage then computes all of it."""
    stack, total = _layers_of_stage(block, weights, specs, remat, sum_dtype, schedule == "1f1b")
    if _size("pipe") == 1:
        x, aux = stack(weights, embed(params, batch), jnp.arange(total), batch)
        s, *others = pipeline.with_aux(head(params, x, batch), aux)
        return named(s, "pipelined_loss"), *others

    def shared_head(params, x, batch):
        if all_time:
            x = beside_auto_tensor(lambda x: lax.psum(x, "pipe"), P())(x)
            return keep_on_first(pmean_over(head(params, x, batch), "pipe"), {"pipe"})
        x = _share_time(x)
        batch = _time_of_stage(batch, x)
        if "whole_time" in names_in(head, params, x, batch):
            raise ConfigError(f"mesh axis pipe={_size('pipe')}: the head of this loss calls "
                              f"shard.whole_time, and each stage has a part of the time; give "
                              f"pipelined_loss all_time=True; any loss that is a sum over rows "
                              f"trains on data, fsdp and tensor")
        return head(params, x, batch)

    stages = pipeline.check_stages(_size("pipe"), total, chunks, specs)
    loss = pipeline.Loss(embed, stack, shared_head, _send, batch, jnp.arange(total), stages,
                         math.gcd(microbatches, jax.tree.leaves(batch)[0].shape[0]))
    if schedule == "1f1b":
        return pipeline.one_forward_one_backward(loss, params, weights)
    return pipeline.forward_then_backward(loss, params, weights, chunks, remat)


def pipelined_layers(block: Callable, weights: Any, x: Array, batch: Any, specs: Any = None,
                     remat: str = "none", microbatches: int = 1, chunks: int = 1,
                     sum_dtype: str = "") -> Array:
    """x [B, T, D] through a stack of layers, block(w, x, i, batch) as in pipelined_loss, with no
    aux: an encoder, whose result every stage has. Its stages are those of the loss after it."""
    stack, total = _layers_of_stage(block, weights, specs, remat, sum_dtype)
    if _size("pipe") == 1 or specs and "pipe" not in jax.tree.leaves(specs)[0]:     # (to generate)
        return stack(weights, x, jnp.arange(total // _size("pipe")), batch)[0]
    stages = pipeline.check_stages(_size("pipe"), total, chunks, specs)
    loss = pipeline.Loss(None, stack, None, _send, batch, jnp.arange(total), stages,
                         math.gcd(microbatches, len(x)))
    return lax.psum(pipeline.forward(loss, x, weights, chunks, remat)[0], "pipe")


def _send(tree, step):
    """To the next stage (a step of 1), or the one before (-1); around the end."""
    n = _size("pipe")
    return lax.ppermute(tree, "pipe", [(i, (i + step) % n) for i in range(n)])


def _share_time(x):
    """x [B, T, D] that one stage has, and the others have zeros for: to each its part of the time
    (of that which the device has of tensor's, if it divides)."""
    stages = _size("pipe")
    if is_split(x) and x.shape[1] % stages:
        x = whole_time(x)
    if x.shape[1] % stages:
        raise ConfigError(f"mesh axis pipe={stages}: {x.shape[1]} tokens of a device do not divide "
                          f"by {stages}")
    return beside_auto_tensor(lambda x: lax.psum_scatter(
        x, "pipe", scatter_dimension=1, tiled=True), P())(x)


def _time_of_stage(tree, x):
    """The time of arrays [B, T, ...] that this stage's devices have of a shared x. (Others are
    of another sequence, or of whole rows.)"""
    stages, n = _size("pipe"), _size("tensor") if is_split(x) else 1

    def part(a):
        if a.ndim < 2 or a.shape[1] != x.shape[1] * stages * n:
            return a
        pieces = time_chunks(a, stages, n)
        return lax.dynamic_index_in_dim(pieces, lax.axis_index("pipe"), 0, False)

    return jax.tree.map(part, tree)


if __name__ == "__main__":
    import train

    run_main(train.show_sharding)
