"""The training step, the loop around it, and the command line.

    python train.py --shards 4

    batch -> [ micro-batch -> loss -> gradient ] x accumulate -> one sum over devices -> AdamW
             \\__________________ shard_map: our collectives _______________/   \\_ the compiler's

`fit` trains anything. A task is three functions, and the command line at the end of this file is
only one user of `fit`:

    collate(examples) -> batch          raw examples -> a dict of arrays [B, ...]
    loss(params, batch) -> sum, count   over the batch. They are divided once, after both have been
                                        summed over micro-batches and devices. A third result, a
                                        dict of other sums, is divided too, and logged
    predict(params, batch) -> outputs   for held-out examples, at each evaluation

zigzag/run/plan.py decides where weights live and how a loss runs on a mesh (modes.py);
zigzag/run/custom_loss.py compares a custom loss on the mesh with the same loss on one device.
"""

if __name__ == "__main__":
    from zigzag.run.plots import draw_or_restart

    draw_or_restart()

import contextlib
import dataclasses
import functools
import math
import shlex
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import data
import model
import networks
import sample
import shard
from zigzag.core import hosts
from zigzag.core.errors import ConfigError, fill_in
from zigzag.core.flags import flat
from zigzag.core.flags import run_main as run_main
from zigzag.core.mesh import (
    add_to,
    cast,
    float32_zeros,
    keep_compiled,
    mark_varying,
    pmean_all,
    row_groups,
    split_rows,
)
from zigzag.core.report import Reporter
from zigzag.disk import examples
from zigzag.disk.batches import batch_arrays, batch_shapes, place_batch
from zigzag.disk.checkpoint import RunFolder, check_run_folder, run_config, run_record
from zigzag.disk.corpus import Sources, opened_sources
from zigzag.disk.mixture import Spread, mixed, numbers_at
from zigzag.disk.packing import targets_of
from zigzag.generate.decoding import GREEDY, Sampling
from zigzag.generate.rows import context_of, cut_at_end
from zigzag.hub.llama import special_ids
from zigzag.measure.hlo import collectives
from zigzag.measure.traffic import expected_traffic, is_complete
from zigzag.parallel.storage import stored_to_used
from zigzag.run import (
    checks,
    command_line,
    commands,
    continuing,
    init_from,
    loggers,
    metrics,
    modes,
    schedules,
)
from zigzag.run.custom_loss import check_loss, check_traceable
from zigzag.run.evaluation import (
    MOST_TOKENS,
    NEW_IDS,
    answers,
    check_task,
    continuations,
    evaluate,
    tokens_to_evaluate,
)
from zigzag.run.loop import (
    Fit,
    Loop,
    Samples,
    Task,
    end_early,
    flush_metrics,
    frozen_state,
    prepare,
    profile,
    report_header,
    save,
)
from zigzag.run.plan import (
    Plan,
    Program,
    in_one,
    make_plan,
    make_program,
    resolve_dtype,
    shapes_hash,
)
from zigzag.weights.network import COMPUTED


