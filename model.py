"""The transformer and its loss, and where its weights come from.

    tokens [B, T] -> embed -> [ norm -> attention -> + -> norm -> MLP -> + ] x L -> norm -> logits

A modern decoder: RMSNorm before each half, rotary positions, grouped-query attention, SwiGLU. The
weights are nested dicts of arrays with the layers stacked along a leading dimension L; q, k and v
keep their heads as a dimension of their own.

There is no mesh and no axis in this file. Where a collective may be needed it calls shard.py:
`columns` into a block, `row` out of it, `embed_lookup`, `attend`, `experts`, `token_loss`. Without
a mesh these are plain products.

B batch, T time, S time of keys, D model, H heads, K kv heads, N per head, F feed-forward,
V vocabulary (padded), L layers, E experts.
"""

import dataclasses
import functools
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import shard
from zigzag.checkpoint import read_checkpoint, read_run
from zigzag.errors import (
    ConfigError,
    CorruptCheckpoint,
    RunError,
    check_at_least,
    did_you_mean,
    fill_in,
    nearest_divisor,
)
from zigzag.mesh import cast, shardings

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """What a model is. Each field is also a flag; 0 where something else follows from the rest."""
    layers: int = 4               # blocks
    d_model: int = 128            # width of the residual stream
    heads: int = 8                # query heads
    kv_heads: int = 0             # key/value heads; 0: as many as heads
    head_dim: int = 0             # width of a head; 0: d_model / heads
    d_ff: int = 0                 # width of the MLP; 0: 8/3 of d_model, up to a multiple of 64
    vocab_size: int = 0           # ids; 0: what the data's tokenizer has
    seq_len: int = 128            # tokens in a training example
    tied: bool = False            # one table for embedding tokens and for the loss head
    parallel: bool = False        # attention and MLP beside each other, after one norm
    rope_theta: float = 10000.0   # longest wavelength of the rotary positions, over 2 pi
    dropout: float = 0.0          # share of each block's output dropped in training
    dtype: str = ""               # float32 or bfloat16 to compute in; empty: float32 on CPU
    remat: str = "none"           # keep for the backward pass: none (all), selective, full (inputs)
    kernel: bool = True           # attention by the device's own kernel, where it has one
    sequence_parallel: bool = True  # between blocks, tensor splits the time of the residual stream
    microbatches: int = 1         # parts in which the rows of a device go through the pipeline
    schedule: str = "gpipe"       # of the pipeline: gpipe, interleaved (with --chunks) or 1f1b
    chunks: int = 1               # pieces of consecutive layers that each stage of it has
    sum_dtype: str = ""           # float32: fsdp sums gradients in it, not in dtype; sends more
    experts: int = 0              # experts in each MLP; 0: a dense MLP
    experts_per_token: int = 2    # of which each token visits
    shared_experts: int = 0       # and how many more it visits always
    balance: float = 0.01         # weight of the loss that makes experts equally busy, a layer
    router_z: float = 0.001       # weight of the loss that keeps the router's logits small, a layer

    def __post_init__(self) -> None:
        check_at_least(self, layers=1, d_model=1, heads=1, kv_heads=0, head_dim=0, d_ff=0,
                       vocab_size=0, seq_len=1, experts=0, experts_per_token=1, shared_experts=0,
                       balance=0, router_z=0, microbatches=1, chunks=1)
        if not self.head_dim and self.d_model % self.heads:
            near = nearest_divisor(self.d_model, self.heads)
            raise ConfigError(f"--d_model {self.d_model} does not divide by --heads {self.heads}; "
                              f"the nearest that does is --heads {near}, or give --head_dim")
        fill_in(self, kv_heads=self.heads, head_dim=self.d_model // self.heads,
                d_ff=-(-self.d_model * 8 // (3 * 64)) * 64)
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads {self.heads} does not divide by --kv_heads "
                              f"{self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"--head_dim {self.head_dim}: rotary positions need an even one")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout {self.dropout}: at least 0 and below 1")
        if not self.rope_theta > 1:
            raise ConfigError(f"--rope_theta {self.rope_theta}: must be above 1")
        for name, known in (("dtype", ("", "float32", "bfloat16")),
                            ("remat", ("none", "selective", "full")),
                            ("schedule", ("gpipe", "interleaved", "1f1b")),
                            ("sum_dtype", ("", "float32"))):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"--{name} {value}: expected {', '.join(filter(None, known))}"
                                  + did_you_mean(value, known))
        if self.experts and self.experts_per_token > self.experts:
            raise ConfigError(f"--experts_per_token {self.experts_per_token}: there are only "
                              f"--experts {self.experts}")
        if self.shared_experts and not self.experts:
            raise ConfigError(f"--shared_experts {self.shared_experts}: give --experts too; a "
                              f"dense MLP is as wide as --d_ff says")


