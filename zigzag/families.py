"""The families of published decoders: what their config.json means, and how their arrays lie.

To add one whose parts model.py has: `fields` translates its config.json into fields of
model.Config, `arrays` says for each published array which weights it holds (published.py explains
the patterns). Nothing else: sharding follows from the rule.
"""

import dataclasses
import json
import math
from typing import Any, Callable

import numpy as np

from zigzag.errors import ConfigError, did_you_mean
from zigzag.published import Change

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    fields: Callable[[Fields], Fields]          # config.json -> fields of model.Config
    arrays: Callable[[Any], dict[str, str]]     # model.Config -> patterns of published arrays
    prefix: str = ""                            # of names, which a folder of the bare model lacks
    ignored: tuple[str, ...] = ()               # arrays that are no weights, as regexes
    adjust: Callable[[Any], dict[str, Change]] = lambda c: {}   # weights that differ from ours


FAMILIES: dict[str, Family] = {}

ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
               "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}


def family_of(record: Fields) -> Family:
    """The family of a published config.json."""
    kind = record["model_type"]
    if kind not in FAMILIES:
        raise ConfigError(f"model_type {kind}: expected one of {', '.join(FAMILIES)}"
                          + did_you_mean(kind, FAMILIES))
    return FAMILIES[kind]


def fields_of(record: Fields) -> Fields:
    """A published config.json as fields of model.Config."""
    try:
        fields = family_of(record).fields(record)
    except KeyError as e:
        raise ConfigError(f"config.json of model_type {record['model_type']} lacks {e}") from None
    return {"embed_scale": 1.0, **fields, "published": json.dumps(record, sort_keys=True)}


def as_llama(params: Any, c: Any) -> tuple[Any, Any]:
    """A model of our own as one that transformers knows: LLaMA, or with experts Mixtral."""
    record = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=c.d_model,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, intermediate_size=c.d_ff, vocab_size=c.vocab_size,
        max_position_embeddings=c.seq_len, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
        hidden_act=c.activation, tie_word_embeddings=False,
        rope_scaling=json.loads(c.rope_scaling or "null"))
    if c.experts:
        record |= dict(model_type="mixtral", architectures=["MixtralForCausalLM"],
                       num_local_experts=c.experts, num_experts_per_tok=c.experts_per_token,
                       sliding_window=c.window or None)
    # Its embedding is saved multiplied, and its head by itself.
    scale = c.embed_scale or c.d_model**0.5
    params = {"head": params["embed"].T, **params, "embed": params["embed"] * scale}
    mine = dataclasses.replace(c, tied=False, embed_scale=1.0, published=json.dumps(record))
    other = [name for name, value in fields_of(record).items() if value != getattr(mine, name)
             and name != "published" and (value or name != "head_dim")]
    plain = dict(norm="rms", norm_place="pre", positions="rotary", gated=True, biases="",
                 parallel=False, qk_norm=False, embed_norm=False, window=0 if not c.experts else
                 c.window, local_layers="", embed_dim=c.d_model, attn_scale=0.0, attn_softcap=0.0,
                 logit_softcap=0.0, kv_rank=0, shared_experts=0, dense_layers=0, router="softmax",
                 router_norm=True, router_scale=1.0, expert_groups=1, expert_d_ff=c.d_ff)
    other += [name for name, value in plain.items() if getattr(c, name) != value]
    if other:
        raise ConfigError(f"a model of our own is saved as a LLaMA or Mixtral, and neither has "
                          f"--{other[0]} {getattr(c, other[0])}")
    return params, mine


# -------------------------------------------------------------------------------------------
# What families share

def _refuse(record: Fields, **expected: Any) -> None:
    """Refuse a model that is otherwise than we compute it."""
    for name, value in expected.items():
        if record.get(name, value) not in (value, None):
            raise ConfigError(f"config.json: {name} {record[name]!r} is not supported for "
                              f"model_type {record['model_type']}, only {value!r}")


