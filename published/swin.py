"""Swin and Swin V2 classify images with windowed attention, in stages of fewer and wider tokens.

    image -> patches -> norm -> [ stage -> merge ] -> [ stage -> merge ] -> ... stage -> norm
                                                                          -> mean -> classes
    a stage:  [ norm -> attention in windows -> + -> norm -> MLP -> + ] x its layers
    a merge:  four neighbors become one token of twice the width

     layers 0, 2, ...       layers 1, 3, ...: we roll the image by half a window, so windows
      +---+---+---+         straddle the borders of the previous layer's windows
      |   |   |   |           +-+---+---+-+
      +---+---+---+           +-+---+---+-+     A window at the edge has tokens from both sides of
      |   |   |   |           | |   |   | |     the image. Tokens from different sides can't see
      +---+---+---+           +-+---+---+-+     each other (they differ in `region`).

Each score gets a learned bias for the distance between the two tokens (`relative`). In Swin V2

    - a small MLP computes this bias from the distance in rows and columns, on a logarithmic scale;
    - a score is the cosine of query and key, times a learned factor per head (`logit_scale`);
    - norms are on the outputs of attention, MLP and merge;
    - windows are smaller where a stage has too few tokens for them.

Between blocks the tokens are a residual stream [B, T, D] with T = h * w, and tensor may split T.
Windows need the whole sequence, and layers differ between stages, so `check` rejects the axes pipe
and seq.

B batch, T sequence, D width of a stage (d of the next, m of four tokens), H heads (K of keys), N
per head (M of values), F feed-forward, L layers of a stage, J distances in a window, X a distance's
rows and columns, U width of the MLP for distances, A classes, C channels, y and x the sides of a
patch.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, nn

import shard
from published import general, stems, transformer, windows
from published.encoders import PATCHES, newer
from published.family import Family, biased, keys, mlp, under
from published.family import attention as names_of_attention
from published.general import Batch, Config
from published.llama import record_of
from published.positions import grid_ids, relative_bias
from published.record import (
    MOST,
    MOST_LAYERS,
    classed,
    count,
    pictures,
    refuse,
    tower,
    wrong,
)
from published.tables import batch_shapes, head_weights, layer_weights, norms
from published.transformer import class_loss, heads_of, norm, product
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import cast
from zigzag.parallel.network import Network, Params, refuse_rows
from zigzag.parallel.products import matmul
from zigzag.parallel.table import Table

# The epsilon of LayerNorms outside the layers, whatever config.json says for the ones inside.
EPS = 1e-5
# Swin V2: the width of the MLP for distances, and the largest factor on a cosine.
DISTANCE_WIDTH, MOST_SCALE = 512, 100.0


# -------------------------------------------------------------------------------------------
# The shape of a model

class Stage(NamedTuple):
    """Consecutive layers of the same width."""
    name: str       # the name of its weights
    layers: int
    width: int
    heads: int
    window: int     # tokens on a side of a window
    far: int        # Swin V2: the side of the windows whose distances are at most 1
    is_one: bool    # Swin V2: whether one window holds the whole image


def stages(c: Config) -> list[Stage]:
    known, found = record_of(c), []
    window, trained = known["window_size"], known.get("pretrained_window_sizes") or []
    for i, (layers, heads) in enumerate(zip(known["depths"], known["num_heads"])):
        own, side = window, c.side // 2**i
        if is_v2(c):
            own = min(window, side)
        far = trained[i] if i < len(trained) and trained[i] else own
        found.append(Stage(f"stage{i}", layers, c.d_model * 2**i, heads, own, far, side <= window))
    return found


def is_v2(c: Config) -> bool:
    return c.norm_place == "out"


def table(c: Config) -> Params:
    """Return the table of all weights."""
    own, last = stages(c), stages(c)[-1].width
    make = Table(C=c.channels, y=c.patch_size, x=c.patch_size, D=c.d_model)
    weights = stems.patch_weights(c, make) | norms(c, make, "D", ["embed_norm"])
    for stage in own:
        weights[stage.name] = {"layers": _layer_weights(c, stage)}
    for stage in own[:-1]:
        make = Table(m=4 * stage.width, d=2 * stage.width)
        out = "d" if is_v2(c) else "m"
        weights[stage.name] |= {"merge": make("m/fsdp d", (4 * stage.width) ** -0.5),
                                **norms(c, make, out, ["merge_norm"])}
    return weights | head_weights(change(c, d_model=last), Table(D=last, A=c.labels))


def _layer_weights(c, stage):
    known, D, H = record_of(c), stage.width, stage.heads
    own = change(c, d_model=D, heads=H, kv_heads=H, head_dim=D // H,
                 d_ff=int(known["mlp_ratio"] * D))
    weights = layer_weights(own, stage.layers)
    if not is_v2(c):
        make = Table(L=stage.layers, H=H, J=(2 * stage.window - 1) ** 2)
        return weights | {"relative": make("L/pipe J/fsdp H/tensor", 0.02)}
    make = Table(L=stage.layers, H=H, X=2, U=DISTANCE_WIDTH)
    return weights | {"logit_scale": make("L/pipe H/tensor", 0.0, _initial_scale),
                      "distance_up": make("L/pipe X U/fsdp", 0.02),
                      "distance_up_bias": make("L/pipe U", 0.0),
                      "distance_down": make("L/pipe U/fsdp H/tensor", 0.02)}


def _initial_scale(*shape):
    return np.full(shape, math.log(10), np.float32)


# -------------------------------------------------------------------------------------------
# The network

def _distance_biases(w, stage):
    """Return the score biases [J, H] that Swin V2's MLP computes, between 0 and 16."""
    places = jnp.asarray(coordinates(stage).reshape(-1, 2), w["distance_up"].dtype)
    h = nn.relu(product(w, "distance_up", places))
    return 16 * nn.sigmoid(matmul(h, w["distance_down"], 1, jnp.float32))


