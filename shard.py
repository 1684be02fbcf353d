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
alternation in any function (zigzag/rule/trace.py, zigzag/rule/rule.py) and so decides what is
split. The functions below are the collectives for weights that are split so. Each parallelism is
one section, which can be read alone: data, fsdp, tensor (and the vocabulary), seq, expert, pipe.
Outside a mesh every function here is the plain computation.

B batch, T time, D model, H heads, K kv heads, N per head, F feed-forward, V vocabulary, L layers,
E experts.

Varying types: the page that everything rests on
------------------------------------------------
jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) runs f on every device, each time on that
device's piece of the arguments. A spec says what the piece is: P("data", None) cuts dimension 0 of
a matrix over the axis data, so with data=2 each device has half of the rows; P() gives every device
the whole array. Inside f a device sees only its own pieces; collectives such as lax.psum exchange
numbers.

With check_vma=True (the default) the type of each array in f lists the mesh axes over which its
value may differ from device to device. The array *varies* over these axes:

    def f(w, x):                            # in_specs=(P(), P("data", None))
        varying(w)                          # set()       P(): every device has the same w
        varying(x)                          # {"data"}    every device has different rows
        y = w * x                           # {"data"}    made from an array that varies
        return lax.psum(y.sum(), "data")    # set()       every device gets the same sum

The type does not say which dimension was cut: with P(None, "data") x would have the same type.

Collectives change the type. The types also fix each collective's transpose, which is what autodiff
applies to gradients:

    collective                        type                transpose
    lax.psum                          varying -> not      mark_varying: nothing is sent
    mark_varying (lax.pcast)          not -> varying      psum
    lax.pmean = psum / n              varying -> not      mark_varying, divided by n
    all_gather                        varying -> varying  psum_scatter
    all_gather(to="invarying")        varying -> not      this device's slice
    psum_scatter                      varying -> varying  all_gather

*Gradients* follow from the second row. In w * x above, jax first marks w as varying, because x is.
Nothing is sent in the forward pass; in the backward pass the transpose of that mark is a psum, so
the gradient of w is summed over data, as it must be: each device saw different rows. This is
right, but it happens in every micro-batch. So over data (and fsdp, seq, pipe and expert) the
training step marks the weights itself, outside the function that it differentiates (`bind` in
zigzag/run/plan.py). Then no mark is transposed, the gradients stay local through all micro-batches,
and `sum_gradients` sums them once. Over tensor it leaves the marks to jax. The scale of a norm, for
example, does not vary over tensor, and the stream that it multiplies does, because tensor splits
its time: jax marks the scale, and the transpose of that mark sums its gradient.

*Counting once.* If four devices all hold the same loss, 3.0, a psum makes it 12. Two cases:
- All devices computed 3.0 from the result of an all_gather, so the values are equal, but the type
  says that they vary. lax.pmean turns them into one 3.0 that does not vary. In the backward pass
  each device gets a quarter of the gradient, and the transpose of the all_gather adds up the four.
- All devices computed 3.0 from an array that does not vary. A loss on the first token of each row
  is an example: `whole_time` gives that token to every device of seq. But the step will sum every
  loss over seq. `keep_on_first` leaves 3.0 on the first device and 0.0 on the others, so that the
  sum is 3.0. (`local_sums` in zigzag/run/plan.py calls it for you.)

Who has which part of the time
------------------------------
The time of a row may be cut over seq (in zigzag order), then over tensor (only in the residual
stream, and only if tensor divides T), and for the loss head over pipe. These functions convert:

    shard_time        a batch [B, T], whole            -> this device's part over seq, zigzag order
    own_time          a source or picture, whole       -> this device's part over seq, plain order
    residual_stream   [B, T, D], whole over tensor     -> the stream: this device's part over tensor
    my_time_slice     [B, T, ...], whole over tensor   -> the part that the stream has over tensor
    time_of_block     a part over tensor               -> whole over tensor, as inside a block
    whole_time        the stream                       -> all of the time, in order, on all devices
    sum_over_time     a sum over this device's time    -> the sum over all of the time
    slots_of          tokens of this device            -> where in its row each of them lies
    whole_length      tokens of this device            -> how long their rows are

