"""How a loss runs on a mesh: everything a training step must know, decided before it is compiled.

    init, loss, batch --shapes--> the rule --> where each weight lives, and how the loss runs
                                  checks   --> errors that stop the run, with the numbers
                                           --> Plan, from which train.py makes its step
    Plan, step, evaluate          -->          Program: the functions to compile, and their shapes
"""

import dataclasses
import functools
import hashlib
import inspect
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, one_line
from zigzag.core.flags import change
from zigzag.core.mesh import (
    AXES,
    WITHOUT_TENSOR,
    abstract_mesh,
    batch_spec,
    by_path,
    cast,
    compiler_options,
    full_spec,
    keep_on_first,
    mark_varying,
    pmean_over,
    row_groups,
    shardings,
    spec_axes,
    untyped,
    varying,
    without_axis,
)
from zigzag.parallel.storage import permute_layers
from zigzag.rule.jaxprs import DIFFERENTIATED, names_in, why_not_split
from zigzag.rule.rule import plan_sharding, state_specs, zero1_specs
from zigzag.run.checks import check_batch, check_overrides
from zigzag.run.schedules import check_given
from zigzag.weights import lora

# The names in a step's line of metrics.jsonl.
LOGGED = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "skipped",
          "save_seconds"}
# Said where a loss cannot run on an axis.
ANY_LOSS = "any loss that is a sum over rows trains on data, fsdp and tensor"
# The function of shard.py that a loss must call to be split over an axis, and what that splits.
SPLITS = {"pipe": ("pipelined_loss", "layers"), "seq": ("attend", "attention"),
          "expert": ("experts", "experts")}

