"""Reading a published config.json: the parts that families share, translated to fields of
networks.transformer.Config.

The file may be wrong or unknown: a value of a wrong kind, an option that we do not compute, or a
key that no code here reads is refused in one line. For missing keys the defaults of the family's
class in transformers are used: many files leave out much, and few of these numbers would show in
the shapes of the weights.

Two generations of transformers write and read such files. If 4 and 5 would compute different models
from a file, it is refused; a file that only 5 writes is read as 5 reads it.
"""

import copy
import dataclasses
import json
import math
import re
from typing import Any, Sequence

from zigzag.core.errors import ConfigError

Fields = dict[str, Any]

# Limits above any model's, and low enough for a list of layers in memory.
MOST, MOST_LAYERS = 10**8, 10_000

ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
               "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
               "quick_gelu": "quick_gelu"}
OBJECT = ": a value is of a wrong kind; expected an object"
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


# Keys of any config.json that cannot change what a model computes: its origin, the generation of
# text, what is returned, the names of ids and labels, and options of training.
NEUTRAL = frozenset("""
    _name_or_path _model_name_or_path name_or_path name _commit_hash transformers_version
    architectures auto_map custom_pipelines tokenizer_class processor_class finetuning_task
    task_specific_params
    license language author created_date internal_version unsloth_fixed unsloth_version
    sentence_transformers sbert_ce_default_activation_function transformers.js_config
    xla_device _flash_attn_2_enabled use_flash_attn use_flash_attention use_flash_attention_2
    model_type dtype torch_dtype use_bfloat16 torchscript tf_legacy_loss
    return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    output_logits output_past output_router_logits router_aux_loss_coef use_cache
    attn_implementation _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _experts_implementation_internal
    gradient_checkpointing use_gradient_checkpointing chunk_size_feed_forward
    initializer_range initializer_factor init_std
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id bos_token eos_token pad_token prefix summary_type summary_use_proj
    summary_activation summary_proj_to_logits summary_first_dropout
    id2label label2id num_labels _num_labels problem_type
    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_decoder_ids
    eos_token_ids min_p top_h epsilon_cutoff eta_cutoff penalty_alpha encoder_repetition_penalty
    guidance_scale renormalize_logits force_words_ids constraints sequence_bias stop_strings
    token_healing watermarking_config max_time low_memory cache_implementation cache_config
    compile_config disable_compile prefill_chunk_size max_cache_len return_legacy_cache
    dola_layers is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    prompt_lookup_num_tokens max_matching_ngram_size target_lookbehind
    attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob
    classifier_dropout activation_dropout dropout dropout_rate embd_pdrop resid_pdrop attn_pdrop
    layerdrop encoder_layerdrop decoder_layerdrop is_decoder
    max_sequence_length model_max_length tokenizer_model_max_length
""".split())


# {key: the value at which it turns nothing on}: with it the key may stay unread.
OFF = dict(is_encoder_decoder=False, is_causal=True, add_cross_attention=False,
           cross_attention_hidden_size=None, tie_encoder_decoder=False, pruned_heads=None,
           per_layer_config=None, pretraining_tp=1,
           sliding_window=None, use_sliding_window=False, layer_types=None, attention_bias=False,
           mlp_bias=False, rope_scaling=None, partial_rotary_factor=1.0)


QUANTIZED = ("quantization_config", "quantization", "quantization_bit")


def wrong(name: str, value: Any, what: str) -> ConfigError:
    """The error about the value of a key, and what is wrong with it."""
    value = value.given if isinstance(value, Record) else value
    return ConfigError(f"config.json: {name} {value!r:.80}{what}")


# -------------------------------------------------------------------------------------------
# The whole file