`columns` goes from the stream to a block and `row` back, so the time is whole over tensor inside a
block. Under pipe, `pipelined_loss` cuts the time for the head by itself.
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
from zigzag.measure.hlo import collectives as collectives  # re-exported
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
    """The size of a mesh axis, or 1 where the compiler splits it (--step jit) or there is none."""
    sizes, manual = ambient()
    return sizes[axis] if axis in manual else 1


def is_split(x: Array) -> bool:
    """Whether devices of tensor have different parts of x. (Along which dimension, the caller must
    know: types do not say.)"""
    return "tensor" in varying(x)


def own_part(x: Array, dim: int) -> Array:
    """This device's part, along one dimension, of an array that is whole on every device of
    tensor."""
    size = x.shape[dim] // _size("tensor")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)


# -------------------------------------------------------------------------------------------
# data
#
#   split       the rows of a batch; every device has all weights
#   collective  one all-reduce of the gradients in each update (lax.psum). With --zero 1 it is a
#               reduce-scatter, and each device updates only its part of the weights. No line here
#               gathers the new weights: the step's out_shardings (zigzag/run/plan.py) ask for whole
#               ones, so the compiler inserts that all-gather
#   bytes       2 (n-1)/n of the gradients in float32, however many micro-batches there are
#   correct     a loss is a sum and a count. The sum over all rows is the sum of the devices' sums,
#               and its gradient is the sum of theirs; sum and gradient are divided once, by the
#               count over all devices
#   more        train.make_step calls it; docs/parallelism.md

def sum_gradients(tree: Any, axes: set[str], specs: Any = None, moments: Any = None) -> Any:
    """Each gradient, summed over `axes`: all axes whose devices saw different rows, layers or time.
    Axes that cut this weight (its spec names them) are left out, because each of their devices
    holds another part of the weight. Over pipe and expert the gradient of a part is complete as it
    is; over fsdp the transpose of `gather` has summed it already. `moments` are the specs of the
    optimizer's state: if they cut a weight over data (--zero 1), each device gets its part of the
    sum."""
    def total(x, spec, part):
        over = axes - spec_axes(spec)
        if "data" in over & spec_axes(part):        # first, so that less is left for the psum
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
#   collective  an all-gather of a layer's weights where the layer uses them, and again in the
#               backward pass; its transpose is a reduce-scatter of their gradients
#   bytes       3 (n-1)/n of the layers' weights, in the compute dtype, in each micro-batch. The
#               embedding and the head are gathered once for all micro-batches
#   correct     the gathered weight is the whole weight. The reduce-scatter adds up the gradients
#               that the devices found for their rows, and each device keeps its part of the sum
#   more        zigzag/parallel/collectives.py (on TPU), zigzag/parallel/remat.py (why no gathered
#               weight is kept for the backward pass)

def gather(weights: Any, specs: Any, sum_dtype: str = "") -> Any:
    """The weights, whole over fsdp. Gradients on their way back are sent and summed in `sum_dtype`
    ('': in the weights' own).

    `layers` calls this in its loop, just before a block uses its weights. (model.loss ->
    loss_of_layers -> layers -> gather.) train.gather_weights gathers all others, once an update."""
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
#   split       F, by the specs of the weights: a block's first weights [D, F] by columns, its last
#               [F, D] by rows; between blocks the time of the residual stream, if n divides T
#   collective  an all-gather over time into a block, a reduce-scatter over time out of it; each is
#               the other's transpose. If n does not divide T, the stream stays whole: no
#               collective into a block, and an all-reduce out of it
#   bytes       8 (n-1)/n X a layer (forward and backward, attention and MLP); X is the bytes of the
#               stream
#   correct     the devices' partial products add up to the whole product. Weights that are whole
#               do not vary over tensor, so autodiff sums their gradients over the parts of the time
#   more        zigzag/rule/rule.py decides which weights are split; docs/parallelism.md
#
# A split weight has a type that varies over tensor, because its spec names tensor; a stream whose
# time is split varies over it too. As the type does not say which dimension is split, only
# functions of this file may make a stream vary over tensor (`row`, `embed_lookup`, `experts` and
# `residual_stream` do), and only `whole_time` may pick positions of it.
#
# A block may have unsplit weights beside split ones: an --override keeps one unsplit, or the rule
# finds that splitting it does not pay. If n divides the number of its columns, `columns` uses only
# this device's share of them, so that all products of a block match. And `row` knows two kinds of
# products: partial sums, which it sums over tensor, and products that every device has whole, which
# count once.

