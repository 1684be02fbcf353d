"""SAM draws the masks that points, a box or a rough mask in an image mean.

    image [B, C, height, width] -> sam.py's encoder (+ rough mask) -> y [B, S, D]
    output tokens, then points and boxes -> x [B, T, D]
    [ x attends to itself -> x attends to y -> MLP on x -> y attends to x ] x L -> x attends to y
    x's first token -> MLP -> scores [B, A];  y -> 4 x 4 pixels per token
    x's next A tokens -> an MLP each -> products with the pixels -> masks [B, A, 4 h, 4 w]

Mask 0 answers a clear prompt; the others are several readings of a vague one. An image may have P
prompts, and each is a row of the decoder. A place becomes sines, with random frequencies that we
never train (`waves`). Attention adds places to queries and keys, but not to values.

The letters are transformer.py's, plus these: T tokens, S tokens of the image (h x w), A masks, P
prompts, N points, X column and row, W frequencies, u, v, e and c channels, k and z the sides of a
convolution, I width of the scores' MLP, d and i a second D and I.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import shard
from published import general, sam, transformer
from published.family import Family, attention, inside, mlp, under
from published.general import Batch, Shapes
from published.llama import fields_of, record_of
from published.record import Record, classed, count, pictures, refuse, tower, wrong
from published.tables import attention_weights, layer_weights, norms
from published.transformer import activate, feed_forward, norm, product, with_bias
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import cast, vary_like
from zigzag.core.options import flag, only, without
from zigzag.parallel import low_rank
from zigzag.parallel.attention import softmax_attention
from zigzag.parallel.network import Network, Params
from zigzag.parallel.table import Table

# -------------------------------------------------------------------------------------------
# Configs. The whole model uses the image encoder's options.

PROMPT = dict(hidden_size=256, image_size=1024, patch_size=16, mask_input_channels=16,
              num_point_embeddings=4, hidden_act="gelu", layer_norm_eps=1e-6)
DECODER = dict(hidden_size=256, hidden_act="relu", mlp_dim=2048, num_hidden_layers=2,
               num_attention_heads=8, attention_downsample_rate=2, num_multimask_outputs=3,
               iou_head_depth=3, iou_head_hidden_dim=256, layer_norm_eps=1e-6)
WHOLE = dict(vision_config=None, prompt_encoder_config=None, mask_decoder_config=None)
# Not in config.json: the last norm's epsilon, and how much narrower the other layers' attention is.
LAST_EPS, RATE, MOST_DEPTH = 1e-5, 2, 30        # the last: the deepest MLP of scores that we read


@dataclasses.dataclass(frozen=True)
class Config(general.Config):
    """The image encoder's options, and what a training example has. Each field is also a flag."""
    prompts: int = flag(1, least=1)     # prompts per image, each with a mask to learn
    points: int = flag(1, least=0)      # points per prompt; 0: a box instead


def configs(r: Any, c: Any = None) -> tuple:
    """Return the three Configs of model c, and config.json's parts of the last two."""
    prompt = r.part("prompt_encoder_config", PROMPT)
    decoder = r.part("mask_decoder_config", DECODER)
    vision = {**(r.plain("vision_config") or {}), "model_type": "sam_vision_model",
              "architectures": ["SamVisionModel"]}
    fields = (fields_of(vision, sam.FAMILIES, "vision_config."),
              {**tower(prompt, layers="", d_model="", heads=""), **pictures(prompt),
               "head": "none"},
              {**tower(decoder, d_ff="mlp_dim"), "biases": "qkv,out,mlp", "positions": "none"})
    return *(general.tower(c, name, own) for name, own in zip(WHOLE, fields)), prompt, decoder


