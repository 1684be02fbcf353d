"""Networks: model.py's plain decoder, and those of published models, a file each.

    transformer   decoders, encoders and encoder-decoders, with what their families do differently:
                  its options are in config.py, its weights in tables.py, the rest of it in
                  positions.py and stems.py
    clip  swin  sam  blip2      models of pictures, made of its parts (towers.py, windows.py)

Read transformer.py when a published model is not the plain decoder, or to add a family (hub). A
network of your own is a file here, in NETWORKS: a Config, a table of weights, a loss, a batch, and
what the machinery may ask (zigzag/weights/network.py). These files import shard.py, one another and
any wing but run and measure; this one alone imports model.py, to choose.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import model
from networks import blip2, clip, sam, swin, transformer
from zigzag.core.errors import ConfigError
from zigzag.core.flags import is_derived
from zigzag.disk.checkpoint import run_config, run_record
from zigzag.hub import folders
from zigzag.hub.llama import PLAIN_OPTIONS, family_of
from zigzag.hub.published import read_config
from zigzag.weights.network import Network, Params
from zigzag.weights.positions import scaling_type
from zigzag.weights.presets import PRESETS as FIELDS

NETWORKS: dict[str, Network] = {network.name: network for network in (
    model.NETWORK, transformer.NETWORK, blip2.NETWORK, clip.NETWORK, swin.NETWORK, sam.NETWORK)}

# By the model_type of a published config.json: the others are the plain decoder or transformer.py.
KINDS: dict[str, Network] = {kind: network for network in (
    blip2.NETWORK, clip.NETWORK, swin.NETWORK, sam.NETWORK) for kind in network.families}


# -------------------------------------------------------------------------------------------
# Which network

def network_of(config: Any) -> Network:
    """The network of a configuration, a network's own or a run's."""
    config = getattr(config, "network", config)
    if type(config) is transformer.Config:
        return KINDS.get(_model_type(config.published), transformer.NETWORK)
    for network in NETWORKS.values():
        if type(config) is network.config:
            return network
    raise TypeError(f"{type(config)} is the configuration of no network in networks.NETWORKS")


def lacking(fields: dict[str, Any]) -> list[str]:
    """The options that the plain decoder lacks, among fields of transformer.Config: those that are
    not as they always are there. (A fork's own option may have the name of another one here.)"""
    usual = {f.name: f.default for f in dataclasses.fields(transformer.Config)}
    found = [name for name, value in fields.items()
             if name in usual and name not in PLAIN_OPTIONS and value != usual[name]]
    kind = scaling_type(fields.get("rope_scaling", ""))
    return found + ["rope_scaling"] * (kind not in ("default", "linear", "llama3"))


def network_of_fields(fields: dict[str, Any]) -> Network:
    """The network that has these options: the plain decoder, if it has all of them."""
    kind = _model_type(fields.get("published", ""))
    if kind in KINDS:
        return KINDS[kind]
    is_plain = kind in ("", *model.NETWORK.families) and not lacking(fields)
    return model.NETWORK if is_plain else transformer.NETWORK


def _model_type(published):
    try:
        return json.loads(published)["model_type"] if published else ""
    except (ValueError, TypeError, KeyError):       # (the configuration says what is wrong)
        return ""


def network_of_record(record: dict[str, Any]) -> Network:
    """The network of a run, by its config.json. A run of an earlier version names none: it is of
    the plain decoder, if that has all of its options. (A run that trained routers is of the general
    network, since the plain decoder rounds their loss differently.)"""
    name = record.get("network")
    if name is None and record.get("experts") and not record.get("published"):
        return transformer.NETWORK
    if name is None:
        return network_of_fields(record)
    if name not in NETWORKS:
        raise ConfigError(f"config.json: the network {name!r:.80} is not known; expected one of "
                          f"{', '.join(NETWORKS)}")
    return NETWORKS[name]


def network_of_folder(folder: str | Path) -> Network:
    """The network of a published model."""
    record = read_config(folder)
    if record["model_type"] in KINDS:
        return KINDS[record["model_type"]]
    family_of(record, others=KINDS)     # (is there one?)
    return network_of_fields(dataclasses.asdict(folders.hf_config(transformer.NETWORK, folder)))


def config_of_run(folder: str | Path, flag: str = "--run") -> Any:
    """The configuration of a run's network."""
    return run_config(folder, network_of_record(run_record(folder, flag)).config, flag)


def describe(config: Any) -> str:
    """Which network a configuration is of, and why, for a person."""
    network, config = network_of(config), getattr(config, "network", config)
    if network is model.NETWORK:
        return "decoder (model.py)"
    if network is not transformer.NETWORK:
        return f"{network.name} (networks/): model_type {_model_type(config.published)}"
    names = lacking(dataclasses.asdict(config))
    names = [name for name in names if not is_derived(config, name)] or names
    options = [f"{name}={getattr(config, name)}" for name in names]
    more = f" and {len(options) - 4} more" if len(options) > 4 else ""
    why = f"the plain decoder has no {', '.join(options[:4])}{more}" if options else (
        "--model transformer")
    return f"transformer (networks/transformer.py): {why}"


def config_of(fields: dict[str, Any]) -> Any:
    """The configuration of the network that has these options. (What it lacks is at its default.)
    """
    network = network_of_fields(fields)
    own = {f.name for f in dataclasses.fields(network.config)}
    return network.config(**{name: value for name, value in fields.items() if name in own})


PRESETS = {name: config_of(fields) for name, fields in FIELDS.items()}


# -------------------------------------------------------------------------------------------
# Weights

def hf_config(folder: str | Path, **fields: Any) -> Any:
    """The configuration of a published model, but for these fields."""
    return folders.hf_config(network_of_folder(folder), folder, **fields)


def load_hf(folder: str | Path, mesh: Any = None, **fields: Any) -> tuple[Params, Any]:
    """The weights and the configuration of a published model (a Hugging Face folder). The weights
    go straight into their shards on the mesh; without a mesh they are on one device. `fields` of
    the configuration may say how to train it."""
    return folders.load_hf(network_of_folder(folder), folder, mesh, **fields)


def read_hf(folder: str | Path, config: Any, places: Params | None = None) -> Params | None:
    """The weights in these places (shapes with shardings). Without places, only a look at the
    folder."""
    return folders.read_hf(network_of(config), folder, config, places)


def save_hf(folder: str | Path, params: Params, config: Any, dtype: str = "float32") -> None:
    """A folder that transformers reads."""
    folders.save_hf(network_of(config), folder, params, getattr(config, "network", config), dtype)


def load_run(folder: str | Path, mesh: Any = None, step: int | None = None,
             dtype: str = "float32") -> tuple[Params, Any]:
    """The weights, in this precision, and the network's configuration of a run, at its newest (or
    given) step."""
    return folders.load_run(network_of_record(run_record(folder)), folder, mesh, step, dtype)
