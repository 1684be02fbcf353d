"""What a published config.json says: the parts that families share, as fields of
networks.transformer.Config.

Somebody else wrote it. A value of a wrong kind, or an option that we do not compute, is refused in
one line. What it leaves out is what the family's class in transformers takes by default: many of
these files leave out much, and few of the numbers would show in the shapes of the weights.
"""

import dataclasses
import json
import math
from typing import Any

from zigzag.core.errors import ConfigError

Fields = dict[str, Any]

# More than any model has, and few enough for a list of layers in memory.
MOST, MOST_LAYERS = 10**8, 10_000

ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
               "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
               "quick_gelu": "quick_gelu"}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


# -------------------------------------------------------------------------------------------
# The whole file

def complete(record: Fields, defaults: Fields) -> Fields:
    """A config.json with what it leaves out. Refuses what no family has."""
    for name, value in record.items():
        kind = type(defaults.get(name))
        kind = float if kind is int else kind       # (as_config finds what should be whole)
        if kind in KINDS and value is not None and not _is(kind, value):
            raise ConfigError(f"config.json: {name} {value!r:.80}: expected {KINDS[kind]}")
    refuse(record, quantization_config=None, quantization_bit=None, is_causal=True,
           pruned_heads=None)
    if "is_encoder_decoder" not in defaults:
        refuse(record, is_encoder_decoder=False)
    return {**defaults, **record}


def _is(kind, value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        return number and math.isfinite(value)
    return isinstance(value, kind) and (kind is not int or number)


def as_older(record: Fields, aliases: dict[str, str]) -> Fields:
    """A config.json as transformers 4 writes it, which transformers 5 reads too, of one by either.
    Aliases are other names for the same."""
    r = {aliases.get(name, name): value for name, value in record.items()}
    new, neox = r.pop("rope_parameters", None), r["model_type"] == "gpt_neox"
    if not new or r.get("rope_scaling"):
        return r
    if "full_attention" in new:
        local = {"rope_type": "default", **(new.get("sliding_attention") or {})}
        if local["rope_type"] != "default":
            raise ConfigError(f"config.json: rope_parameters of sliding_attention: the type "
                              f"{local['rope_type']!r:.80} is not supported, only 'default'")
        if "rope_theta" in local:
            r["rope_local_base_freq"] = local["rope_theta"]
        new = new["full_attention"]
    scaling = dict(new)
    for name, old in (("rope_theta", "rotary_emb_base" if neox else "rope_theta"),
                      ("partial_rotary_factor", "rotary_pct" if neox else "partial_rotary_factor")):
        if scaling.get(name) is not None:
            r[old] = scaling[name]
        scaling.pop(name, None)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if r["model_type"] == "phi3" and kind != "default":     # (it takes these three, no others)
        trained = scaling.get("original_max_position_embeddings")
        r.setdefault("original_max_position_embeddings", trained)
        scaling = {"type": "longrope", **{name: scaling[name] for name in (
            "short_factor", "long_factor")}}
    return {**r, "rope_scaling": scaling if kind != "default" else None}


def as_config(cls: Any, path: Any, fields: Fields) -> Any:
    """The configuration with these fields, which the file at `path` led to."""
    for f in dataclasses.fields(cls):
        value = fields.get(f.name, f.default)
        if f.type in KINDS and not _is(f.type, value):
            raise ConfigError(f"{path}: --{f.name} would be {value!r:.80}; expected "
                              f"{KINDS[f.type]}")
    try:
        return cls(**fields)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


# -------------------------------------------------------------------------------------------
# Its parts

def refuse(r: Fields, **expected: Any) -> None:
    """Refuse a model that is otherwise than we compute it. (Null is as good as false or 0.)"""
    for name, value in expected.items():
        if (r.get(name, value) or None) != (value or None):
            raise ConfigError(f"config.json: {name} {r[name]!r:.80} is not supported for "
                              f"model_type {r['model_type']}, only {json.dumps(value)}")


def activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"config.json: the activation {name!r:.80} is not known; expected one of "
                          f"{', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def count(r: Fields, name: str, most: int = MOST) -> int:
    """A whole number above 0."""
    if not _is(int, r[name]) or not 1 <= r[name] <= most:
        raise ConfigError(f"config.json: {name} {r[name]!r:.80}: expected a whole number from 1 to "
                          f"{most}")
    return r[name]


def sizes(r: Fields, layers: str = "num_hidden_layers", d_model: str = "hidden_size",
          heads: str = "num_attention_heads", seq_len: str = "max_position_embeddings") -> Fields:
    """Sizes under these names."""
    return dict(layers=count(r, layers, MOST_LAYERS), d_model=count(r, d_model),
                heads=count(r, heads), vocab_size=count(r, "vocab_size"),
                seq_len=count(r, seq_len))


def window(r: Fields, kinds: list[str] | None = None) -> Fields:
    """The window of those layers that have one: of all, if there is no list of their kinds."""
    if not r.get("sliding_window") or not r.get("use_sliding_window", True):
        return {}
    letters = {"sliding_attention": "l", "full_attention": "g"}
    if kinds is not None and (len(kinds) != r["num_hidden_layers"] or set(kinds) - letters.keys()):
        raise ConfigError(f"config.json: layer_types {kinds!r:.80}: expected one of "
                          f"{', '.join(letters)} for each of {r['num_hidden_layers']} layers")
    kinds = "".join(letters[kind] for kind in kinds or ["sliding_attention"])
    if "l" not in kinds:
        return {}
    return dict(window=r["sliding_window"], local_layers=kinds if "g" in kinds else "")


# -------------------------------------------------------------------------------------------
# Rotary positions

def rope(r: Fields) -> Fields:
    """Rotary positions, of a file by transformers 4."""
    scaling = dict(r.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    if "short_factor" in scaling:       # (Phi 3 has called it su and yarn)
        kind = "longrope"
    trained, longest = r.get("original_max_position_embeddings"), r["max_position_embeddings"]
    own = scaling.get("original_max_position_embeddings")
    if kind == "longrope" and (trained := trained or own):
        scaling["factor"] = longest / trained
    elif kind == "yarn":
        trained = own or trained
    elif kind == "llama3":
        trained = own
    elif kind == "dynamic":     # (whatever else the file says)
        trained = longest
    if kind in ("longrope", "yarn", "llama3", "dynamic"):
        scaling["original_max_position_embeddings"] = trained or longest
    width = r.get("head_dim") or r["hidden_size"] // r["num_attention_heads"]
    share = r.get("partial_rotary_factor") or 1.0
    return dict(rope_theta=float(r.get("rope_theta") or 10000.0),
                rotary_dim=0 if share == 1 else int(width * share),
                rope_scaling="" if kind == "default" else json.dumps(
                    {**scaling, "rope_type": kind}, sort_keys=True))