def _activation(name):
    if name not in ACTIVATIONS:
        raise ConfigError(f"config.json: the activation {name} is not known; expected one of "
                          f"{', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _sizes(r, layers="num_hidden_layers", d_model="hidden_size", heads="num_attention_heads",
           seq_len="max_position_embeddings"):
    return dict(layers=r[layers], d_model=r[d_model], heads=r[heads], vocab_size=r["vocab_size"],
                seq_len=r[seq_len])


def _rope(r, kind="full_attention"):
    """Rotary positions, as older and newer files write them."""
    scaling = r.get("rope_parameters") or r.get("rope_scaling") or {}
    scaling = dict(scaling.get(kind, scaling))
    theta = scaling.pop("rope_theta", None) or r.get("rope_theta") or 10000.0
    share = scaling.pop("partial_rotary_factor", None) or r.get("partial_rotary_factor") or 1.0
    scaling["rope_type"] = rope_type = scaling.pop("type", None) or scaling.get(
        "rope_type") or "default"
    if rope_type in ("su", "longrope"):
        scaling["rope_type"] = rope_type = "longrope"
    trained = r.get("original_max_position_embeddings")
    if rope_type == "longrope" and not scaling.get("attention_factor"):
        trained = trained or scaling.get("original_max_position_embeddings")
        factor = (r["max_position_embeddings"] / trained if trained
                  else scaling.get("factor", 1.0))
        trained = trained or r["max_position_embeddings"]
        scaling["attention_factor"] = (
            math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0)
    if rope_type == "yarn" and not scaling.get("attention_factor"):
        scaling["attention_factor"] = _yarn_factor(scaling)
    if rope_type in ("longrope", "yarn", "dynamic"):
        scaling["original_max_position_embeddings"] = (
            trained or scaling.get("original_max_position_embeddings")
            or r["max_position_embeddings"])
    plain = rope_type == "default"
    width = r.get("head_dim") or r["hidden_size"] // r["num_attention_heads"]
    return dict(rope_theta=float(theta), rotary_dim=int(width * share),
                rope_scaling="" if plain else json.dumps(scaling, sort_keys=True))


def _mscale(factor, by):
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_factor(scaling):
    factor, by, by_all = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    return (_mscale(factor, by) / _mscale(factor, by_all) if by and by_all
            else _mscale(factor, 1.0))


def _pattern(r, layers):
    """Which layers have the window: l, others g; none where no layer does."""
    window = r.get("sliding_window") if r.get("use_sliding_window", True) else None
    if not window:
        return {}
    kinds = r.get("layer_types") or ["sliding_attention"] * layers
    letters = "".join("l" if kind == "sliding_attention" else "g" for kind in kinds)
    if "l" not in letters:
        return {}
    return dict(window=window, local_layers="" if "g" not in letters else letters)


def neighbours(rotary_dim: int, head_dim: int, begin: int = 0) -> np.ndarray:
    """The order of a head's numbers in which those pairs that rotary positions turn, which some
    families have beside each other from `begin` on, lie half of them apart, at the beginning."""
    turned = np.arange(begin, begin + rotary_dim)
    rest = np.delete(np.arange(head_dim), turned)
    return np.concatenate([turned[::2], turned[1::2], rest])


# -------------------------------------------------------------------------------------------
# LLaMA and its relatives

def _modern(r):
    """Fields of config.json that most newer families have."""
    layers = r["num_hidden_layers"]
    return {**_sizes(r), "kv_heads": r.get("num_key_value_heads") or r["num_attention_heads"],
            "head_dim": r.get("head_dim") or 0, "d_ff": r["intermediate_size"],
            "norm_eps": r["rms_norm_eps"], "tied": bool(r.get("tie_word_embeddings")),
            "activation": _activation(r.get("hidden_act") or "silu"), **_rope(r),
            **_pattern(r, layers)}


def _biases(**has):
    return dict(biases=",".join(name for name, given in has.items() if given))


