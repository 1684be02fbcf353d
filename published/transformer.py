"""The general transformer: the network for all published decoders, encoders and encoder-decoders.

    tokens [B, T] -> embed -> [ norm -> attention -> + -> norm -> MLP -> + ] x L -> norm -> logits

model.py is the plain decoder, and the file to fork. Here, each difference between families is an
option: an `if` in the only function it affects. The options are in general.py, and the weights in
tables.py. A section near the end covers encoders.

The layers never mention the mesh. Where they may need a collective, they call shard.py: `columns`
into a block, `row` out of it, `embed_lookup`, `self_attend`, `experts`, `token_loss`.

B batch, T sequence, S keys, D model, H heads, K kv heads, N per head, M per head of values,
F feed-forward, V vocabulary (padded), W width of the embedding, L layers, E experts, G their width,
P rows of positions. Latent attention: Q and R latents, U the rotated part of a head, Y the rest.
"""

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import shard
from published import stems
from published.general import Batch, Config, lacking
from published.llama import FAMILIES
from published.positions import (
    alibi_bias,
    alibi_slopes,
    counted,
    decoding_length,
    layer_is_local,
    layer_rates,
    layer_slots,
    max_positions,
    relative_bias,
    relative_ids,
    sinusoids,
)
from published.tables import batch_shapes, encoder_config, table
from zigzag.core.errors import ConfigError, check_length, listed
from zigzag.core.flags import change, is_derived
from zigzag.core.mesh import axis_size, cast, check_ids, mark_varying, time_parts
from zigzag.core.options import only, without
from zigzag.generate import cache as kv_cache
from zigzag.parallel import attention, low_rank, remat
from zigzag.parallel.network import (
    CacheLayer,
    Network,
    Params,
    Traffic,
    check_stack,
    expert_share,
    refuse_rows,
    with_hits,
)
from zigzag.parallel.pipeline import options_of
from zigzag.parallel.products import lookup, matmul, merged
from zigzag.parallel.rotary import rotate
from zigzag.parallel.table import attention_flops, product_flops

# -------------------------------------------------------------------------------------------
# The parts of a block

def norm(w, name, x, c, kind="", eps=0.0):
    """Apply RMSNorm or LayerNorm over the last dimension, in float32."""
    x32 = x.astype(jnp.float32)
    if (kind or c.norm) == "layer":
        x32 = x32 - jnp.mean(x32, -1, keepdims=True)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + (eps or c.norm_eps))
    # If tensor splits x along the sequence, jax sums the scale's gradient over tensor.
    return _plus_bias(w, x32.astype(x.dtype) * w[name], name)


def heads_of(q, a, dim):
    """Take this device's query heads from an array with all heads."""
    return shard.local_part(a, dim) if q.shape[2] < a.shape[dim] else a


def _known(c, i):
    """Return shard.self_attend's arguments for a score cap and a window. With a window, a query
    sees the last c.window keys, including its own."""
    return {"softcap": c.attn_softcap, "window": c.window,
            "local": layer_is_local(c, i) if "g" in c.local_layers else None}


def _scores(w, q, c):
    """Return shard.self_attend's `scores` argument for the queries q: a function that adds a
    learned distance bias (`relative`) or ALiBi's bias (a slope per head) to the scores. Return None
    for plain scores."""
    table = slopes = None
    if c.relative:
        table = heads_of(q, w["relative"], 1)
    if c.positions.startswith("alibi"):
        slopes = heads_of(q, jnp.asarray(alibi_slopes(c.heads)), 0)

    def scores(s, query, key, heads):
        if table is not None:
            return s + relative_bias(c, table, relative_ids(c, query, key))
        return s + alibi_bias(c, slopes, key.position[:, None])

    return scores if table is not None or slopes is not None else None


def with_bias(w, name):
    """Return the weight as `columns` takes it: (weight, bias) if it has a bias."""
    bias = w.get(f"{name}_bias")
    return w[name] if bias is None else (w[name], bias)


def _into_heads(w, c, cache=None):
    if cache is not None:           # a cache doesn't repeat kv heads
        return [with_bias(w, name) for name in ("wq", "wk", "wv")]
    return [with_bias(w, "wq"), *_into_keys(w, c, "wk", "wv")]


def _into_keys(w, c, *names):
    return [shard.repeat_kv(with_bias(w, name), c.heads) for name in names]


def _latent(w, h, c):
    """For latent attention, return queries [B, T, H, N], the latent [B, T, R] of keys and values,
    and the keys' rotary part [B, T, 1, U], which all heads share. In these norms the published
    models use an epsilon of 1e-6, whatever the other norms use."""
    q = norm(w, "q_down_norm", matmul(h, w["q_down"]), c, "rms", 1e-6) if c.q_rank else h
    q, = shard.columns(q, w["wq"])
    latent = norm(w, "kv_norm", matmul(h, w["kv_down"]), c, "rms", 1e-6)
    return q, latent, shard.time_of_block(matmul(h, w["k_rotary"]))[:, :, None]