BY_HAND, TYPED, UNTYPED, TENSOR_WHOLE, JIT = (
    "by hand", "typed", "untyped", "untyped, tensor whole", "jit")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Everything a step must know. Trees have the structure of the weights unless stated."""
    config: Any             # with its dtype resolved
    mesh: Any
    init: Callable          # key -> weights, as they are stored
    loss: Callable          # (weights, batch, specs) -> (sum, count, {name: other sum}), float32
    network: Any            # the network whose own loss this is; None: a custom loss
    mode: str               # how the loss runs: see run_mode
    takes_specs: bool       # whether its layers gather their own weights
    params: Any             # shapes
    batch: Any              # shapes of a whole batch
    sums: Any               # shapes of what the loss returns
    decisions: Any          # where each weight lives, and why
    dtype: str              # the precision in which the loss is computed
    accumulate: int         # the number of micro-batches in a batch
    names: set[str]         # the functions of shard.py that the loss calls
    schedule: Any = None    # update -> learning rate, if fit was given one

    @property
    def sizes(self) -> Any:
        return self.mesh.shape

    @property
    def trusted(self) -> bool:
        """Whether this is a network's own loss, which the tests compare with one device."""
        return self.network is not None

    @property
    def pools(self) -> bool:
        """Whether the loss calls shard.whole_time, to pick or pool positions. Then every device of
        seq computes the same sum, and its count may be a number of rows, which does not vary over
        seq either; `local_sums` counts both once."""
        return "whole_time" in self.names

    @property
    def typed(self) -> bool:
        """Whether the loss runs with varying types (check_vma)."""
        return self.mode in (BY_HAND, TYPED)

    @property
    def manual(self) -> tuple[str, ...]:
        """The mesh axes over which our code sends. Over the others the compiler does."""
        return {JIT: (), TYPED: WITHOUT_TENSOR, UNTYPED: WITHOUT_TENSOR}.get(self.mode, AXES)

    @property
    def compiler_options(self) -> dict[str, Any]:
        return compiler_options(self.mesh, self.mode in (TYPED, UNTYPED))

    def axes(self, *names: str) -> set[str]:
        """The axes among `names` that are manual and have more than one device."""
        return {a for a in names if a in self.manual and self.sizes[a] > 1}

    @property
    def shared_row_axes(self) -> set[str]:
        """Axes whose devices have the same rows, and each a part of the layers or of the time."""
        return self.axes("pipe", "seq")

    @property
    def sum_axes(self) -> set[str]:
        """Axes whose devices compute different parts of a sum over the batch."""
        return self.axes(*WITHOUT_TENSOR)

    @property
    def needs(self) -> list[str]:
        """The axes, as axis=size, over which the loss must split its own work."""
        decisions = jax.tree.leaves(self.decisions)
        in_use = {"pipe", "seq"}.union(*(spec_axes(d.used) for d in decisions)) & SPLITS.keys()
        needed = self.axes(*in_use, *(["tensor"] if self.mode == BY_HAND else []))
        return [f"{a}={n}" for a, n in self.sizes.items() if a in needed]

    @property
    def stored(self) -> Any:
        """The specs of the weights as they are stored."""
        return jax.tree.map(lambda d: d.spec, self.decisions)

    @property
    def used(self) -> Any:
        """The specs of the weights as the loss takes them, before fsdp gathers them."""
        return jax.tree.map(lambda d: d.used, self.decisions)

    @property
    def moments(self) -> Any:
        """The specs of the optimizer's state for trained weights: with --zero 1 also over data."""
        stored = self.trained(self.stored)
        if not self.config.zero:
            return stored
        return zero1_specs(self.trained(self.params), stored, self.mesh, self.config.fsdp_min)

    def split(self, tree: Any) -> tuple[Any, Any]:
        """A tree like the weights in two: what is trained, and what is frozen (--lora_rank)."""
        return lora.split(tree) if self.config.lora_rank else (tree, {})

    def trained(self, tree: Any) -> Any:
        """The part of a tree like the weights that is trained: all of it, or the adapters."""
        return self.split(tree)[0]

    def replace(self, tree: Any, trained: Any) -> Any:
        """A tree like the weights, with these in place of what is trained."""
        return lora.join(trained, self.split(tree)[1])

    @property
    def parts(self) -> int:
        """The number of parts in which the loss of a batch is computed, apart from the compiler."""
        return self.accumulate * (1 if self.mode == JIT else row_groups(self.mesh))

    def mark(self, tree: Any) -> Any:
        """The tree, marked as varying over all axes whose devices have other rows, layers or time.
        (Never over tensor: there the type of a weight says that it is split.)"""
        return mark_varying(tree, also=self.sum_axes) if self.typed else tree

    def local_sums(self, weights: Any, batch: Any) -> tuple:
        """This device's part of what the loss returns: the sum, the count, and other sums."""
        total, count, aux = self.loss(weights, batch, self.used)
        if self.pools and "seq" not in varying(count):      # each device has pooled all of the time
            total, aux = pmean_over((total, aux), "seq")
        if "seq" in self.shared_row_axes & (varying(total) - varying(count)):
            raise ConfigError(
                f"mesh axis seq={self.sizes['seq']}: this loss's sum is of a device's part of the "
                f"time, and its count is not: it divides by a constant or by its rows, as a pooled "
                f"one does, or by a sum over all of the time; let it pool what shard.whole_time "
                f"gives, or count the sum of the batch's weights [B, T], and multiply each row's "
                f"loss by the sum of the row's; {ANY_LOSS}")
        sums = jax.tree.map(lambda x: lax.psum(x, "tensor") if "tensor" in varying(x) else x,
                            (total, count, aux))
        return keep_on_first(sums, self.shared_row_axes)

    def bind(self, params: Any, gather: Callable) -> tuple[Any, Callable, Callable]:
        """What a step differentiates, inside its shard_map: trained, gather_trained, compute.

            trained                                     the trained weights of this device, as they
                                                        are stored, cast and marked
            gathered = gather_trained(trained)          as the loss takes them
            sums, gradients = compute(gathered, batch)  gradients with respect to `gathered`

        gather(plan, weights, decisions) gathers any weights. Frozen weights (--lora_rank) have no
        gradient: they are gathered here, once, and bound into `compute`."""
        trained, frozen = self.split(self.mark(cast(params, self.dtype)))
        of_trained, of_frozen = self.split(self.decisions)
        frozen = gather(self, frozen, of_frozen)
        compute = self.on_device(functools.partial(sums_and_gradient, self.local_sums))
        return (trained, lambda trained: gather(self, trained, of_trained),
                lambda whole, batch: compute(whole, frozen, batch))

    def zeros(self, trained: Any) -> tuple[Any, Any]:
        """Zeros to add a device's micro-batches to, in float32: gradients of its trained weights,
        and what the loss returns."""
        return (jax.tree.map(lambda w: mark_varying(jnp.zeros(w.shape, jnp.float32), w), trained),
                self.mark(optax.tree.zeros_like(self.sums)))

    def on_mesh(self, fn: Callable, out_specs: Any, shard_time: Callable, splits_rows: bool = True
                ) -> Callable:
        """fn(params, batch) in a shard_map: each group of devices has its rows, and its part of
        their time, as shard_time splits it."""
        if self.mode == JIT:
            return fn

        def call(params, batch):
            batch, specs = shard_time(batch, self.mesh)
            rows = full_spec(batch_spec(self.mesh) if splits_rows else P(), 1)
            specs = self.stored, {k: P(*rows, *s[1:]) for k, s in specs.items()}, out_specs
            *in_specs, out = specs if "tensor" in self.manual else without_axis(
                specs, "tensor")
            return jax.shard_map(fn, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out,
                                 axis_names=set(self.manual), check_vma=self.typed)(params, batch)

        return call

    def on_device(self, fn: Callable) -> Callable:
        """fn as a device computes it: without varying types if the loss runs without them."""
        return untyped(fn) if self.mode in (UNTYPED, TENSOR_WHOLE) else fn