LAYER = "model.layers.{l}."
ENDS = {"model.embed_tokens.weight": "V W -> embed", "model.norm.weight": "D -> norm"}
HEAD = {"lm_head.weight": "V W -> head"}
ATTENTION = {"self_attn.q_proj.weight": "(H N) D -> wq", "self_attn.k_proj.weight": "(K N) D -> wk",
             "self_attn.v_proj.weight": "(K M) D -> wv", "self_attn.o_proj.weight": "D (H M) -> wo"}
ATTENTION_BIASES = {"self_attn.q_proj.bias": "(H N) -> wq_bias",
                    "self_attn.k_proj.bias": "(K N) -> wk_bias",
                    "self_attn.v_proj.bias": "(K M) -> wv_bias"}
QK_NORMS = {"self_attn.q_norm.weight": "N -> q_norm", "self_attn.k_norm.weight": "N -> k_norm"}
MLP = {"mlp.gate_proj.weight": "F D -> w_gate", "mlp.up_proj.weight": "F D -> w_up",
       "mlp.down_proj.weight": "D F -> w_down"}
NORMS = {"input_layernorm.weight": "D -> attn_norm",
         "post_attention_layernorm.weight": "D -> mlp_norm"}


def _under(prefix, *groups):
    return {prefix + name: pattern for group in groups for name, pattern in group.items()}


def _ends(c):
    return ENDS | ({} if c.tied else HEAD)


def _llama_arrays(c):
    has = c.biases.split(",")
    return _ends(c) | _under(
        LAYER, NORMS, ATTENTION, MLP, ATTENTION_BIASES if "qkv" in has else {},
        {"self_attn.o_proj.bias": "D -> wo_bias"} if "out" in has else {},
        {"mlp.gate_proj.bias": "F -> w_gate_bias", "mlp.up_proj.bias": "F -> w_up_bias",
         "mlp.down_proj.bias": "D -> w_down_bias"} if "mlp" in has else {},
        QK_NORMS if c.qk_norm else {})


def _llama(r):
    bias = r.get("attention_bias")
    return {**_modern(r), **_biases(qkv=bias, out=bias, mlp=r.get("mlp_bias"))}


INV_FREQ = (r".*rotary_emb\.inv_freq",)
FAMILIES["llama"] = Family(_llama, _llama_arrays, "model.", INV_FREQ)
FAMILIES["mistral"] = Family(_modern, _llama_arrays, "model.", INV_FREQ)
FAMILIES["qwen2"] = Family(lambda r: {**_modern(r), "biases": "qkv"}, _llama_arrays, "model.",
                           INV_FREQ)
FAMILIES["qwen3"] = Family(lambda r: {**_llama(r), "qk_norm": True}, _llama_arrays, "model.",
                           INV_FREQ)


def _phi3_arrays(c):
    fused = {"self_attn.qkv_proj.weight": "(H N | K N | K M) D -> wq wk wv",
             "self_attn.o_proj.weight": ATTENTION["self_attn.o_proj.weight"],
             "mlp.gate_up_proj.weight": "(F | F) D -> w_gate w_up",
             "mlp.down_proj.weight": MLP["mlp.down_proj.weight"]}
    return _ends(c) | _under(LAYER, NORMS, fused)


FAMILIES["phi3"] = Family(_modern, _phi3_arrays, "model.", INV_FREQ)


def _gemma(r):
    """Gemma 2 and 3: norms around both halves, which multiply by one more than they store; the
    embedding is multiplied by the root of its width."""
    fields = {**_modern(r), "norm_place": "sandwich", "embed_scale": 0.0,
              "activation": _activation(r.get("hidden_activation") or "gelu_pytorch_tanh"),
              "tied": r.get("tie_word_embeddings", True),
              "attn_scale": r["query_pre_attn_scalar"] ** -0.5,
              "attn_softcap": r.get("attn_logit_softcapping") or 0.0,
              "logit_softcap": r.get("final_logit_softcapping") or 0.0,
              **_biases(qkv=r.get("attention_bias"), out=r.get("attention_bias"))}
    return fields


