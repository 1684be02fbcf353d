"""SAM: draws the masks of what points, a box or a rough mask in an image mean.

    image   [B, C, height, width] -> sam.py's encoder -> y [B, S, D] (+ the rough mask)  \\
    points, boxes -> prompts      -> x: output tokens, then prompts [B, T, D]             \\
      [ x attends to itself -> x attends to y -> MLP on x -> y attends to x ] x L -> x attends to y

    x's first token    -> MLP                             -> scores [B, A]
    x's next A tokens  -> an MLP each    -> [B, A, v]  \\
    y -> 4 x 4 pixels per token of the image [.., v]     -> products: masks [B, A, height, width]

An image may have several prompts (P); each is a row of B from the decoder on. Mask 0 is the answer
to a clear prompt. The others are several readings of a single point: the part, the whole.

A point's position is a vector of sines, whose frequencies `waves` are random and not trained. The
decoder's layers add it to queries and keys, and not to values.

The letters are transformer.py's, plus these: T tokens, S tokens of the image, A masks, P prompts,
X a point's row and column, W frequencies, u, v, e and c channels, k and z the sides of a
convolution, I width of the scores' MLP, d and i a second D and I.
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import shard
from published import general, record, sam, transformer
from published.family import Family, attention, inside, keys, mlp, under
from published.general import Batch, Shapes
from published.llama import record_of
from published.record import activation, classed, count, refuse, wrong
from published.tables import attention_weights, layer_weights, norms
from published.transformer import activate, feed_forward, norm, with_bias
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import cast, vary_like
from zigzag.core.options import flag, only
from zigzag.parallel import low_rank
from zigzag.parallel.attention import softmax_attention
from zigzag.parallel.network import Network, Params
from zigzag.parallel.products import matmul
from zigzag.parallel.table import Table

# -------------------------------------------------------------------------------------------
# Configs. The whole model uses the image encoder's options.

VISION = {**sam.DEFAULTS, "num_pos_feats": 128}
PROMPT = dict(hidden_size=256, image_size=1024, patch_size=16, mask_input_channels=16,
              num_point_embeddings=4, hidden_act="gelu", layer_norm_eps=1e-6)
DECODER = dict(hidden_size=256, hidden_act="relu", mlp_dim=2048, num_hidden_layers=2,
               num_attention_heads=8, attention_downsample_rate=2, num_multimask_outputs=3,
               iou_head_depth=3, iou_head_hidden_dim=256, layer_norm_eps=1e-6)
WHOLE = dict(vision_config=None, prompt_encoder_config=None, mask_decoder_config=None)


@dataclasses.dataclass(frozen=True)
class Config(general.Config):
    """The image encoder's options, and what a training example has. Each field is also a flag."""
    prompts: int = flag(1, least=1)     # prompts per image, each with its mask
    points: int = flag(1, least=0)      # points per prompt; the label -10 is for a place without a
                                        # point. 0: a box instead


def _vision(r):
    own = {**(r.plain("vision_config") or {}), "model_type": "sam_vision_model",
           "architectures": ["SamVisionModel"]}
    return {**sam.fields(r.part("vision_config", VISION, own)),
            "published": json.dumps(own, sort_keys=True)}


def _prompt(r):
    r = r.part("prompt_encoder_config", PROMPT)
    return {"norm": "layer", "norm_eps": r["layer_norm_eps"],
            "activation": activation(r["hidden_act"])}


def _decoder(r):
    r = r.part("mask_decoder_config", DECODER)
    return {**record.tower(r, d_ff="mlp_dim"), "biases": "qkv,out,mlp", "head": "none",
            "causal": False, "positions": "none", "norm_place": "post"}


def vision_config(c: Any) -> Any:
    return general.tower(c, "vision_config", _vision(record_of(c)))


def prompt_config(c: Any) -> Any:
    return general.tower(c, "prompt_encoder_config", _prompt(record_of(c)))


def decoder_config(c: Any) -> Any:
    return general.tower(c, "mask_decoder_config", _decoder(record_of(c)))


