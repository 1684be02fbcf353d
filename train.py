"""The training step, the loop around it, and the command line.

    python train.py --shards 4

    batch -> [ micro-batch -> loss -> gradient ] x accumulate -> one sum over devices -> AdamW
             \\__________________ shard_map: our collectives _______________/   \\_ the compiler's

`fit` trains anything. It takes the three functions of a task, and the command line at the end of
this file is only its first user:

    collate(examples) -> batch          a list of raw examples to a dict of arrays [B, ...]
    loss(params, batch) -> sum, count   over the batch; divided once, when all is summed (a third,
                                        a dict of other sums, is divided too, and logged)
    predict(params, batch) -> outputs   shown after each evaluation

zigzag/plan.py finds out how a loss runs on a mesh, zigzag/loss_check.py compares somebody else's
loss on the mesh with the same loss on one device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import data
import model
try:
    import sample       # (until it is rewritten)
except ImportError:
    sample = None
import shard
from zigzag import chips, forecast, hosts, loss_check
from zigzag.batches import batch_arrays, batch_shapes, place_batch
from zigzag.checkpoint import RunFolder, check_run_folder
from zigzag.checks import check_batch, check_config, check_model, check_overrides
from zigzag.errors import ConfigError, RunError, did_you_mean, human_bytes
from zigzag.flags import parse_flags, run_main
from zigzag.hlo import collectives
from zigzag.hosts import watchdog
from zigzag.mesh import (
    abstract_mesh,
    batch_spec,
    by_path,
    cast,
    compiler_options,
    keep_on_first,
    make_mesh,
    mark_varying,
    mesh_sizes,
    pmean_all,
    row_groups,
    shardings,
    simulate_devices,
    varying,
)
from zigzag.pipeline import timeline
from zigzag.plan import ANY_LOSS, JIT, Plan, make_plan, resolve_dtype
from zigzag.report import BenchReporter, Reporter, mean_loss
from zigzag.rule import explain, state_specs
from zigzag.storage import permute_layers, stored_to_used
from zigzag.traffic import expected_traffic


@dataclasses.dataclass(frozen=True)
class Config(model.Config):
    """python train.py [--shards N] [--data PATH ...]: train a transformer on any machine"""
    # The model's fields come first: a run's configuration serves wherever a model's does.
    model: str = "tiny"             # a preset to begin from; other flags change it
    data: tuple[str, ...] = ()      # text files, folders of them, or one folder made by data.py
    out: str = "out"                # folder of the run; the same command again continues it
    steps: int = 900                # updates
    batch: int = 8                  # examples in an update, over all devices
    accumulate: int = 1             # micro-batches that a batch is cut into, one after the other
    lr: float = 0.0                 # peak learning rate; 0: 0.5 / d_model
    warmup: int = 0                 # updates until the peak; 0: a twentieth of steps
    weight_decay: float = 0.1       # of matrices; scales and biases have none
    clip: float = 1.0               # largest norm of all gradients together
    optimizer: str = "adamw"        # or muon, for the matrices of the layers
    seed: int = 0                   # of the weights, the order of the data and dropout
    shards: int = 0                 # size of the tensor axis
    mesh: str = ""                  # axis=size,...; data takes the devices that are left; or auto
    override: tuple[str, ...] = ()  # REGEX=axis,-,axis: how weights are stored; the last match wins
    step: str = "shard_map"         # or jit: everything left to the compiler, as a control
    fsdp_min: int = 4096            # elements of the smallest weight that fsdp splits
    zero: int = 0                   # 1: optimizer state split over data
    save_every: int = 0             # updates between checkpoints; 0: a fifth of steps
    eval_every: int = 0             # updates between evaluations; 0: a fifth of steps
    keep: int = 3                   # checkpoints that are kept
    verify: str = "on"              # checksums of a checkpoint that is read: on or off
    max_skipped: int = 10           # updates in a row without a finite gradient that end a run
    topology: str = ""              # compile for absent hardware (v5e:4x4, h100:1x2x8), and report
    bench: bool = False             # how fast it trains here; keeps nothing on disk
    profile: int = 0                # steps of which a trace for Perfetto is kept, in out/profile
    coordinator: str = ""           # many hosts: HOST:PORT where process 0 listens
    processes: int = 0              # how many processes there are, each with the same command
    process_id: int = -1            # which of them this is, from 0
    distributed: bool = False       # many hosts by SLURM, Open MPI, Kubernetes or on a TPU pod
    patience: int = 120             # seconds that other processes may be late, beyond the usual

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(self)
        for name, value in (("lr", 0.5 / self.d_model), ("warmup", max(1, self.steps // 20)),
                            ("save_every", max(1, self.steps // 5)),
                            ("eval_every", max(1, self.steps // 5))):
            if not getattr(self, name):
                object.__setattr__(self, name, value)


# What decides a run's numbers. To continue it these must be what they were; the rest (how long,
# where, how fast, how often it is saved) may change.
SAME = tuple(f.name for f in dataclasses.fields(model.Config) if f.name not in (
    "remat", "kernel", "sequence_parallel", "microbatches", "schedule", "chunks", "sum_dtype")) + (
    "data", "batch", "lr", "weight_decay", "clip", "optimizer", "seed")
# What only one start of it, or one process, is told.
NOT_RECORDED = ("coordinator", "processes", "process_id", "distributed", "patience", "topology",
                "bench", "profile")
DEFAULTS = {f.name: f.default for f in dataclasses.fields(Config)}


# -------------------------------------------------------------------------------------------
# The step

def learning_rate(config: Config, step: jax.Array) -> jax.Array:
    """The rate of update number `step` (from 0): up to the peak in `warmup` updates, then half
    a cosine, down to a fiftieth at the last one."""
    return optax.warmup_cosine_decay_schedule(
        config.lr / config.warmup, config.lr, config.warmup - 1,
        max(config.steps - 1, config.warmup), config.lr / 50)(step)


def optimizer(config: Config, decisions: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW but for the rate, which the step applies. Or Muon, at
    AdamW's rates, for the matrices that are neither the first nor the last (optax has Nesterov's
    Adam for the rest): which of their dimensions are contracted with activations the rule knows."""
    scaled = optax.scale_by_adam(0.9, 0.95)
    if config.optimizer == "muon":
        has_layers = any(d.stacked for d in jax.tree.leaves(decisions))
        dims = jax.tree.map(
            lambda d: optax.contrib.MuonDimensionNumbers(*d.matmul_dims)
            if all(d.matmul_dims) and (d.stacked or not has_layers) else None, decisions)
        scaled = optax.contrib.muon(-1.0, consistent_rms=0.2, adam_b2=0.95,
                                    muon_weight_dimension_numbers=dims)
    matrices = jax.tree.map(lambda d: d.is_matrix, decisions)
    return optax.chain(optax.clip_by_global_norm(config.clip), scaled,
                       optax.add_decayed_weights(config.weight_decay, matrices))