def columns(x: Array, *weights: Array | tuple[Array, Array], dtype: Any = None,
            gathered: bool = False) -> list[Array]:
    """Into a block: the stream x [B, T, D] times each weight [D, F, ...], or (weight, bias [1, F,
    ...]). The products [B, T, F, ...] have all of the time, and this device's columns F where any
    of the weights is split. dtype: of the products (None: x's). gathered=True: x has all of the
    time already, from time_of_block."""
    weights = [w if isinstance(w, tuple) else (w,) for w in weights]
    n, some = _size("tensor"), any(map(is_split, jax.tree.leaves(weights)))
    if is_split(x) and not gathered:
        x = lax.all_gather(x, "tensor", axis=1, tiled=True)
    elif some:              # transpose: one psum of x's gradient, for all the weights together
        x = mark_varying(x, also={"tensor"})
    if some:                # this device's columns of a weight that is whole, beside split ones
        weights = on_columns(
            lambda w: w if is_split(w) or w.shape[1] % n else own_part(w, 1), weights)
    return [named(sum(bias, matmul(x, w, 1, dtype)), "columns") for w, *bias in weights]


def row(*pairs: tuple[Array, Array]) -> Array:
    """Out of a block: row((h, w)) is the product of activations h [B, T, F, ...] and a weight w
    [F, ..., D], as the stream [B, T, D]. Several pairs are added up, for one reduction."""
    return named(_into_stream(*_products(pairs)), "row")


def _products(pairs):
    """The products of (h, w) pairs in two lists: those that are partial sums, to be summed over
    tensor, and those that every device has whole."""
    partial, whole = [], []
    for h, w in pairs:
        if h.shape[2] > w.shape[0]:     # if w has only this device's rows, cut h to match
            h = own_part(h, 2)
        # If h has only this device's columns, cut w to match.
        w = on_rows(lambda w: own_part(w, 0) if h.shape[2] < w.shape[0] else w, w)
        (partial if is_split(w) else whole).append(matmul(h, w, w.ndim - 1))
    return partial, whole


def _into_stream(partial, whole):
    """The residual stream [B, T, D] from products [B, T, D]: `partial` ones are summed over tensor,
    `whole` ones are equal on all its devices and count once. If n divides T, each device gets its
    part of the time."""
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
    """The residual stream, from an array [B, T, D] that is whole on every device of tensor."""
    return _into_stream([], [x])


def whole_time(x: Array, in_parts: bool = False) -> Array:
    """The stream [B, T, D] with all of its time on every device, in order: the only way to pick or
    to pool positions. Its transpose keeps this device's time. in_parts=True: the time was cut by
    own_time, in plain order, and not by shard_time."""
    if is_split(x):
        x = lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")
    if "seq" in varying(x):
        x = lax.all_gather(x, "seq", axis=1, tiled=True, to="invarying")
        x = x if in_parts else x[:, np.argsort(zigzag_order(x.shape[1], _size("seq")))]
    return named(x, "whole_time", always=True)


def time_of_block(x: Array) -> Array:
    """All of the time of an array [B, T, ...] that is cut like the stream. (`columns` does this to
    x.)"""
    return lax.all_gather(x, "tensor", axis=1, tiled=True) if is_split(x) else x


def my_time_slice(tree: Any, x: Array) -> Any:
    """Arrays [B, T, ...] that are whole over tensor, cut to the time that this device has of the
    stream x."""
    def part(a):
        if a.shape[1] != x.shape[1] * _size("tensor"):
            raise ValueError(f"an array with time {a.shape[1]} beside a stream with time "
                             f"{x.shape[1]} on each of {_size('tensor')} devices of tensor")
        return own_part(a, 1)

    return jax.tree.map(part, tree) if is_split(x) else tree


