"""Published encoders: BERT, ERNIE, RoBERTa, ALBERT; ViT, BEiT.

`architectures` names the class of a folder's weights, which determines the head: masked tokens,
classes, or none. We read and write a model with two heads (BertForPreTraining) as a masked language
model, and drop its next-sentence head.

family.py explains `Family`.
"""

import json

import numpy as np

from published.family import Families, Family, attention, is_range, keys, mlp, under
from published.positions import patch_ids
from published.record import (
    an_id,
    classed,
    count,
    named,
    pictures,
    refuse,
    sizes,
    tower,
)
from zigzag.core.errors import ConfigError

ENCODERS: Families = {}

# Buffers and other heads' weights, which BERT's own folders also hold. We ignore them only if
# they aren't part of the model.
LEFT_OUT = {r".*embeddings\.position_ids": is_range,
            r".*embeddings\.token_type_ids": lambda c, array: not array.any(),
            r"(\w+\.)?pooler\..*": "", r"cls\.seq_relationship\..*": "",
            r"sop_classifier\..*": ""}
# Names in the oldest folders, for example BERT's own.
OLDER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


# -------------------------------------------------------------------------------------------
# Heads

POOLED, PLAIN = dict(head="classes", pool_dense=True), dict(head="none", pool_dense=True)


def _published(r, **changes):
    return {"published": json.dumps({**r.given, **changes}, sort_keys=True)}


def _pooler(r, fields, arrays):
    """Return the field `pool_dense`. A model without a head may also lack a pooler."""
    if fields["head"] == "none" and not any("pooler." in name for name in arrays()):
        return {"pool_dense": False}
    return {}


def _masked(c, dense, norm, bias, decoder):
    """Return the names of a masked language model's head. Its bias has two names. In transformers 5
    an untied model uses the decoder's bias; in 4 both names are the same array."""
    biases = {bias: "-> head_bias", f"{decoder}.bias": "== head_bias"} if c.tied else {
        bias: "~ head_bias"}
    return {dense: "transform", norm: "transform_norm", decoder: "head = embed", **biases}


# -------------------------------------------------------------------------------------------
# Text

TEXT = dict(hidden_act="gelu", max_position_embeddings=512, type_vocab_size=2, layer_norm_eps=1e-12,
            position_embedding_type="absolute", pad_token_id=0, tie_word_embeddings=True)


