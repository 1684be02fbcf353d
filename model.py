"""A decoder-only transformer: its options, weights, forward pass, loss, and cached decoding.

    tokens [B, T] -> embed -> [ x + attention(norm(x)) -> x + MLP(norm(x)) ] x L -> norm -> logits

Attention and the MLP each begin with an RMSNorm. Attention uses rotary positions (RoPE) and grouped
queries (GQA). The MLP is a SwiGLU or a mixture of SwiGLU experts. Weights are nested dicts of
arrays, with all layers stacked along a leading dimension.

Only `weight_table` names mesh axes. Wherever it might need a collective, this file calls shard.py:
`columns` is the matmul into attention or an MLP, `row` is the matmul out of it, and so on. On a
single device, these are plain matmuls. Networks that differ from this one are in published/.

B batch, T sequence (time), D model, H heads, K kv heads, N per head, F feed-forward, V vocabulary,
L layers, E experts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

import shard
from zigzag.core.errors import fill_in
from zigzag.core.mesh import cast, check_ids
from zigzag.core.options import flag
from zigzag.core.parts import part
from zigzag.generate import cache as kv_cache
from zigzag.parallel import low_rank
from zigzag.parallel.network import (
    CacheLayer,
    ComputeOptions,
    Network,
    Params,
    Traffic,
    check_decoder,
    with_hits,
)
from zigzag.parallel.rotary import rotary_rates, rotate
from zigzag.parallel.table import Table, padded


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """A model's options. Each field is also a flag."""
    # model
    layers: int = flag(4, least=1)      # number of layers
    d_model: int = flag(128, least=1)   # width of the residual stream
    heads: int = flag(8, least=1)       # query heads
    kv_heads: int = 0             # key/value heads; 0: same as heads
    d_ff: int = 0                 # width of the MLP; 0: 8/3 of d_model, up to a multiple of 64
    tied: bool = False            # use the embedding as the head as well
    dropout: float = 0.0          # dropout rate on the outputs of attention and MLP, in training
    experts: int = 0              # experts in each MLP; 0: a dense MLP
    # data
    vocab_size: int = 0           # ids in the vocabulary; 0: as many as the data's tokenizer has
    seq_len: int = flag(128, least=1)   # context length: tokens in a training example
    # model (rare)
    head_dim: int = 0             # width of a head; 0: d_model / heads
    norm_eps: float = 1e-6        # added to the mean square in a norm
    rope_theta: float = 10000.0   # RoPE base
    rope_scaling: str = ""        # JSON as in a published config.json, with rope_type linear or
                                  # llama3: {"rope_type": "linear", "factor": 2}
    embed_scale: float = 0.0      # factor on the embedding; 0: square root of d_model
    experts_per_token: int = flag(2, least=1)   # experts that each token visits
    balance: float = 0.01         # weight of the experts' load-balancing loss
    router_z: float = 0.001       # weight of the z-loss on the router's logits

    def __post_init__(self) -> None:
        check_decoder(self)
        fill_in(self, kv_heads=self.heads, head_dim=self.d_model // self.heads,
                d_ff=-(-self.d_model * 8 // (3 * 64)) * 64, embed_scale=self.d_model**0.5)


def weight_table(c: Config) -> Params:
    """Return the weight table: for each weight, its dimensions with their mesh axes and its initial
    standard deviation (None: all ones, 0.0: all zeros). D/fsdp splits D over fsdp, unless the axis
    doesn't divide D or the weight has fewer than --fsdp_min elements. python shard.py prints it."""
    make = Table(L=c.layers, D=c.d_model, H=c.heads, K=c.kv_heads, N=c.head_dim, F=c.d_ff,
                 E=c.experts, V=padded(c.vocab_size))
    # The stream sums 2 L outputs, so each projection starts smaller by a factor of sqrt(2 L).
    into, out = c.d_model**-0.5, (2 * c.layers) ** -0.5
    layers = {"attn_norm": make("L/pipe D"),
              "wq": make("L/pipe D/fsdp H/tensor N", into),
              "wk": make("L/pipe D/fsdp K/tensor N", into),
              "wv": make("L/pipe D/fsdp K/tensor N", into),
              "wo": make("L/pipe H/tensor N D/fsdp", (c.heads * c.head_dim) ** -0.5 * out),
              "mlp_norm": make("L/pipe D")}
    if c.experts:
        layers |= {"router": make("L/pipe D/fsdp E", into),
                   "e_gate": make("L/pipe E/expert D/fsdp F/tensor", into),
                   "e_up": make("L/pipe E/expert D/fsdp F/tensor", into),
                   "e_down": make("L/pipe E/expert F/tensor D/fsdp", c.d_ff**-0.5 * out)}
    else:
        layers |= {"w_gate": make("L/pipe D/fsdp F/tensor", into),
                   "w_up": make("L/pipe D/fsdp F/tensor", into),
                   "w_down": make("L/pipe F/tensor D/fsdp", c.d_ff**-0.5 * out)}
    untied = {} if c.tied else {"head": make("D/fsdp V/tensor", into)}
    return {"embed": make("V/tensor D/fsdp", into), "layers": layers, "norm": make("D"), **untied}


# -------------------------------------------------------------------------------------------
# A block

def norm(x, scale, c):
    """Apply RMSNorm over the last dimension, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + c.norm_eps)
    return x32.astype(x.dtype) * scale


def rotary(x, positions, c):
    """Rotate each pair (x[i], x[i + N/2]) of every head in x [B, T, H, N] by the token's position
    times the pair's rate, so that q.k depends on the distance between two tokens."""
    rates, _ = rotary_rates(c.head_dim, c.rope_theta, c.rope_scaling)
    return rotate(x, positions, rates)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def block(w, x, i, batch, attend, c):
    """Run one layer: the stream x [B, T, D] -> x, aux. aux is None or a pair: what the layer adds
    to the loss, and a dict of other sums to log (the step divides each by the loss's count).

    i is the layer's index. It's traced, so an `if` can't depend on it. attend(q, k, v) is causal
    softmax attention: to the row's keys in training, to the cached keys in decoding. To change the
    mask or the scores, call attend(q, k, v, mask, scores): see shard.self_attend."""
    h = norm(x, w["attn_norm"], c)
    q, k, v = shard.columns(h, w["wq"], w["wk"], w["wv"])       # [B, T, H, N], [B, T, K, N] twice
    q, k = (rotary(a, batch["positions"], c) for a in (q, k))
    y = shard.row((attend(q, k, v), w["wo"]))
    x = x + shard.dropout(y, c.dropout, batch.get("seeds"), 2 * i)

    h = norm(x, w["mlp_norm"], c)
    y, aux = mixture_of_experts(w, h, i, batch, c) if c.experts else (mlp(w, h), None)
    return x + shard.dropout(y, c.dropout, batch.get("seeds"), 2 * i + 1), aux


@shard.recomputable("mlp")      # (--remat mlp recomputes this)
def mlp(w, h):
    return shard.row((swiglu(*shard.columns(h, w["w_gate"], w["w_up"])), w["w_down"]))


@shard.recomputable("mlp")
def mixture_of_experts(w, h, i, batch, c):
    """Run h [B, T, D] through each token's best experts; in training, see shard.router_terms."""
    logits = jnp.einsum("btd,de->bte", h.astype(jnp.float32), w["router"].astype(jnp.float32))
    probs = jax.nn.softmax(logits)
    shares, chosen = lax.top_k(probs, c.experts_per_token)                  # [B, T, best] twice
    shares = shares / shares.sum(-1, keepdims=True)
    y, rounds = shard.run_experts(h, chosen, shares, (w["e_gate"], w["e_up"]), swiglu, w["e_down"])
    if "seeds" not in batch:
        return y, None
    balance, z, busy = shard.router_terms(logits, probs, chosen, batch["weights"])
    added = c.balance * balance + c.router_z * z
    logged = {"router_loss": added, "expert_load": jnp.zeros((c.layers, c.experts)).at[i].set(busy),
              "expert_rounds": rounds / c.layers * batch["weights"].sum()}
    return y, (added, lax.stop_gradient(logged))


# -------------------------------------------------------------------------------------------
# The network

def embed(params, tokens, c):
    check_ids(tokens, c.vocab_size)
    return shard.embed_lookup(params["embed"], tokens) * c.embed_scale


def layer(w, x, i, batch, c):
    """Run a block in training or `forward`: both see all of a row's tokens and need no cache."""
    w = low_rank.adapted(w)
    w = w | {name: shard.repeat_kv(w[name], c.heads) for name in ("wk", "wv")}
    batch = {"positions": shard.slots_of(batch["tokens"]), **batch}
    attend = functools.partial(
        shard.self_attend, heads=c.heads, positions=batch["positions"],
        documents=documents(batch), kernel=c.kernel)
    return block(w, x, i, batch, attend, c)


def documents(batch):
    """Return the index of each token's document [B, T], -1 where the mask is 0, or None if every
    row is a single document."""
    if "mask" in batch:
        return jnp.where(batch["mask"] > 0, batch.get("segments", 0), -1)
    return batch.get("segments")


def norm_and_head(params, x, c):
    return norm(x, params["norm"], c), params["embed"].T if c.tied else params["head"]


def head_logits(params: Params, x: Array, config: Config) -> Array:
    """Return float32 next-token logits [B, T, vocab_size], given the last layer's x [B, T, D]."""
    logits = shard.vocab_logits(*norm_and_head(params, x, config), config.vocab_size)
    return logits[..., :config.vocab_size]


def forward(params: Params, tokens: Array, config: Config, positions: Array | None = None,
            segments: Array | None = None, mask: Array | None = None) -> Array:
    """Return logits [B, T, vocab_size] for the token after each of `tokens` [B, T]. For a single
    row, leave out B. segments number the documents packed into a row; mask is 0 for padding."""
    given = dict(tokens=tokens, positions=positions, segments=segments, mask=mask)
    batch = {name: jnp.asarray(a) for name, a in given.items() if a is not None}
    if batch["tokens"].ndim == 1:
        return forward(params, config=config, **{k: a[None] for k, a in batch.items()})[0]
    params = cast(params, config.dtype)
    x, _ = shard.layers(lambda w, x, i: layer(w, x, i, batch, config), params["layers"],
                        embed(params, batch["tokens"], config), jnp.arange(config.layers))
    return head_logits(params, x, config)


def loss(params: Params, batch: dict[str, Array], config: Config, specs: Params | None = None
         ) -> tuple:
    """Return (sum, count): the sum of each target's weight times its cross-entropy in nats, and the
    sum of the weights. The step sums both over parts and devices, then divides them.

    A batch with `seeds` [B] is a training batch: dropout is on, experts add router_loss to the sum,
    and a dict of sums to log comes third. With seq, each device has only some of the row's tokens,
    out of order, so shifting them here would be wrong: make the targets in data.collate.

        loss -> shard.pipelined_loss -> embed_tokens -> shard.embed_lookup
                                     -> shard.layers -> layer -> block -> columns, attend, row
                                     -> head -> norm_and_head, shard.token_loss"""
    def embed_tokens(params, batch):
        return embed(params, batch["tokens"], config)

    def head(params, x, batch):
        total, hits = shard.token_loss(*norm_and_head(params, x, config), batch["targets"],
                                       batch["weights"], config.vocab_size)
        return with_hits(total, jnp.sum(batch["weights"]), hits, config)

    params = cast(params, config.dtype)
    others = {name: w for name, w in params.items() if name != "layers"}
    return shard.pipelined_loss(embed_tokens, functools.partial(layer, c=config), head, others,
                                params["layers"], batch, specs and specs["layers"], config)


def batch_shapes(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    ids = jax.ShapeDtypeStruct((rows, config.seq_len), jnp.int32)
    return {"tokens": ids, "targets": ids, "weights": ids.update(dtype=jnp.float32)}


# -------------------------------------------------------------------------------------------
# Decoding: the same block, with attention to a cache of keys and values (zigzag/generate/cache.py)

def cache_layer(config: Config, i: int) -> CacheLayer:
    """Return what layer i's cache holds: {array: head width}, heads[, window: last tokens]."""
    return CacheLayer({"k": config.head_dim, "v": config.head_dim}, config.kv_heads)


def extend(params: Params, cache: list[Params], tokens: Array, slot: Array, start: Array,
           config: Config, length: int = 0, specs: Params | None = None
           ) -> tuple[Array, list[Params]]:
    """Run new tokens [B, T] through all layers. Return the last layer's output [B, T, D] and the
    cache with their keys and values added from `slot` on. Slots before start[b] are padding in row
    b. Layers in params and cache are lists. `length`, for the whole text, may scale positions."""
    batch = {"positions": kv_cache.query_tokens(slot, start, tokens.shape[1]).position}

    @jax.jit                # trace once for all layers
    def one(w, x, i, cached):
        attend = kv_cache.Attend(cached, slot, start, config.heads, config.kv_heads)
        x, _ = block(w, x, i, batch, attend, config)
        return x, attend.layer

    x, new = embed(params, tokens, config), []
    for i, (w, cached) in enumerate(zip(params["layers"], cache, strict=True)):
        x, extended = one(shard.gather(w, specs and specs["layers"][i]), x, i, cached)
        new.append(extended)
    return shard.whole_time(x), new


NETWORK = Network("decoder", Config, weight_table, loss, batch_shapes, forward, extend=extend,
                  head_logits=head_logits, cache_layer=cache_layer,
                  block_traffic=lambda config: Traffic())
init, weight_specs = NETWORK.init, NETWORK.weight_specs


def main() -> None:
    """Run python model.py --run RUN --export DIR: write a run as a published folder."""
    part("published.folders", "python model.py --export").export()


if __name__ == "__main__":
    shard.run_main(main)
