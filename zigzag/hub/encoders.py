"""Published encoders: BERT, RoBERTa and ALBERT for text, ViT and BEiT for pictures.

`architectures` in config.json names the class, which decides the head. As in transformers, weights
that this class lacks are neither read nor written: the pooler of a masked language model, and the
mask token of hidden patches (a BEiT with one is saved without it). A model for pretraining is read
and saved as a masked language model, without its prediction of the next sentence.

family.py explains `Family`.
"""

import json

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.hub.family import (
    Family,
    attention,
    head,
    is_range,
    keys,
    layer_norm,
    mlp,
    pair_index,
    under,
)
from zigzag.hub.published_config import (
    MOST_LAYERS,
    activation,
    count,
    labels,
    refuse,
    sizes,
    wrong,
)

ENCODERS: dict[str, Family] = {}

# Buffers, and weights of other heads, which BERT's own folders have too. (They are ignored only if
# they are not a part of the model.)
LEFT_OUT = {r".*embeddings\.position_ids": is_range,
            r".*embeddings\.token_type_ids": lambda c, array: not array.any(),
            r"(\w+\.)?pooler\..*": "", r"cls\.seq_relationship\..*": "",
            r"sop_classifier\..*": ""}
# Names in folders of the oldest versions, BERT's own for example.
OLDER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


# -------------------------------------------------------------------------------------------
# Heads

def classed(r, **heads):
    """The fields of the head that `architectures` names. `heads` is {end of a class's name:
    fields}."""
    given = r.get("architectures")
    names = given if isinstance(given, list) and given else [None]
    kind = "".join(part.capitalize() for part in r["model_type"].split("_"))
    kind = {"Vit": "ViT"}.get(kind, kind)
    known = {f"{kind}{end}": fields for end, fields in heads.items()}
    if "architectures" not in r:
        raise ConfigError(f'config.json has no architectures, the class of its weights; add it: '
                          f'"architectures": ["{[*known][0]}"], for example (expected one of '
                          f"{', '.join(known)})")
    if names[0] not in known:
        raise ConfigError(f"config.json: architectures {given!r:.80} is not supported for "
                          f"model_type {r['model_type']}, only {', '.join(known)}")
    fields = dict(known[names[0]])
    if fields["head"] == "classes":
        fields["labels"] = labels(r)
    if names[0].endswith("ForPreTraining"):
        fields["published"] = _published(r, architectures=[f"{kind}ForMaskedLM"])
    return fields


def _published(r, **changes):
    return json.dumps({**r.given, **changes}, sort_keys=True)


def _pooler(r, fields, folder):
    """A model without a head may have a pooler, or none."""
    if fields["head"] == "none" and not any("pooler." in name for name in folder.arrays):
        return {"pool_dense": False}
    return {}


def classifier(name):
    return {f"{name}.weight": "A D -> classifier", f"{name}.bias": "A -> classifier_bias"}


def _dense(name):
    return {f"{name}.weight": "D d -> pool", f"{name}.bias": "D -> pool_bias"}


# -------------------------------------------------------------------------------------------
# Text

TEXT = dict(hidden_act="gelu", max_position_embeddings=512, type_vocab_size=2, layer_norm_eps=1e-12,
            position_embedding_type="absolute", pad_token_id=0, tie_word_embeddings=True)
POOLED, PLAIN = dict(head="classes", pool_dense=True), dict(head="none", pool_dense=True)
MASKED = dict(head="masked")


