"""The matmuls inside `columns` and `row` of shard.py, and losses summed over chunks of tokens.

    matmul             activations times a weight, or times a weight with a LoRA adapter
    repeat_kv          key and value heads for a tensor axis that doesn't divide them
    lookup             the vectors of ids in a table

On a CPU, `matmul` computes the weights' gradient itself, with the activations x on the left.
Autodiff would put the result's gradient g on the left. XLA on CPU transposes the left operand in
memory first, so every matmul would copy g. On other platforms, `matmul` does this only if the
result has a wider dtype than its operands, as with float32 logits.
"""

import dataclasses
import math
from typing import Any, Callable, Iterable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from zigzag.core.mesh import (
    add_to,
    axis_size,
    is_tensor_split,
    local_part,
    mark_varying,
    platform,
    trace_settings,
    vary_like,
    zeros_of,
)
from zigzag.core.options import without


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWeight:
    """A weight with a LoRA adapter, representing w + a b, with w [F, ..., D, ...], a [F, ..., r]
    and b [r, D, ...]. We never compute the sum: x w + (x a) b costs less, and then the gradients
    of a and b don't require a gradient of w. Expert weights have an extra leading dimension, E."""
    w: Array
    a: Array
    b: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape

    @property
    def ndim(self) -> int:
        return self.w.ndim


def merged(w: Array | LoraWeight) -> Array:
    """Return the weight as a single array: w, or w + a b if it has an adapter."""
    return w.w + jnp.tensordot(w.a, w.b, 1) if isinstance(w, LoraWeight) else w


def matmul(x: Array, w: Array | LoraWeight, contract: int = 1, dtype: Any = None) -> Array:
    """Multiply x [B, T, F, ...] by w [F, ..., D] -> [B, T, D]: contract the last `contract`
    dimensions of x with the first dimensions of w. The result has `dtype`, or x's dtype if None."""
    if isinstance(w, LoraWeight):
        low_rank = matmul(matmul(x, w.a, contract), w.b, 1, dtype)
        # Because of this name, --remat selective saves the sum instead of both products.
        return checkpoint_name(matmul(x, w.w, contract, dtype) + low_rank, "product")

    def plain(x, w):
        return jnp.tensordot(x, w, contract, preferred_element_type=dtype)

    if platform() != "cpu" and (dtype is None or jnp.dtype(dtype).itemsize <= x.dtype.itemsize):
        return plain(x, w)

    def backward(saved, cotangent):
        x, w = saved
        # Without this rounding, the gradients of float32 logits from a bfloat16 head would be
        # float32 matmuls. On an H200 with 8,192 ids, those took 4% of a step.
        cotangent = cotangent.astype(jnp.result_type(x, w))
        dx, = jax.linear_transpose(lambda x: jnp.tensordot(x, w, contract), x)(cotangent)
        rows = tuple(range(x.ndim - contract))
        dw = lax.dot_general(x, cotangent, ((rows, rows), ((), ())),
                             preferred_element_type=dtype)
        return dx, dw.astype(w.dtype)

    product = jax.custom_vjp(plain)
    product.defvjp(lambda x, w: (plain(x, w), (x, w)), backward)
    # mark_varying is outside the custom_vjp, so autodiff inserts its transpose, a sum over devices.
    return product(*mark_varying((x, w), x, w))


def linear(x: Array, w: Any, dtype: Any = None) -> Array:
    """Multiply x [B, T, D] by w [D, F, ...]. If w is (weight, bias [1, F, ...]), add the bias."""
    w, *bias = w if isinstance(w, tuple) else (w,)
    return sum(bias, matmul(x, w, 1, dtype))


def lookup(table: Array, ids: Array, **how: Any) -> Array:
    """Look up table[ids], the vectors [..., D] of ids [...] in a table [V, D]. `how` has options
    for jax's Array.at[ids].get, which decide the result for an id outside the table.

    The gradient is summed in float32. In bfloat16, a sum stops growing after about 256 equal terms:
    with ids as frequent as words, an embedding's gradient was off by 58% of its norm. On an H200,
    the float32 sum took 0.1 ms of a step, and the bfloat16 sum about 25 ms."""
    def get(table, ids):
        return jnp.asarray(table).at[ids].get(**how)

    def backward(ids, cotangent):
        wide = jnp.promote_types(table.dtype, jnp.float32)
        added = without(how, "fill_value")
        sums = vary_like(jnp.zeros(table.shape, wide), ids, cotangent)
        return sums.at[ids].add(cotangent.astype(wide), **added).astype(table.dtype), None

    found = jax.custom_vjp(get)
    found.defvjp(lambda table, ids: (get(table, ids), ids), backward)
    return found(*mark_varying((table, ids), table, ids))


