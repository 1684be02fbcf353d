"""Published decoders: GPT-2 and its relatives, with LayerNorm and an ungated MLP.

family.py explains `Family`.
"""

import numpy as np

from published.family import (
    GROUPED,
    INV_FREQ,
    MASKS,
    Families,
    Family,
    attention,
    biased,
    keys,
    mlp,
    neighbours_apart,
    under,
)
from published.positions import waves
from published.record import (
    decoder_head,
    of_layers,
    refuse,
    rope,
    sizes,
    window,
    wrong,
)
from zigzag.parallel.rotary import plain_rates

GPT: Families = {}


def _old(r, norm_eps="layer_norm_epsilon", **names):
    return {**sizes(r, norm_eps=norm_eps, tied="tie_word_embeddings", **names), **decoder_head(r),
            "norm": "layer", "gated": False}


OLD = dict(layer_norm_epsilon=1e-5, tie_word_embeddings=True)
GPT2 = {**OLD, "n_positions": 1024, "n_inner": None, "activation_function": "gelu_new"}
GPT2_NAMES = {"hidden_size": "n_embd", "num_attention_heads": "n_head",
              "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"}
HEADS = {"lm_head": "head = embed", "score": "classifier"}
ENDS = {"transformer.wte": "embed", "transformer.wpe": "positions", "transformer.ln_f": "norm",
        **HEADS}
NORMS = {"ln_1": "attn_norm", "ln_2": "mlp_norm"}
LATER_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}


def _gpt(r):
    return {**_old(r, layers="n_layer", d_model="n_embd", heads="n_head", seq_len="n_positions",
                   activation="activation_function"), "d_ff": r["n_inner"] or 4 * r["n_embd"]}


