"""The families of published decoders: translations of their config.json, and patterns of their
arrays.

To add a family whose parts networks/transformer.py has, write a `Family`: `fields` translates its
config.json to fields of networks.transformer.Config, `arrays` gives the weights in each published
array (published.py explains the patterns), and `defaults` are its class's in transformers, for keys
that a config.json leaves out (all but sizes). Nothing else: sharding follows from the rule. Here
are LLaMA's relatives; gpt.py has GPT-2's, pairs.py encoder-decoders.
"""

import dataclasses
import json
from typing import Any, Iterable, Mapping

import numpy as np

from zigzag.core.errors import ConfigError, did_you_mean, one_line
from zigzag.hub.encoders import ENCODERS
from zigzag.hub.family import (
    INV_FREQ,
    Family,
    attention,
    biased,
    columns,
    head,
    keys,
    mlp,
    neighbours,
    neighbours_apart,
    rows,
    under,
)
from zigzag.hub.gpt import GPT
from zigzag.hub.pairs import PAIRS
from zigzag.hub.published import Change, one_stack
from zigzag.hub.published_config import (
    Fields,
    Record,
    activation,
    as_older,
    count,
    decoder_head,
    factor,
    refuse,
    refuse_other,
    rope,
    sizes,
    window,
    with_usual_names,
    wrong,
)
from zigzag.hub.reference import llama_difference
from zigzag.weights.positions import mscale, parse_scaling

FAMILIES: dict[str, Family] = {**GPT, **PAIRS, **ENCODERS}


def family_of(record: Fields, families: Mapping[str, Family] = FAMILIES,
              others: Iterable[str] = ()) -> Family:
    """The family of a published config.json. (`others` are model_types of other networks.)"""
    kind = record["model_type"]
    if kind not in families:
        known = sorted({*families, *others})
        raise ConfigError(f"model_type {kind!r:.80}: expected one of {', '.join(known)}"
                          + did_you_mean(kind[:80], known))
    return families[kind]


