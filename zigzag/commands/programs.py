"""The programs behind train.py's command line, built without data, and the table of weights.

    choose_mesh    resolve --mesh auto
    on_machine     prepare the config and mesh of a run on this machine
    ready_to_run   build the program and compile its step: train.compile_step
    program_of     build only the program
    show_sharding  run python shard.py
"""

from typing import Any

import jax

import train
from zigzag.commands import command_line
from zigzag.core.flags import Argv, change
from zigzag.core.mesh import abstract_mesh, keep_compiled, mesh_sizes
from zigzag.core.parts import Unused, commands, part
from zigzag.disk.tokenizers import Bytes
from zigzag.parallel import low_rank
from zigzag.parallel.network import network_of
from zigzag.parallel.rule import explain, moment_specs, parse_overrides, state_shapes
from zigzag.parallel.storage import split_ends
from zigzag.run.checks import check_network
from zigzag.run.plan import Program, compiled, resolve_dtype
from zigzag.run.running import machine
from zigzag.run.task import without_data


def choose_mesh(config: Any) -> tuple[Any, tuple[Program, jax.stages.Compiled] | None]:
    """Return (the config with the mesh that --mesh auto chooses, its program and compiled step).
    Without --mesh auto, return (the config, None)."""
    if config.mesh != "auto":
        return config, None
    return part("forecast.dry_run", "--mesh auto").choose_mesh(config)


def on_machine(config: Any) -> tuple[Any, Any]:
    """Return (the config of a run on this machine, with its mesh and dtype chosen; the mesh). Also
    make jax cache compiled programs on disk."""
    keep_compiled()
    config, _ = choose_mesh(config)
    mesh = machine(config)
    check_network(config, network_of(config), mesh)
    return resolve_dtype(config, mesh), mesh


def ready_to_run(config: Any) -> tuple[Program, jax.stages.Compiled]:
    """Return (the config's program, built without its data; the compiled step)."""
    config, ready = choose_mesh(config)
    if ready:
        return ready
    program = program_of(config)
    return program, compiled(program)


def program_of(config: Any) -> Program:
    """Return the config's program, built without its data. --mesh auto must be resolved already."""
    mesh = machine(config)
    config = resolved(config, mesh)
    check_network(config, network_of(config), mesh)
    return train.build(config, mesh, *without_data(config))


def resolved(config: Any, mesh: Any) -> Any:
    """Return the config with a dtype for this mesh, a vocabulary size and a step count."""
    config = resolve_dtype(config, mesh)
    # --epochs would need the data, but the program doesn't depend on the step count anyway.
    return change(config, epochs=0.0, vocab_size=config.network.vocab_size or Bytes.vocab_size)


def show_sharding(argv: Argv = None) -> None:
    """Run a command such as python shard.py --model llama-7b --shards 4: print how the mesh would
    split each weight, and why, without creating any weights."""
    given = command_line.read_flags(argv)
    command_line.check_unused(given, Unused(command_line.OF_TRAINING, ("bench",)),
                              "in python shard.py")
    config = command_line.config_of_flags(given)
    for flag, command in commands().items():
        if getattr(config, flag):
            return part(command.module, f"--{flag}").run(config)
    mesh = abstract_mesh(mesh_sizes(config.mesh, config.shards))
    config = change(config, vocab_size=config.network.vocab_size or Bytes.vocab_size)
    network = network_of(config)
    network.check(config.network, mesh)
    decisions = network.plan_weights(config.network, mesh, fsdp_min=config.fsdp_min,
                                     overrides=parse_overrides(config.override))
    shapes = network.weight_shapes(config.network)
    decisions = split_ends(shapes, decisions, mesh, config)
    params, chosen = shapes, decisions      # for the trained weights
    if config.network.lora_rank:
        decisions = low_rank.mark_frozen(decisions)
        shapes = jax.eval_shape(lambda w: low_rank.as_stored(w, config.network.dtype), shapes)
        params, chosen = (low_rank.split(tree)[0] for tree in (shapes, decisions))
    specs = moment_specs(params, chosen, mesh, config)
    state = state_shapes(train.optimizer(config, chosen), params, specs, mesh)
    print(explain(decisions, shapes, mesh, state))