def _gemma2(r):
    kinds = ["sliding_attention", "full_attention"] * r["num_hidden_layers"]
    kinds = r.get("layer_types") or kinds[:r["num_hidden_layers"]]
    return {**_gemma(r), **_pattern({**r, "layer_types": kinds}, 0)}


def _gemma3(r):
    every = r.get("sliding_window_pattern") or 6
    kinds = r.get("layer_types") or ["sliding_attention" if (i + 1) % every else "full_attention"
                                     for i in range(r["num_hidden_layers"])]
    local = (r.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {**_gemma(r), **_pattern({**r, "layer_types": kinds}, 0), "qk_norm": True,
            "local_theta": float(local.get("rope_theta") or r.get("rope_local_base_freq") or 10000)}


GEMMA_NORMS = {"input_layernorm.weight": "D -> attn_norm",
               "post_attention_layernorm.weight": "D -> attn_out_norm",
               "pre_feedforward_layernorm.weight": "D -> mlp_norm",
               "post_feedforward_layernorm.weight": "D -> mlp_out_norm"}


def _gemma_arrays(c):
    return _llama_arrays(c) | _under(LAYER, GEMMA_NORMS)


def _one_more(c):
    return {name: Change(offset=1.0) for name in (
        "norm", "attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm")}


FAMILIES["gemma2"] = Family(_gemma2, _gemma_arrays, "model.", INV_FREQ, _one_more)
FAMILIES["gemma3_text"] = Family(_gemma3, _gemma_arrays, "model.", INV_FREQ, _one_more)


# -------------------------------------------------------------------------------------------
# Experts

def _routed(prefix, gate="gate_proj", up="up_proj", down="down_proj"):
    return {f"{prefix}gate.weight": "E D -> router",
            f"{prefix}experts.{{e}}.{gate}.weight": "G D -> e_gate",
            f"{prefix}experts.{{e}}.{up}.weight": "G D -> e_up",
            f"{prefix}experts.{{e}}.{down}.weight": "D G -> e_down"}


def _mixtral_arrays(c):
    return _ends(c) | _under(LAYER, NORMS, ATTENTION,
                             _routed("block_sparse_moe.", "w1", "w3", "w2"))


FAMILIES["mixtral"] = Family(
    lambda r: {**_modern(r), "experts": r["num_local_experts"],
               "experts_per_token": r["num_experts_per_tok"]}, _mixtral_arrays, "model.", INV_FREQ)

DENSE_LAYER, EXPERT_LAYER = "model.layers.{d}.", "model.layers.{m}."


def _qwen3_moe(r):
    dense = sorted(r.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ConfigError(f"config.json: mlp_only_layers {dense} is not supported, only the first "
                          f"ones")
    _refuse(r, decoder_sparse_step=1)
    return {**_llama(r), "qk_norm": True, "experts": r["num_experts"], "dense_layers": len(dense),
            "experts_per_token": r["num_experts_per_tok"],
            "router_norm": bool(r.get("norm_topk_prob")),
            "expert_d_ff": r["moe_intermediate_size"]}


def _qwen3_moe_arrays(c):
    has = ATTENTION_BIASES | {"self_attn.o_proj.bias": "D -> wo_bias"} if c.biases else {}
    return (_ends(c) | _under(LAYER, NORMS, ATTENTION, QK_NORMS, has) | _under(DENSE_LAYER, MLP)
            | _under(EXPERT_LAYER, _routed("mlp.")))


FAMILIES["qwen3_moe"] = Family(_qwen3_moe, _qwen3_moe_arrays, "model.", INV_FREQ)


def _deepseek_v3(r):
    _refuse(r, attention_bias=False, moe_layer_freq=1)
    turned = r["qk_rope_head_dim"]
    fields = {**_modern({**r, "head_dim": turned}), "kv_heads": r["num_attention_heads"]}
    width = r["qk_nope_head_dim"] + turned
    scaling = json.loads(fields["rope_scaling"] or "{}")
    scale = _mscale(scaling.get("factor", 1), scaling.get("mscale_all_dim") or 0) ** 2
    return {**fields, "head_dim": width, "rotary_dim": turned, "q_rank": r.get("q_lora_rank") or 0,
            "kv_rank": r["kv_lora_rank"], "v_head_dim": r["v_head_dim"],
            "attn_scale": scale * width**-0.5, "experts": r["n_routed_experts"],
            "experts_per_token": r["num_experts_per_tok"],
            "shared_experts": r["n_shared_experts"], "expert_d_ff": r["moe_intermediate_size"],
            "dense_layers": r["first_k_dense_replace"], "router": "sigmoid",
            "router_norm": bool(r.get("norm_topk_prob", True)),
            "router_scale": r["routed_scaling_factor"], "expert_groups": r["n_group"],
            "groups_per_token": r["topk_group"]}


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
    return (_ends(c) | _under(LAYER, NORMS, latent, queries if c.q_rank else
                              {"self_attn.q_proj.weight": "(H N) D -> wq"})
            | _under(DENSE_LAYER, MLP) | _under(EXPERT_LAYER, routed, shared))


def _deepseek_v3_order(c):
    """The part of a head that is turned is at its end there, its pairs beside each other."""
    begin, turned = c.head_dim - c.rotary_dim, c.rotary_dim
    if not json.loads(c.published).get("rope_interleave", True):
        return {"wq": Change(np.roll(np.arange(c.head_dim), turned))}
    return {"wq": Change(neighbours(turned, c.head_dim, begin)),
            "k_rotary": Change(neighbours(turned, turned))}


FAMILIES["deepseek_v3"] = Family(_deepseek_v3, _deepseek_v3_arrays, "model.",
                                 (*INV_FREQ, r"model\.layers\.61\..*"), _deepseek_v3_order)


# -------------------------------------------------------------------------------------------
# GPT-2 and its relatives: LayerNorm, and an MLP of two products

def _layer_norm(name, ours):
    return {f"{name}.weight": f"D -> {ours}", f"{name}.bias": f"D -> {ours}_bias"}


def _columns(name, axes, ours, bias=True):
    """torch's Linear of columns: its array lies [out, in]."""
    axes = f"({axes})" if " " in axes else axes
    biases = " ".join(f"{w}_bias" for w in ours.split())
    return {f"{name}.weight": f"{axes} D -> {ours}"} | (
        {f"{name}.bias": f"{axes} -> {biases}"} if bias else {})


def _rows(name, axes, ours, bias=True):
    """torch's Linear of rows."""
    axes = f"({axes})" if " " in axes else axes
    return {f"{name}.weight": f"D {axes} -> {ours}"} | (
        {f"{name}.bias": f"D -> {ours}_bias"} if bias else {})


def _old(r, norm_eps="layer_norm_epsilon", **names):
    return {**_sizes(r, **names), "norm": "layer", "norm_eps": r[norm_eps], "gated": False,
            "tied": r.get("tie_word_embeddings", True)}


def _gpt2(r):
    _refuse(r, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False)
    return {**_old(r, layers="n_layer", d_model="n_embd", heads="n_head", seq_len="n_positions"),
            "d_ff": r.get("n_inner") or 4 * r["n_embd"], "positions": "learned",
            "biases": "qkv,out,mlp", "activation": _activation(r["activation_function"])}


def _gpt2_arrays(c):
    # (Stored as the transpose of what torch's Linear has.)
    return {"transformer.wte.weight": "V W -> embed", "transformer.wpe.weight": "P D -> positions",
            **({} if c.tied else HEAD), **_under("transformer.", _layer_norm("ln_f", "norm"))
            } | _under(
        "transformer.h.{l}.", _layer_norm("ln_1", "attn_norm"), _layer_norm("ln_2", "mlp_norm"),
        {"attn.c_attn.weight": "D (H N | K N | K M) -> wq wk wv",
         "attn.c_attn.bias": "(H N | K N | K M) -> wq_bias wk_bias wv_bias",
         "attn.c_proj.weight": "(H M) D -> wo", "attn.c_proj.bias": "D -> wo_bias",
         "mlp.c_fc.weight": "D F -> w_up", "mlp.c_fc.bias": "F -> w_up_bias",
         "mlp.c_proj.weight": "F D -> w_down", "mlp.c_proj.bias": "D -> w_down_bias"})


MASKS = (r"(.*\.)?(attn|attention)\.(masked_)?bias",)
FAMILIES["gpt2"] = Family(_gpt2, _gpt2_arrays, "transformer.", MASKS)


def _gptj(r):
    return {**_old(r, layers="n_layer", d_model="n_embd", heads="n_head", seq_len="n_positions"),
            "d_ff": r.get("n_inner") or 4 * r["n_embd"], "rotary_dim": r.get("rotary_dim") or 0,
            "tied": r.get("tie_word_embeddings", False), "parallel": True, "biases": "mlp,head",
            "activation": _activation(r["activation_function"])}


def _gptj_arrays(c):
    return {"transformer.wte.weight": "V W -> embed", **HEAD, "lm_head.bias": "V -> head_bias",
            **_under("transformer.", _layer_norm("ln_f", "norm"))} | _under(
        "transformer.h.{l}.", _layer_norm("ln_1", "attn_norm"),
        _columns("attn.q_proj", "H N", "wq", False), _columns("attn.k_proj", "K N", "wk", False),
        _columns("attn.v_proj", "K M", "wv", False), _rows("attn.out_proj", "H M", "wo", False),
        _columns("mlp.fc_in", "F", "w_up"), _rows("mlp.fc_out", "F", "w_down"))


def _neighbours_apart(c):
    change = Change(neighbours(c.rotary_dim, c.head_dim))
    return dict.fromkeys(("wq", "wk", "wq_bias", "wk_bias"), change)


FAMILIES["gptj"] = Family(_gptj, _gptj_arrays, "transformer.", (*MASKS, r".*embed_positions"),
                          _neighbours_apart)


def _gpt_neo(r):
    kinds = r.get("attention_layers") or [
        kind for kinds, times in r["attention_types"] for _ in range(times) for kind in kinds]
    letters = "".join("l" if kind == "local" else "g" for kind in kinds)
    window = dict(window=r["window_size"], local_layers=letters) if "l" in letters else {}
    return {**_old(r, layers="num_layers", heads="num_heads"), **window, "attn_scale": 1.0,
            "d_ff": r.get("intermediate_size") or 4 * r["hidden_size"], "positions": "learned",
            "biases": "out,mlp", "activation": _activation(r["activation_function"])}


def _gpt_neo_arrays(c):
    return {"transformer.wte.weight": "V W -> embed", "transformer.wpe.weight": "P D -> positions",
            **({} if c.tied else HEAD), **_under("transformer.", _layer_norm("ln_f", "norm"))
            } | _under(
        "transformer.h.{l}.", _layer_norm("ln_1", "attn_norm"), _layer_norm("ln_2", "mlp_norm"),
        _columns("attn.attention.q_proj", "H N", "wq", False),
        _columns("attn.attention.k_proj", "K N", "wk", False),
        _columns("attn.attention.v_proj", "K M", "wv", False),
        _rows("attn.attention.out_proj", "H M", "wo"), _columns("mlp.c_fc", "F", "w_up"),
        _rows("mlp.c_proj", "F", "w_down"))


FAMILIES["gpt_neo"] = Family(_gpt_neo, _gpt_neo_arrays, "transformer.", MASKS)


def _gpt_neox(r):
    rope = r.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or r.get("rotary_pct") or 0.25
    theta = rope.get("rope_theta") or r.get("rotary_emb_base") or 10000
    bias, parallel = r.get("attention_bias", True), r.get("use_parallel_residual", True)
    return {**_old(r, "layer_norm_eps"), **_rope(
        {**r, "rope_theta": theta, "partial_rotary_factor": share}), "d_ff": r["intermediate_size"],
        "tied": bool(r.get("tie_word_embeddings")), "parallel": parallel,
        "parallel_norms": 2 if parallel else 1,
        "activation": _activation(r["hidden_act"]), **_biases(qkv=bias, out=bias, mlp=True)}


def _gpt_neox_arrays(c):
    bias = "qkv" in c.biases
    return {"gpt_neox.embed_in.weight": "V W -> embed",
            **({} if c.tied else {"embed_out.weight": "V W -> head"}),
            **_under("gpt_neox.", _layer_norm("final_layer_norm", "norm"))} | _under(
        "gpt_neox.layers.{l}.", _layer_norm("input_layernorm", "attn_norm"),
        _layer_norm("post_attention_layernorm", "mlp_norm"),
        _columns("attention.query_key_value", "K [g N | N | M]", "wq wk wv", bias),
        _rows("attention.dense", "H M", "wo", bias), _columns("mlp.dense_h_to_4h", "F", "w_up"),
        _rows("mlp.dense_4h_to_h", "F", "w_down"))


FAMILIES["gpt_neox"] = Family(_gpt_neox, _gpt_neox_arrays, "gpt_neox.", (*INV_FREQ, *MASKS))


def _opt(r):
    _refuse(r, enable_bias=True, layer_norm_elementwise_affine=True,
            _remove_final_layer_norm=False)
    width = r.get("word_embed_proj_dim") or r["hidden_size"]
    return {**_sizes(r), "norm": "layer", "norm_eps": 1e-5, "gated": False, "d_ff": r["ffn_dim"],
            "tied": r.get("tie_word_embeddings", True), "positions": "learned",
            "position_offset": 2, "position_rows": r["max_position_embeddings"] + 2,
            "biases": "qkv,out,mlp", "embed_dim": width,
            "norm_place": "pre" if r.get("do_layer_norm_before", True) else "post",
            "activation": _activation(r["activation_function"])}


def _opt_arrays(c):
    ends = {"embed_tokens.weight": "V W -> embed", "embed_positions.weight": "P D -> positions"}
    if c.embed_dim != c.d_model:
        ends |= {"project_in.weight": "D W -> project_in",
                 "project_out.weight": "W D -> project_out"}
    if c.norm_place == "pre":
        ends |= _layer_norm("final_layer_norm", "norm")
    return ({} if c.tied else HEAD) | _under("model.decoder.", ends) | _under(
        "model.decoder.layers.{l}.", _layer_norm("self_attn_layer_norm", "attn_norm"),
        _layer_norm("final_layer_norm", "mlp_norm"), _columns("self_attn.q_proj", "H N", "wq"),
        _columns("self_attn.k_proj", "K N", "wk"), _columns("self_attn.v_proj", "K M", "wv"),
        _rows("self_attn.out_proj", "H M", "wo"), _columns("fc1", "F", "w_up"),
        _rows("fc2", "F", "w_down"))


FAMILIES["opt"] = Family(_opt, _opt_arrays, "model.")


def _bloom(r):
    _refuse(r, apply_residual_connection_post_layernorm=False)
    return {**_old({"max_position_embeddings": r.get("seq_length") or 2048, **r}, layers="n_layer",
                   heads="n_head"), "d_ff": 4 * r["hidden_size"], "positions": "alibi",
            "embed_norm": True, "biases": "qkv,out,mlp", "activation": "gelu_tanh"}


def _bloom_arrays(c):
    ends = {"word_embeddings.weight": "V W -> embed", **_layer_norm("ln_f", "norm")}
    if c.embed_norm:
        ends |= _layer_norm("word_embeddings_layernorm", "embed_norm")
    bias = "qkv" in c.biases
    norms = _layer_norm("input_layernorm", "attn_norm")
    if c.parallel_norms == 2:
        norms = _layer_norm("ln_attn", "attn_norm") | _layer_norm("ln_mlp", "mlp_norm")
    elif not c.parallel:
        norms |= _layer_norm("post_attention_layernorm", "mlp_norm")
    return ({} if c.tied else HEAD) | _under("transformer.", ends) | _under(
        "transformer.h.{l}.", norms,
        _columns("self_attention.query_key_value", "K [g N | N | M]", "wq wk wv", bias),
        _rows("self_attention.dense", "H M", "wo", bias),
        _columns("mlp.dense_h_to_4h", "F", "w_up", bias),
        _rows("mlp.dense_4h_to_h", "F", "w_down", bias))


FAMILIES["bloom"] = Family(_bloom, _bloom_arrays, "transformer.")


def _falcon(r):
    """Three layouts: 7B (one key head), 40B (groups, two norms), and RW (ALiBi, one after the
    other). The fused array is the same in all: groups of query heads, each with its key head."""
    grouped, parallel = bool(r.get("new_decoder_architecture")), r.get("parallel_attn", True)
    heads = r["num_attention_heads"]
    norms = (r.get("num_ln_in_parallel_attn") or 2) if grouped else 1
    fields = {**_old({"max_position_embeddings": 2048, **r}),
              "kv_heads": (r.get("num_kv_heads") or heads) if grouped else
              1 if r.get("multi_query", True) else heads,
              "d_ff": r.get("ffn_hidden_size") or 4 * r["hidden_size"],
              "parallel": parallel or grouped, "parallel_norms": norms,
              "activation": _activation(r.get("activation") or "gelu"),
              "biases": "qkv,out,mlp" if r.get("bias") else ""}
    return {**fields, "positions": "alibi16"} if r.get("alibi") else {**fields, **_rope(r)}


FAMILIES["falcon"] = Family(_falcon, _bloom_arrays, "transformer.", INV_FREQ)


# -------------------------------------------------------------------------------------------
# ChatGLM 2 and 3, and GLM 4

def _chatglm(r):
    _refuse(r, rmsnorm=True, add_bias_linear=False, apply_residual_connection_post_layernorm=False,
            post_layer_norm=True)
    width = r.get("kv_channels") or r["hidden_size"] // r["num_attention_heads"]
    return {**_sizes({**r, "vocab_size": r["padded_vocab_size"]}, layers="num_layers",
                     seq_len="seq_length"), "head_dim": width, "rotary_dim": width // 2,
            "kv_heads": (r["multi_query_group_num"] if r.get("multi_query_attention")
                         else r["num_attention_heads"]), "d_ff": r["ffn_hidden_size"],
            "norm_eps": r["layernorm_epsilon"], "tied": bool(r.get("tie_word_embeddings")),
            "rope_theta": 10000.0 * (r.get("rope_ratio") or 1), **_biases(
                qkv=r.get("add_qkv_bias"))}


def _chatglm_arrays(c):
    bias = "qkv" in c.biases
    return {"transformer.embedding.word_embeddings.weight": "V W -> embed",
            "transformer.encoder.final_layernorm.weight": "D -> norm",
            **({} if c.tied else {"transformer.output_layer.weight": "V W -> head"})} | _under(
        "transformer.encoder.layers.{l}.", NORMS,
        _columns("self_attention.query_key_value", "H N | K N | K M", "wq wk wv", bias),
        _rows("self_attention.dense", "H M", "wo", False),
        _columns("mlp.dense_h_to_4h", "F | F", "w_gate w_up", False),
        _rows("mlp.dense_4h_to_h", "F", "w_down", False))


FAMILIES["chatglm"] = Family(_chatglm, _chatglm_arrays, "transformer.",
                             (r".*rotary_pos_emb\.inv_freq",), _neighbours_apart)


def _glm_arrays(c):
    fused = {"mlp.gate_up_proj.weight": "(F | F) D -> w_gate w_up",
             "mlp.down_proj.weight": MLP["mlp.down_proj.weight"]}
    return _ends(c) | _under(LAYER, NORMS, ATTENTION, fused,
                             ATTENTION_BIASES if "qkv" in c.biases else {})


FAMILIES["glm"] = Family(lambda r: {**_modern(r), **_biases(qkv=r.get("attention_bias"))},
                         _glm_arrays, "model.", INV_FREQ, _neighbours_apart)
