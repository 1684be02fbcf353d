"""How a model is split, and every collective it needs. The fast paths are in zigzag/parallel.

Column, row, column, row: a block's first weight is split by columns, so each device computes its
own part of the hidden layer and sends nothing. The last weight is split by rows, and a single
reduction adds up the partial sums (README has a diagram). A network's weight table defines which
dimension each axis splits. For any other function, `infer_specs` works out the alternation
(zigzag/parallel/rule.py). The functions below contain the collectives for weights split this way.
Each parallelism is a section that you can read on its own: data, fsdp, tensor (and the vocabulary),
seq, expert, pipe. Without a mesh, every function that a model calls is just plain computation.

B batch, T sequence (time), D model, H heads, K kv heads, N per head, F feed-forward, V vocabulary,
L layers, E experts.

`trace_settings()` in zigzag/core/mesh.py holds the settings that change these functions from
outside: overlap, strips, --remat. docs/pytorch.md lists PyTorch's names for all of this.

Varying types: read this first
------------------------------
jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) runs f on every device, on that device's
piece of the arguments. A spec defines the piece: P("data", None) cuts dimension 0 of a matrix over
the axis data, so with data=2, each device has half of the rows; P() gives every device the whole
array. Inside f, a device sees only its own pieces, and exchanges numbers through collectives such
as lax.psum.

With check_vma=True (the default), the type of each array in f lists the mesh axes over which its
value may differ between devices. The array *varies* over these axes:

    def f(w, x):                            # in_specs=(P(), P("data", None))
        varying(w)                          # set()       P(): every device has the same w
        varying(x)                          # {"data"}    every device has different rows
        y = w * x                           # {"data"}    computed from a varying array
        return lax.psum(y.sum(), "data")    # set()       every device gets the same sum

The type doesn't show which dimension was cut: with P(None, "data"), x would have the same type.

Some collectives change the type. The types also determine each collective's transpose, which
autodiff applies to gradients:

    collective                        type                transpose
    lax.psum                          varying -> not      mark_varying: nothing is sent
    mark_varying (lax.pcast)          not -> varying      psum
    lax.pmean = psum / n              varying -> not      mark_varying, divided by n
    all_gather                        varying -> varying  psum_scatter
    ppermute, all_to_all              varying -> varying  the same, in the other direction
    all_gather(to="invarying")        varying -> not      this device's slice
    psum_scatter                      varying -> varying  all_gather

*Gradients.* If the loss varies, each device starts its backward pass with 1, so autodiff takes the
gradient of the sum of all devices' losses. The rest follows from `mark_varying`. In w * x above,
jax first marks w as varying, because x is. This sends nothing in the forward pass. In the backward
pass, the transpose of `mark_varying` is a psum, so the gradient of w is summed over data, as it
must be: each device saw different rows. That is correct, but it would happen in every part of a
batch. So train.make_gradients marks the weights before `jax.value_and_grad`. Autodiff doesn't see
that call, so it doesn't transpose it: gradients stay local through all parts, and `sum_gradients`
sums them once. Without the call, jax sums them too: they are n times too large, with valid types.

The step doesn't mark weights over tensor, because `columns` and `row` use a weight's type to tell
whether it is split. When a whole weight meets a stream whose sequence is split, jax marks the
weight, which sums its gradient there.

*Counting once.* If four devices all hold the same loss, 3.0, a psum turns it into 12. `local_sums`
prevents that, as "Counting once" in docs/parallelism.md explains.
"""

import functools
import math
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, count_of_other_time
from zigzag.core.flags import run_main
from zigzag.core.mesh import (
    BATCH_AXES,
    axis_size,
    cast,
    is_tensor_split,
    keep_on_first,
    local_part,
    mark_varying,
    pmean_over,
    spec_axes,
    split_rows,
    sum_if_tensor_split,
    trace_settings,
    vary_like,
    varying,
    within,
)
from zigzag.core.mesh import make_mesh as make_mesh
from zigzag.parallel import attention, overlap, pipeline, ring_kernel
from zigzag.parallel import experts as dispatch
from zigzag.parallel import layer_strips as strips
from zigzag.parallel.attention import join, look, zigzag_order
from zigzag.parallel.attention import shard_time as shard_time
from zigzag.parallel.collectives import all_gather, all_to_all, psum, psum_scatter, reduce_scatter
from zigzag.parallel.hlo import collectives as collectives  # re-exported
from zigzag.parallel.jaxprs import labelled, named  # labels: `attend` explains them
from zigzag.parallel.pipeline import Options as Options
from zigzag.parallel.pipeline import astype, needs_all_time, pick, skip_idle, time_of_stage
from zigzag.parallel.products import (
    capped,
    chunked_sums,
    dropped,
    linear,
    lookup,
    loss_chunks,
    row_products,
    time_chunks,
)
from zigzag.parallel.products import repeat_kv as repeat_kv
from zigzag.parallel.remat import policy_of, recomputed, scan_layers
from zigzag.parallel.remat import recomputable as recomputable
from zigzag.parallel.rule import explain as explain
from zigzag.parallel.rule import infer_specs as infer_specs
from zigzag.parallel.rule import plan_sharding as plan_sharding

# -------------------------------------------------------------------------------------------
# data: data parallelism
#
#   split       the rows of a batch; every device has all weights
#   collective  one all-reduce of the gradients per update (lax.psum). With --zero 1, it's a
#               reduce-scatter: the optimizer state is split along each weight's largest free
#               dimension (rule.zero1_specs) instead of like the weight, so clipping and the update
#               run on parts. The compiler then gathers the new weights, because plan.make_program
#               asks for whole weights (out_shardings)
#   bytes       2 (n-1)/n of the gradients in float32, no matter how many parts a batch has
#   correct     a loss is a sum and a count. The sum over all rows is the sum of the devices' sums,
#               and its gradient is the sum of the devices' gradients. The step divides both once,
#               by the count over all devices
#   more        train.make_gradients calls the first two functions below; a loss that compares rows
#               calls `all_rows`