def _latent_heads(w, h, c):
    """Return the queries, keys and values [B, T, H, N] of latent attention."""
    q, latent, turned = _latent(w, h, c)
    k, v = shard.columns(latent, w["wk"], w["wv"])
    turned = jnp.broadcast_to(turned, (*k.shape[:3], turned.shape[-1]))
    return q, jnp.concatenate([turned, k], -1), v


def _latent_from_cache(w, h, c, i, batch, cache):
    """Run latent attention with a cache of latents. We never expand them into keys and values.
    Instead, we multiply the queries by the key weight, and attention's result by the value
    weight."""
    (q, latent, turned), U = _latent(w, h, c), c.rotary_dim
    turned, q = (rotate(a, batch["positions"], *layer_rates(c, i)) for a in (turned, q))
    latent = jnp.concatenate([turned, shard.time_of_block(latent)[:, :, None]], -1)
    cached = kv_cache.update(cache["latent"], latent, batch["slot"], 1)
    query = kv_cache.query_tokens(batch["slot"], batch["start"], q.shape[1])
    scores = _scores(w, q, c)
    attend = attention.self_attention(None, scores, c.heads, attention.Pattern(**_known(c, i)))
    wk, wv = (heads_of(q, merged(w[name]), 1) for name in ("wk", "wv"))
    q = jnp.concatenate([q[..., :U], jnp.einsum("bthy,rhy->bthr", q[..., U:], wk)], -1)
    q = _scaled(q, c) * (q.shape[-1] / c.head_dim) ** 0.5
    out = kv_cache.attend(attend, q, cached, cached[..., U:], query, batch["start"], c.heads, 1,
                          folds=scores is None)
    return jnp.einsum("bthr,rhm->bthm", out, wv), {**cache, "latent": cached}


def _heads(w, qkv, c, i, batch, cache=None):
    """Given queries [B, T, H, N], keys and values [B, T, K, N], return attention [B, T, H, N], and
    the cache with these keys and values added."""
    q, k, v = qkv
    if c.qk_norm_wide:
        scale = w["k_norm"] if cache is not None else shard.repeat_kv(w["k_norm"], c.heads)
        q, k = norm_all_heads(q, k, (w["q_norm"], scale), c.heads, c.norm_eps)
    elif c.qk_norm:
        q, k = norm(w, "q_norm", q, c, "rms"), norm(w, "k_norm", k, c, "rms")
    if c.positions == "rotary":
        q, k = (rotate(a, batch["positions"], *layer_rates(c, i)) for a in (q, k))
    q = _scaled(q, c)
    changes = {"scores": _scores(w, q, c), **_known(c, i)}
    if cache is not None:
        attend = kv_cache.Attend(cache, batch["slot"], batch["start"], c.heads, c.kv_heads)
        return attend(q, k, v, **changes), attend.layer
    attend = batch.get("attend", shard.self_attend)     # published/reference.py overrides it
    return attend(
        q, k, v, **changes, causal=c.causal, heads=c.heads, positions=batch["positions"],
        documents=batch.get("document"), slots=batch["slots"], kernel=c.kernel), None


def norm_all_heads(q: Array, k: Array, scales: tuple[Array, Array], heads: int, eps: float
                   ) -> list[Array]:
    """Apply RMSNorm to queries [B, T, H, N] and keys [B, T, K, N], each over all of a token's heads
    together; the scales are [1, H, N] and [1, K, N]. If the device holds only some of the `heads`
    query heads, one reduction computes both means, and another computes their gradients. The device
    may hold all key heads or only some: counting every head equally often leaves the mean as is."""
    means = jnp.stack([jnp.mean(jnp.square(x.astype(jnp.float32)), (2, 3), keepdims=True)
                       for x in (q, k)])                                    # [2, B, T, 1, 1]
    if q.shape[2] < heads:
        means = mark_varying(lax.pmean(means, "tensor"), also={"tensor"})

    return [(x * lax.rsqrt(mean + eps)).astype(x.dtype) * scale
            for x, scale, mean in zip((q, k), scales, means)]


def _scaled(q, c):
    """Scale the queries if the scores' factor (attn_scale) isn't the default."""
    return q * (c.attn_scale * c.head_dim**0.5) if c.attn_scale else q


def _attention(w, h, c, i, batch, cache):
    """h [B, T, D] -> [B, T, D]."""
    if c.kv_rank and cache is not None:
        heads, cache = _latent_from_cache(w, h, c, i, batch, cache)
    else:
        qkv = _latent_heads(w, h, c) if c.kv_rank else shard.columns(h, *_into_heads(w, c, cache))
        heads, cache = _heads(w, qkv, c, i, batch, cache)
    return _plus_bias(w, shard.row((heads, w["wo"])), "wo"), cache


