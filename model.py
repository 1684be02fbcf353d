"""The transformer and its loss, and where its weights come from.

    tokens [B, T] -> embed -> [ norm -> attention -> + -> norm -> MLP -> + ] x L -> norm -> logits

A modern decoder: RMSNorm before each half, rotary positions, grouped-query attention, SwiGLU. The
weights are nested dicts of arrays with the layers stacked along a leading dimension L; q, k and v
keep their heads as a dimension of their own. There is no mesh in this file, no axis and no
collective: it calls a few things of shard.py (through, stack, attend, stream, inner) that know.

Dimensions: B batch, T time, S time of keys, D model, H heads, K kv heads, N per head,
F feed-forward, V vocabulary (padded), L layers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shard
from shard import Refused

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
    tied: bool = False            # one table for reading and for saying tokens
    parallel: bool = False        # attention and MLP beside each other, after one norm
    rope_theta: float = 10000.0   # longest wavelength of the rotary positions, over 2 pi
    dropout: float = 0.0          # share of each block's output dropped in training
    dtype: str = ""               # float32 or bfloat16 to compute in; empty: float32 on CPU
    remat: str = "none"           # keep for the backward pass: none (all), selective, full (inputs)
    microbatches: int = 1         # parts in which the rows of a device go through the pipeline
    schedule: str = "gpipe"       # of the pipeline: gpipe, interleaved (with --chunks) or 1f1b
    chunks: int = 1               # pieces of consecutive layers that each stage of it has
    experts: int = 0              # experts in each MLP; 0: a dense MLP
    experts_per_token: int = 2    # of which each token visits
    shared_experts: int = 0       # and how many more it visits always
    balance: float = 0.01         # weight of the loss that makes experts equally busy, a layer
    router_z: float = 0.001       # weight of the loss that keeps the router's logits small, a layer

    def __post_init__(self) -> None:
        at_least = dict(layers=1, d_model=1, heads=1, kv_heads=0, head_dim=0, d_ff=0,
                        vocab_size=0, seq_len=1, experts=0, experts_per_token=1, shared_experts=0,
                        balance=0, router_z=0, microbatches=1, chunks=1)
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise Refused(f"--{name} {getattr(self, name)}: must be at least {least}")
        if not self.head_dim and self.d_model % self.heads:
            near = shard.nearest_divisor(self.d_model, self.heads)
            raise Refused(f"--d_model {self.d_model} does not divide by --heads {self.heads}; "
                          f"the nearest that does is --heads {near}, or give --head_dim")
        for name, value in (("kv_heads", self.heads), ("head_dim", self.d_model // self.heads),
                            ("d_ff", -(-self.d_model * 8 // (3 * 64)) * 64)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise Refused(f"--heads {self.heads} does not divide by --kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise Refused(f"--head_dim {self.head_dim}: rotary positions need an even one")
        if not 0 <= self.dropout < 1:
            raise Refused(f"--dropout {self.dropout}: at least 0 and below 1")
        if not self.rope_theta > 1:
            raise Refused(f"--rope_theta {self.rope_theta}: must be above 1")
        for name, known in (("dtype", ("", "float32", "bfloat16")),
                            ("remat", ("none", "selective", "full")),
                            ("schedule", ("gpipe", "interleaved", "1f1b"))):
            if getattr(self, name) not in known:
                raise Refused(f"--{name} {getattr(self, name)}: expected "
                              f"{', '.join(filter(None, known))}"
                              + shard.nearest(getattr(self, name), known))
        if self.experts and self.experts_per_token > self.experts:
            raise Refused(f"--experts_per_token {self.experts_per_token}: there are only "
                          f"--experts {self.experts}")
        if self.shared_experts and not self.experts:
            raise Refused(f"--shared_experts {self.shared_experts}: give --experts too; a dense MLP is "
                          f"as wide as --d_ff says")


PRESETS = {
    "tiny": Config(),
    "124m": Config(layers=12, d_model=768, heads=12, d_ff=2048, vocab_size=50257, seq_len=1024,
                   tied=True),
    "1.2b": Config(layers=24, d_model=2048, heads=16, d_ff=5504, vocab_size=32000, seq_len=2048,
                   tied=False),
    "llama-7b": Config(layers=32, d_model=4096, heads=32, d_ff=11008, vocab_size=32000,
                       seq_len=2048, tied=False),
    "llama-70b": Config(layers=80, d_model=8192, heads=64, kv_heads=8, d_ff=28672,
                        vocab_size=32000, seq_len=4096, tied=False),
    "llama3-8b": Config(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336,
                        vocab_size=128256, seq_len=8192, tied=False, rope_theta=500000.0),
    "llama3-405b": Config(layers=126, d_model=16384, heads=128, kv_heads=8, d_ff=53248,
                          vocab_size=128256, seq_len=8192, tied=False, rope_theta=500000.0),
    "mixtral-8x7b": Config(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, experts=8,
                           vocab_size=32000, seq_len=4096, tied=False, rope_theta=1000000.0),
}


# As many logits are in memory at once; of a longer or wider batch, some tokens at a time.
LOGITS = 2**25


def padded(vocab_size: int) -> int:
    """Rows of the vocabulary's tables: up to a multiple of 128, a TPU's lane width, whatever
    the mesh, so that a checkpoint fits every mesh. No token has the rows above vocab_size."""
    return -(-vocab_size // 128) * 128


# -------------------------------------------------------------------------------------------
# Weights

def _weights(c: Config) -> Params:
    """Every weight once: its shape, and the standard deviation that it starts with (None: ones)."""
    L, D, H, K, N, F, V = (c.layers, c.d_model, c.heads, c.kv_heads, c.head_dim, c.d_ff,
                           padded(c.vocab_size))
    # What is added to the stream 2 L times starts smaller by the root of that, so that the
    # stream's size does not grow with the depth.
    into, back = D**-0.5, (2 * L) ** -0.5
    weights = {
        "embed": ((V, D), D**-0.5),
        "layers": {
            "attn_norm": ((L, D), None),
            "wq": ((L, D, H, N), into),
            "wk": ((L, D, K, N), into),
            "wv": ((L, D, K, N), into),
            "wo": ((L, H, N, D), (H * N) ** -0.5 * back),
        },
        "norm": ((D,), None),
    }
    layers = weights["layers"]
    if not c.parallel:
        layers["mlp_norm"] = ((L, D), None)
    if wide := c.shared_experts * F if c.experts else F:        # of the MLP that all tokens visit
        layers |= {"w_gate": ((L, D, wide), into), "w_up": ((L, D, wide), into),
                   "w_down": ((L, wide, D), F**-0.5 * back)}
    if E := c.experts:
        layers |= {"router": ((L, D, E), into), "e_gate": ((L, E, D, F), into),
                   "e_up": ((L, E, D, F), into), "e_down": ((L, E, F, D), F**-0.5 * back)}
    if not c.tied:
        weights["head"] = ((D, V), into)
    return weights


def init(config: Config, key: jax.Array) -> Params:
    """New float32 weights. Under jit with out_shardings each device makes its own part alone:
    the bits of a weight are a function of the key and the place in it, not of the mesh."""
    if not config.vocab_size:
        raise Refused("vocab_size is 0: it follows from the data, or give --vocab_size")
    leaves, tree = jax.tree.flatten(_weights(config), is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [
        jnp.ones(shape, jnp.float32) if scale is None
        else scale * jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
        for i, (shape, scale) in enumerate(leaves)])


def count(params: Params) -> int:
    """The number of parameters."""
    return sum(math.prod(w.shape) for w in jax.tree.leaves(params))


def parameters(config: Config) -> tuple[int, int]:
    """How many parameters a model has, without the vocabulary's rows that no token has, and how many of
    them one token visits: of experts, those that it chooses."""
    c = config
    total = count(jax.eval_shape(lambda: init(c, jax.random.key(0))))
    total -= (padded(c.vocab_size) - c.vocab_size) * c.d_model * (1 if c.tied else 2)
    return total, total - c.layers * max(0, c.experts - c.experts_per_token) * 3 * c.d_model * c.d_ff


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
# The forward pass

def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over D, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)
    return x32.astype(x.dtype) * scale


def _rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary positions: each pair (x[i], x[i + N/2]) of a head turned by its own rate times the
    position, so that q.k depends on how far apart they are. x: [B, T, H, N]."""
    half = x.shape[-1] // 2
    rate = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)               # [N/2]
    angle = positions[:, :, None, None].astype(jnp.float32) * rate              # [B, T, 1, N/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
               ) -> tuple[jax.Array, jax.Array]:
    """q [B, T, H, N], k and v [B, S, K, N], mask [B, 1, T, S] -> [B, T, H, N], and the logarithm
    of the sum that the weights were divided by [B, H, T]."""
    if k.shape[2] != q.shape[2]:    # each key/value head serves the heads of its group
        k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthn,bshn->bhts", q * q.shape[-1] ** -0.5, k,
                        preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores, -1e30)
    probs = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bhts,bshn->bthn", probs, v), jax.nn.logsumexp(scores, -1)