# The vocabulary, over the same axis
#
#   split       the rows V of the embedding, the columns V of the head
#   collective  embedding: a reduce-scatter of the rows that were looked up. Loss: all-reduces of a
#               maximum and two sums, [B, T] each. To choose a token: an all-gather of the logits
#   bytes       4 (n-1)/n X and 3 all-reduces of [B, T] float32 in an update
#   correct     one device has a token's row, and the others add zeros. A softmax over the whole
#               vocabulary needs only the largest logit and the sum of exponentials of each part
#   more        zigzag/parallel/products.py (chunks of the time, to save memory)

def embed_lookup(table: Array, ids: Array) -> Array:
    """The rows of a table [V, D] for ids [B, T], as the stream [B, T, D]."""
    if not is_split(table):
        return residual_stream(table[ids])
    here = ids - lax.axis_index("tensor") * len(table)
    # Ids of which another device has the row give zeros, and the sum over tensor finds it.
    rows = table.at[here].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return _into_stream([rows], [])


def vocab_logits(x: Array, head: Array, vocab_size: int, softcap: float = 0.0) -> Array:
    """float32 logits [B, T, V] with the whole vocabulary on every device, to choose tokens from.
    head is [D, V], or (head, bias [1, V]). Its columns beyond vocab_size are padding and get -1e30.
    softcap bounds the logits by softcap * tanh(logits / softcap); 0: no bound."""
    if is_split(x) and not is_split(jax.tree.leaves(head)[0]):      # the same logits everywhere
        x = lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")
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
    """The sum over tokens of weights [B, T] times the cross-entropy of targets [B, T], for the
    stream x and a head as `vocab_logits` takes it. The time is cut into `chunks` chunks (0: as many
    as memory asks for), and only one chunk's logits are in memory."""
    split_vocab, ids = is_split(jax.tree.leaves(head)[0]), _vocab_ids(head)
    # With a whole head beside a split stream, each device computes all logits of its own time.
    local = is_split(x) and not split_vocab
    if local:
        targets, weights = my_time_slice((targets, weights), x)

    def chunk_loss(head, x, targets, weights):
        if local:
            head, *bias = head if isinstance(head, tuple) else (head,)
            logits = sum(bias, matmul(x, head, 1, jnp.float32))
        else:
            logits, = columns(x, head, dtype=jnp.float32)
        logits = jnp.where(ids < vocab_size, _capped(logits, softcap), -1e30)   # [B, T, V]
        top = lax.stop_gradient(logits.max(-1))                                 # [B, T]
        top = lax.pmax(top, "tensor") if split_vocab else top
        total = jnp.exp(logits - top[..., None]).sum(-1)
        # (An indexed lookup would do; but some compilers send its gradient between devices.)
        target = jnp.where(ids == targets[..., None], logits, 0).sum(-1)
        if split_vocab:
            total, target = lax.psum((total, target), "tensor")
        return jnp.sum((jnp.log(total) + top - target) * weights)

    rows, time = x.shape[:2]
    chunks = chunks or loss_chunks(rows, time, len(ids) * (_size("tensor") if split_vocab else 1))
    if chunks == 1:
        loss = chunk_loss(head, x, targets, weights)
    else:
        n = _size("tensor") if is_split(x) and not local else 1
        loss = chunked_sum(chunk_loss, head, [time_chunks(x, chunks, 1), *(
            time_chunks(a, chunks, n) for a in (targets, weights))])
    return _sum_over_tensor(loss)


def _sum_over_tensor(x):
    return lax.psum(x, "tensor") if is_split(x) else x


# -------------------------------------------------------------------------------------------
# seq
#
#   split       the time of everything, in zigzag order: of 2 n parts, device i has the i-th and the
#               i-th from the end, so that under a causal mask all have the same number of keys to
#               see
#   collective  keys and values go around a ring: n - 1 collective-permutes to the next device. The
#               transpose of a step forward is a step back, which returns their gradients
#   bytes       4 (n-1) K a layer; K is the bytes of a device's keys
#   correct     attention to part of the keys gives a softmax average and the logarithm of its sum
#               of exponentials; with both, the parts combine exactly into attention to all keys.
#               The rest of a layer treats each token by itself
#   more        zigzag/parallel/attention.py; `shard_time` orders a batch; docs/parallelism.md