def local_sums(sums: tuple, shared: set[str], pools: bool = False) -> tuple:
    """Return a loss's (sum, count, other sums) on this device, adjusted so that a sum over all axes
    except tensor counts every number once; this function itself sums over tensor. Devices along the
    axes `shared` (pipe, seq) have the same rows. If a value doesn't vary over such an axis, all of
    its devices computed the same number: the first one keeps it, and the others use 0. `pools`
    means that the loss calls whole_time, for example to average over a row's tokens, so each device
    along seq may already have the whole row's sum."""
    total, count, others = sums
    if pools and "seq" not in varying(count):       # each device pooled the whole sequence
        total, others = pmean_over((total, others), "seq")
    if "seq" in shared & (varying(total) - varying(count)):
        raise count_of_other_time(axis_size("seq"))
    return keep_on_first(jax.tree.map(sum_if_tensor_split, (total, count, others)), shared)


def sum_gradients(tree: Any, axes: set[str], specs: Any = None, moments: Any = None) -> Any:
    """Sum each gradient over `axes`: all axes except tensor. Skip the axes in a weight's spec,
    because each device along them holds a different part of the weight. Over pipe and expert, a
    part's gradient is already complete; over fsdp, the transpose of `gather` already summed it.
    `moments` are the optimizer state's specs. If they name data (--zero 1), each device gets its
    part of the sum."""
    def summed(x, spec, moment):
        over = axes - spec_axes(spec)
        if "data" in over & spec_axes(moment):      # do this first, to leave less for the psum
            x = reduce_scatter(x, "data", list(moment).index("data"), spec)
            over -= {"data"}
        return lax.psum(x, tuple(sorted(over)))

    specs = jax.tree.map(lambda _: P(), tree) if specs is None else specs
    return jax.tree.map(summed, tree, specs, specs if moments is None else moments)


def all_rows(x: Array, rows: Array) -> tuple[Array, Array | int]:
    """Gather rows for a loss that compares them: from this device's x [B, ...], return all devices'
    rows in order, [n B, ...], and the index of this device's first row. `rows` is any array of the
    batch; its type shows which axes split the rows. The all-gather's transpose is a reduce-scatter,
    which sums a row's gradient over all devices that compared the row. See recipes/contrastive.py
    for an example."""
    axes = tuple(axis for axis in BATCH_AXES if axis in varying(rows))
    if not axes:
        return named(x, "all_rows"), 0
    return lax.all_gather(x, axes, tiled=True), lax.axis_index(axes) * len(x)


# -------------------------------------------------------------------------------------------
# fsdp: fully sharded data parallelism (ZeRO-3)
#
#   split       the rows of a batch, and every large weight along one dimension
#   collective  an all-gather of a layer's weights where the layer uses them, and another in the
#               backward pass; its transpose is a reduce-scatter of their gradients
#   bytes       3 (n-1)/n of the layers' weights, in the compute dtype, per part of a batch. The
#               embedding and the head are gathered once for all parts, but their gradients are
#               scattered in each part
#   correct     the gathered weight is the whole weight. The reduce-scatter adds up the gradients
#               from every device's rows, and each device keeps its part of the sum
#   more        zigzag/parallel/collectives.py (on TPU), zigzag/parallel/remat.py (why the backward
#               pass never keeps a gathered weight)
#
# train.gather_weights gathers the weights outside the layers once per update. For a weight
# w [D/n, F], `gather` is the first of these lines, and autodiff adds the other two:
#
#     whole = lax.all_gather(w, "fsdp", axis=0, tiled=True)           # [D, F], for y = x @ whole
#     dw = x.T @ dy                                                   # [D, F], of these rows
#     dw = lax.psum_scatter(dw, "fsdp", scatter_dimension=0, tiled=True)  # [D/n, F], of all rows

def gather(weights: Any, specs: Any, sum_dtype: str = "") -> Any:
    """Gather the weights so that they're whole over fsdp. The backward pass sends and sums
    gradients in `sum_dtype` ('': the weights' own dtype)."""
    if specs is None or axis_size("fsdp") == 1:
        return weights

    def whole(w, spec):
        return w if "fsdp" not in spec else all_gather(
            w, "fsdp", list(spec).index("fsdp"), spec, sum_dtype)

    return jax.tree.map(whole, weights, specs)


def layers(block: Callable, weights: Any, x: Any, xs: Any = None, specs: Any = None,
           options: Any = Options()) -> tuple[Any, Any]:
    """Run a stack of identical layers. Return the stream x and the layers' other outputs, stacked.

    A layer is  x, out = block(w, x, e)  with its weights w and its entry e of xs; layers are the
    leading dimension of `weights` and xs. With fsdp, each layer gathers its weights here, where it
    uses them, and again in the backward pass, so no device keeps them. options.remat is what to
    recompute in the backward pass: none, selective (everything but matmuls with weights), full
    (everything but the layer's input), or another value listed in zigzag/parallel/remat.py."""
    layer_specs = jax.tree.map(lambda s: P(*s[1:]), specs)
    gathers = specs is not None and axis_size("fsdp") > 1

    def body(x, layer):
        w, e = layer
        return block(gather(w, layer_specs, options.sum_dtype), x, e)

    return scan_layers(body, x, (weights, xs), options.remat, gathers)


