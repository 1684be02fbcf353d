"""The families of published decoders: how to translate their config.json, and how their arrays are
named.

If published/transformer.py has all the parts of a new family, just write a `Family`. `fields`
translates config.json into fields of published.transformer.Config. `arrays` maps published modules
to our weights (see arrays_of_folder.py). `defaults` come from the family's class in transformers,
for keys that a config.json may omit (all but sizes). Sharding follows from the weight table.
LLaMA's relatives are here, GPT-2's in gpt.py, encoder-decoders in encoder_decoders.py.
"""

import dataclasses
import json
from typing import Any, Callable, Iterable

import numpy as np

from published.arrays_of_folder import Change
from published.encoder_decoders import PAIRS
from published.encoders import ENCODERS
from published.family import (
    INV_FREQ,
    Families,
    Family,
    attention,
    biased,
    keys,
    neighbours,
    neighbours_apart,
    under,
)
from published.gpt import GPT
from published.positions import mscale
from published.record import (
    MOST,
    Fields,
    Record,
    an_id,
    as_older,
    count,
    decoder_head,
    factor,
    named,
    of_layers,
    refuse,
    rope,
    sizes,
    window,
    with_usual_names,
    wrong,
)
from zigzag.core.errors import ConfigError, did_you_mean, one_line
from zigzag.parallel.network import ComputeOptions, Network, network_of
from zigzag.parallel.rotary import parse_scaling

FAMILIES: Families = {**GPT, **PAIRS, **ENCODERS}


def family_of(record: Fields, families: Families = FAMILIES,
              others: Iterable[str] = ()) -> Family:
    """Look up a published config.json's family. `others` are model_types of other networks."""
    kind = record["model_type"]
    if kind not in families:
        known = sorted({*families, *others})
        raise ConfigError(f"model_type {kind!r:.80}: expected one of {', '.join(known)}"
                          + did_you_mean(kind[:80], known))
    return families[kind]