def _text(r, kind):
    refuse(r, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    head = classed(r, {f"{kind}For(MaskedLM|PreTraining)": dict(head="masked"),
                       f"{kind}ForSequenceClassification": POOLED, f"{kind}Model": PLAIN})
    if r["architectures"][0].endswith("ForPreTraining"):
        head |= _published(r, architectures=[f"{kind}ForMaskedLM"])
    return {**sizes(r), "causal": False, "norm_place": "post", "embed_norm": True,
            "positions": "learned", "biases": "qkv,out,mlp,head", **head, **tower(
                r, d_ff="intermediate_size", token_types="type_vocab_size",
                position_rows="max_position_embeddings", tied="tie_word_embeddings")}


EMBEDDINGS = {"word_embeddings": "embed", "position_embeddings": "positions",
              "token_type_embeddings": "token_types", "LayerNorm": "embed_norm"}
BERT = under("embeddings.", EMBEDDINGS) | under(
    "encoder.layer.{l}.", attention("attention.{}", "self.query self.key self.value output.dense"),
    mlp("intermediate.dense", "output.dense"),
    {"attention.output.LayerNorm": "attn_norm", "output.LayerNorm": "mlp_norm"})


def _bert_arrays(c, prefix="bert."):
    part = "cls.predictions."
    return under(prefix, BERT) | {f"{prefix}pooler.dense": "pool", "classifier": "classifier"} | (
        _masked(c, f"{part}transform.dense", f"{part}transform.LayerNorm", f"{part}bias",
                f"{part}decoder"))


ENCODERS["bert"] = Family(
    lambda r: _text(r, "Bert"), _bert_arrays, TEXT, "bert.", LEFT_OUT, older=OLDER, seen=_pooler,
    neutral=keys("""directionality pooler_fc_size pooler_num_attention_heads
                    pooler_num_fc_layers pooler_size_per_head pooler_type"""))


def _ernie(r):
    """Return the fields of an ERNIE: a BERT that may also have an embedding of task types."""
    types = named(r, task_types="task_type_vocab_size")
    return {**_text(r, "Ernie"), **(types if r["use_task_id"] else {})}


ENCODERS["ernie"] = Family(
    _ernie, lambda c: _bert_arrays(c, "ernie.") | {
        "ernie.embeddings.task_type_embeddings": "task_types"},
    {**TEXT, "task_type_vocab_size": 3, "use_task_id": False}, "ernie.", LEFT_OUT, seen=_pooler)


def _roberta(r):
    """Return the fields of a RoBERTa. In its position table, row pad_token_id is for padding, and
    the positions begin after it."""
    fields = _text(r, "Roberta")
    if fields["head"] == "masked" and fields["activation"] != "gelu":
        refuse(r, hidden_act="gelu")    # its head uses gelu, whatever the layers use
    rows = r["max_position_embeddings"]     # one for padding, and at least one after it
    padding = an_id("pad_token_id", r["pad_token_id"], min(rows - 1, r["vocab_size"]))
    return {**fields, "pad_id": padding, "position_offset": padding + 1,
            "seq_len": rows - padding - 1}


def _roberta_arrays(c):
    pooler = "classifier.dense" if c.head == "classes" else "roberta.pooler.dense"
    return under("roberta.", BERT) | {pooler: "pool", "classifier.out_proj": "classifier"} | (
        _masked(c, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"))


ENCODERS["roberta"] = Family(_roberta, _roberta_arrays, {**TEXT, "pad_token_id": 1}, "roberta.",
                             LEFT_OUT, older=OLDER, seen=_pooler)


def _albert(r):
    """Return the fields of an ALBERT. The layers of a group share their weights."""
    refuse(r, inner_group_num=1)
    layers, groups = r["num_hidden_layers"], count(r, "num_hidden_groups")
    width = count(r, "embedding_size")
    if width == r["hidden_size"]:
        raise ConfigError(f"config.json: embedding_size {width} is not supported for model_type "
                          f"albert: it must differ from hidden_size")
    return {**_text(r, "Albert"), "embed_dim": width, "biases": "embed,qkv,out,mlp,head",
            "layer_groups": 0 if groups == layers else groups}


def _albert_arrays(c):
    arrays = {"encoder.embedding_hidden_mapping_in": "project_in", "pooler": "pool"}
    arrays |= under("embeddings.", EMBEDDINGS) | under(
        "encoder.albert_layer_groups.{l}.albert_layers.0.",
        attention("attention.{}", "query key value dense"), mlp("ffn", "ffn_output"),
        {"attention.LayerNorm": "attn_norm", "full_layer_layer_norm": "mlp_norm"})
    return under("albert.", arrays) | {"classifier": "classifier"} | under("predictions.", _masked(
        c, "dense", "LayerNorm", "bias", "decoder"))


ENCODERS["albert"] = Family(
    _albert, _albert_arrays,
    {**TEXT, "hidden_act": "gelu_new", "embedding_size": 128, "num_hidden_groups": 1,
     "inner_group_num": 1}, "albert.", LEFT_OUT, older=OLDER, seen=_pooler,
    neutral=keys("""classifier_dropout_prob down_scale_factor gap_size layers_to_keep
                    net_structure_type num_memory_blocks"""))


# -------------------------------------------------------------------------------------------
# Images

PICTURES = dict(hidden_act="gelu", layer_norm_eps=1e-12, image_size=224, patch_size=16,
                num_channels=3)


# The token for masked patches. We ignore it, because we never mask patches.
MASK_TOKEN = r"(\w+\.)?embeddings\.mask_token"


def newer(module):
    """Return {part of a name: the one that transformers 5 writes when it doesn't save in the
    original format}. `module` has the queries, keys and values."""
    return {f"{module}.query": "attention.q_proj", f"{module}.key": "attention.k_proj",
            f"{module}.value": "attention.v_proj",
            "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1",
            "output.dense": "mlp.fc2"}


NEWER = {"encoder.layer.": "layers.", **newer("attention.attention"),
         "attention.attention.relative": "relative",
         "encoder.relative_position_bias.": "shared_position_bias."}
PATCHES = {"embeddings.patch_embeddings.projection": "patch",
           "embeddings.patch_embeddings.projection.weight": "D C y x -> patch"}
STACK = PATCHES | {"embeddings.cls_token": "1 1 D -> class_token",
                   "embeddings.position_embeddings": "1 P D -> positions"} | under(
    "encoder.layer.{l}.", mlp("intermediate.dense", "output.dense"),
    attention("attention.{}", "attention.query attention.key attention.value output.dense"),
    {"layernorm_before": "attn_norm", "layernorm_after": "mlp_norm"})


def _vit(r):
    fields = {**tower(r, d_ff="intermediate_size"), **pictures(r), "positions": "learned",
              "biases": "embed,qkv,out,mlp" if r["qkv_bias"] else "embed,out,mlp",
              **classed(r, {"ViTForImageClassification": dict(head="classes"), "ViTModel": PLAIN})}
    if fields["head"] == "none":
        refuse(r, pooler_act="tanh",
               pooler_output_size=r["pooler_output_size"] and r["hidden_size"])
    return fields


ENCODERS["vit"] = Family(
    _vit, {"classifier": "classifier", **under("vit.", STACK, {"layernorm": "norm",
                                                               "pooler.dense": "pool"})},
    {**PICTURES, "qkv_bias": True, "pooler_output_size": None, "pooler_act": "tanh"},
    "vit.", {MASK_TOKEN: "", r"(vit\.)?pooler\..*": "ForImageClassification$"}, seen=_pooler,
    older=NEWER, neutral=keys("encoder_stride pooler_act pooler_output_size tie_word_embeddings"))


def _beit(r):
    shared, each = r["use_shared_relative_position_bias"], r["use_relative_position_bias"]
    if shared and each:
        refuse(r, use_shared_relative_position_bias=False)
    fields = {**tower(r, d_ff="intermediate_size"), **pictures(r), "biases": "embed,qv,out,mlp",
              "positions": "learned" if r["use_absolute_position_embeddings"] else "none",
              "relative": "grid" if shared or each else "", "relative_shared": bool(shared),
              "layer_scale": r["layer_scale_init_value"] > 0,
              "pool": "mean" if r["use_mean_pooling"] else "first",
              **classed(r, {"BeitForImageClassification": dict(head="classes"),
                            "BeitModel": dict(head="none")})}
    return fields | (_published(r, use_mask_token=False) if r["use_mask_token"] else {})


def _beit_arrays(c):
    table = "relative_position_bias.relative_position_bias_table"
    return {"classifier": "classifier"} | under("beit.", STACK, {
        "pooler.layernorm" if c.pool == "mean" else "layernorm": "norm",
        f"encoder.{table}": "-> relative"}) | under("beit.encoder.layer.{l}.", {
            "lambda_1": "-> attn_out_scale", "lambda_2": "-> mlp_out_scale",
            f"attention.attention.{table}": "-> relative"})


def _is_index(c, array):
    """Return whether the array is the index table, which gives the learned bias's row for each pair
    of patches or pair with the class token."""
    slots = np.arange(c.seq_len)
    return np.array_equal(array, patch_ids(c, slots[:, None], slots))


ENCODERS["beit"] = Family(
    _beit, _beit_arrays,
    {**PICTURES, "use_mask_token": False, "use_absolute_position_embeddings": False,
     "use_relative_position_bias": False, "use_shared_relative_position_bias": False,
     "layer_scale_init_value": 0.1, "use_mean_pooling": True},
    "beit.", {r".*relative_position_index": _is_index, MASK_TOKEN: ""}, older=NEWER,
    neutral=keys("""add_fpn auxiliary_channels auxiliary_concat_input auxiliary_loss_weight
                    auxiliary_num_convs drop_path_rate out_features out_indices pool_scales
                    reshape_hidden_states semantic_loss_ignore_index stage_names
                    use_auxiliary_head vocab_size tie_word_embeddings"""))
