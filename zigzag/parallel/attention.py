"""Attention on a single device: in blocks of queries, or with the device's own kernel. The seq
section of shard.py has ring attention across devices.

In causal attention, a block of queries only sees keys up to its last query, so most of the masked
scores are never computed.

    queries 0..3 |x . . .|      4 blocks: 10 of 16 squares are computed
            4..7 |x x . .|
           8..11 |x x x .|
          12..15 |x x x x|

`attend_to(queries, keys)` is any kind of attention. `queries` is a pair: q [B, T, H, N], and a tree
of arrays [B, T] that describe each query, for example a `Token`. `keys` is (k, v, a tree of
arrays [B, S]) with k and v [B, S, K, N]. It returns the values [B, T, H, N] and the logsumexp of
the scores [B, H, T], which `join` needs to combine partial results. In a ring, it takes a third
argument, `own`: whether these keys belong to the same tokens as the queries.

B batch, T queries, S keys, H heads, K kv heads, N per head.
"""

import functools
import math
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import ambient, mark_varying, may_unroll, trace_settings, untyped, varying
from zigzag.parallel.remat import recomputable, recomputed

# SCORES: the maximum number of scores in a device's memory at once. BLOCK: the minimum number of
# queries per block; smaller blocks save too little work. Each block adds compile time, so
# `block_ends` uses eight only for long sequences, where attention is a large part of the work.
SCORES, BLOCK = 2**25, 128


class Partial(NamedTuple):
    """The result of attending to some of the keys, with the softmax over just those keys."""
    values: Array   # [B, T, H, N] float32
    logsum: Array   # [B, H, T], the logsumexp of the scores


def look(attend_to: Callable, queries: tuple, keys: tuple, own: bool = False) -> Partial:
    """Attend to some of the keys and return a Partial in float32."""
    values, logsum = attend_to(queries, keys, own)
    return Partial(values.astype(jnp.float32), logsum)


def join(a: Partial, b: Partial) -> Partial:
    """Combine two Partials into one over the keys of both, weighting values by exp(logsum)."""
    logsum = jnp.logaddexp(a.logsum, b.logsum)

    def share(part):
        return jnp.exp(part.logsum - logsum).transpose(0, 2, 1)[..., None]      # [B, T, H, 1]

    return Partial(a.values * share(a) + b.values * share(b), logsum)


# -------------------------------------------------------------------------------------------
# Softmax attention, by its formula

class Pattern(NamedTuple):
    """The options that kernels support: which keys a query sees, and how scores change."""
    causal: bool = True                 # a query sees no later key
    window: int = 0                     # see only the last `window` keys, including its own; 0: all
    local: Array | None = None          # a bool: whether this layer uses the window; None: it does
    softcap: float = 0.0                # a score s becomes softcap * tanh(s / softcap); 0: no cap
    documents: Array | None = None      # [B, T]: a token sees only its own; None: one per row


class AttendOptions(NamedTuple):
    """The options of a shard.attend call, besides its arrays and functions."""
    causal: bool = False                # no query sees a later key, so half the work can be skipped
    pattern: Pattern | None = None          # the options to give the device's own kernel;
                                        # None: no kernel may compute this call
    beyond: str = "a custom function"   # for messages: how the call differs from plain causal
                                        # softmax attention


class Token(NamedTuple):
    """What masks and score functions can see of queries [B, T, 1] or keys [B, 1, S]."""
    slot: Array         # the token's index in its row
    position: Array     # the token's position for the rotary embedding
    document: Array     # the index of the token's document in its row; -1 if there is no token