def gather_weights(plan: Plan, weights: Any) -> Any:
    """Weights as the loss gets them: whole over fsdp, but for those of layers that gather their
    own, one layer after the other."""
    config = plan.config
    weights = stored_to_used(weights, plan.stored, plan.used, config.chunks, config.sum_dtype)
    return shard.gather(weights, jax.tree.map(
        lambda d: P() if plan.takes_specs and d.stacked else d.given, plan.decisions),
        config.sum_dtype)


def local_sums(plan: Plan, weights: Any, batch: Any) -> tuple:
    """What the loss gives on this device: its part of the sum, of the count, and of other sums."""
    total, count, aux = plan.loss(weights, batch, plan.used)
    if "seq" in plan.shared_row_axes & (varying(total) - varying(count)):
        raise ConfigError(
            f"mesh axis seq={dict(plan.mesh.shape)['seq']}: this loss divides by a constant or by "
            f"its rows, as a pooled one does, and each device has a part of the time; let it count "
            f"in the batch, as the sum of its weights; any loss trains on data, fsdp and tensor")
    sums = shard.sum_gradients((total, count, aux), only={"tensor"})
    return keep_on_first(sums, plan.shared_row_axes)


def on_mesh(plan: Plan, fn: Callable, out_specs: Any, splits_rows: bool = True) -> Callable:
    """fn(params, batch), run by each group of devices on its rows, and on its part of their
    time."""
    if plan.mode == JIT:
        return fn

    def call(params: Any, batch: Any) -> Any:
        batch, specs = shard.shard_time(batch, plan.mesh)
        rows = [*batch_spec(plan.mesh)] if splits_rows else []
        specs = {k: P(*(rows or [None]), *s[1:]) for k, s in specs.items()}
        return jax.shard_map(fn, mesh=plan.mesh, in_specs=(plan.local(plan.stored), specs),
                             out_specs=out_specs, axis_names=set(plan.manual),
                             check_vma=plan.typed)(params, batch)

    return call


