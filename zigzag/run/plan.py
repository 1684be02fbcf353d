"""How a loss runs on a mesh: everything a training step needs to know, decided before compiling it.

    init, loss, batch --shapes--> the rule --> where each weight lives, and how the loss runs
                                  checks   --> errors that stop the run, with the numbers
                                           --> Plan, from which train.py makes its step
    Plan, step, evaluate          -->          Program: the functions to compile, and their shapes

A step takes its weights as two trees: trained weights and frozen weights. The second is {} without
--lora_rank or a custom step. Checkpoints hold only the first; a loss gets both as a single tree.
"""

import collections
import dataclasses
import functools
import inspect
from typing import Any, Callable, Mapping, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from zigzag.core.chips import compiler_options
from zigzag.core.errors import ConfigError, any_loss, one_line
from zigzag.core.files import digest
from zigzag.core.flags import change
from zigzag.core.mesh import (
    WITHOUT_TENSOR,
    abstract_mesh,
    axes_in_use,
    batch_spec,
    best_dtype,
    by_path,
    cast,
    full_spec,
    has_time,
    row_groups,
    shardings,
    spec_axes,
    within,
    without_axis,
)
from zigzag.core.options import only, without
from zigzag.core.parts import added, part
from zigzag.parallel import layer_strips as strips
from zigzag.parallel import low_rank
from zigzag.parallel.jaxprs import DIFFERENTIATED, names_in, why_not_split
from zigzag.parallel.network import check_tensor
from zigzag.parallel.pipeline import can_skip
from zigzag.parallel.rule import moment_specs, plan_sharding, state_specs
from zigzag.parallel.storage import permute_layers, split_ends
from zigzag.parallel.table import count
from zigzag.run import averages
from zigzag.run.checks import Overrides, check_batch, check_overrides, check_rows, check_time
from zigzag.run.modes import BY_HAND, JIT, MANUAL, TENSOR_WHOLE, TYPED, UNTYPED, mode_of
from zigzag.run.schedules import check_given

# The names in a step's line in metrics.jsonl.
LOGGED = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "skipped",
          "save_seconds", "loss_scale"}
# {axis: (the shard.py function that a loss must call to be split over it, what that splits)}.
SPLITS = {"pipe": ("pipelined_loss", "layers"), "seq": ("attend", "attention"),
          "expert": ("experts", "experts")}


