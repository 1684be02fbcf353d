"""The training step, the loop around it, and the command line. zigzag/run plans and checks them.

    python train.py --shards 4

    step -> gradients -> shard_map: on_device -> gather_weights   once (a layer gathers its own)
                                              -> add_part         its loss, gradient, scatter
                                              -> sum_gradients    once, over the remaining axes
         -> optimizer: clip, AdamW                                  (the compiler's collectives)

`fit` trains any `Task` (zigzag/run/task.py): collate turns examples into a batch, and loss turns a
batch into (sum, count). The step sums both over batch parts and devices, then divides once.
"""

if __name__ == "__main__":
    from zigzag.core.flags import begin

    begin()

import dataclasses
import functools
import sys
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import model
import shard
from zigzag.core import hosts
from zigzag.core.flags import run_main as run_main
from zigzag.core.mesh import add_to, cast, float32_zeros, mark_varying, pmean_all, split_rows
from zigzag.core.options import flag
from zigzag.core.parts import part
from zigzag.core.report import Reporter
from zigzag.disk.batches import batch_arrays, batch_shapes, place_batch
from zigzag.disk.mixture import mix, numbers_at
from zigzag.parallel.network import network_of_loss
from zigzag.parallel.storage import split_over_data, stored_to_used
from zigzag.run import continuing, modes, optimizers, schedules
from zigzag.run.custom_loss import check_loss, check_traceable
from zigzag.run.evaluation import evaluate
from zigzag.run.loop import Fit, flush_metrics, is_due, save
from zigzag.run.more_options import MoreOptions
from zigzag.run.plan import Plan, Program, in_one, make_plan, make_program
from zigzag.run.running import check_start, machine, running
from zigzag.run.task import Task, with_sequence
from zigzag.run.task import language as language

# {name for --optimizer: function of (config, decisions)}: optax transformations without a rate.
OPTIMIZERS = {"adamw": optimizers.adam, "muon": optimizers.muon}


@dataclasses.dataclass(frozen=True)
class Config(MoreOptions):
    """python train.py [--shards N] [--data PATH ...]: train a transformer on any machine"""
    # To declare an option, see zigzag/core/options.py. zigzag/run/more_options.py has more options.

    network: Any = model.Config()   # the network to train, as its config

    # data
    data: tuple[str, ...] = flag((), same=True, change="data")
                                    # text, JSON lines, folders of these, token files, or a folder
                                    # made by data.py; empty: the source of Python's own library
    batch: int = flag(8, least=1, same=True)    # examples per update, over all devices

    # training
    steps: int = flag(900, least=1, below=2**31, change="decay")    # updates of the weights
    lr: float | None = flag(None, same=True, change="lr")
                                    # peak learning rate; default: 0.5 / d_model, or a tenth of
                                    # that to fine-tune all weights
    warmup: float | None = None     # updates until the peak, or a fraction of steps; default: a
                                    # twentieth of the steps
    decay: str = flag("cosine", one_of=schedules.DECAYS, same=True, change="decay")
                                    # rate after warmup: cosine, linear, exponential, constant, wsd
    weight_decay: float = flag(0.1, same=True, change="weight_decay")
                                    # weight decay for matrices; scales and biases get none
    clip: float = flag(1.0, least=1e-30, same=True, change="clip")
                                    # clip the gradient's norm to this
    optimizer: str = flag("adamw", one_of=OPTIMIZERS, same=True)
                                    # adamw, or muon for the layers' matrices
    accumulate: int = flag(1, least=1)  # gradient accumulation: parts to cut a device's batch into
    seed: int = flag(0, same=True)  # seed for the weights, the data order, and dropout

    # mesh
    shards: int = flag(0, beside="mesh")
                                    # devices that share each layer's weights: the tensor axis
    mesh: str = ""                  # axis=size,... for data, fsdp, pipe, seq, expert, tensor; data
                                    # takes the remaining devices

    # saving
    out: str = "out"                # the run's folder. If it already holds a run, --out continues
                                    # that run, and flags you omit keep its values
    save_every: int | None = None   # updates between checkpoints; 0: only at the end (and, with
                                    # --best, at each new best); default: a fifth of steps

    # evaluation
    eval_every: int | None = None   # updates between evaluations; 0: never; default: a fifth of
                                    # steps


# -------------------------------------------------------------------------------------------
# The step

def learning_rate(config: Config, at: jax.Array) -> jax.Array:
    """Return update `at`'s learning rate (the first is 0): linear warmup to the peak, then the
    shape that --decay selects, by default half a cosine, ending at --final_share of the peak."""
    return optax.join_schedules([schedules.warmup(config), schedules.decay(config)],
                                [schedules.at_peak(config)])(at)