def coordinates(stage: Stage) -> np.ndarray:
    """Return the distances [2 W - 1, 2 W - 1, 2] in a window, on a logarithmic scale."""
    apart = 8 * np.arange(1 - stage.window, stage.window) / max(stage.far - 1, 1)
    apart = np.sign(apart) * np.log2(np.abs(apart) + 1) / 3
    return np.stack(np.meshgrid(apart, apart, indexing="ij"), -1)


def _cosines(w, q, k):
    """Return queries and keys whose scores are their cosines times each head's factor."""
    scale = heads_of(q, w["logit_scale"], 0).astype(jnp.float32)
    scale = jnp.exp(jnp.minimum(scale, math.log(MOST_SCALE))) * q.shape[-1] ** 0.5
    return (_unit(q) * scale[:, None]).astype(q.dtype), _unit(k).astype(k.dtype)


def _unit(x):
    """Scale vectors to length 1. Zeros, such as the keys of padding, stay zeros."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-24))


def _attend(w, q, k, v, size, shift, stage, c):
    """Attend within windows of images rolled by `shift`. Tokens from different sides of the
    image can't see each other, just like tokens of different documents."""
    end, right = (jnp.arange(n) >= n - shift for n in size)     # rolled from the other side
    region = windows.cut((2 * end[:, None] + right)[None], stage.window)
    table = heads_of(q, _distance_biases(w, stage) if is_v2(c) else w["relative"], 1)
    q, k = _cosines(w, q, k) if is_v2(c) else (q, k)

    def scores(s, query, key, heads):
        return s + relative_bias(c, table, grid_ids(query.slot[:1], key.slot[:1], stage.window))

    return shard.self_attend(q, k, v, scores=scores, causal=False,
                             documents=jnp.tile(region, (len(q) // len(region), 1)))


def _merge(w, x, size, c):
    """Merge neighbors: x [B, h * w, D] -> [B, h/2 * w/2, 2 D], and the new (h, w)."""
    x = shard.time_of_block(x)
    x = windows.padded(x.reshape(len(x), *size, -1), 2)
    x = jnp.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    size = x.shape[1:3]
    x = shard.residual_stream(x.reshape(len(x), -1, x.shape[-1]))
    if is_v2(c):
        return norm(w, "merge_norm", matmul(x, w["merge"]), c, eps=EPS), size
    return matmul(norm(w, "merge_norm", x, c, eps=EPS), w["merge"]), size


def _shift(stage, pictures, size, c):
    """Return how far the stage's odd layers roll the image. They don't if a single window holds the
    whole image; in Swin V2, an image of the size in config.json."""
    if is_v2(c):
        return 0 if stage.is_one else stage.window // 2
    if min(size) < stage.window:
        raise ConfigError(f"pictures of {pictures.shape[2]} x {pictures.shape[3]} pixels are "
                          f"{size[0]} x {size[1]} tokens in {stage.name}: fewer than its "
                          f"windows, {stage.window} x {stage.window}")
    return stage.window // 2 if min(size) > stage.window else 0


def _trunk(params, pictures, c, specs=None):
    """Return the last norm's output [B, T, D] for the whole sequence."""
    x = windows.patches(params, pictures, c)
    size = x.shape[1:3]
    x = shard.residual_stream(x.reshape(len(x), -1, c.d_model))
    x = norm(params, "embed_norm", x, c, eps=EPS)
    for stage in stages(c):
        shift = _shift(stage, pictures, size, c)

        def layer(w, x, shift, size=size, stage=stage):
            attend = functools.partial(_attend, shift=shift, stage=stage, c=c)
            return windows.block(w, x, size, stage.window, c, attend, shift), None

        w, own = params[stage.name], specs and specs[stage.name]
        x, _ = shard.layers(layer, w["layers"], x, shift * (jnp.arange(stage.layers) % 2),
                            own and own["layers"], c)
        if "merge" in w:
            x, size = _merge(w, x, size, c)
    return shard.whole_time(norm(params, "norm", x, c))


def forward(params: Params, pictures: Array, config: Config, specs: Params | None = None) -> Array:
    """Return float32 logits [B, labels] for images [B, C, height, width]; without a head, vectors
    [B, T, D]. The images' size may differ from config.image_size."""
    params = cast(params, config.dtype)
    x = _trunk(params, pictures, config, specs)
    if config.head == "none":
        return x
    return product(params, "classifier", x.mean(1), 1, jnp.float32)


def loss(params: Params, batch: Batch, config: Config, specs: Params | None = None
         ) -> tuple:
    """Return (sum, count): cross-entropy of `labels` [B] for images `source`, and row count."""
    return class_loss(forward(params, batch["source"], config, specs), batch, config)


def check(c: Config, mesh: Any) -> None:
    """Reject options and meshes that this model doesn't support."""
    refuse_rows(c, [
        ("head", c.head == "none", "this Swin returns vectors and has no loss; give fit a loss"),
        ("dropout", c.dropout, "Swin has no dropout here; leave it out")])
    general.check_axes(mesh, "a Swin's stages have different layers, and its windows need the "
                             "whole sequence")


# -------------------------------------------------------------------------------------------
# Published models

DEFAULTS = dict(image_size=224, patch_size=4, num_channels=3, embed_dim=96, depths=[2, 2, 6, 2],
                num_heads=[3, 6, 12, 24], window_size=7, mlp_ratio=4.0, qkv_bias=True,
                hidden_act="gelu", use_absolute_embeddings=False, layer_norm_eps=1e-5)


def _fields(r):
    # Absolute embeddings have one row too many, and don't run in transformers either.
    refuse(r, use_absolute_embeddings=False)
    is_second = r.kind == "swinv2"
    heads, kind = _check_stages(r, is_second), "Swinv2" if is_second else "Swin"
    head = classed(r, {f"{kind}ForImageClassification": dict(head="classes", pool="mean"),
                       f"{kind}Model": dict(head="none")})
    bias = {"qv" if is_second else "qkv": r["qkv_bias"]}
    return {**tower(r, layers="", d_model="embed_dim", heads=""), **pictures(r), **head,
            "layers": sum(r["depths"]), "heads": heads, "positions": "none",
            "d_ff": int(r["mlp_ratio"] * r["embed_dim"]),
            "norm_place": "out" if is_second else "pre",
            **biased(embed=True, **bias, out=True, mlp=True)}


def _check_stages(r, is_second):
    """Reject invalid stages. Return the first stage's head count."""
    size, width = -(-count(r, "image_size") // count(r, "patch_size")), count(r, "embed_dim")
    depths, heads, window = r["depths"], r["num_heads"], count(r, "window_size")
    if not all(isinstance(a, list) for a in (depths, heads)) or not (
            1 <= len(depths) == len(heads)):
        raise wrong("depths", depths, f" and num_heads {heads!r:.80}: expected two lists of the "
                                      f"same length")
    trained = r.plain("pretrained_window_sizes") if is_second else None
    if trained is not None and (
            not isinstance(trained, list) or len(trained) < len(depths)
            or not all(type(n) is int and n != 1 and 0 <= n <= MOST for n in trained)):
        raise wrong("pretrained_window_sizes", trained, ": expected a number for each stage, 0 or "
                                                        "at least 2")
    if is_second and not r["image_size"] // r["patch_size"] >> (len(depths) - 1):
        raise wrong("image_size", r["image_size"], ": the last stage has no tokens")
    for layers, own in zip(depths, heads):
        count({"depths": layers}, "depths", MOST_LAYERS)
        if width % count({"num_heads": own}, "num_heads"):
            raise wrong("num_heads", heads, f": {own} heads do not divide a stage that is {width} "
                        f"wide")
        if size < window and not is_second:
            raise wrong("window_size", window, f": a stage has only {size} x {size} tokens")
        if not 1 <= r["mlp_ratio"] * width <= MOST:
            raise wrong("mlp_ratio", r["mlp_ratio"], f": {width} times it is not a valid MLP width")
        size, width = -(-size // 2), 2 * width
    return heads[0]


def _arrays(c):
    out = "_out" if is_v2(c) else ""
    found = PATCHES | {"embeddings.norm": "embed_norm", "layernorm": "norm"}
    for i, stage in enumerate(stages(c)):
        found |= under(f"encoder.layers.{i}.", {"downsample.reduction": f"{stage.name}.merge",
                                                "downsample.norm": f"{stage.name}.merge_norm"})
        found |= under(
            f"encoder.layers.{i}.blocks.{{{stage.name}.layers}}.",
            mlp("intermediate.dense", "output.dense"),
            names_of_attention("attention.{}", "self.query self.key self.value output.dense"),
            {"layernorm_before": f"attn{out}_norm", "layernorm_after": f"mlp{out}_norm",
             "attention.self.relative_position_bias_table": "-> relative",
             "attention.self.logit_scale": "H 1 1 -> logit_scale",
             "attention.self.continuous_position_bias_mlp.0": "distance_up",
             "attention.self.continuous_position_bias_mlp.2": "distance_down"})
    return under("swinv2." if is_v2(c) else "swin.", found) | {"classifier": "classifier"}


def _is_index(c, array):
    """Return whether the array gives the bias table's row for each pair of tokens in a window."""
    def index(side):
        patches = np.arange(side**2)
        return grid_ids(patches[:, None], patches, side)

    return any(np.array_equal(array, index(stage.window)) for stage in stages(c))


def _is_coordinates(c, array):
    """Return whether the array holds the distances that Swin V2's MLP reads."""
    known = [coordinates(stage)[None] for stage in stages(c)]
    return any(a.shape == array.shape and np.allclose(a, array, atol=0.01) for a in known)


SWIN = Family(_fields, _arrays, DEFAULTS, "swin.", {r".*relative_position_index": _is_index},
              older={**newer("attention.self"), "self.relative": "relative_position_bias.relative"},
              aliases={"num_attention_heads": "num_heads"},
              neutral=keys("""drop_path_rate encoder_stride hidden_size num_layers out_features
                              out_indices path_norm stage_names tie_word_embeddings"""))
SWIN_V2 = SWIN._replace(
    defaults={**DEFAULTS, "pretrained_window_sizes": [0, 0, 0, 0]}, prefix="swinv2.",
    ignored={**SWIN.ignored, r".*relative_coords_table": _is_coordinates}, older={})

NETWORK = Network("swin", Config, table, loss, batch_shapes, forward,
                  {"swin": SWIN, "swinv2": SWIN_V2}, check,
                  gives=lambda c: "classes" if c.head == "classes" else "vectors",
                  source_shape=transformer.source_shape, limits=transformer.limits)
