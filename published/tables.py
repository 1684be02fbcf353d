"""The weight table of the general transformer. Each entry gives a weight's dimensions, the mesh
axis that splits each dimension, and the initial standard deviation (None: all ones). The letters
are transformer.py's, plus these:

J rows of learned distance biases, Z token types (or task types), A classes, C channels (of an image
or a sound frame), y and x the sides of a patch, k frames that a convolution covers, d a second D.
"""

from typing import Any

import jax
import jax.numpy as jnp

from published import stems
from published.general import Shapes
from published.positions import relative_rows
from zigzag.core.flags import change
from zigzag.core.options import only
from zigzag.parallel.network import Params
from zigzag.parallel.table import Table, padded


def table(c: Any) -> Params:
    """Return a model's weights, including its encoder's if it has one, as a tree of Weight."""
    D, W = c.d_model, c.embed_dim or c.d_model
    make = Table(D=D, W=W, V=padded(c.vocab_size), P=c.position_rows, d=D, A=c.labels, k=3,
                 J=relative_rows(c), H=c.heads, Z=c.token_types, C=c.channels, y=c.patch_size,
                 x=c.patch_size)
    count = c.layer_groups or c.expert_layers
    weights = {"layers": layer_weights(c, count, c.experts)}
    if c.expert_every > 1:
        weights["layers"]["between"] = {
            str(i): layer_weights(c, count) for i in range(c.expert_every - 1)}
    if c.dense_layers:
        weights["dense_layers"] = layer_weights(c, c.dense_layers)
    if c.encoder_layers:
        weights["encoder"] = table(encoder_config(c))
        weights["encoder"].pop("embed", None)       # it uses the decoder's embedding
    if c.relative and c.relative_shared:
        weights["relative"] = make("J/fsdp H/tensor", 0.1)
    return weights | _embed_weights(c, make) | head_weights(c, make)


def _embed_weights(c, make):
    W, inner = c.embed_dim or c.d_model, "W" if c.embed_norm else "D"
    if c.own_stem == "tokens":
        weights = {"embed": make("V/tensor W/fsdp", W**-0.5)}
    else:
        weights = stems.weight_table(c, make)
    if c.positions in ("learned", "fixed"):
        weights["positions"] = make(f"P {inner}/fsdp", 0.02,
                                    stems.sound_positions if c.positions == "fixed" else None)
    if c.token_types:
        weights["token_types"] = make(f"Z {inner}/fsdp", 0.02)
    if c.task_types:
        make_tasks = Table(Z=c.task_types, D=c.d_model, W=W)
        weights["task_types"] = make_tasks(f"Z {inner}/fsdp", 0.02)
    if W != c.d_model:
        weights["project_in"] = make("W D/fsdp", W**-0.5)
        if _has_bias(c, "embed"):
            weights["project_in_bias"] = make("D", 0.0)
    return weights | norms(c, make, inner, ["embed_norm"] * c.embed_norm)


def head_weights(c: Any, make: Any) -> Params:
    """Return the weights of the last norm and the head."""
    D, W = c.d_model, c.embed_dim or c.d_model
    weights = norms(c, make, "D", ["norm"] * (c.norm_place != "post"))
    if c.head == "classes":
        weights |= {"classifier": make("D/fsdp A", D**-0.5)}
        weights |= {} if c.pool == "last" else {"classifier_bias": make("A", 0.0)}
    if c.pool_dense:
        weights |= {"pool": make("d/fsdp D", D**-0.5), "pool_bias": make("D", 0.0)}
    if c.head == "masked":
        weights |= {"transform": make("D/fsdp W" if W != D else "d/fsdp W", D**-0.5),
                    "transform_bias": make("W", 0.0), **norms(c, make, "W", ["transform_norm"])}
    elif W != D and c.head == "tokens":
        weights["project_out"] = make("D/fsdp W", D**-0.5)
    if c.head in ("tokens", "masked"):
        weights |= {} if c.tied else {"head": make("W/fsdp V/tensor", W**-0.5)}
        weights |= {"head_bias": make("1 V/tensor", 0.0)} if _has_bias(c, "head") else {}
    return weights