def _gpt2(r):
    refuse(r, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return {**_gpt(r), "positions": "learned", "position_rows": r["n_positions"],
            "biases": "qkv,out,mlp"}


# GPT-2 stores the transposes of torch's Linear weights.
GPT["gpt2"] = Family(_gpt2, ENDS | under(
    "transformer.h.{l}.", NORMS,
    {"attn.c_attn": "wq wk wv", "attn.c_proj": "wo", **mlp("mlp.c_fc", "mlp.c_proj"),
     "attn.c_attn.weight": "D (H N | K N | K M) -> wq wk wv",
     "attn.c_proj.weight": "(H M) D -> wo", "mlp.c_fc.weight": "D F -> w_up",
     "mlp.c_proj.weight": "F D -> w_down"}),
    GPT2, "transformer.", MASKS, aliases=GPT2_NAMES,
    neutral=keys("""reorder_and_upcast_attn summary_proj_to_labels n_ctx n_special
                    predict_special_tokens"""))


def _is_sinusoids(c, array):
    """Return whether the array holds each position's sines and cosines, as in GPT-J's earliest
    folders."""
    rates = plain_rates(c.rotary_dim or c.head_dim, 10000.0)
    return np.allclose(array, waves(len(array), rates), atol=0.01)


GPT["gptj"] = Family(
    lambda r: {**_gpt(r), "rotary_dim": r["rotary_dim"] or 0, "parallel_block": True,
               "biases": "mlp,head"},
    ENDS | under("transformer.h.{l}.", NORMS, attention("attn.{}_proj", "q k v out"),
                 mlp("mlp.fc_in", "mlp.fc_out")),
    {**GPT2, "n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False},
    "transformer.", {**MASKS, r".*embed_positions": _is_sinusoids}, neighbours_apart, GPT2_NAMES,
    neutral=keys("n_ctx rotary scale_attn_weights summary_proj_to_labels"))


def _gpt_neo(r):
    types, names = r["attention_types"], {"local": "sliding_attention", "global": "full_attention"}
    if sum(len(kinds) * times for kinds, times in types) != r["num_layers"]:
        raise wrong("attention_types", types, f" are not for num_layers {r['num_layers']!r:.80}")
    kinds = [kind for kinds, times in types for _ in range(times) for kind in kinds]
    kinds = r.get("attention_layers", kinds)        # this key wins if they differ
    of_layers("attention_layers", kinds, [*names], r["num_layers"])
    return {**_old(r, layers="num_layers", heads="num_heads", activation="activation_function",
                   position_rows="max_position_embeddings"), "attn_scale": 1.0,
            **window(r, [names[kind] for kind in kinds], "window_size"), "positions": "learned",
            "d_ff": r["intermediate_size"] or 4 * r["hidden_size"], "biases": "out,mlp"}


GPT["gpt_neo"] = Family(
    _gpt_neo, ENDS | under("transformer.h.{l}.", NORMS,
                           attention("attn.attention.{}_proj", "q k v out"),
                           mlp("mlp.c_fc", "mlp.c_proj")),
    {**OLD, "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 12]],
     "window_size": 256, "intermediate_size": None, "activation_function": "gelu_new"},
    "transformer.", MASKS, aliases={"num_attention_heads": "num_heads",
                                    "num_hidden_layers": "num_layers"},
    neutral=keys("embed_dropout resid_dropout summary_proj_to_labels"))


def _gpt_neox(r):
    bias, parallel = r["attention_bias"], bool(r["use_parallel_residual"])
    # transformers 4 writes these two under both names.
    refuse(r, rope_theta=r["rotary_emb_base"], partial_rotary_factor=r["rotary_pct"])
    return {**_old(r, "layer_norm_eps", d_ff="intermediate_size", activation="hidden_act"),
            **rope(r, "rotary_emb_base", "rotary_pct"), "parallel_block": parallel,
            "parallel_norms": 2 if parallel else 1, **biased(qkv=bias, out=bias, mlp=True)}


MLP_4H = mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
GPT["gpt_neox"] = Family(
    _gpt_neox, {"gpt_neox.embed_in": "embed", "gpt_neox.final_layer_norm": "norm",
                "embed_out": "head = embed", "score": "classifier"} | under(
        "gpt_neox.layers.{l}.", MLP_4H, under("attention.query_key_value", GROUPED), LATER_NORMS,
        {"attention.dense": "wo"}),
    dict(layer_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=2048,
         rotary_pct=0.25, rotary_emb_base=10000, attention_bias=True, use_parallel_residual=True,
         hidden_act="gelu"), "gpt_neox.", {**INV_FREQ, **MASKS},
    older={"embed_out.weight": "lm_head.weight"}, shared=("rotary_pct",))


def _opt(r):
    refuse(r, enable_bias=True, layer_norm_elementwise_affine=True,
           _remove_final_layer_norm=False)
    width = r["word_embed_proj_dim"] or r["hidden_size"]
    fields = _old(r, "", d_ff="ffn_dim", activation="activation_function")
    if "head" in fields:
        refuse(r, word_embed_proj_dim=r["word_embed_proj_dim"] and r["hidden_size"])
    return {**fields, "norm_eps": 1e-5, "positions": "learned", "position_offset": 2,
            "position_rows": r["max_position_embeddings"] + 2, "pad_id": -2,
            "biases": "qkv,out,mlp", "embed_dim": width,
            "norm_place": "pre" if r["do_layer_norm_before"] else "post"}


GPT["opt"] = Family(
    _opt, HEADS | under("model.decoder.", {
        "embed_tokens": "embed", "embed_positions": "positions", "project_in": "project_in",
        "project_out": "project_out", "final_layer_norm": "norm"}) | under(
        "model.decoder.layers.{l}.", attention("self_attn.{}_proj", "q k v out"), mlp("fc1", "fc2"),
        {"self_attn_layer_norm": "attn_norm", "final_layer_norm": "mlp_norm"}),
    dict(max_position_embeddings=2048, word_embed_proj_dim=None, do_layer_norm_before=True,
         activation_function="relu", tie_word_embeddings=True, enable_bias=True,
         layer_norm_elementwise_affine=True, _remove_final_layer_norm=False), "model.")


def _bloom(r):
    refuse(r, apply_residual_connection_post_layernorm=False)
    if r.get("slow_but_exact"):     # it adds a product's biases once per part
        refuse(r, pretraining_tp=1)
    return {**_old(r, layers="n_layer", heads="n_head", seq_len=""),
            "seq_len": r.get("max_position_embeddings") or r.get("seq_length") or 2048,
            "d_ff": 4 * r["hidden_size"], "positions": "alibi", "embed_norm": True,
            "biases": "qkv,out,mlp", "activation": "gelu_tanh"}


def _bloom_arrays(c):
    two = {"ln_attn": "attn_norm", "ln_mlp": "mlp_norm"}
    norms = two if c.parallel_norms == 2 else LATER_NORMS
    return HEADS | under("transformer.", {
        "word_embeddings": "embed", "word_embeddings_layernorm": "embed_norm", "ln_f": "norm"
    }) | under("transformer.h.{l}.", norms, {"self_attention.dense": "wo"}, MLP_4H,
               under("self_attention.query_key_value", GROUPED))


GPT["bloom"] = Family(
    _bloom, _bloom_arrays, {**OLD, "apply_residual_connection_post_layernorm": False},
    "transformer.", aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head",
                             "num_hidden_layers": "n_layer"},
    neutral=keys("pretraining_tp attention_softmax_in_fp32 bias_dropout_fusion n_inner "
                 "masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv"))


def _falcon(r):
    """Return the config fields of a Falcon model. It has three layouts: 7B (a single key head), 40B
    (groups, two norms), and RW (ALiBi, a sequential block). All of them fuse queries, keys and
    values into a single array, in which each group of query heads comes with its key head."""
    grouped, heads = r["new_decoder_architecture"], r["num_attention_heads"]
    if grouped:
        refuse(r, parallel_attn=True)
    fields = {**_old(r, parallel_block="parallel_attn", activation="activation"),
              "kv_heads": (r["num_kv_heads"] or heads) if grouped else
              1 if r["multi_query"] else heads,
              "d_ff": r["ffn_hidden_size"] or 4 * r["hidden_size"],
              "parallel_norms": (r["num_ln_in_parallel_attn"] or 2) if grouped else 1,
              "biases": "qkv,out,mlp" if r["bias"] else ""}
    if not r["alibi"]:
        return {**fields, **rope(r)}
    # With any other value, transformers 4 adds ALiBi twice.
    refuse(r, _attn_implementation=(None, "sdpa"), output_attentions=(None, False))
    return {**fields, "positions": "alibi16"}


GPT["falcon"] = Family(
    _falcon, _bloom_arrays,
    {**OLD, "max_position_embeddings": 2048, "rope_theta": 10000.0, "num_kv_heads": None,
     "num_ln_in_parallel_attn": None, "alibi": False, "new_decoder_architecture": False,
     "multi_query": True, "parallel_attn": True, "bias": False, "ffn_hidden_size": None,
     "activation": "gelu"}, "transformer.", INV_FREQ, aliases={"n_embed": "hidden_size"},
    # The keys in the second row are neutral if the model uses ALiBi.
    neutral=keys("""multi_query num_kv_heads num_ln_in_parallel_attn ff_factor
                    apply_residual_connection_post_layernorm rope_theta rope_scaling"""))


def _starcoder2(r):
    refuse(r, norm_type="layer_norm", mlp_type="default")
    bias = r["use_bias"]
    return {**_old(r, "norm_epsilon", kv_heads="num_key_value_heads", d_ff="intermediate_size",
                   activation="hidden_act"), **rope(r), **window(r),
            "head_dim": r.get("head_dim") or 0, **biased(qkv=bias, out=bias, mlp=bias)}


GPT["starcoder2"] = Family(
    _starcoder2, {"model.embed_tokens": "embed", "model.norm": "norm", **HEADS} | under(
        "model.layers.{l}.", attention("self_attn.{}_proj"), mlp("mlp.c_fc", "mlp.c_proj"),
        LATER_NORMS),
    dict(num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096,
         norm_epsilon=1e-5, rope_theta=1e4, use_bias=True, sliding_window=None,
         tie_word_embeddings=True), "model.", INV_FREQ, shared=("head_dim",),
    neutral=keys("""activation_function attention_softmax_in_fp32 embedding_dropout
                    layer_norm_epsilon residual_dropout scale_attention_softmax_in_fp32
                    scale_attn_weights"""))
