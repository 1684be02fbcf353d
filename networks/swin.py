"""Swin: classes of pictures by attention within windows, in stages of fewer and wider tokens.

    picture -> patches -> norm -> [ stage -> merge ] -> [ stage -> merge ] -> ... stage -> norm
                                                                            -> mean -> classes
    a stage:  [ norm -> attention in windows -> + -> norm -> MLP -> + ] x its layers
    a merge:  four neighbours become one token of twice the width

     layers 0, 2, ...       layers 1, 3, ...: the picture is rolled by half a window, so that
      +---+---+---+         windows lie across the borders of the previous layer's
      |   |   |   |           +-+---+---+-+
      +---+---+---+           +-+---+---+-+     A window at the edge has some tokens from the other
      |   |   |   |           | |   |   | |     side of the picture: these and the others do not
      +---+---+---+           +-+---+---+-+     see each other (they differ in `region`).

Each score has a learned bias for the distance of the two tokens (`relative`). Between blocks the
tokens are a residual stream [B, T, D], T = h * w, whose time tensor may split. Windows need all of
the time, and layers differ from stage to stage, so the axes pipe and seq are refused.

B batch, T time, D width of a stage (d of the next, m of four tokens), H heads (K of keys), N per
head (M of values), F feed-forward, L layers of a stage, J distances in a window, A classes,
C channels, y and x the sides of a patch.
"""

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import shard
from networks import stems, towers, transformer, windows
from networks.config import Config
from networks.positions import relative_bias
from networks.tables import labels_shape, layer_weights
from networks.transformer import class_loss, feed_forward, heads_of, norm, with_bias
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import cast
from zigzag.hub.encoders import classed, classifier
from zigzag.hub.family import Family, biased, columns, keys, layer_norm, pair_index, rows, under
from zigzag.hub.published_config import MOST, MOST_LAYERS, Record, activation, count, refuse
from zigzag.parallel import attention
from zigzag.parallel.products import matmul
from zigzag.weights import lora
from zigzag.weights.network import Network, Params
from zigzag.weights.table import Table

# The epsilon of LayerNorms outside of layers, whatever config.json says about those in layers.
EPS = 1e-5


# -------------------------------------------------------------------------------------------
# The shape of a model

class Stage(NamedTuple):
    """Consecutive layers of one width."""
    name: str       # the name of its weights
    layers: int
    width: int
    heads: int


def record(c: Config) -> Record:
    """The content of config.json, with defaults for missing entries."""
    return Record(json.loads(c.published), DEFAULTS)


def stages(c: Config) -> list[Stage]:
    known = record(c)
    return [Stage(f"stage{i}", layers, c.d_model * 2**i, heads)
            for i, (layers, heads) in enumerate(zip(known["depths"], known["num_heads"]))]


def table(c: Config) -> dict[str, Any]:
    """The table of all weights."""
    own, last = stages(c), stages(c)[-1].width
    make = Table(C=c.channels, y=c.patch_size, x=c.patch_size, D=c.d_model)
    weights = {"patch": make("C y x D/fsdp", (c.channels * c.patch_size**2) ** -0.5),
               "patch_bias": make("D", 0.0), **_norm(make, "embed_norm", "D")}
    for stage in own:
        weights[stage.name] = {"layers": _layer_weights(c, stage)}
    for stage in own[:-1]:
        make = Table(m=4 * stage.width, d=2 * stage.width)
        weights[stage.name] |= {"merge": make("m/fsdp d", (4 * stage.width) ** -0.5),
                                **_norm(make, "merge_norm", "m")}
    make = Table(D=last, A=c.labels)
    if c.head == "classes":
        weights |= {"classifier": make("D/fsdp A", last**-0.5), "classifier_bias": make("A", 0.0)}
    return weights | _norm(make, "norm", "D")


def _norm(make, name, axes):
    return {name: make(axes), f"{name}_bias": make(axes, 0.0)}