def _fields(r):
    classed(r, {"": {}, "SamModel": {}})
    refuse(r, tie_word_embeddings=True)     # version 4 ignores it
    v, p, d, prompt, decoder = configs(r)
    if p.side != v.side:
        raise wrong("prompt_encoder_config.image_size", p.image_size,
                    f": {p.side} patches; expected {v.side}, as in vision_config")
    vision = Record(r.plain("vision_config") or {}, {**sam.DEFAULTS, "num_pos_feats": 128},
                    at="vision_config.", kind="sam")
    width, channels = 2 * count(vision, "num_pos_feats"), count(prompt, "mask_input_channels")
    refuse(vision, output_channels=width)
    refuse(prompt, hidden_size=width, image_embedding_size=v.side, num_point_embeddings=4,
           mask_input_channels=4 * max(channels // 4, 1))
    refuse(decoder, hidden_size=width)
    count({"hidden_size / 8": width // 8}, "hidden_size / 8")
    for name in ("num_multimask_outputs", "iou_head_hidden_dim"):
        count(decoder, name)
    count(decoder, "iou_head_depth", MOST_DEPTH)
    for rate in (RATE, count(decoder, "attention_downsample_rate")):
        general.tower(None, f"mask_decoder_config, attention_downsample_rate {rate}",
                      dict(d_model=width // rate, heads=d.heads, positions="none"))
    return without(vars(v), "published")


# -------------------------------------------------------------------------------------------
# Weights, and the arrays of published models

POINTS = ("outside", "inside", "begin", "end", "not_a_point", "no_mask")    # in order of labels


def table(c: Any) -> Params:
    v, _, d, prompt, decoder = configs(record_of(c), c)
    D, A, channels = d.d_model, decoder["num_multimask_outputs"] + 1, prompt["mask_input_channels"]
    width, depth = decoder["iou_head_hidden_dim"], max(decoder["iou_head_depth"], 2)
    make = Table(D=D, d=D, L=A, A=A, I=width, i=width, X=2, W=D // 2, k=2, z=2,
                 u=D // 4, v=D // 8, c=channels, e=channels // 4)
    cross, last = (layer_weights(change(d, head_dim=D // rate // d.heads), layers) for rate, layers
                   in ((RATE, d.layers), (decoder["attention_downsample_rate"], 1)))
    return {
        "vision": sam.table(v),
        "prompt": {"waves": make("X W", 1.0), **{name: make("D", 0.02) for name in POINTS},
                   **_products(make, mask0="k z e", mask1="k z e c", mask2="c D/fsdp"),
                   **norms(d, make, "e", ["mask0_norm"]), **norms(d, make, "c", ["mask1_norm"])},
        "decoder": {
            "score_token": make("D", 0.02), "mask_tokens": make("A D/fsdp", 0.02),
            "layers": {**layer_weights(d, d.layers), **attention_weights(cross, "cross_"),
                       **attention_weights(cross, "back_")},
            "last": attention_weights(last, "cross_"),
            **norms(d, make, "u", ["up_norm"]),
            **_products(make, up0="D/fsdp k z u", up1="u k z v"),
            "vectors": _products(make, "L/pipe ", w0="D/fsdp d", w1="D/fsdp d", out="D/fsdp v"),
            "scores": _products(make, w0="D/fsdp I", out="I/fsdp A",
                                **{f"w{n}": "I/fsdp i" for n in range(1, depth - 1)})}}


def _products(make, stack="", **axes):
    """Return these weights, each with a bias."""
    return {name: make(stack + row, 0.02) for name, row in axes.items()} | {
        f"{name}_bias": make(stack + row.split()[-1][0], 0.0) for name, row in axes.items()}


MLP = {"proj_in": "w0", "proj_out": "out",
       **{f"layers.{n}": f"w{n + 1}" for n in range(MOST_DEPTH - 2)}}
PROMPTS = {
    "shared_embedding.positional_embedding": "X W == waves",
    "not_a_point_embed.weight": "1 D -> not_a_point", "no_mask_embed.weight": "1 D -> no_mask",
    **{f"point_embed.{n}.weight": f"1 D -> {POINTS[n]}" for n in range(4)},
    "mask_embed.conv1": "mask0", "mask_embed.conv1.weight": "e 1 k z -> mask0",
    "mask_embed.conv2": "mask1", "mask_embed.conv2.weight": "c e k z -> mask1",
    "mask_embed.conv3": "mask2", "mask_embed.conv3.weight": "D c 1 1 -> mask2",
    "mask_embed.layer_norm1": "mask0_norm", "mask_embed.layer_norm2": "mask1_norm"}
MASKS = {
    "iou_token.weight": "1 D -> score_token", "mask_tokens.weight": "A D -> mask_tokens",
    "upscale_conv1": "up0", "upscale_conv1.weight": "D u k z -> up0",
    "upscale_conv2": "up1", "upscale_conv2.weight": "u v k z -> up1",
    "upscale_layer_norm": "up_norm", "transformer.layer_norm_final_attn": "last.cross_norm",
    **attention("transformer.final_attn_token_to_image.{}_proj", "q k v out", "last.cross_"),
    **under("output_hypernetworks_mlps.{decoder.vectors}.", MLP),
    **under("iou_prediction_head.", inside("scores", MLP)),
    **under("transformer.layers.{decoder.layers}.", attention("self_attn.{}_proj", "q k v out"),
            attention("cross_attn_token_to_image.{}_proj", "q k v out", "cross_"),
            attention("cross_attn_image_to_token.{}_proj", "q k v out", "back_"),
            mlp("mlp.lin1", "mlp.lin2"), {"layer_norm1": "attn_norm", "layer_norm2": "cross_norm",
                                          "layer_norm3": "mlp_norm", "layer_norm4": "back_norm"})}
ARRAYS = {"shared_image_embedding.positional_embedding": "X W -> prompt.waves",
          **inside("vision", sam.ARRAYS), **under("prompt_encoder.", inside("prompt", PROMPTS)),
          **under("mask_decoder.", inside("decoder", MASKS))}
FAMILIES = {"sam": Family(_fields, ARRAYS, WHOLE, neutral=("tie_word_embeddings",), stacks=lambda c:
                          sam.stacks(configs(record_of(c), c)[0], "vision."))}


# -------------------------------------------------------------------------------------------
# Prompts and the decoder

def _places(waves, at):
    """Return vectors [..., D] of places [..., X], which are from 0 to 1, in float32."""
    at = 2 * at - 1
    angle = 2 * np.pi * (at[..., :1] * waves[0] + at[..., 1:] * waves[1])
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


def _prompts(w, waves, batch, p):
    """Return the prompts' vectors [B, P, n, D]. A box is two points, and points without a box end
    with a place without a point. Reject shapes that fit neither each other nor the model."""
    first, is_box = batch.get("points", batch.get("boxes", np.zeros((0, 1)))), "boxes" in batch
    B, side, (P, N) = len(batch["source"]), 4 * p.side, (*first.shape[1:], 0)[:2]
    for name, shape in {"points": (B, P, N, 2), "labels": (B, P, N), "boxes": (B, P, 4),
                        "masks": (B, side, side), "targets": (B, P, side, side)}.items():
        if name in batch and batch[name].shape != shape:
            raise ConfigError(f"{name} of the shape {list(batch[name].shape)}; expected "
                              f"{list(shape)}, for {B} images with {P} prompts each")
    if not len(first):
        return jnp.zeros((B, P, 0, len(w["no_mask"])))
    shape = (B, P, 1 + is_box)
    at = [batch["boxes"].reshape(*shape, 2) if is_box else jnp.zeros((*shape, 2))]
    label = [jnp.broadcast_to(jnp.array([2, 3] if is_box else [-1]), shape)]
    if "points" in batch:
        at = [first, *at]
        label = [batch.get("labels", jnp.ones(first.shape[:3])), *label]
    at, label = jnp.concatenate(at, 2), jnp.concatenate(label, 2)[..., None]
    x = jnp.where(label == -1, w["not_a_point"], _places(waves, (at + 0.5) / p.image_size))
    x = jnp.where(label == -10, 0, x)
    return x + sum(jnp.where(label == n, w[POINTS[n]], 0) for n in range(4))


def _rough(w, batch, p):
    """Return what to add to y: rough masks as vectors [B, S, D], or a vector [D] for none."""
    if "masks" not in batch:
        return w["no_mask"]
    x = batch["masks"].reshape(-1, p.side, 2, 2, p.side, 2, 2).transpose(0, 1, 4, 2, 5, 3, 6)
    x = x.reshape(len(x), p.side**2, 2, 2, 2, 2).astype(w["mask0"].dtype)   # [B, S, k, z, k, z]
    for name, sides in (("mask0", 2), ("mask1", 3)):
        x = activate(p, norm(w, f"{name}_norm", product(w, name, x, sides), p))
    return product(w, "mask2", x)


def _attend(w, name, q, k, v):
    """Attend from q [B, T, D] to k and v [B, S, D], all of them whole."""
    q, k, v = (shard.columns(x, with_bias(w, f"{name}{part}"), gathered=True)[0]
               for x, part in ((q, "wq"), (k, "wk"), (v, "wv")))
    out = shard.attend(softmax_attention, q, k, v, lambda *_: jnp.ones((1, 1, 1, 1), bool),
                       jnp.zeros(q.shape[:2]), {})
    return shard.row((out, w[f"{name}wo"])) + w[f"{name}wo_bias"]


def _layer(w, streams, i, places, grid, c):
    """Run layer i on tokens x [B, T, D], which were `places` at first, and on the image y
    [B, S, D], whose places are `grid`. The last layer has only attention to y."""
    w, (x, y), x_all = low_rank.adapted(w), streams, shard.time_of_block(streams[0])
    if "wq" in w:       # in the first layer, without places and without a residual connection
        later = jnp.asarray(i > 0, x.dtype)
        q = x_all + later * places
        x = norm(w, "attn_norm", later * x + _attend(w, "", q, q, x_all), c)
        x_all = shard.time_of_block(x)
    y_all = shard.time_of_block(y)
    x = norm(w, "cross_norm", x + _attend(w, "cross_", x_all + places, y_all + grid, y_all), c)
    if "wq" in w:
        x = norm(w, "mlp_norm", x + feed_forward(w, x, c)[0], c)
        x_all = shard.time_of_block(x)
        y = y + _attend(w, "back_", y_all + grid, x_all + places, x_all)
        y = norm(w, "back_norm", y, c)
    return (x, y), None


def _mlp(w, x):
    for n in range(len(w) // 2 - 1):
        x = jax.nn.relu(product(w, f"w{n}", x))
    return product(w, "out", x)


def _decode(w, x, y, grid, d, c, specs):
    """Decode x [B, T, D] and y [B, S, D] into (masks [B, A, 4 h, 4 w], scores [B, A])."""
    places, streams = x, (shard.residual_stream(x), shard.residual_stream(y))
    for name, own in (("layers", d), ("last", change(d, layers=1, norm_eps=LAST_EPS))):
        layer = functools.partial(_layer, places=places, grid=grid, c=own)
        streams, _ = shard.layers(layer, w[name], streams, jnp.arange(own.layers),
                                  specs and specs[name], c)
    x, y, side, A = shard.whole_time(streams[0]), streams[1], c.side, len(w["mask_tokens"])
    _, vectors = shard.layers(lambda w, _, x: (None, _mlp(w, x)), w["vectors"], None,
                              x[:, 1:A + 1].swapaxes(0, 1), specs and specs["vectors"], c)
    y = norm(w, "up_norm", product(w, "up0", y), d, eps=sam.EPS)
    y = jax.nn.gelu(y, approximate=False)                               # [B, S, k, z, u]
    y = jax.nn.gelu(product(w, "up1", y), approximate=False)            # [.., k, z, v]
    masks = jnp.einsum("bskzlyv,abv->bskzlya", y, vectors, preferred_element_type=jnp.float32)
    masks = shard.whole_time(masks.reshape(*masks.shape[:2], -1))
    masks = masks.reshape(-1, side, side, 2, 2, 2, 2, A).transpose(0, 7, 1, 3, 5, 2, 4, 6)
    return masks.reshape(-1, A, 4 * side, 4 * side), _mlp(w["scores"], x[:, 0]).astype(jnp.float32)


# -------------------------------------------------------------------------------------------
# The network

def segment(params: Params, batch: Batch, config: Any, specs: Any = None) -> tuple[Array, Array]:
    """Return (masks [B, P, A, 4 h, 4 w], scores [B, P, A]) in float32 for a batch's `source` and
    the prompts in it: `points`, `labels`, `boxes` and rough `masks` [B, 4 h, 4 w]."""
    v, p, d, *_ = configs(record_of(config), config)
    w, waves = cast(only(params, "prompt", "decoder"), config.dtype), params["prompt"]["waves"]
    waves = lax.stop_gradient(waves.astype(jnp.float32))
    y = sam.forward(params["vision"], batch["source"], v, specs and specs["vision"])
    x = _prompts(w["prompt"], waves, batch, p).astype(y.dtype)
    y = y.reshape(*y.shape[:2], -1).swapaxes(1, 2) + _rough(w["prompt"], batch, p)
    own = jnp.concatenate([w["decoder"]["score_token"][None], w["decoder"]["mask_tokens"]])
    x = jnp.concatenate([jnp.broadcast_to(own, (*x.shape[:2], *own.shape)), x], 2)
    y = jnp.broadcast_to(y[:, None], (*x.shape[:2], *y.shape[1:]))
    (B, P), (x, y) = x.shape[:2], (a.reshape(-1, *a.shape[2:]) for a in (x, y))
    center = (np.arange(config.side, dtype=np.float32) + 0.5) / config.side
    grid = _places(waves, np.stack(np.meshgrid(center, center), -1).reshape(-1, 2))
    x = vary_like(x, y)     # in training, the weights vary over the same axes as the images
    masks, scores = _decode(w["decoder"], x, y, grid.astype(y.dtype), d, config,
                            specs and specs["decoder"])
    return masks.reshape(B, P, *masks.shape[1:]), scores.reshape(B, P, -1)


def predict(params: Params, picture: Array, config: Any, points: Any = None, labels: Any = None,
            boxes: Any = None, mask: Any = None, several: bool = True) -> tuple[Array, Array]:
    """Return (masks [P, A, 4 h, 4 w], scores [P, A]) for an image [C, height, width] and P prompts:
    points [P, N, X] with labels [P, N] (1 inside, the default; 0 outside; -10 no point), boxes
    [P, 4] of two corners, or both. Points are (column, row) in pixels, `mask` [4 h, 4 w] is a rough
    mask, and numbers above 0 are in a mask. With several=False, return only mask 0."""
    given = dict(source=picture, points=points, labels=labels, boxes=boxes, masks=mask)
    batch = {name: jnp.asarray(a)[None] for name, a in given.items() if a is not None}
    if not np.isin(batch.get("labels", 1), (1, 0, -1, -10)).all():
        raise ConfigError("labels: expected 1 (inside), 0 (outside) or -10 (no point)")
    found = jax.jit(segment, static_argnames="config")(params, batch, config)
    return tuple(a[0, :, 1:] if several else a[0, :, :1] for a in found)


def forward(params: Params, pictures: Array, config: Any, **prompts: Array) -> Array:
    return segment(params, {"source": pictures, **prompts}, config)[0]


def loss(params: Params, batch: Batch, config: Any, specs: Any = None) -> tuple[Array, Array]:
    """Return (sum, count of prompts). A prompt's loss is that of mask 0, that of the best other
    mask (each is a mean cross-entropy of pixels, plus dice), and the scores' squared errors. A
    score should be the mask's overlap with the target: intersection over union."""
    sam.check(config, jax.sharding.get_abstract_mesh())     # train.fit doesn't check
    masks, scores = segment(params, batch, config, specs)
    targets = batch["targets"].astype(jnp.float32)[:, :, None]                  # [B, P, 1, y, x]
    total = functools.partial(jnp.sum, axis=(-2, -1))
    inside, is_inside, is_target = jax.nn.sigmoid(masks), masks > 0, targets > 0.5
    each = jnp.mean(jax.nn.softplus(masks) - masks * targets, (-2, -1))         # [B, P, A]
    each += 1 - (2 * total(inside * targets) + 1) / (total(inside + targets) + 1)
    overlap = total(is_inside & is_target) / jnp.maximum(total(is_inside | is_target), 1)
    best = jax.nn.one_hot(jnp.argmin(each[..., 1:], -1) + 1, each.shape[-1])
    losses = each[..., 0] + jnp.sum(best * each + (scores - overlap)**2, -1)
    return jnp.sum(losses), jnp.float32(losses.size)


def batch_shapes(config: Any, rows: int) -> Shapes:
    """Return {name: shape} for a batch of `loss`. It may have boxes and rough masks, too."""
    source, P, N = transformer.batch_shapes(config, rows)["source"], config.prompts, config.points
    prompts = {"points": source.update(shape=(rows, P, N, 2)),
               "labels": source.update(shape=(rows, P, N), dtype=jnp.int32)} if N else {
                   "boxes": source.update(shape=(rows, P, 4))}
    targets = source.update(shape=(rows, P, 4 * config.side, 4 * config.side))
    return {"source": source, **prompts, "targets": targets}


NETWORK = Network("sam_masks", Config, table, loss, batch_shapes, forward, FAMILIES, sam.check,
                  gives=lambda c: "masks", source_shape=transformer.source_shape,
                  trained=("prompts", "points", "dropout"))