# -------------------------------------------------------------------------------------------
# tensor: tensor parallelism, with sequence parallelism between blocks
#
#   split       F, by the weights' specs: a block's first weights [D, F] by columns, its last
#               [F, D] by rows. Between blocks, the residual stream's sequence if n divides T. (In
#               this section, a block is attention or the MLP: half a layer)
#   collective  an all-gather along T into a block, a reduce-scatter along T out of it; each is the
#               other's transpose. If n doesn't divide T, the stream stays whole: no collective
#               into a block, an all-reduce out of it. On a TPU, each strip of rows has its own.
#               --overlap sends parts instead, while multiplying other parts
#   bytes       8 (n-1)/n X per layer (forward and backward, attention and MLP); here and below, X
#               is the stream's size in bytes for one part of a batch
#   correct     the devices' partial products add up to the full product. Whole weights don't vary
#               over tensor, so autodiff sums their gradients over the parts of the sequence
#   more        the weight table defines which weights are split; zigzag/parallel/products.py
#               (adapters, repeat_kv), overlap.py, layer_strips.py
#
# If both weights are split and n divides T, the two functions below come down to three lines, for
# a single column weight w_up and a single row weight w_down:
#
#     x = lax.all_gather(x, "tensor", axis=1, tiled=True)                 # [B, T/n, D] -> [B, T, D]
#     h = activation(x @ w_up)                                            # [B, T, F/n]
#     y = lax.psum_scatter(h @ w_down, "tensor", scatter_dimension=1, tiled=True)     # [B, T/n, D]
#
# A split weight varies over tensor, and so does a stream whose sequence is split. The type doesn't
# show which dimension is split. So only functions in this file may make a stream vary over tensor
# (`row`, `embed_lookup`, `experts`, `residual_stream`), and only `whole_time` may pick positions.

@labelled
def columns(x: Array, *weights: Array | tuple[Array, Array], dtype: Any = None,
            gathered: bool = False) -> list[Array]:
    """Enter a block: multiply the stream x [B, T, D] by each weight [D, F, ...], or (weight, bias
    [1, F, ...]). The products [B, T, F, ...] cover the whole sequence, but only this device's
    columns F if any of the weights is split. `dtype` is the products' dtype (None: x's).
    gathered=True: the caller has already gathered x's sequence with time_of_block."""
    split = any(map(is_tensor_split, jax.tree.leaves(weights)))
    if is_tensor_split(x) and not gathered:
        if split and overlap.is_on(x):          # do the same, one part of T at a time
            return overlap.gathered(lambda weights, x: [linear(x, w, dtype) for w in weights],
                                    weights, x)
        x = lax.all_gather(x, "tensor", axis=1, tiled=True)     # transpose: a reduce-scatter
    elif split:
        x = mark_varying(x, also={"tensor"})    # transpose: a single psum for all the weights
    return [linear(x, w, dtype) for w in weights]


@labelled
def row(*pairs: tuple[Array, Array]) -> Array:
    """Leave a block: row((h, w)) multiplies activations h [B, T, F, ...] by a weight w [F, ..., D],
    and returns the stream [B, T, D]. The products of several pairs share a single reduction."""
    hs, weights = zip(*pairs)
    if all(map(is_tensor_split, weights)) and overlap.is_on(hs[0], axis_size("tensor")):
        return checkpoint_name(overlap.scattered(
            lambda weights, hs: sum(row_products(zip(hs, weights))[0]), weights, hs), "stream")
    return into_stream(*row_products(pairs))


def into_stream(partial: Sequence[Array], whole: Sequence[Array] = ()) -> Array:
    """Turn products [B, T, D] into the stream. Add up the `partial` sums over tensor. The `whole`
    products are equal on all devices along tensor, so count them once."""
    if not partial:
        return residual_stream(sum(whole))
    y = sum(partial)
    if y.shape[1] % axis_size("tensor") == 0:
        y = lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)  # [B, T/n, D]
    else:
        y = lax.psum(y, "tensor")                                           # [B, T, D]
    y = checkpoint_name(y, "stream")
    return y + residual_stream(sum(whole)) if whole else y


# The vocabulary, over the same axis
#
#   split       V, in the embedding [V, D] and the head [D, V]
#   collective  embedding: a reduce-scatter of the looked-up vectors. Loss: an all-gather of the
#               stream into the head, and all-reduces of a maximum and two sums, [B, T] each.
#               Sampling: an all-gather of the logits
#   bytes       4 (n-1)/n X and 3 all-reduces of [B, T] float32 per part of a batch
#   correct     one device has a token's vector, and the others add zeros. A softmax over the whole
#               vocabulary needs only each part's largest logit and sum of exponentials
#   more        zigzag/parallel/products.py (chunks of the sequence, to save memory)

def embed_lookup(table: Array, ids: Array) -> Array:
    """Look up the vectors of ids [B, T] in a table [V, D], and return the stream [B, T, D]."""
    if not is_tensor_split(table):
        return residual_stream(lookup(table, ids))
    # An id whose vector is on another device yields zeros. The sum over tensor adds the vector.
    here = ids - lax.axis_index("tensor") * len(table)
    return into_stream([lookup(table, here, mode="fill", fill_value=0,
                               wrap_negative_indices=False)])


def vocab_logits(x: Array, head: Array, vocab_size: int, softcap: float = 0.0) -> Array:
    """Return float32 logits [B, T, V] over the whole vocabulary on every device, to choose tokens
    from. head is [D, V] or (head, bias [1, V]). Its columns past vocab_size are padding and get
    -1e30. softcap bounds the logits: softcap * tanh(logits / softcap); 0 means no bound."""
    if is_tensor_split(x) and not is_tensor_split(jax.tree.leaves(head)[0]):
        x = lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")     # the same logits
    logits = capped(*columns(x, head, dtype=jnp.float32), softcap)
    logits = jnp.where(_vocab_ids(head) < vocab_size, logits, -1e30)
    return lax.all_gather(logits, "tensor", axis=2, tiled=True,
                          to="invarying") if is_tensor_split(jax.tree.leaves(head)[0]) else logits


def _vocab_ids(head):
    head = jax.tree.leaves(head)[0]
    first = lax.axis_index("tensor") * head.shape[1] if is_tensor_split(head) else 0
    return first + jnp.arange(head.shape[1])


