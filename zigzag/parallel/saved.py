"""Reading a run's weights.

    load_run            return (weights, config) for a run of one of our networks or a custom task
    read_run_weights    return a run's sharded weights, with adapters merged
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zigzag.core.chips import compiler_options
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import cast, make_mesh, mesh_of
from zigzag.core.parts import part
from zigzag.disk import checkpoint
from zigzag.parallel import low_rank
from zigzag.parallel.network import Network, Params, config_of_run, network_of_record


def load_run(folder: str | Path, mesh: Any = None, step: int | None = None,
             dtype: str = "float32") -> tuple[Params, Any]:
    """Return a run's (weights in this dtype, network config) at this step (None: the newest). The
    weights load directly into their shards on the mesh (None: onto a single device). The weights of
    a custom task (train.fit) come back as nested dicts, with every array whole on every device."""
    record = checkpoint.run_record(folder)
    if is_custom(record):
        place = NamedSharding(mesh or make_mesh(jax.devices()[:1]), P())
        wanted = jax.tree.map(lambda x: x.update(sharding=place),
                              checkpoint.saved_shapes(folder, step))
        return cast(checkpoint.read_newest(folder, wanted, step), dtype), config_of_run(folder)
    network = network_of_record(record)
    config = dataclasses.replace(checkpoint.run_config(folder, network.config), lora_rank=0)
    params = read_run_weights(network, folder, network.places(config, mesh), step)
    return cast(params, dtype), config


def is_custom(record: dict[str, Any]) -> bool:
    """Return whether a run's weights belong to a custom task instead of a network."""
    return record.get("own_weights", record.get("vocab_size") == 0)


def read_run_weights(network: Network, folder: str | Path, wanted: Params,
                     step: int | None = None, flag: str = "--run") -> Params:
    """Read the weights of the run that `flag` names, sharded like `wanted` (shapes with shardings).
    Merge any adapters into the weights that the run started from. Report and skip damaged
    checkpoints."""
    record = checkpoint.run_record(folder, flag)
    config = checkpoint.run_config(folder, network.config, flag)
    if not config.lora_rank:
        return checkpoint.read_newest(folder, wanted, step, flag)
    adapters, _ = low_rank.split(network.places(config, mesh_of(wanted)))
    adapters = checkpoint.read_newest(folder, adapters, step, flag)
    without, source = dataclasses.replace(config, lora_rank=0), record["init_from"]
    compiled = functools.partial(jax.jit, compiler_options=compiler_options(mesh_of(wanted)),
                                 out_shardings=jax.tree.map(lambda w: w.sharding, wanted))
    if not source:
        where, read = f"--seed {record['seed']}", lambda: compiled(
            functools.partial(network.init, without))(jax.random.key(record["seed"]))
    elif source == record["model"]:
        where, read = source, lambda: part("published.folders", f"{flag} {folder}").read_hf(
            network, source, without, wanted)
    else:
        where, read = f"the run {source}", lambda: read_run_weights(
            network, source, wanted, record.get("base_step"), flag)
    about = (f"{flag} {folder} has only adapters (--lora_rank {config.lora_rank}), for weights "
             f"from {where}")
    try:
        frozen = read()
    except ConfigError as e:
        raise ConfigError(f"{about}, which are not there: {e}") from None
    found = low_rank.fingerprint(cast(frozen, record["dtype"]))
    if found != record["base_weights"]:
        raise ConfigError(f"{about}, which have changed (fingerprint {found}, not "
                          f"{record['base_weights']})")
    return compiled(lambda adapters, frozen: low_rank.merged(low_rank.join(adapters, frozen)),
                    donate_argnums=1)(adapters, frozen)
