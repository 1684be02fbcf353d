"""Published encoder-decoders: T5, BART and Whisper.

family.py explains `Family`.
"""

import json

import numpy as np

from published.family import Families, Family, attention_and_norm, keys, mlp, under
from published.record import (
    LANGUAGE_MODELS,
    MOST_LAYERS,
    activation,
    classed,
    count,
    named,
    refuse,
    sizes,
    wrong,
)
from zigzag.core.options import without

PAIRS: Families = {}

# The seq_len of a model without a position table.
LENGTH = 512


# -------------------------------------------------------------------------------------------
# T5: RMSNorm before attention and the MLP, learned distance biases. T5 1.1 has a gated MLP and an
# untied head

def _t5(r):
    refuse(r, is_encoder_decoder=True)
    fields = sizes(r, layers="num_layers", d_model="d_model", heads="num_heads", seq_len="",
                   head_dim="d_kv", d_ff="d_ff", norm_eps="layer_norm_epsilon",
                   relative_buckets="relative_attention_num_buckets",
                   relative_distance="relative_attention_max_distance", tied="tie_word_embeddings")
    tied = fields["tied"]
    # transformers 5 has a separate key for this, because it writes tied for every T5.
    is_scaled = bool(r.get("scale_decoder_outputs", tied))
    if is_scaled and not tied:
        refuse(r, scale_decoder_outputs=False)
    # The MLP: ACTIVATION or gated-ACTIVATION. The keys dense_act_fn and is_gated_act take
    # precedence.
    words = r["feed_forward_proj"].split("-")
    if len(words) > 2 or len(words) == 2 and words[0] != "gated":
        raise wrong("feed_forward_proj", r["feed_forward_proj"],
                    ": expected relu, for example, or gated-gelu")
    name = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    return {**fields, **classed(r, LANGUAGE_MODELS), "seq_len": LENGTH,
            "activation": activation(r.get("dense_act_fn") or name),
            "gated": bool(r.get("is_gated_act", words[0] == "gated")),
            "source_len": LENGTH, "encoder_layers": fields["layers"],
            "layers": fields["layers"] if r["num_decoder_layers"] is None else count(
                r, "num_decoder_layers", MOST_LAYERS),
            "attn_scale": 1.0, "positions": "none", "relative": "buckets",
            "head_scale": r["d_model"] ** -0.5 if is_scaled else 0.0}


def _t5_tied(r, fields, arrays):
    """Return the field `tied`. A T5 of transformers 5 is untied if its head isn't its embedding."""
    if "scale_decoder_outputs" not in r or not fields["tied"]:
        return {}
    head, table = map(arrays().get, ("lm_head.weight", "shared.weight"))
    if head is None or table is None:
        return {}
    if np.array_equal(head, table):
        return {"tied": True}
    # If transformers 4 supports such a model, we write version 4's format, which 5 can read too.
    older = without(r, "scale_decoder_outputs")
    older = r if fields["head_scale"] else {**older, "tie_word_embeddings": False}
    return {"tied": False, "published": json.dumps(older, sort_keys=True)}


def _t5_arrays(c):
    ups = {"wi_0": "w_gate", "wi_1": "w_up"} if c.gated else {"wi": "w_up"}
    own = attention_and_norm("SelfAttention.{}", "layer_norm")
    cross = attention_and_norm("EncDecAttention.{}", "layer_norm", ours="cross_")
    others = under("DenseReluDense.", ups, {"wo": "w_down"}) | {"layer_norm": "mlp_norm"}
    relative = "block.0.layer.0.SelfAttention.relative_attention_bias"
    return {"shared": "embed", "lm_head": "head = embed",
            "encoder.embed_tokens.weight": "== embed", "decoder.embed_tokens.weight": "== embed",
            f"encoder.{relative}": "encoder.relative", f"decoder.{relative}": "relative",
            "encoder.final_layer_norm": "encoder.norm", "decoder.final_layer_norm": "norm",
            **under("encoder.block.{encoder.layers}.layer.", under("0.", own), under("1.", others)),
            **under("decoder.block.{layers}.layer.", under("0.", own), under("1.", cross),
                    under("2.", others))}