def make_step(plan: Plan, optimizer: optax.GradientTransformation) -> tuple[Callable, Callable]:
    """The training step (state, batch) -> state, metrics. Second, its first half, for whoever
    compares gradients: (params, batch) -> gradients, sums."""
    def gradients(params: Any, batch: Any) -> tuple:
        # Accumulate: weights are gathered once; each micro-batch adds what it finds, in float32.
        weights = plan.mark(cast(params, plan.dtype))
        whole, scatter = jax.vjp(functools.partial(gather_weights, plan), weights)

        def loss(weights: Any, part: Any) -> tuple:
            sums = local_sums(plan, weights, part)
            return sums[0], sums

        def add_micro_batch(total: tuple, part: Any) -> tuple:
            (_, sums), grads = plan.on_device(jax.value_and_grad(loss, has_aux=True))(whole, part)
            return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total,
                                (*scatter(grads), sums)), None

        zeros = plan.mark(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), plan.sums))
        total = jax.tree.map(lambda w: mark_varying(jnp.zeros(w.shape, jnp.float32), w),
                             weights), zeros
        if plan.accumulate == 1:
            total, _ = add_micro_batch(total, batch)
        else:
            total, _ = jax.lax.scan(add_micro_batch, total, jax.tree.map(
                lambda x: x.reshape(plan.accumulate, -1, *x.shape[1:]), batch))
        # Reduce: one sum over devices, of the gradients and of what they are divided by.
        grads, sums = total
        return (shard.sum_gradients(grads, plan.stored, plan.moments, plan.sum_axes),
                shard.sum_gradients(sums, axes=plan.sum_axes))

    gradients = on_mesh(plan, gradients, (plan.local(plan.moments), P()))

    def step(state: Any, batch: Any) -> tuple:
        params, config = state["params"], plan.config
        grads, (total, count, aux) = gradients(params, batch)
        divisor = jnp.where(count == 0, 1, count)
        grads = jax.tree.map(lambda g: g * (1 / divisor.astype(g.dtype)), grads)
        # Update. One number that is not finite would be in every weight from then on: then nothing
        # changes. Nor where nothing was asked, as weights would decay and moments fade.
        rate, norm = learning_rate(config, state["step"]), optax.tree.norm(grads)
        updates, opt = optimizer.update(grads, state["opt"], params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        is_finite = jnp.isfinite(norm)
        learns = is_finite & (count != 0)
        params, opt = jax.tree.map(lambda new, old: jnp.where(learns, new.astype(old.dtype), old),
                                   (params, opt), (state["params"], state["opt"]))
        metrics = {"loss": total / divisor, "lr": rate, "grad_norm": norm, "tokens": count,
                   "skipped": 1 - is_finite, **{name: x / divisor for name, x in aux.items()}}
        return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics

    return step, gradients


def make_evaluate(plan: Plan) -> Callable:
    """(params, batch) -> the sum and the count over a batch, which every group of devices computes
    in full where its rows do not divide."""
    def evaluate(params: Any, batch: Any) -> tuple:
        splits_rows = jax.tree.leaves(batch)[0].shape[0] % row_groups(plan.mesh) == 0

        def local(params: Any, batch: Any) -> tuple:
            weights = gather_weights(plan, plan.mark(cast(params, plan.dtype)))
            sums = plan.on_device(functools.partial(local_sums, plan))(weights, batch)[:2]
            axes = plan.sum_axes if splits_rows else plan.shared_row_axes
            return pmean_all(shard.sum_gradients(plan.mark(sums), axes=axes))

        return on_mesh(plan, local, (P(), P()), splits_rows)(params, batch)

    return evaluate


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What is compiled, or ready to be, to train with a loss on a mesh."""
    plan: Plan
    state: Any              # shapes with their places: params, opt, step
    batch: Any              # the same for a batch
    start: Any              # key -> state
    step: Any               # state, batch -> state, metrics
    evaluate: Any           # params, batch -> (sum, count)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def mesh(self) -> Any:
        return self.plan.mesh

    def compile(self) -> jax.stages.Compiled:
        with jax.set_mesh(self.mesh):
            return self.step.lower(self.state, self.batch).compile()

    def permute(self, state: Any, back: bool = False) -> Any:
        """A state, or its params, with layers in the order of the pipeline's stages, or in their
        own, in which they are saved."""
        chunks = 1 if self.plan.mode == JIT else self.config.chunks
        like = self.state if "opt" in state else self.state["params"]
        return permute_layers(state, jax.tree.map(lambda x: x.sharding, like), chunks, back)


def build(config: Config, mesh: Any, init: Callable, loss: Callable, batch: Any,
          overrides: Sequence[tuple[str, P]] = (), typed: bool = True) -> Program:
    """The program that trains init's weights with `loss` on batches shaped like `batch`."""
    dims = model.tensor_dims(loss.keywords["config"]) if is_transformer(loss) else None
    plan = make_plan(config, mesh, init, loss, batch, overrides, typed, dims)
    transform = optimizer(plan.config, plan.decisions)

    def start(key: jax.Array) -> Any:
        params = init(key)
        return {"params": params, "opt": transform.init(params), "step": jnp.zeros((), jnp.int32)}

    def place(shapes: Any, places: Any) -> Any:
        return jax.tree.map(lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p),
                            shapes, places)

    places = shardings({"params": plan.stored, "step": P(),
                        "opt": state_specs(transform, plan.params, plan.moments)}, mesh)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, batch_spec(mesh))
    jit = functools.partial(jax.jit, compiler_options=compiler_options(mesh))
    return Program(
        plan, place(jax.eval_shape(start, jax.random.key(0)), places),
        place(plan.batch, jax.tree.map(lambda _: rows, plan.batch)),
        jit(start, out_shardings=places),
        jit(make_step(plan, transform)[0], donate_argnums=0, out_shardings=(places, whole)),
        jit(make_evaluate(plan), out_shardings=whole))