PRESETS = {
    "tiny": Config(),
    "124m": Config(layers=12, d_model=768, heads=12, d_ff=2048, vocab_size=50257, seq_len=1024,
                   tied=True),
    "1.2b": Config(layers=24, d_model=2048, heads=16, d_ff=5504, vocab_size=32000, seq_len=2048),
    "llama-7b": Config(layers=32, d_model=4096, heads=32, d_ff=11008, vocab_size=32000,
                       seq_len=2048),
    "llama-70b": Config(layers=80, d_model=8192, heads=64, kv_heads=8, d_ff=28672,
                        vocab_size=32000, seq_len=4096),
    "llama3-8b": Config(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336,
                        vocab_size=128256, seq_len=8192, rope_theta=500000.0),
    "llama3-405b": Config(layers=126, d_model=16384, heads=128, kv_heads=8, d_ff=53248,
                          vocab_size=128256, seq_len=8192, rope_theta=500000.0),
    "mixtral-8x7b": Config(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, experts=8,
                           vocab_size=32000, seq_len=4096, rope_theta=1000000.0),
}


# As many logits are in memory at once; of a longer or wider batch, some of the time.
LOGITS = 2**25


def padded(vocab_size: int) -> int:
    """Rows of the vocabulary's tables: up to a multiple of 128, a TPU's lane width, whatever
    the mesh, so that a checkpoint fits every mesh. No token has the rows above vocab_size."""
    return -(-vocab_size // 128) * 128


# -------------------------------------------------------------------------------------------
# Weights

@dataclasses.dataclass(frozen=True)
class Weight:
    shape: tuple[int, ...]
    scale: float | None = None      # standard deviation of its first values; None: ones
    tensor: int = -1        # the dimension that tensor may split in the code below; -1: none


def _weights(c):
    """Every weight, once."""
    L, D, H, K, N, F, V = (c.layers, c.d_model, c.heads, c.kv_heads, c.head_dim, c.d_ff,
                           padded(c.vocab_size))
    # What is added to the residual stream 2 L times starts smaller by the root of that, so that
    # the stream's size does not grow with the depth.
    into, back = D**-0.5, (2 * L) ** -0.5
    layers = {"attn_norm": Weight((L, D)),
              "wq": Weight((L, D, H, N), into, 2),
              "wk": Weight((L, D, K, N), into, 2),
              "wv": Weight((L, D, K, N), into, 2),
              "wo": Weight((L, H, N, D), (H * N) ** -0.5 * back, 1)}
    if not c.parallel:
        layers["mlp_norm"] = Weight((L, D))
    if dense := c.shared_experts * F if c.experts else F:       # the MLP that all tokens visit
        layers |= {"w_gate": Weight((L, D, dense), into, 2),
                   "w_up": Weight((L, D, dense), into, 2),
                   "w_down": Weight((L, dense, D), F**-0.5 * back, 1)}
    if E := c.experts:
        layers |= {"router": Weight((L, D, E), into),
                   "e_gate": Weight((L, E, D, F), into, 3),
                   "e_up": Weight((L, E, D, F), into, 3),
                   "e_down": Weight((L, E, F, D), F**-0.5 * back, 2)}
    weights = {"embed": Weight((V, D), D**-0.5, 0), "layers": layers, "norm": Weight((D,))}
    if not c.tied:
        weights["head"] = Weight((D, V), into, 1)
    return weights


def init(config: Config, key: Array) -> Params:
    """New float32 weights. Under jit with out_shardings each device makes only its own part: the
    values of a weight follow from the key, its path and the place in it, not from the mesh or from
    the other weights."""
    if not config.vocab_size:
        raise ConfigError("vocab_size is 0: it follows from the data, or give --vocab_size")

    def first_values(path, w):
        if w.scale is None:
            return jnp.ones(w.shape, jnp.float32)
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return w.scale * jax.random.normal(own, w.shape, jnp.float32)

    return jax.tree.map_with_path(first_values, _weights(config))


def weight_shapes(config: Config) -> Params:
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def tensor_dims(config: Config) -> Params:
    """Of each weight the dimension that tensor may split, or -1."""
    return jax.tree.map(lambda w: w.tensor, _weights(config))


def count(params: Params) -> int:
    """The number of parameters."""
    return sum(math.prod(w.shape) for w in jax.tree.leaves(params))


def parameters(config: Config) -> tuple[int, int]:
    """How many parameters a model has, without the padded rows of the vocabulary, and how many of
    them one token visits: of experts, those that it chooses."""
    c = config
    total = count(weight_shapes(c))
    total -= (padded(c.vocab_size) - c.vocab_size) * c.d_model * (1 if c.tied else 2)
    unvisited = max(0, c.experts - c.experts_per_token) * 3 * c.d_model * c.d_ff
    return total, total - c.layers * unvisited


def flops(config: Config, tokens: int) -> float:
    """Arithmetic of training on that many tokens: 6 per weight of a product and token, and the
    attention's two products with every key (causal or not), 12 T H N a layer and token."""
    c = config
    visited = c.experts_per_token + c.shared_experts if c.experts else 1
    block = (c.d_model * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + c.d_model * c.experts
             + 3 * c.d_model * c.d_ff * visited)
    weights = c.layers * block + c.d_model * padded(c.vocab_size)
    return tokens * (6.0 * weights + 12.0 * c.layers * c.seq_len * c.heads * c.head_dim)


# -------------------------------------------------------------------------------------------
# The parts of a block

def _norm(x, scale):
    """RMSNorm over D, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)
    return x32.astype(x.dtype) * scale      # of a time-split x autodiff sums scale's gradient here


def _rotate(x, positions, theta):
    """Rotary positions: each pair (x[i], x[i + N/2]) of a head turned by its own rate times the
    position, so that q.k depends on how far apart they are. x: [B, T, H, N]."""
    half = x.shape[-1] // 2
    rate = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)               # [N/2]
    angle = positions[:, :, None, None].astype(jnp.float32) * rate              # [B, T, 1, N/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _softmax_attention(q, k, v, mask):
    """q [B, T, H, N], k and v [B, S, K, N], mask [B, 1, T, S] -> [B, T, H, N], and the logarithm
    of the sum that the weights were divided by [B, H, T]."""
    if k.shape[2] != q.shape[2]:    # each key/value head serves the heads of its group
        k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthn,bshn->bhts", q * q.shape[-1] ** -0.5, k,
                        preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores, -1e30)     # finite: a ring joins parts where nothing is seen
    probs = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bhts,bshn->bthn", probs, v), jax.nn.logsumexp(scores, -1)


def _attention_mask(query, key):
    """Which keys a query sees [B, 1, T, S]: those up to its place in the row, in its document. (A
    kernel knows only the first half: another mask here means kernel=False in _heads.)"""
    before = key["place"][:, None, :] <= query["place"][:, :, None]
    return (before & (key["document"][:, None, :] == query["document"][:, :, None]))[:, None]


def _qkv(w, c):
    return [w["wq"], *(shard.repeat_kv(w[name], c.heads) for name in ("wk", "wv"))]


def _heads(qkv, c, batch, cache=None):
    """Queries [B, T, H, N], keys and values [B, T, K, N] -> attention [B, T, H, N], and the cache
    with these keys and values in it."""
    q, k, v = qkv
    q, k = (_rotate(a, batch["positions"], c.rope_theta) for a in (q, k))
    if cache is not None:
        cache = {name: jax.lax.dynamic_update_slice_in_dim(cache[name], a, batch["slot"], 1)
                 for name, a in (("k", k), ("v", v))}
        k, v = cache["k"], cache["v"]                                           # [B, S, K, N]
    plain = cache is None and not {"segments", "places"} & batch.keys()
    return shard.attend(_softmax_attention, q, k, v, _attention_mask, batch["query"], batch["key"],
                        causal=cache is None, kernel=c.kernel and plain), cache


def _attention(w, h, c, batch, cache):
    """h [B, T, D] -> [B, T, D]."""
    heads, cache = _heads(shard.columns(h, *_qkv(w, c)), c, batch, cache)
    return shard.row((heads, w["wo"]), split_time=c.sequence_parallel), cache


def _gated(gate, up):
    """What is between the two products of an MLP."""
    return jax.nn.silu(gate) * up


def _into_dense(w):
    """The weights into the MLP that all tokens visit, if there is one."""
    return [w[name] for name in ("w_gate", "w_up") if name in w]


def _dense(w, gate, up):
    """The MLP that all tokens visit, up to its last product."""
    return _gated(gate, up), w["w_down"]


def _feed_forward(w, h, c, i, batch):
    """h [B, T, D] -> [B, T, D], and what experts add to the loss."""
    return _out_of_block(w, h, c, i, batch, [], shard.columns(h, *_into_dense(w)))


def _out_of_block(w, h, c, i, batch, out, dense):
    """The sum of the products `out`, of the MLP that all tokens visit (`dense` is what its first
    products make), and of what experts make of h; and what those add to the loss."""
    if dense:
        out = [*out, _dense(w, *dense)]
    if c.experts:
        return _experts(w, h, c, i, batch, out)
    return shard.row(*out, split_time=c.sequence_parallel), None


def _experts(w, h, c, i, batch, beside):
    """h [B, T, D] through each token's best experts, by the router's shares; the products `beside`
    are added. In training also what is added to the loss: for each row, the share of tokens that
    an expert has times the share of probability that it is given, summed over experts, times their
    number (1 if all are equal); and the router's squared log-sum-exp. Both are sums over rows and
    tokens, each with its weight: no mesh or micro-batch changes them."""
    E, K = c.experts, c.experts_per_token
    logits = jnp.einsum("btd,de->bte", h.astype(jnp.float32), w["router"].astype(jnp.float32))
    probs = jax.nn.softmax(logits, -1)
    top, chosen = jax.lax.top_k(probs, K)                                       # [B, T, K]
    out = shard.experts(h, chosen, top / top.sum(-1, keepdims=True), (w["e_gate"], w["e_up"]),
                        _gated, w["e_down"], *beside, split_time=c.sequence_parallel)
    if "seeds" not in batch:
        return out, None
    weights = shard.my_time_slice(batch["weights"], h)                          # [B, T]
    busy = jnp.einsum("btke,bt->be", jax.nn.one_hot(chosen, E), weights) / K    # [B, E]
    given = jnp.einsum("bte,bt->be", probs, weights)
    total = shard.sum_over_time(weights.sum(-1, keepdims=True))                 # [B, 1]
    balance = E * jnp.sum(shard.sum_over_time(busy) * given / jnp.maximum(total, 1e-9))
    z = jnp.sum(jax.nn.logsumexp(logits, -1) ** 2 * weights)
    added = c.balance * balance + c.router_z * z
    load = jnp.zeros((c.layers, E)).at[i].set(busy.sum(0))
    return out, (added, jax.lax.stop_gradient({"router_loss": added, "expert_load": load}))


def _drop(y, c, site, batch):
    """Dropout of [B, T, D] in training. The bits follow from the row's own seed, the site in the
    network and the place in the row: not from the mesh, nor from how the batch was cut."""
    if c.dropout == 0 or "seeds" not in batch:
        return y

    def keep(seed, place):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), site), place)
        return jax.random.bernoulli(key, 1 - c.dropout, y.shape[-1:])

    places = shard.my_time_slice(batch["query"]["place"], y)
    kept = jax.vmap(jax.vmap(keep, (None, 0)))(batch["seeds"], places)
    return jnp.where(kept, y / (1 - c.dropout), 0).astype(y.dtype)


# -------------------------------------------------------------------------------------------
# The network: embed, block, head

def _embed(params, batch, c):
    x = shard.embed_lookup(params["embed"], batch["tokens"], split_time=c.sequence_parallel)
    return x * c.d_model**0.5       # rows of about unit size


def _block(w, x, i, c, batch, cache=None):
    """Layer number i: x [B, T, D] -> x, what is added to the loss, and the cache."""
    if c.parallel:
        return _parallel_block(w, x, i, c, batch, cache)
    y, cache = _attention(w, _norm(x, w["attn_norm"]), c, batch, cache)
    x = x + _drop(y, c, 2 * i, batch)
    y, aux = _feed_forward(w, _norm(x, w["mlp_norm"]), c, i, batch)
    return x + _drop(y, c, 2 * i + 1, batch), aux, cache


def _parallel_block(w, x, i, c, batch, cache):
    """Attention and MLP after one norm: one collective into both, one out of both."""
    h = _norm(x, w["attn_norm"])
    q, k, v, *dense = shard.columns(h, *_qkv(w, c), *_into_dense(w))
    heads, cache = _heads([q, k, v], c, batch, cache)
    y, aux = _out_of_block(w, h, c, i, batch, [(heads, w["wo"])], dense)
    return x + _drop(y, c, 2 * i + 1, batch), aux, cache


def _head(params, x, c):
    """The last norm's output [B, T, D] and the loss head [D, V]."""
    return _norm(x, params["norm"]), params["embed"].T if c.tied else params["head"]


def _with_info(batch):
    """A batch with what is known of its tokens: their positions [B, T] in the document, and, of
    queries and of keys, the place in the row and the document, which decide who sees whom."""
    shape = batch["tokens"].shape
    place = batch.get("places", jnp.broadcast_to(jnp.arange(shape[1]), shape))
    info = {"place": place, "document": batch.get("segments", jnp.zeros_like(place))}
    return {"positions": place, **batch, "query": info, "key": info}


def _trunk(params, c, batch, cache=None, specs=None):
    """The last block's output [B, T, D], and the cache with these T tokens in it."""
    def layer(w, x, each):
        i, layer_cache = each
        x, _, layer_cache = _block(w, x, i, c, batch, layer_cache)
        return x, layer_cache

    return shard.layers(layer, params["layers"], _embed(params, batch, c),
                        (jnp.arange(c.layers), cache), specs and specs["layers"])


def forward(params: Params, tokens: Array, config: Config, source: Array | None = None,
            positions: Array | None = None, segments: Array | None = None) -> Array:
    """Logits [B, T, vocab_size] of the token that follows each of `tokens` [B, T]."""
    if source is not None:
        raise ConfigError("this model has no encoder to give a source to")
    given = {"tokens": tokens, "positions": positions, "segments": segments}
    batch = _with_info({k: v for k, v in given.items() if v is not None})
    params = cast(params, config.dtype)
    x, _ = _trunk(params, config, batch)
    logits = shard.vocab_logits(*_head(params, x, config), config.vocab_size)
    return logits[..., :config.vocab_size]


def loss(params: Params, batch: dict[str, Array], config: Config,
         specs: Params | None = None, with_aux: bool = False) -> tuple:
    """(sum, count): the cross-entropy of the batch's targets in nats, weighted, and the sum of the
    weights. They travel together and are divided once, so that masks and uneven shards change
    nothing. Where the batch brings `seeds` [B], it is to learn from: dropout is on, and experts add
    what makes them equally busy; `with_aux` then gives other sums of theirs, third."""
    params, c, batch = cast(params, config.dtype), config, _with_info(batch)

    def block(w, x, i, batch):
        return _block(w, x, i, c, batch)[:2]

    def head(params, x, batch):
        x, table = _head(params, x, c)
        return shard.token_loss(x, table, batch["targets"], batch["weights"], c.vocab_size,
                                loss_chunks(c, *x.shape[:2])), jnp.sum(batch["weights"])

    others = {k: w for k, w in params.items() if k != "layers"}
    result = shard.pipelined_loss(
        functools.partial(_embed, c=c), block, head, others, params["layers"], batch,
        specs and specs["layers"], c.remat, c.microbatches, c.schedule, c.chunks, c.sum_dtype)
    return result if with_aux else result[:2]


def loss_chunks(config: Config, rows: int, time: int) -> int:
    """In how many chunks of their time the loss of so many rows is computed."""
    size = rows * time * padded(config.vocab_size)
    return min(n for n in range(1, time + 1)
               if time % n == 0 and (size <= n * LOGITS or n == time))


def batch_shapes(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    ids, weights = (jax.ShapeDtypeStruct((rows, config.seq_len), dtype)
                    for dtype in (jnp.int32, jnp.float32))
    return {"tokens": ids, "targets": ids, "weights": weights}


# -------------------------------------------------------------------------------------------
# Decoding with a cache

def new_cache(params: Params, config: Config, rows: int, slots: int) -> Params:
    """Room for the keys and values of `slots` tokens in each row, of the heads that this device
    has of them."""
    wk = jax.eval_shape(lambda w: shard.repeat_kv(w[0], config.heads), params["layers"]["wk"])
    zeros = jnp.zeros((config.layers, rows, slots, *wk.shape[1:]), wk.dtype)
    return {"k": zeros, "v": zeros}


def extend(params: Params, cache: Params, tokens: Array, slot: Any, start: Array,
           config: Config, specs: Params | None = None) -> tuple[Array, Params]:
    """Put `tokens` [B, T] into the cache's slots from `slot` on. Gives the logits [B, V] after
    the last of them, and the cache. Row b begins at slot start[b]; what lies before is padding.
    Weights of layers that `specs` split over fsdp are gathered layer by layer."""
    (B, T), S = tokens.shape, cache["k"].shape[2]
    slots = jnp.broadcast_to(slot + jnp.arange(T), (B, T))
    keys = jnp.broadcast_to(jnp.arange(S), (B, S))
    batch = {"tokens": tokens, "positions": jnp.maximum(slots - start[:, None], 0), "slot": slot,
             "query": {"place": slots, "document": jnp.zeros_like(slots)},
             "key": {"place": keys, "document": jnp.where(keys < start[:, None], -1, 0)}}
    x, cache = _trunk(params, config, batch, cache, specs)
    x, head = _head(params, shard.whole_time(x)[:, -1:], config)
    return shard.vocab_logits(x, head, config.vocab_size)[:, 0], cache


# -------------------------------------------------------------------------------------------
# Where weights come from

DEFAULTS = {f.name: f.default for f in dataclasses.fields(Config)}


def load_run(folder: str | Path, mesh: Any = None, step: int | None = None
             ) -> tuple[Params, Config]:
    """The weights of a run's newest (or given) step, without its optimizer, straight into their
    shards on the mesh; without a mesh, on one device. A damaged checkpoint is reported, and the
    one before it is read."""
    record = read_run(folder, DEFAULTS)
    config = Config(**{name: record[name] for name in DEFAULTS})
    checkpoints = Path(folder).resolve() / "checkpoints"
    steps = sorted((int(p.name) for p in checkpoints.glob("*") if p.name.isdecimal()), reverse=True)
    if not steps or (step is not None and step not in steps):
        raise ConfigError(f"--run {folder}: no checkpoint " + (f"of step {step}; there are "
                          f"{', '.join(map(str, steps))}" if steps else "yet"))
    mesh = mesh or shard.make_mesh(devices=jax.devices()[:1])
    wanted = jax.tree.map(lambda shape, place: shape.update(sharding=place), weight_shapes(config),
                          shardings(weight_specs(config, mesh), mesh))
    for at in steps if step is None else [step]:
        try:
            return read_checkpoint(checkpoints / str(at), {"params": wanted},
                                   f"--run {folder}")[0]["params"], config
        except CorruptCheckpoint as e:
            print(f"checkpoint {at} is damaged: {e}", file=sys.stderr)
    which = "" if step is None else f"of step {step} "
    raise RunError(f"--run {folder}: no checkpoint {which}can be read")


def plan_weights(config: Config, mesh: Any, **options: Any) -> Params:
    """Where each weight lies on a mesh, and why."""
    return shard.plan_sharding(
        lambda p, b: loss(p, b, config), weight_shapes(config), batch_shapes(config, 1), mesh=mesh,
        tensor_dims=tensor_dims(config), **options)


def weight_specs(config: Config, mesh: Any) -> Params:
    return jax.tree.map(lambda d: d.spec, plan_weights(config, mesh))


def load_hf(folder: str | Path) -> tuple[Params, Config]:
    """A published model's weights. Not built yet."""
    raise ConfigError(f"{folder}: reading published models is not built yet; --model takes one of "
                      f"{', '.join(PRESETS)}")