def _kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """What _attention finds where each query sees the keys up to its own and no more, asked of the device's kernel: to
    change the one is to change the other, or to give shard.attend none."""
    return shard.causal(q, k, v)


def _drop(x: jax.Array, rate: float, site: Any, seeds: jax.Array | None,
          positions: jax.Array) -> jax.Array:
    """Dropout of [B, T, D]. The bits follow from the row's own seed, the place in the network and
    the position: not from the mesh, nor from how the batch was cut into micro-batches."""
    if seeds is None or rate == 0:
        return x
    def keep(seed, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), site), position)
        return jax.random.bernoulli(key, 1 - rate, x.shape[-1:])
    kept = jax.vmap(jax.vmap(keep, (None, 0)))(seeds, positions)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _mlp(gate: jax.Array, up: jax.Array) -> jax.Array:
    """What is between the two products of an MLP."""
    return jax.nn.silu(gate) * up


def _experts(w: Params, h: jax.Array, c: Config, layer: Any, rows: Params, back: list
             ) -> tuple[jax.Array, tuple[jax.Array, Params] | None]:
    """h [B, T, D] through each token's best experts, by the router's shares; what the pairs `back` make
    is added. In training also what is added to the loss: for each row, the product of the share of tokens
    that an expert has and the share that it was given in probability, summed over experts, times their
    number (1 if all are equal); and the router's squared log-sum-exp. Both are sums over rows and tokens,
    each with its weight: no mesh or micro-batch changes them."""
    E, K = c.experts, c.experts_per_token
    logits = shard.inner(jnp.einsum("btd,de->bte", h.astype(jnp.float32),
                                    w["router"].astype(jnp.float32)), None)
    probs = jax.nn.softmax(logits, -1)
    top, chosen = jax.lax.top_k(probs, K)                                       # [B, T, K]
    out = shard.experts(h, chosen, top / top.sum(-1, keepdims=True), (w["e_gate"], w["e_up"]),
                        _mlp, w["e_down"], *back)
    if rows["seeds"] is None:
        return out, None
    weights = rows["weights"]                                                   # [B, T]
    busy = jnp.einsum("btke,bt->be", jax.nn.one_hot(chosen, E), weights) / K    # [B, E]
    given = jnp.einsum("bte,bt->be", probs, weights)
    total = shard.over_time(weights.sum(-1, keepdims=True))                     # [B, 1]
    balance = E * jnp.sum(shard.over_time(busy) * given / jnp.maximum(total, 1e-9))
    z = jnp.sum(jax.nn.logsumexp(logits, -1) ** 2 * weights)
    added = c.balance * balance + c.router_z * z
    load = jnp.zeros((c.layers, E)).at[layer].set(busy.sum(0))
    return out, (added, jax.lax.stop_gradient({"router_loss": added, "expert_load": load}))