def is_transformer(loss: Callable) -> bool:
    """Whether it is model.loss, and not somebody else's, or one that wraps it."""
    return isinstance(loss, functools.partial) and loss.func is model.loss


def language(config: Config) -> tuple[Callable, Callable, Any]:
    """Language modelling for `build`: init, loss, and the shape of a batch."""
    batch = {**model.batch_shapes(config, config.batch),
             "seeds": jax.ShapeDtypeStruct((config.batch,), jnp.uint32)}
    return (functools.partial(model.init, config),
            functools.partial(model.loss, config=config, with_aux=True), batch)


# -------------------------------------------------------------------------------------------
# The loop

class Fit(NamedTuple):
    """What fit gives back."""
    params: Any
    step: int               # updates made
    held_out: float | None  # the last evaluation's loss
    outputs: Any            # and prediction


class Task(NamedTuple):
    """What is learned, and shown: fit's arguments of these names."""
    collate: Callable
    predict: Callable | None
    examples: Sequence
    held_out: Sequence
    show: Callable | None
    flops: float | None
    bits_per_nat: float | None


@dataclasses.dataclass
class Loop:
    """What goes around the loop."""
    program: Program
    task: Task
    folder: RunFolder | None        # None: nothing is kept on disk
    reporter: Reporter
    state: Any = None               # params, opt, step
    at: int = 0                     # updates made
    pending: Any = None             # (step, metrics) of the step whose numbers are on the devices
    clock: float = 0.0              # when the last step's numbers came
    saving: float = 0.0             # seconds that saves took since then
    skipped: int = 0                # updates in a row whose gradient was not finite
    losses: list[float] = dataclasses.field(default_factory=list)   # since the last evaluation
    recent: Any = dataclasses.field(default_factory=lambda: collections.deque(maxlen=128))
    score: float | None = None      # the last evaluation
    outputs: Any = None


