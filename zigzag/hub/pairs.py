"""Published encoder-decoders: T5, BART and Whisper.

In names {s} numbers the encoder's layers (s for source), {m} the decoder's. family.py explains
`Family`.
"""

import json

from zigzag.hub.family import Family, attention, head, keys, layer_norm, mlp, under
from zigzag.hub.published_config import (
    MOST_LAYERS,
    activation,
    count,
    refuse,
    refuse_other_heads,
    sizes,
    wrong,
)

PAIRS: dict[str, Family] = {}

# The seq_len of a model without a table of positions.
LENGTH = 512


# -------------------------------------------------------------------------------------------
# T5: RMSNorm before attention and MLP, learned biases by distance. 1.1 has a gated MLP and its own
# head

def _t5_mlp(r):
    """The fields of the MLP, from feed_forward_proj: ACTIVATION or gated-ACTIVATION. (Other keys of
    the file win.)"""
    words = r["feed_forward_proj"].split("-")
    if len(words) > 2 or len(words) == 2 and words[0] != "gated":
        raise wrong("feed_forward_proj", r["feed_forward_proj"],
                    ": expected relu, for example, or gated-gelu")
    name = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    return dict(activation=activation(r.get("dense_act_fn") or name),
                gated=bool(r.get("is_gated_act", words[0] == "gated")))


def _t5(r):
    refuse_other_heads(r)
    refuse(r, is_encoder_decoder=True)
    tied, width = bool(r["tie_word_embeddings"]), count(r, "d_model")
    # (transformers 5 has a key of its own for this, since it writes tied for every T5.)
    is_scaled = bool(r.get("scale_decoder_outputs", tied))
    if is_scaled and not tied:
        refuse(r, scale_decoder_outputs=False)
    fields = sizes(r.but(length=LENGTH), "num_layers", "d_model", "num_heads", "length")
    return {**fields, **_t5_mlp(r), "encoder_layers": fields["layers"], "source_len": LENGTH,
            "layers": fields["layers"] if r["num_decoder_layers"] is None else count(
                r, "num_decoder_layers", MOST_LAYERS),
            "head_dim": count(r, "d_kv"), "d_ff": count(r, "d_ff"), "attn_scale": 1.0,
            "norm_eps": r["layer_norm_epsilon"], "positions": "none", "relative": "buckets",
            "relative_buckets": r["relative_attention_num_buckets"],
            "relative_distance": r["relative_attention_max_distance"], "tied": tied,
            "head_scale": width**-0.5 if is_scaled else 0.0}


def _t5_tied(r, fields, folder):
    """The field `tied`: a T5 saved by transformers 5 is untied if its head and embedding differ."""
    if "scale_decoder_outputs" not in r or not fields["tied"]:
        return {}
    names = [name for name in ("lm_head.weight", "shared.weight") if name in folder.arrays]
    shapes = {folder.kind(name)[0] for name in names}
    if len(names) < 2 or len(shapes) > 1 or () in shapes:       # (check_arrays refuses it)
        return {}
    head, table = (folder[name] for name in names)
    V = shapes.pop()[0]
    parts = [slice(i, min(i + 4096, V)) for i in range(0, V, 4096)]
    differ = any((head[part] != table[part]).any() for part in parts)
    if not differ or fields["head_scale"]:
        return {"tied": not differ}
    # (Written in the form of transformers 4, which 5 reads too.)
    older = {name: value for name, value in r.items() if name != "scale_decoder_outputs"}
    return {"tied": False, "published": json.dumps({**older, "tie_word_embeddings": False},
                                                   sort_keys=True)}


def _t5_arrays(c):
    names = {"wi_0": "w_gate", "wi_1": "w_up"} if c.gated else {"wi": "w_up"}
    mlp = {f"DenseReluDense.{name}.weight": f"F D -> {ours}" for name, ours in names.items()}
    mlp |= {"DenseReluDense.wo.weight": "D F -> w_down", "layer_norm.weight": "D -> mlp_norm"}
    own, cross = ({**attention(f"{name}.{{}}", "q k v o", False, False, ours),
                   "layer_norm.weight": f"D -> {norm}"} for name, ours, norm in (
        ("SelfAttention", "", "attn_norm"), ("EncDecAttention", "cross_", "cross_norm")))
    distances = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {"shared.weight": "V W -> embed", "encoder.embed_tokens.weight": "V W = embed",
            "decoder.embed_tokens.weight": "V W = embed", **head(c),
            f"encoder.{distances}": "J H -> encoder.relative",
            f"decoder.{distances}": "J H -> relative",
            "encoder.final_layer_norm.weight": "D -> encoder.norm",
            "decoder.final_layer_norm.weight": "D -> norm",
            **under("encoder.block.{s}.layer.0.", own), **under("encoder.block.{s}.layer.1.", mlp),
            **under("decoder.block.{m}.layer.0.", own),
            **under("decoder.block.{m}.layer.1.", cross),
            **under("decoder.block.{m}.layer.2.", mlp)}