def fields_of(record: Fields, families: dict[str, Family] = FAMILIES, at: str = "") -> Fields:
    """Fields of networks.transformer.Config, from a published config.json or from its part `at`.
    Keys that are not read and may matter are refused."""
    family, kind = family_of(record, families), record["model_type"]
    record = with_usual_names(record, family.aliases)
    try:
        fields, r = read_record(record, family, at)
        r.refuse_unread(family.neutral)
        older = as_older(record, family.shared)
        published = older if older == record or _is_same(older, fields, family) else record
    except ConfigError:
        raise
    except KeyError as e:
        raise ConfigError(f"config.json of model_type {kind} lacks {e}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as e:
        raise ConfigError(f"config.json of model_type {kind}: a value is of a wrong kind "
                          f"({one_line(e)})") from None
    # (Fine-tuning needs no losses for routers: those are for new models.)
    return {"embed_scale": 1.0, "balance": 0.0, "router_z": 0.0,
            "published": json.dumps(published, sort_keys=True), **fields}


def read_record(record: Fields, family: Family, at: str = "") -> tuple[Fields, Record]:
    """(fields, Record) of a config.json; the Record knows which keys were read."""
    r = Record(record, family.defaults, family.shared, at)
    return family.fields(r), r


def _is_same(record, fields, family):
    """Whether another record leads to the same fields."""
    try:
        other, _ = read_record(record, family)
    except ConfigError:
        return False
    return {**other, "published": ""} == {**fields, "published": ""}


def token_ids(c: Any) -> dict[str, Any]:
    """{name: id} of the special ids of a published model: eos_token_id, pad_token_id and others."""
    record = json.loads(c.published or "{}")
    family = FAMILIES.get(record.get("model_type"))     # (None: a network of its own)
    defaults = family.defaults if family else {}
    ids = {name: i for name, i in {**defaults, **record}.items() if name.endswith("_token_id")}
    for name, i in ids.items():
        if i is not None and type(i) is not int:
            raise wrong(name, i, ": expected an id")
    return ids


def start_id(c: Any) -> int:
    """The id with which an encoder-decoder begins a text: in T5, its padding."""
    ids = token_ids(c)
    start = ids.get("decoder_start_token_id")
    start = start if start is not None else ids.get("pad_token_id") or 0
    if c.vocab_size and not 0 <= start < c.vocab_size:
        raise wrong("decoder_start_token_id", start, f": expected an id below the vocab_size "
                    f"{c.vocab_size}")
    return start


def special_ids(c: Any, tokenizer: Any) -> tuple[int, int, int]:
    """(the id that begins a text of an encoder-decoder, the id that ends it, the id of padding)."""
    if not c.published:
        return tokenizer.ends[0], tokenizer.ends[0], 0
    ids = token_ids(c)
    end = ids.get("eos_token_id")
    return start_id(c), tokenizer.ends[0] if end is None else end, ids.get("pad_token_id") or 0


# The options that the config.json of a LLaMA or a Mixtral can express. All other options of a
# network must have their defaults, except options of training and computing.
NAMED = {"layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size", "seq_len",
         "tied", "norm_eps", "rope_theta", "rope_scaling", "embed_scale", "activation", "experts",
         "experts_per_token"}
OF_TRAINING = {"dropout", "balance", "router_z", "dtype", "remat", "kernel", "microbatches",
               "schedule", "chunks", "overlap", "sum_dtype", "accuracy", "lora_rank",
               "published"}


# The options that the plain decoder has in common with the general network.
PLAIN_OPTIONS = (NAMED | OF_TRAINING) - {"activation"}


def as_llama(params: Any, c: Any, has_window: bool = False) -> tuple[Any, Any]:
    """(params, configuration) of a model of our own, as a model that transformers knows: a LLaMA,
    or, with experts, a Mixtral. `has_window` says that the configuration has the option `window`,
    which a Mixtral's layers have too."""
    kind, window = ("mixtral" if c.experts else "llama"), (c.window if has_window else 0)
    record = dict(
        model_type=kind, architectures=["LlamaForCausalLM"], hidden_size=c.d_model,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, intermediate_size=c.d_ff, vocab_size=c.vocab_size,
        max_position_embeddings=c.seq_len, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
        hidden_act=getattr(c, "activation", "silu"), tie_word_embeddings=False,
        rope_scaling=json.loads(c.rope_scaling or "null"))
    if c.experts:
        record |= dict(architectures=["MixtralForCausalLM"], num_local_experts=c.experts,
                       num_experts_per_tok=c.experts_per_token, sliding_window=window or None)
    known = NAMED | OF_TRAINING | ({"window"} if c.experts and has_window else set())
    other = [f.name for f in dataclasses.fields(c)
             if f.name not in known and getattr(c, f.name) != f.default]
    mine = dataclasses.replace(c, tied=False, embed_scale=1.0, balance=0.0, router_z=0.0,
                               published=json.dumps(record))
    there = {} if other else fields_of(record)
    if there and c.rope_scaling and (
            parse_scaling(c.rope_scaling) == parse_scaling(there["rope_scaling"])):
        there["rope_scaling"] = c.rope_scaling
    other += [name for name, value in there.items() if name != "published"
              and hasattr(mine, name) and value != getattr(mine, name)
              and (value or name != "head_dim")]
    if other:
        raise ConfigError(f"a model of our own is saved as a LLaMA or Mixtral, and neither has "
                          f"--{other[0]} {getattr(c, other[0])}")
    # The embedding is saved with its factor, and the head separately.
    scale = c.embed_scale or c.d_model**0.5
    return {"head": params["embed"].T, **params, "embed": params["embed"] * scale}, mine


# -------------------------------------------------------------------------------------------
# LLaMA and its relatives

def _modern(r, **of_rope):
    """The fields that most newer families have."""
    return {**sizes(r), **decoder_head(r),
            "kv_heads": r.get("num_key_value_heads") or r["num_attention_heads"],
            "head_dim": (r.get("head_dim") or 0) if "head_dim" in r.shared else 0,
            "d_ff": r["intermediate_size"], "norm_eps": r["rms_norm_eps"],
            "tied": bool(r["tie_word_embeddings"]), "activation": activation(r["hidden_act"]),
            **rope(r, **of_rope)}


MODERN = dict(num_key_value_heads=None, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0,
              max_position_embeddings=2048, tie_word_embeddings=False)


HEAD_DIM = ("head_dim",)


def _relative(fields, arrays, defaults, shared=HEAD_DIM, ignored=INV_FREQ, **more):
    """A family of LLaMA's relatives. `defaults` are those that differ from MODERN."""
    return Family(fields, arrays, {**MODERN, **defaults}, "model.", ignored, shared=shared, **more)


WITH_WINDOW = (*HEAD_DIM, "use_sliding_window")

LAYER = "model.layers.{l}."
ENDS = {"model.embed_tokens.weight": "V W -> embed", "model.norm.weight": "D -> norm"}
ATTENTION = attention("self_attn.{}_proj", bias=False, out_bias=False)
QK_NORMS = {"self_attn.q_norm.weight": "N -> q_norm", "self_attn.k_norm.weight": "N -> k_norm"}
NORMS = {"input_layernorm.weight": "D -> attn_norm",
         "post_attention_layernorm.weight": "D -> mlp_norm"}


def _ends(c):
    return ENDS | head(c)


def _gated(bias=False):
    return {**columns("mlp.gate_proj", "F", "w_gate", bias), **mlp("mlp.up_proj", "mlp.down_proj",
                                                                   bias)}


MLP = _gated()


def _llama_arrays(c, norms=NORMS, qk_norms=QK_NORMS, of_mlp=None):
    """The arrays of a LLaMA, or of a relative that has other ones in these places."""
    has = c.biases.split(",")
    return _ends(c) | under(
        LAYER, norms, attention("self_attn.{}_proj", bias="qkv" in has, out_bias="out" in has),
        _gated("mlp" in has) if of_mlp is None else of_mlp, qk_norms if c.qk_norm else {})


def _llama(r):
    refuse(r, rope_interleaved=False)
    bias = r["attention_bias"]
    return {**_modern(r), **biased(qkv=bias, out=bias, mlp=r.get("mlp_bias"))}


# The keys about windows, which are ignored in a model without one.
NO_WINDOW = keys("sliding_window use_sliding_window layer_types max_window_layers")


def _qwen_window(r):
    refuse(r, use_mrope=False)
    if not r["use_sliding_window"]:
        return {}       # (whatever else the file says about it)
    return _window_unless(r, lambda i: i < r["max_window_layers"])


def _window_unless(r, is_full):
    """The fields of a window in all layers but those for which is_full(number), if layer_types
    does not say which."""
    kinds = ["full_attention" if is_full(i) else "sliding_attention"
             for i in range(r["num_hidden_layers"])]
    return window(r, r["layer_types"] or kinds)


FAMILIES["llama"] = _relative(
    _llama, _llama_arrays, {"attention_bias": False, "mlp_bias": False, "head_dim": None},
    neutral=keys("pretraining_tp is_llama_config"))
FAMILIES["mistral"] = _relative(
    lambda r: {**_modern(r), **window(r)}, _llama_arrays,
    {"num_key_value_heads": 8, "max_position_embeddings": 131072, "head_dim": None,
     "sliding_window": 4096})

QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768,
        "use_sliding_window": False, "sliding_window": 4096}