def _text(r):
    refuse(r, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return {**sizes(r), "causal": False, "norm": "layer", "norm_eps": r["layer_norm_eps"],
            "norm_place": "post", "embed_norm": True, "gated": False,
            "d_ff": count(r, "intermediate_size"), "token_types": count(r, "type_vocab_size"),
            "positions": "learned", "position_rows": r["max_position_embeddings"],
            "biases": "qkv,out,mlp,head", "tied": bool(r["tie_word_embeddings"]),
            "activation": activation(r["hidden_act"])}


def _bert(r):
    return {**_text(r), **classed(
        r, ForMaskedLM=MASKED, ForPreTraining=MASKED, ForSequenceClassification=POOLED,
        Model=PLAIN)}


def _embeddings():
    return {"word_embeddings.weight": "V W -> embed", "position_embeddings.weight":
            "P W -> positions", "token_type_embeddings.weight": "Z W -> token_types",
            **layer_norm("LayerNorm", "embed_norm", "W")}


def _layer(c, parts):
    """The arrays of a layer of BERT, ViT and their relatives. (BEiT's keys have no bias: `qv`.)"""
    has = c.biases.split(",")
    return attention("attention.{}", parts, bool({"qkv", "qv"} & {*has}), key_bias="qkv" in has
                     ) | mlp("intermediate.dense", "output.dense")


def _masked(c, dense, norm, bias, decoder):
    """The head of a masked language model. Its bias has two names; an untied model uses the
    decoder's (in transformers 5; in 4 they are the same array)."""
    inner = "D" if c.embed_dim else "d"
    biases = {bias: "V -> head_bias", f"{decoder}.bias": "V = head_bias"} if c.tied else {
        f"{decoder}.bias": "V -> head_bias", bias: "V ~ head_bias"}
    return {**head(c, f"{decoder}.weight"), f"{dense}.weight": f"W {inner} -> transform",
            f"{dense}.bias": "W -> transform_bias", **layer_norm(norm, "transform_norm", "W"),
            **biases}


def _bert_stack(prefix, c):
    return under(f"{prefix}embeddings.", _embeddings()) | under(
        f"{prefix}encoder.layer.{{l}}.", _layer(c, "self.query self.key self.value output.dense"),
        layer_norm("attention.output.LayerNorm", "attn_norm"),
        layer_norm("output.LayerNorm", "mlp_norm"))


def _with_head(c, arrays, pooler, masked, classes="classifier"):
    """These arrays, and those of the head, which have these names (`masked`: those of _masked)."""
    return {**arrays, **(_dense(pooler) if c.pool_dense else {}),
            **(classifier(classes) if c.head == "classes" else {}),
            **(_masked(c, *masked) if c.head == "masked" else {})}


def _bert_arrays(c):
    part = "cls.predictions."
    return _with_head(c, _bert_stack("bert.", c), "bert.pooler.dense", (
        f"{part}transform.dense", f"{part}transform.LayerNorm", f"{part}bias", f"{part}decoder"))


ENCODERS["bert"] = Family(_bert, _bert_arrays, TEXT, "bert.", LEFT_OUT, older=OLDER, seen=_pooler,
                          neutral=keys("""directionality pooler_fc_size pooler_num_attention_heads
                              pooler_num_fc_layers pooler_size_per_head pooler_type"""))


def _roberta(r):
    """The fields of a RoBERTa. Its table of positions begins after the row numbered
    pad_token_id."""
    fields = {**_text(r), **classed(
        r, ForMaskedLM=MASKED, ForSequenceClassification=POOLED, Model=PLAIN)}
    if fields["head"] == "masked" and fields["activation"] != "gelu":
        refuse(r, hidden_act="gelu")    # (its head uses gelu, whatever the layers use)
    rows, padding = r["max_position_embeddings"], r["pad_token_id"]
    if not isinstance(padding, int) or not 0 <= padding < min(rows - 1, r["vocab_size"]):
        raise wrong("pad_token_id", padding, f": expected an id, below the max_position_embeddings "
                    f"{rows} less 1")
    return {**fields, "pad_id": padding, "position_offset": padding + 1,
            "seq_len": rows - padding - 1}


def _roberta_arrays(c):
    pooler = "classifier.dense" if c.head == "classes" else "roberta.pooler.dense"
    return _with_head(c, _bert_stack("roberta.", c), pooler, (
        "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"),
                      "classifier.out_proj")


ENCODERS["roberta"] = Family(_roberta, _roberta_arrays, {**TEXT, "pad_token_id": 1}, "roberta.",
                             LEFT_OUT, older=OLDER, seen=_pooler)


def _albert(r):
    """The fields of an ALBERT: the layers of a group share their weights."""
    refuse(r, inner_group_num=1)
    layers, groups = r["num_hidden_layers"], count(r, "num_hidden_groups")
    width = count(r, "embedding_size")
    if width == r["hidden_size"]:
        raise ConfigError(f"config.json: embedding_size {width} is not supported for model_type "
                          f"albert: it must differ from hidden_size")
    fields = {**_text(r), **classed(
        r, ForMaskedLM=MASKED, ForPreTraining=MASKED, ForSequenceClassification=POOLED,
        Model=PLAIN)}
    return {**fields, "embed_dim": width, "layer_groups": 0 if groups == layers else groups,
            "biases": f"embed,{fields['biases']}"}


def _albert_arrays(c):
    arrays = {"encoder.embedding_hidden_mapping_in.weight": "D W -> project_in",
              "encoder.embedding_hidden_mapping_in.bias": "D -> project_in_bias"}
    arrays |= under("embeddings.", _embeddings()) | under(
        "encoder.albert_layer_groups.{l}.albert_layers.0.",
        attention("attention.{}", "query key value dense"),
        layer_norm("attention.LayerNorm", "attn_norm"), mlp("ffn", "ffn_output"),
        layer_norm("full_layer_layer_norm", "mlp_norm"))
    return _with_head(c, under("albert.", arrays), "albert.pooler", (
        "predictions.dense", "predictions.LayerNorm", "predictions.bias", "predictions.decoder"))


ENCODERS["albert"] = Family(
    _albert, _albert_arrays,
    {**TEXT, "hidden_act": "gelu_new", "embedding_size": 128, "num_hidden_groups": 1,
     "inner_group_num": 1}, "albert.", LEFT_OUT, older=OLDER, seen=_pooler,
    neutral=keys("""classifier_dropout_prob down_scale_factor gap_size layers_to_keep
                    net_structure_type num_memory_blocks"""))


# -------------------------------------------------------------------------------------------
# Pictures

PICTURES = dict(hidden_act="gelu", layer_norm_eps=1e-12, image_size=224, patch_size=16,
                num_channels=3)


# The token of hidden patches, which is ignored: no patch is hidden here.
MASK_TOKEN = r"(\w+\.)?embeddings\.mask_token"
# The names that transformers 5 uses if it is asked not to save in the original format.
NEWER = {"encoder.layer.": "layers.", "attention.attention.query": "attention.q_proj",
         "attention.attention.key": "attention.k_proj",
         "attention.attention.value": "attention.v_proj",
         "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1",
         "output.dense": "mlp.fc2", "attention.attention.relative": "relative",
         "encoder.relative_position_bias.": "shared_position_bias."}


def _pictures(r):
    return {"layers": count(r, "num_hidden_layers", MOST_LAYERS),
            "d_model": count(r, "hidden_size"), "heads": count(r, "num_attention_heads"),
            "d_ff": count(r, "intermediate_size"), "stem": "patches",
            "image_size": count(r, "image_size"),
            "patch_size": count(r, "patch_size", r["image_size"]),
            "channels": count(r, "num_channels"), "causal": False, "norm": "layer",
            "norm_eps": r["layer_norm_eps"], "gated": False,
            "activation": activation(r["hidden_act"])}


def _picture_stack(prefix, c):
    patches = "embeddings.patch_embeddings.projection."
    arrays = {"embeddings.cls_token": "1 1 D -> class_token",
              f"{patches}weight": "D C y x -> patch", f"{patches}bias": "D -> patch_bias"}
    if c.positions == "learned":
        arrays["embeddings.position_embeddings"] = "1 P D -> positions"
    return under(prefix, arrays) | under(
        f"{prefix}encoder.layer.{{l}}.",
        _layer(c, "attention.query attention.key attention.value output.dense"),
        layer_norm("layernorm_before", "attn_norm"), layer_norm("layernorm_after", "mlp_norm")) | (
        classifier("classifier") if c.head == "classes" else {})


def _vit(r):
    fields = {**_pictures(r), "positions": "learned",
              "biases": "embed,qkv,out,mlp" if r["qkv_bias"] else "embed,out,mlp",
              **classed(r, ForImageClassification=dict(head="classes"), Model=PLAIN)}
    if fields["head"] == "none":
        refuse(r, pooler_act="tanh")
        if r["pooler_output_size"] is not None:
            refuse(r, pooler_output_size=r["hidden_size"])
    return fields


def _vit_arrays(c):
    return (_picture_stack("vit.", c) | layer_norm("vit.layernorm", "norm")
            | (_dense("vit.pooler.dense") if c.pool_dense else {}))


ENCODERS["vit"] = Family(
    _vit, _vit_arrays, {**PICTURES, "qkv_bias": True, "pooler_output_size": None,
                        "pooler_act": "tanh"},
    "vit.", {MASK_TOKEN: "", r"(vit\.)?pooler\..*": "ForImageClassification$"}, seen=_pooler,
    older=NEWER, neutral=keys("encoder_stride pooler_act pooler_output_size tie_word_embeddings"))


def _beit(r):
    shared, each = r["use_shared_relative_position_bias"], r["use_relative_position_bias"]
    if shared and each:
        refuse(r, use_shared_relative_position_bias=False)
    fields = {**_pictures(r), "biases": "embed,qv,out,mlp",
              "positions": "learned" if r["use_absolute_position_embeddings"] else "none",
              "relative": "grid" if shared or each else "", "relative_shared": bool(shared),
              "layer_scale": r["layer_scale_init_value"] > 0,
              "pool": "mean" if r["use_mean_pooling"] else "first",
              **classed(r, ForImageClassification=dict(head="classes"), Model=dict(head="none"))}
    if r["use_mask_token"]:
        fields["published"] = _published(r, use_mask_token=False)
    return fields


def _beit_arrays(c):
    table = "relative_position_bias.relative_position_bias_table"
    norm = "beit.pooler.layernorm" if c.pool == "mean" else "beit.layernorm"
    arrays = _picture_stack("beit.", c) | layer_norm(norm, "norm")
    if c.layer_scale:
        arrays |= under("beit.encoder.layer.{l}.", {"lambda_1": "D -> attn_out_scale",
                                                    "lambda_2": "D -> mlp_out_scale"})
    if c.relative:
        of_layer = "" if c.relative_shared else "layer.{l}.attention.attention."
        arrays[f"beit.encoder.{of_layer}{table}"] = "J H -> relative"
    return arrays


def _is_index(c, array):
    """Whether the array is the table of indices: the row of the learned bias for each pair of
    patches, and for pairs with the class token."""
    ids = np.pad(pair_index(c.image_size // c.patch_size), ((1, 0), (1, 0)))
    ids[0], ids[:, 0], ids[0, 0] = ids.max() + 1, ids.max() + 2, ids.max() + 3
    return np.array_equal(array, ids)


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