def run_mode(step: str, names: set[str], takes_specs: bool, splits_tensor: bool, why: str) -> str:
    """How a loss runs, from the functions of shard.py that it calls (`names`):

    by hand       it calls columns or row: one shard_map over all six axes, with types
    typed         it calls others, or takes specs: the same, but the compiler splits over tensor
    untyped       it calls none, or differentiates inside itself: each device computes its rows as
                  one device would, without types, and the compiler splits that over tensor
    tensor whole  like untyped, but the compiler cannot split it (`why`), or there is nothing to
                  split: weights may be stored split over tensor, and are used whole

    With --step jit there is no shard_map: the compiler does everything."""
    if step == "jit":
        return JIT
    if DIFFERENTIATED not in names and not (why and splits_tensor):
        if names & {"columns", "row"}:
            return BY_HAND
        if names or takes_specs:
            return TYPED
    return TENSOR_WHOLE if why or not splits_tensor else UNTYPED


def make_plan(config: Any, mesh: Any, init: Callable, loss: Callable, batch: Any,
              overrides: Sequence[tuple[str, P]] = (), typed: bool = True,
              network: Any = None, schedule: Callable | None = None) -> Plan:
    """The Plan to train init's weights with `loss` on batches with the shapes `batch` (all rows of
    an update). typed=False runs the loss on each device as on one, whatever it calls. `network` is
    the network whose own loss this is; None: a custom loss. schedule(step) is the learning rate;
    None: the configuration's."""
    config = resolve_dtype(config, mesh)
    check_batch(config, mesh)
    if schedule:
        check_given(schedule)
    if config.lora_rank:
        init = _with_frozen(init, config.dtype)
    params = jax.eval_shape(init, jax.random.key(0))
    _check_floats(params)
    loss, takes_specs = with_checked_sums(loss)
    overrides = check_overrides(config.override, params, mesh, overrides)
    # The rule looks at what a device computes: one micro-batch of its group's rows.
    rows, trusted = config.batch // row_groups(mesh) // config.accumulate, network is not None
    tensor_dims = network.tensor_dims(config.network) if network else None
    few = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    weights = jax.eval_shape(lambda p: cast(p, config.dtype), params)
    jaxpr, sums = _traced(loss, weights, few, batch)
    decisions = plan_sharding(lambda p, b: loss(p, b)[:2], weights, few, mesh=mesh,
                              overrides=overrides, fsdp_min=config.fsdp_min,
                              tensor_dims=tensor_dims)
    if config.lora_rank:
        decisions = lora.mark_frozen(decisions)
    splits_tensor = mesh.shape["tensor"] > 1
    if splits_tensor or not trusted and rows < config.batch:
        decisions = _see_matrices(decisions, loss, weights, batch)

    names = names_in(jaxpr) if typed else set()
    why = "" if trusted else why_not_split(jaxpr, weights)
    mode = run_mode(config.step, names, typed and takes_specs, splits_tensor, why)
    if mode == TENSOR_WHOLE and splits_tensor:
        decisions = jax.tree.map(functools.partial(_whole_over_tensor, why=why), decisions)
    plan = Plan(config, mesh, init, loss, network, mode,
                takes_specs and mode in (BY_HAND, TYPED, JIT), params, batch, sums, decisions,
                config.dtype, config.accumulate, names, schedule)
    if plan.parts > 1 and not trusted:
        _check_sums_of_parts(plan, weights, rows)
    _check_axes(plan, names, why)
    return plan