def _layer_weights(c, stage):
    known, D, H = record(c), stage.width, stage.heads
    own = change(c, d_model=D, heads=H, kv_heads=H, head_dim=D // H,
                 d_ff=int(known["mlp_ratio"] * D))
    make = Table(L=stage.layers, H=H, J=(2 * known["window_size"] - 1) ** 2)
    return layer_weights(own, stage.layers) | {"relative": make("L/pipe J/fsdp H/tensor", 0.02)}


# -------------------------------------------------------------------------------------------
# A block: x [B, T, D] are pictures of `size` = (h, w) tokens, rolled by `shift` tokens

def _attention(w, h, shift, size, window, c):
    """Attention within windows: h [B, T, D] -> [B, T, D]."""
    pictures = shard.time_of_block(h).reshape(len(h), *size, h.shape[-1])
    pictures = windows.padded(pictures, window)         # (tokens see the padding: zeros plus bias)
    height, width = pictures.shape[1:3]
    rows = windows.cut(jnp.roll(pictures, (-shift, -shift), (1, 2)), window)    # [B W, t, D]
    q, k, v = shard.columns(rows, *[with_bias(w, name) for name in ("wq", "wk", "wv")],
                            gathered=True)
    table = heads_of(q, w["relative"], 1)
    info = _info(shift, height, width, window, len(rows))

    def attend(q, k, v, known):
        seen, ids = known
        bias = relative_bias(c, table, ids)
        return attention.softmax_attention(q, k, v, seen, lambda s: s + bias)

    out = shard.attend(attend, q, k, v, functools.partial(_mask, window), info, info)
    out = jnp.roll(windows.join(out, window, height, width), (shift, shift), (1, 2))
    out = out[:, :size[0], :size[1]].reshape(len(h), -1, *out.shape[3:])        # [B, T, H, N]
    return shard.row((out, w["wo"])) + w["wo_bias"]


