"""The training step, the loop around it, and the command line. (zigzag/run plans and checks them.)

    python train.py --shards 4

    step -> gradients -> shard_map: on_device -> gather_weights     once, over fsdp
                                              -> add_part: loss, its gradient, scatter  (each part)
                                              -> sum_gradients      once, over all but tensor
         -> optimizer: clip, AdamW                                  (the compiler's collectives)

`fit` trains anything. A task is three functions; tasks/ has those of the command line:

    collate(examples) -> batch          raw examples -> a dict of arrays [B, ...]
    loss(params, batch) -> sum, count   over the batch. They are divided once, after both have been
                                        summed over parts and devices. A third result, a
                                        dict of other sums, is divided too, and logged
    predict(params, batch) -> outputs   for held-out examples, at each evaluation
"""

if __name__ == "__main__":
    from zigzag.run.plots import draw_or_begin

    draw_or_begin()

import dataclasses
import functools
import sys
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import model
import networks
import shard
import tasks
from zigzag.core import hosts
from zigzag.core.errors import AtTheirLine
from zigzag.core.flags import run_main as run_main
from zigzag.core.mesh import add_to, cast, float32_zeros, mark_varying, pmean_all, split_rows
from zigzag.core.options import flag
from zigzag.core.report import Reporter
from zigzag.disk.batches import batch_arrays, batch_shapes, place_batch
from zigzag.disk.mixture import numbers_at
from zigzag.disk.shuffle import mix
from zigzag.parallel.storage import stored_to_used
from zigzag.run import command_line, commands, continuing, made, modes, optimizers, schedules
from zigzag.run.begin import begin, check_program
from zigzag.run.evaluation import evaluate
from zigzag.run.loop import Fit, Loop, Task, end_early, end_run, flush_metrics, profile, save
from zigzag.run.more_options import MoreOptions
from zigzag.run.own_step import OwnStep
from zigzag.run.plan import Plan, Program, in_one, make_plan, make_program
from zigzag.run.trainer import Trainer

# {name for --optimizer: function of (config, decisions)}: optax transformations without a rate.
OPTIMIZERS = {"adamw": optimizers.adam, "muon": optimizers.muon}


@dataclasses.dataclass(frozen=True)
class Config(MoreOptions):
    """python train.py [--shards N] [--data PATH ...]: train a transformer on any machine"""
    # (zigzag/core/options.py says how an option is declared; zigzag/run/more_options.py has more.)

    network: Any = model.Config()   # what is trained: the configuration of a network

    # data
    data: tuple[str, ...] = flag((), same=True, change="data")
                                    # text, lines of JSON, folders of them, token files, or a folder
                                    # made by data.py; empty: the source of Python's own library
    batch: int = flag(8, least=1, same=True)    # examples in an update, over all devices

    # training
    steps: int = flag(900, least=1, change="decay")     # updates of the weights
    lr: float | None = flag(None, same=True, change="lr")
                                    # peak learning rate; not given: 0.5 / d_model, or a tenth of
                                    # that to fine-tune all weights
    warmup: float | None = None     # updates until the peak, or a share of steps; not given: a
                                    # twentieth of them
    decay: str = flag("cosine", one_of=schedules.DECAYS, same=True, change="decay")
                                    # rate after warmup: cosine, linear, exponential, constant, wsd
    weight_decay: float = flag(0.1, same=True, change="weight_decay")
                                    # weight decay of matrices; scales and biases have none
    clip: float = flag(1.0, least=1e-30, same=True, change="clip")
                                    # clip the gradient's norm to this
    optimizer: str = flag("adamw", one_of=OPTIMIZERS, same=True)
                                    # adamw, or muon for the matrices of the layers
    accumulate: int = flag(1, least=1)  # parts of a batch that a device computes in turn
    seed: int = flag(0, same=True)  # seed of the weights, the order of the data, and dropout

    # mesh
    shards: int = flag(0, beside="mesh")
                                    # devices that share each layer's weights: the tensor axis
    mesh: str = ""                  # axis=size,... for data, fsdp, pipe, seq, expert, tensor; data
                                    # takes the devices that are left. auto: the fastest mesh

    # saving
    out: str = "out"                # folder of the run. If it holds a run, that run continues, with
                                    # its own values for flags you leave out
    save_every: int | None = None   # updates between checkpoints; 0: only at the end (and, with
                                    # --best, at each new best); not given: a fifth of steps

    # evaluation
    eval_every: int | None = None   # updates between evaluations; 0: never; not given: a fifth of
                                    # steps


