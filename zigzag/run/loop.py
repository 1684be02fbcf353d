"""What the training loop carries, and what it does besides stepping.

    prepare         restores or makes the state, and compiles the step
    flush_metrics   writes down the numbers of the last step, while the devices work on the next
    is_due          whether to evaluate, or to save, after this step
    save            begins to save the state
    end_early       saves, and says how to continue
    end_run         says that the run is done, or that its last held-out loss is not finite
    profile         begins or ends a trace
"""

import dataclasses
import functools
import math
import signal
import socket
import statistics
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax
import numpy as np

from zigzag.core.errors import RunError, human_bytes
from zigzag.core.hosts import process_allgather, watchdog
from zigzag.core.mesh import row_groups
from zigzag.core.report import Reporter, options_text
from zigzag.disk.checkpoint import RunFolder
from zigzag.measure import chips
from zigzag.parallel.attention import describe
from zigzag.parallel.pipeline import timeline
from zigzag.rule.rule import explain
from zigzag.run.loggers import Loggers
from zigzag.run.modes import BY_HAND, JIT
from zigzag.run.optimizers import Factor
from zigzag.run.plan import LOGGED, Program, compiled
from zigzag.run.record import hidden
from zigzag.run.task import Task
from zigzag.weights import lora
from zigzag.weights.network import describe as describe_network

# How many examples' outputs an evaluation shows.
SHOWN = 4


class Fit(NamedTuple):
    """What fit returns."""
    params: Any
    step: int                       # updates made
    held_out: float | None          # the loss of the last evaluation
    outputs: Any                    # its predictions, arrays [examples, ...]
    evaluation: dict[str, Any]      # all of its numbers, as in metrics.jsonl
    best: int | None                # the step of the best evaluation, by the first of config.best


