"""Published models: their networks, reading and writing their folders, and presets. This is a part:
delete it if you train only the decoder of model.py.

    transformer   decoders, encoders and encoder-decoders of all families: options in general.py,
                  weights in tables.py, more in positions.py and stems.py
    clip  swin  sam  blip2      models of pictures, built from its parts (general.py, windows.py)
    llama  gpt  encoders  encoder_decoders      families: config.json and arrays (family.py)
    record  arrays_of_folder  folders           reading and writing a folder
    reference   whether an edited network still computes the published model
    presets     shapes by name

Recipes that train or read published models need this part, and so does tasks/pairs.py for its
encoder-decoders. Read transformer.py when a published model is not the plain decoder. To add a
family, see llama.py. A custom network is a file here that this file imports. It has a Config, a
table of weights, a loss, the shapes of a batch, and any other functions of
zigzag/parallel/network.py that it needs. These files import shard.py, each other and zigzag/. Only
this one imports model.py, to choose between it and the other networks.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import model
from published import blip2, clip, folders, sam, swin, transformer
from published.arrays_of_folder import read_config
from published.general import lacking
from published.llama import families_of, family_of
from published.llama import start_id as start_id
from published.presets import PRESETS as FIELDS
from published.presets import fields_of_preset
from zigzag.core.mesh import best_dtype
from zigzag.disk.tokenizers import Tokenizer, published_tokenizer
from zigzag.generate.engine import Engine
from zigzag.generate.rows import check_writes
from zigzag.parallel.network import Network, Params, model_type
from zigzag.parallel.network import network_of as network_of
from zigzag.parallel.saved import load_run as load_run

# {model_type of a published config.json: network}. model.py or transformer.py has the other types.
KINDS: dict[str, Network] = {kind: network for network in (
    blip2.NETWORK, clip.NETWORK, swin.NETWORK, sam.NETWORK) for kind in network.families}


# -------------------------------------------------------------------------------------------
# Which network

def network_of_fields(fields: dict[str, Any]) -> Network:
    """The network that has these options: the plain decoder, if it has them all."""
    kind = model_type(fields.get("published", ""))
    if kind in KINDS:
        return KINDS[kind]
    is_plain = kind in ("", *families_of(model.NETWORK)) and not lacking(fields)
    return model.NETWORK if is_plain else transformer.NETWORK


def network_of_folder(folder: str | Path) -> Network:
    """The network of a published model."""
    record = read_config(folder)
    if record["model_type"] in KINDS:
        return KINDS[record["model_type"]]
    family_of(record, others=KINDS)     # refuses unknown families
    return network_of_fields(dataclasses.asdict(folders.hf_config(transformer.NETWORK, folder)))


def config_of(fields: dict[str, Any]) -> Any:
    """Fields of a transformer.Config as the configuration of the network that has these
    options."""
    network = network_of_fields(fields)
    own = {f.name for f in dataclasses.fields(network.config)}
    return network.config(**{name: value for name, value in fields.items() if name in own})


PRESETS = {name: config_of(fields) for name, fields in FIELDS.items()}


def is_folder(name: str) -> bool:
    """Whether --model NAME means a folder: gpt2 is a preset, gpt2/ is a folder."""
    return name not in PRESETS and Path(name).is_dir()


def preset(name: str, given: dict[str, Any]) -> tuple[Network, dict[str, Any]]:
    """The network of --model NAME and its fields, for the flags `given`."""
    fields = fields_of_preset(name, given)
    is_general = name == transformer.NETWORK.name
    return transformer.NETWORK if is_general else network_of_fields(fields), fields


# -------------------------------------------------------------------------------------------
# Weights

def hf_config(folder: str | Path, **fields: Any) -> Any:
    """The configuration of a published model, with these fields changed."""
    return folders.hf_config(network_of_folder(folder), folder, **fields)


def load_hf(folder: str | Path, mesh: Any = None, edited: bool = False, **fields: Any
            ) -> tuple[Params, Any]:
    """(weights, configuration) of a published model (a Hugging Face folder). Weights go straight
    into their shards on the mesh (None: onto one device). `fields` of the configuration may say how
    to train it. `edited`: load it even if the network's code computes something else."""
    return folders.load_hf(network_of_folder(folder), folder, mesh, edited, **fields)


def load_for_decoding(folder: str, mesh: Mesh, edited: bool = False
                      ) -> tuple[Params, Any, Tokenizer]:
    """(weights, configuration, tokenizer) for sample.py --model. The weights are in the form that
    decoding uses, with a list of layers, in the precision that the devices compute best. The stacks
    of layers for training are never made."""
    network = network_of_folder(folder)
    config = folders.hf_config(network, folder, dtype=best_dtype(mesh))
    check_writes(network, config, f"--model {folder}", mesh)
    tokenizer = published_tokenizer(folder, config.vocab_size)
    return *_for_decoding(network, config, folder, mesh, edited), tokenizer


def _for_decoding(network, config, folder, mesh, edited):
    if network.decoder_of:      # a decoder among other towers: its layers are stacked here
        network.check(config, mesh)
        params, config = folders.load_hf(network, folder, mesh, edited, dtype=best_dtype(mesh))
        with jax.set_mesh(mesh):
            return Engine(network, config).for_decoding(params), config
    folders.check_hf(network, folder, config, edited)
    places = Engine(network, config).places(mesh)
    return folders.read_hf(network, folder, config, places), config


def save_hf(folder: str | Path, params: Params, config: Any, dtype: str = "float32") -> None:
    """Write a Hugging Face folder that transformers can read."""
    folders.save_hf(network_of(config), folder, params, getattr(config, "network", config), dtype)
