"""The transformer and its loss, and where its weights come from.

    tokens [B, T] -> embed -> [ norm -> attention -> + -> norm -> MLP -> + ] x L -> norm -> logits

A modern decoder: RMSNorm before each half, rotary positions, grouped-query attention, SwiGLU. What
published models do otherwise is an option, an `if` in the one function of its concern; to read the
plain decoder, pass these over. The weights are nested dicts of arrays with the layers stacked along
a leading dimension L; q, k and v keep their heads as a dimension of their own.

There is no mesh and no axis in this file. Where a collective may be needed it calls shard.py:
`columns` into a block, `row` out of it, `embed_lookup`, `attend`, `experts`, `token_loss`. Without
a mesh these are plain products.

B batch, T time, S time of keys, D model, H heads, K kv heads, N per head, M per head of values,
F feed-forward, V vocabulary (padded), W width of the embedding, L layers, E experts, G their width,
P rows of positions. Latent attention: Q, R short vectors, U the turned part of a head, Y the rest.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import shard
from zigzag import folders, lora, presets, weights
from zigzag.checkpoint import run_config
from zigzag.checks import check_model_config
from zigzag.errors import ConfigError
from zigzag.experts import choose
from zigzag.flags import run_main
from zigzag.mesh import cast, shardings
from zigzag.positions import alibi_bias, alibi_slopes, layer_rates, layer_window, rotate, sinusoids
from zigzag.products import loss_chunks, matmul, on_columns
from zigzag.weights import Table

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
    parallel_norms: int = 1       # of a parallel block; 2: the MLP has a norm of its own
    norm: str = "rms"             # or layer: minus the mean, and with a bias
    norm_eps: float = 1e-6        # what a norm adds to the variance
    norm_place: str = "pre"       # of attention and MLP; or post (after the sum), sandwich (both)
    embed_norm: bool = False      # a norm after the embedding
    qk_norm: bool = False         # RMSNorm of every query and key head
    activation: str = "silu"      # of the MLP; or gelu, gelu_tanh, relu
    gated: bool = True            # the activation multiplies a second product
    biases: str = ""              # which products have a bias: of qkv, out, mlp, head, with commas
    positions: str = "rotary"     # or learned, sinusoidal, alibi, alibi16 (in bfloat16), none
    rope_theta: float = 10000.0   # longest wavelength of the rotary positions, over 2 pi
    rope_scaling: str = ""        # as published, in JSON: {"rope_type": "linear", "factor": 2}
    rotary_dim: int = 0           # as much of a head is turned; 0: all
    position_rows: int = 0        # rows of the table of learned positions; 0: as seq_len needs
    position_offset: int = 0      # its row of the first position
    window: int = 0               # how many keys a query sees, itself included; 0: all before it
    local_layers: str = ""        # which layers have the window: lllg repeated, say; empty: all
    local_theta: float = 0.0      # rope_theta of layers with the window; 0: as the others, scaled
    embed_dim: int = 0            # width of the embedding and the head; 0: d_model
    embed_scale: float = 0.0      # what the embedding is multiplied by; 0: the root of d_model
    attn_scale: float = 0.0       # what scores are multiplied by; 0: head_dim ** -0.5
    attn_softcap: float = 0.0     # keeps scores between it and its negative, by tanh; 0: no bounds
    logit_softcap: float = 0.0    # the same for the logits
    q_rank: int = 0               # latent attention: queries from so wide a vector; 0: from d_model
    kv_rank: int = 0              # and keys and values; 0: no latent attention
    v_head_dim: int = 0           # width of a head's values; 0: head_dim
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
    expert_d_ff: int = 0          # width of an expert; 0: d_ff
    dense_layers: int = 0         # the first layers, which have a dense MLP in place of experts
    router: str = "softmax"       # shares of experts; or sigmoid, with a bias to choose by
    router_norm: bool = True      # a token's shares add up to 1
    router_scale: float = 1.0     # and are multiplied by this
    expert_groups: int = 1        # groups of experts, among which a token chooses first
    groups_per_token: int = 1     # how many groups it chooses
    balance: float = 0.01         # weight of the loss that makes experts equally busy, a layer
    router_z: float = 0.001       # weight of the loss that keeps the router's logits small, a layer
    lora_rank: int = 0            # train only adapters of this rank, beside the layers' matrices
    published: str = ""           # config.json of the published model that this came from

    def __post_init__(self) -> None:
        check_model_config(self)


PRESETS = {name: Config(**fields) for name, fields in presets.PRESETS.items()}


def padded(vocab_size: int) -> int:
    """Rows of the vocabulary's tables: up to a multiple of 128, a TPU's lane width, whatever
    the mesh, so that a checkpoint fits every mesh. No token has the rows above vocab_size."""
    return -(-vocab_size // 128) * 128


# -------------------------------------------------------------------------------------------
# Weights

def _weights(c):
    """Every weight, once: its axes, the deviation of its first values (none: ones), and the axis
    that tensor may split in the code below."""
    D, W = c.d_model, c.embed_dim or c.d_model
    table = Table(D=D, W=W, V=padded(c.vocab_size), P=c.position_rows)
    stacks = {"layers": _layer_weights(c, c.layers - c.dense_layers, c.experts)}
    if c.dense_layers:
        stacks["dense_layers"] = _layer_weights(c, c.dense_layers, 0)
    weights = {"embed": table("V W", W**-0.5, "V"), **stacks}
    if not c.tied:
        weights["head"] = table("W V", W**-0.5, "V")
    if _has_bias(c, "head"):
        weights["head_bias"] = table("1 V", 0.0, "V")
    if c.positions == "learned":
        weights["positions"] = table("P D", 0.02)
    if W != D:
        weights |= {"project_in": table("W D", W**-0.5), "project_out": table("D W", D**-0.5)}
    norms = ["embed_norm"] * c.embed_norm + ["norm"] * (c.norm_place != "post")
    return weights | _norms(c, table, "D", norms)


def _layer_weights(c, L, experts):
    """The weights of L layers that are alike."""
    D, G = c.d_model, c.expert_d_ff or c.d_ff
    F = c.shared_experts * G if experts else c.d_ff
    # Of latent attention (R): queries, keys and values are made of short vectors, and a part of
    # each key, the one that is turned (U), is the same for all heads.
    Q, R, U, H, M = c.q_rank, c.kv_rank, c.rotary_dim, c.heads, c.v_head_dim or c.head_dim
    table = Table(L=L, D=D, H=H, K=c.kv_heads, N=c.head_dim, M=M, F=F, E=experts, G=G, Q=Q, R=R,
                  U=U, Y=c.head_dim - U)
    # What is added to the residual stream 2 L times starts smaller by the root of that, so that
    # the stream's size does not grow with the depth.
    into, back = D**-0.5, (2 * c.layers) ** -0.5
    weights = {"wq": table("L D H N", into, "H"), "wk": table("L D K N", into, "K"),
               "wv": table("L D K M", into, "K"),
               "wo": table("L H M D", (H * M) ** -0.5 * back, "H")}
    if R:
        weights |= {"kv_down": table("L D R", into), "kv_norm": table("L R"),
                    "k_rotary": table("L D U", into), "wk": table("L R H Y", R**-0.5, "H"),
                    "wv": table("L R H M", R**-0.5, "H")}
    if R and Q:
        weights |= {"q_down": table("L D Q", into), "q_down_norm": table("L Q"),
                    "wq": table("L Q H N", Q**-0.5, "H")}
    if c.qk_norm:
        weights |= {"q_norm": table("L N"), "k_norm": table("L N")}
    if F:           # the MLP that all tokens visit
        weights |= {"w_gate": table("L D F", into, "F")} if c.gated else {}
        weights |= {"w_up": table("L D F", into, "F"),
                    "w_down": table("L F D", F**-0.5 * back, "F")}
    if experts:
        weights |= {"router": table("L D E", into), "e_gate": table("L E D G", into, "G"),
                    "e_up": table("L E D G", into, "G"),
                    "e_down": table("L E G D", G**-0.5 * back, "G")}
    if experts and c.router == "sigmoid":
        weights["router_bias"] = table("L E", 0.0)
    biases = {"wq": ("qkv", "L 1 H N", "H"), "wk": ("qkv", "L 1 K N", "K"),
              "wv": ("qkv", "L 1 K M", "K"), "wo": ("out", "L D", ""),
              "w_gate": ("mlp", "L 1 F", "F"), "w_up": ("mlp", "L 1 F", "F"),
              "w_down": ("mlp", "L D", "")}
    weights |= {f"{name}_bias": table(axes, 0.0, tensor)
                for name, (product, axes, tensor) in biases.items()
                if _has_bias(c, product) and name in weights}
    norms = ["attn_norm"] + ["mlp_norm"] * (not c.parallel or c.parallel_norms == 2)
    norms += ["attn_out_norm", "mlp_out_norm"] * (c.norm_place == "sandwich")
    return lora.with_adapters(weights | _norms(c, table, "L D", norms), c.lora_rank)


def _norms(c, table, axes, names):
    weights = {name: table(axes) for name in names}
    if c.norm == "layer":
        weights |= {f"{name}_bias": table(axes, 0.0) for name in names}
    return weights


def _has_bias(c, product):
    return product in c.biases.split(",")


def init(config: Config, key: Array) -> Params:
    """New float32 weights, which follow from the key and each weight's path, not from the mesh."""
    if not config.vocab_size:
        raise ConfigError("vocab_size is 0: it follows from the data, or give --vocab_size")
    return weights.first_values(_weights(config), key)