def optimizer(config: Config, decisions: Any) -> optax.GradientTransformation:
    """Clip by the global norm, then apply one of OPTIMIZERS and weight decay. The step applies the
    learning rate. `decisions` holds the facts about each weight."""
    scaled = OPTIMIZERS[config.optimizer](config, decisions)
    matrices = jax.tree.map(lambda d: d.is_matrix, decisions)
    return optax.chain(optax.clip_by_global_norm(config.clip), scaled,
                       optax.add_decayed_weights(config.weight_decay, matrices))


def gather_weights(plan: Plan, weights: Any, decisions: Any) -> Any:
    """Return the weights in the form the loss takes: gathered over fsdp, except in layers that
    gather their own. `decisions` says where each weight lives. If a weight is stored elsewhere
    (--override, ends over pipe), this first moves it to where the loss expects it."""
    chunks, sum_dtype = plan.config.network.chunks, plan.config.network.sum_dtype
    return shard.gather(stored_to_used(weights, decisions, chunks, sum_dtype), jax.tree.map(
        lambda d: P() if plan.takes_specs and d.stacked else d.spec_in_loss, decisions), sum_dtype)


def make_gradients(plan: Plan) -> Callable:
    """Make (params, batch[, frozen]) -> gradients and sums over the whole batch, before dividing
    by the count. learn/tiny.py has the short form.

    On data=2,fsdp=2,tensor=2 with 16 rows and --accumulate 2, each device holds these shapes, and
    each gradient is summed over this many rows:

                           head [D, V]           a layer's w_up [D, F]   a norm's scale [D]
        trained            [D/2, V/2]            [D/2, F/2]              [D]
        whole              [D, V/2]              [D/2, F/2] (`layers`)   [D]
        grads of a part    [D, V/2]      2 rows  [D/2, F/2]      4 rows  [D]      2 rows
        after scatter      [D/2, V/2]    4 rows  [D/2, F/2]      4 rows  [D]      2 rows
        after scan, sum    [D/2, V/2]   16 rows  [D/2, F/2]     16 rows  [D]     16 rows

    plan.axes (plan.Axes explains the fields), for a network's own loss on that mesh:

        sums = marked = {"data", "fsdp"}        same_rows = {}, pools = False, untimed = ()
        (with pipe=2 as well: three axes)       ({"pipe"}: its stages have the same rows)

    modes.as_one_device changes nothing in that case. If a custom loss calls nothing from shard.py,
    `marked` is empty. With --collectives compiler, on_device runs once, on whole arrays, and the
    compiler inserts every sum."""
    axes, specs = plan.axes, (plan.pair_at_rest[0], plan.accumulated_specs)

    def on_device(trained, frozen, batch, scale):   # the weights as stored, and 4 of the 16 rows
        # Each device runs this on its own rows. Marking the weights here, outside value_and_grad,
        # keeps jax from summing their gradients in every part (shard.py, *Gradients*).
        trained, frozen = mark_varying(cast((trained, frozen), plan.dtype), also=axes.marked)

        # Gather over fsdp, once for all parts of the batch. The transpose, `scatter`, sums
        # gradients over fsdp. Each layer gathers its own weights when it runs (`layers`).
        whole, scatter = jax.vjp(lambda w: gather_weights(plan, w, plan.trained), trained)
        whole_frozen = gather_weights(plan, frozen, plan.frozen)        # often {}

        def loss(whole, frozen, part):          # -> this device's sum, (sum, count, other sums)
            sums = plan.loss(in_one(whole, frozen), part, plan.specs_in_loss)
            sums = shard.local_sums(sums, axes.same_rows, axes.pools)
            return sums[0] if scale is None else sums[0] * scale, sums

        def add_part(total, part):              # (a part: 2 rows)
            value_and_grad = modes.as_one_device(jax.value_and_grad(loss, has_aux=True), plan)
            (_, sums), grads = value_and_grad(whole, whole_frozen, part)
            grads, = scatter(grads)
            grads = split_over_data(grads, *specs)      # --zero 2
            return add_to(total, (grads, sums)), None

        # Accumulate over the parts of the batch, in float32.
        shapes = jax.eval_shape(lambda w: split_over_data(w, *specs), trained)
        total = float32_zeros(shapes), mark_varying(optax.tree.zeros_like(plan.sums),
                                                    also=axes.marked)
        total, _ = jax.lax.scan(add_part, total, split_rows(batch, plan.accumulate))

        # Sum once over the remaining axes. `scatter` (in layers, the transpose of their own gather)
        # has summed over fsdp, and the ends over pipe; jax has summed over tensor in each part.
        grads, sums = total
        return (shard.sum_gradients(grads, axes.sums, plan.accumulated_specs, plan.optimizer_specs),
                shard.sum_gradients(sums, axes.sums))

    def gradients(params, batch, frozen={}, scale=None):    # of scale times the sum (float16)
        batch, batch_specs = shard.shard_time(batch, plan.mesh, plan.row_axes, axes.untimed)
        return modes.shard_map(
            on_device, plan, in_specs=(*plan.pair_at_rest, batch_specs, P()),
            out_specs=(plan.optimizer_specs, P()))(params, frozen, batch, scale)

    return gradients