def _traced(loss, weights, few, batch):
    """The loss's jaxpr for a few rows, and the shapes of what it returns."""
    rows, of_batch = (jax.tree.leaves(b)[0].shape[0] for b in (few, batch))
    try:
        return jax.make_jaxpr(loss, return_shape=True)(weights, few)
    except (TypeError, ValueError) as e:
        if isinstance(e, ConfigError) or rows == of_batch:
            raise
        error = e
    try:
        jax.eval_shape(loss, weights, batch)
    except (TypeError, ValueError):
        raise error from None
    raise ConfigError(f"this loss can be computed for {of_batch} rows, and not for {rows}, which "
                      f"are what a device has of --batch {of_batch} at a time "
                      f"({one_line(error)}); write it for any number of rows") from None


def _with_frozen(init, dtype):
    return lambda key: lora.as_stored(init(key), dtype)


def _whole_over_tensor(decision, why):
    """The decision to store a weight as decided, but to use it whole over tensor."""
    reason = f"; gathered: this loss {why}" if "tensor" in spec_axes(decision.spec) else ""
    return dataclasses.replace(decision, used_as=without_axis(decision.used, "tensor"),
                               reductions=(), reason=decision.reason + reason)


def _see_matrices(decisions, loss, weights, batch):
    """Decisions whose is_matrix comes from a whole batch without a mesh. Which weights are matrices
    must not depend on the mesh: not on the rows of a device, nor on kv heads repeated for
    tensor."""
    seen = plan_sharding(lambda p, b: loss(p, b)[:2], weights, batch, mesh=abstract_mesh({}))
    return jax.tree.map(lambda d, s: dataclasses.replace(
        d, is_matrix=s.is_matrix, matmul_dims=s.matmul_dims), decisions, seen)


# -------------------------------------------------------------------------------------------
# What a loss returns

def with_checked_sums(loss: Callable) -> tuple[Callable, bool]:
    """The loss as (weights, batch, specs) -> loss_sums, and whether it takes specs."""
    takes_specs = "specs" in inspect.signature(loss).parameters

    def checked(weights, batch, specs=None):
        return loss_sums(loss(weights, batch, specs=specs) if takes_specs
                         else loss(weights, batch))

    return checked, takes_specs


def loss_sums(result: Any) -> tuple[Array, Array, dict[str, Array]]:
    """The result of a loss as (sum, count, {name: other sum}), in float32."""
    is_tuple = isinstance(result, tuple) and len(result) in (2, 3)
    s, c, aux, *_ = (*result, None) if is_tuple else (None,) * 3
    aux = {} if aux is None else aux
    is_flat = isinstance(aux, dict) and jax.tree_util.all_leaves([s, c, *aux.values()])
    if not is_flat or jnp.shape(s) or jnp.shape(c):     # (None is no leaf)
        shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", result)
        is_one = not is_tuple and jax.tree_util.all_leaves([result]) and not jnp.shape(result)
        raise ConfigError(f"loss(params, batch) must return two scalars, the sum over the batch "
                          f"and the count to divide by, and optionally a dict of other sums to log "
                          f"(arrays); it returned {shapes}" + (
                              ": instead of a mean, return the sum and the count" * is_one))
    if taken := LOGGED & aux.keys():
        raise ConfigError(f"the loss's other sums are logged by name, and {min(taken)!r} is taken: "
                          f"a step itself logs {', '.join(sorted(LOGGED))}")
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (s, c, aux))


def sums_and_gradient(loss: Callable, trained: Any, frozen: Any, batch: Any) -> tuple[Any, Any]:
    """What the loss returns, and the gradient of its sum with respect to the trained weights."""
    def with_sums(trained):
        sums = loss(lora.join(trained, frozen), batch)
        return sums[0], sums

    (_, sums), gradient = jax.value_and_grad(with_sums, has_aux=True)(trained)
    return sums, gradient


def _check_sums_of_parts(plan, weights, rows):
    _, _, whole = jax.eval_shape(plan.loss, weights, plan.batch)
    for name, x in plan.sums[2].items():
        if x.shape != whole[name].shape:
            raise ConfigError(f"the loss's other sum {name!r} has the shape {list(x.shape)} for "
                              f"{rows} rows and {list(whole[name].shape)} for "
                              f"{plan.config.batch}: return what adds up over rows")


# -------------------------------------------------------------------------------------------
# What is refused

