"""Networks: model.py's plain decoder, and the networks of published models, a file each.

    transformer   decoders, encoders and encoder-decoders of all families: options in config.py,
                  weights in tables.py, more in positions.py and stems.py
    clip  swin  sam  blip2      models of pictures, made of its parts (towers.py, windows.py)

Read transformer.py when a published model is not the plain decoder, or to add a family (hub). A
network of your own is a file here, listed in NETWORKS: a Config, a table of weights, a loss, the
shapes of a batch, and the other functions of zigzag/weights/network.py that it needs. These files
import shard.py, one another, and any wing except run and measure; only this one imports model.py,
to choose between it and the others.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Callable

import jax
from jax.sharding import Mesh

import model
from networks import blip2, clip, sam, swin, transformer
from zigzag.core.errors import ConfigError
from zigzag.core.flags import is_derived
from zigzag.core.mesh import best_dtype
from zigzag.disk.checkpoint import run_config, run_record
from zigzag.generate.decoding import for_decoding, places_for_decoding, specs_for_decoding
from zigzag.hub import folders
from zigzag.hub.llama import PLAIN_OPTIONS, family_of
from zigzag.hub.published import read_config
from zigzag.weights.network import Network, Params
from zigzag.weights.positions import scaling_type
from zigzag.weights.presets import PRESETS as FIELDS
from zigzag.weights.presets import fields_of_preset, fields_of_weights

NETWORKS: dict[str, Network] = {network.name: network for network in (
    model.NETWORK, transformer.NETWORK, blip2.NETWORK, clip.NETWORK, swin.NETWORK, sam.NETWORK)}

# {model_type of a published config.json: network}. All others are model.py's or transformer.py's.
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
    """The names of the fields of a transformer.Config that the plain decoder lacks and that differ
    from their defaults. (PLAIN_OPTIONS, not model.Config, says what it has: a fork's own option may
    have the name of another one here.)"""
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
    except (ValueError, TypeError, KeyError):       # (check_published refuses it)
        return ""


def network_of_record(record: dict[str, Any]) -> Network:
    """The network of a run, from its config.json."""
    name = record.get("network")
    if name not in NETWORKS:
        raise ConfigError(f"config.json: the network {name!r:.80} is not known; expected one of "
                          f"{', '.join(NETWORKS)}")
    return NETWORKS[name]


def network_of_folder(folder: str | Path) -> Network:
    """The network of a published model."""
    record = read_config(folder)
    if record["model_type"] in KINDS:
        return KINDS[record["model_type"]]
    family_of(record, others=KINDS)     # (refuses unknown families)
    return network_of_fields(dataclasses.asdict(folders.hf_config(transformer.NETWORK, folder)))


def config_of_run(folder: str | Path, flag: str = "--run") -> Any:
    """The configuration of a run's network."""
    return run_config(folder, network_of_record(run_record(folder, flag)).config, flag)


def describe(config: Any) -> str:
    """Text that says which network a configuration has, and why."""
    network, config = network_of(config), getattr(config, "network", config)
    if network is model.NETWORK:
        return "decoder (model.py)"
    if network is not transformer.NETWORK:
        kind = config.published and f" (networks/): model_type {_model_type(config.published)}"
        return network.name + kind
    names = lacking(dataclasses.asdict(config))
    names = [name for name in names if not is_derived(config, name)] or names
    options = [f"{name}={getattr(config, name)}" for name in names]
    more = f" and {len(options) - 4} more" if len(options) > 4 else ""
    why = f"the plain decoder has no {', '.join(options[:4])}{more}" if options else (
        "--model transformer")
    return f"transformer (networks/transformer.py): {why}"


def config_of(fields: dict[str, Any]) -> Any:
    """The configuration, from fields of a transformer.Config, of the network that has these
    options."""
    network = network_of_fields(fields)
    own = {f.name for f in dataclasses.fields(network.config)}
    return network.config(**{name: value for name, value in fields.items() if name in own})