def _plus_bias(w, y, *names):
    return sum((w[f"{name}_bias"] for name in names if f"{name}_bias" in w), y)


def product(w, name, x, *how):
    """Multiply x by this weight, and add its bias if it has one. `how` are matmul's options."""
    return _plus_bias(w, matmul(x, w[name], *how), name)


LOAD_SCALE = 1e-3       # of the gradient that --balance_bias gives to a router's biases
ACTIVATIONS = {"silu": jax.nn.silu, "relu": jax.nn.relu, "gelu_tanh": jax.nn.gelu,
               "gelu": functools.partial(jax.nn.gelu, approximate=False),
               "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x)}


def activate(c, first, *gated):
    """Apply the activation between an MLP's two products."""
    first = ACTIVATIONS[c.activation](first)
    return first * gated[0] if gated else first


def _into_dense(w):
    """Return the input weights of the MLP that every token goes through; [] if there is none."""
    return [with_bias(w, name) for name in ("w_gate", "w_up") if name in w]


@shard.recomputable("mlp")
def feed_forward(w, h, c, i=0, batch=None):
    """Run the MLP or the experts: h [B, T, D] -> [B, T, D], and the experts' loss terms."""
    y, aux = _out_of_block(w, h, c, i, batch, [], shard.columns(h, *_into_dense(w)))
    return _plus_bias(w, y, "w_down"), aux


def _out_of_block(w, h, c, i, batch, out, dense):
    """Sum the products `out`, the MLP that every token goes through (`dense` has its first
    products' results), and the experts' output for h. Return the sum and the experts' loss
    terms."""
    if dense:
        out = [*out, (activate(c, *dense), w["w_down"])]
    if "router" in w:
        return _experts(w, h, c, i, batch, out)
    return shard.row(*out), None


def _experts(w, h, c, i, batch, beside):
    """Run h [B, T, D] through each token's best experts, weighted by the router, and add the
    products `beside`. In training, also return the loss terms of shard.router_terms."""
    logits = jnp.einsum("btd,de->bte", h.astype(jnp.float32), w["router"].astype(jnp.float32))
    probs = jax.nn.softmax(logits, -1) if c.router == "softmax" else jax.nn.sigmoid(logits)
    chosen = _choose(probs, w.get("router_bias"), c)                            # [B, T, K]
    top = jnp.take_along_axis(probs, chosen, -1)
    if c.router_norm:
        top = top / top.sum(-1, keepdims=True)
    out, rounds = shard.run_experts(h, chosen, top * c.router_scale, (w["e_gate"], w["e_up"]),
                                    functools.partial(activate, c), w["e_down"], *beside)
    if "seeds" not in batch:
        return out, None
    if c.router == "sigmoid":
        probs = probs / probs.sum(-1, keepdims=True)
    balance, z, busy = shard.router_terms(logits, probs, chosen, batch["weights"])
    added = c.balance * balance + c.router_z * z
    if c.balance_bias:
        added += _load_on_bias(w["router_bias"], busy)
    at = (i - c.dense_layers) // c.expert_every
    logged = {"router_loss": added,
              "expert_load": jnp.zeros((c.expert_layers, c.experts)).at[at].set(busy),
              "expert_rounds": rounds / c.expert_layers * batch["weights"].sum()}
    return out, (added, lax.stop_gradient(logged))


def _load_on_bias(bias, busy):
    """Return 0, with a gradient for the bias [E] that no loss trains: how many more tokens than the
    average the expert got. The optimizer then lowers the biases of busy experts, on each mesh
    alike. The gradient is scaled down, because it must not count in the norm of all gradients."""
    excess = LOAD_SCALE * lax.stop_gradient(busy - busy.mean())
    return jnp.sum(excess * (bias - lax.stop_gradient(bias)))


def _choose(scores, bias, c):
    """Choose the experts [B, T, K] with the best scores [B, T, E] for each token. `bias` affects
    only this choice."""
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if c.expert_groups > 1:         # first choose groups, by the sum of their top two scores
        groups = scores.reshape(*scores.shape[:2], c.expert_groups, -1)
        best = lax.top_k(groups, 2)[0].sum(-1)
        least = lax.top_k(best, c.groups_per_token)[0][..., -1:]
        scores = jnp.where((best >= least)[..., None], groups, 0).reshape(scores.shape)
    return lax.top_k(scores, c.experts_per_token)[1]


def _drop(y, c, site, batch):
    """Scale the output of attention or the MLP, and apply dropout in training."""
    y = y if c.residual_scale == 1 else y * c.residual_scale
    return shard.dropout(y, c.dropout, batch.get("seeds"), site, batch.get("slots"))


# -------------------------------------------------------------------------------------------
# The network: embed, block, head

def embedding(params, batch, c):
    """Return the stream [B, T, D] that enters the first layer."""
    if c.own_stem == "tokens":
        check_ids(batch["tokens"], c.vocab_size)
        x = shard.embed_lookup(params["embed"], batch["tokens"])
        x = x * (c.embed_scale or c.d_model**0.5)   # gives new weights rows of unit size
    else:
        x = stems.stream(params, batch["source"], c)
        x = shard.residual_stream(local_time(_padded(x)))
    # If a norm follows the embedding, everything before the norm has the embedding's width.
    if "project_in" in params and not c.embed_norm:
        x = matmul(x, params["project_in"])
    if c.positions in ("learned", "fixed", "sinusoidal"):
        table = params.get("positions", sinusoids(c.seq_len + c.position_offset, c.d_model))
        table = lax.stop_gradient(table) if c.positions == "fixed" else table
        places = shard.my_time_slice(batch["positions"], x) + c.position_offset
        x = x + lookup(table, places).astype(x.dtype)
    for name in _kinds(c):
        check_ids(batch[name], len(params[name]), f"the table of {name.replace('_', ' ')}")
        x = x + lookup(params[name], shard.my_time_slice(batch[name], x))
    if c.embed_norm:
        x = norm(params, "embed_norm", x, c)
        if "project_in" in params:
            x = product(params, "project_in", x)
    return x


def _kinds(c):
    """Return the names of a model's embeddings of kinds of tokens."""
    return [name for name in ("token_types", "task_types") if getattr(c, name)]


def block(w, x, i, c, batch, cache=None, attend=_attention):
    """Run layer i: x [B, T, D] -> x, the layer's loss terms, and the cache. windows.py has another
    `attend`."""
    w = low_rank.adapted(w)
    if c.parallel_block:
        return _parallel_block(w, x, i, c, batch, cache)
    is_first = c.norm_place in ("post", "out")      # attention and MLP come before their norms
    y, cache = attend(w, x if is_first else norm(w, "attn_norm", x, c), c, i, batch, cache)
    x = _add(w, "attn", x, y, c, 2 * i, batch)
    if "cross_wq" in w:
        y = _cross_attention(w, x if is_first else norm(w, "cross_norm", x, c), c, batch, cache)
        x = _add(w, "cross", x, y, c, 2 * c.layers + i, batch)
    y, aux = feed_forward(w, x if is_first else norm(w, "mlp_norm", x, c), c, i, batch)
    return _add(w, "mlp", x, y, c, 2 * i + 1, batch), aux, cache


def _add(w, half, x, y, c, site, batch):
    """Add y, the output of attention or the MLP, to the stream x, and apply the norms after it."""
    if c.norm_place in ("out", "sandwich"):
        y = norm(w, f"{half}_out_norm", y, c)
    if f"{half}_out_scale" in w:
        y = y * w[f"{half}_out_scale"]
    x = x + _drop(y, c, site, batch)
    return norm(w, f"{half}_norm", x, c) if c.norm_place == "post" else x


def _parallel_block(w, x, i, c, batch, cache):
    """Run attention and the MLP side by side on x. They share the collective at their output and,
    if they read the same norm, the one at their input."""
    h = norm(w, "attn_norm", x, c)
    if c.parallel_norms == 1:
        q, k, v, *dense = shard.columns(h, *_into_heads(w, c, cache), *_into_dense(w))
    else:
        q, k, v = shard.columns(h, *_into_heads(w, c, cache))
        h = norm(w, "mlp_norm", x, c)
        dense = shard.columns(h, *_into_dense(w))
    heads, cache = _heads(w, [q, k, v], c, i, batch, cache)
    y, aux = _out_of_block(w, h, c, i, batch, [(heads, w["wo"])], dense)
    return x + _drop(_plus_bias(w, y, "wo", "w_down"), c, 2 * i + 1, batch), aux, cache


def loss_head(params, x, c):
    """Return the head's input [B, T, W] and its weight [W, V], with its bias if it has one."""
    if "norm" in params:
        x = norm(params, "norm", x, c)
    if c.head == "masked":
        x = activate(c, product(params, "transform", x))
        x = norm(params, "transform_norm", x, c)
    if "project_out" in params:
        x = matmul(x, params["project_out"])
    if c.head_scale:
        x = x * c.head_scale
    head = {"head": params["embed"].T if c.tied else params["head"]}
    return x, with_bias({**params, **head}, "head")


def with_positions(batch, c):
    """Add arrays [B, T] that describe a batch's tokens: their slots in the row, their positions,
    their types and, if a row isn't a single document, their document numbers. A token that the mask
    excludes is in document -1."""
    if "slots" in batch:
        slots = batch["slots"]
    elif c.own_stem != "tokens":
        return _source(batch, c)
    else:
        slots = jnp.broadcast_to(shard.slots_of(batch["tokens"]), batch["tokens"].shape)
    known = {"slots": slots, "positions": slots}
    if "segments" in batch or "mask" in batch:
        known["document"] = batch.get("segments", jnp.zeros_like(slots))
    if "mask" in batch:
        known["document"] = jnp.where(batch["mask"] > 0, known["document"], -1)
    known |= {name: jnp.zeros_like(slots) for name in _kinds(c)}
    if c.pad_id >= 0:
        known["positions"] = counted(shard.whole_time(batch["tokens"]) != c.pad_id, slots)
    if c.pad_id == -2 and "mask" in batch:
        known["positions"] = counted(shard.whole_time(batch["mask"]) > 0, slots)
    return {**known, **batch}


# -------------------------------------------------------------------------------------------
# The network: all layers, logits, loss

def _layers(params, specs=None, stack="layers"):
    """Return a stack of layers' weights and their specs. Each layer gets a copy of the weights that
    all layers share."""
    layers, specs = params[stack], specs and specs[stack]
    if "relative" in params:
        shared = params["relative"]
        count = jax.tree.leaves(layers)[0].shape[:1]
        layers = {**layers, "relative": jnp.broadcast_to(shared, count + shared.shape)}
        specs = specs and {**specs, "relative": P("pipe")}
    return layers, specs


def _layer(w, x, i, c, batch):
    """Run entry i of the main stack: a layer, with the layers between it and the previous entry, or
    a group of layers. x [B, T, D] -> x, and the loss terms."""
    if c.layer_groups:
        return _repeat(w, x, i, c, batch)
    i = c.dense_layers + i * c.expert_every
    for between in range(c.expert_every - 1):
        own = {**only(w, "relative"), **w["between"][str(between)]}
        x = block(own, x, i + between, c, batch)[0]
    return block(w, x, i + c.expert_every - 1, c, batch)[:2]


def begin(params, c, batch, specs=None, embed=embedding):
    """Return the embedding [B, T, D] or, if there are `dense_layers`, their output."""
    x = embed(params, batch, c)
    if c.dense_layers:
        stacked, specs = _layers(params, specs, "dense_layers")
        x, _ = shard.layers(lambda w, x, i: block(w, x, i, c, batch)[:2], stacked, x,
                            jnp.arange(c.dense_layers), specs, c)
    return x


def trunk(params, c, batch, specs=None, embed=embedding):
    """Return the last block's output [B, T, D]. In a pipeline every stage gets an encoder's output,
    because the same stages run the decoder's layers next."""
    x = begin(params, c, batch, specs, embed)
    stacked, specs = _layers(params, specs)
    # During generation every device has all layers, and no spec names pipe.
    if axis_size("pipe") == 1 or specs and "pipe" not in jax.tree.leaves(specs)[0]:
        numbers = jnp.arange(c.layer_groups or c.expert_layers)
        return shard.layers(lambda w, x, i: _layer(w, x, i, c, batch), stacked, x, numbers, specs,
                            c)[0]
    x, _ = shard.through_layers(
        lambda w, x, i, batch: _layer(w, x, i, c, batch), stacked, x,
        only(batch, "slots", "positions", "document", "seeds"), specs,
        options_of(c)._replace(schedule="gpipe"))
    return lax.psum(x, "pipe")


def head_logits(params, x, c):
    """Compute float32 logits [B, T, vocab_size] from x [B, T, D]."""
    logits = shard.vocab_logits(*loss_head(params, x, c), c.vocab_size, c.logit_softcap)
    return logits[..., :c.vocab_size]


def forward(params: Params, tokens: Array | None, config: Config, source: Array | None = None,
            positions: Array | None = None, segments: Array | None = None,
            mask: Array | None = None, source_mask: Array | None = None,
            token_types: Array | None = None, task_types: Array | None = None,
            attend: Callable | None = None, embed: Callable = embedding,
            embed_source: Callable = embedding) -> Array:
    """Return logits [B, T, vocab_size] for the token after each of `tokens` [B, T]. An encoder
    returns logits for the tokens themselves, or for classes [B, labels], or, without a head,
    vectors [B, T, D]. `source` is the input to an encoder or a stem. A mask is 0 where a row has
    no token."""
    c = config
    if c.own_stem != "tokens" and source is None:
        tokens, source = None, tokens
    if (source is None) == (c.encoder_layers > 0 or c.own_stem != "tokens"):
        raise ConfigError("this model has no encoder: give it no source" if source is not None else
                          "this model has an encoder: give it a source")
    given = dict(tokens=tokens, source=source, positions=positions, segments=segments, mask=mask,
                 source_mask=source_mask, token_types=token_types,
                 task_types=task_types, attend=attend)
    batch = {name: a for name, a in given.items() if a is not None}
    c, params, batch = prepare_batch(params, batch, c, embed_source=embed_source)
    x = trunk(params, c, batch, embed=embed)
    if c.head == "classes":
        return _class_logits(params, x, c, batch)
    if c.head == "none":
        x = norm(params, "norm", x, c) if "norm" in params and c.pool == "first" else x
        x = shard.whole_time(x, in_parts=c.own_stem != "tokens")
        return x if c.own_stem == "tokens" else x[:, :stems.length(c)]
    return head_logits(params, x, c)


def prepare_batch(params, batch, c, specs=None, embed_source=embedding):
    """Return (config, weights, batch) for a forward pass. The config has this batch's seq_len,
    which some scaled positions depend on. The weights have the compute dtype. The batch has its
    tokens' positions and, if there's an encoder, the encoder's output."""
    if "tokens" in batch:
        c = change(c, seq_len=batch["tokens"].shape[1] * axis_size("seq"))
    params, batch = cast(params, c.dtype), with_positions(batch, c)
    if c.encoder_layers:
        batch |= _encode(params, batch, c, specs, embed=embed_source)
        batch.pop("source")
    return c, params, batch


def loss(params: Params, batch: Batch, config: Config, specs: Params | None = None,
         embed: Callable = embedding, embed_source: Callable = embedding) -> tuple:
    """Return (sum, count): the weighted cross-entropy of the batch's targets in nats, and the total
    weight. The step divides the totals only once, so masks and uneven shards don't change the
    result. A batch with `seeds` [B] is for training: dropout is on, and experts add their terms to
    the sum. They also return a third result, a dict of other sums. A classifier returns the
    cross-entropy of `labels` [B] and the row count."""
    c, params, batch = prepare_batch(params, batch, config, specs, embed_source)

    def head(params, x, batch):
        if c.head in ("classes", "none"):
            x = x if c.head == "none" else _class_logits(params, x, c, batch)
            return class_loss(x, batch, c)
        x, table = loss_head(params, x, c)
        total, hits = shard.token_loss(x, table, batch["targets"], batch["weights"], c.vocab_size,
                                       softcap=c.logit_softcap)
        return with_hits(total, jnp.sum(batch["weights"]), hits, c)

    others = without(params, "layers", "encoder")
    stacked, specs_of_layers = _layers(params, specs)
    return shard.pipelined_loss(
        lambda params, batch: begin(params, c, batch, specs, embed),
        lambda w, x, i, batch: _layer(w, x, i, c, batch), head, others, stacked, batch,
        specs_of_layers, c, all_time=c.head == "classes")


# -------------------------------------------------------------------------------------------
# Decoding, with a cache of keys and values (zigzag/generate/cache.py)

def encode_source(params: Params, source: Batch, config: Config,
                  specs: Params | None = None, embed: Callable = embedding) -> list[Params]:
    """Encode a source (with source_mask) into entries for each layer's cache: cross-attention's k
    and v, and the source's documents."""
    c = config
    all_time = functools.partial(shard.whole_time, in_parts=True)
    encoded, document = _encode(params, source, c, specs, all_time, embed).values()
    keys = (_cross_keys(shard.gather(w, specs and specs["layers"][i]), encoded, c)
            for i, w in enumerate(params["layers"]))
    return [{"cross_k": k, "cross_v": v, "cross_document": document} for k, v in keys]


def extend(params: Params, cache: list[Params], tokens: Array, slot: Any, start: Array,
           config: Config, length: int, specs: Params | None = None,
           embed: Callable = embedding) -> tuple[Array, list[Params]]:
    """Run `tokens` [B, T] through all layers. The tokens are at slots slot ... slot + T - 1 of rows
    that begin at slots start [B]. Return the last block's output [B, T, D] for the whole sequence,
    and the cache with the new keys and values. `length` scales some positions. The layers are a
    list (zigzag.generate.engine.unstack_layers)."""
    config = change(config, seq_len=length)
    query = kv_cache.query_tokens(slot, start, tokens.shape[1])
    batch = {"tokens": tokens, "positions": query.position, "slot": slot, "start": start}
    shared = only(params, "relative")
    x, new_cache = embed(params, batch, config), []
    one_block = jax.jit(functools.partial(block, c=config))     # trace identical layers only once
    for i, (w, layer) in enumerate(zip(params["layers"], cache, strict=True)):
        w = shard.gather(w, specs and specs["layers"][i])
        x, _, layer = one_block({**w, **shared}, x, i, batch=batch, cache=layer)
        new_cache.append(layer)
    return shard.whole_time(x), new_cache


# -------------------------------------------------------------------------------------------
# Encoders and classifiers: the source, cross-attention to the encoder's output, class logits

def _source(batch, c):
    """Make an encoder's batch: this device's part of the source sequence."""
    is_text, shape = c.own_stem == "tokens", batch["source"].shape
    length = shape[1] if is_text else stems.length(c)
    known = {"mask": batch.get("source_mask", jnp.ones((shape[0], length)))}
    if is_text:
        known["tokens"] = batch["source"]
    known = jax.tree.map(_padded, known)
    shape = known["mask"].shape
    known["slots"] = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    known = batch | local_time(known)
    if "seeds" in batch:        # so that dropout differs from the decoder's
        known["seeds"] = batch["seeds"] + np.uint32(0x9E3779B9)
    return with_positions(known, c)


def local_time(tree):
    """Cut arrays [B, T, ...] to this device's part of the sequence, in plain order. They come from
    a source or an image, which shard_time leaves whole on every device along seq."""
    def part(a):
        parts = a.reshape(a.shape[0], axis_size("seq"), -1, *a.shape[2:])
        return lax.dynamic_index_in_dim(parts, lax.axis_index("seq"), 1, keepdims=False)

    return jax.tree.map(part, tree) if axis_size("seq") > 1 else tree


def _encode(params, batch, c, specs=None, gather=shard.time_of_block, embed=embedding):
    """Return the encoder's output for a batch's source, and its documents (-1 for padding)."""
    e = encoder_config(c, batch["source"].shape[1])
    params = {**params["encoder"], **({"embed": params["embed"]} if e.own_stem == "tokens" else {})}
    known = _source(only(batch, "source", "source_mask", "seeds"), e)
    x = trunk(params, e, known, specs and specs["encoder"], embed)
    x = norm(params, "norm", x, e) if "norm" in params else x
    return {"encoded": gather(x), "source_document": gather(known["document"])}


def _padded(x):
    """Zero-pad an array [B, T, ...] along T so that the mesh can split it."""
    more = -x.shape[1] % time_parts()
    return jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))


