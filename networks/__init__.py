"""Networks: model.py's plain decoder, and the networks of published models, a file each.

    transformer   decoders, encoders and encoder-decoders of all families: options in config.py,
                  weights in tables.py, more in positions.py and stems.py
    clip  swin  sam  blip2      models of pictures, made of its parts (towers.py, windows.py)

Read transformer.py when a published model is not the plain decoder, or to add a family (hub). A
network of your own is a file here that this one imports: a Config, a table of weights, a loss, the
shapes of a batch, and the other functions of zigzag/weights/network.py that it needs. These files
import shard.py, one another, and any wing except run and measure; only this one imports model.py,
to choose between it and the others.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import model
from networks import blip2, clip, sam, swin, transformer
from networks.config import lacking
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import best_dtype
from zigzag.disk.checkpoint import run_record
from zigzag.generate.engine import Engine
from zigzag.hub import folders
from zigzag.hub.llama import family_of
from zigzag.hub.published import read_config
from zigzag.weights.network import NETWORKS as NETWORKS
from zigzag.weights.network import Network, Params, config_of_run, model_type, network_of_record
from zigzag.weights.network import network_of as network_of
from zigzag.weights.presets import PRESETS as FIELDS
from zigzag.weights.presets import fields_of_preset, fields_of_weights

# {model_type of a published config.json: network}. All others are model.py's or transformer.py's.
KINDS: dict[str, Network] = {kind: network for network in (
    blip2.NETWORK, clip.NETWORK, swin.NETWORK, sam.NETWORK) for kind in network.families}


# -------------------------------------------------------------------------------------------
# Which network

def network_of_fields(fields: dict[str, Any]) -> Network:
    """The network that has these options: the plain decoder, if it has all of them."""
    kind = model_type(fields.get("published", ""))
    if kind in KINDS:
        return KINDS[kind]
    is_plain = kind in ("", *model.NETWORK.families) and not lacking(fields)
    return model.NETWORK if is_plain else transformer.NETWORK


def network_of_folder(folder: str | Path) -> Network:
    """The network of a published model."""
    record = read_config(folder)
    if record["model_type"] in KINDS:
        return KINDS[record["model_type"]]
    family_of(record, others=KINDS)     # (refuses unknown families)
    return network_of_fields(dataclasses.asdict(folders.hf_config(transformer.NETWORK, folder)))


def config_of(fields: dict[str, Any]) -> Any:
    """The configuration, from fields of a transformer.Config, of the network that has these
    options."""
    network = network_of_fields(fields)
    own = {f.name for f in dataclasses.fields(network.config)}
    return network.config(**{name: value for name, value in fields.items() if name in own})


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
            return Engine(network, config).for_decoding(params), config
    folders.check_hf(network, folder, config, edited)
    places = Engine(network, config).places(mesh)
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