class Record:
    """A config.json that records which keys are read, because unread keys must not matter.

    r["key"] and r.get("key") read. A part of it is a Record too. It cannot be copied, since a copy
    would count as read; `but` returns a Record with other values, which leaves the file's unread.
    `defaults` are the class's values of missing keys; `shared` are keys that shared translators
    read and that this class has."""

    def __init__(self, given: Fields, defaults: Fields | None = None,
                 shared: Sequence[str] = (), at: str = "", kind: str = ""):
        self.given, self.defaults, self.shared, self.at = given, defaults or {}, shared, at
        self.kind = kind or given.get("model_type", "")
        self.has_read: set[str] = set()
        self.parts: dict[str, Record] = {}
        for name, value in given.items():
            kind = type(self.defaults.get(name))
            kind = float if kind is int else kind       # (as_config refuses fractions)
            if kind in KINDS and value is not None and not _is(kind, value):
                raise wrong(at + name, value, f": expected {KINDS[kind]}")

    def __contains__(self, name: str) -> bool:
        return name in self.given       # (does not count as reading)

    def __bool__(self) -> bool:
        return bool(self.given)

    def __getitem__(self, name: str) -> Any:
        if name not in self.given:
            return self.defaults[name]
        self.has_read.add(name)
        return self.part(name) if isinstance(self.given[name], dict) else self.given[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.given or name in self.defaults else default

    def plain(self, name: str) -> Any:
        """The value in the file as plain data; all of it counts as read."""
        self.has_read.add(name)
        return self.given.get(name, self.defaults.get(name))

    def part(self, name: str, defaults: Fields | None = None, given: Fields | None = None
             ) -> "Record":
        """The Record of a part of the file that has its own class and defaults."""
        self.has_read.add(name)
        if name not in self.parts:
            given = given or self.given.get(name) or {}
            if not isinstance(given, dict):
                raise wrong(self.at + name, given, OBJECT)
            self.parts[name] = Record(given, defaults, self.shared, f"{self.at}{name}.", self.kind)
        return self.parts[name]

    def but(self, **changes: Any) -> "Record":
        """This Record with other values."""
        other = copy.copy(self)         # (both record reads in the same place)
        other.given = {name: value for name, value in self.given.items() if name not in changes}
        other.defaults = {**self.defaults, **changes}
        return other

    def unread(self) -> dict[str, "Record"]:
        """{key: its Record} of the keys that were not read; keys of parts are named part.key."""
        mine = {self.at + name: self for name in self.given if name not in self.has_read}
        return mine | {path: owner for part in self.parts.values()
                       for path, owner in part.unread().items()}

    def refuse_unread(self, neutral: Sequence[str]) -> None:
        """Refuse keys that were not read and that may matter."""
        unknown = []
        for path, owner in self.unread().items():
            name = path.removeprefix(owner.at)
            if name in NEUTRAL or name in neutral or path in neutral:
                continue
            if name in QUANTIZED and owner.given[name]:
                raise ConfigError(f"config.json: {path}: the weights are quantized, and only "
                                  f"float32, bfloat16 and float16 can be read; use a copy in "
                                  f"bfloat16")
            if name in OFF:
                refuse(owner, **{name: OFF[name]})
            elif name not in QUANTIZED:
                unknown.append(f"{path!r:.80} {json.dumps(owner.given[name])[:80]}")
        if unknown:
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise ConfigError(
                f"config.json: not known for model_type {self.kind}: {', '.join(unknown[:5])}"
                f"{more}. This may change what the model computes; if its class in transformers "
                f"ignores it, take it out of the file")


def with_usual_names(record: Fields, aliases: dict[str, str]) -> Fields:
    """A config.json with keys under their usual names; `aliases` is {other name: usual name}."""
    found = {}
    for name, value in record.items():
        usual = aliases.get(name, name)
        if usual in found and found[usual] != value:
            raise wrong(name, value, f" is another name of {usual}, which is {found[usual]!r:.80}")
        found[usual] = value
    return found


def _is(kind, value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        return number and math.isfinite(value)
    return isinstance(value, kind) and (kind is not int or number)


def as_config(cls: Any, path: Any, fields: Fields) -> Any:
    """The configuration `cls` with these fields, which came from the file at `path`."""
    record = fields.get("published")
    record = json.loads(record) if isinstance(record, str) and record else {}
    for f in dataclasses.fields(cls):
        value = fields.get(f.name, f.default)
        if f.type in KINDS and not _is(f.type, value):
            raise ConfigError(f"{path}: {_key(f.name, record)} would be {value!r:.80}; expected "
                              f"{KINDS[f.type]}")
    try:
        return cls(**fields)
    except ConfigError as e:
        words = re.sub(r"--(\w+)", lambda found: _key(found[1], record), str(e))
        raise ConfigError(f"{path}: {words}") from None


# {our option: its names in config.json}, for messages. Families have different names.
KEYS = {
    "layers": "num_hidden_layers n_layer num_layers decoder_layers depths",
    "d_model": "hidden_size n_embd d_model embed_dim",
    "heads": "num_attention_heads n_head num_heads decoder_attention_heads",
    "kv_heads": "num_key_value_heads num_kv_heads multi_query_group_num",
    "head_dim": "head_dim d_kv kv_channels qk_nope_head_dim",
    "d_ff": "intermediate_size n_inner ffn_dim ffn_hidden_size d_ff decoder_ffn_dim mlp_ratio",
    "seq_len": "max_position_embeddings n_positions seq_length max_target_positions",
    "position_rows": "max_position_embeddings n_positions max_target_positions",
    "tied": "tie_word_embeddings", "norm_eps": "rms_norm_eps layer_norm_epsilon layer_norm_eps",
    "rotary_dim": "partial_rotary_factor rotary_pct rotary_dim qk_rope_head_dim",
    "rope_theta": "rope_theta rotary_emb_base", "rope_scaling": "rope_scaling rope_parameters",
    "window": "sliding_window window_size", "local_layers": "layer_types attention_types",
    "local_theta": "rope_local_base_freq", "activation": "hidden_act activation_function",
    "experts": "num_experts num_local_experts n_routed_experts",
    "experts_per_token": "num_experts_per_tok", "shared_experts": "n_shared_experts",
    "expert_d_ff": "moe_intermediate_size", "dense_layers": "first_k_dense_replace mlp_only_layers",
    "expert_groups": "n_group", "groups_per_token": "topk_group",
    "router_scale": "routed_scaling_factor", "q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank",
    "attn_scale": "query_pre_attn_scalar", "attn_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping", "embed_dim": "word_embed_proj_dim embedding_size",
    "layer_groups": "num_hidden_groups", "encoder_heads": "encoder_attention_heads",
    "encoder_d_ff": "encoder_ffn_dim", "source_len": "max_source_positions max_position_embeddings",
    "channels": "num_channels num_mel_bins", "token_types": "type_vocab_size",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance", "labels": "num_labels",
    "pad_id": "pad_token_id"}


def _key(option, record):
    """The name of an option in this config.json."""
    names = KEYS.get(option, option).split()
    return next((name for name in names if name in record), names[0])


# -------------------------------------------------------------------------------------------
# Parts of a config.json

def refuse(r: Any, **expected: Any) -> None:
    """Refuse a model if one of these keys has another value than the one that we compute. (Null
    counts as false and as 0.)"""
    for name, value in expected.items():
        if ((given := r.get(name, value)) or None) != (value or None):
            raise _unknown(r, name, given, json.dumps(value))


def _unknown(r, name, given, known):
    return wrong(r.at + name, given, f" is not supported for model_type {r.kind or 'this'}, only "
                 f"{known}")


def refuse_other_heads(r: Record) -> None:
    """Refuse a model with another head than a language model's."""
    names = r.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name is not None and not re.search(LANGUAGE_MODELS, str(name)):
        raise _unknown(r, "architectures", names, "a language model, ...ForCausalLM or "
                       "...ForConditionalGeneration")


def decoder_head(r: Record) -> dict[str, Any]:
    """The fields of a decoder's head that `architectures` names: {} for a language model's, or
    those of classes, read off the last token. Others are refused."""
    names = r.get("architectures")
    if isinstance(names, list) and str((names or [""])[0]).endswith("ForSequenceClassification"):
        return {"head": "classes", "pool": "last", "labels": labels(r)}
    refuse_other_heads(r)
    return {}


def labels(r: Record) -> int:
    """The number of classes; 1: a regression."""
    names = r.plain("id2label")
    found = len(names) if isinstance(names, dict) else r.get("num_labels") or 2
    usual = "regression" if count({"labels": found}, "labels") == 1 else (
        "single_label_classification")
    if r.get("problem_type") not in (None, usual):
        refuse(r, problem_type=usual)
    return found


def refuse_other_classes(r: Record, *known: str) -> None:
    """Refuse a model of another class than these, if the file names one."""
    names = r.get("architectures")
    if names and not (isinstance(names, list) and names[0] in known):
        raise _unknown(r, "architectures", names, ", ".join(known))


LANGUAGE_MODELS = r"(?<!Encoder)(?<!DoubleHeads)Model$|For(CausalLM|ConditionalGeneration)$"


def activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise wrong("the activation", name, f" is not known; expected one of "
                    f"{', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def count(r: Any, name: str, most: int = MOST) -> int:
    """A whole number above 0."""
    value = r[name]
    if not _is(int, value) or not 1 <= value <= most:
        raise wrong(getattr(r, "at", "") + name, value, f": expected a whole number from 1 to "
                    f"{most}")
    return value


def factor(r: Record, name: str, least: float = 0.0) -> float:
    """A factor or a bound: a number above `least`. (In a Config, 0 means none or derived.)"""
    if not _is(float, r[name]) or not r[name] > least:
        raise wrong(r.at + name, r[name], f": expected a number above {least:g}")
    return float(r[name])


def sizes(r: Record, layers: str = "num_hidden_layers", d_model: str = "hidden_size",
          heads: str = "num_attention_heads", seq_len: str = "max_position_embeddings") -> Fields:
    """The fields of the sizes, which config.json has under these names."""
    return dict(layers=count(r, layers, MOST_LAYERS), d_model=count(r, d_model),
                heads=count(r, heads), vocab_size=count(r, "vocab_size"),
                seq_len=count(r, seq_len))


def window(r: Record, kinds: list[str] | None = None) -> Fields:
    """The fields of a window. `kinds` says which layers have it; None: all."""
    is_used = r["use_sliding_window"] if "use_sliding_window" in r.shared else True
    if not is_used or r.get("sliding_window") is None:
        return {}
    count(r, "sliding_window", 2**30)
    layers, letters = r["num_hidden_layers"], {"sliding_attention": "l", "full_attention": "g"}
    if kinds is not None and (len(kinds) != layers or set(kinds) - letters.keys()):
        raise wrong("layer_types", kinds, f": expected one of {', '.join(letters)} for each of "
                    f"{layers} layers")
    kinds = "".join(letters[kind] for kind in kinds or ["sliding_attention"])
    if "l" not in kinds:
        return {}
    return dict(window=r["sliding_window"], local_layers=kinds if "g" in kinds else "")


# -------------------------------------------------------------------------------------------
# Rotary positions
#
# transformers 4 writes rope_theta, rope_scaling (the type and its numbers) and, in some classes,
# partial_rotary_factor. 5 writes all of these in rope_parameters; classes with several kinds of
# layers have one for each kind. Both read rope_scaling; 4 ignores rope_parameters.

# {type of scaling: its keys beside rope_type}
SCALINGS = {"default": (), "linear": ("factor",), "dynamic": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
                     "mscale_all_dim", "truncate"),
            "longrope": ("short_factor", "long_factor", "factor", "attention_factor")}
NEEDED = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")


def rope(r: Record, theta: str = "rope_theta", share: str = "partial_rotary_factor",
         of_layers: str = "", names: dict[str, str] | None = None) -> Fields:
    """The fields of rotary positions. `of_layers` is the kind of layers, in a class with several in
    its rope_parameters. `theta` and `share` are transformers 4's names of the RoPE base and of the
    rotated share of a head; `names` are older names of types."""
    part, is_newer = _rope_part(r, of_layers)
    base = _one_of_two(r, theta, part, "rope_theta", is_newer)
    part_turned = 1.0
    if share in r.shared:
        part_turned = _one_of_two(r, share, part, "partial_rotary_factor", is_newer)
    else:       # this class ignores it, or only some of its functions read it
        refuse_other(r, "partial_rotary_factor", None, 1)
        refuse_other(part, "partial_rotary_factor", None, 1)
    width = r.get("head_dim") if "head_dim" in r.shared else None
    width = width or r["hidden_size"] // r["num_attention_heads"]
    part_turned = 1.0 if part_turned is None else part_turned
    if int(width * part_turned) < 2:
        raise wrong(share, part_turned, f": expected a part of a head that has at least 2 of its "
                    f"{width} numbers")
    scaling = _scaling(r, part, is_newer, bool(of_layers), names or {})
    return dict(rope_theta=float(10000.0 if base is None else base),
                rotary_dim=0 if part_turned == 1 else int(width * part_turned),
                rope_scaling="" if scaling["rope_type"] == "default" else json.dumps(
                    scaling, sort_keys=True))


def _rope_part(r, of_layers):
    """(the Record of rope_parameters or rope_scaling, whether it is rope_parameters)."""
    newer, older = r.get("rope_parameters"), r.get("rope_scaling")
    for name, value in (("rope_parameters", newer), ("rope_scaling", older)):
        if value is not None and not isinstance(value, Record):
            raise wrong(name, value, OBJECT)
    if newer and older:
        raise ConfigError("config.json: rope_parameters beside rope_scaling: transformers 4 and 5 "
                          "read different ones; take one out of the file")
    if newer:
        return newer.part(of_layers) if of_layers else newer, True
    # (rope_scaling is for the layers without a window.)
    return (older if older and of_layers != "sliding_attention" else Record({})), False


def _one_of_two(r, name, part, name_there, is_newer):
    """A number that the file may have at its top level or in rope_parameters. If it is in both, or
    in rope_scaling, where only transformers 5 reads it, the values must be equal."""
    top = r.get(name)
    if name_there not in part:
        return top
    if part[name_there] != top and (name in r.given or not is_newer):
        raise wrong(part.at + name_there, part[name_there], f" beside {name} {top!r:.80}: expected "
                    f"the same")
    return part[name_there]


def refuse_other(r: Record, name: str, *neutral: Any) -> None:
    """Refuse a key whose value is not one of the `neutral` ones, which change nothing."""
    if name in r and r.given[name] not in neutral:
        raise _unknown(r, name, r.given[name], json.dumps(neutral[-1]))
    r.get(name)


def _scaling(r, part, is_newer, has_kinds, names):
    """The scaling of the rates, in the form of zigzag/weights/positions.py."""
    kinds = [names.get(kind, kind) if isinstance(kind, str) else kind
             for kind in (part.get("rope_type"), part.get("type")) if kind is not None]
    kind = kinds[0] if kinds else "default"
    # (In a class with several kinds of layers, 5 ignores `type` and `truncate` in rope_scaling.)
    if has_kinds and not is_newer and "rope_type" not in part and kind != "default":
        raise wrong(part.at + "type", kind, ": expected it as rope_type; only transformers 4 reads "
                    "type")
    if has_kinds and not part.get("truncate", True):
        refuse(part, truncate=True)
    if len(kinds) == 2 and kinds[1] != kind:
        raise wrong(part.at + "rope_type", kind, f" beside type {kinds[1]!r:.80}: transformers 5 "
                    f"takes the first, and 4 the second")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise wrong(part.at + "rope_type", kind, f" is not known; expected one of "
                    f"{', '.join(SCALINGS)}")
    scaling = {name: part.get(name) for name in SCALINGS[kind] if name in part}
    scaling = {name: value for name, value in scaling.items() if value is not None}
    longest = r["max_position_embeddings"]
    if kind in ("llama3", "yarn", "longrope"):
        # (A class with several kinds of layers ignores the file's top level.)
        top = None if has_kinds else r.get("original_max_position_embeddings")
        trained = _trained(part, kind, top, longest, is_newer)
        scaling["original_max_position_embeddings"] = trained
        if kind == "longrope":
            scaling["factor"] = _longrope_factor(scaling, top, trained, longest, is_newer)
    elif not has_kinds:     # (whatever the file says)
        r.get("original_max_position_embeddings")
    if kind == "dynamic":
        scaling["original_max_position_embeddings"] = longest
        part.get("original_max_position_embeddings")
    part.get("finetuned")       # (a key of the first files with yarn)
    for name in SCALINGS[kind]:
        if name not in scaling and name in NEEDED:
            raise ConfigError(f"config.json: {part.at}{name} is missing, for the rope_type {kind}")
    return {**scaling, "rope_type": kind}


def _trained(part, kind, top, longest, is_newer):
    """original_max_position_embeddings. If there is one at the file's top level, transformers 5
    takes that, and 4 does so only for longrope."""
    name = "original_max_position_embeddings"
    own = part.get(name)
    of_5 = top or own or longest
    of_4 = (top or longest) if kind == "longrope" else own or longest
    if (own and own != of_5) or not (is_newer or of_4 == of_5):
        raise ConfigError(f"config.json: {part.at}{name} {own} beside {name} {top} and "
                          f"max_position_embeddings {longest}: transformers 4 takes {of_4}, and 5 "
                          f"{of_5}")
    return of_5


def _longrope_factor(scaling, top, trained, longest, is_newer):
    """The factor by which the context was extended. transformers 5 takes the given one, and 4 the
    ratio of lengths if the file has original_max_position_embeddings at its top level."""
    ratio, given = longest / trained, scaling.get("factor")
    if given is not None and given != ratio and top and not is_newer:
        raise wrong("rope_scaling.factor", given, f": transformers 4 takes the ratio of lengths "
                    f"{ratio} in its place, and 5 does not")
    return ratio if given is None else given


def as_older(record: Fields, shared: Sequence[str]) -> Fields:
    """A config.json with its rope_parameters in the form of transformers 4, which 5 reads too. (4
    ignores the form of 5, and would silently use its defaults.)"""
    r, is_neox = dict(record), record["model_type"] == "gpt_neox"
    theta, share = ("rotary_emb_base", "rotary_pct") if is_neox else (
        "rope_theta", "partial_rotary_factor")
    new = r.pop("rope_parameters", None)
    if not isinstance(new, dict) or not new:
        return record
    if local := new.get("sliding_attention"):
        if "rope_theta" in local:
            r["rope_local_base_freq"] = local["rope_theta"]
    scaling = dict(new.get("full_attention") or new)
    for name, older in (("rope_theta", theta), ("partial_rotary_factor", share)):
        value = scaling.pop(name, None)
        if value is not None and (older == theta or older in shared):
            r[older] = value
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "longrope":
        trained = scaling.pop("original_max_position_embeddings", None)
        if trained is not None:
            r.setdefault("original_max_position_embeddings", trained)
            scaling.pop("factor", None)     # (with another factor, _is_same finds another model)
    if r["model_type"] == "phi3" and kind != "default":     # (it accepts only these three keys)
        scaling = {"type": "longrope", **{name: scaling[name] for name in (
            "short_factor", "long_factor")}}
    return {**r, "rope_scaling": scaling if kind != "default" else None}