def zigzag_order(time: int, devices: int) -> np.ndarray:
    """The slots of a row in the order of the devices that hold them. With 8 tokens on 2 devices:
    0 1 6 7 | 2 3 4 5."""
    parts = np.arange(time).reshape(2 * devices, -1)
    return np.concatenate([p for i in range(devices) for p in (parts[i], parts[-1 - i])])


def whole_length(tokens: Array) -> int:
    """The length of whole rows, from this device's tokens [B, T]."""
    return tokens.shape[1] * _size("seq")


def shard_time(batch: dict[str, Array], mesh: Any) -> tuple[dict, dict]:
    """A batch in the order in which seq splits it, and specs that split it. Arrays [B, T, ...]
    go into zigzag order and are split; others (and sources, which have a time of their own) stay
    whole. All devices of seq were given the whole batch: nothing is
    sent."""
    n = mesh.shape["seq"]
    if n == 1 or "source" in batch and "tokens" not in batch:   # (the loss calls own_time)
        return batch, {k: P(None) for k in batch}
    if np.ndim(batch.get("tokens")) != 2:
        raise ConfigError(f"mesh axis seq={n}: a batch of this task has no 'tokens' [B, T] whose "
                          f"time could be split")
    T = batch["tokens"].shape[1]
    if T % (2 * n):
        raise ConfigError(f"mesh axis seq={n}: {T} tokens do not divide into {2 * n} parts, an "
                          f"early and a late one for each device")
    order = zigzag_order(T, n)
    timed = {k for k, x in batch.items() if x.shape[1:2] == (T,) and not k.startswith("source")}
    return ({k: x[:, order] if k in timed else x for k, x in batch.items()},
            {k: P(None, "seq") if k in timed else P(None) for k in batch})


def attend(attention_fn: Callable, q: Array, k: Array, v: Array, mask: Callable,
           query_info: Any, key_info: Any, causal: bool = False, kernel: bool = False) -> Array:
    """Attention of queries q [B, T, H, N] to keys and values k, v [B, S, K, N], whose time may be
    split over seq. Returns [B, T, H, N].

        attention_fn(q, k, v, mask)    attention to some of the keys: a pair of the result
                                       [B, T, H, N] and the log-sum-exp of its scores [B, H, T]
        mask(query_info, key_info)     the mask between some queries and some keys, from what is
                                       known about each (trees of [B, T] and of [B, S])
        causal                         no query sees a later key: half of the work can be skipped
        kernel                         it is plain causal softmax attention, so the device's own
                                       kernel may compute it"""
    known = jax.tree.leaves(query_info)[0].shape[1]
    if q.shape[1] != known:
        raise ValueError(f"{q.shape[1]} queries and query_info of {known} tokens: both need the "
                         f"same time")
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
    # Two labels in the jaxpr, of which nothing is left in the compiled program. "attend" tells
    # make_plan that a loss may be split over seq; a run's header prints what name_of returns.
    return named(named(out, "attend"), attention.name_of(q, k, v, causal, kernel))


def own_time(tree: Any) -> Any:
    """Arrays [B, T, ...] that every device of seq has whole (a source, a picture: what shard_time
    does not split), cut to this device's part of the time, in plain order."""
    def part(a):
        parts = a.reshape(a.shape[0], _size("seq"), -1, *a.shape[2:])
        return lax.dynamic_index_in_dim(parts, lax.axis_index("seq"), 1, keepdims=False)

    return jax.tree.map(part, tree) if _size("seq") > 1 else tree


def sum_over_time(x: Array) -> Array:
    """The sum over all of the time, from each device's sum over its own part."""
    return lax.psum(x, tuple(sorted(varying(x) & {"seq", "tensor"})))