def fit(config: Config, init: Callable, collate: Callable, loss: Callable,
        predict: Callable | None = None, examples: Sequence = (), held_out: Sequence = (),
        show: Callable | None = None, flops: float | None = None,
        bits_per_nat: float | None = None, record: dict[str, Any] | None = None,
        mesh: Any = None, say: Reporter | None = None,
        overrides: Sequence[tuple[str, P]] = ()) -> Fit:
    """Train init(key)'s weights on `examples` (anything with a length and an index) for
    config.steps updates, on config.mesh, in config.out ('' keeps nothing on disk).

    show(outputs) makes a text of predict's outputs. flops is the arithmetic of an update, for
    MFU. bits_per_nat turns the held-out loss into bits per byte. What is in `record` is saved
    with the configuration and must be the same when the run continues. `say` reports to a person.
    `overrides`, (path regex, PartitionSpec) pairs, say where weights live, after --override: of
    those that match a weight the last wins."""
    stop: list[int] = []
    task = Task(collate, predict, examples, held_out, show, flops, bits_per_nat)
    mesh = mesh or machine(config)
    with hosts.stop_on_signals(stop):
        shapes = batch_shapes(config.batch, collate, examples)
        program = build(config, mesh, init, loss, shapes, overrides)
        config, say = program.config, say or Reporter(config.steps)
        facts = {"weights": shapes_hash(program.state["params"]), **(record or {})}
        record = {**{k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_RECORDED},
                  **facts}
        hosts.assert_same_everywhere(record)
        if not program.plan.trusted:
            program = check_program(program, init, loss, task, overrides, say.line)
        folder = RunFolder(config.out, record, [*SAME, *facts], DEFAULTS, program.state,
                           config.keep, config.verify == "on", config.patience
                           ) if config.out else None
        with folder or contextlib.nullcontext(), jax.set_mesh(mesh):
            report_header(program, say)
            loop = Loop(program, task, folder, say)
            run_loop(loop, prepare(loop), stop)
    watchdog.arm("")
    return Fit(program.permute(loop.state["params"], back=True), loop.at, loop.score, loop.outputs)


def prepare(loop: Loop) -> Callable | None:
    """Restore or make the state, and compile the step; None where the run has all of its steps."""
    program, config, folder, say = loop.program, loop.program.config, loop.folder, loop.reporter
    begin = time.perf_counter()
    watchdog.arm("reading the checkpoint")
    state = folder.restore(say.line) if folder else None
    if state is None:
        state = program.start(jax.random.key(config.seed))
    elif folder:
        loop.skipped, loop.losses = folder.skipped, folder.losses
    loop.state, loop.at = program.permute(state), int(state["step"])
    if loop.at:
        say.line(f"continuing {config.out} at step {loop.at}")
    if loop.at >= config.steps:
        say.line(f"{config.out} has its {loop.at} steps; --steps with a higher number goes on")
        return None
    watchdog.arm("compiling")
    step = program.compile()
    hosts.process_allgather("compiled")     # before the devices first wait for each other
    if folder:
        folder.compile_checksums(program.permute(loop.state, back=True))
    memory = step.memory_analysis()
    say.line(f"ready in {time.perf_counter() - begin:.1f} s; compiled step: "
             f"{human_bytes(memory.argument_size_in_bytes)} of state and batch, "
             f"{human_bytes(memory.temp_size_in_bytes)} of temporaries a device")
    say.collectives(collectives(step), expected(program))
    return step