def _fields(r):
    classed(r, {"": {}, "SamModel": {}})
    refuse(r, tie_word_embeddings=True)     # version 4 ignores it
    fields = _vision(r)
    fields.pop("published")
    general.tower(None, "prompt_encoder_config", _prompt(r))
    width = general.tower(None, "mask_decoder_config", _decoder(r)).d_model
    vision, prompt, decoder = (r.part(name) for name in WHOLE)
    count(vision, "num_pos_feats")
    for part in (prompt, decoder):
        refuse(part, hidden_size=vision["output_channels"])
    refuse(vision, output_channels=2 * vision["num_pos_feats"])
    side = fields["image_size"] // fields["patch_size"]
    if count(prompt, "image_size") // count(prompt, "patch_size") != side:
        raise wrong("prompt_encoder_config.image_size", prompt["image_size"],
                    f": expected {side} patches of {prompt['patch_size']} pixels, as in "
                    f"vision_config")
    refuse(prompt, image_embedding_size=side, num_point_embeddings=4)
    if width < 8:
        raise wrong("mask_decoder_config.hidden_size", width, ": expected at least 8")
    if count(prompt, "mask_input_channels") % 4:
        raise wrong("prompt_encoder_config.mask_input_channels", prompt["mask_input_channels"],
                    ": expected a multiple of 4")
    for name in ("num_multimask_outputs", "iou_head_depth", "iou_head_hidden_dim"):
        count(decoder, name)
    inner, heads = width // count(decoder, "attention_downsample_rate"), decoder[
        "num_attention_heads"]
    if not inner or inner % heads:
        raise wrong("mask_decoder_config.attention_downsample_rate",
                    decoder["attention_downsample_rate"],
                    f": a width of {inner} does not divide by {heads} heads")
    return fields


# -------------------------------------------------------------------------------------------
# Weights, and the arrays of published models

POINTS = ("outside", "inside", "begin", "end")      # kinds of points: two labels, a box's corners


