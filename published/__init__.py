"""Published models: their networks, presets, and code to read and write their folders. This part is
optional: delete it if you only train the decoder in model.py.

    transformer   decoders, encoders and encoder-decoders of every family; its options are in
                  general.py, its weights in tables.py, the rest in positions.py and stems.py
    clip  swin  sam  sam_masks  blip2       vision models built from these and windows.py
    llama  gpt  encoders  encoder_decoders      families: config.json and arrays (family.py)
    record  arrays_of_folder  folders           read and write a folder
    hub_names   names on the Hugging Face hub: models, and datasets as --data
    reference   check that an edited network still computes the published model
    presets     model shapes by name

Recipes that train or read published models need this part, and tasks/pairs.py needs it for its
encoder-decoders. If a published model isn't the plain decoder, read transformer.py. To add a
family, see llama.py. To add a custom network, put its file here and import it in this file. The
file needs a Config, a weight table, a loss, the batch shapes, and whichever other functions in
zigzag/parallel/network.py apply. The files here import shard.py, each other and zigzag/. Only this
file imports model.py, to choose between it and the other networks.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import model
from published import blip2, clip, folders, hub_names, sam, sam_masks, swin, transformer
from published.arrays_of_folder import read_config
from published.general import lacking
from published.llama import families_of, family_of
from published.llama import start_id as start_id
from published.presets import PRESETS as FIELDS
from published.presets import fields_of_preset
from zigzag.core.hosts import assert_same_everywhere
from zigzag.core.mesh import best_dtype
from zigzag.core.options import only
from zigzag.disk.tokenizers import Tokenizer
from zigzag.generate.engine import Engine
from zigzag.generate.rows import check_writes
from zigzag.parallel.network import Network, Params, model_type
from zigzag.parallel.network import network_of as network_of
from zigzag.parallel.saved import load_run as load_run

# {model_type in a published config.json: network}. model.py and transformer.py cover all others.
KINDS: dict[str, Network] = {kind: part.NETWORK for part in (blip2, clip, swin, sam, sam_masks)
                             for kind in part.NETWORK.families}


# -------------------------------------------------------------------------------------------
# Which network

def network_of_fields(fields: dict[str, Any]) -> Network:
    """Return a network that has all of these options, preferably the plain decoder."""
    kind = model_type(fields.get("published", ""))
    if kind in KINDS:
        return KINDS[kind]
    is_plain = kind in ("", *families_of(model.NETWORK)) and not lacking(fields)
    return model.NETWORK if is_plain else transformer.NETWORK


def network_of_folder(folder: str | Path) -> Network:
    """Return the network for a published model's folder."""
    record = read_config(folder)
    if record["model_type"] in KINDS:
        return KINDS[record["model_type"]]
    family_of(record, others=KINDS)     # rejects unknown families
    return network_of_fields(dataclasses.asdict(folders.hf_config(transformer.NETWORK, folder)))


def config_of(fields: dict[str, Any]) -> Any:
    """Convert a transformer.Config's fields into the config of the network that defines them."""
    network = network_of_fields(fields)
    own = {f.name for f in dataclasses.fields(network.config)}
    return network.config(**only(fields, *own))


PRESETS = {name: config_of(fields) for name, fields in FIELDS.items()}


def folder_of(name: str) -> str:
    """Return the folder that --model NAME names, or a name on the hub with its commit, or "" for a
    preset. (gpt2 is a preset, but gpt2/ is a folder.)"""
    is_preset = name in PRESETS or not (Path(name).is_dir() or hub_names.repository(name))
    return "" if is_preset else hub_names.with_commit(name).rstrip("/")


def preset(name: str, given: dict[str, Any]) -> tuple[Network, dict[str, Any]]:
    """Return the network for --model NAME, and the fields that the name and flags imply."""
    fields = fields_of_preset(name, given)
    is_general = name == transformer.NETWORK.name
    return transformer.NETWORK if is_general else network_of_fields(fields), fields


# -------------------------------------------------------------------------------------------
# Weights

def hf_config(folder: str | Path, **fields: Any) -> Any:
    """Return the config of a published model, with these fields overridden."""
    folder = hub_names.with_commit(folder)
    return folders.hf_config(network_of_folder(folder), folder, **fields)


def load_hf(folder: str | Path, mesh: Any = None, edited: bool = False, **fields: Any
            ) -> tuple[Params, Any]:
    """Load (weights, config) from a Hugging Face folder, or a name on the hub (org/name@REVISION).
    Weights go straight into their shards on the mesh, or onto one device if `mesh` is None.
    `fields` override options for training and running the model, and `stored` is the weights'
    dtype. With `edited`, load even if the network's code computes something else."""
    folder = hub_names.with_commit(folder)
    return folders.load_hf(network_of_folder(folder), folder, mesh, edited, **fields)


def load_for_decoding(folder: str, mesh: Mesh, edited: bool = False
                      ) -> tuple[Params, Any, Tokenizer]:
    """Load (weights, config, tokenizer) for sample.py --model. The weights have the form that
    decoding uses, a list of layers, in the dtype that suits the devices best. Only for a decoder
    inside a larger model do we first build stacked layers, as in training."""
    folder = hub_names.with_commit(folder)
    assert_same_everywhere({"model": folder})       # each process asked the hub, or its own cache
    network = network_of_folder(folder)
    config = folders.hf_config(network, folder, dtype=best_dtype(mesh))
    check_writes(network, config, f"--model {folder}", mesh)
    tokenizer = hub_names.tokenizer_of(folder, config.vocab_size)
    engine = Engine(network, config)
    if network.decoder_of:
        network.check(config, mesh)
    folders.check_hf(network, folder, config, edited)
    places = network.places(config, mesh) if network.decoder_of else engine.places(mesh)
    params = folders.read_hf(network, folder, config, places)
    with jax.set_mesh(mesh):        # layers that are a list already stay as they are
        return engine.for_decoding(params), config, tokenizer


def save_hf(folder: str | Path, params: Params, config: Any, dtype: str = "float32") -> None:
    """Write a Hugging Face folder that transformers can read."""
    folders.save_hf(network_of(config), folder, params, getattr(config, "network", config), dtype)