def _block(w: Params, x: jax.Array, layer: Any, c: Config, rows: Params, cache: Params | None = None,
           slot: Any = 0) -> tuple[jax.Array, Any, Params | None]:
    """One layer: x [B, T, D] -> x, what is added to the loss, and its keys and values if it keeps
    them. `rows` is what is known of the rows: positions, places, documents, seeds, weights."""
    drop = lambda y, half: _drop(y, c.dropout, 2 * layer + half, rows["seeds"],     # noqa: E731
                                 rows["asking"]["place"])
    h = _norm(x, w["attn_norm"])
    dense = [w["w_gate"], w["w_up"]] if "w_gate" in w else []
    keys = [w["wk"], w["wv"]] if cache else [shard.heads(w[name], c.heads) for name in ("wk", "wv")]
    q, k, v, *mlp = shard.columns(h, w["wq"], *keys, *dense * c.parallel)
    q, k = (_rotate(y, rows["positions"], c.rope_theta) for y in (q, k))
    if cache is not None:
        cache = {"k": jax.lax.dynamic_update_slice_in_dim(cache["k"], k, slot, 1),
                 "v": jax.lax.dynamic_update_slice_in_dim(cache["v"], v, slot, 1)}
        k, v = cache["k"], cache["v"]                                           # [B, S, K, N]
    a = shard.attend(_attention, q, k, v, _seen, rows["asking"], rows["asked"], cache is None,
                     None if cache or {"segments", "places"} & rows.keys() else _kernel)         # [B, T, H, N]
    back = [(a, w["wo"])]
    if not c.parallel:
        x = shard.stream(x + drop(shard.row(*back), 0))
        h, back = _norm(x, w["mlp_norm"]), []
        mlp = shard.columns(h, *dense)                                          # [B, T, F] each
    if dense:
        back.append((_mlp(*mlp), w["w_down"]))
    found, more = _experts(w, h, c, layer, rows, back) if c.experts else (shard.row(*back), None)
    return shard.stream(x + drop(found, 1)), more, cache