def fields_of(record: Fields, families: Families = FAMILIES, at: str = "") -> Fields:
    """Translate a published config.json, or its part `at`, into fields of
    published.transformer.Config. Reject unread keys that may matter."""
    family, kind = family_of(record, families), record["model_type"]
    try:
        fields, r = read_record(record, family, at)
        r.refuse_unread(family.neutral)
    except ConfigError:
        raise
    except KeyError as e:
        raise ConfigError(f"config.json of model_type {kind} lacks {e}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as e:
        raise ConfigError(f"config.json of model_type {kind}: a value has the wrong type "
                          f"({one_line(e)})") from None
    # Only new models need the router losses; fine-tuned models don't.
    return {"embed_scale": 1.0, "balance": 0.0, "router_z": 0.0,
            "published": json.dumps(r.given, sort_keys=True), **fields}


def read_record(record: Fields, family: Family, at: str = "") -> tuple[Fields, Record]:
    """Return (fields, Record) for a config.json. The Record tracks which keys were read."""
    record = as_older(with_usual_names(record, family.aliases), family.shared)
    r = Record(record, family.defaults, family.shared, at)
    return family.fields(r), r


def record_of(c: Any) -> Record:
    """Return the config.json that a config came from, with defaults for missing keys."""
    record = json.loads(c.published)
    return Record(record, family_of(record, families_of(network_of(c))).defaults)


def token_id(c: Any, name: str) -> int | None:
    """Look up a published model's special id, for example eos_token_id; None if it has none. If the
    model has several towers, look in its text_config."""
    record = json.loads(c.published or "{}")
    record = record.get("text_config") or record
    family = FAMILIES.get(record.get("model_type"))     # None: a network with its own families
    i = {**(family.defaults if family else {}), **record}.get(name)
    if i is not None and type(i) is not int:
        raise wrong(name, i, ": expected an id")
    return i


def start_id(c: Any) -> int:
    """Return the id that begins an encoder-decoder's text. In T5 this is the padding id."""
    return first_id(c, "decoder_start_token_id", "bos_token_id", "pad_token_id", default=0)


def first_id(c: Any, *names: str, default: int | None = None) -> int:
    """Return the first of these special ids that a published model has."""
    ids = (token_id(c, name) for name in names)
    found = next((i for i in ids if i is not None), default)
    return an_id(names[0], found, c.vocab_size or MOST)


def special_ids(c: Any, tokenizer: Any) -> tuple[int, int, int]:
    """Return a published model's (start id, end id, padding id). The start id begins an
    encoder-decoder's text."""
    end = token_id(c, "eos_token_id")
    return (start_id(c), tokenizer.ends[0] if end is None else end,
            token_id(c, "pad_token_id") or 0)


def whole_context(c: Any) -> Any:
    """Return a fine-tuned run's config, with its published model's seq_len if that's longer. The
    run may have trained on shorter rows."""
    context = fields_of(json.loads(c.published), families_of(network_of(c)))["seq_len"]
    return dataclasses.replace(c, seq_len=max(c.seq_len, context))


# Options for training and execution, and options that the plain decoder shares with the general
# network.
OF_TRAINING = {"dropout", "balance", "router_z",
               *(f.name for f in dataclasses.fields(ComputeOptions))}
PLAIN_OPTIONS = OF_TRAINING | set(keys("""layers d_model heads kv_heads head_dim d_ff vocab_size
    seq_len tied norm_eps rope_theta rope_scaling embed_scale experts experts_per_token"""))


def as_llama(c: Any) -> tuple[Any, Callable]:
    """Express our own model as one that transformers supports: a LLaMA or, with experts, a Mixtral.
    Return the config, and a function that converts our weights. folders.save_hf rejects options
    that these models lack."""
    record = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=c.d_model,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, intermediate_size=c.d_ff, vocab_size=c.vocab_size,
        max_position_embeddings=c.seq_len, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
        hidden_act=getattr(c, "activation", "silu"), tie_word_embeddings=False,
        rope_scaling=json.loads(c.rope_scaling or "null"))
    if c.experts:
        record |= dict(model_type="mixtral", architectures=["MixtralForCausalLM"],
                       num_local_experts=c.experts, num_experts_per_tok=c.experts_per_token,
                       sliding_window=getattr(c, "window", 0) or None)
    scaling = c.rope_scaling and json.dumps(parse_scaling(c.rope_scaling), sort_keys=True)
    config = dataclasses.replace(c, tied=False, embed_scale=1.0, rope_scaling=scaling,
                                 published=json.dumps(record))

    def weights(params):        # scale the embedding by its factor, and separate the head
        scale = c.embed_scale or c.d_model**0.5
        return {"head": params["embed"].T, **params, "embed": params["embed"] * scale}

    return config, weights


# -------------------------------------------------------------------------------------------
# LLaMA and its relatives

def _modern(r, **of_rope):
    """Return the fields that most newer families have."""
    return {**sizes(r, d_ff="intermediate_size", norm_eps="rms_norm_eps", activation="hidden_act",
                    tied="tie_word_embeddings"), **decoder_head(r), **rope(r, **of_rope),
            "kv_heads": r.get("num_key_value_heads") or r["num_attention_heads"],
            "head_dim": r.of_class("head_dim") or 0}


MODERN = dict(num_key_value_heads=None, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0,
              max_position_embeddings=2048, tie_word_embeddings=False)
LAYER = "model.layers.{l}."
ENDS = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head = embed",
        "score": "classifier"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