class Axes(NamedTuple):
    """What each mesh axis does in a step, for axes of size > 1 that our own code communicates over.
    train.make_gradients has an example."""
    sums: set[str]          # devices along the axis compute different parts of a batch's sum
    marked: set[str]        # the step marks weights as varying over the axis. This never includes
                            # tensor, where a weight's type says that it's split; it's empty for a
                            # loss without types
    same_rows: set[str]     # devices along the axis share rows, but each has its own part of
                            # the layers (pipe) or of the sequence (seq)
    pools: bool             # the loss calls shard.whole_time, to pick or pool positions. Every
                            # device along seq then computes the same sum, and the count may be a
                            # row count, which doesn't vary over seq either; shard.local_sums counts
                            # both once
    untimed: tuple[str, ...]    # batch arrays that seq doesn't split, because their second
                            # dimension isn't the tokens' sequence


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The facts that a training step needs. The only functions in it are the user's. Trees have the
    structure of the full weight tree unless a comment says otherwise."""
    config: Any             # with its dtype resolved
    mesh: Any
    init: Callable          # key -> weights, as stored
    loss: Callable          # (weights, batch, specs) -> (sum, count, {name: other sum}), float32
    network: Any            # the network whose loss this is; None: a custom loss
    mode: str               # how the loss runs: see zigzag/run/modes.py
    takes_specs: bool       # whether the loss's layers gather their own weights
    params: Any             # shapes
    batch: Any              # shapes of a whole batch
    sums: Any               # shapes of the loss's results
    decisions: Any          # where each weight lives, and why
    dtype: str              # the loss's precision
    accumulate: int         # the number of parts per batch
    names: set[str]         # the functions from shard.py that the loss calls
    attends: tuple          # its calls to shard.attend: an attention.Call for each kind
    schedule: Any = None    # update -> learning rate, if fit got a schedule
    timed: Any = ()         # ((name of a batch array, has a sequence?), ...): a task's timed
    strip: int = 0          # the fewest tokens in a strip of rows (layer_strips.py); 0: no strips
    learned: str | None = None      # in a custom step, the only tree to train, or "" to train none
                                    # (in an evaluation); None: train all weights

    @property
    def sizes(self) -> Any:
        return self.mesh.shape

    @property
    def row_groups(self) -> int:
        """Return how many groups of devices have different rows."""
        return row_groups(self.mesh)

    @property
    def is_builtin_loss(self) -> bool:
        """Return whether this is a network's own loss, which the tests compare with one device."""
        return self.network is not None

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of parameters, and how many of them a token visits."""
        if self.is_builtin_loss:
            return self.network.parameters(self.config.network)
        return (count(self.params),) * 2

    @property
    def typed(self) -> bool:
        """Return whether the loss runs with varying types (check_vma)."""
        return self.mode in (BY_HAND, TYPED)

    @property
    def manual(self) -> tuple[str, ...]:
        """Return the mesh axes that our code communicates over. The compiler handles the rest."""
        return MANUAL[self.mode]

    @property
    def compiler_options(self) -> dict[str, Any]:
        return compiler_options(self.mesh, self.mode in (TYPED, UNTYPED), not self.is_builtin_loss)

    @property
    def row_axes(self) -> Any:
        """Return the axes that split a batch's rows, as an entry in a spec."""
        return full_spec(batch_spec(self.mesh), 1)[0]

    @property
    def axes(self) -> "Axes":
        """Return what each axis does in the step."""
        in_use = {a for a in self.manual if self.sizes[a] > 1}
        sums, said = in_use & {*WITHOUT_TENSOR}, dict(self.timed)
        return Axes(sums, sums if self.typed else set(), in_use & {"pipe", "seq"},
                    "whole_time" in self.names,
                    tuple(name for name in self.batch if has_time(name, said) is False))

    @property
    def skips_idle(self) -> bool:
        """Return whether a pipeline stage may skip a tick when it has no work."""
        return can_skip(self.sizes, self.config.network.overlap and "tensor" in self.manual)

    @property
    def needs(self) -> list[str]:
        """Return the axes, as axis=size, over which the loss must split its own work."""
        decisions = jax.tree.leaves(self.decisions)
        in_use = {"pipe", "seq"}.union(*(spec_axes(d.spec_in_loss) for d in decisions))
        in_use &= SPLITS.keys()
        needed = {*in_use, *(["tensor"] if self.mode == BY_HAND else [])} & {*self.manual}
        return axes_in_use(self.sizes, needed)

    @property
    def specs_at_rest(self) -> Any:
        """Return the specs of the weights as stored."""
        return jax.tree.map(lambda d: d.spec, self.decisions)

    @property
    def specs_in_loss(self) -> Any:
        """Return the specs of the weights as the loss takes them, before the gather over fsdp."""
        return jax.tree.map(lambda d: d.spec_in_loss, self.decisions)

    @property
    def trained(self) -> Any:
        """Return the decisions for the trained weights."""
        return self.in_two(self.decisions)[0]

    @property
    def frozen(self) -> Any:
        """Return the decisions for the frozen weights: {} without --lora_rank or a custom step."""
        return self.in_two(self.decisions)[1]

    @property
    def pair_at_rest(self) -> tuple[Any, Any]:
        """Return the specs of the trained and the frozen weights, as stored."""
        return self.in_two(self.specs_at_rest)

    @property
    def optimizer_specs(self) -> Any:
        """Return the optimizer state's specs for trained weights; --zero 1 splits it over data."""
        shapes, _ = self.in_two(self.params)
        return moment_specs(shapes, self.trained, self.mesh, self.config)

    @property
    def accumulated_specs(self) -> Any:
        """Return the specs of the gradients that a device accumulates over the parts of a batch."""
        return self.optimizer_specs if self.config.zero == 2 else self.pair_at_rest[0]

    def in_two(self, tree: Any) -> tuple[Any, Any]:
        """Split a tree shaped like the weights: return its trained part and its frozen part."""
        if self.learned is not None:
            return only(tree, self.learned), without(tree, self.learned)
        return low_rank.split(tree) if self.config.network.lora_rank else (tree, {})

    @property
    def parts(self) -> int:
        """Return how many pieces our code, not the compiler, cuts a batch's loss into."""
        return self.accumulate * (1 if self.mode == JIT else self.row_groups)


