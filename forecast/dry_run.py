"""The commands: --mesh auto and --topology."""

import contextlib
import dataclasses
import time
from typing import Any

import jax

from forecast import estimate
from forecast.traffic import expected_traffic, is_complete
from zigzag.commands import programs
from zigzag.commands.programs import program_of, ready_to_run, resolved
from zigzag.core.chips import CHIPS, USUAL_COUNT, chip_of, peak_memory
from zigzag.core.errors import ConfigError, human_bytes, one_line
from zigzag.core.flags import change
from zigzag.core.mesh import abstract_mesh, all_meshes, make_mesh
from zigzag.core.report import Reporter
from zigzag.parallel.network import flops_of_update, network_of
from zigzag.run.checks import check_network
from zigzag.run.loop import report_header
from zigzag.run.plan import Program, compiled
from zigzag.run.running import devices_of

# The share of memory that the formulas may fill; the compiler needs more than they predict.
ROOM = 0.95
# How many of the best meshes to print, and how many of those to compile until one fits.
SHOWN, COMPILED = 5, 3


def choose_mesh(config: Any) -> tuple[Any, tuple[Program, jax.stages.Compiled]]:
    """Find the fastest mesh that divides the model and fits. Compile the few best meshes by the
    estimate until one fits, and return the config with that mesh, its program and compiled step."""
    devices = devices_of(config)
    one = resolved(config, make_mesh(devices[:1]))
    # Reject options that are invalid on every mesh here; below, an error only excludes one mesh.
    network, say = network_of(one), Reporter(config.steps).line
    check_network(change(one, batch=1, accumulate=1, microbatches=1, chunks=1, schedule="gpipe"),
                  network, abstract_mesh({}))
    params, flops = network.weight_shapes(one.network), flops_of_update(one)
    known = chip_of(devices[0])
    chip, costs = known or CHIPS["TPU v5 lite"], []
    for sizes in all_meshes(len(devices)):
        # The cost model assumes that tensor splits all heads and the MLP.
        undivided = any(n % sizes["tensor"] for n in (one.network.heads, one.network.d_ff))
        if undivided or one.shards not in (0, sizes["tensor"]):
            continue
        text = ",".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "data=1"
        placed = dataclasses.replace(one, mesh=text, shards=0)
        with contextlib.suppress(ConfigError):
            check_network(placed, network, abstract_mesh(sizes))
            costs.append((placed, estimate.cost_model(placed, params, sizes, chip, flops)))
    if not costs:
        raise ConfigError(f"--mesh auto: no mesh of {len(devices)} devices divides this model and "
                          f"--batch {config.batch}")
    # Meshes that don't fit come last. If none fit, the one that needs the least memory comes first.
    costs.sort(key=lambda x: (max(1.0, x[1].memory / (ROOM * chip.memory)),
                              x[1].arithmetic + x[1].links))
    say(f"mesh     auto: {len(costs)} meshes of {len(devices)} devices, by the cost model" + (
        "" if known else " and a v5e's rates, because these devices' are unknown"))
    if len(devices) == 1 and devices[0].platform == "cpu":
        say("         (XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates eight devices "
            "here)")
    for placed, cost in costs[:SHOWN]:
        say(f"         {placed.mesh:36} {_in_units(cost.arithmetic + cost.links, TIMES):>11}: "
            f"arithmetic {_in_units(cost.arithmetic, TIMES)}, links "
            f"{_in_units(cost.links, TIMES)}; about {_gib(cost.memory)} of "
            f"{chip.memory / 2**30:.0f} GiB")
    for placed, _ in costs[:COMPILED]:
        try:
            ready = ready_to_run(placed)
            peak = peak_memory(ready[1])
        except jax.errors.JaxRuntimeError as e:
            say(f"         {placed.mesh} does not compile: {one_line(e)}")
            continue
        say(f"         {placed.mesh} compiled: {_gib(peak)} a device")
        if peak < chip.memory:
            return dataclasses.replace(config, mesh=placed.mesh, shards=0), ready
    raise ConfigError(f"--mesh auto: among {len(costs)} meshes of {len(devices)} devices, none of "
                      f"the {COMPILED} best fits; try --remat full, a larger --accumulate or more "
                      f"devices")


def run(config: Any) -> None:
    """Compile the real step for the --topology hardware. Report its memory, FLOPs and collectives,
    and how long they take at the chip's published rates."""
    begin = time.perf_counter()
    config, ready = programs.choose_mesh(config)
    program = ready[0] if ready else program_of(config)
    config, reporter = program.config, Reporter(config.steps, verbose=True)
    say = reporter.line
    report_header(program, reporter)
    say("compiling ...", live=True)
    step = ready[1] if ready else compiled(program)
    say(f"compiled in {time.perf_counter() - begin:.1f} s")
    expected, flops = expected_traffic(program.plan), flops_of_update(config) / program.mesh.size
    sends, done, error = estimate.work_of(program, step, expected)
    if error:
        say(f"         {error}")
    else:
        reporter.collectives(sends, expected, is_complete(program.plan))
    chip, memory = chip_of(program.mesh.devices.flat[0]), step.memory_analysis()
    peak, sent = peak_memory(step), sum(c.bytes for c in sends)
    fits = "" if not chip else f", which has {_gib(chip.memory)}: " + (
        "it fits" if peak < chip.memory else "IT DOES NOT FIT")
    say(f"memory   {_gib(memory.argument_size_in_bytes)} of state and batch, "
        f"{_gib(memory.temp_size_in_bytes)} of temporaries, peak {_gib(peak)} a device" + fits)
    frozen = "; 4 per frozen weight" if config.network.lora_rank else ""
    say(f"compute  {_in_units(done, FLOPS, 2)} a device, {done / flops:.3f} times the usual count "
        f"({USUAL_COUNT}{frozen})")
    say(f"links    {_gib(sent)} sent by a device")
    if not chip:
        return
    takes = {"arithmetic": done / chip.flops,
             "memory": estimate.bytes_moved(step) / chip.bandwidth, "links": sent / chip.links}
    worst = max(takes, key=takes.get)
    least = takes[worst]
    speed = config.batch * config.network.seq_len / least
    speed = f"{speed:,.0f}" if speed < 1e6 else f"{speed / 1e6:,.1f} million"
    say("bound    " + ", ".join(f"{k} {_in_units(v, TIMES)}" for k, v in takes.items())
        + f": a step takes at least {_in_units(least, TIMES)} ({worst}), {speed} tokens/s, mfu at "
        f"most {flops / chip.flops / least:.1%}, if each runs at its published rate "
        f"({chip.flops / 1e12:.0f} Tflop/s, {chip.bandwidth / 1e9:.0f} GB/s, "
        f"{chip.links / 1e9:.0f} GB/s over all links) and all at once")


# Units from largest to smallest, so that a small model's numbers aren't all 0.00.
FLOPS = {"Tflop": 1e12, "Gflop": 1e9, "Mflop": 1e6}
TIMES = {"ms": 1e-3, "us": 1e-6}


def _in_units(x, units, digits=1):
    """Format x in the largest of these units that makes it at least 0.1."""
    name, unit = next((pair for pair in units.items() if 10 * x >= pair[1]), [*units.items()][-1])
    return f"{x / unit:,.{digits}f} {name}"


def _gib(size):
    return f"{size / 2**30:.2f} GiB" if 10 * size >= 2**30 else human_bytes(size)