def _cross_attention(w, h, c, batch, cache):
    """Attend to the encoder's output: h [B, T, D] -> [B, T, D]. A cache already holds the keys and
    values."""
    q, = shard.columns(h, with_bias(w, "cross_wq"))
    if cache is None:
        k, v = _cross_keys(w, batch["encoded"], c)
        document = batch["source_document"]
    else:
        k, v, document = cache["cross_k"], cache["cross_v"], cache["cross_document"]
    out = shard.attend(attention.softmax_attention, _scaled(q, c), k, v,
                       lambda query, document: (document >= 0)[:, None, None, :],
                       batch["positions"], document)
    out = shard.row((out, w["cross_wo"]))
    return _plus_bias(w, out, "cross_wo")


def _cross_keys(w, encoded, c):
    return shard.columns(encoded, *_into_keys(w, c, "cross_wk", "cross_wv"), gathered=True)


def _class_logits(params, x, c, batch):
    """Compute each row's float32 class logits [B, A] from its first token, the last token that the
    mask keeps, or the mean of an image's patches. The last norm follows this choice."""
    x = shard.whole_time(x, in_parts=c.own_stem != "tokens")
    if c.pool == "last":
        there = shard.whole_time(batch.get("mask", jnp.ones(batch["tokens"].shape))) > 0
        last = jnp.argmax(there * jnp.arange(1, there.shape[1] + 1), -1)        # [B]
        x = jnp.take_along_axis(x, last[:, None, None], 1)[:, 0]
    else:
        x = x[:, 0] if c.pool == "first" else x[:, 1:stems.length(c)].mean(1)
    if "norm" in params:
        x = norm(params, "norm", x, c)
    if c.pool_dense:
        x = jnp.tanh(product(params, "pool", x))
    return product(params, "classifier", x, 1, jnp.float32)