def in_one(trained: Any, frozen: Any) -> Any:
    """Merge trained and frozen weights into a single tree, for a loss. Plan.in_two undoes this."""
    return low_rank.join(trained, frozen)


def held_out(batch: dict[str, Any]) -> dict[str, Any]:
    """Drop the seeds from a batch, as in a held-out batch."""
    return without(batch, "seeds")


def make_plan(config: Any, mesh: Any, init: Callable, loss: Callable, batch: Any,
              overrides: Overrides = (), typed: bool = True,
              network: Any = None, schedule: Callable | None = None,
              learned: str | None = None, timed: Mapping[str, bool] = {}) -> Plan:
    """Make the Plan to train init's weights with `loss` on batches of the shapes `batch` (all rows
    of an update). typed=False runs the loss on each device as if it were the only one, no matter
    what the loss calls. `network` is the network whose loss this is; None: a custom loss.
    schedule(step) is the learning rate; None: the config's. `learned` is the only tree of weights
    to train, or "" for none. The task's `timed` says which batch arrays have a sequence."""
    config = resolve_dtype(config, mesh)
    check_batch(config, mesh)
    check_time(batch, mesh, timed)
    if network:
        check_rows(config, network)
    if schedule:
        check_given(schedule)
    if config.network.lora_rank:
        init = _with_frozen(init, config.network.dtype)
    params = jax.eval_shape(init, jax.random.key(0))
    for path, leaf in by_path(params if learned is None else params.get(learned, {})).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(f"parameter {path} is {leaf.dtype}: only float arrays can be "
                              f"trained; init must return no others")
    loss, takes_specs = with_checked_sums(loss)
    overrides = check_overrides(config.override, params, mesh, overrides)
    # The rule looks at a single device's work: one part of its group's rows.
    rows = config.batch // row_groups(mesh) // config.accumulate
    few = jax.tree.map(lambda x: x.update(shape=(rows, *x.shape[1:])), batch)
    weights = jax.eval_shape(lambda p: cast(p, config.network.dtype), params)
    calls = set()       # the distinct calls to shard.attend
    with within(calls=calls.add):
        jaxpr, sums = _traced(loss, weights, few, batch)
    if config.network.accuracy and "accuracy" not in sums[2]:
        raise ConfigError("--accuracy true: this loss returns no sum named accuracy (add the "
                          "second result of shard.token_loss); leave it out")
    decisions = plan_sharding(lambda p, b: loss(p, b)[:2], weights, few, mesh=mesh,
                              overrides=overrides, fsdp_min=config.fsdp_min,
                              mesh_axes=network.mesh_axes(config.network) if network else None)
    if network:
        check_tensor(config.network, mesh, jax.tree.map(lambda d: d.spec, decisions))
    if config.network.lora_rank:
        decisions = low_rank.mark_frozen(decisions)
    splits_tensor = mesh.shape["tensor"] > 1
    if splits_tensor or not network and rows < config.batch:
        decisions = see_matrices(decisions, loss, weights, batch)

    names = names_in(jaxpr) if typed else set()
    why = "" if network else why_not_split(jaxpr, weights)
    mode = mode_of(config.collectives, names, typed and takes_specs, splits_tensor, why)
    if mode == TENSOR_WHOLE and splits_tensor:
        decisions = _whole_over_tensor(decisions, why)
    if mode in (BY_HAND, TYPED):
        decisions = split_ends(weights, decisions, mesh, config)
    plan = Plan(config, mesh, init, loss, network, mode,
                takes_specs and mode in (BY_HAND, TYPED, JIT), params, batch, sums, decisions,
                config.network.dtype, config.accumulate, names, tuple(sorted(calls, key=str)),
                schedule, tuple(timed.items()), strips.least(config) if network else 0, learned)
    _check_axes(plan, names, why)
    return plan