def _enter(params: Params, tokens: jax.Array, c: Config) -> jax.Array:
    return shard.lookup(params["embed"], tokens) * c.d_model**0.5       # rows of about unit size


def _trunk(params: Params, tokens: jax.Array, c: Config, rows: Params,
           cache: Params | None = None, slot: Any = 0) -> tuple[jax.Array, Params | None]:
    """tokens [B, T] -> the last norm's output [B, T, D], and the cache with these T in it."""
    def layer(w, x, each):
        i, layer_cache = each
        x, _, layer_cache = _block(w, x, i, c, rows, layer_cache, slot)
        return x, layer_cache

    x, cache = shard.stack(layer, params["layers"], _enter(params, tokens, c),
                           (jnp.arange(c.layers), cache))
    return _norm(x, params["norm"]), cache


def _logits(params: Params, x: jax.Array, c: Config) -> jax.Array:
    """x [B, T, D] -> float32 [B, T, V]; the padded ids can never be said."""
    head = params["embed"].T if c.tied else params["head"]
    logits, = shard.columns(x, head, dtype=jnp.float32)
    return shard.inner(jnp.where(jnp.arange(logits.shape[-1]) < c.vocab_size, logits, -1e30), 2)


def _seen(asking: Params, asked: Params) -> jax.Array:
    """Which keys a query sees [B, 1, T, S]: those before it, in its document."""
    before = asked["place"][:, None, :] <= asking["place"][:, :, None]
    return (before & (asked["document"][:, None, :] == asking["document"][:, :, None]))[:, None]


def _known(tokens: jax.Array, batch: dict[str, jax.Array]) -> Params:
    """What is known of the rows of a batch, and of each of their queries and keys: positions [B, T]
    in the document, and the place in the row and the document that decide who sees whom."""
    place = batch.get("places", jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    known = {"place": place, "document": batch.get("segments", jnp.zeros_like(place))}
    return {"seeds": None, "positions": place, **batch, "asking": known, "asked": known}


def forward(params: Params, tokens: jax.Array, config: Config, source: jax.Array | None = None,
            positions: jax.Array | None = None, segments: jax.Array | None = None) -> jax.Array:
    """Logits [B, T, vocab_size] of the token that follows each of `tokens` [B, T]."""
    if source is not None:
        raise Refused("this model has no encoder to give a source to")
    params = shard.cast(params, config.dtype)
    given = {k: v for k, v in (("positions", positions), ("segments", segments)) if v is not None}
    x, _ = _trunk(params, tokens, config, _known(tokens, given))
    return _logits(params, x, config)[..., :config.vocab_size]


def loss(params: Params, batch: dict[str, jax.Array], config: Config,
         specs: Params | None = None, more: bool = False) -> tuple:
    """(sum, count): nats over the batch's targets, weighted, and the sum of the weights. They
    travel together and are divided once, so that masks and uneven shards change nothing.
    Where the batch brings `seeds` [B], it is to learn from: dropout is on, and experts add what
    makes them equally busy; `more` then gives other sums of theirs, third."""
    params, c, rows = shard.cast(params, config.dtype), config, _known(batch["tokens"], batch)

    def enter(params, rows):
        return _enter(params, rows["tokens"], c)

    def layer(w, x, i, rows):
        return _block(w, x, i, c, rows)[:2]

    def leave(params, x, rows):
        def nats(params, x, targets, weights):
            logits = _logits(params, x, c)                                      # [B, T, V]
            # No gather, whose gradient a partitioner may send around.
            said = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0), -1)
            return jnp.sum((jax.nn.logsumexp(logits, -1) - said) * weights)

        x, name = _norm(x, params["norm"]), "embed" if c.tied else "head"
        return (shard.in_pieces(nats, pieces(c, *x.shape[:2]), {name: params[name]}, x, rows["targets"],
                                rows["weights"]), jnp.sum(rows["weights"]))

    others = {k: w for k, w in params.items() if k != "layers"}
    found = shard.through(enter, layer, leave, others, params["layers"], jnp.arange(c.layers), rows,
                          specs and specs["layers"], c.remat, c.microbatches, c.schedule, c.chunks)
    return found if more else found[:2]


