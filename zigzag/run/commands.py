"""The commands of train.py besides training, for any loss.

    machine        the mesh of a configuration, on the devices here or (--topology) on others
    choose_mesh    --mesh auto
    ready_to_run   the program and its compiled step, without data: train.compile_step
    dry_run        --topology
    show_sharding  python shard.py: the table of weights
    bench          --bench
"""

import dataclasses
import math
import time
from typing import Any, Callable, NamedTuple

import jax
import numpy as np

from zigzag.core import hosts
from zigzag.core.flags import change
from zigzag.core.mesh import (
    abstract_mesh,
    make_mesh,
    mesh_sizes,
    simulate_devices,
)
from zigzag.core.report import BenchReporter, Reporter
from zigzag.disk.mixture import numbers_at
from zigzag.measure import chips, forecast
from zigzag.measure.traffic import expected_traffic, is_complete
from zigzag.rule.rule import explain, parse_overrides, state_shapes, zero1_specs
from zigzag.run.loop import Loop, Task, flush_metrics, prepare, report_header
from zigzag.run.plan import Program, compiled, resolve_dtype
from zigzag.weights import lora

# The updates of --bench: before the measurement, and in it.
WARM, TIMED = 6, 60


class Trained(NamedTuple):
    """The functions and facts that these commands need about the model that is trained."""
    check: Callable         # (config, mesh): refuses what the mesh cannot split
    build: Callable         # (config, mesh) -> Program
    network: Callable       # config -> the Network
    flops: Callable         # config -> FLOPs of an update
    vocab_size: int         # the vocabulary if there are no data
    optimizer: Callable     # (config, decisions) -> an optax optimizer
    hidden: tuple[str, ...]     # fields of the configuration that are not shown
    describe: Callable      # config -> text: which network it is, and why


def machine(config: Any) -> Any:
    """The mesh of a configuration: on the devices of --topology, on the accelerators of all its
    processes, or, without accelerators, on as many simulated CPU devices as it needs."""
    sizes = mesh_sizes(config.mesh, config.shards)
    count, rest = divmod(math.prod(sizes.values()), max(1, config.processes))
    if not config.distributed and rest == 0:
        simulate_devices(count)
    return make_mesh(_devices(config), **sizes)


def _devices(config):
    """The devices of --topology, or all devices of this run, after its processes have met."""
    hosts.init_distributed(config)
    return chips.topology_devices(config.topology) if config.topology else jax.devices()


def choose_mesh(config: Any, trained: Trained
                ) -> tuple[Any, tuple[Program, jax.stages.Compiled] | None]:
    """The fastest mesh that fits (--mesh auto), with the program and its compiled step."""
    if config.mesh != "auto":
        return config, None
    devices = _devices(config)
    one = _resolved(config, make_mesh(devices[:1]), trained)
    # Refuse here what is wrong on every mesh; later, a refusal only excludes one mesh.
    trained.check(change(one, batch=1, accumulate=1, microbatches=1, chunks=1, schedule="gpipe"),
                  abstract_mesh({}))
    mesh, ready = forecast.auto_mesh(
        one, devices, trained.network(one).weight_shapes(one.network), check=trained.check,
        flops=trained.flops(one),
        compile_program=lambda config: ready_to_run(config, trained),
        say=Reporter(config.steps).line)
    return dataclasses.replace(config, mesh=mesh, shards=0), ready


def ready_to_run(config: Any, trained: Trained) -> tuple[Program, jax.stages.Compiled]:
    """(the program of a configuration, without its data, and its compiled step)."""
    config, ready = choose_mesh(config, trained)
    if ready:
        return ready
    mesh = machine(config)
    config = _resolved(config, mesh, trained)
    trained.check(config, mesh)
    program = trained.build(config, mesh)
    return program, compiled(program)


def _resolved(config, mesh, trained):
    """The configuration with the dtype for this mesh, a vocabulary and a number of steps."""
    config = resolve_dtype(config, mesh)
    # (--epochs would follow from the data. The program does not depend on the number of steps.)
    return change(config, epochs=0.0, vocab_size=config.vocab_size or trained.vocab_size)


def dry_run(config: Any, trained: Trained, is_short: bool = True) -> None:
    """Compile the real step for the hardware of --topology, and print its memory, arithmetic and
    collectives."""
    begin = time.perf_counter()
    program, step = ready_to_run(config, trained)
    config, say = program.config, Reporter(config.steps)
    report_header(program, say, program.plan.counts, trained.hidden, trained.describe(config),
                  is_short)
    say.line(f"compiled in {time.perf_counter() - begin:.1f} s")
    forecast.dry_run(config, program.mesh, step, say, flops=trained.flops(config),
                     expected=expected_traffic(program.plan), complete=is_complete(program.plan))


def show_sharding(config: Any, trained: Trained) -> None:
    """Print how each weight would be split, and why, without making the weights."""
    if config.topology:
        return dry_run(config, trained, is_short=False)
    mesh = abstract_mesh(mesh_sizes(config.mesh, config.shards))
    config = change(config, vocab_size=config.vocab_size or trained.vocab_size)
    network = trained.network(config)
    network.check(config.network, mesh)
    decisions = network.plan_weights(config.network, mesh, fsdp_min=config.fsdp_min,
                                     overrides=parse_overrides(config.override))
    shapes = network.weight_shapes(config.network)
    if config.lora_rank:
        decisions = lora.mark_frozen(decisions)
        shapes = jax.eval_shape(lambda w: lora.as_stored(w, config.dtype), shapes)
    of_trained = lora.split if config.lora_rank else lambda tree: (tree, {})
    (params, _), (chosen, _) = of_trained(shapes), of_trained(decisions)
    specs = jax.tree.map(lambda d: d.spec, chosen)
    if config.zero:
        specs = zero1_specs(params, specs, mesh, config.fsdp_min)
    state = state_shapes(trained.optimizer(config, chosen), params, specs, mesh)
    print(explain(decisions, shapes, mesh, bool(config.zero), config.fsdp_min, state))


def bench(config: Any, trained: Trained, task: Task, build: Callable, make_batch: Callable) -> None:
    """Time the updates of a run, and print the results. build(config) makes its program, and
    make_batch(update) a batch. Every second update has a batch that was there before, which shows
    what the loader costs."""
    config = dataclasses.replace(config, out="", profile=0, steps=WARM + TIMED + 1)
    say = BenchReporter(WARM + TIMED)
    program = build(config)
    loop = Loop(program, task, None, say, lambda at: numbers_at(
        task.examples, config.seed, at * config.batch + np.arange(config.batch)))
    with jax.set_mesh(program.mesh):
        report_header(program, say, program.plan.counts, trained.hidden)
        step, same = prepare(loop), make_batch(0)
        for at in range(config.steps):
            batch = same if at % 2 else make_batch(at)
            loop.state, metrics = step(loop.state, batch)
            loop.at += 1
            # As in a training run: the time of a step is that in which the next batch is made.
            flush_metrics(loop)
            loop.pending = loop.at, metrics
    begin = time.perf_counter()
    for at in range(10):
        make_batch(at)
    took = say.took[WARM:]
    forecast.bench_report(say, program.mesh, config.dtype, took=took[1::2], reused=took[::2],
                          tokens=say.tokens, flops=task.flops,
                          loader=(time.perf_counter() - begin) / 10)