@dataclasses.dataclass
class Loop:
    """What the training loop carries from step to step."""
    program: Program
    task: Task
    folder: RunFolder | None        # None: nothing is kept on disk
    reporter: Reporter              # has what is only logged: times, recent losses
    numbers: Callable               # update -> the numbers of its examples
    log: Callable | None = None     # fit's: (step, numbers)
    state: Any = None               # params, opt, step; before `prepare`: the first state or None
    step: Callable | None = None    # (state, batch) -> state, metrics; None: all steps are done
    began: int = 0                  # updates made by earlier runs
    at: int = 0                     # updates made
    pending: Any = None             # (step, metrics) that are still on the devices
    skipped: int = 0                # updates in a row whose loss or gradient was not finite
    evaluation: dict = dataclasses.field(default_factory=dict)      # the numbers of the last one
    outputs: Any = None             # and its predictions
    # {one of --best: {the best step by it: its evaluation}}, or {} before there is one
    best: dict[str, dict[int, dict]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def loggers(self) -> Loggers:
        """Of --log, and fit's own. They open when training begins."""
        config, record = self.program.config, self.folder.record if self.folder else {}
        return Loggers(config.log, config.out, self.began, record, self.log, self.reporter.line)

    @property
    def is_new(self) -> bool:
        """Whether no earlier run has made updates of this one."""
        return not self.folder or self.folder.restored is None

    def result(self) -> Fit:
        """What fit returns when the loop has ended."""
        program = self.program
        return Fit(program.permute(program.weights(self.state), back=True), self.at,
                   self.evaluation.get("eval_loss"), self.outputs, self.evaluation,
                   next(iter(next(iter(self.best.values()), ())), None))

    def write(self, row: dict[str, Any]) -> None:
        """Write down the numbers of a step or of an evaluation, wherever this run keeps them."""
        if self.folder:
            self.folder.write(row)
        self.loggers.write(row)


def first_state(program: Program, weights: Callable | None = None) -> Any:
    """The state that a run begins with. weights(shapes) gives weights instead of init's; the
    shapes have shardings."""
    config, given = program.config, None
    if weights:
        places = program.state["frozen" if config.lora_rank else "params"]
        given = weights(jax.tree.map(lambda x: x.update(dtype="float32"), places))
    with jax.set_mesh(program.mesh):
        return program.start(jax.random.key(config.seed), given)


def frozen_state(program: Program, weights: Callable | None = None) -> tuple[Any, dict[str, str]]:
    """The first state of a run with frozen weights, which no checkpoint holds, and their
    fingerprint. (None, {}) for other runs."""
    if not (program.config.lora_rank and program.config.out):
        return None, {}
    state = first_state(program, weights)
    with jax.set_mesh(program.mesh):
        return state, {"base_weights": lora.fingerprint(state["frozen"])}


def prepare(loop: Loop) -> Callable | None:
    """Restore or make the state, and return the compiled step; None if all steps are done."""
    program, config, folder, say = loop.program, loop.program.config, loop.folder, loop.reporter
    begin = time.perf_counter()
    watchdog.arm("reading the checkpoint")
    state = folder.restore(say.line) if folder else None
    if state is None:
        watchdog.arm("making the first weights")
        state = loop.state or first_state(program, loop.task.weights)
    else:
        state = program.restored(state, loop.state)
        loop.skipped, say.losses = folder.skipped, folder.losses
    if folder:
        loop.best = folder.read_best(config.best)
        say.log_to(folder.folder / f"log-{jax.process_index()}.txt", folder.restored is not None)
    loop.state = program.permute(state)
    loop.at = loop.began = int(state["step"])
    # (Else main has said so, and rightly, unless the newest checkpoint is damaged.)
    if loop.at and ("fingerprint" not in folder.record or folder.has_damaged):
        say.line(f"continuing {config.out} at step {loop.at}")
    if loop.at >= config.steps:
        say.line(f"{config.out} has its {loop.at} steps; --steps with a higher number goes on")
        return None
    watchdog.arm("compiling")
    step = compiled(program)
    process_allgather("compiled")     # before the devices first wait for each other
    if folder:
        folder.files.enter_context(loop.loggers)
        folder.compile_checksums(program.permute(program.saved(loop.state), back=True))
    memory = step.memory_analysis()
    say.line(f"ready in {time.perf_counter() - begin:.1f} s; compiled step: "
             f"{human_bytes(memory.argument_size_in_bytes)} of state and batch, "
             f"{human_bytes(memory.temp_size_in_bytes)} of temporaries a device")
    watchdog.arm("the first step")
    return step


def flush_metrics(loop: Loop) -> None:
    """Write down the step whose numbers are still on the devices."""
    if loop.pending is None:
        return
    (at, metrics), loop.pending = loop.pending, None
    say, plan = loop.reporter, loop.program.plan
    watchdog.arm("a step")
    values = jax.tree.map(plain, jax.device_get(metrics))
    if plan.schedule == Factor(None):       # (the rate is the optimizer's own, and not known)
        values["lr"] = None
    took, saving = say.lap()
    loop.skipped = loop.skipped + 1 if values["skipped"] else 0
    tokens, values["skipped"] = float(np.nan_to_num(values.pop("tokens"))), loop.skipped
    tokens = int(tokens) if tokens.is_integer() else tokens     # (a sum of weights)
    own = {name: value for name, value in values.items() if name not in LOGGED}
    computed, learned = tokens_of(plan.batch, tokens)
    row = {"step": at, **{name: values.pop(name) for name in ("loss", "lr", "grad_norm")},
           "tokens": tokens, "tokens_per_second": round(computed / took, 1),
           "mfu": chips.mfu(loop.task.flops, took, loop.program.mesh),
           "save_seconds": round(saving, 4), **values}
    loop.write(row)
    what = "tokens"
    if plan.network is None and "tokens" not in plan.batch:
        what, computed = "examples", plan.config.batch
        learned = computed
    say.step(row, took, chips.memory_in_use(), (computed, learned),
             functools.partial(seconds_of_others, loop, at), what, own)
    say.note_loss(at, row["loss"])
    if loop.skipped:
        _report_skipped(loop, at, "loss" if math.isfinite(row["grad_norm"]) else "gradient")


def plain(x: Any) -> Any:
    """A number as a float, an array as lists of numbers of six significant digits."""
    if not np.ndim(x):
        return float(x)
    return np.vectorize(lambda value: float(f"{value:.6g}"), otypes=[float])(x).tolist()


def _report_skipped(loop, at, what):
    """Say that update `at` learned nothing because `what` (loss or gradient) is not finite; end the
    run after --max_skipped such updates."""
    chosen = loop.numbers(at - 1)
    batch = (f"its batch is of examples {', '.join(map(str, chosen[:8]))}"
             + (", ..." if len(chosen) > 8 else ""))
    loop.reporter.line(f"step {at}: the {what} is not finite, so nothing was learned; {batch}")
    if loop.skipped >= loop.program.config.max_skipped:
        if loop.folder:
            loop.folder.drain()         # every process is here
        raise RunError(f"step {at}: the {what} was not finite, {loop.skipped} times in a row "
                       f"(--max_skipped); {batch}; what is saved is finite")


def tokens_of(batch: Any, count: int) -> tuple[int, int]:
    """The number of tokens in a batch with these shapes, padding included, and the number learned
    from, if the loss's count is `count` and counts the weights [B, T]. For a batch without tokens
    [B, T] both are `count`."""
    tokens = batch.get("tokens")
    if tokens is None or len(tokens.shape) != 2:
        return count, count
    computed, weights = math.prod(tokens.shape), batch.get("weights")
    return computed, count if weights is not None and weights.shape == tokens.shape else computed


def seconds_of_others(loop: Loop, at: int, usual: float) -> float:
    """Seconds that the evaluations and saves after step `at` will take, if a step usually takes
    `usual` seconds. (A forward pass takes a third of a step; the first evaluation compiles,
    too.)"""
    config, seconds = loop.program.config, 0.0

    def count(every):
        return config.steps // every - (at - 1) // every + (config.steps % every > 0)

    if len(loop.task.held_out) and config.eval_every:
        guess = usual / 3 * len(loop.task.held_out) / config.batch
        first, *others = loop.reporter.evaluations or [guess]
        each = statistics.median(others) if others else min(first, guess)
        seconds += count(config.eval_every) * each
    if loop.folder and loop.reporter.saves:
        every = config.save_every or config.steps
        seconds += count(every) * statistics.median(loop.reporter.saves)
    return seconds


def is_due(loop: Loop, every: int) -> bool:
    """Whether what happens after each `every` updates, and after the last, is due now; 0: never."""
    return every > 0 and (loop.at == loop.program.config.steps or loop.at % every == 0)


def save(loop: Loop) -> None:
    """Begin to save the state, if the run has a folder."""
    if not loop.folder:
        return
    flush_metrics(loop)
    watchdog.arm("a save")
    begin = time.perf_counter()
    program, state = loop.program, loop.program.saved(loop.state)
    evaluation = loop.evaluation if loop.evaluation.get("step") == loop.at else {}
    loop.folder.save(loop.at, program.permute(state, back=True), loop.skipped, evaluation,
                     {step for best in loop.best.values() for step in best})
    loop.reporter.saved(time.perf_counter() - begin)
    watchdog.arm("a step")


def end_early(loop: Loop, stop: list[int]) -> None:
    """Save, and print how to continue."""
    folder, out = loop.folder, loop.program.config.out
    save(loop)
    # config.json has all flags of a run that the command line made, so --out is enough. It records
    # no coordinator, so several processes need their command again.
    by_folder = folder and "fingerprint" in folder.record and jax.process_count() == 1
    again = f"python train.py --out {out}" if by_folder else "the same command"
    loop.reporter.line(f"stopped at step {loop.at} by {signal.Signals(stop[0]).name}"
                       + (f", saved in {out}: run {again} to continue" if folder else ""))


def end_run(loop: Loop) -> None:
    """Say that the run is done and saved. If its last held-out loss is not finite, the run has
    failed; without a folder that is only said, because an exception would lose the weights."""
    out, loss = loop.program.config.out, loop.evaluation.get("eval_loss", 0.0)
    if not math.isfinite(loss):
        line = f"step {loop.at}: the held-out loss is {loss}"
        if out:
            raise RunError(f"{line}; this run has failed, with all of it saved in {out}")
        loop.reporter.line(f"warning  {line}")
    loop.reporter.end(loop.at, out, loop.evaluation)


def profile(loop: Loop) -> None:
    """Begin or end the trace of --profile, after the right step: the first two of a run are
    slow."""
    config, folder = loop.program.config, str(Path(loop.program.config.out or ".") / "profile")
    first, last = loop.began + 2, min(loop.began + 2 + config.profile, config.steps)
    if loop.at == first < last:
        jax.profiler.start_trace(folder, create_perfetto_trace=True)
    elif loop.at == last > first:
        flush_metrics(loop)
        jax.profiler.stop_trace()
        loop.reporter.line(f"a trace of {last - first} steps is in {folder}: open its "
                           f"perfetto_trace.json.gz in ui.perfetto.dev")


def report_header(program: Program, say: Reporter, is_short: bool = True) -> None:
    """Print how a run begins. is_short: print a short table of weights."""
    plan, config, stages = program.plan, program.config, program.plan.sizes["pipe"]
    (total, visited), held = plan.counts, sum(w.size for w in jax.tree.leaves(plan.params))
    weights = f"{total:,} parameters"
    if visited < total:
        weights += f", of which a token visits {visited:,}"
    if config.lora_rank:
        trained = sum(w.size for w in jax.tree.leaves(program.state["params"]))
        weights += f", of which {trained:,} are trained ({trained / total:.2%})"
    if held > total:
        weights += (f" (and {held - total:,} of padding, in rows of the vocabulary that no token "
                    f"has)")
    table = explain(plan.decisions, plan.params, program.mesh, program.state["opt"], is_short)
    schedule = ""
    if stages > 1 and config.step == "shard_map":
        schedule = timeline(stages, config.microbatches, config.schedule, config.chunks,
                            plan.skips_idle)
    # (Other lines say these.)
    others = {"mesh", "shards", "dtype", "step", "vocab_size", "steps", "batch", "lr", "warmup",
              "optimizer", "eval_tokens"}
    if plan.network is not None:
        others |= {"layers", "encoder_layers", "d_model", "heads", "kv_heads", "d_ff", "seq_len",
                   "experts", "experts_per_token"}
    say.header(config, program.mesh, weights, table, schedule,
               process_allgather(socket.gethostname()),
               [plan.trusted and f"network  {describe_network(config)}", describe_sizes(plan),
                describe_training(plan),
                config.ema and f"average  evaluations and checkpoints have the average of the "
                               f"weights over updates (--ema {config.ema:g})",
                options_text(config, hidden(type(config)) | others), describe_attention(plan)])


def describe_sizes(plan: Any) -> str:
    """A line with the sizes that a network's configuration has; '' for a custom loss."""
    if plan.network is None:
        return ""
    c, network = plan.config.network, plan.network
    layers, encoder, d_model, heads, kv_heads, d_ff, experts, vocab_size = (
        getattr(c, name, None) for name in ("layers", "encoder_layers", "d_model", "heads",
                                            "kv_heads", "d_ff", "experts", "vocab_size"))
    source = network.source_shape(c)
    parts = [layers and f"layers {layers}" + (f" and {encoder} of the encoder" if encoder else ""),
             d_model and f"d_model {d_model}",
             heads and f"{heads} heads" + (
                 f" ({kv_heads} kv_heads)" if kv_heads and kv_heads != heads else ""),
             d_ff and f"d_ff {d_ff}",
             experts and f"{experts} experts, {c.experts_per_token} a token",
             vocab_size and f"vocabulary {vocab_size:,}",
             source and f"source {' x '.join(map(str, source))}",
             "tokens" in plan.batch and f"context {plan.batch['tokens'].shape[1]:,} tokens"]
    return "sizes    " + ", ".join(filter(None, parts))


def describe_training(plan: Any) -> str:
    """A line with the number of updates, what one learns from, and the learning rate."""
    c, tokens = plan.config, plan.batch.get("tokens")
    batch = f"{c.batch:,} examples"
    if tokens is not None and len(tokens.shape) == 2:
        batch = f"{c.batch:,} rows of {tokens.shape[1]:,} tokens ({math.prod(tokens.shape):,})"
    how = f"{c.optimizer}, lr up to {c.lr:.3g} " + (
        f"after {c.warmup:,} step{'s' if c.warmup > 1 else ''} of warmup" if c.warmup else
        "without warmup")
    if isinstance(plan.schedule, Factor):
        how = "fit's optimizer with its own rate" + ", times fit's schedule" * (
            plan.schedule.schedule is not None)
    elif plan.schedule:
        how = f"{c.optimizer}, the learning rate of fit's schedule"
    return f"training {c.steps:,} steps of {batch}, {how}"


def describe_attention(plan: Any) -> str:
    """Lines with how this mesh computes the attention that the loss asks of shard.attend; '' for a
    custom loss."""
    if plan.network is None:
        return ""
    config, sizes, found = plan.config, plan.sizes, {}
    for call in plan.attends:      # (rows are of a group of devices, heads of all)
        rows, heads = call.rows, call.heads
        if plan.mode == JIT:
            rows *= row_groups(plan.mesh)
        elif sizes["pipe"] > 1:
            rows //= config.microbatches
        if plan.mode == BY_HAND and heads % sizes["tensor"] == 0:
            heads //= sizes["tensor"]
        how = describe(call._replace(rows=rows, heads=heads), plan.mesh, plan.manual)
        what = "causal" if call.causal else "all to all"
        found.setdefault(how, []).append(
            f"{what}, {call.queries:,} queries and {call.keys:,} keys")
    lines = [*found] if len(found) == 1 else [
        f"{'; '.join(dict.fromkeys(what))}: {how}" for how, what in found.items()]
    more = [f"and {len(lines) - 4} more"] if len(lines) > 4 else []
    return "attend   " + "\n         ".join(lines[:4] + more) if lines else ""
