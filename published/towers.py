"""Code shared by models with several transformers ("towers"). Each tower is a transformer.py with a
Config of its own, made from config.json and from the model's training options.

The configuration of the whole model is its language tower's, so that tokens, vocabulary and length
mean the same as elsewhere.
"""

from typing import Any

from published import record as published_config
from published.general import Config
from published.record import Fields, Record, as_config
from zigzag.core.errors import ConfigError

# Options of training and computing: all towers have the model's.
TRAINED = ("dropout", "dtype", "remat", "kernel", "sum_dtype", "lora_rank")


def sizes(r: Record) -> Fields:
    """The fields of a tower without a head, with biases everywhere."""
    return dict(published_config.tower(r, d_ff="intermediate_size"), embed_scale=1.0,
                biases="qkv,out,mlp", head="none")


def tower(c: Any, name: str, fields: Fields) -> Any:
    """The Config of the tower `name` of the model c."""
    return as_config(Config, f"config.json, {name}",
                     {**fields, **{option: getattr(c, option) for option in TRAINED if c}})


def check_axes(mesh: Any, why: str) -> None:
    """Refuse the mesh axes pipe, which needs equal layers, and seq, which needs one sequence."""
    for axis in ("pipe", "seq"):
        if (size := mesh.shape.get(axis, 1)) > 1:
            raise ConfigError(f"mesh axis {axis}={size}: {why}; give its devices to data, fsdp or "
                              f"tensor")