def run_loop(loop: Loop, step: Callable | None, stop: list[int]) -> None:
    """Until the last step, or until somebody stops it. While the devices work on a step, the
    numbers of the one before are written down."""
    config, folder, has_held_out = loop.program.config, loop.folder, len(loop.task.held_out) > 0
    profiled = range(loop.at + 2, min(loop.at + 2 + config.profile, config.steps))
    trace = str(Path(config.out or ".") / "profile")
    loop.clock = time.perf_counter()
    while loop.at < config.steps and not stop:
        if profiled and loop.at == profiled.start:      # (the first steps are slow)
            jax.profiler.start_trace(trace, create_perfetto_trace=True)
        batch = training_batch(loop.program, loop.task.collate, loop.task.examples, loop.at)
        loop.state, metrics = step(loop.state, batch)
        loop.at += 1
        if profiled and loop.at == profiled.stop:
            flush_metrics(loop)
            jax.profiler.stop_trace()
            loop.reporter.line(f"a trace of {len(profiled)} steps is in {trace}: open its "
                               f"perfetto_trace.json.gz in ui.perfetto.dev")
        flush_metrics(loop)
        loop.pending = loop.at, metrics
        is_last = loop.at == config.steps
        if has_held_out and (is_last or loop.at % config.eval_every == 0):
            evaluate(loop, folder)
        if folder and (is_last or loop.at % config.save_every == 0):
            save(loop)
        hosts.share_stop(stop)
    flush_metrics(loop)
    if stop:
        if folder:
            save(loop)
        loop.reporter.line(
            f"stopped at step {loop.at} by {signal.Signals(stop[0]).name}"
            + (f", saved in {config.out}: run the same command to continue" if folder else ""))
    elif loop.score is None and has_held_out:       # a finished run was asked for again
        evaluate(loop, None)


def flush_metrics(loop: Loop) -> None:
    """Write down the step whose numbers are still on the devices."""
    if loop.pending is None:
        return
    (at, metrics), loop.pending, task, config = loop.pending, None, loop.task, loop.program.config
    watchdog.arm("a step")
    values = jax.tree.map(lambda v: np.round(np.asarray(v, float), 5).tolist() if np.ndim(v)
                          else float(v), jax.device_get(metrics))
    before, loop.clock = loop.clock, time.perf_counter()
    took = loop.clock - before
    loop.skipped = loop.skipped + 1 if values["skipped"] else 0
    row = {"step": at, "loss": values["loss"], "lr": values["lr"],
           "grad_norm": values["grad_norm"], "tokens": int(np.nan_to_num(values["tokens"])),
           "tokens_per_second": round(values["tokens"] / took, 1),
           "mfu": chips.mfu(task.flops, took, loop.program.mesh),
           "save_seconds": round(loop.saving, 4)}
    row |= {**{k: v for k, v in values.items() if k not in row}, "skipped": loop.skipped}
    loop.saving, recent, loss = 0.0, loop.recent, row["loss"]
    if loop.folder:
        loop.folder.write(row)
    loop.reporter.step(row, took, chips.memory_in_use())
    if len(recent) >= 32 and loss > statistics.fmean(recent) + 6 * statistics.pstdev(recent):
        loop.reporter.line(f"step {at}: the loss, {loss:.4f}, is far above that of the last "
                           f"{len(recent)} steps, {statistics.fmean(recent):.4f}")
    if math.isfinite(loss):
        recent.append(loss)
        loop.losses.append(loss)
    if loop.skipped:
        chosen = example_numbers(config, task.examples, at - 1, 0, config.batch)
        batch = (f"its batch is of examples {', '.join(map(str, chosen[:8]))}"
                 + (", ..." if len(chosen) > 8 else ""))
        loop.reporter.line(f"step {at}: the gradient is not finite, so nothing was learned; {batch}")
        if loop.skipped >= config.max_skipped:
            if loop.folder:
                loop.folder.drain()         # every process is here
            raise RunError(f"step {at}: the gradient was not finite, {loop.skipped} times in a row "
                           f"(--max_skipped); {batch}; what is saved is finite")


def save(loop: Loop) -> None:
    """Begin to save the state."""
    flush_metrics(loop)
    watchdog.arm("a save")
    begin = time.perf_counter()
    loop.folder.save(loop.at, loop.program.permute(loop.state, back=True), loop.skipped)
    loop.saving += time.perf_counter() - begin
    watchdog.arm("a step")