def weight_shapes(config: Config) -> Params:
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def tensor_dims(config: Config) -> Params:
    """Of each weight the dimension that tensor may split, or -1."""
    return jax.tree.map(lambda w: w.tensor, _weights(config))


def parameters(config: Config) -> tuple[int, int]:
    """How many parameters a model has, and how many of them one token visits."""
    return weights.parameters(_weights(config), config,
                              padded(config.vocab_size) - config.vocab_size)


def flops(config: Config, tokens: int) -> float:
    """Arithmetic of training on that many tokens."""
    return weights.flops(_weights(config), config, tokens)


# -------------------------------------------------------------------------------------------
# The parts of a block

def _norm(w, name, x, c, kind="", eps=0.0):
    """RMSNorm or LayerNorm over the last dimension, in float32."""
    x32 = x.astype(jnp.float32)
    if (kind or c.norm) == "layer":
        x32 = x32 - jnp.mean(x32, -1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + (eps or c.norm_eps))
    x = x32.astype(x.dtype) * w[name]   # of a time-split x autodiff sums the scale's gradient here
    return x + w[f"{name}_bias"] if f"{name}_bias" in w else x


def _softmax_attention(c, slopes, q, k, v, mask):
    """q [B, T, H, N], k and v [B, S, K, N], mask [B, 1, T, S] -> [B, T, H, N], and the logarithm
    of the sum that the weights were divided by [B, H, T]. With ALiBi (slopes [H]) the mask is a
    pair, second the positions of keys [B, 1, 1, S]."""
    if k.shape[2] != q.shape[2]:    # each key/value head serves the heads of its group
        k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthn,bshn->bhts", q * q.shape[-1] ** -0.5, k,
                        preferred_element_type=jnp.float32)
    if c.attn_softcap:
        scores = c.attn_softcap * jnp.tanh(scores / c.attn_softcap)
    if slopes is not None:
        mask, position = mask
        scores += alibi_bias(c, slopes, position)
    scores = jnp.where(mask, scores, -1e30)     # finite: a ring joins parts where nothing is seen
    probs = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bhts,bshn->bthn", probs, v), jax.nn.logsumexp(scores, -1)


