"""CLIP: scores how well each text fits each image.

    image   [B, C, height, width] -> patches -> [ block ] x L -> first token  -> projection [B, I]
                                                                                     | cosines,
                                                                                     | scaled [B, B]
    text    [B, T] ----------------> embed ---> [ block ] x L -> its last token -> projection [B, I]

transformer.py computes both towers, and this file connects them. The loss compares each
image in a batch with all texts, and each text with all images.

The letters are transformer.py's, plus I, the width of the vectors that we compare.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import shard
from published import general, tables, transformer
from published.family import Family, attention, is_range, keys, mlp, under
from published.general import Batch, Config, Shapes
from published.llama import record_of
from published.record import an_id, classed, count, named, pictures
from zigzag.core.mesh import cast
from zigzag.core.options import only
from zigzag.parallel.network import Network, Params
from zigzag.parallel.products import matmul
from zigzag.parallel.table import Table

# -------------------------------------------------------------------------------------------
# Configs. The whole model uses the text tower's Config.

TEXT = dict(vocab_size=49408, hidden_size=512, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=8, max_position_embeddings=77, hidden_act="quick_gelu",
            layer_norm_eps=1e-5, eos_token_id=49407)
VISION = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_channels=3,
              num_attention_heads=12, image_size=224, patch_size=32, hidden_act="quick_gelu",
              layer_norm_eps=1e-5)
WHOLE = dict(projection_dim=512, logit_scale_init_value=2.6592, text_config=None,
             vision_config=None)


def _part(r, name, defaults):
    given = r.plain(name)
    own = r.plain(f"{name}_dict")
    if isinstance(own, dict):       # an entry in older files, which wins if they differ
        given = {**(given or {}), **defaults, **own}
    return r.part(name, defaults, given)


def _fields(r):
    classed(r, {"": {}, "CLIPModel": {}})
    text = _part(r, "text_config", TEXT)
    vision_config(None, r)
    count(r, "projection_dim")
    float(r["logit_scale_init_value"])      # fail here, not in the weight table, if it's no number
    an_id("text_config.eos_token_id", text["eos_token_id"])
    return {**general.tower_sizes(text), "positions": "learned", **named(
        text, vocab_size="vocab_size", seq_len="max_position_embeddings",
        position_rows="max_position_embeddings")}


def vision_config(c: Any, r: Any = None) -> Any:
    """Return the vision tower's Config for model c, or from the config.json `r` alone."""
    r = _part(r or record_of(c), "vision_config", VISION)
    return general.tower(c, "vision_config", {**general.tower_sizes(r), **pictures(r),
                                              "positions": "learned", "embed_norm": True})


# -------------------------------------------------------------------------------------------
# Weights, and the arrays of published models

def table(c: Any) -> Params:
    r, v = record_of(c), vision_config(c)
    make = Table(D=c.d_model, d=v.d_model, I=r["projection_dim"])
    scale = make("", values=lambda: np.float32(r["logit_scale_init_value"]))
    return {"text": tables.table(c), "vision": tables.table(v), "logit_scale": scale,
            "text_projection": make("D/fsdp I", c.d_model**-0.5),
            "vision_projection": make("d/fsdp I", v.d_model**-0.5)}


LAYER = {**attention("self_attn.{}_proj", "q k v out"), **mlp("mlp.fc1", "mlp.fc2"),
         "layer_norm1": "attn_norm", "layer_norm2": "mlp_norm"}
ARRAYS = {"logit_scale": "-> logit_scale", "text_projection": "text_projection",
          "visual_projection": "vision_projection"} | under("text_model.", {
    "embeddings.token_embedding": "text.embed", "embeddings.position_embedding": "text.positions",
    "final_layer_norm": "text.norm"}, under("encoder.layers.{text.layers}.", LAYER)) | under(
    "vision_model.", {
        "embeddings.class_embedding": "-> vision.class_token",
        "embeddings.patch_embedding.weight": "D C y x -> vision.patch",
        "embeddings.position_embedding": "vision.positions",
        "pre_layrnorm": "vision.embed_norm", "post_layernorm": "vision.norm"},
    under("encoder.layers.{vision.layers}.", LAYER))


