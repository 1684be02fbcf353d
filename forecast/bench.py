"""python train.py --bench: time training steps, and compare their speed with a plain matmul's.
This file also times steps for --minutes and --depth. generation_speed.py has sample.py --bench."""

import dataclasses
import functools
import json
import statistics
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any, Callable

import jax
import jax.numpy as jnp

import train
from forecast import depth
from forecast.estimate import USUAL_COUNT
from zigzag.commands import programs, training
from zigzag.commands.continued import continued
from zigzag.core import hosts
from zigzag.core.chips import memory_in_use, mfu
from zigzag.core.errors import human_bytes
from zigzag.core.mesh import platform
from zigzag.core.options import Values
from zigzag.core.report import Reporter
from zigzag.disk.batches import batch_shapes
from zigzag.disk.checkpoint import newest_step
from zigzag.parallel.network import flops_of_update
from zigzag.run import source
from zigzag.run.loop import Loop, flush_metrics, prepare, report_header
from zigzag.run.plan import Program
from zigzag.run.task import Task

# Updates before timing; timed updates; and timed updates for --minutes and --depth.
WARM, TIMED, FEW = 6, 60, 20


class BenchReporter(Reporter):
    """Records how long each step took, and prints it only on a terminal."""

    def __init__(self, steps: int):
        super().__init__(steps)
        self.begin, self.took, self.first_step = time.perf_counter(), [], 0.0
        self.tokens = 0.0       # computed per step

    def step(self, row: dict, took: float, memory: int, computed: float = 0, *_: Any) -> None:
        self.tokens = computed
        self.first_step = self.first_step or time.perf_counter() - self.begin
        self.took.append(took)
        if self.is_terminal:
            self.line(f"step {len(self.took)}/{self.steps}  {took:.3f} s", live=True)


def run(config: Any) -> None:
    """Run --bench: measure a run on --data, in a temporary folder."""
    config, mesh = programs.on_machine(config)
    _, tokenizer, _ = source.first_weights(config)
    with tempfile.TemporaryDirectory() as folder, training.opener(source.kind_of(config))(
            config, tokenizer, Path(folder) / "run") as learned:
        bench(learned.config, mesh, learned.make_task())


def timed(given: Values, config: Any) -> Any:
    """Return the config of a run with --minutes or --depth. If the run is new, first time a few
    steps and discard their results: --minutes becomes the number of steps that fit in it, and
    --depth prints its cost. Compilation, evaluations and saves don't count."""
    config, mesh = programs.on_machine(config)
    minutes = given.pop("minutes", 0)
    if config.mesh != given.get("mesh", ""):        # --mesh auto has chosen one
        given["mesh"] = config.mesh
    if newest_step(config.out):         # the run already has its number of steps
        return continued(given)
    say = BenchReporter(WARM + FEW)
    say.is_quiet = True
    with training.opened(config, is_quiet=True) as (small, task, _):
        train_some(small, mesh, task, say)
        step = hosts.process_allgather(statistics.median(say.took[WARM:]))[0]
        hosts.watchdog.arm("beginning")
    if minutes:
        given["steps"] = max(1, round(60 * minutes / step))
    config = continued(given)
    if jax.process_index() == 0:
        if minutes:
            print(f"minutes  {minutes:g}, at {step * 1e3:,.0f} ms a step: {config.steps:,} steps")
        if config.depth:
            print(depth.about(config, flops_of_update(small), step))    # `small` has the vocabulary
    return config


def train_some(config: Any, mesh: Any, task: Task, say: BenchReporter) -> tuple[Program, Callable]:
    """Train for say.steps updates and keep nothing. Every other update uses the first batch again.
    Return the program, and the function that makes an update's batch."""
    config = dataclasses.replace(config, out="", log=(), steps=say.steps + 1)
    shapes = batch_shapes(config.batch, task.first_row)
    program = train.build(config, mesh, task, shapes)
    next_batch = functools.partial(train.training_batch, config, mesh, task, shapes)
    loop = Loop(program, task, None, say)
    with jax.set_mesh(program.mesh):
        report_header(program, say)
        step, same = prepare(loop), next_batch(0)
        say.hours.begin("step")
        for at in range(config.steps):
            batch = same if at % 2 else next_batch(at)
            loop.state, metrics = step(loop.state, batch)
            loop.at += 1
            # As in a training run, the host makes the next batch while the devices run a step.
            flush_metrics(loop)
            loop.pending = loop.at, metrics
    return program, next_batch


def bench(config: Any, mesh: Any, task: Task) -> None:
    """Time updates of a run on --data, keeping nothing. Print the results, with the last line as
    JSON. Every other update reuses the first batch, which shows what the loader costs."""
    say = BenchReporter(WARM + TIMED)
    program, next_batch = train_some(config, mesh, task, say)
    begin = time.perf_counter()
    for at in range(10):
        next_batch(at)
    loader = (time.perf_counter() - begin) / 10

    # Updates alternate between the reused batch and a new one.
    reused, took = say.took[WARM::2], say.took[WARM + 1::2]
    step, flops, tokens = statistics.median(took), task.flops, say.tokens
    best, share = matmul_rate(program.mesh, config.network.dtype), mfu(flops, step, program.mesh)
    peak = memory_in_use("peak_bytes_in_use")
    say.line(f"step     {step * 1e3:.1f} ms, the median of {len(took)} (from "
             f"{min(took) * 1e3:.1f} to {max(took) * 1e3:.1f}); the first, compiled, after "
             f"{say.first_step:.1f} s")
    say.line(f"speed    {tokens / step:,.0f} tokens/s, {flops / step / 1e9:,.0f} Gflop/s "
             f"(counting {USUAL_COUNT}), {flops / step / best:.0%} of the "
             f"{best / 1e9:,.0f} that a matrix product reaches here, mfu "
             + ("n/a" if share is None else f"{share:.1%}"))
    # Compare neighbors: over seconds, the machine's other load varies more than the loader's cost.
    costs = statistics.median(new / old for new, old in zip(took, reused)) - 1
    say.line(f"loader   a batch in {loader * 1e3:.1f} ms while devices work, which adds "
             f"{costs:.1%} to a step that reuses one batch")
    say.line(f"memory   {human_bytes(peak)} at most")
    say.line(json.dumps({
        "tokens_per_second": round(tokens / step, 1), "step_seconds": step,
        "model_flops_per_second": flops / step, "matmul_flops_per_second": best,
        "peak_bytes": peak, "first_step_seconds": round(say.first_step, 3)}))


def matmul_rate(mesh: Any, dtype: str) -> float:
    """Measure FLOPs per second for large square matmuls, over all devices together."""
    # These sizes reach the peak. Simulated devices share the cores, so a single matmul is enough.
    size, count, devices = (2048, 1, 1) if platform(mesh) == "cpu" else (8192, 8, mesh.size)
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, count, lambda _, x: x @ a * (1 / size), a))
    times = timeit.repeat(lambda: product(a).block_until_ready(), number=1, repeat=11)
    return 2 * size**3 * count * devices / min(times)