def cross_entropy(logits: Array, vocab_ids: Array, targets: Array, weights: Array,
                  split_vocab: bool) -> tuple[Array, Array]:
    """Return the sum over tokens of weights [B, T] times the cross-entropy of targets [B, T], and
    the total weight of the targets that are the argmax. The logits [B, T, V/n] are this device's,
    for the ids `vocab_ids` [V/n]."""
    top = lax.stop_gradient(logits.max(-1))                                     # [B, T]
    top = lax.pmax(top, "tensor") if split_vocab else top
    exp_sum = jnp.exp(logits - top[..., None]).sum(-1)                          # [B, T]
    # If this were an indexed lookup, some compilers would send its gradient between devices.
    target = jnp.where(vocab_ids == targets[..., None], logits, 0).sum(-1)      # [B, T]
    if split_vocab:
        exp_sum, target = lax.psum((exp_sum, target), "tensor")
    hits = jnp.sum(jnp.where(target >= top, weights, 0))
    return jnp.sum((jnp.log(exp_sum) + top - target) * weights), hits


def token_loss(x: Array, head: Array | tuple[Array, Array], targets: Array, weights: Array,
               vocab_size: int, chunks: int = 0, softcap: float = 0.0) -> tuple[Array, Array]:
    """Return the sum over tokens of weights [B, T] times the cross-entropy of targets [B, T], and
    the total weight of the targets that are the argmax. `head` is the same as in `vocab_logits`.
    Cut the stream x into `chunks` chunks of the sequence, so that only one chunk's logits are in
    memory (0: as few chunks as possible with at most 2^25 logits each)."""
    split_vocab, vocab_ids = is_tensor_split(jax.tree.leaves(head)[0]), _vocab_ids(head)
    # With an unsplit head and a split stream, each device computes all logits for its own tokens.
    local = is_tensor_split(x) and not split_vocab
    if local:
        targets, weights = my_time_slice((targets, weights), x)

    def sums_of(head, x, targets, weights):
        if local:
            logits = linear(x, head, jnp.float32)
        else:
            logits, = columns(x, head, dtype=jnp.float32)
        logits = jnp.where(vocab_ids < vocab_size, capped(logits, softcap), -1e30)
        return cross_entropy(logits, vocab_ids, targets, weights, split_vocab)

    vocabulary = len(vocab_ids) * (axis_size("tensor") if split_vocab else 1)
    chunks = chunks or loss_chunks(*x.shape[:2], vocabulary)
    if chunks == 1:
        sums = sums_of(head, x, targets, weights)
    else:
        n = axis_size("tensor") if is_tensor_split(x) and not local else 1
        sums = chunked_sums(sums_of, head, [time_chunks(x, chunks, 1), *(
            time_chunks(a, chunks, n) for a in (targets, weights))])
    return sum_if_tensor_split(sums[0]), sum_if_tensor_split(sums[1])


# -------------------------------------------------------------------------------------------
# Which device has which part of the sequence
#
# A row's sequence may be cut three times: over seq (in zigzag order), then over tensor (only in the
# residual stream, and only if tensor divides T), and over pipe for the loss head. With 8 tokens on
# seq=2,tensor=2, the devices along seq have 0 1 6 7 and 2 3 4 5; between blocks, the two devices
# along tensor that share 0 1 6 7 have 0 1 and 6 7. These functions convert:
#
#     shard_time        a batch [B, T], whole          -> this device's part over seq, zigzag order
#     residual_stream   [B, T, D], whole over tensor   -> the stream: this device's part over tensor
#     my_time_slice     [B, T, ...], whole over tensor -> the part that the stream has over tensor
#     time_of_block     a part over tensor             -> whole over tensor, as inside a block
#     whole_time        the stream                     -> the whole sequence, in order, everywhere
#     sum_over_time     a sum over this device's part  -> the sum over the whole sequence
#     slots_of          this device's tokens           -> each one's index in its row
#
# `columns` goes from the stream into a block and `row` back, so inside a block the sequence is
# whole over tensor. With pipe, `pipelined_loss` cuts the sequence for the head.

def residual_stream(x: Array) -> Array:
    """Turn an array [B, T, D] that every device along tensor has whole into the residual stream."""
    n = axis_size("tensor")
    if n == 1:
        return x
    # x's type may vary even though all devices have the same numbers; pmean fixes the type.
    x = local_part(x, 1) if x.shape[1] % n == 0 else pmean_over(x, "tensor")
    return checkpoint_name(x, "stream")


def my_time_slice(tree: Any, x: Array) -> Any:
    """Cut arrays [B, T, ...] that are whole over tensor to the part of the sequence that this
    device's stream x has."""
    def local_slice(a):
        if a.shape[1] != x.shape[1] * axis_size("tensor"):
            raise ValueError(f"an array of sequence length {a.shape[1]} next to a stream of length "
                             f"{x.shape[1]} on each of {axis_size('tensor')} tensor devices")
        return local_part(a, 1)

    return jax.tree.map(local_slice, tree) if is_tensor_split(x) else tree


def time_of_block(x: Array) -> Array:
    """Gather the whole sequence of an array [B, T, ...] cut like the stream, as `columns` does."""
    return lax.all_gather(x, "tensor", axis=1, tiled=True) if is_tensor_split(x) else x


def whole_time(x: Array, in_parts: bool = False) -> Array:
    """Gather the stream's whole sequence [B, T, D] on every device, in order. This is the only way
    to pick or pool positions. Its transpose keeps this device's part. in_parts=True means that the
    sequence was cut in plain order instead of by shard_time."""
    needs_all_time("whole_time")
    if is_tensor_split(x):
        x = lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")
    if "seq" in varying(x):
        x = lax.all_gather(x, "seq", axis=1, tiled=True, to="invarying")
        x = x if in_parts else x[:, np.argsort(zigzag_order(x.shape[1], axis_size("seq")))]
    return named(x, "whole_time")