# -------------------------------------------------------------------------------------------
# expert
#
#   split       the rows of a batch, and the experts of every layer
#   collective  an all-to-all of the tokens to the devices of their experts, and one of the results
#               back; the transpose of an all-to-all is an all-to-all. Each device sends every other
#               an array as large as all its tokens, with zeros for tokens that chose no expert of
#               that device. (An all-gather and a reduce-scatter would send as many bytes. But then
#               results would be summed in the compute dtype, and some compilers make a
#               reduce-scatter an all-reduce, which sends twice as much)
#   bytes       4 (n-1) X a layer, zeros included: the price of never dropping a token
#   correct     an expert treats each token by itself, and the sum over a token's experts is the
#               same wherever the experts are
#   more        zigzag/parallel/experts.py (sorting, grouped products); docs/parallelism.md

def experts(x: Array, chosen: Array, shares: Array, into: Sequence[Array],
            between: Callable, back: Array, *beside: tuple[Array, Array]) -> Array:
    """A mixture of experts, as the stream: each token of the stream x [B, T, D] goes through the K
    experts `chosen` [B, T, K], and their outputs, each times its share, are added up: `shares` is
    [B, T, K].
    An expert multiplies by its columns `into` (each [E, D, F]), applies between(...), and
    multiplies by its rows `back` [E, F, D]. `beside`: (h, w) pairs, as `row` takes them, of experts
    that every token visits; they share the reduction over tensor."""
    shares = shares.astype(x.dtype)
    if any(map(is_split, (*into, back))):       # if some are split, take our part of the whole ones
        into = on_columns(lambda w: w if is_split(w) else own_part(w, 2), into)
        back = on_rows(lambda w: w if is_split(w) else own_part(w, 1), back)
    if is_split(x):
        x, chosen, shares = lax.all_gather((x, chosen, shares), "tensor", axis=1, tiled=True)
    elif is_split(back):
        x, shares = mark_varying((x, shares), also={"tensor"})
    B, T, D = x.shape
    n, own, usual = _size("expert"), back.shape[0], chosen.size
    rows, chosen, shares = (a.reshape(B * T, -1) for a in (x, chosen, shares))

    def exchange(a):        # sends a[j] to device j, and receives what device j sends here
        return beside_auto_tensor(lambda a: lax.all_to_all(a, "expert", 0, 0, tiled=True), P())(a)

    def of_all(a):          # [B T, ...] of this device's tokens -> [n B T, ...] of all devices'
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
# Attention within a row, and dropout

def slots_of(tokens: Array) -> Array:
    """The slots [1, T] of this device's tokens [B, T, ...]: where in its row each of them lies."""
    T, n = tokens.shape[1], _size("seq")
    if n == 1:
        return jnp.arange(T)[None]
    order = jnp.asarray(zigzag_order(T * n, n).reshape(n, 1, T))
    return lax.dynamic_index_in_dim(order, lax.axis_index("seq"), 0, keepdims=False)


def self_attend(q: Array, k: Array, v: Array, mask: Callable | None = None,
                scores: Callable | None = None, *, causal: bool = True, heads: int = 0,
                positions: Array | None = None, documents: Array | None = None,
                slots: Array | None = None, kernel: bool = True) -> Array:
    """Softmax attention within each row: q [B, T, H, N], k and v [B, T, K, N] -> [B, T, H, N].

    A query sees the keys of its own document (documents [B, T]; None: a row is one document), and
    of these the ones up to its own slot, or all of them with causal=False. To change that:

        mask(query, key)               False where the query may not see the key. A window of 100
                                       tokens is  query.slot - key.slot < 100
        scores(s, query, key, heads)   new scores, from the scores s [B, H, T, S] of this device's
                                       query heads; heads [H] says which heads these are

    query and key are attention.Token: slot, position and document, arrays [B, T, 1] and [B, 1, S].
    The argument heads is the number of query heads over all devices.

    The fused attention kernels of TPUs and GPUs compute plain causal attention. With `mask`,
    `scores`, `documents` or causal=False, attention is computed from its formula instead."""
    is_usual = causal and mask is None and scores is None and documents is None
    slots = slots_of(q) if slots is None else slots
    positions = slots if positions is None else positions
    documents = jnp.zeros_like(slots) if documents is None else documents
    tokens = attention.Token(*[jnp.broadcast_to(a, q.shape[:2])
                               for a in (slots, positions, documents)])
    return attend(attention.self_attention(mask, scores, causal, heads), q, k, v, attention.both,
                  tokens, tokens, causal, kernel and is_usual)