def capped(logits: Array, softcap: float) -> Array:
    """Return softcap * tanh(logits / softcap), or the logits unchanged if softcap is 0."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def dropped(x: Array, rate: float, seeds: Array, site: Any, slots: Array) -> Array:
    """Apply dropout: zero a fraction `rate` of x [B, T, D], and divide the rest by 1 - `rate`. Each
    row's seed [B], `site` (an integer) and the slot [B, T] determine which values become 0."""
    def keep(seed, slot):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), site), slot)
        return jax.random.bernoulli(key, 1 - rate, x.shape[-1:])

    kept = jax.vmap(jax.vmap(keep, (None, 0)))(seeds, slots)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def row_products(pairs: Iterable[tuple[Array, Any]]) -> tuple[list[Array], list[Array]]:
    """Multiply the (h, w) pairs and return two lists: partial sums, which still need a sum over
    tensor, and products that every device has in full."""
    partial, whole = [], []
    for h, w in pairs:
        (partial if is_tensor_split(w) else whole).append(matmul(h, w, w.ndim - 1))
    return partial, whole


def repeat_kv(w: Any, heads: int) -> Any:
    """Repeat key or value weights [D, K, N] (or a pair with the bias [1, K, N]) for `heads` query
    heads. If tensor divides the query heads but not the K kv heads, repeat each kv head until
    tensor divides them; each device takes the copies that its own queries use. A kv head's gradient
    is the sum over its copies, both on a device (the transpose of the repeat) and across devices
    (the transpose of mark_varying)."""
    def repeated(w):
        if isinstance(w, LoraWeight):
            return LoraWeight(repeated(w.w), w.a, repeated(w.b))
        count = math.lcm(w.shape[1], max(axis_size("tensor"), trace_settings().tensor))
        if is_tensor_split(w) or count == w.shape[1] or heads % count:
            return w
        times = count // w.shape[1]
        if axis_size("tensor") > 1:
            return local_part(jnp.repeat(mark_varying(w, also={"tensor"}), times, 1), 1)
        # This is for the rule, which traces the block before there's a mesh; tensor will have
        # trace_settings().tensor devices. The rule can trace an einsum, but not a repeat.
        return jnp.einsum("dkn,kj->djn", w, jnp.repeat(jnp.eye(w.shape[1], dtype=w.dtype), times,
                                                       1))

    return jax.tree.map(repeated, w, is_leaf=lambda w: isinstance(w, LoraWeight))


# -------------------------------------------------------------------------------------------
# A loss in chunks of the sequence

# The maximum number of logits in memory at once. Larger batches compute their loss in chunks.
LOGITS = 2**25


def loss_chunks(rows: int, time: int, vocabulary: int) -> int:
    """Return how many chunks to cut the sequence into for the loss: the smallest divisor of `time`
    that gives at most LOGITS logits per chunk."""
    size = rows * time * vocabulary
    return min(n for n in range(1, time + 1)
               if time % n == 0 and (size <= n * LOGITS or n == time))


def chunked_sums(fn: Callable, weights: Any, chunks: Any) -> tuple[Array, ...]:
    """Sum fn(weights, *chunk) over the chunks (arrays [count, ...]), one at a time. fn returns a
    tuple of scalars, and only the first has a gradient. Under autodiff, the forward pass also
    computes each chunk's gradients, so the backward pass recomputes nothing and only scales
    them."""
    weights, chunks = mark_varying(weights, chunks), vary_like(chunks, weights, chunks)
    zero = zeros_of(fn, weights, *[a[0] for a in chunks])

    def plus(sums, others):
        return jax.tree.map(jnp.add, sums, others)

    @jax.custom_vjp
    def total(weights, chunks):
        return lax.scan(lambda s, chunk: (plus(s, fn(weights, *chunk)), None), zero, chunks)[0]

    def forward(weights, chunks):
        def one(carry, chunk):
            s, grads = carry
            values, vjp = jax.vjp(fn, weights, *chunk)
            grad, *dchunk = vjp((jnp.ones_like(values[0]), *map(jnp.zeros_like, values[1:])))
            # The gradient of integers is float0, which a scan cannot stack, so return None.
            dchunk = [None if d.dtype == jax.dtypes.float0 else d for d in dchunk]
            return (plus(s, values), add_to(grads, grad)), dchunk

        wide = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights)
        (s, grads), dchunks = lax.scan(one, (zero, wide), chunks)
        return s, (grads, dchunks)

    def backward(saved, cotangents):
        (grads, dchunks), cotangent = saved, cotangents[0]
        return (jax.tree.map(lambda g, w: (g * cotangent).astype(w.dtype), grads, weights),
                jax.tree.map(lambda d: (d * cotangent).astype(d.dtype), dchunks))

    total.defvjp(forward, backward)
    return total(weights, chunks)


def time_chunks(a: Array, count: int, n: int) -> Array:
    """Cut a [B, T, ...] into [count, B, T / count, ...] for a stream with T split over n devices:
    every chunk gets an equal part of each device's tokens."""
    B, T = a.shape[:2]
    a = a.reshape(B, n, count, T // (n * count), *a.shape[2:])
    return jnp.moveaxis(a, 2, 0).reshape(count, B, T // count, *a.shape[4:])