# -------------------------------------------------------------------------------------------
# The step

def learning_rate(config: Config, at: jax.Array) -> jax.Array:
    """The learning rate of update `at` (the first is 0): linear warmup to the peak, then what
    --decay says, by default half a cosine, which ends at --final_share of the peak."""
    return optax.join_schedules([schedules.warmup(config), schedules.decay(config)],
                                [schedules.at_peak(config)])(at)


def optimizer(config: Config, decisions: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, then one of OPTIMIZERS and weight decay, without the learning
    rate, which the step applies. `decisions` is what the rule knows of each weight."""
    scaled = OPTIMIZERS[config.optimizer](config, decisions)
    matrices = jax.tree.map(lambda d: d.is_matrix, decisions)
    return optax.chain(optax.clip_by_global_norm(config.clip), scaled,
                       optax.add_decayed_weights(config.weight_decay, matrices))


def gather_weights(plan: Plan, weights: Any, decisions: Any) -> Any:
    """The weights as the loss takes them: gathered over fsdp, except those of layers where each
    layer gathers its own. `decisions` is what the rule (zigzag/rule) decided for each weight. (A
    weight that --override stores in another place is first moved to where the loss expects it.)"""
    chunks, sum_dtype = plan.config.chunks, plan.config.sum_dtype
    return shard.gather(stored_to_used(weights, decisions, chunks, sum_dtype), jax.tree.map(
        lambda d: P() if plan.takes_specs and d.stacked else d.used, decisions), sum_dtype)


def make_step(plan: Plan, optimizer: optax.GradientTransformation) -> tuple[Callable, Callable]:
    """Two functions: the training step, (state, batch) -> state, metrics; and its first half,
    (params, batch[, frozen]) -> gradients, sums. (learn/tiny.py has the short form of both.)

    What a device holds on data=2,fsdp=2,tensor=2 with 16 rows and --accumulate 2, and how many
    rows each gradient is summed over:

                           head [D, V]           a layer's w_up [D, F]   a norm's scale [D]
        trained            [D/2, V/2]            [D/2, F/2]              [D]
        whole              [D, V/2]              [D/2, F/2] (`layers`)   [D]
        grads of a part    [D, V/2]      2 rows  [D/2, F/2]      4 rows  [D]      2 rows
        after scatter      [D/2, V/2]    4 rows  [D/2, F/2]      4 rows  [D]      2 rows
        after scan, sum    [D/2, V/2]   16 rows  [D/2, F/2]     16 rows  [D]     16 rows

    For a network's own loss, plan.marked and plan.sum_axes are all axes but tensor, and
    modes.as_one_device changes nothing. A custom loss that calls nothing of shard.py has no marks.
    With --step jit, on_device runs once, on whole arrays, and the compiler makes all sums."""
    def on_device(trained, frozen, batch):      # weights as stored, and 4 of the 16 rows
        # Each device runs this on its own rows. Marking the weights here, outside value_and_grad,
        # keeps their gradients from being summed in every part (shard.py, *Gradients*).
        trained, frozen = mark_varying(cast((trained, frozen), plan.dtype), also=plan.marked)

        # Gather over fsdp, once for all parts of the batch. The transpose, `scatter`, sums
        # gradients over fsdp. (Each layer gathers its own weights when it runs: `layers`.)
        whole, scatter = jax.vjp(lambda w: gather_weights(plan, w, plan.trained), trained)
        whole_frozen = gather_weights(plan, frozen, plan.frozen)        # often {}

        def loss(whole, frozen, part):          # -> this device's sum, (sum, count, other sums)
            sums = plan.loss(in_one(whole, frozen), part, plan.used)
            sums = shard.local_sums(sums, plan.shared_row_axes, plan.pools)
            return sums[0], sums

        def add_part(total, part):              # (a part: 2 rows)
            value_and_grad = modes.as_one_device(jax.value_and_grad(loss, has_aux=True), plan)
            (_, sums), grads = value_and_grad(whole, whole_frozen, part)
            grads, = scatter(grads)
            return add_to(total, (grads, sums)), None

        # Accumulate over the parts of the batch, in float32.
        total = float32_zeros(trained), mark_varying(optax.tree.zeros_like(plan.sums),
                                                     also=plan.marked)
        if plan.accumulate == 1:
            total, _ = add_part(total, batch)
        else:
            total, _ = jax.lax.scan(add_part, total, split_rows(batch, plan.accumulate))

        # Sum once. (`scatter` has summed what fsdp splits, and jax, in each part, over tensor.)
        grads, sums = total
        return (shard.sum_gradients(grads, plan.sum_axes, plan.specs[0], plan.moments),
                shard.sum_gradients(sums, plan.sum_axes))

    def gradients(params, batch, frozen={}):
        batch, batch_specs = shard.shard_time(batch, plan.mesh, plan.row_axes, plan.untimed)
        return modes.shard_map(on_device, plan, in_specs=(*plan.specs, batch_specs),
                               out_specs=(plan.moments, P()))(params, frozen, batch)

    def step(state, batch):
        params, opt = state["params"], state["opt"]
        grads, (loss_sum, count, others) = gradients(params, batch, state["frozen"])
        # (If each device divided by its own count, tokens of devices with fewer would weigh more.)
        divisor = jnp.where(count == 0, 1, count)
        grads = jax.tree.map(lambda g: g * (1 / divisor.astype(g.dtype)), grads)

        # There is no update if the gradient is not finite (it would spoil every weight for good),
        # if the loss is not (its gradient means nothing) or if the count is 0 (weights would only
        # decay). `step` still goes up, so the next update takes the next batch.
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

    return step, gradients


def make_evaluate(plan: Plan) -> Callable:
    """(params, batch[, frozen]) -> the loss's sums over a batch. If the mesh does not divide its
    rows, every device computes all of them."""
    def held_out_sums(params, batch, frozen={}):
        splits_rows = jax.tree.leaves(batch)[0].shape[0] % plan.row_groups == 0

        def loss(weights, batch):
            return shard.local_sums(plan.loss(weights, batch, plan.used), plan.shared_row_axes,
                                    plan.pools)

        def on_device(trained, frozen, batch):
            trained, frozen = mark_varying(cast((trained, frozen), plan.dtype), also=plan.marked)
            sums = modes.as_one_device(loss, plan)(
                in_one(gather_weights(plan, trained, plan.trained),
                       gather_weights(plan, frozen, plan.frozen)), batch)
            axes = plan.sum_axes if splits_rows else plan.shared_row_axes
            return pmean_all(shard.sum_gradients(mark_varying(sums, also=plan.marked), axes))

        batch, batch_specs = shard.shard_time(
            batch, plan.mesh, plan.row_axes if splits_rows else None, plan.untimed)
        return modes.shard_map(on_device, plan, in_specs=(*plan.specs, batch_specs),
                               out_specs=P())(params, frozen, batch)

    return held_out_sums


def build(config: Config, mesh: Any, init: Callable, loss: Callable, shapes: Any,
          overrides: Sequence[tuple[str, P]] = (), typed: bool = True,
          schedule: Callable | None = None, step: Callable | None = None,
          own_optimizer: Any = None, timed: Mapping[str, bool] = {}) -> Program:
    """The program that trains init's weights with `loss` on batches with these shapes. (plan.py
    decides where weights live, and how the loss runs on the mesh, in one of modes.py's ways. step,
    own_optimizer and timed are fit's step, optimizer and timed.)"""
    transform_of = optimizers.Chosen(own_optimizer, optimizer)
    if step:
        return OwnStep(step, config, mesh, init, loss, shapes, overrides, schedule,
                       functools.partial(learning_rate, config), transform_of,
                       lambda plan: make_step(plan, None)[1], timed).program(make_evaluate)
    own = networks.own_loss(config, loss)   # (a custom one is compared with one device)
    plan = make_plan(config, mesh, init, loss, shapes, overrides, typed, own, schedule,
                     timed=timed)
    transform = transform_of(plan.config, plan.trained)
    return make_program(plan, transform, make_step(plan, transform)[0], make_evaluate(plan))


# -------------------------------------------------------------------------------------------
# The loop

def fit(config: Config, init: Callable, collate: Callable, loss: Callable,
        predict: Callable | None = None, examples: Any = (), held_out: Sequence = (), *,
        show: Callable | None = None, metric: Callable | None = None,
        predicted: int | None = None, samples: Any = None,
        sources: dict[str, int] | None = None, weights: Callable | None = None,
        overrides: Sequence[tuple[str, P]] = (), schedule: Callable | None = None,
        step: Callable | None = None, optimizer: Any = None,
        log: Callable | None = None, tokenizer: Any = None,
        record: dict[str, Any] | None = None, flops: float | None = None,
        bits_per_nat: float | None = None, timed: dict[str, bool] | None = None,
        mesh: Any = None, say: Reporter | None = None) -> Fit:
    """Train init(key)'s weights on `examples` (anything with a length and an index; or a function
    (seed, step, weights) that returns those of one update, given the weights before it), for
    config.steps updates, on config.mesh, in config.out ('' keeps nothing on disk).

        predict(params, batch)      outputs for held-out examples, at each evaluation: any tree of
                                    arrays with a row for each example. All of them are put
                                    together in the order of the examples, on every host
        show(outputs)               a text, or a dict of texts by their labels, made of the outputs
                                    of the first four held-out examples
        metric(outputs, examples)   a number, or a dict of numbers, to log
        predicted                   call predict for this many held-out examples; None: for all
        samples                     prompts that the model continues at each evaluation
        sources                     {name: how many} of the held-out examples, in their order: the
                                    loss of each source is logged beside that of all
        weights(shapes)             the weights a new run begins with, instead of init's; shapes
                                    have shardings
        overrides                   (path regex, PartitionSpec) pairs: where weights are stored, in
                                    addition to --override; the last match wins
        schedule(step)              replaces learning_rate(config, step); jax traces it
        step                        replaces make_step's step: for several networks or losses, or
                                    state other than weights (docs/tasks.md)
        optimizer                   an optax transformation, with its learning rate, or several by
                                    the paths of weights: {"head": optax.sgd(0.1), "*": None}
        log(step, numbers)          called at each step and evaluation, like the loggers of --log
        tokenizer                   kept by the run, so that sample.py can read and write text
        record                      saved in config.json; must be the same when the run continues
        flops                       the arithmetic of an update, for MFU
        bits_per_nat                the held-out loss times this is bits per byte
        timed                       {name of an array of a batch: whether its second dimension is
                                    the time}, which seq and pipe ask of arrays of your own
        say                         the Reporter that prints progress"""
    stop: list[int] = []
    if optimizer is not None:
        optimizers.check_unused(config)
        schedule = optimizers.Factor(schedule)
    examples = made.as_sequence(examples, held_out, config)
    task = Task(collate=collate, predict=predict, examples=examples, held_out=held_out, show=show,
                metric=metric, predicted=predicted, samples=samples, sources=sources or {},
                flops=flops, bits_per_nat=bits_per_nat, timed=timed or {})
    mesh = mesh or commands.machine(config)
    with hosts.exit_together(), hosts.stop_on_signals(stop, config.out), AtTheirLine():
        config = continuing.hold(schedules.with_steps(config, len(examples)), TRAINER.old_config)
        say, shapes = say or Reporter(config.steps), batch_shapes(config.batch, task.first_row)
        program = check_program(
            functools.partial(build, config, mesh, init, loss, shapes, overrides,
                              schedule=schedule, step=step, own_optimizer=optimizer,
                              timed=task.timed),
            task, TRAINER, lambda plan: make_step(plan, None)[1], make_evaluate, training_batch,
            say)
        with begin(program, task, TRAINER, say, weights, record, tokenizer, log) as (loop, ready):
            run_loop(loop, ready, stop)
        if not stop:
            end_run(loop)
    return loop.result()


def run_loop(loop: Loop, step: Callable | None, stop: list[int]) -> None:
    """Update until the last step, or until a signal (in `stop`) asks to end after the current one.
    While the devices work on a step, the numbers of the one before are written down."""
    program, folder, config = loop.program, loop.folder, loop.program.config
    loop.reporter.start_clock()
    if config.eval_first and loop.at < config.steps:
        evaluate(loop, is_new=not folder or folder.restored is None)
        if folder:
            save(loop)
    while loop.at < config.steps and not stop:
        batch = training_batch(config, program.mesh, loop.task, program.batch, loop.at)
        loop.state, metrics = step(loop.state, batch)
        loop.at += 1
        profile(loop)
        flush_metrics(loop)         # of the step before
        loop.pending = loop.at, metrics
        is_last = loop.at == config.steps
        is_best = False
        if config.eval_every and (is_last or loop.at % config.eval_every == 0):
            is_best = evaluate(loop)    # the loss of all held-out rows, then predictions
        is_due = config.save_every and loop.at % config.save_every == 0
        if folder and (is_last or is_best or is_due):
            # params, opt and step: enough to continue bit for bit. (Frozen weights never change.)
            # This does not wait for the disk.
            save(loop)
        hosts.share_stop(stop)
    flush_metrics(loop)
    if stop:
        end_early(loop, stop)       # saves, and says how to go on
    elif not loop.evaluation and config.eval_every:     # a finished run was started again
        evaluate(loop, is_new=False)


def training_batch(config: Config, mesh: Any, task: Task, shapes: Any, at: int, rows: int = 0
                   ) -> Any:
    """The batch of update `at` (the first is 0), a pure function of the seed and of `at`. With
    `rows`, only its first rows. Rows must have the shapes in `shapes`, if that is given.

    Each array is cut along B, over data, fsdp and expert. (The step cuts T over seq.) For text:

        tokens, targets, weights    [B, T]      no target where a weight is 0
        segments, positions         [B, T]      with rows of documents
        source, source_mask         [B, S]      with pairs; S is not cut
        seeds                       [B]         for dropout
        others of your own          [B, ...]    cut over seq if `timed` says so"""
    def make(first, last):
        places = at * config.batch + np.arange(first, last)
        indices = numbers_at(task.examples, config.seed, places)
        batch = batch_arrays(task.collate, [task.examples[int(i)] for i in indices], shapes)
        # A seed for each row, so that dropout does not depend on where a row is computed.
        seeds = mix(places.astype(np.uint64) * np.uint64(2**32) + np.uint64(config.seed))
        return {**batch, "seeds": seeds.astype(np.uint32)}

    return place_batch(mesh, make, rows or config.batch)


# -------------------------------------------------------------------------------------------
# The command line

language = tasks.language
TRAINER = Trainer(config=Config, networks=networks, optimizer=optimizer, build=build,
                  learning_rate=lambda *args: learning_rate(*args), language=language)


def parse(argv: Sequence[str] | None = None) -> Config:
    """train.py's command line as a Config. (It does not look at --out; `main` does.) In a script,
    --help prints the script's docstring, and what else is in argv: its defaults."""
    return TRAINER.parse(argv, sys.modules["__main__"].__doc__)


def compile_step(config: Config) -> jax.stages.Compiled:
    """The command line's step, compiled for this machine or --topology; writes nothing."""
    return commands.ready_to_run(config, TRAINER)[1]


def main(argv: Sequence[str] | None = None) -> None:
    with hosts.exit_together():
        given = command_line.read_flags(argv, Config, networks)
        config = continuing.continued(given, TRAINER, tasks.needs)
        command_line.check_used(given, config, tasks.kind_of(config))
        if config.topology:             # (programs for absent hardware are not cached)
            return commands.dry_run(config, TRAINER)
        config, mesh = commands.on_machine(config, TRAINER)
        with tasks.opened(config, TRAINER) as learned:
            config, task, (init, loss, _) = learned.config, learned.task, language(learned.config)
            if config.bench:
                return commands.bench(config, TRAINER, mesh, task, training_batch)
            fit(config, init, loss=loss, mesh=mesh, record=learned.record, weights=learned.weights,
                say=learned.say, **vars(task))


if __name__ == "__main__":
    run_main(main)
