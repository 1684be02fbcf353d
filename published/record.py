"""Read a published config.json: translate whatever families share into fields of
published.transformer.Config.

The file may be wrong or unfamiliar. This code rejects, with a one-line error, a value of the wrong
type, an option that we don't support, or a key that no code here reads. Missing keys take the
defaults of the family's class in transformers. Many files omit keys, and you couldn't infer most of
the missing values from the weights' shapes.

Two generations of transformers write and read these files. `as_older` first converts version 5's
format to version 4's, which both can read. If the two versions would compute different models from
a file, this code rejects it.
"""

import json
import math
import re
from typing import Any, Iterator, Sequence

from zigzag.core.errors import ConfigError, listed
from zigzag.core.options import fits, options

Fields = dict[str, Any]
Names = dict[str, str]

# Limits above any model's sizes, yet low enough for a list of layers to fit in memory.
MOST, MOST_LAYERS = 10**8, 10_000

ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
               "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
               "quick_gelu": "quick_gelu"}
KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


# Keys in any config.json that can't change what a model computes: its origin, text generation,
# which outputs to return, the names of ids and labels, and training options.
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


# {key: the value that means off}. A key with this value may stay unread.
OFF = dict(is_encoder_decoder=False, is_causal=True, add_cross_attention=False,
           cross_attention_hidden_size=None, tie_encoder_decoder=False, pruned_heads=None,
           per_layer_config=None, pretraining_tp=1,
           sliding_window=None, use_sliding_window=False, layer_types=None, attention_bias=False,
           mlp_bias=False, rope_scaling=None, partial_rotary_factor=1.0,
           quantization_config=None, quantization=None, quantization_bit=None)


def wrong(name: str, value: Any, what: str) -> ConfigError:
    """Make the error that says what's wrong with a key's value."""
    value = value.given if isinstance(value, Record) else value
    return ConfigError(f"config.json: {name} {value!r:.80}{what}")


# -------------------------------------------------------------------------------------------
# The whole file