def repeat_kv(w: Any, heads: int) -> Any:
    """Weights [D, K, N] of keys or values (or the weight and its bias [1, K, N]), for `heads` query
    heads. Where tensor divides the query heads but not the K kv heads, each kv head is repeated
    until tensor divides them, and a device takes the ones that its own queries use. The gradient of
    a kv head is the sum over its copies."""
    return on_columns(lambda w: _repeat_kv(w, heads), w)


def _repeat_kv(w, heads):
    count = math.lcm(w.shape[1], max(_size("tensor"), TENSOR_SIZE.value))
    if is_split(w) or count == w.shape[1] or heads % count:
        return w
    times = count // w.shape[1]
    if _size("tensor") > 1:
        return own_part(jnp.repeat(mark_varying(w, also={"tensor"}), times, 1), 1)
    # (For the rule, which traces the block before there is a mesh; tensor will have TENSOR_SIZE
    # devices. The rule can trace through an einsum, and not through a repeat.)
    return jnp.einsum("dkn,kj->djn", w, jnp.repeat(jnp.eye(w.shape[1], dtype=w.dtype), times, 1))


def dropout(x: Array, rate: float, seeds: Array | None, site: Any, slots: Array | None = None
            ) -> Array:
    """The stream [B, T, D] with a share `rate` of its numbers dropped. Only training batches have
    seeds [B]; without them nothing is dropped. The random bits depend on the row's seed, on `site`
    (a number for this place in the network) and on the slot. They do not depend on the mesh, or on
    how the batch is cut."""
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

# On a single CPU, up to this many layers are unrolled. Measured with 6, 12 and 16 layers: a step is
# 5 to 10% faster than with a loop, and compiling takes 0.5 to 2 seconds longer.
UNROLLED = 16


def layers(block: Callable, weights: Any, x: Any, xs: Any = None, specs: Any = None,
           remat: str = "none", sum_dtype: str = "") -> tuple[Any, Any]:
    """The stream x after a stack of equal layers, and what each layer returned besides, stacked.

    A layer is  x, out = block(w, x, e)  with its weights w and its entry e of xs; `weights` and xs
    have the layers as their leading dimension. Under fsdp each layer's weights are gathered here,
    where they are used, and again in the backward pass, so that no device keeps them. remat says
    what to recompute in the backward pass: none, selective (all but products with weights) or full
    (all but the layer's input); see zigzag/parallel/remat.py."""
    layer_specs = jax.tree.map(lambda s: P(*s[1:]), specs)

    def body(x, layer):
        w, e = layer
        return block(gather(w, layer_specs, sum_dtype), x, e)

    if remat != "none" or layer_specs is not None and _size("fsdp") > 1:
        body = jax.checkpoint(body, prevent_cse=False, policy=POLICIES[remat])

    def step(x, layer):        # the name tells a pipeline to keep a layer's input
        return body(jax.tree.map(lambda a: checkpoint_name(a, "stream"), x), layer)

    # (Why unroll: a loop copies what it keeps for the backward pass into arrays of all layers.)
    few = remat == "none" and jax.tree.leaves((weights, xs))[0].shape[0] <= UNROLLED
    return lax.scan(step, x, (weights, xs), unroll=few and is_single_cpu())


def loss_of_layers(embed: Callable, block: Callable, head: Callable, params: Any, batch: Any,
                   specs: Any, c: Any, all_time: bool = False) -> tuple:
    """pipelined_loss with the layers in params["layers"], and the options of a configuration c."""
    others = {name: w for name, w in params.items() if name != "layers"}
    return pipelined_loss(embed, block, head, others, params["layers"], batch,
                          specs and specs["layers"], c.remat, c.microbatches, c.schedule, c.chunks,
                          c.sum_dtype, all_time)


def _layers_of_stage(block, weights, specs, remat, sum_dtype, is_1f1b=False):
    """The layers of this stage as one function, stack(weights, x, indices, batch), for
    zigzag/parallel/pipeline.py; and the number of layers over all stages."""
    count = jax.tree.leaves(weights)[0].shape[0]
    if is_1f1b and count == 1 < _size("pipe"):
        remat = "none"      # 1F1B recomputes the stage itself, right before its backward pass

    def stack(weights, x, indices, batch):
        x, aux = layers(lambda w, x, i: block(w, x, i, batch), weights, x, indices, specs, remat,
                        sum_dtype)
        return x, jax.tree.map(lambda a: _sum_over_tensor(a.sum(0)), aux)

    return stack, count * _size("pipe")