QWEN2 = {**QWEN, "max_window_layers": 28, "layer_types": None}
FAMILIES["qwen2"] = _relative(
    lambda r: {**_modern(r), **_qwen_window(r), "biases": "qkv"}, _llama_arrays, QWEN2,
    shared=WITH_WINDOW, neutral=NO_WINDOW)
FAMILIES["qwen3"] = _relative(
    lambda r: {**_llama(r), **_qwen_window(r), "qk_norm": True}, _llama_arrays,
    {**QWEN2, "attention_bias": False, "head_dim": 128}, shared=WITH_WINDOW,
    neutral=NO_WINDOW)


FUSED_MLP = {"mlp.gate_up_proj.weight": "(F | F) D -> w_gate w_up",
             "mlp.down_proj.weight": "D F -> w_down"}


def _phi3_arrays(c):
    return _ends(c) | under(LAYER, NORMS, columns(
        "self_attn.qkv_proj", "H N | K N | K M", "wq wk wv", False), rows(
        "self_attn.o_proj", "H M", "wo", False), FUSED_MLP)


def _phi3(r):
    refuse(r, attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1,
           interpolate_factor=1)
    return {**_modern(r, names={"su": "longrope", "yarn": "longrope"}), **window(r)}


FAMILIES["phi3"] = _relative(
    _phi3, _phi3_arrays,
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None,
     "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    shared=(*HEAD_DIM, "partial_rotary_factor"))


def _gemma(r, **of_rope):
    """Gemma 2 and 3: norms before and after attention and MLP (`_one_more` adjusts their scales),
    and an embedding scaled by the root of its width (embed_scale 0)."""
    refuse(r, use_bidirectional_attention=False)
    bias = r["attention_bias"]
    return {**_modern(r.but(hidden_act=r["hidden_activation"]), **of_rope),
            "norm_place": "sandwich", "embed_scale": 0.0,
            "attn_scale": r["query_pre_attn_scalar"] ** -0.5,
            "attn_softcap": _softcap(r, "attn_logit_softcapping"),
            "logit_softcap": _softcap(r, "final_logit_softcapping"), **biased(qkv=bias, out=bias)}


def _softcap(r, name):
    return 0.0 if r[name] is None else factor(r, name)


def _gemma2(r):
    if r["attn_logit_softcapping"] is not None:     # (by sdpa, transformers leaves it out)
        refuse_other(r, "_attn_implementation", None, "flash_attention_2", "eager")
    return {**_gemma(r), **_window_unless(r, lambda i: i % 2)}


def _gemma3(r):
    refuse(r, attn_logit_softcapping=None)      # (its class ignores it)
    every = r["sliding_window_pattern"]
    local = _window_unless(r, lambda i: (i + 1) % every == 0)
    rates = rope(r, "rope_local_base_freq", of_layers="sliding_attention")
    if rates["rope_scaling"]:
        raise ConfigError("config.json: rope_parameters.sliding_attention: only the rope_type "
                          "'default' is supported")
    return {**_gemma(r, of_layers="full_attention"), **local, "qk_norm": True,
            "local_theta": rates["rope_theta"] if local else 0.0}


GEMMA_NORMS = {"input_layernorm.weight": "D -> attn_norm",
               "post_attention_layernorm.weight": "D -> attn_out_norm",
               "pre_feedforward_layernorm.weight": "D -> mlp_norm",
               "post_feedforward_layernorm.weight": "D -> mlp_out_norm"}


def _gemma_arrays(c):
    return _llama_arrays(c) | under(LAYER, GEMMA_NORMS)


def _one_more(c):
    """The norms of Gemma multiply by 1 + the array. Ours store that sum."""
    return {name: Change(offset=1.0) for name in (
        "norm", "attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm")}


GEMMA2 = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
          "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
          "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096,
          "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
GEMMA3 = {**GEMMA2, "max_position_embeddings": 131072, "rope_theta": 1e6,
          "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0,
          "final_logit_softcapping": None, "attn_logit_softcapping": None}
FAMILIES["gemma2"] = _relative(_gemma2, _gemma_arrays, GEMMA2, adjust=_one_more,
                               neutral=keys("hidden_act sliding_window_size"))
FAMILIES["gemma3_text"] = _relative(_gemma3, _gemma_arrays, GEMMA3, adjust=_one_more,
                                    neutral=keys("hidden_act _sliding_window_pattern"))


OUT_NORMS = {"post_attention_layernorm.weight": "D -> attn_out_norm",
             "post_feedforward_layernorm.weight": "D -> mlp_out_norm"}
WIDE_NORMS = {"self_attn.q_norm.weight": "(H N) -> q_norm",
              "self_attn.k_norm.weight": "(K N) -> k_norm"}


def _olmo2_arrays(c):
    return _llama_arrays(c, OUT_NORMS, WIDE_NORMS)


FAMILIES["olmo2"] = _relative(
    lambda r: {**_llama(r), "norm_place": "out", "qk_norm": True, "qk_norm_wide": True},
    _olmo2_arrays, {"rms_norm_eps": 1e-5, "attention_bias": False})


def _granite(r):
    return {**_llama(r), "embed_scale": factor(r, "embedding_multiplier"),
            "attn_scale": factor(r, "attention_multiplier"),
            "residual_scale": float(r["residual_multiplier"]),
            "head_scale": 1 / factor(r, "logits_scaling")}


FAMILIES["granite"] = _relative(
    _granite, _llama_arrays,
    {"attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.0,
     "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0})


def _smollm3(r):
    """A layer has rotary positions if its entry in no_rope_layers is 1. If layer_types does not say
    which layers have the window, the others have it."""
    fields, every = _llama(r), r["no_rope_layer_interval"]
    turned = r["no_rope_layers"]
    if turned is None:
        turned = [int((i + 1) % every != 0) for i in range(fields["layers"])]
    if len(turned) != fields["layers"] or set(turned) - {0, 1}:
        raise wrong("no_rope_layers", turned, f": expected 0 or 1 for each of {fields['layers']} "
                    f"layers")
    if "sliding_attention" in (r["layer_types"] or ()):     # (only eager attention applies it)
        refuse(r, use_sliding_window=True)
    return {**fields, **_window_unless(r, lambda i: turned[i]),
            "rotary_layers": "" if all(turned) else "".join("nr"[turns] for turns in turned)}


FAMILIES["smollm3"] = _relative(
    _smollm3, _llama_arrays,
    {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
     "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
     "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None,
     "attention_bias": False, "mlp_bias": False}, shared=WITH_WINDOW,
    neutral=keys("pretraining_tp max_window_layers"))


# -------------------------------------------------------------------------------------------
# Experts

def _routed(prefix, gate="gate_proj", up="up_proj", down="down_proj"):
    return {f"{prefix}gate.weight": "E D -> router",
            f"{prefix}experts.{{e}}.{gate}.weight": "G D -> e_gate",
            f"{prefix}experts.{{e}}.{up}.weight": "G D -> e_up",
            f"{prefix}experts.{{e}}.{down}.weight": "D G -> e_down"}


def _fused(prefix):
    """The arrays of all experts, as in transformers 5."""
    return under(prefix, {"mlp.experts.gate_up_proj": "E (G | G) D -> e_gate e_up",
                          "mlp.experts.down_proj": "E D G -> e_down"})


def _mixtral_arrays(c):
    return _llama_arrays(c, of_mlp=_routed("block_sparse_moe.", "w1", "w3", "w2"))


FAMILIES["mixtral"] = _relative(
    lambda r: {**_modern(r), **window(r), "experts": count(r, "num_local_experts"),
               "experts_per_token": r["num_experts_per_tok"]}, _mixtral_arrays,
    {"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
     "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8,
     "num_experts_per_tok": 2},
    aliases={"num_experts": "num_local_experts"}, older={".block_sparse_moe.": ".mlp."},
    fused=_fused(LAYER), neutral=keys("router_jitter_noise"))


# -------------------------------------------------------------------------------------------
# The plain decoder (model.py), which is a LLaMA, a Mistral without window, or a Mixtral

# {option that the plain decoder lacks: the value that their config.json must have}
NEUTRAL = dict(activation="silu", biases="", rotary_dim=0, window=0, local_layers="")


def _plain_fields(family):
    def fields(r):
        found = family.fields(r)
        for name, neutral in NEUTRAL.items():
            if (value := found.pop(name, neutral)) != neutral:
                raise ConfigError(f"config.json: --{name} would be {value!r}, which the plain "
                                  f"decoder lacks; networks.load_hf finds the network that has it")
        return found

    return fields


def _plain_arrays(c):
    ends = {"model.embed_tokens.weight": "V D -> embed", "model.norm.weight": "D -> norm",
            "lm_head.weight": "V D = embed" if c.tied else "V D -> head"}
    layer = NORMS | ATTENTION | (_routed("block_sparse_moe.", "w1", "w3", "w2") if c.experts
                                 else MLP)
    return ends | under(LAYER, _plain_axes(layer))


def _plain_axes(arrays):
    """Patterns with the plain decoder's letters: one for N and M, and one for F and G."""
    return {name: pattern.replace("M", "N").replace("G", "F") for name, pattern in arrays.items()}


PLAIN = {kind: dataclasses.replace(FAMILIES[kind], fields=_plain_fields(FAMILIES[kind]),
                                   arrays=_plain_arrays, stacks=one_stack, differs=llama_difference,
                                   fused=_plain_axes(FAMILIES[kind].fused))
         for kind in ("llama", "mistral", "mixtral")}


# -------------------------------------------------------------------------------------------
# More experts

DENSE_LAYER, EXPERT_LAYER = "model.layers.{d}.", "model.layers.{m}."


def _qwen3_moe(r):
    dense = sorted(r["mlp_only_layers"] or [])
    if dense != list(range(len(dense))):
        raise wrong("mlp_only_layers", dense, " is not supported, only the first ones")
    refuse(r, decoder_sparse_step=1, qkv_bias=False, use_qk_norm=True,
           shared_expert_intermediate_size=0)
    return {**_llama(r), **window(r), "qk_norm": True, "experts": count(r, "num_experts"),
            "dense_layers": len(dense), "experts_per_token": r["num_experts_per_tok"],
            "router_norm": bool(r["norm_topk_prob"]),
            "expert_d_ff": r["moe_intermediate_size"]}


def _qwen3_moe_arrays(c):
    return _llama_arrays(c, of_mlp={}) | under(DENSE_LAYER, MLP) | under(
        EXPERT_LAYER, _routed("mlp."))


FAMILIES["qwen3_moe"] = _relative(
    _qwen3_moe, _qwen3_moe_arrays,
    {**QWEN, "num_key_value_heads": 4, "attention_bias": False, "num_experts": 128,
     "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
     "mlp_only_layers": None, "decoder_sparse_step": 1},
    aliases={"num_local_experts": "num_experts"}, shared=WITH_WINDOW, fused=_fused(EXPERT_LAYER),
    neutral=NO_WINDOW)


def _deepseek_v3(r):
    refuse(r, attention_bias=False, moe_layer_freq=1, scoring_func="sigmoid",
           topk_method="noaux_tc")
    if not isinstance(r["rope_interleave"], bool):      # (_deepseek_v3_order reads it)
        refuse(r, rope_interleave=True)
    turned = count(r, "qk_rope_head_dim")
    width = count(r, "qk_nope_head_dim") + turned
    refuse(r, head_dim=turned, qk_head_dim=width)       # (transformers 5 writes these too)
    fields = {**_modern(r.but(head_dim=turned)), "kv_heads": r["num_attention_heads"]}
    scaling = json.loads(fields["rope_scaling"] or "{}")
    scale = mscale(scaling.get("factor", 1), scaling.get("mscale_all_dim") or 0) ** 2
    return {**fields, "head_dim": width, "rotary_dim": turned, "q_rank": r["q_lora_rank"] or 0,
            "kv_rank": count(r, "kv_lora_rank"), "v_head_dim": r["v_head_dim"],
            "attn_scale": scale * width**-0.5, "experts": count(r, "n_routed_experts"),
            "experts_per_token": r["num_experts_per_tok"],
            "shared_experts": count(r, "n_shared_experts"),
            "expert_d_ff": r["moe_intermediate_size"],
            "dense_layers": r["first_k_dense_replace"], "router": "sigmoid",
            "router_norm": bool(r["norm_topk_prob"]), "router_scale": r["routed_scaling_factor"],
            "expert_groups": r["n_group"], "groups_per_token": r["topk_group"]}


def _deepseek_v3_arrays(c):
    queries = {"self_attn.q_a_proj.weight": "Q D -> q_down",
               "self_attn.q_a_layernorm.weight": "Q -> q_down_norm",
               "self_attn.q_b_proj.weight": "(H N) Q -> wq"}
    latent = {"self_attn.kv_a_proj_with_mqa.weight": "(R | U) D -> kv_down k_rotary",
              "self_attn.kv_a_layernorm.weight": "R -> kv_norm",
              "self_attn.kv_b_proj.weight": "(H [Y | M]) R -> wk wv",
              "self_attn.o_proj.weight": "D (H M) -> wo"}
    routed = _routed("mlp.") | {"mlp.gate.e_score_correction_bias": "E -> router_bias"}
    shared = {name.replace("mlp.", "mlp.shared_experts."): p for name, p in MLP.items()}
    return (_ends(c) | under(LAYER, NORMS, latent, queries if c.q_rank else
                              {"self_attn.q_proj.weight": "(H N) D -> wq"})
            | under(DENSE_LAYER, MLP) | under(EXPERT_LAYER, routed, shared))


def _deepseek_v3_order(c):
    """The published heads have the rotated part at the end, with the numbers of a pair adjacent."""
    begin, turned = c.head_dim - c.rotary_dim, c.rotary_dim
    if not json.loads(c.published).get("rope_interleave", True):
        return {"wq": Change(np.roll(np.arange(c.head_dim), turned))}
    return {"wq": Change(neighbours(turned, c.head_dim, begin)),
            "k_rotary": Change(neighbours(turned, turned))}


# (The folder has more layers, after the last one, which predict later tokens: they are ignored.)
FAMILIES["deepseek_v3"] = _relative(
    _deepseek_v3, _deepseek_v3_arrays,
    {"num_key_value_heads": 128, "max_position_embeddings": 4096, "q_lora_rank": 1536,
     "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
     "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256,
     "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
     "first_k_dense_replace": 3, "norm_topk_prob": True, "rope_interleave": True,
     "attention_bias": False}, ignored={**INV_FREQ, r"(model\.)?layers\.{layers}\..*": ""},
    adjust=_deepseek_v3_order, aliases={"num_local_experts": "n_routed_experts",
                                        "num_mtp_layers": "num_nextn_predict_layers"},
    fused=_fused(EXPERT_LAYER),
    neutral=keys("pretraining_tp num_nextn_predict_layers aux_loss_alpha ep_size seq_aux"))


# -------------------------------------------------------------------------------------------
# ChatGLM 2 and 3, and GLM 4

def _chatglm(r):
    refuse(r, rmsnorm=True, add_bias_linear=False, apply_residual_connection_post_layernorm=False,
           post_layer_norm=True, pre_seq_len=None, original_rope=True)
    if r["padded_vocab_size"] == 65024:     # in ChatGLM 2 the key has another meaning than in 3
        refuse(r, rope_ratio=1)
    width = r["kv_channels"]
    return {**sizes(r.but(vocab_size=r["padded_vocab_size"]), layers="num_layers",
                    seq_len="seq_length"), "head_dim": width, "rotary_dim": width // 2,
            "kv_heads": (r["multi_query_group_num"] if r["multi_query_attention"]
                         else r["num_attention_heads"]), "d_ff": r["ffn_hidden_size"],
            "norm_eps": r["layernorm_epsilon"], "tied": bool(r["tie_word_embeddings"]),
            "rope_theta": 10000.0 * (r["rope_ratio"] or 1), **biased(qkv=r["add_qkv_bias"])}


def _chatglm_arrays(c):
    bias = "qkv" in c.biases
    return {"transformer.embedding.word_embeddings.weight": "V W -> embed",
            "transformer.encoder.final_layernorm.weight": "D -> norm",
            **head(c, "transformer.output_layer.weight")} | under(
        "transformer.encoder.layers.{l}.", NORMS,
        columns("self_attention.query_key_value", "H N | K N | K M", "wq wk wv", bias),
        rows("self_attention.dense", "H M", "wo", False),
        columns("mlp.dense_h_to_4h", "F | F", "w_gate w_up", False),
        rows("mlp.dense_4h_to_h", "F", "w_down", False))


FAMILIES["chatglm"] = Family(
    _chatglm, _chatglm_arrays,
    dict(kv_channels=128, seq_length=2048, layernorm_epsilon=1e-5, rmsnorm=True,
         apply_residual_connection_post_layernorm=False, post_layer_norm=True,
         add_bias_linear=False, add_qkv_bias=False, multi_query_attention=False,
         multi_query_group_num=1, tie_word_embeddings=False, rope_ratio=1),
    "transformer.", INV_FREQ, neighbours_apart, neutral=keys(
        "apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion "
        "fp32_residual_connection prefix_projection interleaved_qkv"))


def _glm_arrays(c):
    return _llama_arrays(c, of_mlp=FUSED_MLP)


FAMILIES["glm"] = _relative(
    lambda r: {**_modern(r), **biased(qkv=r["attention_bias"])}, _glm_arrays,
    {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
     "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "attention_bias": True},
    shared=(*HEAD_DIM, "partial_rotary_factor"), adjust=neighbours_apart)
