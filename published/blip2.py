"""BLIP-2: a language model that reads an image.

    image   [B, C, height, width] -> patches -> [ block ] x L -> norm -> encoded [B, S, X]
                                                                            |
    queries [Q, D] -> norm -> [ attention -> attention to encoded -> MLP, attention -> MLP ] x L/2
                                                                            |
                                                                        projection [B, Q, D]
                                                                            |  in place of Q tokens
    tokens [B, T] -> embed -------------------------------------------------+-> [ block ] x L
                                                                                    -> logits

transformer.py computes both the vision tower and the language model (OPT or T5). The Q-Former
between them uses transformer.py's blocks, and every other layer also attends to the image. A text
contains Q tokens with the id image_token_index, and the Q-Former's vectors replace their
embeddings. With T5 this text is the encoder's (`source_tokens`), and the decoder writes another.

The letters are transformer.py's, plus these: Q queries, X width of the vision tower.
"""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import shard
from published import general, llama, tables, transformer
from published.family import Family, attention_and_norm, inside, is_range, keys, mlp, under
from published.general import Batch, Config, Shapes
from published.llama import record_of
from published.record import an_id, classed, count, pictures, refuse, with_usual_names, wrong
from zigzag.core.mesh import cast, vary_like
from zigzag.core.options import only, without
from zigzag.parallel.network import CacheLayer, Network, Params
from zigzag.parallel.products import lookup
from zigzag.parallel.table import Table

# -------------------------------------------------------------------------------------------
# Configs. The whole model uses the language model's Config.

VISION = dict(hidden_size=1408, intermediate_size=6144, num_hidden_layers=39,
              num_attention_heads=16, image_size=224, patch_size=14, hidden_act="gelu",
              layer_norm_eps=1e-6, qkv_bias=True)
QFORMER = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
               intermediate_size=3072, hidden_act="gelu", layer_norm_eps=1e-12,
               cross_attention_frequency=2, use_qformer_text_input=False,
               position_embedding_type="absolute")
OPT = dict(vocab_size=50272, hidden_size=768, num_hidden_layers=12, ffn_dim=3072,
           num_attention_heads=12, bos_token_id=2, eos_token_id=2, pad_token_id=1,
           **llama.FAMILIES["opt"].defaults)
T5 = dict(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8,
          **llama.FAMILIES["t5"].defaults)
TEXTS = {"opt": OPT, "t5": T5}
WHOLE = dict(num_query_tokens=32, image_token_index=None, vision_config=None, qformer_config=None,
             text_config=None)


def _fields(r):
    classed(r, {"": {}, "Blip2ForConditionalGeneration": {}, "Blip2Model": {}})
    text = {"model_type": "opt", **(r.plain("text_config") or {})}
    if (kind := text["model_type"]) not in ("opt", "t5"):
        raise wrong("text_config.model_type", kind, " is not supported, only 'opt' and 't5'")
    refuse(r, use_decoder_only_language_model=kind == "opt", is_encoder_decoder=kind == "t5")
    text = with_usual_names(text, llama.FAMILIES[kind].aliases)
    text = llama.fields_of({**TEXTS[kind], **text}, at="text_config.")
    if text.get("embed_dim", text["d_model"]) != text["d_model"]:
        raise wrong("text_config.word_embed_proj_dim", text["embed_dim"],
                    f" is not supported, only hidden_size {text['d_model']}")
    count(r, "num_query_tokens")    # a text with an image has this many image tokens
    an_id("image_token_index", r["image_token_index"], text["vocab_size"])
    vision_config(None, r)
    qformer_config(None, r)
    text.pop("published")
    return text


def vision_config(c: Any, r: Any = None) -> Any:
    """Return the vision tower's Config for model c, or from the config.json `r` alone."""
    r = (r or record_of(c)).part("vision_config", VISION)
    refuse(r, num_channels=3)       # the class in transformers ignores this key
    biases = "embed,qkv,out,mlp" if r["qkv_bias"] else "embed,out,mlp"
    return general.tower(c, "vision_config", {**general.tower_sizes(r), **pictures(r),
                                              "positions": "learned", "biases": biases})