def sum_over_time(x: Array) -> Array:
    """Return the sum over the whole sequence, given each device's sum over its own part."""
    needs_all_time("sum_over_time")
    return lax.psum(x, tuple(sorted(varying(x) & {"seq", "tensor"})))


def slots_of(tokens: Array) -> Array:
    """Return the slots [1, T] of this device's tokens [B, T, ...]: their indices in the row."""
    needs_all_time("slots_of")
    T, n = tokens.shape[1], axis_size("seq")
    if n == 1:
        return jnp.arange(T)[None]
    order = jnp.asarray(zigzag_order(T * n, n).reshape(n, 1, T))
    return lax.dynamic_index_in_dim(order, lax.axis_index("seq"), 0, keepdims=False)


# -------------------------------------------------------------------------------------------
# seq: context parallelism, by ring attention
#
#   split       the sequence everywhere, in zigzag order: of 2 n parts, device i has the i-th and
#               the i-th from the end, so with a causal mask all devices see equally many keys
#   collective  keys and values (and each token's slot, position and document) go around a ring in
#               n - 1 collective-permutes. The transpose, a step backward, returns their gradients
#   bytes       4 (n-1) times the bytes of a device's keys, per layer
#   correct     attention to some of the keys yields a softmax average and the logarithm of its sum
#               of exponentials. From these, `join` combines the parts into exact attention over all
#               keys. The rest of a layer treats each token independently
#   more        zigzag/parallel/attention.py, ring_kernel.py; `attend`, below, calls the rings

def _pass_on(keys):
    """Send these keys to the next device in the ring, and return the previous device's keys."""
    n = axis_size("seq")
    return lax.ppermute(keys, "seq", [(i, (i + 1) % n) for i in range(n)])


def ring(attend_to: Callable, queries: tuple, keys: tuple) -> Array:
    """Compute attention [B, T, H, N] in which a query may see any key. Each device keeps its
    queries while all devices' keys pass by. attend_to(queries, keys) is attention to some of the
    keys; zigzag/parallel/attention.py explains it."""
    look_at = recomputed(functools.partial(look, attend_to, queries))

    def turn(state, _):
        keys, result = state
        keys = _pass_on(keys)
        return (keys, join(result, look_at(keys))), None

    (_, result), _ = lax.scan(turn, (keys, look_at(keys)), None, length=axis_size("seq") - 1)
    return result.values.astype(queries[0].dtype)


def causal_ring(attend_to: Callable, queries: tuple, keys: tuple) -> Array:
    """Compute causal ring attention in zigzag order: of 2 n parts of the sequence, device i has
    part i (early) and part 2 n - 1 - i (late), so that all devices have equal work.

    The late queries see all early keys. When device j's keys pass by, the early queries also see
    j's early keys if j < i, and the late queries also see j's late keys if j > i. So every device
    computes two of the four pairs of halves in every turn."""
    me, n = lax.axis_index("seq"), axis_size("seq")

    def halves(tree):
        half = queries[0].shape[1] // 2
        return jax.tree.map(lambda x: x[:, :half], tree), jax.tree.map(lambda x: x[:, half:], tree)

    def select(condition, a, b):
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)

    @recomputed             # saves the keys of each turn, and the results so far
    def look_twice(keys, are_before, of_early, of_late):
        early_keys, late_keys = halves(keys)
        of_late = join(of_late, look(attend_to, late, early_keys))
        seen = look(attend_to, select(are_before, early, late),
                    select(are_before, early_keys, late_keys))
        return (join(of_early, seen._replace(logsum=jnp.where(are_before, seen.logsum, -jnp.inf))),
                join(of_late, seen._replace(logsum=jnp.where(are_before, -jnp.inf, seen.logsum))))

    def turn(state, _):
        keys, whose, *results = state
        keys, whose = _pass_on(keys), (whose - 1) % n
        return (keys, whose, *look_twice(keys, whose < me, *results)), None

    early, late = halves(queries)
    meet = recomputable("attention")(functools.partial(look, attend_to, own=True))
    state = keys, me, meet(early, halves(keys)[0]), meet(late, keys)
    (_, _, of_early, of_late), _ = lax.scan(turn, state, None, length=n - 1)
    return jnp.concatenate([of_early.values, of_late.values], 1).astype(queries[0].dtype)


# -------------------------------------------------------------------------------------------
# Attention within a row, and dropout

def attend(attention_fn: Callable, q: Array, k: Array, v: Array, mask: Callable, query_info: Any,
           key_info: Any, options: attention.AttendOptions = attention.AttendOptions()) -> Array:
    """Compute attention [B, T, H, N] of queries q [B, T, H, N] to keys and values k, v
    [B, S, K, N]. The sequences may be split over seq.

        attention_fn(q, k, v, allowed) attends to some of the keys, and returns the result
                                       [B, T, H, N] and the log-sum-exp of its scores [B, H, T]
        mask(query_info, key_info)     computes `allowed` for some queries and keys, from trees of
                                       arrays that describe them ([B, T] and [B, S])
        options                        whether it's causal, and the options for a kernel"""
    needs_all_time("attend")
    tokens = jax.tree.leaves(query_info)[0].shape[1]
    if q.shape[1] != tokens:
        raise ValueError(f"{q.shape[1]} queries, but query_info has {tokens} tokens")
    queries, keys = (q, query_info), (k, v, key_info)

    def attend_to(queries, keys, own=False):
        (q, query_info), (k, v, key_info) = queries, keys
        return attention_fn(q, k, v, mask(query_info, key_info))

    pattern, by_kernel = options.pattern, attention.kernel_fits(q, k, v, options)
    if "seq" in varying(q):     # generation doesn't split T
        if by_kernel:
            attend_to = ring_kernel.attend_to(pattern)
            queries, keys = (q, pattern.documents), (k, v, pattern.documents)
        out = (causal_ring if options.causal else ring)(attend_to, queries, vary_like(keys, q))
    elif by_kernel:
        out = attention.by_kernel(q, k, v, pattern)
    else:
        out = attention.in_blocks(attend_to, queries, keys, options.causal)
    return named(out, "attend")