@dataclasses.dataclass(frozen=True)
class Config(schedules.Options):
    """python train.py [--shards N] [--data PATH ...]: train a transformer on any machine"""
    network: Any = model.Config()   # what is trained: the configuration of a network

    # the model and its weights
    model: str = "tiny"             # a preset, such as gpt2 or llama3-8b (other flags change its
                                    # sizes), or a Hugging Face folder, with its weights
    init_from: str = ""             # a run: begin with its model and its weights

    # data
    data: tuple[str, ...] = ()      # text, lines of JSON, folders of them, token files, or a folder
                                    # made by data.py; empty: the source of Python's own library
    weights: tuple[str, ...] = ()   # several --data: their shares in what is learned (0.7 0.3)
    held_out: tuple[str, ...] = ()  # text to evaluate on, as --data; empty: a tenth of --data
    pack: str = ""                  # rows of running text (stream), or of whole documents, which do
                                    # not see each other (documents); '': stream, except for chats
    fields: tuple[str, ...] = ("source", "target")  # names of the two texts in a file of pairs
    batch: int = 8                  # examples in an update, over all devices
    accumulate: int = 1             # micro-batches into which each device cuts its rows

    # training
    steps: int = 900                # updates of the weights
    lr: float = 0.0                 # peak learning rate; 0: 0.5 / d_model, or a tenth of that to
                                    # fine-tune all weights
    warmup: float = 0.0             # updates until the peak, or a share of steps; 0: a twentieth
    decay: str = "cosine"           # rate after warmup: cosine, linear, exponential, constant, wsd
    weight_decay: float = 0.1       # weight decay of matrices; scales and biases have none
    clip: float = 1.0               # clip the gradient's norm to this
    optimizer: str = "adamw"        # adamw, or muon for the matrices of the layers
    seed: int = 0                   # seed of the weights, the order of the data, and dropout
    max_skipped: int = 10           # end the run after this many non-finite gradients in a row

    # the mesh
    shards: int = 0                 # devices that share each layer's weights: the tensor axis
    mesh: str = ""                  # axis=size,... for data, fsdp, pipe, seq, expert, tensor; data
                                    # takes the devices that are left. auto: the fastest mesh
    override: tuple[str, ...] = ()  # REGEX=axis,-,axis: how weights are stored; the last match wins
    fsdp_min: int = 4096            # smallest weight, in elements, that fsdp or zero splits
    zero: int = 0                   # 1: split the optimizer's state over data
    step: str = "shard_map"         # shard_map, or jit to leave all collectives to the compiler
    check: bool = False             # before the first step, compare the loss and its gradients on
                                    # the mesh with one device's, on a small batch

    # the run's folder
    out: str = "out"                # folder of the run. If it holds a run, that run continues, with
                                    # its own values for flags you leave out
    change: tuple[str, ...] = ()    # what to change on purpose when a run continues: lr, decay,
                                    # weight_decay, clip, data
    save_every: int = 0             # updates between checkpoints; 0: a fifth of steps
    keep: int = 3                   # number of newest checkpoints to keep
    verify: str = "on"              # on or off: check the checksums of a checkpoint when reading it

    # evaluation
    eval_every: int = 0             # updates between evaluations; 0: a fifth of steps
    eval_first: bool = False        # evaluate and save before the first update, too
    eval_tokens: int = 0            # held-out tokens of running text per evaluation; 0: as many as
                                    # keep evaluations to a fifth of the run's time
    metric: str = ""                # score answers to held-out pairs by exact, f1, rouge or
                                    # rouge_stemmed (which needs the package nltk)
    beams: int = 0                  # beams of the search for these answers; 0: greedy
    best: str = ""                  # smallest:NAME or largest:NAME: keep the checkpoint where this
                                    # number, which evaluations log, was best
    sample_prompts: str = ""        # a file of prompts that every evaluation continues
    log: tuple[str, ...] = ()       # also log to tensorboard, wandb, trackio; none: stop that
    plot: tuple[str, ...] = ()      # draw loss, rate and speed of these runs as text, and exit
    save: str = ""                  # with --plot: a picture to write instead (.png, .pdf, .svg)
    sample_temperature: float = 0.8     # temperature of the texts that an evaluation shows; 0:
                                        # greedy

    # measuring
    bench: bool = False             # measure how fast it trains here; keeps nothing on disk
    topology: str = ""              # compile for absent hardware (v5e:4x4, h100:1x2x8), and report
    profile: int = 0                # steps to trace, for Perfetto, into out/profile

    # many hosts: each process gets the same command
    coordinator: str = ""           # many hosts: HOST:PORT where process 0 listens
    processes: int = 0              # number of processes
    process_id: int = -1            # the number of this process, from 0
    distributed: bool = False       # ask SLURM, Open MPI, Kubernetes or a TPU pod for the processes
    patience: int = 120             # seconds to wait for other processes, in addition to ten times
                                    # the longest wait so far

    def __getattr__(self, name: str) -> Any:
        """Read the network's fields: config.layers is config.network.layers."""
        if name.startswith("__") or name == "network":
            raise AttributeError(name)
        return getattr(self.network, name)

    def __post_init__(self) -> None:
        checks.check_config(self)
        fill_in(self, lr=(0.05 if self.init_from and not self.lora_rank else 0.5) / self.d_model)
        schedules.fill_in(self)
        if not self.epochs:         # (with epochs, the steps are known when the data is)
            fifth = max(1, self.steps // 5)
            fill_in(self, save_every=fifth, eval_every=fifth)
            fill_in(self, eval_tokens=tokens_to_evaluate(self))


# These, and the network's configuration (except network.COMPUTED), decide a run's numbers. To
# continue a run they must be the same; the rest (how long, where, how fast, how often it is saved)
# may change.
SAME = ("init_from", "data", "weights", "held_out", "pack", "batch", "lr", "decay", "cooldown",
        "first_share", "final_share", "beta1", "beta2", "weight_decay", "clip", "optimizer", "seed")
# Options that hold for one command or one process. config.json does not have them.
NOT_RECORDED = ("coordinator", "processes", "process_id", "distributed", "patience", "topology",
                "check", "bench", "profile", "change", "epochs", "plot", "save")
HIDDEN = (*NOT_RECORDED, "published")       # not shown at the start of a run


def record_of(config: Config) -> dict[str, Any]:
    """A configuration as config.json has it: all fields, flat, and the network's name."""
    return {**{k: v for k, v in flat(config).items() if k not in NOT_RECORDED},
            "network": networks.network_of(config).name}


def facts_of(config: Config) -> dict[str, Any]:
    """The values that must be the same when a run continues."""
    own = [f.name for f in dataclasses.fields(config.network) if f.name not in COMPUTED]
    record = record_of(config)
    return {name: record[name] for name in ("network", *own, *SAME)}


def old_config(folder: str) -> Config:
    """The configuration of the run in a folder, to continue it. Its evaluations keep their number
    of tokens, so that their losses can be compared."""
    own = networks.config_of_run(folder, "--out")
    more = {} if "eval_tokens" in run_record(folder, "--out") else {"eval_tokens": MOST_TOKENS}
    return run_config(folder, Config, "--out", network=own, **more)


def read_old(folder: str) -> dict[str, Any]:
    """config.json of the run in a folder, as this version would write it."""
    return {**run_record(folder, "--out"), **record_of(old_config(folder))}


# -------------------------------------------------------------------------------------------
# The step

def learning_rate(config: Config, step: jax.Array) -> jax.Array:
    """The learning rate of update `step` (the first is 0): linear warmup to the peak, then what
    --decay says, by default half a cosine, down to a fiftieth of the peak at the last update."""
    return optax.join_schedules([schedules.warmup(config), schedules.decay(config)],
                                [config.warmup - 1])(step)


def optimizer(config: Config, decisions: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW without the learning rate, which the step applies.
    With muon: Muon, scaled to AdamW's rates, for the matrices of the layers (the rule knows which
    of their dimensions are contracted with activations), and Adam with Nesterov for the rest."""
    scaled = optax.scale_by_adam(config.beta1, config.beta2)
    if config.optimizer == "muon":
        has_layers = any(d.stacked for d in jax.tree.leaves(decisions))
        dims = jax.tree.map(
            lambda d: optax.contrib.MuonDimensionNumbers(*d.matmul_dims)
            if all(d.matmul_dims) and (d.stacked or not has_layers) else None, decisions)
        scaled = optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dims,
                                    adam_b1=config.beta1, adam_b2=config.beta2)
    matrices = jax.tree.map(lambda d: d.is_matrix, decisions)
    return optax.chain(optax.clip_by_global_norm(config.clip), scaled,
                       optax.add_decayed_weights(config.weight_decay, matrices))


def gather_weights(plan: Plan, weights: Any, decisions: Any) -> Any:
    """The weights as the loss takes them, gathered over fsdp: all but those of layers, if each
    layer gathers its own. `decisions` is what the rule (zigzag/rule) decided for each weight. (What
    --override stores differently comes to its place first.)"""
    chunks, sum_dtype = plan.config.chunks, plan.config.sum_dtype
    return shard.gather(stored_to_used(weights, decisions, chunks, sum_dtype), jax.tree.map(
        lambda d: P() if plan.takes_specs and d.stacked else d.used, decisions), sum_dtype)


def make_step(plan: Plan, optimizer: optax.GradientTransformation) -> tuple[Callable, Callable]:
    """Two functions: the training step, (state, batch) -> state, metrics; and its first half,
    (params, batch[, frozen]) -> gradients, sums, for tests that compare gradients.

    What a device holds on data=2,fsdp=2,tensor=2 with 16 rows and --accumulate 2, and of how many
    rows a gradient is the sum:

                           head [D, V]           a layer's w_up [D, F]   a norm's scale [D]
        trained            [D/2, V/2]            [D/2, F/2]              [D]
        whole              [D, V/2]              [D/2, F/2]: see below   [D]
        grads of a part    [D, V/2]      2 rows  [D/2, F/2]      4 rows  [D]      2 rows
        after scatter      [D/2, V/2]    4 rows  [D/2, F/2]      4 rows  [D]      2 rows
        after scan, sum    [D/2, V/2]   16 rows  [D/2, F/2]     16 rows  [D]     16 rows

    For a network's own loss, plan.marked and plan.sum_axes are all axes but tensor, and
    modes.as_one_device changes nothing. A custom loss that calls nothing of shard.py has no marks.
    With --step jit, on_device runs once, on whole arrays, and the compiler makes all sums."""
    def on_device(trained, frozen, batch):      # as they are stored, and 4 of the 16 rows
        # Each device runs this on its own rows. Marking the weights here, outside value_and_grad,
        # keeps their gradients local (shard.py, *Gradients*).
        trained, frozen = mark_varying(cast((trained, frozen), plan.dtype), also=plan.marked)

        # Gather over fsdp, once for all parts of the batch. The transpose, `scatter`, sums
        # gradients over fsdp. (Each layer gathers its own weights when it runs: `layers`.)
        whole, scatter = jax.vjp(lambda w: gather_weights(plan, w, plan.trained), trained)
        frozen = gather_weights(plan, frozen, plan.frozen)      # {} without --lora_rank

        def loss(whole, frozen, rows):          # -> this device's sum, (sum, count, other sums)
            sums = plan.loss(in_one(whole, frozen), rows, plan.used)
            sums = shard.local_sums(sums, plan.shared_row_axes, plan.pools)
            return sums[0], sums

        def add_part(total, rows):              # a micro-batch: 2 rows
            value_and_grad = modes.as_one_device(jax.value_and_grad(loss, has_aux=True), plan)
            (_, sums), grads = value_and_grad(whole, frozen, rows)
            grads, = scatter(grads)
            return add_to(total, (grads, sums)), None

        # Accumulate over the parts of the batch, in float32.
        total = float32_zeros(trained), mark_varying(optax.tree.zeros_like(plan.sums),
                                                     also=plan.marked)
        if plan.accumulate == 1:
            total, _ = add_part(total, batch)
        else:
            total, _ = jax.lax.scan(add_part, total, split_rows(batch, plan.accumulate))

        # One sum over devices: gradients; and the loss's sum, count and other sums.
        grads, sums = total
        return (shard.sum_gradients(grads, plan.sum_axes, plan.specs[0], plan.moments),
                shard.sum_gradients(sums, plan.sum_axes))

    def gradients(params, batch, frozen={}):
        batch, batch_specs = shard.shard_time(batch, plan.mesh, plan.rows, plan.untimed)
        return modes.shard_map(on_device, plan, in_specs=(*plan.specs, batch_specs),
                               out_specs=(plan.moments, P()))(params, frozen, batch)

    def step(state, batch):
        params, opt = state["params"], state["opt"]
        grads, (total, count, others) = gradients(params, batch, state["frozen"])
        # The mean over all rows. (A device's own count would weigh its rows by how few they are.)
        divisor = jnp.where(count == 0, 1, count)
        grads = jax.tree.map(lambda g: g * (1 / divisor.astype(g.dtype)), grads)

        # Update, unless the gradient is not finite (it would spoil every weight for good) or the
        # count is 0 (weights would decay, and moments fade, for no reason).
        rate = plan.schedule or functools.partial(learning_rate, plan.config)
        rate, norm = rate(state["step"]), optax.tree.norm(grads)
        updates, new_opt = optimizer.update(grads, opt, params)
        new_params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        is_finite = jnp.isfinite(norm)
        learns = is_finite & (count != 0)
        params, opt = jax.tree.map(lambda new, old: jnp.where(learns, new.astype(old.dtype), old),
                                   (new_params, new_opt), (params, opt))

        metrics = {"loss": total / divisor, "lr": rate, "grad_norm": norm, "tokens": count,
                   "skipped": 1 - is_finite, **{name: x / divisor for name, x in others.items()}}
        return {**state, "params": params, "opt": opt, "step": state["step"] + 1}, metrics

    return step, gradients


def make_evaluate(plan: Plan) -> Callable:
    """(params, batch[, frozen]) -> the loss's sums over a batch. If the mesh does not divide its
    rows, every device computes all of them."""
    def evaluate(params, batch, frozen={}):
        splits_rows = jax.tree.leaves(batch)[0].shape[0] % row_groups(plan.mesh) == 0

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
            batch, plan.mesh, plan.rows if splits_rows else None, plan.untimed)
        return modes.shard_map(on_device, plan, in_specs=(*plan.specs, batch_specs),
                               out_specs=P())(params, frozen, batch)

    return evaluate


def build(config: Config, mesh: Any, init: Callable, loss: Callable, batch: Any,
          overrides: Sequence[tuple[str, P]] = (), typed: bool = True,
          schedule: Callable | None = None) -> Program:
    """The program that trains init's weights with `loss` on batches shaped like `batch`."""
    # A network's own loss (from `language`, below) is compared with one device by the tests. Any
    # other, even one that only wraps it, is a custom loss, and is compared before the run begins.
    network = networks.network_of(config)
    ours = isinstance(loss, functools.partial) and loss.func is network.loss
    if ours:
        checks.check_rows(config, network)
    plan = make_plan(config, mesh, init, loss, batch, overrides, typed, network if ours else None,
                     schedule)
    update = optimizer(plan.config, plan.trained)
    return make_program(plan, update, make_step(plan, update)[0], make_evaluate(plan))


# -------------------------------------------------------------------------------------------
# The loop

def fit(config: Config, init: Callable, collate: Callable, loss: Callable,
        predict: Callable | None = None, examples: Sequence = (), held_out: Sequence = (), *,
        show: Callable | None = None, metric: Callable | None = None,
        predicted: int | None = None, samples: Samples | None = None,
        sources: dict[str, int] | None = None, weights: Callable | None = None,
        overrides: Sequence[tuple[str, P]] = (), schedule: Callable | None = None,
        log: Callable | None = None, tokenizer: data.Tokenizer | None = None,
        record: dict[str, Any] | None = None, flops: float | None = None,
        bits_per_nat: float | None = None, mesh: Any = None, say: Reporter | None = None) -> Fit:
    """Train init(key)'s weights on `examples` (anything with a length and an index) for
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
        weights(places)             the weights a new run begins with, instead of init's; places
                                    are shapes with shardings
        overrides                   (path regex, PartitionSpec) pairs: where weights are stored,
                                    beside --override; the last match wins
        schedule(step)              replaces learning_rate(config, step); jax traces it
        log(step, numbers)          called at each step and evaluation, like the loggers of --log
        tokenizer                   kept by the run, so that sample.py can read and write text
        record                      saved in config.json; must be the same when the run continues
        flops                       the arithmetic of an update, for MFU
        bits_per_nat                the held-out loss times this is bits per byte
        say                         the Reporter that prints progress
    """
    stop: list[int] = []
    task = Task(collate=collate, predict=predict, examples=examples, held_out=held_out, show=show,
                metric=metric, predicted=predicted, samples=samples, sources=sources or {},
                flops=flops, bits_per_nat=bits_per_nat)
    mesh = mesh or commands.machine(config)
    with hosts.exit_together(), hosts.stop_on_signals(stop):
        config = continuing.hold(schedules.with_steps(config, len(examples)), old_config)
        shapes = batch_shapes(config.batch, collate, examples)
        build_program = functools.partial(build, config, mesh, init, loss, shapes, overrides,
                                          schedule=schedule)
        program = build_program()
        config, say = program.config, say or Reporter(config.steps)
        check_task(config, program, task)
        facts = {"shapes": shapes_hash(program.plan.params), **(record or {}),
                 **(data.tokenizer_record(tokenizer) if tokenizer else {})}
        hosts.assert_same_everywhere(record_of(config) | facts)
        if config.check or not program.plan.trusted:
            program = check_program(program, build_program, task, say.line)
        if config.check:
            say.line("check    on this mesh the loss and its gradients are those of one device")
        first, facts_of_first = frozen_state(program, weights)
        folder = open_folder(program, facts | facts_of_first, say, tokenizer)
        with folder or contextlib.nullcontext(), jax.set_mesh(mesh):
            loop = Loop(program, task, folder, say, lambda at: numbers_at(
                examples, config.seed, np.arange(config.batch) + at * config.batch), log, first)
            del first
            report_header(program, say, program.plan.counts, HIDDEN,
                          networks.describe(config) if program.plan.trusted else "")
            step = prepare(loop, weights)
            if step:
                say.collectives(collectives(step), expected_traffic(program.plan),
                                is_complete(program.plan))
            run_loop(loop, step, stop)
        if not stop:
            say.end(loop.at, config.out, loop.evaluation)
    hosts.watchdog.arm("")
    return Fit(program.permute(program.weights(loop.state), back=True), loop.at,
               loop.evaluation.get("eval_loss"), loop.outputs, loop.evaluation,
               next(iter(loop.best), None))


def open_folder(program: Program, facts: dict[str, Any], say: Reporter,
                tokenizer: data.Tokenizer | None) -> RunFolder | None:
    """The run's folder, ready to save in or to continue; None where nothing is kept. `facts` are
    recorded beside the configuration; when a run continues, they must be the same as before."""
    config = program.config
    if not config.out:
        return None
    folder = RunFolder(config.out, record_of(config) | facts, [*facts_of(config), *facts], read_old,
                       program.saved(program.state), config.keep, config.verify == "on",
                       config.patience, config.change)
    if folder.changed:
        say.line(f"changed  {continuing.changes_text(folder.changed)}, noted in config.json")
    if tokenizer and jax.process_index() == 0:
        data.copy_files(tokenizer, Path(config.out))
    return folder


def run_loop(loop: Loop, step: Callable | None, stop: list[int]) -> None:
    """Update until the last step, or until a signal asks to stop. While the devices work on a step,
    the numbers of the one before are written down."""
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
        is_last, is_best = loop.at == config.steps, False
        if is_last or loop.at % config.eval_every == 0:
            is_best = evaluate(loop)
        if folder and (is_last or is_best or loop.at % config.save_every == 0):
            save(loop)
        hosts.share_stop(stop)
    flush_metrics(loop)
    if stop:
        end_early(loop, stop)
    elif not loop.evaluation:       # a finished run was asked for again
        evaluate(loop, is_new=False)


def training_batch(config: Config, mesh: Any, task: Task, shapes: Any, at: int, rows: int = 0
                   ) -> Any:
    """The batch of update `at` (the first is 0), a pure function of the seed and of `at`. With
    `rows`, only its first rows. Rows must have the shapes in `shapes`, if that is given."""
    def make(first, last):
        first, last = at * config.batch + first, at * config.batch + last
        numbers = numbers_at(task.examples, config.seed, np.arange(first, last))
        batch = batch_arrays(task.collate, [task.examples[int(i)] for i in numbers], shapes)
        # A seed for each row, so that dropout does not depend on where a row is computed.
        place = np.arange(first, last, dtype=np.uint64)
        seeds = data.mix(place * np.uint64(2**32) + np.uint64(config.seed))
        return {**batch, "seeds": seeds.astype(np.uint32)}

    return place_batch(mesh, make, rows or config.batch)


def check_program(program: Program, build_program: Callable, task: Task, say: Callable) -> Program:
    """Compare the values of a custom loss on the mesh with its values on one device, and return the
    program to run: this one, if they are equal. Else it tries a program in which every device
    computes the loss as one device would, and refuses the loss if that differs too."""
    hosts.watchdog.arm("compiling")
    make_batch = functools.partial(training_batch, program.config, program.mesh, task,
                                   program.batch)
    with jax.set_mesh(program.mesh):
        while not check_loss(program.plan, lambda plan: make_step(plan, None)[1], make_evaluate,
                             make_batch, len(task.held_out) > 0, say):
            program = build_program(typed=False)
        check_traceable(program)
    return program


# -------------------------------------------------------------------------------------------
# The transformer, and the command line

def language(config: Config) -> tuple[Callable, Callable, Any]:
    """The configuration's own network, for `build` and `fit`: init, loss, and a batch's shapes."""
    network = networks.network_of(config)
    batch = {**network.batch_shapes(config.network, config.batch),
             "seeds": jax.ShapeDtypeStruct((config.batch,), jnp.uint32)}
    return (functools.partial(network.init, config.network),
            functools.partial(network.loss, config=config.network), batch)


def check_transformer(config: Config, mesh: Any) -> None:
    """Refuse a network that this mesh cannot train."""
    checks.check_network(config, networks.network_of(config), mesh)


def flops_of_update(config: Config) -> float:
    return networks.network_of(config).training_flops(config.network,
                                                      config.batch * config.seq_len)


TRANSFORMER = commands.Trained(
    check_transformer, lambda config, mesh: build(config, mesh, *language(config)),
    networks.network_of, flops_of_update, data.Bytes.vocab_size, optimizer,
    HIDDEN, networks.describe)


def compile_step(config: Config) -> jax.stages.Compiled:
    """The command line's step, compiled for this machine or --topology; writes nothing."""
    return commands.ready_to_run(config, TRANSFORMER)[1]


def read_flags(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The flags that were given, by name. With --help, print the help and exit."""
    return command_line.read_flags(argv, Config, networks)


def config_of_flags(given: dict[str, Any]) -> Config:
    """The configuration of a new run. --model and --init_from choose the network and its fields;
    the other flags change them."""
    network, fields, source = networks.chosen(given)
    return command_line.make_config(Config, networks, network, fields | given | source, given)


def parse(argv: Sequence[str] | None = None) -> Config:
    """train.py's command line as a Config. (It does not look at --out; `continued` does.)"""
    return config_of_flags(read_flags(argv))


def continued(given: dict[str, Any]) -> Config:
    """The configuration for these flags, where --out may hold a run. If it does, flags that were
    left out have the run's values, and a flag that decides the run's numbers is refused if its
    value is not the run's."""
    out = given.get("out", Config.out)
    is_run = bool(out) and (Path(out) / "config.json").exists()
    continuing.check_change(given, out, is_run)
    if not is_run:
        return config_of_flags(given)
    continuing.check_steps(given, out)
    old = old_config(out)
    asked, network = command_line.asked_of_run(given, old, networks), networks.network_of(old)
    values = {**continuing.left_out(asked, flat(old)), **asked, "out": out}
    check = functools.partial(
        check_run_folder, out, read_old=read_old, change=given.get("change", ()),
        needs=("tokenizer",) if reads_text(old) else ())
    try:
        config = command_line.make_config(Config, networks, network, values, given)
    except ConfigError:     # (if a value differs from the run's, `check` says that instead)
        check({name: asked[name] for name in facts_of(old) if name in asked})
        raise
    check({**facts_of(config), "network": asked.pop("network", network.name)})
    return config


def show_sharding(argv: Sequence[str] | None = None) -> None:
    """python shard.py --model llama-7b --shards 4: the table, without making the model."""
    commands.show_sharding(parse(argv), TRANSFORMER)


# -------------------------------------------------------------------------------------------
# What a run learns from: running text, pairs of texts, or arrays

def reads_text(config: Config) -> bool:
    """Whether --data is text, which needs a tokenizer. (Pictures, sound and classes are arrays.)"""
    network = networks.network_of(config)
    shape = network.source_shape(config.network)
    return network.gives(config.network) == "text" and (shape is None or len(shape) == 1)


@contextlib.contextmanager
def opened_data(config: Config, tokenizer: data.Tokenizer | None, run: Path, ready: float = 0,
                fingerprint: str = ""
                ) -> Iterator[tuple[Config, Callable[[], Task], dict[str, str], Any]]:
    """--data, for this model: the configuration with its vocabulary, a function that makes the
    task, what config.json records about the data, and what to print. (`run`, `ready` and
    `fingerprint` are as in opened_sources.)"""
    if not reads_text(config):
        network = networks.network_of(config)
        arrays = examples.open_arrays(config.data, network.batch_shapes(config.network, 1),
                                      network.limits(config.network))
        config = schedules.with_steps(config, len(arrays.train))
        task = Task(collate=examples.collate_arrays, examples=arrays.train,
                    held_out=arrays.held_out, flops=flops_of_update(config))
        yield config, lambda: task, {"fingerprint": arrays.fingerprint}, arrays
    elif networks.network_of(config).source_shape(config.network):
        pairs = examples.Pairs(config.data, tokenizer or data.Bytes(), config.fields)
        config = checks.check_vocabulary(config, pairs.tokenizer.vocab_size)
        config = schedules.with_steps(config, len(pairs.train))
        yield config, lambda: pairs_task(config, pairs), {
            "fingerprint": pairs.fingerprint, "tokenizer_sha256": "",
            **data.tokenizer_record(pairs.tokenizer)}, pairs
        if not ready and pairs.tokenizer.kind != "bytes":
            run.mkdir(parents=True, exist_ok=True)
            data.copy_files(pairs.tokenizer, run)
    else:
        with opened_sources(
                config.data, bool(config.weights), config.held_out, run, ready, tokenizer,
                fingerprint, "data" in config.change, config.vocab_size) as sources:
            if tokenizer and not data.tokenizer_record(tokenizer).items() <= sources.record.items():
                whose = config.init_from or config.out
                raise ConfigError(f"--data {' '.join(config.data)}: its tokens are not those of "
                                  f"the tokenizer of {whose}; give the text itself")
            config = checks.check_corpus(config, sources)
            rows = training_rows(config, sources)
            config = schedules.with_steps(config, len(rows))
            yield config, lambda: language_task(config, sources, rows), {
                "fingerprint": sources.fingerprint, "tokenizer": sources.tokenizer.kind,
                "tokenizer_sha256": sources.record.get("tokenizer_sha256", "")
            }, sources


def pairs_task(config: Config, pairs: examples.Pairs) -> Task:
    """The task of an encoder-decoder: target text from source text."""
    tokenizer, (width,) = pairs.tokenizer, networks.network_of(config).source_shape(config.network)
    start, end, pad = special_ids(config, tokenizer)
    collate = functools.partial(data.collate_pairs, source_len=width, target_len=config.seq_len,
                                start=start, end=end, pad=pad)

    def predict(params, batch):
        rows = {"tokens": jnp.full((len(batch["source"]), 1), start),
                **{name: batch[name] for name in ("source", "source_mask")}}
        new = sample.generate_ids(params, rows, config.network, config.seq_len - 1, GREEDY, 0,
                                  (end,), config.beams)
        return batch["source"], batch["source_mask"], new

    def text(ids):
        return tokenizer.decode(cut_at_end([end], ids.tolist()))

    def show(outputs):
        source, mask, new = (x[0] for x in outputs)
        return {"source": tokenizer.decode(source[mask > 0]), "answer": text(new)}

    def metric(outputs, examples):
        return metrics.TEXT_METRICS[config.metric](
            list(map(text, outputs[2])), [tokenizer.decode(target) for _, target in examples])

    samples = answers(config.sample_prompts, lambda sources: collate(
        [(tokenizer.with_ends(s), [end]) for s in sources]), predict, lambda out: text(out[2]))
    return Task(collate=collate, predict=predict, examples=pairs.train, held_out=pairs.held_out,
                show=show, metric=metric if config.metric else None,
                predicted=None if config.metric else 1, samples=samples,
                flops=flops_of_update(config))


def pack_of(config: Config, sources: Sources) -> str:
    """How rows are made: --pack, or what fits the data."""
    if config.pack == "stream" and sources.is_learned_in_part:
        raise ConfigError("--pack stream: only the answers in these data are learned, which needs "
                          "--pack documents")
    return config.pack or ("documents" if sources.is_learned_in_part else "stream")


def training_rows(config: Config, sources: Sources) -> Sequence:
    """The rows that a decoder learns from."""
    pack = pack_of(config, sources)
    return mixed([data.rows_of(corpus, "train", config.seq_len, pack, config.seed)
                  for corpus in sources.corpora], config.weights)


def language_task(config: Config, sources: Sources, rows: Sequence | None = None) -> Task:
    """The task of a decoder: the next token, in these rows (None: training_rows) of corpora."""
    T, tokenizer, pack = config.seq_len, sources.tokenizer, pack_of(config, sources)
    room = context_of(networks.network_of(config), config.network)
    begin = min(32, -(-room // 4))          # a short prompt: the answer must fit in the context
    # The same rows each time, spread over all of the held-out text.
    count = max(1, config.eval_tokens // T // len(sources.evaluated))
    held_out = {name: Spread(mixed([data.rows_of(c, split, T, pack, config.seed)
                                    for c, split in parts]), count)
                for name, parts in sources.evaluated.items()}
    targets = np.concatenate([np.zeros(0, int), *(
        targets_of(row) for part in held_out.values() for row in part)])
    size = round(float(tokenizer.lengths()[targets].sum()) * sources.bytes_per_spelled)

    def write(params, batch):
        more = min(NEW_IDS, room - batch["tokens"].shape[1] + 1)
        return sample.generate_ids(params, batch, config.network, more,
                                   Sampling(config.sample_temperature), config.seed)

    def predict(params, batch):
        tokens = batch["tokens"][:, :begin]
        return jnp.concatenate([tokens, write(params, {"tokens": tokens})], 1)

    def show(outputs):
        return {"prompt": tokenizer.decode(outputs[0][:begin]),
                "written": tokenizer.decode(outputs[0][begin:])}

    return Task(collate=lambda examples: data.collate(examples, T), predict=predict,
                examples=training_rows(config, sources) if rows is None else rows,
                held_out=mixed(list(held_out.values())),
                sources={name: len(part) for name, part in held_out.items()},
                show=show, predicted=1, flops=flops_of_update(config),
                samples=continuations(config.sample_prompts, tokenizer, room, write,
                                      sources.has_chats),
                bits_per_nat=len(targets) / size / math.log(2) if size else None)


def main(argv: Sequence[str] | None = None) -> None:
    with hosts.exit_together():
        given = read_flags(argv)
        if given.get("topology"):       # (programs for absent hardware are not cached)
            return commands.dry_run(config_of_flags(given), TRANSFORMER)
        keep_compiled()
        config = config_of_flags(given) if given.get("bench") else continued(given)
        config, _ = commands.choose_mesh(config, TRANSFORMER)
        mesh = commands.machine(config)
        check_transformer(config, mesh)
        (bench if config.bench else train_language)(resolve_dtype(config, mesh), mesh)


def bench(config: Config, mesh: Any) -> None:
    """--bench: train on --data, keep nothing, and report how fast it was."""
    _, tokenizer, _ = first_weights(config)
    with tempfile.TemporaryDirectory() as folder, opened_data(
            config, tokenizer, Path(folder) / "run") as (config, make_task, *_):
        task, (init, loss, _) = make_task(), language(config)
        shapes = batch_shapes(config.batch, task.collate, task.examples)
        commands.bench(config, TRANSFORMER, task,
                       lambda config: build(config, mesh, init, loss, shapes),
                       functools.partial(training_batch, config, mesh, task, shapes))


def first_weights(config: Config
                  ) -> tuple[Callable | None, data.Tokenizer | None, dict[str, int]]:
    """For a model that has weights already: how fit reads them, its tokenizer, and what config.json
    records about them. Else None, None and {}."""
    return init_from.first_weights(config, networks.network_of(config),
                                   data.tokenizer_of if reads_text(config) else None)


def train_language(config: Config, mesh: Any) -> None:
    """Train the network on --data, in --out."""
    if not config.out:
        raise ConfigError("--out '': expected a folder for the run")
    run, is_process_0 = Path(config.out), jax.process_index() == 0
    weights, tokenizer, noted = first_weights(config)
    # (First: before the data is looked at, or anything is written.)
    loggers.check(config.log, config.out)
    check_run_folder(config.out, facts_of(config), read_old,
                     ("tokenizer",) if reads_text(config) else (), config.change)
    fingerprint = ""            # of the run's data, if it continues
    if (run / "config.json").exists():
        record = read_old(config.out)
        fingerprint = str(record.get("fingerprint", ""))
        if "data" in config.change and reads_text(config):
            tokenizer = data.tokenizer_of(run, record)
    if not is_process_0:
        fingerprint = hosts.process_allgather("")[0]
    with opened_data(config, tokenizer, run, 0 if is_process_0 else min(
            60, config.patience), fingerprint) as (config, make_task, record, text):
        record |= noted
        check_run_folder(config.out, record, read_old, change=config.change)
    if is_process_0:
        hosts.process_allgather(record["fingerprint"])
    config, say = continuing.hold(config, old_config), Reporter(config.steps)
    for line in continuing.first_lines(config, old_config, learning_rate):
        say.line(line)
    if config.init_from:
        say.line(f"model    {config.init_from}, fine-tuned on rows of {config.seq_len:,} tokens "
                 f"(--seq_len) with a learning rate of up to {config.lr:.3g} (--lr)")
    description = text.described(config.seq_len) if isinstance(text, Sources) else text
    say.line(f"data     {description}")
    init, loss, _ = language(config)
    result = fit(config, init, loss=loss, mesh=mesh, record=record, weights=weights, say=say,
                 **vars(make_task()))
    if result.step >= config.steps and reads_text(config):
        flags = text.prompt_flags if config.data else '--prompt "def main("'
        say.line(f"sample   python sample.py --run {shlex.quote(config.out)} {flags}")


if __name__ == "__main__":
    run_main(main)