def _attention_mask(c, i, query, key):
    """Which keys a query sees [B, 1, T, S]: those up to its place in the row, in its document. (The
    device's kernel knows only the first half: name any other mask in `is_plain` of _heads.)"""
    seen = key["place"][:, None, :] <= query["place"][:, :, None]
    if c.window:
        seen &= key["place"][:, None, :] > query["place"][:, :, None] - layer_window(c, i)
    seen = (seen & (key["document"][:, None, :] == query["document"][:, :, None]))[:, None]
    return (seen, key["position"][:, None, None, :]) if "position" in key else seen


def _with_bias(w, name):
    """A weight, or a pair of it and its bias, as `columns` takes it."""
    bias = w.get(f"{name}_bias")
    return w[name] if bias is None else (w[name], bias)


def _into_heads(w, c):
    return [_with_bias(w, "wq"), *(
        on_columns(lambda a: shard.repeat_kv(a, c.heads), _with_bias(w, name))
        for name in ("wk", "wv"))]


def _latent_heads(w, h, c):
    """Queries, keys and values [B, T, H, N] of latent attention. (Its own norms have always had an
    epsilon of 1e-6, whatever that of the others.)"""
    q = _norm(w, "q_down_norm", matmul(h, w["q_down"]), c, "rms", 1e-6) if c.q_rank else h
    q, = shard.columns(q, w["wq"])
    latent = _norm(w, "kv_norm", matmul(h, w["kv_down"]), c, "rms", 1e-6)
    k, v = shard.columns(latent, w["wk"], w["wv"])
    turned = shard.time_of_block(matmul(h, w["k_rotary"]))[:, :, None]          # of all heads
    turned = jnp.broadcast_to(turned, (*k.shape[:3], turned.shape[-1]))
    return q, jnp.concatenate([turned, k], -1), v