def _traced(loss, weights, few, batch):
    """Return the loss's jaxpr for a few rows, and the shapes of its results."""
    rows, of_batch = (jax.tree.leaves(b)[0].shape[0] for b in (few, batch))
    try:
        return jax.make_jaxpr(loss, return_shape=True)(weights, few)
    except (TypeError, ValueError) as e:
        if isinstance(e, ConfigError) or rows == of_batch:
            raise
        jax.eval_shape(loss, weights, batch)        # raises if a whole batch doesn't work either
        raise ConfigError(f"this loss works for {of_batch} rows, but not for {rows}, which a "
                          f"device has at a time with --batch {of_batch} ({one_line(e)}); write it "
                          f"for any number of rows") from None


def _with_frozen(init, dtype):
    return lambda key: low_rank.as_stored(init(key), dtype)


def _whole_over_tensor(decisions, why):
    """Keep the decisions on how to store weights, but let the loss use them whole over tensor."""
    return jax.tree.map(lambda d: dataclasses.replace(
        d, in_loss=without_axis(d.spec_in_loss, "tensor"),
        reason=d.reason + f"; gathered: this loss {why}" * ("tensor" in spec_axes(d.spec))),
        decisions)


def see_matrices(decisions: Any, loss: Callable, weights: Any, batch: Any) -> Any:
    """Return the decisions, with is_matrix derived from a whole batch without a mesh. Otherwise it
    could depend on the mesh through a device's rows, or through kv heads repeated for tensor."""
    seen = plan_sharding(lambda p, b: loss(p, b)[:2], weights, batch, mesh=abstract_mesh({}))
    return jax.tree.map(lambda d, s: dataclasses.replace(
        d, is_matrix=s.is_matrix, matmul_dims=s.matmul_dims), decisions, seen)


# -------------------------------------------------------------------------------------------
# The results of a loss

def with_checked_sums(loss: Callable) -> tuple[Callable, bool]:
    """Return (the loss as (weights, batch, specs) -> loss_sums, whether it takes specs)."""
    takes_specs = "specs" in inspect.signature(loss).parameters

    def checked(weights, batch, specs=None):
        return loss_sums(loss(weights, batch, specs=specs) if takes_specs
                         else loss(weights, batch))

    return checked, takes_specs


def loss_sums(result: Any) -> tuple[Array, Array, dict[str, Array]]:
    """Convert a loss's result to (sum, count, {name: other sum}), in float32."""
    is_tuple = isinstance(result, tuple) and len(result) in (2, 3)
    s, c, aux = (*result, None)[:3] if is_tuple else (None, None, None)
    aux = {} if aux is None else aux
    leaves = [s, c, *aux.values()] if isinstance(aux, dict) else [None]      # None is not a leaf
    if not jax.tree_util.all_leaves(leaves) or jnp.shape(s) or jnp.shape(c):
        shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", result)
        raise ConfigError(f"loss(params, batch) must return two scalars, the sum over the batch "
                          f"and the count to divide by (not a mean), and optionally a dict of "
                          f"other sums to log (arrays); it returned {shapes}")
    check_names(aux, "the loss gave one of its other sums", LOGGED)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (s, c, aux))


def check_names(given: Any, what: str, known: Any) -> None:
    """Reject names that a run already uses in its log. `what` starts the message."""
    for name in given:
        if not isinstance(name, str) or name in known:
            raise ConfigError(f"{what} the name {name!r}: expected a name other than "
                              f"{', '.join(sorted(known))}, which a run already logs")


# -------------------------------------------------------------------------------------------
# Rejected configs

def resolve_dtype(config: Any, mesh: Any) -> Any:
    """Fill in the config's dtype: its own if set, otherwise the best one for the mesh's devices."""
    return change(config, dtype=config.network.dtype or best_dtype(mesh))


def _check_axes(plan, names, why):
    """Reject mesh axes over which the loss must split its own work but doesn't."""
    for axis, (function, what) in SPLITS.items():
        need = f"{axis}={plan.sizes[axis]}"
        if need not in plan.needs:
            continue
        missing = function not in names and (
            f"does not call shard.{function}, which is what splits {what} over it")
        # A gradient inside the loss would cover only this device's part.
        inside = DIFFERENTIATED in names and (
            f"takes a gradient inside itself (or another derivative), which over {axis} would be "
            f"the gradient of one device's part")
        if missing or inside:
            raise ConfigError(f"mesh axis {need}: this loss {missing or inside}; {any_loss(axis)}")
    if why and plan.needs and plan.sizes["tensor"] > 1:
        raise ConfigError(f"mesh axis tensor={plan.sizes['tensor']}: this loss {why}, so the "
                          f"compiler cannot split it together with {plan.needs[0]}; give a mesh "
                          f"without tensor")


