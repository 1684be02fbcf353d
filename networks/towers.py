"""Code shared by models with several transformers ("towers"). Each tower is a transformer.py with a
Config of its own, made from config.json and from the model's training options.

The configuration of the whole model is its language tower's, so that tokens, vocabulary and length
mean the same as elsewhere.
"""

from typing import Any

from networks.config import Config
from zigzag.core.errors import ConfigError
from zigzag.hub.published_config import MOST_LAYERS, Fields, Record, activation, as_config, count

# Options of training and computing: all towers have the model's.
TRAINED = ("dropout", "dtype", "remat", "kernel", "sum_dtype", "lora_rank")


def sizes(r: Record) -> Fields:
    """The fields of a tower: LayerNorm, an MLP of two products, biases everywhere."""
    return dict(layers=count(r, "num_hidden_layers", MOST_LAYERS), d_model=count(r, "hidden_size"),
                heads=count(r, "num_attention_heads"), d_ff=count(r, "intermediate_size"),
                norm="layer", norm_eps=r["layer_norm_eps"], gated=False, embed_scale=1.0,
                activation=activation(r["hidden_act"]), biases="qkv,out,mlp")


def pictures(r: Record, channels: int) -> Fields:
    """The further fields of a tower that reads pictures."""
    return dict(stem="patches", image_size=count(r, "image_size"), channels=channels,
                patch_size=count(r, "patch_size"), causal=False, head="none", positions="learned")


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