def _heads(w, qkv, c, i, batch, cache=None):
    """Queries [B, T, H, N], keys and values [B, T, K, N] -> attention [B, T, H, N], and the cache
    with these keys and values in it."""
    q, k, v = qkv
    if c.qk_norm:
        q, k = _norm(w, "q_norm", q, c, "rms"), _norm(w, "k_norm", k, c, "rms")
    if c.positions == "rotary":
        q, k = (rotate(a, batch["positions"], *layer_rates(c, i)) for a in (q, k))
    if c.attn_scale:        # beside what attention multiplies by itself
        q = q * (c.attn_scale * c.head_dim**0.5)
    if cache is not None:
        cache = {name: jax.lax.dynamic_update_slice_in_dim(cache[name], a, batch["slot"], 1)
                 for name, a in (("k", k), ("v", v))}
        k, v = cache["k"], cache["v"]                                           # [B, S, K, N]
    slopes = None
    if c.positions.startswith("alibi"):
        slopes = jnp.asarray(alibi_slopes(c.heads))
        slopes = shard.own_part(slopes, 0) if q.shape[2] < c.heads else slopes
    is_plain = not (c.window or c.attn_softcap or c.kv_rank or slopes is not None
                    or cache is not None or {"segments", "places"} & batch.keys())
    return shard.attend(functools.partial(_softmax_attention, c, slopes), q, k, v,
                        functools.partial(_attention_mask, c, i), batch["query"], batch["key"],
                        causal=cache is None, kernel=c.kernel and is_plain), cache


def _attention(w, h, c, i, batch, cache):
    """h [B, T, D] -> [B, T, D]."""
    qkv = _latent_heads(w, h, c) if c.kv_rank else shard.columns(h, *_into_heads(w, c))
    heads, cache = _heads(w, qkv, c, i, batch, cache)
    return _plus_bias(w, shard.row((heads, w["wo"]), split_time=c.sequence_parallel), "wo"), cache


def _plus_bias(w, y, *names):
    return sum((w[f"{name}_bias"] for name in names if f"{name}_bias" in w), y)


ACTIVATIONS = {"silu": jax.nn.silu, "relu": jax.nn.relu, "gelu_tanh": jax.nn.gelu,
               "gelu": functools.partial(jax.nn.gelu, approximate=False)}


def _activate(c, first, *gated):
    """What is between the two products of an MLP."""
    first = ACTIVATIONS[c.activation](first)
    return first * gated[0] if gated else first


def _into_dense(w):
    """The weights into the MLP that all tokens visit, if there is one."""
    return [_with_bias(w, name) for name in ("w_gate", "w_up") if name in w]


def _feed_forward(w, h, c, i, batch):
    """h [B, T, D] -> [B, T, D], and what experts add to the loss."""
    y, aux = _out_of_block(w, h, c, i, batch, [], shard.columns(h, *_into_dense(w)))
    return _plus_bias(w, y, "w_down"), aux