def self_attend(q: Array, k: Array, v: Array, mask: Callable | None = None,
                scores: Callable | None = None, *, causal: bool = True, window: int = 0,
                local: Array | None = None, softcap: float = 0.0, heads: int = 0,
                positions: Array | None = None, documents: Array | None = None,
                slots: Array | None = None, kernel: bool = True) -> Array:
    """Compute softmax attention within rows: q [B, T, H, N], k and v [B, T, K, N] -> [B, T, H, N].

    A query sees the keys of its own document (documents [B, T]; None: one document per row) up to
    its own slot, or all of them with causal=False. To change that:

        window=100                     a sliding window: see only the last 100 keys, including the
                                       query's; with local=i % 2 == 0, only in every other layer
        softcap=50.0                   scores s become 50 * tanh(s / 50)
        mask(query, key)               False if the query may not see the key
        scores(s, query, key, heads)   new scores, given the (capped) scores s [B, H, T, S] of this
                                       device's query heads; heads [H] are the heads' indices

    query and key are attention.Token: slot, position and document, arrays [B, T, 1] and [B, 1, S].
    The argument heads is the number of query heads over all devices. A device's attention kernel
    supports all of this except `mask` and `scores`; with those, we compute the plain formula."""
    needs_all_time("self_attend")
    if window and not causal:
        raise ValueError(f"a window of the last {window} keys needs causal=True")
    given = {"a mask": mask, "custom scores": scores, "documents": documents,
             "a window": window or None, "a softcap": softcap or None}
    beyond = [what for what, x in given.items() if x is not None]
    slots = slots_of(q) if slots is None else slots
    info = attention.Token(*[jnp.broadcast_to(a, q.shape[:2]) for a in (
        slots, slots if positions is None else positions,
        jnp.zeros_like(slots) if documents is None else documents)])
    window = window if window < q.shape[1] * axis_size("seq") else 0
    pattern = attention.Pattern(causal, window, local if window else None, softcap,
                            None if documents is None else info.document)
    return attend(attention.self_attention(mask, scores, heads, pattern), q, k, v, attention.both,
                  info, info, attention.AttendOptions(
                      causal, pattern if kernel and not (mask or scores) else None,
                      " and ".join(beyond if causal else [*beyond, "later keys"])))


def dropout(x: Array, rate: float, seeds: Array | None, site: Any, slots: Array | None = None
            ) -> Array:
    """Drop a fraction `rate` of the numbers in the stream [B, T, D]. Only training batches have
    seeds [B]; without them, drop nothing. The random bits depend on the row's seed, `site` (a
    number for this point in the network) and the slot. They don't depend on the mesh or on how the
    batch is cut."""
    if not rate or seeds is None:
        return x
    if slots is None:
        needs_all_time("dropout without slots")
        time = x.shape[1] * (axis_size("tensor") if is_tensor_split(x) else 1)
        slots = slots_of(jax.ShapeDtypeStruct((1, time), jnp.int32))
    return dropped(x, rate, seeds, site, jnp.broadcast_to(my_time_slice(slots, x), x.shape[:2]))


# -------------------------------------------------------------------------------------------
# expert: expert parallelism
#
#   split       the rows of a batch, and the experts of every layer
#   collective  an all-to-all sends tokens to their experts' devices, and another sends the results
#               back; its transpose is an all-to-all. A bucket holds the tokens from one device to
#               another: --expert_room (1.25) times as many as if all experts were equally likely.
#               The devices first count the tokens. If some don't fit, these travel in further
#               rounds, so no token is ever dropped
#   bytes       4 (n-1) r X per layer in one round. r is the fraction of a device's tokens that a
#               bucket has room for: 1.25 / n if each token has one expert, and at most 1
#   correct     an expert treats each token independently, and the sum over a token's experts is the
#               same wherever the experts are. Each token travels in only one round
#   more        zigzag/parallel/experts.py (sorting, grouped products, rounds); docs/parallelism.md

def experts(x: Array, chosen: Array, shares: Array, up: Sequence[Array], activation: Callable,
            down: Array, *beside: tuple[Array, Array]) -> Array:
    """Run a mixture of experts, and return the stream. Each token of x [B, T, D] goes through the
    experts `chosen` [B, T, best]. The result is the sum of their outputs, weighted by `shares` [B,
    T, best]. An expert multiplies by its columns `up` (each [E, D, F]), applies activation(...),
    and multiplies by its rows `down` [E, F, D]. `beside` are (h, w) pairs, like `row`'s, from an
    MLP that every token visits; they share the reduction over tensor."""
    return run_experts(x, chosen, shares, up, activation, down, *beside)[0]


