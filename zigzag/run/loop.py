"""The state that the training loop carries, and the loop's work besides stepping.

    prepare         restore or create the state, and compile the step
    flush_metrics   record the previous step's numbers while the devices work on the next
    is_due          decide whether to evaluate or save after this step
    save            start saving the state
    end_early       save, and print how to resume
    end_run         print that the run is done, or that its last held-out loss isn't finite
"""

import dataclasses
import math
import signal
import socket
import time
from typing import Any, Callable, NamedTuple

import jax
import numpy as np

from zigzag.core import chips
from zigzag.core.errors import RunError, human_bytes
from zigzag.core.flags import flat
from zigzag.core.hosts import process_allgather, watchdog
from zigzag.core.mesh import row_groups
from zigzag.core.options import Values, without
from zigzag.core.report import Reporter, options_text
from zigzag.disk.checkpoint import RunFolder
from zigzag.disk.mixture import numbers_at
from zigzag.parallel.attention import describe
from zigzag.parallel.network import describe as describe_network
from zigzag.parallel.pipeline import timeline
from zigzag.parallel.rule import explain, held_lines
from zigzag.parallel.table import count
from zigzag.run import averages, muon
from zigzag.run.loggers import Loggers, names_of
from zigzag.run.modes import BY_HAND, JIT
from zigzag.run.optimizers import Factor
from zigzag.run.plan import LOGGED, Program, compiled
from zigzag.run.task import Task

# The number of examples whose outputs an evaluation prints.
SHOWN = 4


class Fit(NamedTuple):
    """The result of fit."""
    params: Any
    step: int                       # updates made
    held_out: float | None          # the loss of the last evaluation
    outputs: Any                    # its predictions, arrays [examples, ...]
    evaluation: Values      # all numbers from that evaluation, as in metrics.jsonl
    best: int | None                # the best evaluation's step, by config.best's first criterion


@dataclasses.dataclass
class Loop:
    """The state that the training loop carries from step to step."""
    program: Program
    task: Task
    folder: RunFolder | None        # None: the run keeps nothing on disk
    reporter: Reporter              # holds state that only logging needs: times, recent losses
    log: Callable | None = None     # fit's log: (step, numbers)
    state: Any = None               # params, opt, step; before `prepare`: the first state or None
    step: Callable | None = None    # (state, batch) -> state, metrics; None: all steps are done
    loggers: Any = None             # the --log loggers, and fit's own; set by `prepare`
    began: int = 0                  # updates made by earlier runs
    at: int = 0                     # updates made
    pending: Any = None             # (step, metrics), while they are still on the devices
    skipped: int = 0                # updates in a row whose loss or gradient wasn't finite
    evaluation: dict = dataclasses.field(default_factory=dict)      # the last one's numbers
    outputs: Any = None             # the last evaluation's predictions
    # {--best criterion: {its best step: that step's evaluation}}; the inner dict starts empty
    best: dict[str, dict[int, dict]] = dataclasses.field(default_factory=dict)

    @property
    def is_new(self) -> bool:
        """Return whether this run started from scratch, without restoring a checkpoint."""
        return not self.folder or self.folder.restored is None

    def result(self) -> Fit:
        """Return fit's result, once the loop has ended."""
        program = self.program
        return Fit(program.permute(program.weights(self.state), back=True), self.at,
                   self.evaluation.get("eval_loss"), self.outputs, self.evaluation,
                   next(iter(next(iter(self.best.values()), ())), None))

    def write(self, row: Values) -> None:
        """Record the numbers of a step or an evaluation in the run's folder and loggers."""
        if self.folder:
            self.folder.write(row)
        self.loggers.write(row)


def first_state(program: Program, weights: Callable | None = None) -> Any:
    """Make a run's first state. weights(shapes) returns weights to use instead of init's; the
    shapes have shardings."""
    config, given = program.config, None
    if weights:
        places = program.state["frozen" if config.network.lora_rank else "params"]
        given = weights(jax.tree.map(lambda x: x.update(dtype="float32"), places))
    with jax.set_mesh(program.mesh):
        return program.start(jax.random.key(config.seed), given)