def softmax_attention(q: Array, k: Array, v: Array, seen: Array, change: Callable | None = None
                      ) -> tuple[Array, Array]:
    """Softmax attention: q [B, T, H, N], k and v [B, S, K, N] -> values [B, T, H, N], and the
    logsumexp of the scores [B, H, T]. seen [B, 1, T, S] is the mask; `change`, applied before the
    mask, maps the scores [B, H, T, S] to new scores."""
    if k.shape[2] != q.shape[2]:    # each key/value head serves the query heads of its group
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthn,bshn->bhts", q * q.shape[-1] ** -0.5, k,
                        preferred_element_type=jnp.float32)
    scores = change(scores) if change else scores
    scores = jnp.where(seen, scores, -1e30)     # finite: in a ring, a query may see no key at all
    probs = jax.nn.softmax(scores, -1).astype(v.dtype)
    out = jnp.einsum("bhts,bshn->bhtn", probs, v)   # bthn would make XLA put v on the left
    return out.swapaxes(1, 2), jax.nn.logsumexp(scores, -1)


def sees(pattern: Pattern, query: Token, key: Token) -> Array:
    """Return whether each query sees each key, [B, T, S]."""
    seen = key.document == query.document
    seen = seen & (key.slot <= query.slot) if pattern.causal else seen
    if not pattern.window:
        return seen
    near = key.slot > query.slot - pattern.window
    return seen & (near if pattern.local is None else jnp.where(pattern.local, near, True))


def self_attention(mask: Callable | None, scores: Callable | None, heads: int, pattern: Pattern
                   ) -> Callable:
    """Return a function attention(q, k, v, tokens) for shard.attend and the cache. A query sees the
    keys in its document that both `pattern` and mask(query, key) allow. scores(s, query, key,
    numbers) returns new scores to use instead of s [B, H, T, S]; `numbers` [H] are the indices of
    this device's query heads among all `heads`."""
    def attention(q, k, v, tokens):
        query, key = tokens
        seen = sees(pattern, query, key)
        seen = seen & mask(query, key) if mask else seen

        def change(s):
            s = pattern.softcap * jnp.tanh(s / pattern.softcap) if pattern.softcap else s
            if not scores:      # return early: the cache may fold heads into T, so s has fewer
                return s
            first = lax.axis_index("tensor") * s.shape[1] if s.shape[1] < heads else 0
            return scores(s, query, key, first + jnp.arange(s.shape[1]))

        changes = change if scores or pattern.softcap else None
        return softmax_attention(q, k, v, seen[:, None], changes)

    return attention


def both(query: Token, key: Token) -> tuple[Token, Token]:
    """Reshape the tokens [B, T] and [B, S] to [B, T, 1] and [B, 1, S], so that masks broadcast to
    [B, T, S]."""
    return Token(*[a[:, :, None] for a in query]), Token(*[a[:, None, :] for a in key])


# -------------------------------------------------------------------------------------------
# The report at the start of a run: which attention the loss contains, and what computes it

class Call(NamedTuple):
    """One call to shard.attend, recorded while jax traces a loss."""
    causal: bool
    beyond: str         # how it differs from plain causal softmax attention; "": not at all
    pattern: Pattern | None     # for a kernel; None: no kernel may compute it. Here window, softcap
                        # and documents are bools (whether there are any), and local is always None
    dtype: str
    rows: int
    heads: int
    queries: int        # the sequence length, T
    keys: int           # S
    width: int          # the head width, N
    same_shape: bool    # whether q, k and v have the same T and N