def make_step(plan: Plan, optimizer: optax.GradientTransformation) -> Callable:
    """Make the training step: (state, batch) -> state, metrics."""
    gradients = modes.unscaled(make_gradients(plan), plan)

    def step(state, batch):
        params, opt = state["params"], state["opt"]
        grads, (loss_sum, count, others) = gradients(
            params, batch, state["frozen"], state.get("scale"))
        # Dividing by each device's own count would overweight tokens on devices with few of them.
        divisor = jnp.where(count == 0, 1, count)
        grads = jax.tree.map(lambda g: g * (1 / divisor.astype(g.dtype)), grads)

        # Skip the update if the gradient isn't finite (it would ruin every weight for good), if the
        # loss isn't (its gradient means nothing), or if the count is 0 (the weights would only
        # decay). `step` still advances, as does the loop's own count, which picks the next batch.
        schedule = plan.schedule or functools.partial(learning_rate, plan.config)
        rate, grad_norm = schedule(state["step"]), optax.tree.norm(grads)
        updates, new_opt = optimizer.update(grads, opt, params)
        new_params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss_sum / divisor)
        learns = is_finite & (count != 0)
        params, opt = jax.tree.map(lambda new, old: jnp.where(learns, new.astype(old.dtype), old),
                                   (new_params, new_opt), (params, opt))

        metrics = {"loss": loss_sum / divisor, "lr": rate, "grad_norm": grad_norm, "tokens": count,
                   "skipped": 1 - is_finite, **{name: x / divisor for name, x in others.items()}}
        return {**state, "params": params, "opt": opt, "step": state["step"] + 1}, metrics

    return step


def make_evaluate(plan: Plan) -> Callable:
    """Make (params, batch[, frozen]) -> the loss's sums over the batch. If the mesh doesn't divide
    the batch's rows, every device computes all of them."""
    axes = plan.axes

    def held_out_sums(params, batch, frozen={}):
        splits_rows = jax.tree.leaves(batch)[0].shape[0] % plan.row_groups == 0

        def loss(weights, batch):
            return shard.local_sums(plan.loss(weights, batch, plan.specs_in_loss), axes.same_rows,
                                    axes.pools)

        def on_device(trained, frozen, batch):
            trained, frozen = mark_varying(cast((trained, frozen), plan.dtype), also=axes.marked)
            sums = modes.as_one_device(loss, plan)(
                in_one(gather_weights(plan, trained, plan.trained),
                       gather_weights(plan, frozen, plan.frozen)), batch)
            sums = shard.sum_gradients(mark_varying(sums, also=axes.marked),
                                       axes.sums if splits_rows else axes.same_rows)
            return pmean_all(sums)

        batch, batch_specs = shard.shard_time(
            batch, plan.mesh, plan.row_axes if splits_rows else None, axes.untimed)
        return modes.shard_map(on_device, plan, in_specs=(*plan.pair_at_rest, batch_specs),
                               out_specs=P())(params, frozen, batch)

    return held_out_sums


def build(config: Config, mesh: Any, task: Task, shapes: Any, step: Callable | None = None,
          transform: Any = None, schedule: Callable | None = None, typed: bool = True) -> Program:
    """Return the program that trains task.init's weights with task.loss on batches of these shapes
    (plan.py, modes.py). `step`, `transform`, `schedule` are fit's step, optimizer, schedule."""
    transform_of = optimizers.OptimizersByPath(transform, optimizer)
    if step:
        return part("tasks.custom_step", "fit(step=...)").CustomStep(
            step, config, mesh, task, shapes, transform_of, schedule,
            functools.partial(learning_rate, config), make_gradients, make_evaluate).program()
    plan = make_plan(config, mesh, task.init, task.loss, shapes, task.overrides, typed,
                     network_of_loss(config, task.loss), schedule, timed=task.timed)
    transform = transform_of(plan.config, plan.trained)
    return make_program(plan, transform, make_step(plan, transform), make_evaluate(plan))


def build_checked(config: Config, mesh: Any, task: Task, say: Reporter, **given: Any) -> Program:
    """Return the task's program, after checking a custom or edited loss against a single device. If
    they differ, each device computes the loss as one device would; if that differs too, raise."""
    shapes = batch_shapes(config.batch, task.first_row)
    program = build(config, mesh, task, shapes, **given)
    if not check_start(program, task, say):
        return program
    evaluates = make_evaluate if len(task.held_out) else None
    batch = functools.partial(training_batch, program.config, mesh, task, program.batch)
    with jax.set_mesh(mesh):
        batch(0, 0)         # a batch that can't be made fails here, before anything is written
        if program.own:
            return program.own.check(program, batch, evaluates, say.line)
        while not check_loss(program.plan, make_gradients, evaluates, batch, say.line):
            program = build(config, mesh, task, shapes, **given, typed=False)
        check_traceable(program)
    return program