def _out_of_block(w, h, c, i, batch, out, dense):
    """The sum of the products `out`, of the MLP that all tokens visit (`dense` is what its first
    products make), and of what experts make of h; and what those add to the loss."""
    if dense:
        out = [*out, (_activate(c, *dense), w["w_down"])]
    if "router" in w:
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
    probs = jax.nn.softmax(logits, -1) if c.router == "softmax" else jax.nn.sigmoid(logits)
    chosen = choose(probs, w.get("router_bias"), c)                             # [B, T, K]
    top = jnp.take_along_axis(probs, chosen, -1)
    if c.router_norm:
        top = top / top.sum(-1, keepdims=True)
    out = shard.experts(h, chosen, top * c.router_scale, (w["e_gate"], w["e_up"]),
                        functools.partial(_activate, c), w["e_down"], *beside,
                        split_time=c.sequence_parallel)
    if "seeds" not in batch:
        return out, None
    weights = shard.my_time_slice(batch["weights"], h)                          # [B, T]
    busy = jnp.einsum("btke,bt->be", jax.nn.one_hot(chosen, E), weights) / K    # [B, E]
    given = jnp.einsum("bte,bt->be", probs / probs.sum(-1, keepdims=True), weights)
    total = shard.sum_over_time(weights.sum(-1, keepdims=True))                 # [B, 1]
    balance = E * jnp.sum(shard.sum_over_time(busy) * given / jnp.maximum(total, 1e-9))
    z = jnp.sum(jax.nn.logsumexp(logits, -1) ** 2 * weights)
    added = c.balance * balance + c.router_z * z
    load = jnp.zeros((c.layers - c.dense_layers, E)).at[i - c.dense_layers].set(busy.sum(0))
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
    """The stream [B, T, D] that the layers begin with."""
    x = shard.embed_lookup(params["embed"], batch["tokens"], split_time=c.sequence_parallel)
    x = x * (c.embed_scale or c.d_model**0.5)   # of new weights: rows of about unit size
    if "project_in" in params:
        x = matmul(x, params["project_in"])
    if c.positions in ("learned", "sinusoidal"):
        table = params.get("positions", sinusoids(c.seq_len + c.position_offset, c.d_model))
        places = shard.my_time_slice(batch["positions"], x) + c.position_offset
        x = x + table[places].astype(x.dtype)
    if c.embed_norm:
        x = _norm(params, "embed_norm", x, c)
    return x


def _block(w, x, i, c, batch, cache=None):
    """Layer number i: x [B, T, D] -> x, what is added to the loss, and the cache."""
    w = lora.adapted(w)
    if c.parallel:
        return _parallel_block(w, x, i, c, batch, cache)
    is_post = c.norm_place == "post"
    y, cache = _attention(w, x if is_post else _norm(w, "attn_norm", x, c), c, i, batch, cache)
    x = _add(w, "attn", x, y, c, 2 * i, batch)
    y, aux = _feed_forward(w, x if is_post else _norm(w, "mlp_norm", x, c), c, i, batch)
    return _add(w, "mlp", x, y, c, 2 * i + 1, batch), aux, cache


def _add(w, half, x, y, c, site, batch):
    """The stream, and what attention or MLP add to it."""
    if c.norm_place == "sandwich":
        y = _norm(w, f"{half}_out_norm", y, c)
    x = x + _drop(y, c, site, batch)
    return _norm(w, f"{half}_norm", x, c) if c.norm_place == "post" else x


def _parallel_block(w, x, i, c, batch, cache):
    """Attention and MLP beside each other: after one norm, one collective into both; one out of
    both."""
    h = _norm(w, "attn_norm", x, c)
    if c.parallel_norms == 1:
        q, k, v, *dense = shard.columns(h, *_into_heads(w, c), *_into_dense(w))
    else:
        q, k, v = shard.columns(h, *_into_heads(w, c))
        h = _norm(w, "mlp_norm", x, c)
        dense = shard.columns(h, *_into_dense(w))
    heads, cache = _heads(w, [q, k, v], c, i, batch, cache)
    y, aux = _out_of_block(w, h, c, i, batch, [(heads, w["wo"])], dense)
    return x + _drop(_plus_bias(w, y, "wo", "w_down"), c, 2 * i + 1, batch), aux, cache


def _head(params, x, c):
    """The last norm's output [B, T, W] and the loss head [W, V], with its bias if it has one."""
    if "norm" in params:
        x = _norm(params, "norm", x, c)
    if "project_out" in params:
        x = matmul(x, params["project_out"])
    head = {"head": params["embed"].T if c.tied else params["head"]}
    return x, _with_bias({**params, **head}, "head")


def _with_info(batch, c):
    """A batch with what is known of its tokens: their positions [B, T] in the document, and, of
    queries and of keys, the place in the row and the document, which decide who sees whom."""
    shape = batch["tokens"].shape
    place = batch.get("places", jnp.broadcast_to(jnp.arange(shape[1]), shape))
    batch = {"positions": place, **batch}
    info = {"place": place, "document": batch.get("segments", jnp.zeros_like(place))}
    if c.positions.startswith("alibi"):
        info["position"] = batch["positions"]
    return {**batch, "query": info, "key": info}