def evaluate(loop: Loop, folder: RunFolder | None) -> None:
    """The loss over every held-out example, and the prediction for the first few; written down in
    the folder, if one is given."""
    flush_metrics(loop)
    watchdog.arm("an evaluation")
    program, task, config, params = loop.program, loop.task, loop.program.config, loop.state["params"]
    groups, size, pairs, first = row_groups(program.mesh), config.batch // config.accumulate, [], 0

    def placed(first: int, rows: int) -> Any:
        return place_batch(program.mesh, lambda a, b: batch_arrays(task.collate, [
            task.held_out[i] for i in range(first + a, first + b)]), rows, rows % groups == 0)

    while first < len(task.held_out):
        rows = min(size, len(task.held_out) - first)
        if config.step == "shard_map":      # (with jit rows may be coupled: they stay together)
            rows = rows // groups * groups or rows      # the last, fewer than groups, by everyone
        pairs.append(jax.block_until_ready(program.evaluate(params, placed(first, rows))))
        first += rows
    total, count = np.sum([[float(s), float(c)] for s, c in pairs], axis=0)
    loop.score = float(total / (count or 1))
    if task.predict is not None:
        loop.outputs = jax.device_get(jax.jit(
            task.predict, out_shardings=NamedSharding(program.mesh, P()))(
            program.permute(params, back=True), placed(0, min(groups, len(task.held_out)))))
    row = {"step": loop.at, "eval_loss": loop.score, "train_loss": mean_loss(loop.losses),
           "bits_per_byte": task.bits_per_nat and loop.score * task.bits_per_nat}
    if folder:
        folder.write(row)
    loop.reporter.evaluation(row, task.show(loop.outputs) if task.show and task.predict else None)
    loop.losses, loop.clock = [], time.perf_counter()
    watchdog.arm("a step")


def example_numbers(config: Config, examples: Sequence, at: int, first: int, last: int
                    ) -> np.ndarray:
    """The numbers of the examples in rows first to last of update number `at` (from 0)."""
    return data.order(len(examples), config.seed, at * config.batch + first, last - first)


def training_batch(program: Program, collate: Callable, examples: Sequence, at: int,
                   rows: int = 0) -> Any:
    """Update number `at`'s batch, or its first rows: a pure function of the seed and the number."""
    config = program.config

    def make(first: int, last: int) -> dict[str, np.ndarray]:
        chosen = example_numbers(config, examples, at, first, last)
        batch = batch_arrays(collate, [examples[int(i)] for i in chosen], program.batch)
        # A seed for each row: randomness belongs to the example, wherever it is computed.
        place = np.arange(first, last, dtype=np.uint64) + np.uint64(at * config.batch)
        seeds = data.mix(place * np.uint64(2**32) + np.uint64(config.seed))
        return {**batch, "seeds": seeds.astype(np.uint32)}

    return place_batch(program.mesh, make, rows or config.batch)


def check_program(program: Program, init: Callable, loss: Callable, task: Task,
                  overrides: Sequence[tuple[str, P]], say: Callable) -> Program:
    """The program of somebody else's loss, if it is the same function on the mesh as on one device;
    where it is only without types, that program."""
    watchdog.arm("compiling")

    def check(program: Program) -> bool:
        return loss_check.check_loss(
            program.plan, init, lambda plan: make_step(plan, None)[1], make_evaluate,
            lambda at, rows: training_batch(program, task.collate, task.examples, at, rows),
            len(task.held_out) > 0, say)

    with jax.set_mesh(program.mesh):
        if not check(program):
            program = build(program.config, program.mesh, init, loss, program.plan.batch, overrides,
                            typed=False)
            check(program)
        loss_check.check_traceable(program.plan, program.step, program.state, program.batch)
    return program


# -------------------------------------------------------------------------------------------
# What a person sees, and what compiles without data