def class_loss(logits, batch, c):
    """Return (sum, count): the cross-entropy of labels [B], summed over rows, and the row count.
    With a single label (regression), use the squared error instead."""
    rows = jnp.float32(len(logits))
    if c.head == "none":        # the sharding rule needs some loss to trace
        return jnp.sum(logits.astype(jnp.float32) ** 2), rows
    labels, classes = batch["labels"], logits.shape[1]
    if classes == 1:
        return jnp.sum((logits[:, 0] - labels) ** 2), rows
    chosen = jax.nn.one_hot(labels, classes)
    hits = jnp.sum(jnp.argmax(logits, 1) == labels, dtype=jnp.float32)
    return with_hits(-jnp.sum(jax.nn.log_softmax(logits) * chosen), rows, hits, c)


def _repeat(w, x, group, c, batch):
    """Run a group of layers that share their weights."""
    times = c.layers // c.layer_groups

    def layer(x, i):
        return block(w, x, i, c, batch)[0], None

    how = remat.remat_of(c.remat)       # full:0.5 recomputes half of the groups
    layer = layer if how.policy == "none" and not how.share else jax.checkpoint(layer)
    return lax.scan(layer, x, group * times + jnp.arange(times))[0], None


# -------------------------------------------------------------------------------------------
# Functions of the Network (zigzag/parallel/network.py)