def own_loss(config: Any, loss: Callable) -> Network | None:
    """The network of a configuration, if `loss` is its own, as tasks.language gives it: the tests
    compare that one with one device. None for any other, even one that only wraps it: a custom
    loss, which is compared before its run begins."""
    network = network_of(config)
    return network if isinstance(loss, functools.partial) and loss.func is network.loss else None


def flops_of_update(config: Any) -> float:
    """FLOPs of an update of a run with this configuration."""
    return network_of(config).training_flops(config.network, config.batch * config.seq_len)


PRESETS = {name: config_of(fields) for name, fields in FIELDS.items()}


def chosen(given: dict[str, Any]) -> tuple[Network, dict[str, Any], dict[str, Any]]:
    """(the network that the flags `given` choose, its fields by --model or --init_from, and the
    values of these two flags that a run records). The name gpt2 is a preset, gpt2/ is a folder."""
    name, run = given.get("model", "tiny"), given.get("init_from", "").rstrip("/")
    if not run and (name in PRESETS or not Path(name).is_dir()):
        fields = fields_of_preset(name, given)
        is_general = name == transformer.NETWORK.name
        network = transformer.NETWORK if is_general else network_of_fields(fields)
        return network, fields, {"model": name, "init_from": ""}
    if run and "model" in given:
        raise ConfigError(f"--model {name} --init_from {run}: both choose the model; give one of "
                          f"them")
    source = ({"model": "", "init_from": run} if run else
              {"model": name.rstrip("/"), "init_from": name.rstrip("/")})
    config = config_of_run(run, "--init_from") if run else hf_config(name)
    network = network_of(config)
    return network, fields_of_weights(given, network, config), source


# -------------------------------------------------------------------------------------------
# Weights

def hf_config(folder: str | Path, **fields: Any) -> Any:
    """The configuration of a published model, with these fields changed."""
    return folders.hf_config(network_of_folder(folder), folder, **fields)


def load_hf(folder: str | Path, mesh: Any = None, edited: bool = False, **fields: Any
            ) -> tuple[Params, Any]:
    """(weights, configuration) of a published model (a Hugging Face folder). The weights go
    straight into their shards on the mesh (None: onto one device). `fields` of the configuration
    may say how to train it. `edited`: also if the network's code computes something else."""
    return folders.load_hf(network_of_folder(folder), folder, mesh, edited, **fields)


def load_for_decoding(folder: str | Path, mesh: Mesh, edited: bool = False) -> tuple[Params, Any]:
    """As load_hf, but on a mesh, and with the weights as decoding uses them: in the precision that
    the devices are best at, with a list of layers (the stacks for training are never made)."""
    network = network_of_folder(folder)
    config = folders.hf_config(network, folder, dtype=best_dtype(mesh))
    if network.decoder_of:      # (a decoder among other towers: its layers are stacked here)
        network.check(config, mesh)
        params, config = folders.load_hf(network, folder, mesh, edited, dtype=best_dtype(mesh))
        with jax.set_mesh(mesh):
            return for_decoding(network, params, config.dtype,
                                specs_for_decoding(network, config, mesh)), config
    folders.check_hf(network, folder, config, edited)
    places = places_for_decoding(network, config, mesh)
    return folders.read_hf(network, folder, config, places), config


def save_hf(folder: str | Path, params: Params, config: Any, dtype: str = "float32") -> None:
    """Write a Hugging Face folder, which transformers reads."""
    folders.save_hf(network_of(config), folder, params, getattr(config, "network", config), dtype)


def load_run(folder: str | Path, mesh: Any = None, step: int | None = None,
             dtype: str = "float32") -> tuple[Params, Any]:
    """(weights in this dtype, the network's configuration) of a run at its newest or given step.
    Weights of a custom task (train.fit) are nested dicts, whole on every device of the mesh."""
    record = run_record(folder)
    if record.get("own_weights") or record.get("vocab_size") == 0:
        return folders.load_own(folder, mesh, step, dtype), config_of_run(folder)
    return folders.load_run(network_of_record(record), folder, mesh, step, dtype)