def _stack(params, name, x, c, batch, cache=None, specs=None):
    """x through "dense_layers" or "layers", and their part of the cache."""
    first, count = (0, c.dense_layers) if name == "dense_layers" else (
        c.dense_layers, c.layers - c.dense_layers)

    def layer(w, x, each):
        i, layer_cache = each
        x, _, layer_cache = _block(w, x, i, c, batch, layer_cache)
        return x, layer_cache

    own = jax.tree.map(lambda a: a[first:first + count], cache)
    return shard.layers(layer, params[name], x, (jnp.arange(first, first + count), own),
                        specs and specs[name])


def _trunk(params, c, batch, cache=None, specs=None):
    """The last block's output [B, T, D], and the cache with these T tokens in it."""
    x, parts = _embed(params, batch, c), []
    for name in ("dense_layers", "layers") if c.dense_layers else ("layers",):
        x, part = _stack(params, name, x, c, batch, cache, specs)
        parts.append(part)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)


def forward(params: Params, tokens: Array, config: Config, source: Array | None = None,
            positions: Array | None = None, segments: Array | None = None) -> Array:
    """Logits [B, T, vocab_size] of the token that follows each of `tokens` [B, T]."""
    if source is not None:
        raise ConfigError("this model has no encoder to give a source to")
    given = {"tokens": tokens, "positions": positions, "segments": segments}
    config = dataclasses.replace(config, seq_len=shard.whole_length(tokens))
    batch = _with_info({k: v for k, v in given.items() if v is not None}, config)
    params = cast(params, config.dtype)
    x, _ = _trunk(params, config, batch)
    logits = shard.vocab_logits(*_head(params, x, config), config.vocab_size, config.logit_softcap)
    return logits[..., :config.vocab_size]


def loss(params: Params, batch: dict[str, Array], config: Config,
         specs: Params | None = None, with_aux: bool = False) -> tuple:
    """(sum, count): the cross-entropy of the batch's targets in nats, weighted, and the sum of the
    weights. They travel together and are divided once, so that masks and uneven shards change
    nothing. Where the batch brings `seeds` [B], it is to learn from: dropout is on, and experts add
    what makes them equally busy; `with_aux` then gives other sums of theirs, third."""
    # (Some scaled positions depend on how long the rows are.)
    c = dataclasses.replace(config, seq_len=shard.whole_length(batch["tokens"]))
    params, batch = cast(params, c.dtype), _with_info(batch, c)

    def embed(params, batch):
        x = _embed(params, batch, c)
        if c.dense_layers:
            x, _ = _stack(params, "dense_layers", x, c, batch, specs=specs)
        return x

    def block(w, x, i, batch):
        return _block(w, x, c.dense_layers + i, c, batch)[:2]

    def head(params, x, batch):
        x, table = _head(params, x, c)
        return shard.token_loss(x, table, batch["targets"], batch["weights"], c.vocab_size,
                                loss_chunks(*x.shape[:2], padded(c.vocab_size)),
                                c.logit_softcap), jnp.sum(batch["weights"])

    others = {k: w for k, w in params.items() if k != "layers"}
    result = shard.pipelined_loss(
        embed, block, head, others, params["layers"], batch, specs and specs["layers"], c.remat,
        c.microbatches, c.schedule, c.chunks, c.sum_dtype)
    return result if with_aux else result[:2]