def _info(shift, height, width, window, count):
    """For each token of `count` windows [B W, t], its slot in the window, and the region of the
    picture from which it comes."""
    end, right = (jnp.arange(n) >= n - shift for n in (height, width))  # rolled from the other side
    region = windows.cut((2 * end[:, None] + right)[None], window)
    place = jnp.broadcast_to(jnp.arange(window**2), (count, window**2))
    return {"place": place, "region": jnp.tile(region, (count // len(region), 1))}


def _mask(window, query, key):
    """(mask [B W, 1, t, s] of the keys that a query sees, index [1, t, s] of their distance)."""
    seen = query["region"][:, None, :, None] == key["region"][:, None, None, :]
    (i, j), (k, m) = (divmod(place[:1], window) for place in (query["place"], key["place"]))
    down, right = i[:, :, None] - k[:, None, :], j[:, :, None] - m[:, None, :]
    return seen, (down + window - 1) * (2 * window - 1) + right + window - 1


def block(w: Params, x: Array, shift: Any, size: tuple[int, int], window: int, c: Config) -> Array:
    w = lora.adapted(w)
    x = x + _attention(w, norm(w, "attn_norm", x, c), shift, size, window, c)
    return x + feed_forward(w, norm(w, "mlp_norm", x, c), c)[0]


# -------------------------------------------------------------------------------------------
# The network

def _embed(params, pictures, c):
    """Pictures [B, C, height, width] -> x [B, T, D], and (h, w), their size in tokens. Pictures are
    padded with zeros to whole patches."""
    p = c.patch_size
    x = lax.conv_general_dilated(
        pictures.astype(params["patch"].dtype), params["patch"], (p, p),
        [(0, -n % p) for n in pictures.shape[2:]], dimension_numbers=("NCHW", "IHWO", "NHWC"))
    size = x.shape[1:3]
    x = x.reshape(len(x), -1, c.d_model) + params["patch_bias"]
    x = shard.residual_stream(x)
    return norm(params, "embed_norm", x, c, eps=EPS), size


def _merge(w, x, size, c):
    """x [B, h * w, D] -> [B, h/2 * w/2, 2 D], and the new (h, w)."""
    x = shard.time_of_block(x)
    x = windows.padded(x.reshape(len(x), *size, -1), 2)
    x = jnp.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    size = x.shape[1:3]
    x = shard.residual_stream(x.reshape(len(x), -1, x.shape[-1]))
    return matmul(norm(w, "merge_norm", x, c, eps=EPS), w["merge"]), size


def _trunk(params, pictures, c, specs=None):
    """The last norm's output [B, T, D], with all of the time."""
    x, size = _embed(params, pictures, c)
    window = record(c)["window_size"]
    for stage in stages(c):
        if min(size) < window:
            raise ConfigError(f"pictures of {pictures.shape[2]} x {pictures.shape[3]} pixels are "
                              f"{size[0]} x {size[1]} tokens in {stage.name}: less than its "
                              f"windows, {window} x {window}")
        # (Not rolled if one window has the whole picture.)
        shift = window // 2 if min(size) > window else 0

        def layer(w, x, shift, size=size):
            return block(w, x, shift, size, window, c), None

        w, own = params[stage.name], specs and specs[stage.name]
        x, _ = shard.layers(layer, w["layers"], x, shift * (jnp.arange(stage.layers) % 2),
                            own and own["layers"], c)
        if "merge" in w:
            x, size = _merge(w, x, size, c)
    return shard.whole_time(norm(params, "norm", x, c))


def forward(params: Params, pictures: Array, config: Config, specs: Params | None = None) -> Array:
    """float32 logits [B, labels] of pictures [B, C, height, width]; without a head, vectors
    [B, T, D]. Pictures may have another size than config.image_size."""
    params = cast(params, config.dtype)
    x = _trunk(params, pictures, config, specs)
    if config.head == "none":
        return x
    return matmul(x.mean(1), params["classifier"], 1, jnp.float32) + params["classifier_bias"]


def loss(params: Params, batch: dict[str, Array], config: Config, specs: Params | None = None
         ) -> tuple:
    """(sum, count): the cross-entropy of `labels` [B] for pictures `source`, and their number."""
    out = forward(params, batch["source"], config, specs)
    if config.head == "none":       # (from which the rule finds where weights lie)
        return jnp.sum(out.astype(jnp.float32) ** 2), jnp.float32(len(out))
    return class_loss(out, batch["labels"], config)


def batch_shapes(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """{name: shape} of a batch for the loss."""
    return {"source": jax.ShapeDtypeStruct(stems.source_shape(config, rows), jnp.float32),
            "labels": labels_shape(config, rows)}


def check(c: Config, mesh: Any) -> None:
    """Refuse options and meshes that this model does not support."""
    if c.head == "none":
        raise ConfigError("this Swin returns vectors, and has no loss of its own; give fit a loss")
    if c.dropout:
        raise ConfigError(f"--dropout {c.dropout}: Swin has no dropout here; leave it out")
    towers.check_axes(mesh, "a Swin's stages have different layers, and its windows need all of "
                            "the time")


# -------------------------------------------------------------------------------------------
# Published models

DEFAULTS = dict(image_size=224, patch_size=4, num_channels=3, embed_dim=96, depths=[2, 2, 6, 2],
                num_heads=[3, 6, 12, 24], window_size=7, mlp_ratio=4.0, qkv_bias=True,
                hidden_act="gelu", use_absolute_embeddings=False, layer_norm_eps=1e-5)
# The letter that numbers each stage's layers in patterns of published names. (e is for experts.)
LETTERS = "abcdfghi"


def _fields(r):
    # (Absolute embeddings have a row too many, and do not run in transformers either.)
    refuse(r, use_absolute_embeddings=False)
    heads = _check_stages(r)
    head = classed(r, ForImageClassification=dict(head="classes", pool="mean"),
                   Model=dict(head="none"))
    return dict(
        layers=sum(r["depths"]), d_model=r["embed_dim"], heads=heads, stem="patches",
        d_ff=int(r["mlp_ratio"] * r["embed_dim"]), image_size=r["image_size"],
        patch_size=r["patch_size"], channels=count(r, "num_channels"), causal=False, gated=False,
        norm="layer", norm_eps=r["layer_norm_eps"], positions="none", **head,
        activation=activation(r["hidden_act"]),
        **biased(embed=True, qkv=r["qkv_bias"], out=True, mlp=True))


def _check_stages(r):
    """The number of heads of the first stage, after refusing invalid stages."""
    size, width = -(-count(r, "image_size") // count(r, "patch_size")), count(r, "embed_dim")
    depths, heads, window = r["depths"], r["num_heads"], count(r, "window_size")
    if not all(isinstance(a, list) for a in (depths, heads)) or not (
            1 <= len(depths) == len(heads) <= len(LETTERS)):
        raise ConfigError(f"config.json: depths {depths!r:.80} and num_heads {heads!r:.80}: "
                          f"expected two lists of equally many numbers, at most {len(LETTERS)}")
    for layers, own in zip(depths, heads):
        count({"depths": layers}, "depths", MOST_LAYERS)
        if width % count({"num_heads": own}, "num_heads"):
            raise ConfigError(f"config.json: num_heads {heads}: {own} heads do not divide a stage "
                              f"that is {width} wide")
        if size < window:
            raise ConfigError(f"config.json: window_size {window}: a stage has only {size} x "
                              f"{size} tokens")
        if not 1 <= r["mlp_ratio"] * width <= MOST:
            raise ConfigError(f"config.json: mlp_ratio {r['mlp_ratio']}: {width} times it is not a "
                              f"width of an MLP")
        size, width = -(-size // 2), 2 * width
    return heads[0]


def _arrays(c):
    patch = "embeddings.patch_embeddings.projection"
    found = {f"{patch}.weight": "D C y x -> patch", f"{patch}.bias": "D -> patch_bias",
             **layer_norm("embeddings.norm", "embed_norm"), **layer_norm("layernorm", "norm")}
    bias = record(c)["qkv_bias"]
    for i, (stage, letter) in enumerate(zip(stages(c), LETTERS)):
        name = f"encoder.layers.{i}."
        found |= under(
            f"{name}blocks.{{{letter}}}.", layer_norm("layernorm_before", "attn_norm"),
            columns("attention.self.query", "H N", "wq", bias),
            columns("attention.self.key", "K N", "wk", bias),
            columns("attention.self.value", "K M", "wv", bias),
            rows("attention.output.dense", "H M", "wo"), layer_norm("layernorm_after", "mlp_norm"),
            columns("intermediate.dense", "F", "w_up"), rows("output.dense", "F", "w_down"),
            {"attention.self.relative_position_bias_table": "J H -> relative"})
        if i + 1 < len(stages(c)):
            found |= {f"{name}downsample.reduction.weight": f"d m -> {stage.name}.merge",
                      **layer_norm(f"{name}downsample.norm", f"{stage.name}.merge_norm", "m")}
    return under("swin.", found) | (classifier("classifier") if c.head == "classes" else {})


def _stacks(c):
    return {letter: [(f"{stage.name}.layers", range(stage.layers))]
            for stage, letter in zip(stages(c), LETTERS)}


# The names that transformers 5 uses if it is asked not to save in the original format.
NEWER = {"attention.self.query": "attention.q_proj", "attention.self.key": "attention.k_proj",
         "attention.self.value": "attention.v_proj",
         "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1",
         "output.dense": "mlp.fc2", "self.relative": "relative_position_bias.relative"}


def _is_index(c, array):
    """The published array of indices: the row of the table for each pair of tokens in a window."""
    return np.array_equal(array, pair_index(record(c)["window_size"]))


SWIN = Family(_fields, _arrays, DEFAULTS, "swin.", {r".*relative_position_index": _is_index},
              stacks=_stacks, older=NEWER, aliases={"num_attention_heads": "num_heads"},
              neutral=keys("""drop_path_rate encoder_stride hidden_size num_layers out_features
                              out_indices path_norm stage_names tie_word_embeddings"""))

NETWORK = Network("swin", Config, table, loss, batch_shapes, forward, {"swin": SWIN}, check,
                  gives=lambda c: "classes" if c.head == "classes" else "vectors",
                  source_shape=transformer.source_shape, limits=transformer.limits,
                  flops=transformer.flops)