PAIRS["t5"] = Family(
    _t5, _t5_arrays,
    dict(is_encoder_decoder=True, tie_word_embeddings=True, num_decoder_layers=None,
         relative_attention_num_buckets=32, relative_attention_max_distance=128,
         layer_norm_epsilon=1e-6, feed_forward_proj="relu", pad_token_id=0, eos_token_id=1),
    # T5's earliest versions saved distance biases for cross-attention, but no class uses them.
    ignored={r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": ""},
    seen=_t5_tied,
    aliases={"hidden_size": "d_model", "num_attention_heads": "num_heads",
             "num_hidden_layers": "num_layers", "head_dim": "d_kv"},
    neutral=keys("n_positions"))


# -------------------------------------------------------------------------------------------
# BART, with norms after attention and the MLP, and Whisper, with norms before them

def _layers(r, seq_len, source_len):
    """Return the fields that BART and Whisper have under the same names."""
    refuse(r, is_encoder_decoder=True, tie_word_embeddings=True)
    return {**sizes(r, layers="decoder_layers", d_model="d_model", heads="decoder_attention_heads",
                    d_ff="decoder_ffn_dim", encoder_layers="encoder_layers",
                    encoder_heads="encoder_attention_heads", encoder_d_ff="encoder_ffn_dim",
                    activation="activation_function", seq_len=seq_len, source_len=source_len),
            **classed(r, LANGUAGE_MODELS), "norm": "layer", "norm_eps": 1e-5,
            "positions": "learned", "gated": False, "tied": True}


# The arrays that BART and Whisper have under the same names.
OWN = attention_and_norm("self_attn.{}_proj", "self_attn_layer_norm", "q k v out")
CROSS = attention_and_norm("encoder_attn.{}_proj", "encoder_attn_layer_norm", "q k v out", "cross_")
OTHERS = mlp("fc1", "fc2") | {"final_layer_norm": "mlp_norm"}
CODERS = under("model.", {
    "decoder.embed_positions": "positions", "encoder.embed_positions": "encoder.positions",
    "encoder.layer_norm": "encoder.norm", "decoder.layer_norm": "norm"}) | under(
        "model.encoder.layers.{encoder.layers}.", OWN, OTHERS) | under(
        "model.decoder.layers.{layers}.", OWN, CROSS, OTHERS)


def _bart(r):
    # The earliest files have these keys from related models; the class ignores them.
    refuse(r, normalize_before=False, add_final_layer_norm=False, normalize_embedding=True,
           static_position_embeddings=False, add_bias_logits=False)
    fields = _layers(r, "max_position_embeddings", "max_position_embeddings")
    return {**fields, "position_offset": 2, "position_rows": fields["seq_len"] + 2,
            "embed_norm": True, "norm_place": "post", "biases": "qkv,out,mlp,head",
            "embed_scale": 0.0 if r["scale_embedding"] else 1.0}


BART = CODERS | under("model.", {
    "shared": "embed", "encoder.embed_tokens.weight": "== embed",
    "decoder.embed_tokens.weight": "== embed", "decoder.layernorm_embedding": "embed_norm",
    "encoder.layernorm_embedding": "encoder.embed_norm"}) | {
        "lm_head.weight": "== embed", "final_logits_bias": "1 V ~ head_bias"}
CODER_NAMES = {"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model",
               "num_hidden_layers": "encoder_layers"}
CODER = dict(is_encoder_decoder=True, tie_word_embeddings=True, scale_embedding=False,
             activation_function="gelu")
PAIRS["bart"] = Family(
    _bart, BART,
    {**CODER, "max_position_embeddings": 1024, "decoder_start_token_id": 2, "pad_token_id": 1,
     "eos_token_id": 2}, "model.",
    {r"(.*\.)?version": lambda c, array: array.size == 1}, aliases=CODER_NAMES,
    neutral=keys("""classif_dropout extra_pos_embeddings force_bos_token_to_be_generated save_step
                    do_blenderbot_90_layernorm student_encoder_layers student_decoder_layers
                    replacing_rate"""))


def _whisper(r):
    # The class ignores scale_embedding.
    return {**_layers(r, "max_target_positions", "max_source_positions"), "stem": "frames",
            **named(r, position_rows="max_target_positions", channels="num_mel_bins"),
            "biases": "qv,out,mlp"}


WHISPER = CODERS | under("model.", {
    "decoder.embed_tokens": "embed",
    "encoder.conv1": "encoder.conv1", "encoder.conv1.weight": "D C k -> encoder.conv1",
    "encoder.conv2": "encoder.conv2", "encoder.conv2.weight": "D d k -> encoder.conv2"}) | {
        "proj_out": "head = embed"}
PAIRS["whisper"] = Family(
    _whisper, WHISPER,
    {**CODER, "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80,
     "decoder_start_token_id": 50257, "pad_token_id": 50256, "eos_token_id": 50256}, "model.",
    aliases=CODER_NAMES,
    neutral=keys("""apply_spec_augment mask_feature_length mask_feature_min_masks
                    mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob
                    median_filter_width use_weighted_layer_sum classifier_proj_size
                    scale_embedding"""))
