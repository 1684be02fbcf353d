"""What models of several transformers ("towers") share: each is a transformer.py, with a
configuration of its own, which follows from config.json and from how the whole is trained.

The configuration of the whole is that of its language tower, so that tokens, vocabulary and length
mean there what they mean elsewhere.
"""

from typing import Any

from networks.config import Config
from zigzag.core.errors import ConfigError
from zigzag.hub.published_config import MOST_LAYERS, Fields, Record, activation, as_config, count

# How a model is trained and computed: for all towers as the flags say.
TRAINED = ("dropout", "dtype", "remat", "kernel", "sum_dtype", "lora_rank")


def sizes(r: Record) -> Fields:
    """A tower's fields: LayerNorm, an MLP of two products, all with biases."""
    return dict(layers=count(r, "num_hidden_layers", MOST_LAYERS), d_model=count(r, "hidden_size"),
                heads=count(r, "num_attention_heads"), d_ff=count(r, "intermediate_size"),
                norm="layer", norm_eps=r["layer_norm_eps"], gated=False, embed_scale=1.0,
                activation=activation(r["hidden_act"]), biases="qkv,out,mlp")


def pictures(r: Record, channels: int) -> Fields:
    """And those of one that reads pictures."""
    return dict(stem="patches", image_size=count(r, "image_size"), channels=channels,
                patch_size=count(r, "patch_size"), causal=False, head="none", positions="learned")


def tower(c: Any, name: str, fields: Fields) -> Any:
    """The configuration of a tower of the model c."""
    return as_config(Config, f"config.json, {name}",
                     {**fields, **{option: getattr(c, option) for option in TRAINED if c}})


def check_axes(mesh: Any, why: str) -> None:
    """Refuse the axes that split layers which are alike, or one sequence."""
    for axis in ("pipe", "seq"):
        if (size := mesh.shape.get(axis, 1)) > 1:
            raise ConfigError(f"mesh axis {axis}={size}: {why}; give its devices to data, fsdp or "
                              f"tensor")