def layer_weights(c: Any, L: int, experts: int = 0) -> Params:
    """Return the weights of a stack of L identical layers."""
    D, G = c.d_model, c.expert_d_ff or c.d_ff
    F = c.shared_experts * G if experts else c.d_ff
    # Latent attention (R) computes queries, keys and values from short vectors. All heads share the
    # rotated part of the keys (U).
    Q, R, U, H, M = c.q_rank, c.kv_rank, c.rotary_dim, c.heads, c.v_head_dim or c.head_dim
    make = Table(L=L, D=D, H=H, K=c.kv_heads, N=c.head_dim, M=M, F=F, E=experts, G=G, Q=Q, R=R,
                 U=U, Y=c.head_dim - U, J=relative_rows(c))
    # The residual stream sums 2 L outputs. The weights that produce them start smaller by a factor
    # of sqrt(2 L), so the stream doesn't grow with depth.
    into, back = D**-0.5, (2 * c.layers) ** -0.5
    weights = {"wq": make("L/pipe D/fsdp H/tensor N", into),
               "wk": make("L/pipe D/fsdp K/tensor N", into),
               "wv": make("L/pipe D/fsdp K/tensor M", into),
               "wo": make("L/pipe H/tensor M D/fsdp", (H * M) ** -0.5 * back)}
    if c.encoder_layers:        # cross-attention to the encoder's output
        weights |= {f"cross_{name}": w for name, w in weights.items()}
    if c.relative and not c.relative_shared:
        weights["relative"] = make("L/pipe J/fsdp H/tensor", 0.1)
    if R:
        weights |= {"kv_down": make("L/pipe D/fsdp R", into), "kv_norm": make("L/pipe R"),
                    "k_rotary": make("L/pipe D/fsdp U", into),
                    "wk": make("L/pipe R/fsdp H/tensor Y", R**-0.5),
                    "wv": make("L/pipe R/fsdp H/tensor M", R**-0.5)}
    if R and Q:
        weights |= {"q_down": make("L/pipe D/fsdp Q", into), "q_down_norm": make("L/pipe Q"),
                    "wq": make("L/pipe Q/fsdp H/tensor N", Q**-0.5)}
    if c.qk_norm_wide:
        weights |= {"q_norm": make("L/pipe 1 H/tensor N"), "k_norm": make("L/pipe 1 K/tensor N")}
    elif c.qk_norm:
        weights |= {"q_norm": make("L/pipe N"), "k_norm": make("L/pipe N")}
    if F:           # the MLP that every token goes through
        weights |= {"w_gate": make("L/pipe D/fsdp F/tensor", into)} if c.gated else {}
        weights |= {"w_up": make("L/pipe D/fsdp F/tensor", into),
                    "w_down": make("L/pipe F/tensor D/fsdp", F**-0.5 * back)}
    if experts:
        weights |= {"router": make("L/pipe D/fsdp E", into),
                    "e_gate": make("L/pipe E/expert D/fsdp G/tensor", into),
                    "e_up": make("L/pipe E/expert D/fsdp G/tensor", into),
                    "e_down": make("L/pipe E/expert G/tensor D/fsdp", G**-0.5 * back)}
    if experts and c.router == "sigmoid":
        weights["router_bias"] = make("L/pipe E", 0.0)
    biases = {"wq": ("qkv qv", "L/pipe 1 H/tensor N"), "wk": ("qkv", "L/pipe 1 K/tensor N"),
              "wv": ("qkv qv", "L/pipe 1 K/tensor M"), "wo": ("out", "L/pipe D"),
              "w_gate": ("mlp", "L/pipe 1 F/tensor"), "w_up": ("mlp", "L/pipe 1 F/tensor"),
              "w_down": ("mlp", "L/pipe D")}
    weights |= {f"{name}_bias": make(axes, 0.0) for name in weights
                for products, axes in [biases.get(name.removeprefix("cross_"), ("", ""))]
                if any(_has_bias(c, product) for product in products.split())}
    if c.layer_scale:
        weights |= {name: make("L/pipe D") for name in ("attn_out_scale", "mlp_out_scale")}
    halves = ["attn"] + ["mlp"] * (not c.parallel_block or c.parallel_norms == 2)
    halves += ["cross"] * (c.encoder_layers > 0)
    names = [f"{half}_norm" for half in halves if c.norm_place != "out"]
    names += [f"{half}_out_norm" for half in halves if c.norm_place in ("out", "sandwich")]
    return weights | norms(c, make, "L/pipe D", names)


def attention_weights(layer: Params, name: str) -> Params:
    """Return a layer's weights of attention and its norm under other names, such as cross_wq."""
    return {f"{name}{own.removeprefix('attn_')}": w for own, w in layer.items()
            if own.startswith(("wq", "wk", "wv", "wo", "attn_norm"))}


def norms(c: Any, make: Any, axes: str, names: list[str]) -> Params:
    """Return the scales of these norms, plus the biases of LayerNorms."""
    weights = {name: make(axes) for name in names}
    if c.norm == "layer":
        weights |= {f"{name}_bias": make(axes, 0.0) for name in names}
    return weights


def _has_bias(c, product):
    return product in c.biases.split(",")


def encoder_config(c: Any, length: int = 0) -> Any:
    """Return the Config of an encoder-decoder's encoder for a source of this length. Reject a
    source longer than the table of learned positions."""
    if length and c.stem == "tokens":
        c = change(c, source_len=length)
    enough = c.stem == "tokens" or c.stem == "patches" and c.position_rows >= stems.length(c)
    return change(
        c, layers=c.encoder_layers, encoder_layers=0, causal=False, head="none", tied=True,
        heads=c.encoder_heads, kv_heads=c.encoder_heads, d_ff=c.encoder_d_ff, seq_len=c.source_len,
        head_dim=c.head_dim if c.encoder_heads == c.heads else 0,
        positions="fixed" if c.stem == "frames" else c.positions,
        position_rows=c.position_rows if enough else 0)


def batch_shapes(config: Any, rows: int) -> Shapes:
    """Return {name: shape} for a batch of `loss`."""
    c, ids = config, jax.ShapeDtypeStruct((rows, config.seq_len), jnp.int32)
    weights = ids.update(dtype=jnp.float32)
    batch = {"tokens": ids, "targets": ids, "weights": weights}
    if c.head == "classes":     # a single label is a number (regression)
        kind = weights if c.labels == 1 else ids
        batch = {"tokens": ids, "mask": weights, "labels": kind.update(shape=(rows,))}
    if c.own_stem != "tokens":
        batch = only(batch, "labels")
    if c.stem != "tokens":
        batch["source"] = weights.update(shape=stems.source_shape(c, rows))
    elif c.encoder_layers:
        batch |= {"source": ids.update(shape=(rows, c.source_len)),
                  "source_mask": weights.update(shape=(rows, c.source_len))}
    return batch