class Record:
    """A config.json that tracks which keys we read, so that we can reject unread keys that matter.

    r["key"] and r.get("key") read a key; a nested dict becomes another Record. `defaults` are the
    class's values for missing keys. `shared` are the class's keys that shared translators read."""

    def __init__(self, given: Fields, defaults: Fields | None = None,
                 shared: Sequence[str] = (), at: str = "", kind: str = ""):
        self.given, self.shared, self.at = given, shared, at
        self.values = {**(defaults or {}), **given}
        self.kind = kind or given.get("model_type", "this")
        self.has_read: set[str] = set()
        self.parts: dict[str, Record] = {}
        for name, default in (defaults or {}).items():
            kind = float if type(default) is int else type(default)     # as_config checks ints
            value = given.get(name)
            if kind in KINDS and value is not None and not _is(kind, value):
                raise wrong(at + name, value, f": expected {KINDS[kind]}")

    def __bool__(self) -> bool:
        return bool(self.given)

    def __getitem__(self, name: str) -> Any:
        value = self.values[name]
        return self.part(name) if isinstance(value, dict) else self.plain(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.values else default

    def of_class(self, name: str) -> Any:
        """Read a key that only some classes have; return None if this class lacks it."""
        return self.get(name) if name in self.shared else None

    def plain(self, name: str) -> Any:
        """Return a value as plain data, all of which counts as read; None if the key is missing."""
        self.has_read.add(name)
        return self.values.get(name)

    def part(self, name: str, defaults: Fields | None = None, given: Fields | None = None
             ) -> "Record":
        """Return the Record for a part of the file with its own class and defaults."""
        self.has_read.add(name)
        if name not in self.parts:
            given = given or self.values.get(name) or {}
            if not isinstance(given, dict):
                raise wrong(self.at + name, given, ": a value has the wrong type")
            self.parts[name] = Record(given, defaults, self.shared, f"{self.at}{name}.", self.kind)
        return self.parts[name]

    def refuse_unread(self, neutral: Sequence[str]) -> None:
        """Reject unread keys that may matter. A key doesn't matter if NEUTRAL or `neutral` has its
        name or path, or if its value in OFF turns it off."""
        unknown = []
        for owner, name in self.unread():
            path = owner.at + name
            if {name, path} & {*NEUTRAL, *neutral}:
                continue
            if name in OFF:
                refuse(owner, **{name: OFF[name]})
            else:
                unknown.append(f"{path!r:.80} {json.dumps(owner.given[name])[:80]}")
        if unknown:
            raise ConfigError(
                f"config.json: not known for model_type {self.kind}: {listed(unknown, 5)}. This "
                f"may change what the model computes; if its class in transformers ignores it, "
                f"take it out of the file")

    def unread(self) -> "Iterator[tuple[Record, str]]":
        """Yield (Record, name) for each unread key."""
        yield from ((self, name) for name in self.given if name not in self.has_read)
        for part in self.parts.values():
            yield from part.unread()


def with_usual_names(record: Fields, aliases: Names) -> Fields:
    """Rename a config.json's keys to their usual names. `aliases` is {alias: usual name}."""
    for name, usual in aliases.items():
        if name in record and record.get(usual, record[name]) != record[name]:
            raise wrong(name, record[name], f" is another name of {usual}, which is "
                        f"{record[usual]!r:.80}")
    return {aliases.get(name, name): value for name, value in record.items()}


def _is(kind, value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        return number and math.isfinite(value)
    return isinstance(value, kind) and (kind is not int or number)


def as_config(cls: Any, path: Any, fields: Fields) -> Any:
    """Make a config of class `cls` from these fields, which came from the file at `path`."""
    for name, option in options(cls).items():
        if not fits(option, fields.get(name, option.default)):
            raise ConfigError(f"{path}: {name} would be {fields[name]!r:.80}; expected "
                              f"{KINDS[option.kind]}")
    try:
        return cls(**fields)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


# -------------------------------------------------------------------------------------------
# Parts of a config.json

def refuse(r: Any, **expected: Any) -> None:
    """Reject a model if one of these keys differs from the value that we support, or from every
    value in a tuple. Null equals false and 0, except in a tuple."""
    for name, known in expected.items():
        value = known[-1] if isinstance(known, tuple) else known
        given = r.get(name, value)
        if given not in known if value is not known else (given or None) != (value or None):
            raise unknown(r, name, given, json.dumps(value))


def unknown(r: Record, name: str, given: Any, known: str) -> ConfigError:
    return wrong(r.at + name, given, f" is not supported for model_type {r.kind}, only {known}")


def classed(r: Record, heads: dict[str, Fields]) -> Fields:
    """Return the head's fields for the first class in `architectures`. `heads` is {regex for class
    names: fields}; "" matches a file that names no class."""
    given = r.get("architectures") or [""]
    name = given[0] if isinstance(given, list) else None
    found = [fields for known, fields in heads.items() if re.fullmatch(known, str(name))]
    if not found:
        raise unknown(r, "architectures", given, ", ".join(filter(None, heads)))
    return {**found[0], **(labels(r) if found[0].get("head") == "classes" else {})}


LANGUAGE_MODELS = {"": {}, r".*For(CausalLM|ConditionalGeneration)": {},
                   r".*(?<!Encoder)(?<!DoubleHeads)Model": {}}


def decoder_head(r: Record) -> Fields:
    """Return the fields of a decoder's head: {} for a language model, or a last-token classifier's
    fields. Reject other heads."""
    return classed(r, {**LANGUAGE_MODELS,
                       ".*ForSequenceClassification": {"head": "classes", "pool": "last"}})


def labels(r: Record) -> Fields:
    """Return the field `labels`, the number of classes; 1 means regression."""
    names = r.plain("id2label")
    found = len(names) if isinstance(names, dict) else r.get("num_labels") or 2
    count({"labels": found}, "labels")
    refuse(r, problem_type=(None, "regression" if found == 1 else "single_label_classification"))
    return {"labels": found}


def activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise wrong("the activation", name, f" is not known; expected one of "
                    f"{', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def count(r: Any, name: str, most: int = MOST) -> int:
    """Read this key, which must be an integer from 1 to `most`."""
    value = r[name]
    if not _is(int, value) or not 1 <= value <= most:
        raise wrong(getattr(r, "at", "") + name, value, f": expected an integer from 1 to {most}")
    return value


def an_id(name: str, value: Any, below: int = MOST) -> int:
    """Return this value if it's a valid token id: at least 0 and below a bound."""
    if not _is(int, value) or not 0 <= value < below:
        raise wrong(name, value, f": expected an id, at least 0 and below {below}")
    return value


def factor(r: Record, name: str) -> float:
    """Read a factor or bound, which must be positive. In a Config, 0 means none or derived."""
    if not _is(float, r[name]) or not r[name] > 0:
        raise wrong(r.at + name, r[name], ": expected a number above 0")
    return float(r[name])


# {option: its maximum} for options that are positive integers. FLAGS are options that are true or
# false.
COUNTS = {**dict.fromkeys("""d_model heads encoder_heads vocab_size seq_len source_len d_ff
    encoder_d_ff head_dim expert_d_ff shared_experts experts kv_rank layer_groups embed_dim
    token_types task_types channels image_size patch_size""".split(), MOST),
    "layers": MOST_LAYERS, "encoder_layers": MOST_LAYERS}
FLAGS = ("tied", "parallel_block", "router_norm")


def named(r: Record, **names: str) -> Fields:
    """Read the fields that config.json has under these names; "" skips a field."""
    found = {}
    for option, name in names.items():
        if option == "activation":
            found[option] = activation(r[name])
        elif name:
            value = count(r, name, COUNTS[option]) if option in COUNTS else r[name]
            found[option] = bool(value) if option in FLAGS else value
    return found


SIZES = dict(layers="num_hidden_layers", d_model="hidden_size", heads="num_attention_heads")
TEXT_SIZES = dict(SIZES, vocab_size="vocab_size", seq_len="max_position_embeddings")


def sizes(r: Record, **names: str) -> Fields:
    """Read a text model's sizes, which config.json has under the usual names or under these."""
    return named(r, **{**TEXT_SIZES, **names})


def tower(r: Record, **names: str) -> Fields:
    """Read the fields of layers with LayerNorm and an ungated MLP, which config.json has under the
    usual names or under these."""
    return {"norm": "layer", "gated": False, **named(
        r, **{**SIZES, "norm_eps": "layer_norm_eps", "activation": "hidden_act", **names})}


def pictures(r: Record) -> Fields:
    """Read the fields of an image encoder."""
    return {"stem": "patches", "causal": False, "channels": r.get("num_channels", 3),
            **named(r, image_size="image_size"), "patch_size": count(r, "patch_size",
                                                                     r["image_size"])}


def of_layers(name: str, values: Any, known: Sequence[Any], layers: int) -> list[Any]:
    """Return the list `values` if it has a known value for each layer; otherwise raise an error."""
    if not isinstance(values, list) or len(values) != layers or set(values) - set(known):
        raise wrong(name, values, f": expected one of {', '.join(map(str, known))} for each of "
                    f"{layers} layers")
    return values


def window(r: Record, kinds: list[str] | None = None, name: str = "sliding_window") -> Fields:
    """Read the fields of a window. `kinds` says which layers have it; None means all of them."""
    is_used = r["use_sliding_window"] if "use_sliding_window" in r.shared else True
    if not is_used or r.get(name) is None:
        return {}
    size = count(r, name, 2**30)
    kinds = "".join("l" if kind == "sliding_attention" else "g" for kind in kinds or "")
    if kinds and "l" not in kinds:
        return {}
    return dict(window=size, local_layers=kinds if "g" in kinds else "")


# -------------------------------------------------------------------------------------------
# Rotary positions
# transformers 4 writes rope_theta, rope_scaling (the type and its numbers) and, in some
# classes, partial_rotary_factor. Version 5 writes all of these to rope_parameters, with
# one entry per kind of layer if a class mixes several kinds. Both versions read
# rope_scaling; version 4 ignores rope_parameters.

# {scaling type: its keys besides rope_type}
SCALINGS = {"default": (), "linear": ("factor",), "dynamic": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
                     "mscale_all_dim", "truncate"),
            "longrope": ("short_factor", "long_factor", "attention_factor")}
TRAINED = "original_max_position_embeddings"


def as_older(record: Fields, shared: Sequence[str]) -> Fields:
    """Convert a config.json's rope_parameters to the format of transformers 4, which version 5 can
    read too. Version 4 would ignore version 5's format and silently use its own defaults."""
    r, model_type = dict(record), record["model_type"]
    new, moved = r.pop("rope_parameters", None), {}
    if new is None:
        return r
    if not isinstance(new, dict) or r.get("rope_scaling"):
        raise wrong("rope_parameters", new, " has the wrong type, or comes with rope_scaling: "
                                            "transformers 4 and 5 read different ones")
    scaling = dict(new)
    if model_type == "gemma3_text":
        local = dict(scaling.pop("sliding_attention"))
        moved["rope_local_base_freq"] = local.pop("rope_theta")
        if local.pop("rope_type", "default") != "default" or local:
            raise wrong("rope_parameters", local, ": of sliding_attention only the rope_type "
                        "'default' is supported")
        scaling |= scaling.pop("full_attention")    # refuse_unread reports other keys
    theta, share = ("rotary_emb_base", "rotary_pct") if model_type == "gpt_neox" else (
        "rope_theta", "partial_rotary_factor")
    moved[theta] = scaling.pop("rope_theta", None)
    if share in shared:
        moved[share] = scaling.pop("partial_rotary_factor", None)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    if kind == "longrope" and (model_type != "phi3" or TRAINED in r):   # its class has a default
        moved[TRAINED] = scaling.pop(TRAINED, None)
    for name, value in moved.items():
        if value is not None and r.setdefault(name, value) != value:
            raise wrong(name, r[name], f" differs from {value!r:.80} in rope_parameters")
    name = "type" if model_type == "phi3" else "rope_type"      # Phi-3 accepts no other name
    scaling = {name: kind, **scaling} if scaling or kind != "default" else None
    return {**r, "rope_scaling": scaling}


def rope(r: Record, theta: str = "rope_theta", share: str = "partial_rotary_factor",
         names: Names | None = None, known: Sequence[str] = tuple(SCALINGS),
         width: int = 0) -> Fields:
    """Read the fields of rotary positions. `theta` and `share` are the keys for the RoPE base and
    the rotated fraction of a head. `names` maps old scaling names to current ones. `known` are the
    scaling types that the class supports, and `width` is a head's width."""
    part, base, turned = r.part("rope_scaling"), r.get(theta), r.of_class(share)
    if share not in r.shared:       # this class ignores it, or only some of its functions read it
        refuse(r, partial_rotary_factor=(None, 1))
    # transformers 5 also reads these in rope_scaling.
    refuse(part, rope_theta=(None, base), partial_rotary_factor=(None, turned or 1))
    width = width or r.of_class("head_dim") or r["hidden_size"] // r["num_attention_heads"]
    dim = int(width * (1.0 if turned is None else turned))
    if dim < 2:
        raise wrong(share, turned, f": expected a share of a head with at least 2 of its {width} "
                                   f"numbers")
    scaling = _scaling(r, part, known, names or {})
    return dict(rope_theta=float(10000.0 if base is None else base),
                rotary_dim=0 if dim == width else dim,
                rope_scaling="" if scaling["rope_type"] == "default" else json.dumps(
                    scaling, sort_keys=True))


def _scaling(r, part, known, names):
    """Read the scaling of the rates, in the form that zigzag/parallel/rotary.py takes."""
    kinds = [part.get(name) for name in ("rope_type", "type")]
    kinds = [names.get(str(kind), kind) for kind in kinds if kind is not None] or ["default"]
    kind, longest = kinds[0], r["max_position_embeddings"]
    if kinds[-1] != kind or kind not in known:
        raise wrong(part.at + "rope_type", kind, f" is not known, or differs from `type`; expected "
                                                 f"one of {', '.join(known)}")
    # zigzag/parallel/rotary.py rejects a scaling with a missing number.
    scaling = {name: value for name in SCALINGS[kind] if (value := part.get(name)) is not None}
    own, top = part.get(TRAINED), r.get(TRAINED)
    if kind in ("llama3", "yarn", "longrope"):
        # If the file's top level has this key, transformers 5 uses that value. transformers 4 uses
        # it only for longrope, where it uses nothing else.
        of_5, of_4 = top or own or longest, (top if kind == "longrope" else own) or longest
        if of_4 != of_5 or own not in (None, of_5):
            raise wrong(part.at + TRAINED, own, f" with {top} at the top and "
                                                f"max_position_embeddings {longest}: transformers "
                                                f"4 and 5 use different ones")
        scaling[TRAINED] = of_5
    if kind == "longrope":
        scaling["factor"] = longest / of_5
        refuse(part, factor=(None, scaling["factor"]))
    if kind == "dynamic":
        scaling[TRAINED] = longest
    part.get("finetuned")       # a key in the earliest files with yarn
    return {**scaling, "rope_type": kind}