def check(c: Config, mesh: Any) -> None:
    """Reject a model that the mesh can't split. The tensor axis never blocks a run: a weight that
    it doesn't divide stays whole."""
    stages = mesh.shape["pipe"]
    with_chunks = f" x --chunks {c.chunks}" if c.chunks > 1 else ""
    check_length(f"pipe={stages}{with_chunks}", "encoder_layers", c.encoder_layers,
                 stages * c.chunks)
    elsewhere = f"on mesh axis pipe={stages}; give its devices to data, fsdp, expert or tensor"
    refuse_rows(c, [
        ("head", c.head == "none", "this model returns vectors and has no loss; give fit a loss, "
                                   "or --head classes or masked"),
        ("dense_layers", stages > 1 and c.dense_layers,
         f"these differ from the others, and the layers of all stages must have weights of equal "
         f"shapes {elsewhere}"),
        ("layer_groups", stages > 1 and c.layer_groups,
         f"several layers share weights, and each stage has its own layers {elsewhere}"),
        ("schedule", stages > 1 and c.encoder_layers and c.schedule == "1f1b",
         "an encoder-decoder runs through the stages twice, and the whole encoder comes first; "
         "give gpipe or interleaved")])
    if c.expert_every > 1 and not c.dense_layers:
        check_length(f"pipe={stages}{with_chunks} x --expert_every {c.expert_every}", "layers",
                     c.layers, stages * c.chunks * c.expert_every)
    check_stack(c, mesh, time_of_stages=c.head != "classes", time_is_padded=c.own_stem != "tokens")