def qformer_config(c: Any, r: Any = None) -> Any:
    """Return the Q-Former's Config for model c, or from the config.json `r` alone."""
    r = (r or record_of(c)).part("qformer_config", QFORMER)
    refuse(r, cross_attention_frequency=2, use_qformer_text_input=False,
           position_embedding_type="absolute")
    if r["num_hidden_layers"] % 2:
        raise wrong("qformer_config.num_hidden_layers", r["num_hidden_layers"], ": expected an "
                    "even number, as every other layer attends to the picture")
    return general.tower(c, "qformer_config", {
        **general.tower_sizes(r), "norm_place": "post", "causal": False, "positions": "none"})


# -------------------------------------------------------------------------------------------
# Weights, and the arrays of published models

def table(c: Any) -> Params:
    v, q = vision_config(c), qformer_config(c)
    make = Table(L=q.layers // 2, Q=record_of(c)["num_query_tokens"], d=q.d_model, D=c.d_model,
                 X=v.d_model, K=q.kv_heads, N=q.head_dim, M=q.head_dim)
    own = tables.layer_weights(dataclasses.replace(q, layers=q.layers // 2), q.layers // 2)
    cross = tables.attention_weights(own, "cross_")
    cross |= {"cross_wk": make("L/pipe X/fsdp K/tensor N", v.d_model**-0.5),
              "cross_wv": make("L/pipe X/fsdp K/tensor M", v.d_model**-0.5)}
    return {"vision": tables.table(v), "text": tables.table(c),
            "qformer": {"query": make("Q d/fsdp", 0.02), "norm": make("d"),
                        "norm_bias": make("d", 0.0), "cross_layers": own | cross,
                        "layers": own},
            "projection": make("d D/fsdp", q.d_model**-0.5), "projection_bias": make("D", 0.0)}


VISION_ARRAYS = {
    "embeddings.class_embedding": "1 1 D -> vision.class_token",
    "embeddings.patch_embedding": "vision.patch",
    "embeddings.patch_embedding.weight": "D C y x -> vision.patch",
    "embeddings.position_embedding": "1 P D -> vision.positions", "post_layernorm": "vision.norm",
    **under("encoder.layers.{vision.layers}.", mlp("mlp.fc1", "mlp.fc2"), {
        "layer_norm1": "attn_norm", "layer_norm2": "mlp_norm", "self_attn.qkv": "wq wk wv",
        "self_attn.projection": "wo"})}
QFORMER_PARTS = "attention.query attention.key attention.value output.dense"
OTHERS = under("vision_model.", VISION_ARRAYS) | {
    "query_tokens": "1 Q d -> qformer.query", "qformer.layernorm": "qformer.norm",
    "language_projection": "projection"} | under(
    "qformer.encoder.layer.{q}.",
    attention_and_norm("attention.{}", "attention.output.LayerNorm", QFORMER_PARTS),
    mlp("intermediate_query.dense", "output_query.dense"),
    {"output_query.LayerNorm": "mlp_norm"}) | under(
    "qformer.encoder.layer.{x}.",
    attention_and_norm("crossattention.{}", "crossattention.output.LayerNorm", QFORMER_PARTS,
                       "cross_"))


def _arrays(c):
    """Return the names of all arrays: the language model's own names follow language_model."""
    arrays = llama.FAMILIES["t5" if c.encoder_layers else "opt"].arrays
    found = {}
    for name, ours in inside("text", arrays(c) if callable(arrays) else arrays).items():
        if stack := re.search("{(.*)}", name):      # {l} is any of the layers
            there = "layers" if stack[1] == "l" else stack[1]
            name = name.replace(stack[0], f"{{text.{there}}}")
        found[name] = ours
    return OTHERS | under("language_model.", found)


def _tied(record, fields, arrays):
    """Return the field `tied` of a T5, which may depend on its arrays."""
    if not fields.get("encoder_layers"):
        return {}
    found = llama.FAMILIES["t5"].seen(record["text_config"], fields, lambda: {
        name.removeprefix("language_model."): a for name, a in arrays().items()})
    if text := found.get("published"):
        found["published"] = json.dumps({**record, "text_config": json.loads(text)},
                                        sort_keys=True)
    return found


def _stacks(c):
    q = qformer_config(c).layers
    crossed = ("qformer.cross_layers", range(0, q, 2))
    return {"q": [crossed, ("qformer.layers", range(1, q, 2))], "x": [crossed]}


FAMILIES = {"blip-2": Family(_fields, _arrays, WHOLE, stacks=_stacks, seen=_tied,
                             ignored={r".*\.position_ids": is_range},
                             neutral=keys("vision_config.projection_dim "
                                          "image_text_hidden_size tie_word_embeddings "
                                          "qformer_config.encoder_hidden_size "
                                          "qformer_config.max_position_embeddings "
                                          "qformer_config.vocab_size"))}


# -------------------------------------------------------------------------------------------
# The network

def image_vectors(params: Params, batch: Batch, config: Any, specs: Any = None
                  ) -> Array:
    """Compute the Q-Former's vectors [B, Q, D] for the images in the batch's source [B, C,
    height, width]. Devices with the same rows get the same vectors."""
    v, w, known = transformer.prepare_batch(
        params["vision"], only(batch, "source", "seeds"), vision_config(config))
    x = transformer.trunk(w, v, known, specs=specs and specs["vision"])
    seen = {"encoded": shard.time_of_block(transformer.norm(w, "norm", x, v)),        # [B, S, X]
            "source_document": known["document"]}

    c, w = qformer_config(config), cast(params["qformer"], config.dtype)
    B, Q = len(batch["source"]), len(w["query"])
    slots = jnp.broadcast_to(jnp.arange(Q), (B, Q))
    known = {**seen, "slots": slots, "positions": slots}
    if "seeds" in batch:        # so that dropout differs from the other towers'
        known["seeds"] = batch["seeds"] + np.uint32(0x85EBCA6B)
    x = jnp.broadcast_to(w["query"], (B, *w["query"].shape))                    # [B, Q, D]
    x = shard.residual_stream(transformer.norm(w, "norm", x, c))
    x = vary_like(x, batch["source"])       # in training, the weights vary over the same axes

    def pair(w, x, i):
        x = transformer.block(w["cross_layers"], x, 2 * i, c, known)[0]
        return transformer.block(w["layers"], x, 2 * i + 1, c, known)[0], None

    both = ("cross_layers", "layers")
    x, _ = shard.layers(pair, only(w, *both), x, jnp.arange(c.layers // 2),
                        specs and only(specs["qformer"], *both), c)
    w = cast(only(params, "projection", "projection_bias"), c.dtype)
    return transformer.product(w, "projection", shard.whole_time(x))


def _embed_with(vectors, begins=False):
    """Return a replacement for transformer.embedding that puts these vectors [B, Q, D] into texts.
    The n-th vector replaces the embedding of a row's n-th image token. With `begins`, every row
    begins with the image tokens, and a batch may hold later parts of the rows."""
    def embed(w, batch, c):
        r, x = record_of(c), transformer.embedding(w, batch, c)
        is_image = batch["tokens"] == r["image_token_index"]
        number = batch["positions"] if begins else jnp.cumsum(is_image, 1) - 1
        is_image = is_image & (number < r["num_query_tokens"])
        number = jnp.clip(number, 0, vectors.shape[1] - 1)
        own = jnp.take_along_axis(vectors, number[..., None], 1)                # [B, T, D]
        is_image, places = shard.my_time_slice((is_image, batch["positions"]), x)
        own = shard.residual_stream(own)
        if "positions" in w:
            own = own + lookup(w["positions"], places + c.position_offset)
        return jnp.where(is_image[..., None], own, x)

    return embed


def forward(params: Params, tokens: Array, config: Any, source: Array, mask: Array | None = None,
            source_tokens: Array | None = None, source_mask: Array | None = None) -> Array:
    """Return logits [B, T, vocab_size] for the token after each of `tokens` [B, T]. A mask decides
    which positions count. T5's encoder reads source_tokens [B, S]; _with_text has their default."""
    vectors = image_vectors(params, {"source": source}, config)
    if not config.encoder_layers:
        return transformer.forward(params["text"], tokens, config, mask=mask,
                                   embed=_embed_with(vectors))
    given = dict(source=source, source_tokens=source_tokens, source_mask=source_mask, mask=mask)
    text = _with_text({name: a for name, a in given.items() if a is not None}, config)
    return transformer.forward(params["text"], tokens, config, **text,
                               embed_source=_embed_with(vectors))


def loss(params: Params, batch: Batch, config: Any, specs: Any = None) -> tuple:
    """Return (sum, count): the weighted cross-entropy of the batch's targets, and their weight."""
    check(config, jax.sharding.get_abstract_mesh())     # train.fit doesn't check
    vectors = image_vectors(params, batch, config, specs)
    if not config.encoder_layers:
        return transformer.loss(params["text"], batch, config, specs and specs["text"],
                                _embed_with(vectors))
    return transformer.loss(params["text"], _with_text(batch, config), config,
                            specs and specs["text"], embed_source=_embed_with(vectors))


def _with_text(batch, c):
    """Return a batch for T5, whose source is the text that its encoder reads: source_tokens or, as
    in transformers, the image's ids and the text's first id."""
    if "source_tokens" in batch:
        return {**without(batch, "source_tokens"), "source": batch["source_tokens"]}
    ids = [*_image_ids(c), llama.first_id(c, "bos_token_id", "eos_token_id")]
    rows = jnp.broadcast_to(jnp.array(ids), (len(batch["source"]), len(ids)))
    return {**without(batch, "source_mask"), "source": rows}


def _image_ids(c):
    r = record_of(c)
    return (r["image_token_index"],) * r["num_query_tokens"]


# -------------------------------------------------------------------------------------------
# Decoding works as in the language model; the first layer's cache holds the image's vectors

def decoder_of(tree: Params) -> Params:
    """Move the language model's entries to the top of a tree of weights or specs."""
    return without(tree, "text") | tree.get("text", {})


def encode_source(params: Params, source: Batch, config: Any, specs: Any = None
                  ) -> list[Params]:
    """Make each layer's cache entries for these images and, with T5, for its encoder's text."""
    vectors = image_vectors(params, source, config, specs)
    if config.encoder_layers:
        return transformer.encode_source(params, _with_text(source, config), config, specs,
                                         _embed_with(vectors))
    return [{"cross_vectors": vectors},
            *({} for _ in range(1, config.layers))]


def extend(params: Params, cache: list[Params], tokens: Array, slot: Array, start: Array,
           config: Any, length: int = 0, specs: Any = None) -> tuple[Array, list[Params]]:
    """Do the same as model.extend, for rows that begin with source_ids."""
    if config.encoder_layers:
        return transformer.extend(params, cache, tokens, slot, start, config, length, specs)
    embed = _embed_with(cache[0]["cross_vectors"], begins=True)
    return transformer.extend(params, cache, tokens, slot, start, config, length, specs, embed)


def cache_layer(config: Any, i: int) -> CacheLayer:
    layer, first = transformer.cache_layer(config, i), () if i else ("cross_vectors",)
    return layer if config.encoder_layers else layer._replace(source=first)


# -------------------------------------------------------------------------------------------
# Functions of the Network (zigzag/parallel/network.py)

def batch_shapes(config: Any, rows: int) -> Shapes:
    """Return {name: shape} for a batch of `loss`."""
    text = tables.batch_shapes(config, rows)
    if config.encoder_layers:
        text["source_tokens"] = text["source"]
    return {**text, **tables.batch_shapes(vision_config(config), rows)}


def limits(c: Any) -> dict[str, int]:
    """Return {array of ids in a batch: their bound}."""
    return dict.fromkeys(("tokens", "targets", "source_tokens"), c.vocab_size)


def check(c: Any, mesh: Any) -> None:
    general.check_axes(mesh, "BLIP-2 has layers of three kinds")


NETWORK = Network("blip-2", Config, table, loss, batch_shapes, forward, FAMILIES, check,
                  extend=extend, head_logits=transformer.head_logits, cache_layer=cache_layer,
                  encode_source=encode_source, max_positions=transformer.max_positions,
                  decoding_length=transformer.decoding_length,
                  source_shape=lambda c: transformer.source_shape(vision_config(c)),
                  source_ids=lambda c: () if c.encoder_layers else _image_ids(c),
                  source_text=lambda c: _image_ids(c) if c.encoder_layers else (),
                  decoder_of=decoder_of, limits=limits)