# -------------------------------------------------------------------------------------------
# The program to compile

@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    plan: Plan
    state: Any              # shapes with shardings: params, frozen (weights), opt, step
    batch: Any              # shapes with shardings
    start: Any              # (key, weights instead of init's or None) -> state
    step: Any               # (state, batch) -> state, metrics
    evaluate: Any           # (params, batch, frozen) -> sum, count, other sums
    own: Any = None         # fit's custom step, if any: a custom_step.CustomStep

    @property
    def config(self) -> Any:
        return self.plan.config

    @property
    def mesh(self) -> Any:
        return self.plan.mesh

    def permute(self, tree: Any, back: bool = False) -> Any:
        """Put the layers of a state, its saved part, or weights in the order of the pipeline's
        stages. With `back`, restore the layers' own order, which checkpoints use."""
        chunks = 1 if self.plan.mode == JIT else self.config.network.chunks
        known = (self.state, self.saved(self.state), self.state["params"], self.weights(self.state))
        like = next(x for x in known if jax.tree.structure(x) == jax.tree.structure(tree))
        return permute_layers(tree, jax.tree.map(lambda x: x.sharding, like), chunks, back)

    def weights(self, state: Any) -> Any:
        """Return a state's weights as a single tree: trained (with --ema, averaged) and frozen."""
        return in_one(averages.used(state), state["frozen"])

    def saved(self, state: Any) -> Any:
        """Return the part of a state that a checkpoint holds: all but the frozen weights, which a
        run rereads from their source."""
        return averages.to_disk(without(state, "frozen"))


def make_program(plan: Plan, optimizer: Any, step: Callable, evaluate: Callable) -> Program:
    """Make the Program of a step and an evaluation: with shapes, and as parts rewrite the step."""
    mesh, c = plan.mesh, plan.config
    scales = {}
    if plan.dtype == "float16":     # the loss scale is part of the state
        loss_scale = part("precision.loss_scale", "--dtype float16").LossScale(plan)
        step, scales = loss_scale.around(step), loss_scale.first()
    for flag, module in collections.ChainMap(*added("PROGRAMS")).items():
        step = part(module, f"--{flag}").rewritten(step, plan) if getattr(c, flag) else step

    def state(trained, frozen, opt, step, scales):
        average = {"average": trained} if c.ema else {}
        return {"params": trained, "frozen": frozen, "opt": opt, "step": step, **average, **scales}

    def start(key, weights=None):
        """Make a run's first state, with these weights (except adapters) or with init's."""
        trained, frozen = plan.in_two(plan.init(key))
        if weights is not None:
            trained, frozen = ((trained, cast(weights, c.network.dtype)) if c.network.lora_rank
                               else (weights, {}))
        return state(trained, frozen, optimizer.init(trained), jnp.zeros((), jnp.int32), scales)

    opt = state_specs(optimizer, plan.in_two(plan.params)[0], plan.optimizer_specs)
    places = shardings(state(*plan.pair_at_rest, opt, P(), jax.tree.map(lambda _: P(), scales)),
                       mesh)
    whole, rows = shardings((P(), batch_spec(mesh)), mesh)
    jit = functools.partial(jax.jit, compiler_options=plan.compiler_options)
    batch = jax.tree.map(lambda x: x.update(sharding=rows), plan.batch)
    start = jit(start, donate_argnums=1, out_shardings=places)
    return Program(plan, jax.eval_shape(start, jax.random.key(0)), batch, start,
                   jit(averages.with_average(step, c.ema), donate_argnums=0,
                       out_shardings=(places, whole)),
                   jit(evaluate, out_shardings=whole))


def compiled(program: Program) -> jax.stages.Compiled:
    with jax.set_mesh(program.mesh):
        return program.step.lower(program.state, program.batch).compile()


def shapes_hash(params: Any) -> str:
    """Hash the weights' paths, shapes and dtypes, so that a run can recognize them."""
    text = str([(path, w.shape, str(w.dtype)) for path, w in by_path(params).items()])
    return digest(text.encode())[:16]