def pieces(config: Config, rows: int, time: int) -> int:
    """In how many pieces of their time the loss of so many rows is computed."""
    size = rows * time * padded(config.vocab_size)
    return min(n for n in range(1, time + 1) if time % n == 0 and (size <= n * LOGITS or n == time))


def a_batch(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape of a batch."""
    shape = (rows, config.seq_len)
    return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32),
            "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}


def new_cache(config: Config, rows: int, slots: int, dtype: Any) -> Params:
    """Room for the keys and values of `slots` tokens in each row."""
    shape = (config.layers, rows, slots, config.kv_heads, config.head_dim)
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}


def extend(params: Params, cache: Params, tokens: jax.Array, slot: Any, start: jax.Array,
           config: Config) -> tuple[jax.Array, Params]:
    """Put `tokens` [B, T] into the cache's slots from `slot` on. Gives the logits [B, V] after
    the last of them, and the cache. Row b begins at slot start[b]; what lies before is padding."""
    B, T = tokens.shape
    slots = jnp.broadcast_to(slot + jnp.arange(T), (B, T))
    keys = jnp.broadcast_to(jnp.arange(cache["k"].shape[2]), (B, cache["k"].shape[2]))  # [B, S]
    asking = {"place": slots, "document": jnp.zeros_like(slots)}
    asked = {"place": keys, "document": jnp.where(keys < start[:, None], -1, 0)}
    rows = {"positions": jnp.maximum(slots - start[:, None], 0), "asking": asking, "asked": asked,
            "seeds": None}
    x, cache = _trunk(params, tokens, config, rows, cache, slot)
    return _logits(params, x[:, -1:], config)[:, 0], cache


# -------------------------------------------------------------------------------------------
# Where weights come from

def read_run(folder: str | Path) -> dict[str, Any]:
    """config.json of a run."""
    path = Path(folder) / "config.json"
    try:
        record = json.loads(path.read_text())
        if "d_model" not in record:
            raise Refused(f"{path} is damaged, or not a run's: it has no d_model")
        # What came to be a choice since then was as it is when nothing is said.
        return {**{f.name: f.default for f in dataclasses.fields(Config)}, **record}
    except OSError:
        raise Refused(f"--run {folder}: no run there ({path} cannot be read); give the --out of "
                      f"a train.py that has begun") from None
    except (json.JSONDecodeError, TypeError):
        raise Refused(f"{path} is damaged: not a JSON object") from None


def load_run(folder: str | Path, mesh: Any = None, step: int | None = None
             ) -> tuple[Params, Config]:
    """The weights of a run's newest (or given) step, without its optimizer, straight into their
    places on the mesh; without a mesh, on one device. One that is damaged is passed over, and it is said."""
    import train
    record = read_run(folder)
    config = Config(**{f.name: record[f.name] for f in dataclasses.fields(Config)})
    where = Path(folder).resolve() / "checkpoints"
    steps = sorted((int(p.name) for p in where.glob("*") if p.name.isdecimal()), reverse=True)
    if not steps or (step is not None and step not in steps):
        raise Refused(f"--run {folder}: no checkpoint " + (f"of step {step}; there are "
                      f"{', '.join(map(str, steps))}" if steps else "yet"))
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    mesh = mesh or shard.make_mesh(devices=jax.devices()[:1])
    specs = shard.infer_specs(lambda p, b: loss(p, b, config), shapes, a_batch(config, 1),
                              mesh=mesh)
    places = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p),
                          shapes, shard.shardings(specs, mesh))
    for at in steps if step is None else [step]:
        try:
            return train.read_checkpoint(where / str(at), {"params": places}, f"--run {folder}")[0]["params"], config
        except train.Damaged as e:
            print(f"checkpoint {at} is damaged: {e}", file=sys.stderr)
    raise train.Fault(f"--run {folder}: no checkpoint " + f"of step {step} " * (step is not None) + "can be read")


def load_hf(folder: str | Path) -> tuple[Params, Config]:
    """A published model's weights. Not built yet."""
    raise Refused(f"{folder}: reading published models is not built yet; --model takes one of "
                  f"{', '.join(PRESETS)}")
