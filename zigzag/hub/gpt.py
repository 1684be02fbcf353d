"""Published decoders: GPT-2 and its relatives, with LayerNorm and an MLP of two products.

family.py explains `Family`.
"""

import numpy as np

from zigzag.hub.family import (
    INV_FREQ,
    MASKS,
    Family,
    attention,
    biased,
    columns,
    head,
    keys,
    layer_norm,
    mlp,
    neighbours_apart,
    rows,
    under,
)
from zigzag.hub.published_config import (
    activation,
    decoder_head,
    refuse,
    refuse_other,
    rope,
    sizes,
    window,
    wrong,
)

GPT: dict[str, Family] = {}


def _old(r, norm_eps="layer_norm_epsilon", **names):
    return {**sizes(r, **names), **decoder_head(r), "norm": "layer", "norm_eps": r[norm_eps],
            "gated": False, "tied": bool(r["tie_word_embeddings"])}


OLD = dict(layer_norm_epsilon=1e-5, tie_word_embeddings=True)
GPT2 = {**OLD, "n_positions": 1024, "n_inner": None, "activation_function": "gelu_new"}
GPT2_NAMES = {"hidden_size": "n_embd", "num_attention_heads": "n_head",
              "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"}


def _gpt2(r):
    refuse(r, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
           add_cross_attention=False)
    return {**_old(r, layers="n_layer", d_model="n_embd", heads="n_head", seq_len="n_positions"),
            "d_ff": r["n_inner"] or 4 * r["n_embd"], "positions": "learned",
            "position_rows": r["n_positions"], "biases": "qkv,out,mlp",
            "activation": activation(r["activation_function"])}


def _ends(c):
    positions = {"wpe.weight": "P D -> positions"} if c.positions == "learned" else {}
    return head(c) | under("transformer.", {"wte.weight": "V W -> embed"}, positions,
                           layer_norm("ln_f", "norm"))


def _gpt2_arrays(c):
    # (GPT-2 stores the transposes of torch's Linear weights.)
    return _ends(c) | under(
        "transformer.h.{l}.", layer_norm("ln_1", "attn_norm"), layer_norm("ln_2", "mlp_norm"),
        {"attn.c_attn.weight": "D (H N | K N | K M) -> wq wk wv",
         "attn.c_attn.bias": "(H N | K N | K M) -> wq_bias wk_bias wv_bias",
         "attn.c_proj.weight": "(H M) D -> wo", "attn.c_proj.bias": "D -> wo_bias",
         "mlp.c_fc.weight": "D F -> w_up", "mlp.c_fc.bias": "F -> w_up_bias",
         "mlp.c_proj.weight": "F D -> w_down", "mlp.c_proj.bias": "D -> w_down_bias"})


GPT["gpt2"] = Family(_gpt2, _gpt2_arrays, GPT2, "transformer.", MASKS, aliases=GPT2_NAMES,
                     neutral=keys("""reorder_and_upcast_attn summary_proj_to_labels n_ctx n_special
                                     predict_special_tokens"""))


def _gptj(r):
    return {**_old(r, layers="n_layer", d_model="n_embd", heads="n_head", seq_len="n_positions"),
            "d_ff": r["n_inner"] or 4 * r["n_embd"], "rotary_dim": r["rotary_dim"] or 0,
            "parallel_block": True, "biases": "mlp,head",
            "activation": activation(r["activation_function"])}


def _gptj_arrays(c):
    bias = {"lm_head.bias": "V -> head_bias"} if c.head == "tokens" else {}
    return _ends(c) | bias | under(
        "transformer.h.{l}.", layer_norm("ln_1", "attn_norm"),
        attention("attn.{}_proj", "q k v out", False, False), mlp("mlp.fc_in", "mlp.fc_out"))


