"""What train.py's command line does besides training, for whatever it trains.

    machine        the mesh of a configuration, on what is here or (--topology) on what is not
    choose_mesh    --mesh auto
    ready_to_run   the program and its compiled step, without data: compile_step
    dry_run        --topology
    show_sharding  python shard.py: the table of weights
    bench          --bench
"""

import dataclasses
import math
import time
from typing import Any, Callable, NamedTuple

import jax

from zigzag.core import hosts
from zigzag.core.flags import change
from zigzag.core.mesh import (
    abstract_mesh,
    make_mesh,
    mesh_sizes,
    simulate_devices,
)
from zigzag.core.report import BenchReporter, Reporter
from zigzag.measure import chips, forecast
from zigzag.measure.traffic import expected_traffic, is_complete
from zigzag.rule.rule import explain, parse_overrides, state_shapes, zero1_specs
from zigzag.run.loop import report_header
from zigzag.run.plan import Program, compiled, resolve_dtype
from zigzag.weights import lora


class Trained(NamedTuple):
    """What these commands must know of what is trained."""
    check: Callable         # (config, mesh): refuses what the mesh cannot split
    build: Callable         # (config, mesh) -> Program
    network: Callable       # config -> the kind of network
    flops: Callable         # config -> of an update
    count: Callable         # Program -> all parameters, and those that a token visits
    vocab_size: int         # where no data says it
    optimizer: Callable     # (config, decisions) -> of optax
    hidden: tuple[str, ...]     # fields of the configuration that are not shown
    describe: Callable      # config -> which network it is, and why, as a text


def machine(config: Any) -> Any:
    """The mesh on the accelerators of this machine, or of all that the configuration names; with
    none, on as many CPU devices as it needs."""
    sizes = mesh_sizes(config.mesh, config.shards)
    count, rest = divmod(math.prod(sizes.values()), max(1, config.processes))
    if not config.distributed and rest == 0:
        simulate_devices(count)
    return make_mesh(_devices(config), **sizes)


def _devices(config):
    """Those of --topology, or all that are here, once the processes have found each other."""
    hosts.init_distributed(config)
    return chips.topology_devices(config.topology) if config.topology else jax.devices()


def choose_mesh(config: Any, trained: Trained
                ) -> tuple[Any, tuple[Program, jax.stages.Compiled] | None]:
    """--mesh auto: the fastest that fits, with the program and the step compiled for it."""
    if config.mesh != "auto":
        return config, None
    devices = _devices(config)
    one = _resolved(config, make_mesh(devices[:1]), trained)
    # What no mesh could have is refused here; other refusals only leave a mesh out.
    trained.check(change(one, batch=1, accumulate=1, microbatches=1, chunks=1, schedule="gpipe"),
                  abstract_mesh({}))
    mesh, ready = forecast.auto_mesh(
        one, devices, trained.network(one).weight_shapes(one.network), check=trained.check,
        flops=trained.flops(one),
        compile_program=lambda config: ready_to_run(config, trained),
        say=Reporter(config.steps).line)
    return dataclasses.replace(config, mesh=mesh, shards=0), ready


def ready_to_run(config: Any, trained: Trained) -> tuple[Program, jax.stages.Compiled]:
    """The program of the command line, without its data, and its step, compiled."""
    config, ready = choose_mesh(config, trained)
    if ready:
        return ready
    mesh = machine(config)
    config = _resolved(config, mesh, trained)
    trained.check(config, mesh)
    program = trained.build(config, mesh)
    return program, compiled(program)


def _resolved(config, mesh, trained):
    """The configuration with the precision of this mesh and a vocabulary."""
    config = resolve_dtype(config, mesh)
    return change(config, vocab_size=config.vocab_size or trained.vocab_size)


def dry_run(config: Any, trained: Trained, is_short: bool = True) -> None:
    """The real step, for hardware that is not here."""
    begin = time.perf_counter()
    program, step = ready_to_run(config, trained)
    config, say = program.config, Reporter(config.steps)
    report_header(program, say, trained.count(program), trained.hidden, trained.describe(config),
                  is_short)
    say.line(f"compiled in {time.perf_counter() - begin:.1f} s")
    forecast.dry_run(config, program.mesh, step, say, flops=trained.flops(config),
                     expected=expected_traffic(program.plan), complete=is_complete(program.plan))


def show_sharding(config: Any, trained: Trained) -> None:
    """Where each weight would lie, and why, without making the model."""
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


def bench(config: Any, mesh: Any, flops: float, fit: Callable, make_batch: Callable) -> None:
    """The loop and the loader of a training run, and how long they take: fit(config, reporter)
    trains, make_batch(config, update) makes a batch."""
    config = dataclasses.replace(config, out="", steps=forecast.WARM + forecast.TIMED, profile=0,
                                 metric="", best="", eval_first=False, sample_prompts="")
    say = BenchReporter(config.steps)
    fit(config, say)
    if len(say.took) < config.steps:
        return              # it was stopped, and said so
    begin = time.perf_counter()
    for at in range(10):
        make_batch(config, at)
    forecast.bench_report(say, mesh, config.dtype, tokens=say.tokens, flops=flops,
                          loader=(time.perf_counter() - begin) / 10)