def describe(call: Call, mesh: Any, manual: Sequence[str]) -> str:
    """Return a description of how shard.attend computes this call on a mesh. `call.rows` counts the
    rows in the traced code: only the device's own along `manual` axes, but all of them along axes
    that the compiler splits."""
    n = mesh.shape["seq"]
    own = call._replace(queries=call.queries // n)      # the trace used whole sequences
    kernel = kernel_for(own, n > 1, mesh, manual)
    how = f"by the {kernel} kernel" if kernel else ""
    if kernel and call.pattern.documents:
        how += ", within documents"
    if n == 1:
        return how or "by the plain formula, in blocks of queries"
    return "around a ring: " + (
        "each device has an early and a late part of the queries, and skips keys that none of them "
        "sees" if call.causal else "each device's queries meet all keys in turn") + (
        how and f"; {how}")


# -------------------------------------------------------------------------------------------
# In blocks

def block_ends(scores: int, time: int, causal: bool = True, loops: bool = True
               ) -> tuple[list[int], int]:
    """Return where the blocks of queries end, and how many parts each block has. The parts keep at
    most SCORES of the device's `scores` in memory. The last of four blocks is halved, because it
    has the most keys. If layers may be unrolled (`loops` is False) and memory matters, there are at
    least two parts: without a loop, the compiler would merge the recomputation in the backward pass
    with the forward pass."""
    count = max(n for n in (1, 2, 4, 8) if n == 1 or causal and time % n == 0
                and time // n >= BLOCK * (4 if n == 8 else 1))
    size = last = time // count
    if count == 4 and size >= 2 * BLOCK and size % 2 == 0:
        last = size // 2
    ends = sorted({*range(size, time + 1, size), time - last} - {0})
    least = 1 if loops or scores <= SCORES else 2
    parts = (n for n in range(least, last + 1) if last % n == 0)
    return ends, next((n for n in parts if scores <= n * count * SCORES), last)


def in_blocks(attend_to: Callable, queries: tuple, keys: tuple, causal: bool) -> Array:
    """Compute attention [B, T, H, N] one block of queries at a time (`block_ends`). If the scores
    don't fit in memory, the backward pass recomputes each part of a block."""
    (B, T, H, _), S = queries[0].shape, keys[0].shape[1]
    sizes, manual = ambient()
    # If tensor is an auto axis, H counts all heads; the compiler splits them later.
    compilers = 1 if "tensor" in manual else sizes.get("tensor", 1)
    causal, scores = causal and S == T, B * H * T * S // compilers
    ends, parts = block_ends(scores, T, causal, not may_unroll())

    @recomputable("attention")
    def one(queries, keys):
        return attend_to(queries, keys)[0]

    if scores > SCORES:
        one = recomputed(one)
    results = []
    for begin, end in zip([0, *ends], ends):
        block = _time(queries, begin, end)
        seen = _time(keys, 0, end if causal else None)
        if parts == 1:
            results.append(one(block, seen))
            continue
        split = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(B, parts, -1, *x.shape[2:]), 1, 0), block)
        result = lax.map(lambda part, seen=seen: one(part, seen), split)
        results.append(jnp.moveaxis(result, 0, 1).reshape(B, end - begin, H, -1))
    return jnp.concatenate(results, 1)


def _time(tree, begin, end):
    return jax.tree.map(lambda x: x[:, begin:end], tree)


# -------------------------------------------------------------------------------------------
# By a kernel

def kernel_name(dtype: Any, time: int, width: int, mesh: Any = None, softcap: bool = False,
                numbers: int = 0) -> str:
    """Return the name of the device's kernel for attention with this dtype, sequence length and
    head width, or '' if none. `numbers` is the size of the document mask [B, T, T], if any."""
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_mesh.abstract_device
    kind, dtype = getattr(device, "device_kind", ""), jnp.dtype(dtype)
    if kind.startswith("TPU") and kind[4:6] not in ("v2", "v3"):        # splash fails to compile
        fits = time % 128 == 0 and width % 64 == 0 and dtype == jnp.bfloat16
        return "splash" if fits else ""
    # cuDNN needs documents as a mask like this, and also keeps the mask's gradient in memory.
    if not kind.startswith("NVIDIA") or softcap or numbers > 4 * SCORES:
        return ""
    capability = float(getattr(jax.local_devices()[0], "compute_capability", 8))
    fits = time % 2 == 0 and width % 8 == 0 and width <= 128 and capability >= 8
    return "cuDNN" if fits and dtype in (jnp.bfloat16, jnp.float16) else ""