def _is_sinusoids(c, array):
    """Whether the array is the sines and cosines of each position, which GPT-J's first folders
    have."""
    dim = c.rotary_dim or c.head_dim
    angle = np.arange(len(array))[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    return np.allclose(array, np.concatenate([np.sin(angle), np.cos(angle)], 1), atol=0.01)


GPT["gptj"] = Family(
    _gptj, _gptj_arrays, {**GPT2, "n_positions": 2048, "rotary_dim": 64,
                          "tie_word_embeddings": False},
    "transformer.", {**MASKS, r".*embed_positions": _is_sinusoids}, neighbours_apart, GPT2_NAMES,
    neutral=keys("n_ctx rotary scale_attn_weights summary_proj_to_labels"))


def _gpt_neo(r):
    fields = _old(r, layers="num_layers", heads="num_heads")
    types, names = r["attention_types"], {"local": "sliding_attention", "global": "full_attention"}
    if sum(len(kinds) * times for kinds, times in types) != r["num_layers"]:
        raise wrong("attention_types", types, f" are not for num_layers {r['num_layers']!r:.80}")
    kinds = [kind for kinds, times in types for _ in range(times) for kind in kinds]
    kinds = r.get("attention_layers", kinds)        # (this key wins if they differ)
    if not isinstance(kinds, list) or len(kinds) != r["num_layers"] or set(kinds) - names.keys():
        raise wrong("attention_layers", kinds, f": expected local or global for each of num_layers "
                    f"{r['num_layers']}")
    local = window(r.but(sliding_window=r["window_size"], num_hidden_layers=len(kinds)),
                   [names[kind] for kind in kinds])
    return {**fields, **local, "attn_scale": 1.0,
            "d_ff": r["intermediate_size"] or 4 * r["hidden_size"], "positions": "learned",
            "position_rows": r["max_position_embeddings"],
            "biases": "out,mlp", "activation": activation(r["activation_function"])}


def _gpt_neo_arrays(c):
    return _ends(c) | under(
        "transformer.h.{l}.", layer_norm("ln_1", "attn_norm"), layer_norm("ln_2", "mlp_norm"),
        attention("attn.attention.{}_proj", "q k v out", False), mlp("mlp.c_fc", "mlp.c_proj"))


GPT["gpt_neo"] = Family(
    _gpt_neo, _gpt_neo_arrays,
    {**OLD, "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 12]],
     "window_size": 256, "intermediate_size": None, "activation_function": "gelu_new"},
    "transformer.", MASKS, aliases={"num_attention_heads": "num_heads",
                                    "num_hidden_layers": "num_layers"},
    neutral=keys("embed_dropout resid_dropout summary_proj_to_labels"))


def _gpt_neox(r):
    bias, parallel = r["attention_bias"], bool(r["use_parallel_residual"])
    # (transformers 4 writes these two under both names.)
    refuse(r, rope_theta=r["rotary_emb_base"], partial_rotary_factor=r["rotary_pct"])
    return {**_old(r, "layer_norm_eps"), **rope(r, "rotary_emb_base", "rotary_pct"),
        "d_ff": r["intermediate_size"], "parallel_block": parallel,
        "parallel_norms": 2 if parallel else 1,
        "activation": activation(r["hidden_act"]), **biased(qkv=bias, out=bias, mlp=True)}


def _gpt_neox_arrays(c):
    bias = "qkv" in c.biases
    return {"gpt_neox.embed_in.weight": "V W -> embed",
            **head(c, "embed_out.weight"),
            **under("gpt_neox.", layer_norm("final_layer_norm", "norm"))} | under(
        "gpt_neox.layers.{l}.", layer_norm("input_layernorm", "attn_norm"),
        layer_norm("post_attention_layernorm", "mlp_norm"),
        columns("attention.query_key_value", "K [g N | N | M]", "wq wk wv", bias),
        rows("attention.dense", "H M", "wo", bias),
        mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))


GPT["gpt_neox"] = Family(
    _gpt_neox, _gpt_neox_arrays,
    dict(layer_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=2048,
         rotary_pct=0.25, rotary_emb_base=10000, attention_bias=True, use_parallel_residual=True,
         hidden_act="gelu"), "gpt_neox.", {**INV_FREQ, **MASKS},
    older={"embed_out.weight": "lm_head.weight"}, shared=("rotary_pct",))


def _opt(r):
    refuse(r, enable_bias=True, layer_norm_elementwise_affine=True,
           _remove_final_layer_norm=False)
    width = r["word_embed_proj_dim"] or r["hidden_size"]
    of_head = decoder_head(r)
    if of_head and width != r["hidden_size"]:
        refuse(r, word_embed_proj_dim=r["hidden_size"])
    return {**sizes(r), **of_head, "norm": "layer", "norm_eps": 1e-5, "gated": False,
            "d_ff": r["ffn_dim"], "tied": bool(r["tie_word_embeddings"]), "positions": "learned",
            "position_offset": 2, "position_rows": r["max_position_embeddings"] + 2, "pad_id": -2,
            "biases": "qkv,out,mlp", "embed_dim": width,
            "norm_place": "pre" if r["do_layer_norm_before"] else "post",
            "activation": activation(r["activation_function"])}


def _opt_arrays(c):
    ends = {"embed_tokens.weight": "V W -> embed", "embed_positions.weight": "P D -> positions"}
    if c.embed_dim not in (0, c.d_model):
        ends |= {"project_in.weight": "D W -> project_in",
                 "project_out.weight": "W D -> project_out"}
    if c.norm_place == "pre":
        ends |= layer_norm("final_layer_norm", "norm")
    return head(c) | under("model.decoder.", ends) | under(
        "model.decoder.layers.{l}.", layer_norm("self_attn_layer_norm", "attn_norm"),
        layer_norm("final_layer_norm", "mlp_norm"),
        attention("self_attn.{}_proj", "q k v out"), mlp("fc1", "fc2"))


GPT["opt"] = Family(
    _opt, _opt_arrays,
    dict(max_position_embeddings=2048, word_embed_proj_dim=None, do_layer_norm_before=True,
         activation_function="relu", tie_word_embeddings=True, enable_bias=True,
         layer_norm_elementwise_affine=True, _remove_final_layer_norm=False), "model.")