ATTENTION = attention("self_attn.{}_proj")
MLP = {"mlp.gate_proj": "w_gate", "mlp.up_proj": "w_up", "mlp.down_proj": "w_down"}
LLAMA = ENDS | under(LAYER, NORMS, ATTENTION, MLP)
NORMED = LLAMA | under(LAYER, {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"})


HEAD_DIM = ("head_dim",)
WITH_WINDOW = (*HEAD_DIM, "use_sliding_window")


def _relative(fields, defaults, arrays=LLAMA, shared=HEAD_DIM, ignored=INV_FREQ, **more):
    """Return a relative of LLaMA. `defaults` lists only values that differ from MODERN."""
    return Family(fields, arrays, {**MODERN, **defaults}, "model.", ignored, shared=shared, **more)


def _llama(r):
    refuse(r, rope_interleaved=False)
    bias = r["attention_bias"]
    return {**_modern(r), **biased(qkv=bias, out=bias, mlp=r.get("mlp_bias"))}


# Keys about windows, which do nothing in a model without a window.
NO_WINDOW = keys("sliding_window use_sliding_window layer_types max_window_layers")


def _qwen_window(r):
    refuse(r, use_mrope=False)
    if not r["use_sliding_window"]:
        return {}       # no matter what else the file says about windows
    return _window_unless(r, lambda i: i < r["max_window_layers"])


def _window_unless(r, is_full):
    """Read the fields of a window. layer_types says which layers have it. Without layer_types, a
    layer has it unless is_full(number) is true."""
    layers, known = r["num_hidden_layers"], ("full_attention", "sliding_attention")
    kinds = r["layer_types"] or [known[not is_full(i)] for i in range(layers)]
    return window(r, of_layers("layer_types", kinds, known, layers))


FAMILIES["llama"] = _relative(
    _llama, {"attention_bias": False, "mlp_bias": False, "head_dim": None},
    neutral=keys("pretraining_tp is_llama_config"))
FAMILIES["mistral"] = _relative(
    lambda r: {**_modern(r), **window(r)},
    {"num_key_value_heads": 8, "max_position_embeddings": 131072, "head_dim": None,
     "sliding_window": 4096})

QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768,
        "use_sliding_window": False, "sliding_window": 4096}
QWEN2 = {**QWEN, "max_window_layers": 28, "layer_types": None}
FAMILIES["qwen2"] = _relative(
    lambda r: {**_modern(r), **_qwen_window(r), "biases": "qkv"}, QWEN2,
    shared=WITH_WINDOW, neutral=NO_WINDOW)
FAMILIES["qwen3"] = _relative(
    lambda r: {**_llama(r), **_qwen_window(r), "qk_norm": True},
    {**QWEN2, "attention_bias": False, "head_dim": 128}, NORMED, shared=WITH_WINDOW,
    neutral=NO_WINDOW)


FUSED_MLP = {"mlp.gate_up_proj": "w_gate w_up", "mlp.down_proj": "w_down"}


def _phi3(r):
    refuse(r, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    return {**_modern(r, names={"su": "longrope", "yarn": "longrope"}), **window(r)}


FAMILIES["phi3"] = _relative(
    _phi3, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None,
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    ENDS | under(LAYER, NORMS, FUSED_MLP, {"self_attn.qkv_proj": "wq wk wv",
                                           "self_attn.o_proj": "wo"}),
    shared=(*HEAD_DIM, "partial_rotary_factor"))


def _gemma(r, **of_rope):
    """Return what Gemma 2 and 3 share: norms before and after attention and the MLP (`_one_more`
    adjusts their scales), and an embedding scaled by the root of its width (embed_scale 0)."""
    refuse(r, use_bidirectional_attention=False)
    bias = r["attention_bias"]
    return {**_modern(r, **of_rope), **named(r, activation="hidden_activation"),
            "norm_place": "sandwich", "embed_scale": 0.0,
            "attn_scale": r["query_pre_attn_scalar"] ** -0.5,
            "attn_softcap": _softcap(r, "attn_logit_softcapping"),
            "logit_softcap": _softcap(r, "final_logit_softcapping"), **biased(qkv=bias, out=bias)}


def _softcap(r, name):
    return 0.0 if r[name] is None else factor(r, name)


def _gemma2(r):
    if r["attn_logit_softcapping"] is not None:     # with sdpa, transformers skips it
        refuse(r, _attn_implementation=(None, "flash_attention_2", "eager"))
    return {**_gemma(r), **_window_unless(r, lambda i: i % 2)}


def _gemma3(r):
    """Return the fields of a Gemma 3. Its rope_scaling applies only to layers without a window."""
    refuse(r, attn_logit_softcapping=None)      # its class ignores it
    if r.get("rope_scaling"):
        r["rope_scaling"]["rope_type"]          # must be there: transformers 5 ignores `type` here
    fields, every = _gemma(r, known=("default", "linear")), r["sliding_window_pattern"]
    local = _window_unless(r, lambda i: (i + 1) % every == 0)
    theta = factor(r, "rope_local_base_freq")
    return {**fields, **local, "qk_norm": True, "local_theta": theta if local else 0.0}


def _one_more(c):
    """Return the changes to norms: Gemma's multiply by 1 + the array, and ours store that sum."""
    return {name: Change(offset=1.0) for name in (
        "norm", "attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm")}


GEMMA2 = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
          "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
          "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096,
          "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
GEMMA3 = {**GEMMA2, "max_position_embeddings": 131072, "rope_theta": 1e6,
          "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0,
          "final_logit_softcapping": None, "attn_logit_softcapping": None}
OUT_NORMS = {"post_attention_layernorm": "attn_out_norm",
             "post_feedforward_layernorm": "mlp_out_norm"}
GEMMA = NORMED | under(LAYER, OUT_NORMS, {"pre_feedforward_layernorm": "mlp_norm"})
FAMILIES["gemma2"] = _relative(_gemma2, GEMMA2, GEMMA, adjust=_one_more,
                               neutral=keys("hidden_act sliding_window_size"))
FAMILIES["gemma3_text"] = _relative(_gemma3, GEMMA3, GEMMA, adjust=_one_more,
                                    neutral=keys("hidden_act _sliding_window_pattern"))


FAMILIES["olmo2"] = _relative(
    lambda r: {**_llama(r), "norm_place": "out", "qk_norm": True, "qk_norm_wide": True},
    {"rms_norm_eps": 1e-5, "attention_bias": False}, NORMED | under(LAYER, OUT_NORMS))


FAMILIES["granite"] = _relative(
    lambda r: {**_llama(r), "embed_scale": factor(r, "embedding_multiplier"),
               "attn_scale": factor(r, "attention_multiplier"),
               "residual_scale": float(r["residual_multiplier"]),
               "head_scale": 1 / factor(r, "logits_scaling")},
    {"attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0,
     "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0})


def _smollm3(r):
    """Return the fields of a SmolLM3. A layer has rotary positions if its entry in no_rope_layers
    is 1. Without layer_types, the layers without rotary positions have the window."""
    fields, every = _llama(r), r["no_rope_layer_interval"]
    turned = r["no_rope_layers"]
    if turned is None:
        turned = [int((i + 1) % every != 0) for i in range(fields["layers"])]
    of_layers("no_rope_layers", turned, (0, 1), fields["layers"])
    if "sliding_attention" in (r["layer_types"] or ()):     # only eager attention applies it
        refuse(r, use_sliding_window=True)
    return {**fields, **_window_unless(r, lambda i: turned[i]),
            "rotary_layers": "" if all(turned) else "".join("nr"[turns] for turns in turned)}


FAMILIES["smollm3"] = _relative(
    _smollm3,
    {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
     "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
     "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None,
     "attention_bias": False, "mlp_bias": False}, shared=WITH_WINDOW,
    neutral=keys("pretraining_tp max_window_layers"))


# -------------------------------------------------------------------------------------------
# Experts

def _routed(prefix, gate="gate_proj", up="up_proj", down="down_proj"):
    return {f"{prefix}gate.weight": "-> router", f"{prefix}experts.{{e}}.{gate}": "e_gate",
            f"{prefix}experts.{{e}}.{up}": "e_up", f"{prefix}experts.{{e}}.{down}": "e_down"}


FAMILIES["mixtral"] = _relative(
    lambda r: {**_modern(r), **window(r), **named(r, experts="num_local_experts",
                                                  experts_per_token="num_experts_per_tok")},
    {"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
     "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8,
     "num_experts_per_tok": 2},
    LLAMA | under(LAYER, _routed("block_sparse_moe.", "w1", "w3", "w2")),
    aliases={"num_experts": "num_local_experts"}, older={".block_sparse_moe.": ".mlp."},
    neutral=keys("router_jitter_noise"))


ROUTED = dict(experts_per_token="num_experts_per_tok", router_norm="norm_topk_prob",
              expert_d_ff="moe_intermediate_size")


def _qwen3_moe(r):
    refuse(r, qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)
    fields = _llama(r)
    return {**fields, **window(r), **named(r, experts="num_experts", **ROUTED), "qk_norm": True,
            **_layers_with_experts(r, fields["layers"])}


def _layers_with_experts(r, layers):
    """Return the fields that say which layers have experts: after some initial layers, the last of
    each group of layers."""
    dense, step = r["mlp_only_layers"] or [], count(r, "decoder_sparse_step")
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise wrong("mlp_only_layers", dense, ": expected a list of layers' numbers")
    routed = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    every = routed[1] - routed[0] if len(routed) > 1 else 1
    first = layers - len(routed) * every
    if not routed or first < 0 or routed != [*range(first + every - 1, layers, every)]:
        raise wrong("decoder_sparse_step", step, f" with mlp_only_layers {dense} and {layers} "
                    f"layers is not supported: after some initial layers without experts, every "
                    f"n-th layer must have experts, and so must the last")
    return {"dense_layers": first, "expert_every": every}


FAMILIES["qwen3_moe"] = _relative(
    _qwen3_moe,
    {**QWEN, "num_key_value_heads": 4, "attention_bias": False, "num_experts": 128,
     "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
     "mlp_only_layers": None, "decoder_sparse_step": 1}, NORMED | under(LAYER, _routed("mlp.")),
    aliases={"num_local_experts": "num_experts"}, shared=WITH_WINDOW, neutral=NO_WINDOW)


def _deepseek_v3(r):
    refuse(r, attention_bias=False, moe_layer_freq=1, scoring_func="sigmoid",
           topk_method="noaux_tc")
    if not isinstance(r["rope_interleave"], bool):      # _deepseek_v3_order reads it
        refuse(r, rope_interleave=True)
    turned = count(r, "qk_rope_head_dim")
    width = count(r, "qk_nope_head_dim") + turned
    refuse(r, head_dim=turned, qk_head_dim=width)       # transformers 5 writes these as well
    fields = _modern(r, width=turned)
    scaling = json.loads(fields["rope_scaling"] or "{}")
    scale = mscale(scaling.get("factor", 1), scaling.get("mscale_all_dim") or 0) ** 2
    return {**fields, "kv_heads": r["num_attention_heads"], "head_dim": width,
            "rotary_dim": turned, "q_rank": r["q_lora_rank"] or 0, "router": "sigmoid",
            "attn_scale": scale * width**-0.5, **named(
                r, **ROUTED, kv_rank="kv_lora_rank", v_head_dim="v_head_dim",
                experts="n_routed_experts", shared_experts="n_shared_experts",
                dense_layers="first_k_dense_replace", router_scale="routed_scaling_factor",
                expert_groups="n_group", groups_per_token="topk_group")}


def _deepseek_v3_arrays(c):
    queries = {"q_a_proj": "q_down", "q_a_layernorm": "q_down_norm", "q_b_proj": "wq"}
    latent = {"kv_a_proj_with_mqa": "kv_down k_rotary", "kv_a_layernorm": "kv_norm",
              "kv_b_proj.weight": "(H [Y | M]) R -> wk wv", "o_proj": "wo"}
    routed = _routed("mlp.") | {"mlp.gate.e_score_correction_bias": "-> router_bias"}
    shared = {name.replace("mlp.", "mlp.shared_experts."): ours for name, ours in MLP.items()}
    return (ENDS | under(LAYER, NORMS, under("self_attn.", latent, queries if c.q_rank else
                                             {"q_proj": "wq"}))
            | under("model.layers.{dense_layers}.", MLP)
            | under("model.layers.{layers}.", routed, shared))


def _deepseek_v3_order(c):
    """Return the changes to heads: published heads end with the rotated part, in adjacent pairs."""
    begin, turned = c.head_dim - c.rotary_dim, c.rotary_dim
    if not record_of(c)["rope_interleave"]:
        return {"wq": Change(np.roll(np.arange(c.head_dim), turned))}
    return {"wq": Change(neighbours(turned, c.head_dim, begin)),
            "k_rotary": Change(neighbours(turned, turned))}


# The folder has extra layers at the end, which predict later tokens. We ignore them.
FAMILIES["deepseek_v3"] = _relative(
    _deepseek_v3,
    {"num_key_value_heads": 128, "max_position_embeddings": 4096, "q_lora_rank": 1536,
     "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
     "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256,
     "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
     "first_k_dense_replace": 3, "norm_topk_prob": True, "rope_interleave": True,
     "attention_bias": False}, _deepseek_v3_arrays, adjust=_deepseek_v3_order,
    ignored={**INV_FREQ, r"(model\.)?layers\.{layers}\..*": ""},
    aliases={"num_local_experts": "n_routed_experts",
             "num_mtp_layers": "num_nextn_predict_layers"},
    neutral=keys("pretraining_tp num_nextn_predict_layers aux_loss_alpha ep_size seq_aux"))


# -------------------------------------------------------------------------------------------
# ChatGLM 2 and 3, and GLM 4

def _chatglm(r):
    refuse(r, rmsnorm=True, add_bias_linear=False, apply_residual_connection_post_layernorm=False,
           post_layer_norm=True, pre_seq_len=None, original_rope=True)
    if r["padded_vocab_size"] == 65024:     # rope_ratio means something different in ChatGLM 2
        refuse(r, rope_ratio=1)
    return {**sizes(r, layers="num_layers", seq_len="seq_length", vocab_size="padded_vocab_size",
                    head_dim="kv_channels", d_ff="ffn_hidden_size", norm_eps="layernorm_epsilon",
                    tied="tie_word_embeddings"), "rotary_dim": r["kv_channels"] // 2,
            "kv_heads": (r["multi_query_group_num"] if r["multi_query_attention"]
                         else r["num_attention_heads"]),
            "rope_theta": 10000.0 * (r["rope_ratio"] or 1), **biased(qkv=r["add_qkv_bias"])}


FAMILIES["chatglm"] = Family(
    _chatglm, under("transformer.", {
        "embedding.word_embeddings": "embed", "encoder.final_layernorm": "norm",
        "output_layer": "head = embed"}) | under(
        "transformer.encoder.layers.{l}.", NORMS,
        {"self_attention.query_key_value": "wq wk wv", "self_attention.dense": "wo",
         "mlp.dense_h_to_4h": "w_gate w_up", "mlp.dense_4h_to_h": "w_down"}),
    dict(kv_channels=128, seq_length=2048, layernorm_epsilon=1e-5, rmsnorm=True,
         apply_residual_connection_post_layernorm=False, post_layer_norm=True,
         add_bias_linear=False, add_qkv_bias=False, multi_query_attention=False,
         multi_query_group_num=1, tie_word_embeddings=False, rope_ratio=1),
    "transformer.", INV_FREQ, neighbours_apart, neutral=keys(
        "apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion "
        "fp32_residual_connection prefix_projection interleaved_qkv"))
FAMILIES["glm"] = _relative(
    lambda r: {**_modern(r), **biased(qkv=r["attention_bias"])},
    {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
     "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "attention_bias": True},
    ENDS | under(LAYER, NORMS, ATTENTION, FUSED_MLP),
    shared=(*HEAD_DIM, "partial_rotary_factor"), adjust=neighbours_apart)


# -------------------------------------------------------------------------------------------
# The plain decoder (model.py): a LLaMA, a Mistral without a window, or a Mixtral

# {option that the plain decoder lacks: the only value that a config.json may give it}
NEUTRAL = dict(activation="silu", biases="", rotary_dim=0, window=0, local_layers="")


def _plain_fields(r):
    found = FAMILIES[r.kind].fields(r)
    for name, neutral in NEUTRAL.items():
        if (value := found.pop(name, neutral)) != neutral:
            raise ConfigError(f"config.json: --{name} would be {value!r}, which the plain decoder "
                              f"lacks; published.load_hf finds the network that has it")
    return found


PLAIN = {kind: FAMILIES[kind]._replace(fields=_plain_fields)
         for kind in ("llama", "mistral", "mixtral")}


def families_of(network: Network) -> Families:
    """Return {model_type: Family} for the published models that a network can compute. model.py
    doesn't mention published models, so we list its decoder's families here."""
    return PLAIN if network.name == "decoder" else network.families


# {network name: the function that expresses its model as one that transformers supports}
TO_PUBLISHED = {"decoder": as_llama, "transformer": as_llama}