PAIRS["t5"] = Family(
    _t5, _t5_arrays,
    dict(is_encoder_decoder=True, tie_word_embeddings=True, num_decoder_layers=None,
         relative_attention_num_buckets=32, relative_attention_max_distance=128,
         layer_norm_epsilon=1e-6, feed_forward_proj="relu", pad_token_id=0, eos_token_id=1),
    # (T5's first versions saved biases by distance of cross-attention, which no class has.)
    ignored={r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": ""},
    seen=_t5_tied,
    aliases={"hidden_size": "d_model", "num_attention_heads": "num_heads",
             "num_hidden_layers": "num_layers", "head_dim": "d_kv"},
    neutral=keys("n_positions"))


# -------------------------------------------------------------------------------------------
# BART, with norms after attention and MLP, and Whisper, with norms before

def _layers(r, seq_len):
    """The fields that BART and Whisper have under the same names."""
    refuse_other_heads(r)
    refuse(r, is_encoder_decoder=True, tie_word_embeddings=True)
    return {**sizes(r, "decoder_layers", "d_model", "decoder_attention_heads", seq_len),
            "d_ff": count(r, "decoder_ffn_dim"),
            "encoder_layers": count(r, "encoder_layers", MOST_LAYERS),
            "encoder_heads": count(r, "encoder_attention_heads"),
            "encoder_d_ff": count(r, "encoder_ffn_dim"), "norm": "layer", "norm_eps": 1e-5,
            "positions": "learned", "gated": False, "tied": True,
            "activation": activation(r["activation_function"])}


def _attention(name, norm, ours, key_bias):
    return attention(f"{name}.{{}}_proj", "q k v out", ours=ours, key_bias=key_bias) | layer_norm(
        f"{name}_layer_norm", norm)


def _stacks(key_bias):
    """The arrays of all layers."""
    own = _attention("self_attn", "attn_norm", "", key_bias)
    cross = _attention("encoder_attn", "cross_norm", "cross_", key_bias)
    others = mlp("fc1", "fc2") | layer_norm("final_layer_norm", "mlp_norm")
    return under("model.encoder.layers.{s}.", own, others) | under(
        "model.decoder.layers.{m}.", own, cross, others)


def _bart(r):
    # (Keys of the first files about related models; the class ignores them.)
    refuse(r, normalize_before=False, add_final_layer_norm=False, normalize_embedding=True,
           static_position_embeddings=False, add_bias_logits=False)
    length = count(r, "max_position_embeddings")
    return {**_layers(r, "max_position_embeddings"), "source_len": length, "position_offset": 2,
            "position_rows": length + 2, "embed_norm": True, "norm_place": "post",
            "biases": "qkv,out,mlp,head", "embed_scale": 0.0 if r["scale_embedding"] else 1.0}


def _bart_arrays(c):
    ends = {"model.shared.weight": "V W -> embed",
            "model.encoder.embed_tokens.weight": "V W = embed",
            "model.decoder.embed_tokens.weight": "V W = embed",
            "model.encoder.embed_positions.weight": "P W -> encoder.positions",
            "model.decoder.embed_positions.weight": "P W -> positions",
            **layer_norm("model.encoder.layernorm_embedding", "encoder.embed_norm", "W"),
            **layer_norm("model.decoder.layernorm_embedding", "embed_norm", "W")}
    return {**ends, **head(c), "final_logits_bias": "1 V -> head_bias", **_stacks(True)}


CODER = dict(is_encoder_decoder=True, tie_word_embeddings=True, scale_embedding=False,
             activation_function="gelu")
PAIRS["bart"] = Family(
    _bart, _bart_arrays,
    {**CODER, "max_position_embeddings": 1024, "decoder_start_token_id": 2, "pad_token_id": 1,
     "eos_token_id": 2}, "model.",
    {r"(.*\.)?version": lambda c, array: array.size == 1}, optional=("final_logits_bias",),
    aliases={"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model",
             "num_hidden_layers": "encoder_layers"},
    neutral=keys("""classif_dropout extra_pos_embeddings force_bos_token_to_be_generated save_step
                    do_blenderbot_90_layernorm student_encoder_layers student_decoder_layers
                    replacing_rate"""))


def _whisper(r):
    # (The class ignores scale_embedding.)
    return {**_layers(r, "max_target_positions"), "position_rows": r["max_target_positions"],
            "stem": "frames", "source_len": count(r, "max_source_positions"),
            "channels": count(r, "num_mel_bins"), "biases": "qv,out,mlp"}


def _whisper_arrays(c):
    ends = {"model.decoder.embed_tokens.weight": "V W -> embed",
            "model.decoder.embed_positions.weight": "P D -> positions",
            "model.encoder.embed_positions.weight": "P D -> encoder.positions",
            **layer_norm("model.encoder.layer_norm", "encoder.norm"),
            **layer_norm("model.decoder.layer_norm", "norm"),
            "model.encoder.conv1.weight": "D C k -> encoder.conv1",
            "model.encoder.conv1.bias": "D -> encoder.conv1_bias",
            "model.encoder.conv2.weight": "D d k -> encoder.conv2",
            "model.encoder.conv2.bias": "D -> encoder.conv2_bias"}
    return {**ends, **head(c, "proj_out.weight"), **_stacks(False)}


PAIRS["whisper"] = Family(
    _whisper, _whisper_arrays,
    {**CODER, "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80,
     "decoder_start_token_id": 50257, "pad_token_id": 50256, "eos_token_id": 50256}, "model.",
    aliases={"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model",
             "num_hidden_layers": "encoder_layers"},
    neutral=keys("""apply_spec_augment mask_feature_length mask_feature_min_masks
                    mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob
                    median_filter_width use_weighted_layer_sum classifier_proj_size
                    scale_embedding"""))