FAMILIES = {"clip": Family(_fields, ARRAYS, WHOLE,
                           ignored={r".*embeddings\.position_ids": is_range},
                           neutral=keys("text_config.projection_dim vision_config.projection_dim "
                                        "tie_word_embeddings"))}


# -------------------------------------------------------------------------------------------
# The network

def text_vectors(params: Params, batch: Batch, config: Any, specs: Any = None) -> Array:
    """Compute the texts' normalized vectors [B, I]. A batch has tokens [B, T] and maybe a mask."""
    # A text's vector comes from its end token: the one with the largest id, or the first eos.
    eos, tokens = _part(record_of(config), "text_config", TEXT)["eos_token_id"], batch["tokens"]
    end = jnp.argmax(tokens if eos == 2 else tokens == eos, 1)                  # [B]
    return _vectors(params, "text", config, batch, specs, lambda x: jnp.take_along_axis(
        shard.whole_time(x), end[:, None, None], 1)[:, 0])


def picture_vectors(params: Params, batch: Batch, config: Any, specs: Any = None
                    ) -> Array:
    """Compute normalized vectors [B, I] for the images in the source [B, C, height, width]."""
    return _vectors(params, "vision", vision_config(config), batch, specs,
                    lambda x: shard.whole_time(x, in_parts=True)[:, 0])


def _vectors(params, name, c, batch, specs, chosen):
    """Compute a tower's vectors from the token that `chosen` picks in each row."""
    c, w, known = transformer.prepare_batch(params[name], batch, c)
    x = chosen(transformer.trunk(w, c, known, specs=specs and specs[name]))
    x = matmul(transformer.norm(w, "norm", x, c), cast(params[f"{name}_projection"], c.dtype), 1,
               jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def forward(params: Params, tokens: Array, config: Any, source: Array, mask: Array | None = None
            ) -> Array:
    """Return logits [images, texts], which say how well each text fits each image."""
    batch = {"tokens": tokens} if mask is None else {"tokens": tokens, "mask": mask}
    pictures = picture_vectors(params, {"source": source}, config)
    return jnp.exp(params["logit_scale"]) * pictures @ text_vectors(params, batch, config).T


def loss(params: Params, batch: Batch, config: Any, specs: Any = None
         ) -> tuple[Array, Array]:
    """Return (sum, count), where count is the number of rows. A row's loss averages two
    cross-entropies: its text among all texts in the batch, given the image, and its image among
    all images, given the text. So a row's loss depends on the whole batch. On a mesh, each device
    computes its own rows' loss."""
    check(config, jax.sharding.get_abstract_mesh())     # train.fit doesn't check
    texts = text_vectors(params, only(batch, "tokens", "mask", "seeds"), config, specs)
    pictures = picture_vectors(params, only(batch, "source", "seeds"), config, specs)
    scale, B = jnp.exp(params["logit_scale"].astype(jnp.float32)), len(texts)
    every_text, first = shard.all_rows(texts, batch["tokens"])
    every_picture, _ = shard.all_rows(pictures, batch["tokens"])

    def cross_entropy(own, every):
        logits = jax.nn.log_softmax(scale * own @ every.T)                      # [B, all rows]
        return -jnp.sum(logits * jax.nn.one_hot(first + jnp.arange(B), len(every)))

    total = cross_entropy(pictures, every_text) + cross_entropy(texts, every_picture)
    return total / 2, jnp.float32(B)


# -------------------------------------------------------------------------------------------
# Functions of the Network (zigzag/parallel/network.py)

def batch_shapes(config: Any, rows: int) -> Shapes:
    """Return {name: shape} for a batch of `loss`."""
    texts = tables.batch_shapes(config, rows)
    return {"tokens": texts["tokens"], "mask": texts["weights"],
            **tables.batch_shapes(vision_config(config), rows)}


def check(c: Any, mesh: Any) -> None:
    general.check_axes(mesh, "CLIP has two towers with different layers")


NETWORK = Network("clip", Config, table, loss, batch_shapes, forward, FAMILIES, check,
                  gives=lambda c: "vectors", couples_rows=True,
                  source_shape=lambda c: transformer.source_shape(vision_config(c)))
