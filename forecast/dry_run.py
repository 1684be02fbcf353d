"""The commands: --mesh auto and --topology."""

import dataclasses
import time
from typing import Any

import jax

from forecast import estimate
from forecast.traffic import expected_traffic, is_complete
from zigzag.commands import programs
from zigzag.commands.programs import program_of, ready_to_run, resolved
from zigzag.core.flags import change
from zigzag.core.mesh import abstract_mesh, make_mesh
from zigzag.core.report import Reporter
from zigzag.parallel.network import flops_of_update, network_of
from zigzag.run.checks import check_network
from zigzag.run.loop import report_header
from zigzag.run.plan import Program, compiled
from zigzag.run.running import devices_of


def choose_mesh(config: Any) -> tuple[Any, tuple[Program, jax.stages.Compiled]]:
    """The configuration with the fastest mesh that fits, its program and its compiled step."""
    devices = devices_of(config)
    one = resolved(config, make_mesh(devices[:1]))
    # Refuse here what is wrong on every mesh; later, a refusal only excludes one mesh.
    network = network_of(one)
    check_network(change(one, batch=1, accumulate=1, microbatches=1, chunks=1, schedule="gpipe"),
                  network, abstract_mesh({}))
    mesh, ready = estimate.auto_mesh(
        one, devices, network.weight_shapes(one.network),
        check=lambda config, mesh: check_network(config, network, mesh),
        flops=flops_of_update(one),
        compile_program=ready_to_run,
        say=Reporter(config.steps).line)
    return dataclasses.replace(config, mesh=mesh, shards=0), ready


def run(config: Any) -> None:
    """Compile the real step for the hardware of --topology, and print its memory, arithmetic and
    collectives."""
    begin = time.perf_counter()
    config, ready = programs.choose_mesh(config)
    program = ready[0] if ready else program_of(config)
    config, say = program.config, Reporter(config.steps, verbose=True)
    report_header(program, say)
    say.line("compiling ...", live=True)
    step = ready[1] if ready else compiled(program)
    say.line(f"compiled in {time.perf_counter() - begin:.1f} s")
    estimate.dry_run(config, program.mesh, step, say,
                     flops=flops_of_update(config),
                     expected=expected_traffic(program.plan), complete=is_complete(program.plan))
