"""The commands of train.py besides training.

    choose_mesh    --mesh auto
    on_machine     the configuration and the mesh of a run here
    ready_to_run   the program and its compiled step, without data: train.compile_step
    dry_run        --topology
    show_sharding  python shard.py: the table of weights
    bench          --bench
"""

import dataclasses
import functools
import time
from typing import Any, Sequence

import jax
import numpy as np

import train
from zigzag.commands import command_line
from zigzag.core.flags import change
from zigzag.core.mesh import abstract_mesh, keep_compiled, make_mesh, mesh_sizes
from zigzag.core.report import BenchReporter, Reporter
from zigzag.disk.batches import batch_shapes
from zigzag.disk.mixture import numbers_at
from zigzag.disk.tokenizers import Bytes
from zigzag.measure import forecast
from zigzag.measure.traffic import expected_traffic, is_complete
from zigzag.rule.rule import explain, parse_overrides, state_shapes, zero1_specs
from zigzag.run.begin import devices_of, machine
from zigzag.run.checks import check_network
from zigzag.run.loop import Loop, flush_metrics, prepare, report_header
from zigzag.run.plan import Program, compiled, resolve_dtype
from zigzag.run.task import Task, without_data
from zigzag.weights import lora
from zigzag.weights.network import flops_of_update, network_of

# The updates of --bench: before the measurement, and in it.
WARM, TIMED = 6, 60


def choose_mesh(config: Any) -> tuple[Any, tuple[Program, jax.stages.Compiled] | None]:
    """The fastest mesh that fits (--mesh auto), with the program and its compiled step."""
    if config.mesh != "auto":
        return config, None
    devices = devices_of(config)
    one = _resolved(config, make_mesh(devices[:1]))
    # Refuse here what is wrong on every mesh; later, a refusal only excludes one mesh.
    network = network_of(one)
    check_network(change(one, batch=1, accumulate=1, microbatches=1, chunks=1, schedule="gpipe"),
                  network, abstract_mesh({}))
    mesh, ready = forecast.auto_mesh(
        one, devices, network.weight_shapes(one.network),
        check=lambda config, mesh: check_network(config, network, mesh),
        flops=flops_of_update(one),
        compile_program=ready_to_run,
        say=Reporter(config.steps).line)
    return dataclasses.replace(config, mesh=mesh, shards=0), ready


def on_machine(config: Any) -> tuple[Any, Any]:
    """(the configuration of a run here, with its mesh chosen and its dtype; the mesh). Programs are
    kept on disk from here on."""
    keep_compiled()
    config, _ = choose_mesh(config)
    mesh = machine(config)
    check_network(config, network_of(config), mesh)
    return resolve_dtype(config, mesh), mesh


def ready_to_run(config: Any) -> tuple[Program, jax.stages.Compiled]:
    """(the program of a configuration, without its data, and its compiled step)."""
    config, ready = choose_mesh(config)
    if ready:
        return ready
    program = program_of(config)
    return program, compiled(program)


def program_of(config: Any) -> Program:
    """The program of a configuration whose mesh is chosen, without its data."""
    mesh = machine(config)
    config = _resolved(config, mesh)
    check_network(config, network_of(config), mesh)
    return train.build(config, mesh, *without_data(config))


def _resolved(config, mesh):
    """The configuration with the dtype for this mesh, a vocabulary and a number of steps."""
    config = resolve_dtype(config, mesh)
    # (--epochs would follow from the data. The program does not depend on the number of steps.)
    return change(config, epochs=0.0, vocab_size=config.network.vocab_size or Bytes.vocab_size)


def dry_run(config: Any, is_short: bool = True) -> None:
    """Compile the real step for the hardware of --topology, and print its memory, arithmetic and
    collectives."""
    begin = time.perf_counter()
    config, ready = choose_mesh(config)
    program = ready[0] if ready else program_of(config)
    config, say = program.config, Reporter(config.steps)
    report_header(program, say, is_short)
    say.line("compiling ...", live=True)
    step = ready[1] if ready else compiled(program)
    say.line(f"compiled in {time.perf_counter() - begin:.1f} s")
    forecast.dry_run(config, program.mesh, step, say,
                     flops=flops_of_update(config),
                     expected=expected_traffic(program.plan), complete=is_complete(program.plan))


def show_sharding(argv: Sequence[str] | None = None) -> None:
    """python shard.py --model llama-7b --shards 4: print how each weight would be split, and why,
    without making the weights."""
    given = command_line.read_flags(argv)
    command_line.check_command(given, "topology", "in python shard.py")
    config = command_line.config_of_flags(given)
    if config.topology:
        return dry_run(config, is_short=False)
    mesh = abstract_mesh(mesh_sizes(config.mesh, config.shards))
    config = change(config, vocab_size=config.network.vocab_size or Bytes.vocab_size)
    network = network_of(config)
    network.check(config.network, mesh)
    decisions = network.plan_weights(config.network, mesh, fsdp_min=config.fsdp_min,
                                     overrides=parse_overrides(config.override))
    shapes = network.weight_shapes(config.network)
    if config.network.lora_rank:
        decisions = lora.mark_frozen(decisions)
        shapes = jax.eval_shape(lambda w: lora.as_stored(w, config.network.dtype), shapes)
    of_trained = lora.split if config.network.lora_rank else lambda tree: (tree, {})
    (params, _), (chosen, _) = of_trained(shapes), of_trained(decisions)
    specs = jax.tree.map(lambda d: d.spec, chosen)
    if config.zero:
        specs = zero1_specs(params, specs, mesh, config.fsdp_min)
    state = state_shapes(train.optimizer(config, chosen), params, specs, mesh)
    print(explain(decisions, shapes, mesh, state))


def bench(config: Any, mesh: Any, task: Task) -> None:
    """--bench: time the updates of a run on --data, keep nothing, and print the results. Every
    second update has a batch that was there before, which shows what the loader costs."""
    config = dataclasses.replace(config, out="", profile=0, steps=WARM + TIMED + 1)
    say = BenchReporter(WARM + TIMED)
    shapes = batch_shapes(config.batch, task.first_row)
    program = train.build(config, mesh, task, shapes)
    next_batch = functools.partial(train.training_batch, config, mesh, task, shapes)
    loop = Loop(program, task, None, say, lambda at: numbers_at(
        task.examples, config.seed, at * config.batch + np.arange(config.batch)))
    with jax.set_mesh(program.mesh):
        report_header(program, say)
        step, same = prepare(loop), next_batch(0)
        for at in range(config.steps):
            batch = same if at % 2 else next_batch(at)
            loop.state, metrics = step(loop.state, batch)
            loop.at += 1
            # As in a training run: the time of a step is that in which the next batch is made.
            flush_metrics(loop)
            loop.pending = loop.at, metrics
    begin = time.perf_counter()
    for at in range(10):
        next_batch(at)
    took = say.took[WARM:]
    forecast.bench_report(say, program.mesh, config.network.dtype, took=took[1::2],
                          reused=took[::2], tokens=say.tokens, flops=task.flops,
                          loader=(time.perf_counter() - begin) / 10)