def run_experts(x: Array, chosen: Array, shares: Array, up: Sequence[Array], activation: Callable,
                down: Array, *beside: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return what `experts` returns, and the number of rounds in which tokens traveled (1 if no
    axis splits the experts)."""
    shares = shares.astype(x.dtype)
    if is_tensor_split(x):
        x, chosen, shares = lax.all_gather((x, chosen, shares), "tensor", axis=1, tiled=True)
    elif is_tensor_split(down):
        x, shares = mark_varying((x, shares), also={"tensor"})
    tokens, chosen, shares = (a.reshape(-1, a.shape[-1]) for a in (x, chosen, shares))
    mixture = functools.partial(dispatch.mixture, activation=activation, expected=chosen.size)
    if axis_size("expert") == 1:
        out, rounds = mixture(tokens, chosen, shares, up, down), jnp.float32(1)
    else:
        out, rounds = exchange(mixture, tokens, chosen, shares, up, down)
    partial, whole = row_products(beside)
    (partial if is_tensor_split(down) else whole).append(out.reshape(x.shape))
    return named(into_stream(partial, whole), "experts"), rounds


def exchange(mixture: Callable, tokens: Array, chosen: Array, shares: Array, up: Any, down: Array
             ) -> tuple[Array, Array]:
    """Send tokens [R, D] to their experts' devices. Return the sum of the experts' outputs
    for each token, and the number of rounds. mixture(tokens, chosen, shares, up, down) computes
    this device's experts, whose numbers in `chosen` begin at 0."""
    n, (own, *_), (R, best) = axis_size("expert"), down.shape, chosen.shape
    room = dispatch.room_of(R, best, own, n, trace_settings().expert_room)
    # Count first. All devices must take part in equally many rounds, so they agree on two maximums:
    # the tokens that one device sends another, and the choices that one device computes.
    visits = (chosen // own == jnp.arange(n)[:, None, None]).sum(-1)            # [n, R]
    counts = (visits > 0).sum(-1)                                               # [n]
    largest = jnp.stack([counts.max(), psum(visits.sum(-1), "expert").max()])
    largest = lax.pmax(largest, tuple(sorted(varying(counts) - {"pipe"})))
    of_first, rounds = dispatch.rounds_of(room, *largest)
    order = jnp.argsort(visits == 0)        # [n, R]: each device's tokens come first

    def travel(start, count, size, tokens, shares, up, down):
        """Send the tokens start ... start + count - 1 for each device, in buckets of `size`."""
        place = start + jnp.arange(size)
        is_token = (place < counts[:, None]) & (place < start + count)          # [n, size]
        which = order[:, jnp.minimum(place, R - 1)]
        numbers = chosen[which] - own * jnp.arange(n)[:, None, None]            # [n, size, best]
        numbers = jnp.where(is_token[..., None], numbers, own)
        kept = dispatch.keep_local(numbers, shares[which], own)
        there = [all_to_all(a, "expert") for a in (tokens[which], *kept)]
        out = mixture(*(a.reshape(n * size, -1) for a in there), up, down, most=room.choices)
        back = all_to_all(out.reshape(n, size, -1), "expert")                   # [n, size, D]
        return jnp.zeros(tokens.shape, jnp.float32).at[which].add(back)

    out = dispatch.in_rounds(
        functools.partial(travel, 0, of_first, room.tokens),
        lambda i, *given: travel(of_first + (i - 1) * room.safe, room.safe, room.safe, *given),
        rounds, tokens, shares, up, down)
    return out.astype(tokens.dtype), rounds.astype(jnp.float32)


def router_terms(logits: Array, probs: Array, chosen: Array, weights: Array
                 ) -> tuple[Array, Array, Array]:
    """Return two sums that a router adds to the loss, and how many tokens each expert got, [E]. The
    inputs are its logits and probabilities [B, T, E] and the experts `chosen` [B, T, best].

        balance = E * sum over experts of  visits(e) * probability(e)
        z = sum over tokens of  logsumexp(logits) ** 2

    visits(e) is how many of the row's tokens chose e, divided by `best`, and probability(e) is the
    router's mean probability for e. If all experts are equally busy, balance is the number of
    tokens. Tokens are weighted by `weights` [B, T]. Both terms are sums over rows and tokens, so
    neither the mesh nor --accumulate changes them."""
    (*_, E), weights = logits.shape, my_time_slice(weights, logits)             # [B, T]
    busy = jnp.einsum("btke,bt->be", jax.nn.one_hot(chosen, E), weights) / chosen.shape[-1]
    mass = jnp.einsum("bte,bt->be", probs, weights)                             # [B, E] twice
    total = jnp.maximum(sum_over_time(weights.sum(-1, keepdims=True)), 1e-9)    # [B, 1]
    balance = E * jnp.sum(sum_over_time(busy) * mass / total)
    return balance, jnp.sum(jax.nn.logsumexp(logits, -1) ** 2 * weights), busy.sum(0)


# -------------------------------------------------------------------------------------------
# pipe: pipeline parallelism
#
#   split       the layers into stages, and a device's rows into microbatches
#   collective  a collective-permute of the activations to the next stage in every tick; its
#               transpose sends their gradients back. After the last stage, a reduce-scatter along
#               T, so that all stages share the loss head's work (an all-reduce if the head needs
#               the whole sequence, and for an encoder's output). Every stage stores a part of the
#               embedding and of the head, and gathers them once per update, as over fsdp
#   bytes       2 X ticks / microbatches from stage to stage, 2 (n-1)/n X for the head's
#               reduce-scatter (both forward and backward), 2 (n-1)/n W for embedding and head
#   correct     every microbatch goes through all layers, in order. A loss is a sum over
#               microbatches and tokens, so each stage adds its part
#   more        zigzag/parallel/pipeline.py (interleaved, 1f1b, the timetables)

def gpipe(stack: Callable, weights: Any, x: Array, batch: Any, options: Any) -> tuple[Array, Any]:
    """Return x [B, T, D] after all layers, on the last stage (zeros on the others), and this
    stage's aux for each tick. stack(weights, x, numbers, batch) runs this stage's layers.

        stage 0 |0 1 2 .          stage 0 starts microbatch 1 while stage 1 works on microbatch 0
        stage 1 |. 0 1 2

    The scan carries a single microbatch [b, T, D]: what the previous stage sent in the last tick.
    All stages have x from the embedding, but only stage 0 uses it. Autodiff derives the backward
    pass: the same ticks in reverse, where each stage sends to the one before it."""
    microbatches, stages, me = options.microbatches, axis_size("pipe"), lax.axis_index("pipe")
    own = len(jax.tree.leaves(weights)[0])
    numbers = me * own + jnp.arange(own)            # this stage's layers
    # Keep both calls outside the ticks. The transpose of mark_varying is a sum over stages (for an
    # encoder output in the batch), which a stage would skip in an idle tick. And autodiff adds up
    # the ticks' gradients in the dtype that the ticks read: float32.
    xs, batch = split_rows(x, microbatches), mark_varying(split_rows(batch, microbatches), me)
    wide = cast(weights, "float32")

    def tick(x, t):
        m = t - me                                  # the microbatch at this stage now
        x = jnp.where(me == 0, pick(xs, m), x)      # stage 0 takes a new one

        # Without a checkpoint, every tick would save a copy of the weights. The policy also decides
        # what each layer saves.
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=policy_of(options.remat))
        def work(x):
            return skip_idle((m >= 0) & (m < microbatches), lambda x: stack(
                astype(wide, weights), x, numbers, pick(batch, m)), x)

        x, added = work(x)
        return lax.ppermute(x, "pipe", [(s, (s + 1) % stages) for s in range(stages)]), (x, added)

    start = vary_like(jnp.zeros_like(xs[0]), xs, batch, weights, me)
    _, (out, added) = lax.scan(tick, start, jnp.arange(microbatches + stages - 1))
    return jnp.where(me == stages - 1, out[stages - 1:], 0).reshape(x.shape), added


def share_time(x: Array) -> Array:
    """Return this stage's part of the sequence of x [B, T, D], for the head. The last stage has x
    and the others have zeros, so a reduce-scatter's sum is x. If tensor already split the sequence,
    cut its parts again; if pipe doesn't divide those, gather x over tensor first."""
    stages = axis_size("pipe")
    if is_tensor_split(x) and x.shape[1] % stages:
        x = lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")
    if x.shape[1] % stages:
        raise ConfigError(f"mesh axis pipe={stages}: the {x.shape[1]} tokens on each device do not "
                          f"divide by {stages}")
    return psum_scatter(x, "pipe", 1)


def pipelined_loss(embed: Callable, block: Callable, head: Callable, params: Any, weights: Any,
                   batch: Any, specs: Any = None, options: Any = Options(), *,
                   all_time: bool = False) -> tuple:
    """Return the sum, the count, and any other sums of a loss with a layer stack in the middle:

        x = embed(params, batch)
        x, aux = block(w, x, i, batch)          layer i, with weights w
        sum, count = head(params, x, batch)     or sum, count, {name: other sum}

    Layers are the leading dimension of `weights`, and `specs` are the weights' specs; `batch` is a
    tree of arrays [B, ...] (with 1f1b, none may be computed from weights: a batch gets no
    gradient). aux is None or a pair: what the layer adds to the loss's sum, and a dict of other
    sums to log, which have no gradient. `options` is any record with Options' fields.

    With pipe, each stage's head gets part of the sequence of x and of the batch, and returns that
    part's sum and count. For a head that needs the whole sequence (whole_time, attend, slots_of,
    dropout without slots, a mean over tokens), pass all_time=True: each stage computes it whole."""
    options, head = pipeline.options_of(options), _head_of_stage(head, all_time)

    def forward(params, weights):
        x, aux = through_layers(block, weights, embed(params, batch), batch, specs, options)
        return pipeline.with_aux(head(params, x, batch), aux)

    run = forward
    if options.schedule == "1f1b" and axis_size("pipe") > 1:
        run = pipeline.one_forward_one_backward(pipeline.Parts(
            embed, *_stack_of_stage(block, weights, batch, specs, options), head, batch, forward))
    total, *others = run(params, weights)
    return named(total, "pipelined_loss"), *others


# -------------------------------------------------------------------------------------------
# The parts of a pipelined_loss

def through_layers(block, weights, x, batch, specs, options):
    """Return x after all layers (with pipe: on the last stage, zeros elsewhere), and their aux."""
    stack, options = _stack_of_stage(block, weights, batch, specs, options)
    if axis_size("pipe") == 1:
        return stack(weights, x, jnp.arange(len(jax.tree.leaves(weights)[0])), batch)
    run = pipeline.interleaved if options.chunks > 1 else gpipe
    x, aux = run(stack, weights, x, batch, options)
    return x, jax.tree.map(lambda a: a.sum(0), aux)


def _stack_of_stage(block, weights, batch, specs, options):
    """Return this stage's layers as a `stack`, and options whose microbatches divide the rows."""
    own, stages, of_layers = len(jax.tree.leaves(weights)[0]), axis_size("pipe"), options
    if stages > 1:
        pipeline.check_stages(own * stages, options.chunks, specs)
        rows = len(jax.tree.leaves(batch)[0])
        options = options._replace(microbatches=math.gcd(options.microbatches, rows))
    if options.schedule == "1f1b" and own == options.chunks and stages > 1:
        # 1F1B itself recomputes the stage right before the backward pass.
        of_layers = options._replace(remat="none")

    def stack(weights, x, numbers, batch):
        x, aux = strips.in_strips(lambda block, x: layers(
            block, weights, x, numbers, specs, of_layers), block, x, batch)
        return x, jax.tree.map(lambda a: sum_if_tensor_split(a.sum(0)), aux)

    return stack, options


def _head_of_stage(head, all_time):
    """Wrap the head so that every stage can call it: with x on the last stage, zeros elsewhere."""
    if axis_size("pipe") == 1:
        return head

    def of_stage(params, x, batch):
        if all_time:
            x = psum(x, "pipe")
            sums = keep_on_first(pmean_over(head(params, x, batch), "pipe"), {"pipe"})
        else:
            x = share_time(x)
            with within(part_of_time=True):
                sums = head(params, x, time_of_stage(batch, x))
        return mark_varying(tuple(sums), also={"pipe"})

    return of_stage


if __name__ == "__main__":
    from zigzag.commands import programs

    run_main(programs.show_sharding)
