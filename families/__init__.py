"""Kinds of models that are not model.py's transformer, a file each, made of its parts."""

import json
from pathlib import Path
from typing import Any

import model
from families import blip2, clip, sam, swin
from zigzag.network import Network
from zigzag.published import read_config

# By the model_type of a published config.json.
KINDS: dict[str, Network] = {"blip-2": blip2.NETWORK, "clip": clip.NETWORK, "swin": swin.NETWORK,
                             "sam": sam.NETWORK, "sam_vision_model": sam.NETWORK}


def network_of(config: Any) -> Network:
    """The kind of a model with this configuration."""
    kind = json.loads(config.published)["model_type"] if config.published else ""
    return KINDS.get(kind, model.TRANSFORMER)


def network_of_folder(folder: str | Path) -> Network:
    """The kind of a published model."""
    return KINDS.get(read_config(folder)["model_type"], model.TRANSFORMER)


def hf_config(folder: str | Path, **fields: Any) -> Any:
    """The configuration of a published model of any kind, but for these fields."""
    return network_of_folder(folder).hf_config(folder, **fields)