def prepare(loop: Loop) -> Callable | None:
    """Restore or create the state, and return the compiled step, or None if all steps are done."""
    program, config, folder, say = loop.program, loop.program.config, loop.folder, loop.reporter
    begin = time.perf_counter()
    watchdog.arm("reading the checkpoint")
    with say.hours.of("restore"):
        state = folder.restore(say.line) if folder else None
    if state is None:
        watchdog.arm("initializing the weights")
        state = loop.state or first_state(program, loop.task.first_weights)
    else:
        frozen = loop.state["frozen"] if loop.state else {}     # no checkpoint holds them
        state = {**averages.from_disk(state), "frozen": frozen}
        loop.skipped, say.losses = folder.skipped, folder.losses
    if folder:
        loop.best = folder.read_best(config.best)
        say.log_to(folder.folder / f"log-{jax.process_index()}.txt", folder.restored is not None)
    loop.state = program.permute(state)
    loop.at = loop.began = int(state["step"])
    if loop.at and folder.has_damaged:      # otherwise the run has already printed the right step
        say.line(f"continuing {config.out} at step {loop.at}")
    if loop.at >= config.steps:
        say.line(f"{config.out} has done its {loop.at} steps; a higher --steps continues it")
        return None
    watchdog.arm("compiling")
    with say.hours.of("compile"):
        step = compiled(program)
    process_allgather("compiled")     # before the devices first wait for one another
    loop.loggers = Loggers(names_of(config), config.out, loop.began,
                           folder.record if folder else {}, loop.log, say.line)
    if folder:
        folder.files.enter_context(loop.loggers)
        folder.compile_checks(program.permute(program.saved(loop.state), back=True))
    memory = step.memory_analysis()
    say.line(f"ready in {time.perf_counter() - begin:.1f} s; compiled step: "
             f"{human_bytes(memory.argument_size_in_bytes)} of state and batch, "
             f"{human_bytes(memory.temp_size_in_bytes)} of temporaries a device")
    watchdog.arm("the first step")
    return step


def flush_metrics(loop: Loop) -> None:
    """Record the step whose numbers are still on the devices."""
    if loop.pending is None:
        return
    (at, metrics), loop.pending = loop.pending, None
    say, plan = loop.reporter, loop.program.plan
    watchdog.arm("a step")
    was_busy = not metrics["loss"].is_ready()
    values = jax.tree.map(plain, jax.device_get(metrics))
    took, saving = say.hours.lap(was_busy)
    say.hours.note(at)
    own = without(values, *LOGGED)
    if plan.schedule == Factor(None):       # the optimizer has its own rate, which we can't see
        values["lr"] = None
    # With float16, an update may be skipped because the loss scale is still too large.
    is_scale = values.get("loss_scale", 0) > 1
    loop.skipped = loop.skipped + (not is_scale) if values["skipped"] else 0
    learned, tokens = float(np.nan_to_num(values["tokens"])), plan.batch.get("tokens")
    learned = int(learned) if learned.is_integer() else learned     # a sum of weights
    # The devices compute padding as well.
    computed = tokens.size if tokens is not None and len(tokens.shape) == 2 else learned
    row = {"step": at, "loss": values["loss"], **values, "tokens": learned,
           "skipped": loop.skipped or int(values["skipped"]),
           "tokens_per_second": round(computed / took, 1), "save_seconds": round(saving, 4),
           "mfu": chips.mfu(loop.task.flops, took, loop.program.mesh)}
    loop.write(row)
    what = "tokens"
    if plan.network is None and tokens is None:
        what, computed = "examples", plan.config.batch
    say.step(row, took, chips.memory_in_use(), computed, what, own)
    say.losses.append(row["loss"])
    if row["skipped"]:
        _report_skipped(loop, at, row)


def plain(x: Any) -> Any:
    """Convert a number to a float, and an array to lists of numbers with six significant digits."""
    if not np.ndim(x):
        return float(x)
    return np.vectorize(lambda value: float(f"{value:.6g}"), otypes=[float])(x).tolist()


def _report_skipped(loop, at, row):
    """Print that update `at` learned nothing because its loss or gradient isn't finite. End the run
    after --max_skipped such updates in a row."""
    what = "loss" if math.isfinite(row["grad_norm"]) else "gradient"
    config = loop.program.config
    numbers = numbers_at(loop.task.examples, config.seed, np.arange(config.batch)[:8]
                         + (at - 1) * config.batch)
    batch = f"its batch has examples {', '.join(map(str, numbers))}"
    if row.get("loss_scale", 0) > 1:
        loop.reporter.line(f"step {at}: the {what} is too large for float16 with a loss scale of "
                           f"{row['loss_scale']:,.0f}, so nothing was learned; the scale is halved")
        return
    loop.reporter.line(f"step {at}: the {what} is not finite, so nothing was learned; {batch}")
    if loop.skipped >= config.max_skipped:
        if loop.folder:
            loop.folder.drain()         # every process gets here
        raise RunError(f"step {at}: the {what} was not finite, {loop.skipped} times in a row "
                       f"(--max_skipped); {batch}; the saved weights are finite")


def is_due(loop: Loop, every: int) -> bool:
    """Return whether an action is due that runs every `every` updates and at the end (0: never)."""
    return every > 0 and (loop.at == loop.program.config.steps or loop.at % every == 0)


def save(loop: Loop) -> None:
    """Start saving the state, if the run has a folder."""
    if not loop.folder:
        return
    flush_metrics(loop)
    watchdog.arm("a save")
    with loop.reporter.hours.of("save"):
        state = loop.program.saved(loop.state)
        evaluation = loop.evaluation if loop.evaluation.get("step") == loop.at else {}
        loop.folder.save(loop.at, loop.program.permute(state, back=True), loop.skipped, evaluation,
                         {step for best in loop.best.values() for step in best})
    watchdog.arm("a step")