# -------------------------------------------------------------------------------------------
# The loop

def fit(config: Config, task: Task, *, step: Callable | None = None, optimizer: Any = None,
        schedule: Callable | None = None, mesh: Any = None, log: Callable | None = None,
        say: Reporter | None = None) -> Fit:
    """Train task.init's weights on task.examples for config.steps updates, on config.mesh, saving
    to config.out ('' saves nothing).

        step            replaces make_step's step: for several networks or losses, or for state
                        besides the weights (docs/tasks.md)
        optimizer       an optax transformation that includes its learning rate, or several, keyed
                        by weight path: {"head": optax.sgd(0.1), "*": None}
        schedule(step)  replaces learning_rate(config, step); jax traces it
        log(step, numbers)      fit calls it at each step and evaluation, like the --log loggers
        say             the Reporter that prints progress"""
    if optimizer is not None:
        optimizers.check_unused(config)
        schedule = optimizers.Factor(schedule)
    task, mesh, stop = with_sequence(task, config), mesh or machine(config), []
    with hosts.exit_together(), hosts.stop_on_signals(stop, config.out):
        config = continuing.hold(schedules.with_steps(config, len(task.examples)))
        say = say or Reporter(config.steps, config.verbose)
        program = build_checked(config, mesh, task, say, step=step, transform=optimizer,
                                schedule=schedule)
        config = program.config
        # On exit, `running` waits for the last save and prints how the run ended.
        with running(program, task, learning_rate, say, stop, log) as loop:
            if config.eval_first and loop.at < config.steps:
                evaluate(loop, is_new=loop.is_new)
                save(loop)
            # Update until the last step, or until a signal (in `stop`) asks to stop after this one.
            # While the devices work on a step, the loop writes the previous step's metrics.
            while loop.at < config.steps and not stop:
                with say.hours.of("data"):
                    batch = training_batch(config, mesh, task, program.batch, loop.at)
                loop.state, metrics = loop.step(loop.state, batch)
                loop.at += 1
                flush_metrics(loop)         # of the previous step
                loop.pending = loop.at, metrics
                is_best = is_due(loop, config.eval_every) and evaluate(loop)
                # params, opt, step: enough to resume bit for bit. `save` doesn't wait for the disk.
                if is_best or is_due(loop, config.save_every or config.steps):
                    save(loop)
                hosts.share_stop(stop)
    return loop.result()


def training_batch(config: Config, mesh: Any, task: Task, shapes: Any, at: int, rows: int = 0
                   ) -> Any:
    """Return the batch for update `at` (the first is 0), a pure function of the seed, batch size
    and `at`. With `rows`, return only that many rows. If `shapes` is given, rows must match it.

    Each array is split along B over data, fsdp and expert; the step splits T over seq. For text:

        tokens, targets, weights    [B, T]      no target where a weight is 0
        segments, positions         [B, T]      with rows of documents
        source, source_mask         [B, S]      with pairs; S is never split
        seeds                       [B]         for dropout
        custom arrays               [B, ...]    split over seq if `timed` says so"""
    def make(first, last):
        places = at * config.batch + np.arange(first, last)
        indices = numbers_at(task.examples, config.seed, places)
        batch = batch_arrays(task.collate, [task.examples[int(i)] for i in indices], shapes)
        # Give each row its own seed, so that dropout doesn't depend on where the row is computed.
        seeds = mix(places.astype(np.uint64) * np.uint64(2**32) + np.uint64(config.seed))
        return {**batch, "seeds": seeds.astype(np.uint32)}

    return place_batch(mesh, make, rows or config.batch)


# -------------------------------------------------------------------------------------------
# The command line, in zigzag/commands, which imports this file

def parse(argv: Sequence[str] | None = None) -> Config:
    """Parse train.py's command line into a Config. Unlike `main`, this ignores any run in --out. In
    a script, --help prints the script's docstring, with the defaults that the rest of argv sets."""
    from zigzag.commands import command_line

    return command_line.parse(argv, sys.modules["__main__"].__doc__)


def compile_step(config: Config) -> jax.stages.Compiled:
    """Compile the config's training step for this machine or --topology. This writes nothing."""
    from zigzag.commands import programs

    return programs.ready_to_run(config)[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, open --data as a task, and pass both to `fit`."""
    from zigzag.commands import training

    training.main(argv)


if __name__ == "__main__":
    run_main(main)