# -------------------------------------------------------------------------------------------
# pipe
#
#   split       the layers into stages, and a device's rows into microbatches
#   collective  a collective-permute of the activations to the next stage in every tick; its
#               transpose sends their gradients back. After the last stage a reduce-scatter over
#               time, so that all stages share the work of the loss head (an all-reduce where the
#               head needs all of the time, and for the output of an encoder)
#   bytes       2 X ticks / microbatches from stage to stage, and 2 (n-1)/n X for the head's
#               reduce-scatter (both forward and backward)
#   correct     every microbatch goes through all layers, in order. A loss is a sum over
#               microbatches and tokens, so each stage adds its part of it
#   more        zigzag/parallel/pipeline.py (gpipe, interleaved, 1f1b, and what each keeps in
#               memory)

def pipelined_loss(embed: Callable, block: Callable, head: Callable, params: Any, weights: Any,
                   batch: Any, specs: Any = None, remat: str = "none", microbatches: int = 1,
                   schedule: str = "gpipe", chunks: int = 1, sum_dtype: str = "",
                   all_time: bool = False) -> tuple:
    """The sum and the count of a loss with a stack of layers in the middle, and other sums, if any:

        x = embed(params, batch)
        x, aux = block(w, x, i, batch)          layer i, with weights w
        sum, count = head(params, x, batch)     or sum, count, {name: other sum}

    `weights` have the layers as their leading dimension, and `specs` are their specs; `batch` is a
    tree of arrays [B, ...]. aux is None, or a pair: what the layer adds to the loss's sum, and a
    dict of other sums to log, which have no gradient.

    Without pipe, the function computes just these three lines. Under pipe, each stage's head gets a
    part of the time of x and of the batch, and its sum and count are of that part. A head that
    needs all of the time (it calls whole_time) says all_time=True: then every stage computes the
    whole head, and it counts once."""
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
    """x [B, T, D] after a stack of layers, on every stage: an encoder in front of a pipelined_loss
    with the same stages. block(w, x, i, batch) is as there, and its aux is None."""
    stack, total = _layers_of_stage(block, weights, specs, remat, sum_dtype)
    # (When generating, every device has all layers, and no spec names pipe.)
    if _size("pipe") == 1 or specs and "pipe" not in jax.tree.leaves(specs)[0]:
        return stack(weights, x, jnp.arange(total // _size("pipe")), batch)[0]
    stages = pipeline.check_stages(_size("pipe"), total, chunks, specs)
    loss = pipeline.Loss(None, stack, None, _send, batch, jnp.arange(total), stages,
                         math.gcd(microbatches, len(x)))
    return lax.psum(pipeline.forward(loss, x, weights, chunks, remat)[0], "pipe")


def _send(tree, step):
    """Send a tree to the next stage (step 1) or to the one before (-1), in a ring."""
    n = _size("pipe")
    return lax.ppermute(tree, "pipe", [(i, (i + step) % n) for i in range(n)])


def _share_time(x):
    """This stage's part of the time of x [B, T, D]. One stage has x, and the others have zeros. If
    tensor has split the time already, its parts are cut again. If pipe does not divide them, x is
    first made whole over tensor."""
    stages = _size("pipe")
    if is_split(x) and x.shape[1] % stages:
        x = whole_time(x)
    if x.shape[1] % stages:
        raise ConfigError(f"mesh axis pipe={stages}: the {x.shape[1]} tokens of a device do not "
                          f"divide by {stages}")
    return beside_auto_tensor(lambda x: lax.psum_scatter(
        x, "pipe", scatter_dimension=1, tiled=True), P())(x)


def _time_of_stage(tree, x):
    """Arrays [B, T, ...], cut to this stage's part of the time after _share_time(x). Arrays whose
    dimension 1 is not that time (a source, a seed for each row) stay as they are."""
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