def table(c: Any) -> Params:
    r, d = record_of(c), decoder_config(c)
    feats = r.part("vision_config", VISION)["num_pos_feats"]
    channels = r.part("prompt_encoder_config", PROMPT)["mask_input_channels"]
    r, D = r.part("mask_decoder_config", DECODER), d.d_model
    A, hidden = r["num_multimask_outputs"] + 1, r["iou_head_hidden_dim"]
    make = Table(D=D, X=2, W=feats, A=A, I=hidden, k=2, z=2, u=D // 4, v=D // 8, c=channels,
                 e=channels // 4)
    prompt = {"waves": make("X W", 1.0), **{name: make("D", 0.02) for name in (
        "not_a_point", "no_mask", *POINTS)}, **_products(
        make, mask1="k z e", mask2="k z e c", mask3="c D/fsdp")}
    prompt |= norms(d, make, "e", ["mask1_norm"]) | norms(d, make, "c", ["mask2_norm"])
    narrow = change(d, head_dim=D // r["attention_downsample_rate"] // d.heads)
    cross, last = (layer_weights(narrow, layers) for layers in (d.layers, 1))
    decoder = {
        "score_token": make("D", 0.02), "mask_tokens": make("A D/fsdp", 0.02),
        "layers": layer_weights(d, d.layers) | attention_weights(cross, "cross_")
        | attention_weights(cross, "back_"), "last": attention_weights(last, "cross_"),
        **_products(make, up1="D/fsdp k z u", up2="u k z v"), **norms(d, make, "u", ["up_norm"]),
        "vectors": _products(Table(L=A, D=D, d=D, v=D // 8), enter="L/pipe D/fsdp d",
                             middle="L/pipe d/fsdp D", leave="L/pipe D/fsdp v"),
        "scores": _products(make, enter="D/fsdp I", leave="I/fsdp A")}
    if (depth := r["iou_head_depth"] - 2) > 0:
        decoder["scores"]["layers"] = _products(Table(L=depth, I=hidden, i=hidden),
                                                middle="L/pipe I/fsdp i")
    return {"vision": sam.table(vision_config(c)), "prompt": prompt, "decoder": decoder}


def _products(make, **axes):
    """Return these weights, each with a bias."""
    stack = {name: "L/pipe " * row.startswith("L") for name, row in axes.items()}
    return {name: make(row, 0.02) for name, row in axes.items()} | {
        f"{name}_bias": make(stack[name] + row.split()[-1].split("/")[0], 0.0)
        for name, row in axes.items()}


def _attention(name, ours):
    return attention(f"{name}.{{}}_proj", "q k v out", ours)


PROMPT_ARRAYS = {
    "shared_embedding.positional_embedding": "X W == prompt.waves",
    "not_a_point_embed.weight": "1 D -> prompt.not_a_point",
    "no_mask_embed.weight": "1 D -> prompt.no_mask",
    **{f"point_embed.{i}.weight": f"1 D -> prompt.{name}" for i, name in enumerate(POINTS)}
} | under("mask_embed.", {
    "conv1": "prompt.mask1", "conv1.weight": "e 1 k z -> prompt.mask1",
    "conv2": "prompt.mask2", "conv2.weight": "c e k z -> prompt.mask2",
    "conv3": "prompt.mask3", "conv3.weight": "D c 1 1 -> prompt.mask3",
    "layer_norm1": "prompt.mask1_norm", "layer_norm2": "prompt.mask2_norm"})
DECODER_ARRAYS = {
    "iou_token.weight": "1 D -> decoder.score_token",
    "mask_tokens.weight": "A D -> decoder.mask_tokens",
    "upscale_conv1": "decoder.up1", "upscale_conv1.weight": "D u k z -> decoder.up1",
    "upscale_conv2": "decoder.up2", "upscale_conv2.weight": "u v k z -> decoder.up2",
    "upscale_layer_norm": "decoder.up_norm", "transformer.layer_norm_final_attn":
        "decoder.last.cross_norm"} | under(
    "transformer.", _attention("final_attn_token_to_image", "decoder.last.cross_")) | under(
    "transformer.layers.{decoder.layers}.", _attention("self_attn", ""),
    _attention("cross_attn_token_to_image", "cross_"),
    _attention("cross_attn_image_to_token", "back_"), mlp("mlp.lin1", "mlp.lin2"),
    {"layer_norm1": "attn_norm", "layer_norm2": "cross_norm", "layer_norm3": "mlp_norm",
     "layer_norm4": "back_norm"}) | under("output_hypernetworks_mlps.{decoder.vectors}.", {
         "proj_in": "enter", "layers.0": "middle", "proj_out": "leave"}) | under(
    "iou_prediction_head.", {
        "proj_in": "decoder.scores.enter", "layers.{decoder.scores.layers}": "middle",
        "proj_out": "decoder.scores.leave"})
ARRAYS = {"shared_image_embedding.positional_embedding": "X W -> prompt.waves"} | inside(
    "vision", sam.ARRAYS) | under("prompt_encoder.", PROMPT_ARRAYS) | under(
    "mask_decoder.", DECODER_ARRAYS)
FAMILIES = {"sam": Family(_fields, ARRAYS, WHOLE, neutral=keys(sam.IN_VISION), stacks=lambda c:
                          sam.stacks(vision_config(c), "vision."))}


# -------------------------------------------------------------------------------------------
# Prompts

def check_prompts(batch: Batch, c: Any) -> None:
    """Reject prompts whose shapes don't fit each other or the model."""
    if "labels" in batch and "points" not in batch:
        raise ConfigError("labels without points: give both")
    side, (B, P, N) = 4 * c.side, (*jnp.shape(batch.get("points", batch.get("boxes"))),
                                   *[1] * 3)[:3]
    B = len(batch["source"])
    shapes = {"points": (B, P, N, 2), "labels": (B, P, N), "boxes": (B, P, 4),
              "masks": (B, side, side), "targets": (B, P, side, side)}
    for name, shape in shapes.items():
        if name in batch and batch[name].shape != shape:
            raise ConfigError(f"{name} of the shape {list(batch[name].shape)}; expected "
                              f"{list(shape)}, for {B} images with {P} prompts each")


def _places(waves, at):
    """Return the vectors [..., D] of places [..., 2], (column, row) from 0 to 1, in float32."""
    at = 2 * at - 1
    angle = 2 * np.pi * (at[..., :1] * waves[0] + at[..., 1:] * waves[1])
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


def _prompts(w, waves, batch, c):
    """Return the vectors of an image's points and boxes, a list of [B, P, n, D]."""
    size, found = record_of(c).part("prompt_encoder_config", PROMPT)["image_size"], []
    if "points" in batch:
        at = batch["points"].astype(jnp.float32)
        labels = batch.get("labels", jnp.ones(at.shape[:3]))
        if "boxes" not in batch:        # a place without a point comes last
            at = jnp.pad(at, ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=-0.5)
            labels = jnp.pad(labels, ((0, 0), (0, 0), (0, 1)), constant_values=-1)
        label = labels[..., None]
        x = jnp.where(label == -1, w["not_a_point"], _places(waves, (at + 0.5) / size))
        x = jnp.where(label == -10, 0, x)
        found.append(x + sum(jnp.where(label == i, w[POINTS[i]], 0) for i in (0, 1)))
    if "boxes" in batch:
        at = batch["boxes"].astype(jnp.float32)
        at = at.reshape(*at.shape[:2], 2, 2)
        found.append(_places(waves, (at + 0.5) / size) + jnp.stack([w["begin"], w["end"]]))
    return found


def _rough(w, batch, c):
    """Return what to add to the image's vectors: vectors [B, S, D] of the masks [B, 4 h, 4 w], or
    the one that means no mask."""
    if "masks" not in batch:
        return w["no_mask"]
    side, p = c.side, prompt_config(c)
    x = batch["masks"].reshape(-1, side, 2, 2, side, 2, 2).transpose(0, 1, 4, 2, 5, 3, 6)
    x = x.reshape(len(x), side**2, 2, 2, 2, 2).astype(w["mask1"].dtype)   # [B, S, k, z, k, z]
    for name, sides in (("mask1", 2), ("mask2", 3)):
        x = matmul(x, w[name], sides) + w[f"{name}_bias"]
        x = activate(p, norm(w, f"{name}_norm", x, p))
    return matmul(x, w["mask3"]) + w["mask3_bias"]


# -------------------------------------------------------------------------------------------
# The decoder

def _attend(w, name, q, k, v):
    """Attend from q [B, T, D] to k and v [B, S, D], which cover all tokens: [B, T, D]."""
    q, k, v = (shard.columns(x, with_bias(w, f"{name}{part}"), gathered=True)[0]
               for x, part in ((q, "wq"), (k, "wk"), (v, "wv")))
    out = shard.attend(softmax_attention, q, k, v, lambda *_: jnp.ones((1, 1, 1, 1), bool),
                       jnp.zeros(q.shape[:2]), {})
    return shard.row((out, w[f"{name}wo"])) + w[f"{name}wo_bias"]


def _see_image(w, x, y, places, grid, c, eps=0.0):
    """Let the tokens attend to the image. Return them, and the image's vectors on all devices."""
    x_all, y_all = shard.time_of_block(x), shard.time_of_block(y)
    x = x + _attend(w, "cross_", x_all + places, y_all + grid, y_all)
    return norm(w, "cross_norm", x, c, eps=eps), y_all


def _layer(w, streams, i, places, grid, c):
    """Run layer i on the tokens x [B, T, D] and the image y [B, S, D]. `places` are the tokens as
    they were, and `grid` the places of y. The first layer's attention to the tokens themselves
    has neither places nor a residual connection."""
    w, (x, y), later = low_rank.adapted(w), streams, jnp.asarray(i > 0, streams[0].dtype)
    x_all = shard.time_of_block(x)
    q = x_all + later * places
    x = norm(w, "attn_norm", later * x + _attend(w, "", q, q, x_all), c)
    x, y_all = _see_image(w, x, y, places, grid, c)
    x = norm(w, "mlp_norm", x + feed_forward(w, x, c)[0], c)
    x_all = shard.time_of_block(x)
    y = y + _attend(w, "back_", y_all + grid, x_all + places, x_all)
    return (x, norm(w, "back_norm", y, c)), None


def _decode(w, x, y, grid, c, specs=None):
    """Decode tokens x [B, T, D] and images y [B, S, D] into (masks [B, A, 4 h, 4 w], scores
    [B, A]) in float32."""
    d, places, side, A = decoder_config(c), x, c.side, len(w["mask_tokens"])
    streams = tuple(map(shard.residual_stream, (x, y)))
    layer = functools.partial(_layer, places=places, grid=grid, c=d)
    streams, _ = shard.layers(layer, w["layers"], streams, jnp.arange(d.layers),
                              specs and specs["layers"], c)

    def last(w, streams, _):
        x, y = streams
        return (_see_image(low_rank.adapted(w), x, y, places, grid, d, 1e-5)[0], y), None

    (x, y), _ = shard.layers(last, w["last"], streams, None, specs and specs["last"], c)
    x = shard.whole_time(x)

    def vector(w, _, x):
        for name in ("enter", "middle"):
            x = jax.nn.relu(matmul(x, w[name]) + w[f"{name}_bias"])
        return None, matmul(x, w["leave"]) + w["leave_bias"]

    _, vectors = shard.layers(vector, w["vectors"], None, x[:, 1:A + 1].swapaxes(0, 1),
                              specs and specs["vectors"], c)                    # [A, B, v]
    y = matmul(y, w["up1"]) + w["up1_bias"]                                     # [B, S, k, z, u]
    y = jax.nn.gelu(norm(w, "up_norm", y, d, eps=sam.EPS), approximate=False)
    y = jax.nn.gelu(matmul(y, w["up2"]) + w["up2_bias"], approximate=False)     # [.., k, z, v]
    masks = jnp.einsum("bskzlyv,abv->bskzlya", y, vectors, preferred_element_type=jnp.float32)
    masks = shard.whole_time(masks.reshape(*masks.shape[:2], -1))
    masks = masks.reshape(-1, side, side, 2, 2, 2, 2, A).transpose(0, 7, 1, 3, 5, 2, 4, 6)
    return masks.reshape(-1, A, 4 * side, 4 * side), _scores(w["scores"], x[:, 0], specs, c)


def _scores(w, x, specs, c):
    def middle(w, x, _):
        return jax.nn.relu(matmul(x, w["middle"]) + w["middle_bias"]), None

    x = jax.nn.relu(matmul(x, w["enter"]) + w["enter_bias"])
    if "layers" in w:
        x, _ = shard.layers(middle, w["layers"], x, None, specs and specs["scores"]["layers"], c)
    return (matmul(x, w["leave"], 1, jnp.float32) + w["leave_bias"]).astype(jnp.float32)


# -------------------------------------------------------------------------------------------
# The network

def segment(params: Params, batch: Batch, config: Any, specs: Any = None) -> tuple[Array, Array]:
    """Return (masks [B, P, A, 4 h, 4 w], scores [B, P, A]) in float32 for images, `source`, and
    any of these: `points` [B, P, N, 2] (column, row) in pixels with `labels` [B, P, N], `boxes`
    [B, P, 4] and rough `masks` [B, 4 h, 4 w]. A pixel is in a mask where its number is above 0."""
    check_prompts(batch, config)
    waves = lax.stop_gradient(params["prompt"]["waves"].astype(jnp.float32))
    w = cast(only(params, "prompt", "decoder"), config.dtype)
    y = sam.forward(params["vision"], batch["source"], vision_config(config),
                    specs and specs["vision"])
    B, D = y.shape[:2]
    y = y.reshape(B, D, -1).swapaxes(1, 2) + _rough(w["prompt"], batch, config)
    x = _prompts(w["prompt"], waves, batch, config)
    P = x[0].shape[1] if x else 1
    own = jnp.concatenate([w["decoder"]["score_token"][None], w["decoder"]["mask_tokens"]])
    x = jnp.concatenate([jnp.broadcast_to(own, (B, P, *own.shape)).astype(y.dtype),
                         *[a.astype(y.dtype) for a in x]], 2)
    x = vary_like(x, batch["source"])       # in training, the weights vary over the same axes
    y = jnp.broadcast_to(y[:, None], (B, P, *y.shape[1:]))
    center = (np.arange(config.side, dtype=np.float32) + 0.5) / config.side
    grid = _places(waves, np.stack(np.meshgrid(center, center), -1).reshape(-1, 2))
    x, y = (a.reshape(B * P, *a.shape[2:]) for a in (x, y))
    masks, scores = _decode(w["decoder"], x, y, grid.astype(y.dtype), config,
                            specs and specs["decoder"])
    return masks.reshape(B, P, *masks.shape[1:]), scores.reshape(B, P, -1)


_compiled = jax.jit(segment, static_argnames="config")


def predict(params: Params, picture: Array, config: Any, points: Any = None, labels: Any = None,
            boxes: Any = None, mask: Any = None, several: bool = True) -> tuple[Array, Array]:
    """Return (masks [P, A, 4 h, 4 w], scores [P, A]) for an image [C, height, width], scaled as the
    model expects, and P prompts: points [P, N, 2] and labels [P, N], boxes [P, 4], or both.
    Points are (column, row) in pixels; a label is 1 inside, 0 outside, -10 for no point. A box is
    its first and last corner. A rough mask [4 h, 4 w] is, for example, an earlier result. A pixel
    is in a mask where its number is above 0, and the score guesses how well the mask fits.
    several=False returns only the mask for a clear prompt."""
    given = dict(source=picture, points=points, labels=labels, boxes=boxes, masks=mask)
    batch = {name: jnp.asarray(a)[None] for name, a in given.items() if a is not None}
    if not np.isin(batch.get("labels", 1), (1, 0, -1, -10)).all():
        raise ConfigError("labels: expected 1 (inside), 0 (outside) or -10 (no point)")
    masks, scores = (a[0] for a in _compiled(params, batch, config))
    chosen = slice(1, None) if several else slice(1)
    return masks[:, chosen], scores[:, chosen]


def forward(params: Params, pictures: Array, config: Any, **prompts: Array) -> Array:
    """Return the masks of `segment` for images [B, C, height, width] and these prompts."""
    return segment(params, {"source": pictures, **prompts}, config)[0]


def loss(params: Params, batch: Batch, config: Any, specs: Any = None) -> tuple[Array, Array]:
    """Return (sum, count), where count is the number of prompts. A mask's loss is the mean
    cross-entropy of its pixels plus its dice loss. A prompt's loss is that of mask 0, plus that
    of the best of the others, as in SAM's training, plus the squared errors of the scores: a score
    guesses the mask's intersection over union."""
    sam.check(config, jax.sharding.get_abstract_mesh())     # train.fit doesn't check
    masks, scores = segment(params, batch, config, specs)
    targets = batch["targets"].astype(jnp.float32)[:, :, None]                  # [B, P, 1, y, x]

    def over_pixels(x):
        return jnp.sum(x, (-2, -1))

    inside = jax.nn.sigmoid(masks)
    cross_entropy = over_pixels(jax.nn.softplus(masks) - masks * targets) / targets[0, 0, 0].size
    dice = 1 - (2 * over_pixels(inside * targets) + 1) / (over_pixels(inside + targets) + 1)
    drawn, there = masks > 0, targets > 0.5
    overlap = over_pixels(drawn & there) / jnp.maximum(over_pixels(drawn | there), 1)
    each = cross_entropy + dice                                                 # [B, P, A]
    total = each[..., 0] + each[..., 1:].min(-1) + jnp.sum((scores - overlap)**2, -1)
    return jnp.sum(total), jnp.float32(total.size)


# -------------------------------------------------------------------------------------------
# Functions of the Network (zigzag/parallel/network.py)

def batch_shapes(config: Any, rows: int) -> Shapes:
    """Return {name: shape} for a batch of `loss`. It may also have boxes, or rough masks."""
    P, N, side = config.prompts, config.points, 4 * config.side
    source = transformer.batch_shapes(config, rows)["source"]
    number = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = {"points": number((rows, P, N, 2)),
              "labels": jax.ShapeDtypeStruct((rows, P, N), jnp.int32)}
    return {"source": source, **(shapes if N else {"boxes": number((rows, P, 4))}),
            "targets": number((rows, P, side, side))}


NETWORK = Network("sam_masks", Config, table, loss, batch_shapes, forward, FAMILIES, sam.check,
                  gives=lambda c: "masks", source_shape=transformer.source_shape,
                  trained=("prompts", "points", "dropout"))