def kernel_for(call: Call, ring: bool, mesh: Any, manual: Iterable[str]) -> str:
    """Return the name of the kernel that shard.attend uses for this call, with or without a `ring`
    over seq, or '' if none. The compiler can't split a kernel, so all mesh axes must be manual."""
    pattern, T = call.pattern, call.queries
    is_own = all(size == 1 or axis in manual for axis, size in mesh.shape.items())
    if pattern is None or not (call.same_shape and is_own):
        return ""
    if not ring:
        return kernel_name(call.dtype, T, call.width, mesh, pattern.softcap,
                           call.rows * T * T if pattern.documents else 0)
    # ring_kernel.py supports no window, and is causal if and only if the ring is.
    name = kernel_name(call.dtype, T // 2 if call.causal else T, call.width, mesh)
    fits = name == "splash" and not pattern.window and bool(pattern.causal) == call.causal
    return name if fits else ""


def kernel_fits(q: Array, k: Array, v: Array, options: AttendOptions) -> bool:
    """Return whether a kernel can compute attend's result for these arguments on the ambient mesh.
    Also report the call to trace_settings().calls, if set."""
    pattern = options.pattern and options.pattern._replace(
        window=bool(options.pattern.window), local=None, softcap=bool(options.pattern.softcap),
        documents=options.pattern.documents is not None)
    same_shape = k.shape == v.shape and q.shape[1:4:2] == k.shape[1:4:2]        # T and N
    (rows, queries, heads, width), keys = q.shape, k.shape[1]
    call = Call(options.causal, options.beyond, pattern, q.dtype.name, rows, heads, queries, keys,
                width, same_shape)
    if trace_settings().calls:
        trace_settings().calls(call)
    mesh = jax.sharding.get_abstract_mesh()
    return bool(kernel_for(call, "seq" in varying(q), mesh, mesh.manual_axes))


def by_kernel(q: Array, k: Array, v: Array, pattern: Pattern) -> Array:
    """Compute attention with the device's kernel, even inside a shard_map: q [B, T, H, N], k and v
    [B, T, K, N] -> [B, T, H, N]."""
    def run(qkv, traced):
        here = pattern._replace(**traced)
        if kernel_name(q.dtype, q.shape[1], q.shape[3]) != "splash":
            return _cudnn(*qkv, here)
        if here.local is None:
            return _splash(*qkv, here)
        near = here._replace(local=None)
        return lax.cond(here.local, *[functools.partial(_splash, pattern=either) for either in (
            near, near._replace(window=0))], *qkv)

    return without_types(run)((q, k, v), {"documents": pattern.documents, "local": pattern.local})


def _cudnn(q, k, v, pattern):
    assert not pattern.softcap
    window, mask = (pattern.window - 1, 0) if pattern.window else None, None
    if pattern.documents is not None or pattern.local is not None:
        # Replace the window with a mask [B, 1, T, T] ([1, 1, T, T] without documents): cuDNN may
        # not accept both.
        slots = jnp.arange(q.shape[1])[None]
        info = Token(slots, slots, 0 * slots if pattern.documents is None else pattern.documents)
        window, mask = None, sees(pattern, *both(info, info))[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=pattern.causal,
                                        local_window_size=window, implementation="cudnn")


def _splash(q, k, v, pattern):
    # Because of this name, --remat selective saves the kernel's output and logsumexp.
    kernel = splash_kernel(q.shape, pattern, residual_checkpoint_name="product")
    documents = pattern.documents, pattern.documents
    return by_row_or_head(kernel, q, k, v, documents)[0].swapaxes(1, 2)


def splash_kernel(shape: Sequence[int], pattern: Pattern, **options: Any) -> Callable:
    """Return jax's TPU kernel for queries of shape [B, T, H, N]; call it with by_row_or_head. With
    documents, it takes a single row; otherwise it takes all rows as the heads of one row."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    B, T, H, _ = shape
    block = math.gcd(T, 512)
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in (
        "q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")})
    mask = (masks.LocalMask((T, T), (pattern.window - 1, 0), 0) if pattern.window else
            masks.CausalMask((T, T)) if pattern.causal else masks.FullMask((T, T)))
    heads = H * (B if pattern.documents is None else 1)
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes,
        attn_logits_soft_cap=pattern.softcap or None, **options)


def by_row_or_head(kernel: Callable, q: Array, k: Array, v: Array,
                   documents: tuple[Array | None, Array | None]) -> list[Array]:
    """Run a splash_kernel, and return its results as arrays [B, H, T, ...]. `documents` is the pair
    (queries' documents, keys' documents), each [B, T], or (None, None) if `pattern` has none."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    B, T, H, N = q.shape
    rows = [x.swapaxes(1, 2) for x in (q * N ** -0.5, k, v)]                # [B, H, T, N]
    found = (kernel(*[x.reshape(-1, T, N) for x in rows], None) if documents[0] is None else
             jax.vmap(kernel)(*rows, splash.SegmentIds(*documents)))
    dims = 2 if documents[0] is None else 3
    return [x.reshape(B, H, T, *x.shape[dims:]) for x in jax.tree.leaves(found)]


def without_types(fn: Callable) -> Callable:
    """Wrap fn(qkv, others), which is differentiable only in qkv, so that it works in a shard_map.

    The kernels don't support varying types. So inside a shard_map, `track` runs a function without
    types (`untyped`, in an inner shard_map over no axes with check_vma=False). It then marks the
    results as varying over every axis that any argument varies over. This is correct because a
    device's result depends only on its own arguments. A custom_vjp tracks the forward and backward
    passes separately, so autodiff never goes through an untyped call. The residuals of the kernel's
    own vjp go from the forward to the backward pass as a flat list of arrays."""
    structure = None        # the residuals' tree structure, set when forward is traced

    def track(fn):
        def call(*args):
            if not ambient()[1]:
                return fn(*args)
            out = jax.shard_map(untyped(fn, outside=False), in_specs=P(), out_specs=P(),
                                axis_names=set(), check_vma=False)(*args)
            return mark_varying(out, args)

        return call

    def forward(*args):
        def run(qkv, others):
            nonlocal structure
            out, vjp = jax.vjp(lambda qkv: fn(qkv, others), qkv)
            saved, structure = jax.tree.flatten(vjp)
            return out, saved

        return track(run)(*args)

    def backward(saved, cotangent):
        return *track(lambda saved, g: jax.tree.unflatten(structure, saved)(g))(
            saved, cotangent), None

    typed = jax.custom_vjp(track(fn))
    typed.defvjp(forward, backward)
    return lambda *args: typed(*mark_varying(args, args[0]))


# -------------------------------------------------------------------------------------------
# The zigzag order: how the devices along seq divide a row's tokens

def zigzag_order(time: int, devices: int) -> np.ndarray:
    """Return a row's slots in the order of the devices that hold them. For 8 tokens on 2 devices:
    0 1 6 7 | 2 3 4 5."""
    parts = np.arange(time).reshape(2 * devices, -1)
    return np.stack([parts, parts[::-1]], 1)[:devices].reshape(-1)


def shard_time(batch: dict[str, Array], mesh: Any, row_axes: Any = None,
               untimed: Sequence[str] = ()) -> tuple[dict, dict]:
    """Return the batch in zigzag order, and the specs that split it over seq and its rows over
    `row_axes`. It reorders and splits arrays [B, T, ...]. All others stay whole, including arrays
    in `untimed`, whose second dimension isn't the sequence. Nothing is sent: every device along seq
    already has the whole batch."""
    n = mesh.shape["seq"]
    if n == 1 or "tokens" not in batch and not batch.keys().isdisjoint(untimed):
        return batch, {k: P(row_axes) for k in batch}
    if np.ndim(batch.get("tokens")) != 2:
        raise ConfigError(f"mesh axis seq={n}: the batches of this task have no 'tokens' [B, T] to "
                          f"split along the sequence")
    T = batch["tokens"].shape[1]
    if T % (2 * n):
        raise ConfigError(f"mesh axis seq={n}: {T} tokens do not divide into {2 * n} parts, an "
                          f"early and a late one for each device")
    order = zigzag_order(T, n)
    timed = {k for k, x in batch.items() if x.shape[1:2] == (T,) and k not in untimed}
    return ({k: x[:, order] if k in timed else x for k, x in batch.items()},
            {k: P(row_axes, "seq") if k in timed else P(row_axes) for k in batch})