def flops(c: Config, tokens: int, table: Params) -> float:
    """Return the training FLOPs for this many tokens. The source's tokens use the encoder's
    weights, and cross-attention's weights for keys and values."""
    share = c.source_len / c.seq_len if c.encoder_layers else 0.0
    layers = dict(table.get("layers", {}))
    of_source = [layers.pop(name) for name in list(layers)
                 if name.startswith(("cross_wk", "cross_wv"))]
    rest = {**table, "layers": layers}
    of_source.append(rest.pop("encoder", {}))
    if c.layer_groups:      # the layers of a group have one set of weights
        rest["again"] = [layers] * (c.layers // c.layer_groups - 1)
    keys = c.layers * (c.seq_len + share * c.seq_len) + c.encoder_layers * share**2 * c.seq_len
    return tokens * (product_flops(rest, expert_share(c), c.tied) + share * product_flops(of_source)
                     + attention_flops(keys, c.heads, c.head_dim, c.v_head_dim or c.head_dim))


def cache_layer(c: Config, i: int) -> CacheLayer:
    widths, heads = {"k": c.head_dim, "v": c.v_head_dim or c.head_dim}, c.kv_heads
    if c.kv_rank:
        widths, heads = {"latent": c.rotary_dim + c.kv_rank}, 1
    return CacheLayer(widths, heads, layer_slots(c, i), kv_cache.CROSS if c.encoder_layers else ())


def source_shape(c: Config) -> tuple[int, ...] | None:
    if c.stem != "tokens":
        return stems.source_shape(c, 1)[1:]
    return (c.source_len,) if c.encoder_layers else None


def gives(c: Config) -> str:
    known = {"tokens": "text" if c.causal else "", "classes": "classes", "none": "vectors"}
    return known.get(c.head) or "numbers for each token"


def limits(c: Config) -> dict[str, int]:
    return {"tokens": c.vocab_size, "targets": c.vocab_size, "labels": c.labels,
            "source": c.vocab_size, "token_types": c.token_types, "task_types": c.task_types}


def block_traffic(c: Config) -> Traffic | None:
    if c.encoder_layers or not c.causal or c.own_stem != "tokens":
        return None
    beside = bool(c.experts and (c.parallel_block or c.shared_experts))
    return Traffic(2 - c.parallel_block, beside, c.qk_norm_wide)


def why(config: Config) -> str:
    """Explain why a model needs more than the plain decoder."""
    names = lacking(dataclasses.asdict(config))
    names = [name for name in names if not is_derived(config, name)] or names
    options = [f"{name}={getattr(config, name)}" for name in names]
    return f"the plain decoder has no {listed(options, 4)}" if options else "--model transformer"


NETWORK = Network(
    "transformer", Config, table, loss, batch_shapes, forward, FAMILIES, check, extend=extend,
    head_logits=head_logits, cache_layer=cache_layer, encode_source=encode_source, gives=gives,
    max_positions=max_positions, decoding_length=decoding_length, source_shape=source_shape,
    limits=limits,
    trained=("seq_len", "source_len", "dropout", "balance", "balance_bias", "router_z"),
    block_traffic=block_traffic, flops=flops, why=why)