def _bloom(r):
    refuse(r, apply_residual_connection_post_layernorm=False)
    if r.get("slow_but_exact"):     # (adds the biases of a product once for each part)
        refuse(r, pretraining_tp=1)
    length = r.get("max_position_embeddings") or r.get("seq_length") or 2048
    return {**_old(r.but(max_position_embeddings=length), layers="n_layer", heads="n_head"),
            "d_ff": 4 * r["hidden_size"], "positions": "alibi", "embed_norm": True,
            "biases": "qkv,out,mlp", "activation": "gelu_tanh"}


def _bloom_arrays(c):
    ends = {"word_embeddings.weight": "V W -> embed", **layer_norm("ln_f", "norm")}
    if c.embed_norm:
        ends |= layer_norm("word_embeddings_layernorm", "embed_norm", "W")
    bias = "qkv" in c.biases
    norms = layer_norm("input_layernorm", "attn_norm")
    if c.parallel_norms == 2:
        norms = layer_norm("ln_attn", "attn_norm") | layer_norm("ln_mlp", "mlp_norm")
    elif not c.parallel_block:
        norms |= layer_norm("post_attention_layernorm", "mlp_norm")
    return head(c) | under("transformer.", ends) | under(
        "transformer.h.{l}.", norms,
        columns("self_attention.query_key_value", "K [g N | N | M]", "wq wk wv", bias),
        rows("self_attention.dense", "H M", "wo", bias),
        mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias))


GPT["bloom"] = Family(
    _bloom, _bloom_arrays, {**OLD, "apply_residual_connection_post_layernorm": False},
    "transformer.", aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head",
                             "num_hidden_layers": "n_layer"},
    neutral=keys("pretraining_tp attention_softmax_in_fp32 bias_dropout_fusion n_inner "
                 "masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv"))


def _falcon(r):
    """The fields of a Falcon. There are three layouts: 7B (one key head), 40B (groups, two norms),
    and RW (ALiBi, a sequential block). The fused array is the same in all: groups of query heads,
    each with its key head."""
    grouped, heads = r["new_decoder_architecture"], r["num_attention_heads"]
    if grouped:
        refuse(r, parallel_attn=True)
    fields = {**_old(r), "kv_heads": (r["num_kv_heads"] or heads) if grouped else
              1 if r["multi_query"] else heads,
              "d_ff": r["ffn_hidden_size"] or 4 * r["hidden_size"],
              "parallel_block": bool(r["parallel_attn"]),
              "parallel_norms": (r["num_ln_in_parallel_attn"] or 2) if grouped else 1,
              "activation": activation(r["activation"]),
              "biases": "qkv,out,mlp" if r["bias"] else ""}
    if not r["alibi"]:
        return {**fields, **rope(r)}
    # (With the others, transformers 4 adds ALiBi twice.)
    refuse_other(r, "_attn_implementation", None, "sdpa")
    refuse_other(r, "output_attentions", None, False)
    return {**fields, "positions": "alibi16"}


GPT["falcon"] = Family(
    _falcon, _bloom_arrays,
    {**OLD, "max_position_embeddings": 2048, "rope_theta": 10000.0, "num_kv_heads": None,
     "num_ln_in_parallel_attn": None, "alibi": False, "new_decoder_architecture": False,
     "multi_query": True, "parallel_attn": True, "bias": False, "ffn_hidden_size": None,
     "activation": "gelu"}, "transformer.", INV_FREQ, aliases={"n_embed": "hidden_size"},
    # (The second row: keys that are neutral if positions are ALiBi's.)
    neutral=keys("""multi_query num_kv_heads num_ln_in_parallel_attn ff_factor
                    apply_residual_connection_post_layernorm
                    rope_theta rope_scaling rope_parameters"""))


def _starcoder2(r):
    refuse(r, norm_type="layer_norm", mlp_type="default")
    bias = r["use_bias"]
    return {**sizes(r), **decoder_head(r), **rope(r), **window(r),
            "kv_heads": r["num_key_value_heads"], "head_dim": r.get("head_dim") or 0,
            "d_ff": r["intermediate_size"], "norm": "layer", "norm_eps": r["norm_epsilon"],
            "gated": False,
            "activation": activation(r["hidden_act"]), "tied": bool(r["tie_word_embeddings"]),
            **biased(qkv=bias, out=bias, mlp=bias)}


def _starcoder2_arrays(c):
    bias = "qkv" in c.biases
    return {"model.embed_tokens.weight": "V W -> embed", **head(c),
            **layer_norm("model.norm", "norm")} | under(
        "model.layers.{l}.", layer_norm("input_layernorm", "attn_norm"),
        layer_norm("post_attention_layernorm", "mlp_norm"),
        attention("self_attn.{}_proj", bias=bias, out_bias=bias),
        mlp("mlp.c_fc", "mlp.c_proj", bias))


GPT["starcoder2"] = Family(_starcoder2, _starcoder2_arrays, dict(
    num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096,
    norm_epsilon=1e-5, rope_theta=1e4, use_bias=True, sliding_window=None,
    tie_word_embeddings=True), "model.", INV_FREQ, shared=("head_dim",),
    neutral=keys("""activation_function attention_softmax_in_fp32 embedding_dropout
                    layer_norm_epsilon residual_dropout scale_attention_softmax_in_fp32
                    scale_attn_weights"""))