def batch_shapes(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    ids, weights = (jax.ShapeDtypeStruct((rows, config.seq_len), dtype)
                    for dtype in (jnp.int32, jnp.float32))
    return {"tokens": ids, "targets": ids, "weights": weights}


# -------------------------------------------------------------------------------------------
# Decoding with a cache

def new_cache(params: Params, config: Config, rows: int, slots: int) -> Params:
    """Room for the keys and values of `slots` tokens in each row, of the heads that this device
    has of them."""
    c = config

    def zeros(name, width):
        w = jax.eval_shape(lambda w: shard.repeat_kv(w[0], c.heads), params["layers"][name])
        return jnp.zeros((c.layers, rows, slots, w.shape[1], width), w.dtype)

    return {"k": zeros("wk", c.head_dim), "v": zeros("wv", c.v_head_dim or c.head_dim)}


def extend(params: Params, cache: Params, tokens: Array, slot: Any, start: Array,
           config: Config, specs: Params | None = None) -> tuple[Array, Params]:
    """Put `tokens` [B, T] into the cache's slots from `slot` on. Gives the logits [B, V] after
    the last of them, and the cache. Row b begins at slot start[b]; what lies before is padding.
    Weights of layers that `specs` split over fsdp are gathered layer by layer."""
    (B, T), S = tokens.shape, cache["k"].shape[2]
    slots = jnp.broadcast_to(slot + jnp.arange(T), (B, T))
    keys = jnp.broadcast_to(jnp.arange(S), (B, S))
    position, key_position = (jnp.maximum(a - start[:, None], 0) for a in (slots, keys))
    batch = {"tokens": tokens, "positions": position, "slot": slot,
             "query": {"place": slots, "document": jnp.zeros_like(slots)},
             "key": {"place": keys, "document": jnp.where(keys < start[:, None], -1, 0)}}
    if config.positions.startswith("alibi"):
        batch["query"]["position"], batch["key"]["position"] = position, key_position
    config = dataclasses.replace(config, seq_len=S)
    x, cache = _trunk(params, config, batch, cache, specs)
    x, head = _head(params, shard.whole_time(x)[:, -1:], config)
    return shard.vocab_logits(x, head, config.vocab_size, config.logit_softcap)[:, 0], cache


# -------------------------------------------------------------------------------------------
# Where weights come from

def load_run(folder: str | Path, mesh: Any = None, step: int | None = None
             ) -> tuple[Params, Config]:
    """The weights of a run's newest (or given) step, straight into their shards on the mesh;
    without a mesh, on one device."""
    config = dataclasses.replace(run_config(folder, Config), lora_rank=0)
    return read_run_weights(folder, _wanted(config, mesh), step), config


def read_run_weights(folder: str | Path, places: Params, step: int | None = None,
                     flag: str = "--run") -> Params:
    """The weights of a run, which `flag` names, in these places (shapes with shardings), adapters
    merged. (A damaged checkpoint is reported, and passed over.)"""
    return lora.read_run_weights(folder, Config, places, step, flag, _wanted, init, read_hf)


def _wanted(config, mesh):
    """Shapes of the weights, with their places on the mesh; without a mesh, on one device."""
    mesh = mesh or shard.make_mesh(devices=jax.devices()[:1])
    return jax.tree.map(lambda shape, place: shape.update(sharding=place), weight_shapes(config),
                        shardings(weight_specs(config, mesh), mesh))


def plan_weights(config: Config, mesh: Any, **options: Any) -> Params:
    """Where each weight lies on a mesh, and why."""
    return shard.plan_sharding(
        lambda p, b: loss(p, b, config), weight_shapes(config), batch_shapes(config, 1), mesh=mesh,
        tensor_dims=tensor_dims(config), **options)


def weight_specs(config: Config, mesh: Any) -> Params:
    return jax.tree.map(lambda d: d.spec, plan_weights(config, mesh))


def load_hf(folder: str | Path, mesh: Any = None, **fields: Any) -> tuple[Params, Config]:
    """The weights of a published model (a Hugging Face folder), straight into their shards on the
    mesh; without a mesh, on one device. `fields` of the configuration may say how to train it."""
    config = folders.hf_config(folder, Config, **fields)
    read_hf(folder, config)     # is everything there, before shapes that large are made?
    return read_hf(folder, config, _wanted(config, mesh)), config


def read_hf(folder: str | Path, config: Config, places: Params | None = None) -> Params | None:
    """The weights in these places (shapes with shardings). With none, only a look at the folder."""
    return folders.read(folder, config, _weights(config), places)


def save_hf(folder: str | Path, params: Params, config: Config, dtype: str = "float32") -> None:
    """The same, back: a folder that transformers reads, adapters merged. A model of our own becomes
    a LLaMA, or with experts a Mixtral."""
    if config.lora_rank:
        params, config = lora.merged(params), dataclasses.replace(config, lora_rank=0)
    folders.write(folder, params, config, _weights, dtype)


if __name__ == "__main__":
    import data

    run_main(functools.partial(folders.export, load_run, save_hf, data.tokenizer_of))
