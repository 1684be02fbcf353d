"""Read a network's weights from a published folder, and write such a folder.

    python model.py --run RUN --export DIR      export a run's weights for transformers and others
"""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any, Sequence

from published.arrays_of_folder import DTYPES, Folder, read_config, read_weights, write_folder
from published.llama import TO_PUBLISHED, families_of, family_of, fields_of
from published.record import as_config
from published.reference import code_difference
from zigzag.core.errors import ConfigError
from zigzag.core.flags import from_flags
from zigzag.core.mesh import cast
from zigzag.core.options import check_values, flag
from zigzag.core.parts import place
from zigzag.disk.checkpoint import run_record
from zigzag.disk.tokenizers import copy_files, tokenizer_of
from zigzag.parallel import low_rank
from zigzag.parallel.network import ComputeOptions, Network, Params, model_type, network_of_record
from zigzag.parallel.saved import is_custom, load_run

# -------------------------------------------------------------------------------------------
# Published folders

def hf_config(network: Network, folder: str | Path, **fields: Any) -> Any:
    """Return the config of a published model, with these fields overridden. Only options for
    training and execution can be overridden."""
    if other := fields.keys() - (may := _may_change(network)):
        raise ConfigError(f"{folder}: {min(other)} follows from its config.json and its weights; "
                          f"you can give only {', '.join(sorted(may))}")
    record = read_config(folder)
    found = fields_of(record, families_of(network))
    if seen := family_of(record, families_of(network)).seen:
        found |= seen(record, found, lambda: Folder(folder).arrays)
    return as_config(network.config, Path(folder) / "config.json", found | fields)


def _may_change(network):
    """Return the options that only affect how we train and execute a published model."""
    return {*network.trained, *(f.name for f in dataclasses.fields(ComputeOptions))} - {"published"}


def load_hf(network: Network, folder: str | Path, mesh: Any = None, edited: bool = False,
            stored: str = "float32", **fields: Any) -> tuple[Params, Any]:
    """Load (weights, config) of a folder that this network describes, the weights split over `mesh`
    in dtype `stored`. `fields` set options of the config, as in published.load_hf."""
    config = hf_config(network, folder, **fields)
    check_hf(network, folder, config, edited)       # before building large shapes
    places = cast(network.places(config, mesh), stored)
    return read_hf(network, folder, config, places), config


def check_hf(network: Network, folder: str | Path, config: Any, edited: bool = False) -> None:
    """Reject an incomplete folder. Unless `edited`, also reject a network whose code no longer
    computes the published model."""
    read_hf(network, folder, config)
    if not edited and (differs := code_difference(network, config)):
        kind = model_type(config.published)
        raise ConfigError(f"{folder}: the code of the network {network.name} differs from this "
                          f"{kind}: {differs}; undo the edit of its code, or give --edited (in "
                          f"Python: edited=True) to load the weights anyway")


def read_hf(network: Network, folder: str | Path, config: Any, places: Params | None = None
            ) -> Params | None:
    """Read a published model's weights, sharded like `places` (shapes with shardings). Without
    `places`, only check the folder."""
    opened = Folder(folder)
    return read_weights(opened, family_of(opened.config, families_of(network)), config,
                        network.table(config), places)


def save_hf(network: Network, folder: str | Path, params: Params, config: Any,
            dtype: str = "float32") -> None:
    """Write a folder that transformers can read, with adapters merged. A model that didn't start
    from a published one becomes a LLaMA or a Mixtral if its options allow it."""
    if config.lora_rank:
        params, config = low_rank.merged(params), dataclasses.replace(config, lora_rank=0)
    weights, seen = dict, SEEN      # save a published model's weights unchanged
    if not config.published:
        if network.name not in TO_PUBLISHED:
            raise ConfigError(f"the network {network.name} can be saved only if it was loaded from "
                              f"a published folder (TO_PUBLISHED in published/llama.py says which "
                              f"others can)")
        config, weights = TO_PUBLISHED[network.name](config)
        seen = {"published"}
    _check_described(network, config, seen)
    if differs := code_difference(network, config):
        raise ConfigError(f"the code of the network {network.name} differs from the published one: "
                          f"{differs}; undo the edit of its code, or add a family for it (docs: "
                          f"published/llama.py)")
    family = family_of(json.loads(config.published), families_of(network))
    write_folder(folder, family, config, network.table(config), weights(params), dtype)


# A published model's options that depend on its folder's arrays or its class.
SEEN = {"tied", "pool_dense", "pad_id", "published"}


def _check_described(network, config, seen):
    """Reject options that differ from the config.json that we'd write, except those in `seen`."""
    may = _may_change(network)
    given = {name: getattr(config, name) for name in may if hasattr(config, name)}
    found = fields_of(json.loads(config.published), families_of(network))
    there = as_config(network.config, "config.json", found | given)
    for f in dataclasses.fields(config):
        mine, theirs = getattr(config, f.name), getattr(there, f.name)
        if mine != theirs and f.name not in may | seen:
            raise ConfigError(f"{f.name} is {mine!r:.80}, but the config.json to write says "
                              f"{theirs!r:.80} (model_type {model_type(config.published)})")


# -------------------------------------------------------------------------------------------
# The command line

@dataclasses.dataclass(frozen=True)
class Export:
    """python model.py --run RUN --export DIR: export a trained model as a Hugging Face folder"""
    run: str = "out"            # the --out of a train.py run
    export: str = ""            # the folder to write
    dtype: str = flag("float32", one_of=DTYPES)     # dtype of the written arrays: float32,
                                                    # bfloat16 or float16

    def __post_init__(self) -> None:
        check_values(self)


def export(argv: Sequence[str] | None = None) -> None:
    """Run the command: write a folder with a run's weights and its tokenizer's files."""
    options = from_flags(Export(), argv)
    if not options.export:
        raise ConfigError("--export '': expected a new folder")
    record, out = run_record(options.run), Path(options.export)
    if is_custom(record):
        raise ConfigError(f"--run {options.run}: its weights are a custom task's, which no "
                          f"published model has")
    network = network_of_record(record)
    params, config = load_run(options.run)
    save_hf(network, out, params, config, options.dtype)
    tokenizer = tokenizer_of(place(options.run), record) if "tokenizer" in record else None
    files = copy_files(tokenizer, out) if tokenizer else []
    without = "its tokens are bytes" if tokenizer else "the run has none"
    print(f"{out}: the weights of {options.run} in {options.dtype}, "
          + (f"with {', '.join(files)}" if files else f"without a tokenizer: {without}"))
    print(f"upload it: hf upload ORG/NAME {shlex.quote(options.export)}")