def end_early(loop: Loop, stop: list[int]) -> None:
    """Save, and print how to resume."""
    folder, out = loop.folder, loop.program.config.out
    save(loop)
    # For a run started on the command line, --out is enough, because config.json has all its flags.
    # It records no coordinator, so several processes need their full commands.
    by_folder = folder and "fingerprint" in folder.record and jax.process_count() == 1
    again = f"python train.py --out {out}" if by_folder else "the same command"
    loop.reporter.line(f"stopped at step {loop.at} by {signal.Signals(stop[0]).name}"
                       + (f", saved in {out}: run {again} to continue" if folder else ""))


def end_run(loop: Loop) -> None:
    """Print that the run is done and saved. If its last held-out loss isn't finite, the run has
    failed. Without a folder, only warn about that, because an exception would lose the weights."""
    out, loss = loop.program.config.out, loop.evaluation.get("eval_loss", 0.0)
    if not math.isfinite(loss):
        line = f"step {loop.at}: the held-out loss is {loss}"
        if out:
            raise RunError(f"{line}; this run failed, with all of it saved in {out}")
        loop.reporter.line(f"warning  {line}")
    loop.reporter.line(f"time     {loop.reporter.hours.summary()}")
    loop.reporter.end(loop.at, out, loop.evaluation)


def report_header(program: Program, say: Reporter) -> None:
    """Print a run's first lines and, with --verbose, how each weight is split and why."""
    plan, config, stages = program.plan, program.config, program.plan.sizes["pipe"]
    (total, visited), held = plan.counts, count(plan.params)
    weights = f"{total:,} parameters"
    if visited < total:
        weights += f", of which a token visits {visited:,}"
    if config.network.lora_rank:
        trained = count(program.state["params"])
        weights += f", of which {trained:,} are trained ({trained / total:.2%})"
    if held > total:
        weights += f" (and {held - total:,} of padding, in rows of the vocabulary without a token)"
    say.header(config, program.mesh, process_allgather(socket.gethostname()))
    for line in (*describe_model(plan, weights), describe_training(plan)):
        say.line(line)
    if config.ema:
        say.line(f"average  evaluations and checkpoints use the average of the weights over "
                 f"updates (--ema {config.ema:g})")
    if options := options_text(config):
        say.line(options)
    if attention := describe_attention(plan):
        say.detail(attention)
    of = plan.decisions, plan.params, program.mesh, program.state["opt"]
    say.detail(explain(*of))
    if not say.verbose:
        say.line(f"memory   {held_lines(*of)[0]}")
    if stages > 1 and config.collectives == "explicit":
        c = config.network
        say.line("pipe     " + timeline(stages, c.microbatches, c.schedule, c.chunks,
                                        plan.skips_idle))


def describe_model(plan: Any, weights: str) -> list[str]:
    """Return lines with the network, its sizes and `weights`; for a custom loss, only `weights`."""
    if plan.network is None:
        return [f"weights  {weights}"]
    known = flat(plan.config)
    sizes = [f"{name} {known[name]:,}" for name in (
        "layers", "encoder_layers", "d_model", "heads", "kv_heads", "d_ff", "experts", "vocab_size",
        "seq_len") if known.get(name)]
    return [f"network  {describe_network(plan.config)}: {weights}", f"sizes    {', '.join(sizes)}"]


def describe_training(plan: Any) -> str:
    """Return a line with the number of updates, the optimizer and the learning rate."""
    c, is_own = plan.config, isinstance(plan.schedule, Factor)
    rate = f"lr up to {c.lr:.3g} after {c.warmup:,} steps of warmup"
    if plan.schedule:
        rate = "with its own rate" if is_own else "the rate of fit's schedule"
    optimizer = "custom optimizer" if is_own else c.optimizer
    if optimizer == "muon" and plan.network and plan.mesh.size > 1:
        optimizer += f" (devices wait {muon.idle(plan):.0%} of the orthogonalization)"
    return f"training {c.steps:,} steps of {c.batch:,} examples, {optimizer}, {rate}"


def describe_attention(plan: Any) -> str:
    """Return lines saying how this mesh computes a network's calls to shard.attend; '' for a custom
    loss."""
    sizes, found = plan.sizes, []
    for call in plan.attends if plan.network else ():   # call.rows counts a device group's rows
        rows, heads = call.rows, call.heads
        if plan.mode == JIT:
            rows *= row_groups(plan.mesh)
        elif sizes["pipe"] > 1:
            rows //= plan.config.network.microbatches
        if plan.mode == BY_HAND and heads % sizes["tensor"] == 0:
            heads //= sizes["tensor"]
        how = describe(call._replace(rows=rows, heads=heads), plan.mesh, plan.manual)
        found.append(f"attend   {'causal' if call.causal else 'all to all'}, {call.queries:,} "
                     f"queries and {call.keys:,} keys: {how}")
    return "\n".join(dict.fromkeys(found))