def shapes_hash(params: Any) -> str:
    text = str([(path, w.shape, str(w.dtype)) for path, w in by_path(params).items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expected(program: Program) -> list:
    """What an update should send."""
    plan, config = program.plan, program.config
    return expected_traffic(
        config, plan.mesh, plan.decisions, plan.params, transformer=plan.trusted,
        gathers_by_layer=plan.takes_specs, segments="segments" in plan.batch,
        loss_chunks=functools.partial(model.loss_chunks, config))


def report_header(program: Program, say: Reporter) -> None:
    plan, config, sizes = program.plan, program.config, dict(program.mesh.shape)
    held = model.count(plan.params)
    text = f"{held:,} parameters"
    if plan.trusted:
        total, visited = model.parameters(config)
        text = f"{total:,} parameters" + (
            f", of which a token visits {visited:,}" if visited < total else "") + (
            f" (and {held - total:,} of padding, in rows of the vocabulary that no token has)"
            if held > total else "")
    say.header(config, program.mesh, text,
               explain(plan.decisions, plan.params, program.mesh, bool(config.zero),
                       config.fsdp_min),
               timeline(sizes["pipe"], config.microbatches, config.schedule, config.chunks)
               if sizes["pipe"] > 1 and config.step == "shard_map" else "",
               hosts.process_allgather(socket.gethostname()), NOT_RECORDED)


def machine(config: Config) -> Any:
    """The mesh on the accelerators of this machine, or of all that the configuration names; with
    none, on as many CPU devices as it needs."""
    sizes, processes = mesh_sizes(config.mesh, config.shards), max(1, config.processes)
    if not config.distributed and math.prod(sizes.values()) % processes == 0:
        simulate_devices(math.prod(sizes.values()) // processes)
    hosts.init_distributed(config)
    return make_mesh(chips.topology_devices(config.topology) if config.topology else None, **sizes)


def check_transformer(config: Config, mesh: Any) -> None:
    """Refuse a transformer that this mesh cannot train."""
    check_model(config, mesh)
    check_batch(config, mesh)
    # (A vocabulary that is still to follow from the data divides by everything.)
    some = dataclasses.replace(config, vocab_size=config.vocab_size or 128 * mesh.size)
    check_overrides(config.override, jax.eval_shape(model.init, some, jax.random.key(0)), mesh)


def choose_mesh(config: Config) -> tuple[Config, tuple[Program, jax.stages.Compiled] | None]:
    """--mesh auto: the fastest that fits, with the program and the step that were compiled for
    it."""
    if config.mesh != "auto":
        return config, None
    hosts.init_distributed(config)
    devices = chips.topology_devices(config.topology) if config.topology else jax.devices()
    one = dataclasses.replace(resolve_dtype(config, make_mesh(devices[:1])),
                              vocab_size=config.vocab_size or data.Bytes.vocab_size)
    params = jax.eval_shape(model.init, one, jax.random.key(0))
    check_overrides(config.override, params, abstract_mesh({}))

    def check(config: Config, mesh: Any) -> None:
        check_transformer(config, mesh)
        if any(n % dict(mesh.shape)["tensor"] for n in (config.heads, config.d_ff)):
            raise ConfigError("tensor would not split all that the cost model takes it to split")

    mesh, compiled = forecast.auto_mesh(
        one, devices, params, check=check, compile_program=ready_to_run, max_logits=model.LOGITS,
        flops=model.flops(one, one.batch * one.seq_len), say=Reporter(config.steps).line)
    return dataclasses.replace(config, mesh=mesh, shards=0), compiled


def ready_to_run(config: Config) -> tuple[Program, jax.stages.Compiled]:
    """The program of the command line, without its data, and its step, compiled."""
    config, compiled = choose_mesh(config)
    if compiled:
        return compiled
    mesh = machine(config)
    config = dataclasses.replace(resolve_dtype(config, mesh),
                                 vocab_size=config.vocab_size or data.Bytes.vocab_size)
    check_transformer(config, mesh)
    program = build(config, mesh, *language(config))
    return program, program.compile()


def compile_step(config: Config) -> jax.stages.Compiled:
    """The step of the command line, compiled for this machine, or --topology. Touches no run
    directory."""
    return ready_to_run(config)[1]


def parse(argv: Sequence[str] | None = None) -> Config:
    """train.py's command line as a Config."""
    given, _ = parse_flags(Config, argv)
    name = given.get("model", "tiny")
    if name not in model.PRESETS:
        if Path(name).is_dir():
            model.load_hf(name)
        raise ConfigError(f"--model {name}: expected one of {', '.join(model.PRESETS)}"
                          + did_you_mean(name, model.PRESETS))
    if given.get("shards") == 0:
        raise ConfigError("--shards 0: must be at least 1; left out, the tensor axis is what "
                          "--mesh says, or 1")
    base = dataclasses.asdict(model.PRESETS[name])
    # What followed from a width that is now another follows from that one.
    if {"d_model", "heads"} & set(given):
        base.update(kv_heads=0, head_dim=0)
    if "d_model" in given:
        base.update(d_ff=0)
    return Config(**{**base, **given})