def resolve_dtype(config: Any, mesh: Any) -> Any:
    """The configuration with the compute precision that the mesh's devices are best at."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return change(config, dtype=config.dtype or ("float32" if on_cpu else "bfloat16"))


def _check_floats(params):
    for path, leaf in by_path(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(f"parameter {path} is {leaf.dtype}: only float arrays can be "
                              f"trained; let init return no others")


def _check_axes(plan, names, why):
    """Refuse mesh axes over which the loss must split its own work, and does not."""
    for axis, (function, what) in SPLITS.items():
        need = f"{axis}={plan.sizes[axis]}"
        if need not in plan.needs:
            continue
        if function not in names:
            raise ConfigError(f"mesh axis {need}: this loss does not call shard.{function}, "
                              f"which is what splits {what} over it; {ANY_LOSS}")
        # A gradient inside the loss would be the gradient of this device's part alone.
        if DIFFERENTIATED in names:
            raise ConfigError(f"mesh axis {need}: this loss takes a gradient inside itself "
                              f"(or another derivative), which over {axis} would be the gradient "
                              f"of one device's part; {ANY_LOSS}")
    if why and plan.needs and plan.sizes["tensor"] > 1:
        raise ConfigError(f"mesh axis tensor={plan.sizes['tensor']}: this loss {why}, so no "
                          f"compiler may split it beside {plan.needs[0]}; give a mesh without "
                          f"tensor")


# -------------------------------------------------------------------------------------------
# What is compiled

@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    plan: Plan
    state: Any              # shapes with their places: params, opt, step
    batch: Any              # the same for a batch
    start: Any              # (key, weights in place of init's or None) -> state
    step: Any               # (state, batch) -> state, metrics
    evaluate: Any           # (params, batch) -> sum, count, other sums

    @property
    def config(self) -> Any:
        return self.plan.config

    @property
    def mesh(self) -> Any:
        return self.plan.mesh

    def permute(self, state: Any, back: bool = False) -> Any:
        """A state, the part of it that is saved, or the params of either, with the layers in the
        order of the pipeline's stages, or (`back`) in their own order, in which they are saved."""
        chunks = 1 if self.plan.mode == JIT else self.config.chunks
        states = self.state, self.saved(self.state)
        like = next(x for s in states for x in (s, s["params"])
                    if jax.tree.structure(x) == jax.tree.structure(state))
        return permute_layers(state, jax.tree.map(lambda x: x.sharding, like), chunks, back)

    def saved(self, state: Any) -> Any:
        """The part of a state that a checkpoint holds: all but frozen weights, which a run reads
        again from where they came from."""
        return {**state, "params": self.plan.trained(state["params"])}

    def restored(self, saved: Any, first: Any) -> Any:
        """The state from what was saved of it. `first` is the state that the run began with."""
        return {**saved, "params": self.plan.replace(first["params"], saved["params"])} if (
            first) else saved


def make_program(plan: Plan, optimizer: Any, step: Callable, evaluate: Callable) -> Program:
    """The Program of a step and an evaluation, with the shapes and shardings of all that they take
    and return."""
    mesh, c = plan.mesh, plan.config

    def start(key, weights=None):
        """The first state of a run, with these weights (apart from adapters) or with init's."""
        params = plan.init(key)
        if weights is not None:
            params = (lora.join(plan.trained(params), cast(weights, c.dtype)) if c.lora_rank
                      else weights)
        return {"params": params, "opt": optimizer.init(plan.trained(params)),
                "step": jnp.zeros((), jnp.int32)}

    opt = state_specs(optimizer, plan.trained(plan.params), plan.moments)
    places = shardings({"params": plan.stored, "step": P(), "opt": opt}, mesh)
    whole, rows = shardings((P(), batch_spec(mesh)), mesh)
    jit = functools.partial(jax.jit, compiler_options=plan.compiler_options)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows),
                         plan.batch)
    start = jit(start, donate_argnums=1, out_shardings=places)
    return Program(plan, jax.eval_shape(start, jax.random.key(0)), batch, start,
                   jit(step, donate_argnums=0, out_shardings=(places, whole)),
                   jit(evaluate, out_shardings=whole))


def compiled(program: Program) -> jax.stages.Compiled:
    with jax.set_mesh(program.mesh):
        return program.step.lower(program.state, program.batch).compile()


def shapes_hash(params: Any) -> str:
    """A hash of the paths, shapes and dtypes of weights, by which a run recognises them."""
    text = str([(path, w.shape, str(w.dtype)) for path, w in by_path(params).items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
