"""A custom step, fit(step=...): for several networks or losses, and for extra state besides the
weights (a running average, statistics, a buffer).

    init(key) -> {name: tree}       the networks, and all other state of the run
    step(state, batch, gradients, update) -> state, metrics

        state                               {"params": {name: tree}, "opt": ..., "step": number}
        gradients(loss, trees, name, batch) the gradient of the mean of loss(trees, batch) with
                                            respect to trees[name], and a dict of numbers to log
        update(state, name, gradient)       the state after the optimizer updates that tree

Only the losses run in shards, inside train.make_step's shard_map. Everything else in a step is
ordinary jax on whole arrays, which the compiler splits. CustomStep prepares a step in four stages:

    calls       traces the step once with shapes, to see which gradients it requests
    places      gives the rule all losses at once, so each weight is split one way for them all
    plans       makes a Plan per call: a loss, and the tree to differentiate with respect to
    check       checks each call against a single device, on batches that the step makes
"""

import dataclasses
import functools
import re
from typing import Any, Callable, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, did_you_mean, naming
from zigzag.core.flags import change, flat
from zigzag.core.mesh import batch_spec, by_path, cast, row_groups, untyped
from zigzag.core.options import only, without
from zigzag.parallel.rule import plan_sharding
from zigzag.run.checks import check_batch, check_overrides
from zigzag.run.custom_loss import check_loss, sums_and_gradient
from zigzag.run.plan import (
    LOGGED,
    Plan,
    Program,
    check_names,
    loss_sums,
    make_plan,
    make_program,
    resolve_dtype,
    see_matrices,
    with_checked_sums,
)
from zigzag.run.task import Task

# The names of the numbers that `gradients` returns; a step may log them.
NUMBERS = {"loss", "grad_norm", "tokens", "skipped"}


class Call(NamedTuple):
    """A call to `gradients`. With the name "", it is the evaluation of fit's loss."""
    loss: Callable
    trees: Any              # shapes
    name: str               # of the tree to differentiate with respect to
    batch: Any              # shapes

    def __str__(self) -> str:
        if not self.name:
            return "the loss that fit evaluates"
        return f"gradients({getattr(self.loss, '__name__', 'loss')}, ..., {self.name!r}, ...)"


class CustomStep:
    """A user's step, with its plans.

    make_optimizer(config, decisions, name)     makes a tree's optimizer
    schedule(step)                      fit's schedule; if None, default_rate(step) applies
    make_gradients(plan), make_evaluate(plan)   functions of train.py"""

    def __init__(self, step: Callable, config: Any, mesh: Any, task: Task, batch: Any,
                 make_optimizer: Any, schedule: Callable | None, default_rate: Callable,
                 make_gradients: Callable, make_evaluate: Callable):
        self.step, self.mesh, self.task, self.schedule = step, mesh, task, schedule
        self.rate, self.make_gradients = schedule or default_rate, make_gradients
        self.make_evaluate = make_evaluate
        self.config = resolve_dtype(config, mesh)
        _check_config(self.config, mesh)
        self.params = jax.eval_shape(task.init, jax.random.key(0))
        if not isinstance(self.params, dict) or not all(isinstance(n, str) for n in self.params):
            raise ConfigError("with a custom step, init(key) must return a dict {name: tree}, with "
                              "a tree for each network")
        self.calls, self.updated = [], []       # the last call is the evaluation
        self._record(batch)
        self.places = self._places(task.overrides)
        self.optimizers = {name: make_optimizer(self.config, self.places[name], name)
                           for name in self.updated}
        make_optimizer.check(by_path(self.params))
        self.plans = {}                 # {call number: Plan}
        self.as_one_device = set()      # numbers of the calls whose loss runs as on one device

    # -- the first trace, with shapes only

    def _record(self, batch):
        """Fill `calls` and `updated`."""
        def gradients(loss, trees, name, batch):
            call = Call(loss, _shapes(trees), name, _shapes(batch))
            if _trace() != self.trace:
                raise ConfigError(f"{call}: it is inside a jax loop or function (scan, jit, vmap); "
                                  f"call it in the step itself, in a Python loop if several times")
            self._check_call(call)
            self.calls.append(call)
            return _means(jax.tree.map(jnp.zeros_like, trees[name]),
                          loss_sums(loss(trees, batch)))

        def update(state, name, gradient):
            if name not in self.params:
                raise ConfigError(f"update(state, {name!r}, ...): init returned no tree of this "
                                  f"name" + did_you_mean(str(name), self.params))
            _check_like(f"the gradient passed to update(state, {name!r}, ...)", gradient,
                        self.params[name], lambda x: list(x.shape))
            self.updated += [name] * (name not in self.updated)
            return state

        def step(state, batch):
            self.trace = _trace()
            self._check_results(self.step(state, batch, gradients, update))

        state = {"params": self.params, "opt": {}, "step": jax.ShapeDtypeStruct((), jnp.int32)}
        jax.eval_shape(step, state, batch)
        if not self.calls:
            raise ConfigError("step asked for no gradients: call gradients(loss, trees, name, "
                              "batch) in it")
        self.calls.append(Call(self.task.loss, self.params, "", batch))

    def _check_call(self, call):
        if not isinstance(call.trees, dict) or call.name not in call.trees:
            raise ConfigError(f"{call}: trees must be a dict {{name: tree}} that has this name; "
                              f"state[\"params\"] for example")
        rows = {x.shape[:1] for x in jax.tree.leaves(call.batch)}
        if not isinstance(call.batch, dict) or len(rows) != 1 or rows == {()}:
            raise ConfigError(f"{call}: batch must be a dict of arrays with the same number of "
                              f"rows")
        (rows,), = rows
        with naming(f"{call}: its batch"):
            check_batch(change(self.config, batch=rows), self.mesh)
        constants = jax.make_jaxpr(call.loss)(call.trees, call.batch).consts
        if any(isinstance(x, jax.core.Tracer) for x in constants):
            raise ConfigError(f"{call}: the loss closes over an array that the step computed, so a "
                              f"device would not get its part; pass it in trees, or in batch if it "
                              f"has a row for each example")

    def _check_results(self, results):
        """Reject results other than (state, metrics)."""
        new, metrics = results if isinstance(results, tuple) and len(results) == 2 else ({}, {})
        is_state = isinstance(new, dict) and {"params", "opt", "step"} <= new.keys()
        if not is_state or not isinstance(metrics, dict) or jnp.shape(
                metrics.get("loss", jnp.zeros(1))):
            raise ConfigError("step must return (state, metrics): the state is a dict of params, "
                              "opt and step, as given, and metrics a dict of numbers with a "
                              "\"loss\"")
        _check_like("the state that step returned", new["params"], self.params,
                    lambda x: f"{x.dtype}{list(x.shape)}")
        check_names(metrics, "step gave one of its metrics", LOGGED - NUMBERS)

    # -- where weights live, and how each loss runs

    def _places(self, overrides):
        """Return a Decision for every array in the trees, considering all losses together."""
        c, parts = self.config, row_groups(self.mesh) * self.config.accumulate
        dtype = c.network.dtype

        def all_losses(params, given):
            sums = [loss_sums(call.loss({**others, **only(params, *call.trees)}, batch))[0]
                    for call, (others, batch) in zip(self.calls, given, strict=True)]
            return sum(sums), sum(sums)

        def given(parts):
            return [(cast(without(call.trees, *self.params), dtype),
                     jax.tree.map(lambda x: x.update(shape=(x.shape[0] // parts, *x.shape[1:])),
                                  call.batch)) for call in self.calls]

        weights = jax.eval_shape(lambda p: cast(p, dtype), self.params)
        decisions = plan_sharding(
            all_losses, weights, given(parts), mesh=self.mesh, fsdp_min=c.fsdp_min,
            overrides=check_overrides(c.override, self.params, self.mesh, overrides))
        return see_matrices(decisions, all_losses, weights, given(1))

    def plan(self, number: int, call: Call) -> Plan:
        """Return the Plan for the call with this number in a trace."""
        if number not in self.plans:
            def init(key):
                return {**optax.tree.zeros_like(call.trees),
                        **only(self.task.init(key), *call.trees)}

            known = only(self.places, *call.trees)
            exactly = [(f"^{re.escape(path)}$", d.spec) for path, d in by_path(known).items()]
            rows = jax.tree.leaves(call.batch)[0].shape[0]
            timed = only(self.task.timed, *call.batch)
            with naming(str(call)):
                plan = make_plan(change(self.config, batch=rows, override=()), self.mesh, init,
                                 call.loss, call.batch, exactly, number not in self.as_one_device,
                                 schedule=self.schedule, learned=call.name, timed=timed)
            decisions = {n: jax.tree.map(lambda d, place: dataclasses.replace(
                d, reason=place.reason), plan.decisions[n], places) for n, places in known.items()}
            self.plans[number] = dataclasses.replace(plan, decisions=plan.decisions | decisions)
        # Each trace makes a new loss function, which may close over different numbers.
        return dataclasses.replace(self.plans[number], loss=with_checked_sums(call.loss)[0])

    # -- what a step calls

    def gradients(self, loss: Callable, trees: Any, name: str, batch: Any) -> tuple[Any, Any]:
        number, call = self.number, Call(loss, _shapes(trees), name, _shapes(batch))
        if self.calls[number][1:] != call[1:]:
            raise ConfigError(f"{call}: the step asks for different gradients than in its first "
                              f"trace; it must not depend on anything that changes")
        self.number += 1
        plan = self.plan(number, call)
        trained, frozen = plan.in_two(trees)
        grads, sums = self.make_gradients(plan)(trained, batch, frozen)
        gradient, numbers = _means(grads[name], sums)
        self.skipped.append(numbers["skipped"])
        return gradient, numbers

    def update(self, state: Any, name: str, gradient: Any) -> Any:
        params, opt = state["params"][name], state["opt"][name]
        updates, new_opt = self.optimizers[name].update(gradient, opt, params)
        rate = self.rate(state["step"])
        new = jax.tree.map(lambda p, u: p - rate * u, params, updates), new_opt
        # A non-finite gradient would ruin every weight permanently.
        learns = jnp.isfinite(optax.tree.norm(gradient))
        params, opt = jax.tree.map(lambda a, b: jnp.where(learns, a.astype(b.dtype), b),
                                   new, (params, opt))
        return {**state, "params": {**state["params"], name: params},
                "opt": {**state["opt"], name: opt}}

    # -- the program

    def program(self) -> Program:
        plan = self.plan(len(self.calls) - 1, self.calls[-1])
        plan = dataclasses.replace(plan, config=self.config, learned=None)

        def step(state, batch):
            # How many calls this trace has made, and whether each loss or gradient wasn't finite.
            self.number, self.skipped = 0, []
            new, metrics = self.step(_of_user(state), batch, self.gradients, self.update)
            usual = {"lr": self.rate(state["step"]), "grad_norm": jnp.float32(0),
                     "tokens": jnp.float32(self.config.batch)}
            skipped = functools.reduce(jnp.maximum, self.skipped)
            return ({**state, "params": new["params"], "opt": new["opt"],
                     "step": state["step"] + 1}, {**usual, **metrics, "skipped": skipped})

        return dataclasses.replace(make_program(plan, self._optimizer(), step,
                                                self.make_evaluate(plan)), own=self)

    def _optimizer(self):
        """Combine the optimizers of all trees into a single optimizer."""
        def init(trees):
            return {name: one.init(trees[name]) for name, one in self.optimizers.items()}

        def update(grads, state, trees):
            found = {name: one.update(grads[name], state[name], trees[name])
                     for name, one in self.optimizers.items()}
            return ({**grads, **{name: updates for name, (updates, _) in found.items()}},
                    {name: new for name, (_, new) in found.items()})

        return optax.GradientTransformation(init, update)

    # -- the check

    def check(self, program: Program, make_batch: Callable, evaluates: Any, say: Callable
              ) -> Program:
        """Check each gradient the step requests, and the evaluation, against a single device.
        Return a program that agrees with it."""
        # Compute it on first use: on a single device nothing uses it.
        made = functools.cache(lambda: self._made(program, make_batch))
        for number, call in enumerate(self.calls):
            with naming(str(call)):
                while (call.name or evaluates) and not self._is_right(number, call, made, say):
                    self.as_one_device.add(number)
                    del self.plans[number]
        return self.program()

    def _is_right(self, number, call, made, say):
        place = NamedSharding(self.mesh, batch_spec(self.mesh))
        plan = self.plan(number, call)

        def init(key):
            return {**plan.init(key), **made()[0][number][0]}

        def batch(at, rows):
            return jax.jit(lambda b: jax.tree.map(lambda x: x[:rows], b),
                           out_shardings=place)(made()[at][number][1])

        return check_loss(dataclasses.replace(plan, init=init), self.make_gradients,
                          None if call.name else self.make_evaluate, batch,
                          lambda text: say(f"{call}: {text}"))

    def _made(self, program, make_batch):
        """Return the batch of each call in each of the first three updates, and the trees that only
        the step computes, all at the initial weights on a single device."""
        def made(state, batch):
            found = []

            def gradients(loss, trees, name, batch):
                found.append((without(trees, *self.params), batch))
                others = without(trees, name)
                sums, grads = untyped(functools.partial(
                    sums_and_gradient, with_checked_sums(loss)[0]))(
                        {name: trees[name]}, others, batch)
                return _means(grads[name], sums)

            self.step(state, batch, gradients, self.update)
            return [*found, ({}, batch)]

        compiled = jax.jit(made, compiler_options=program.plan.compiler_options,
                           out_shardings=NamedSharding(self.mesh, P()))
        state = _of_user(program.start(jax.random.key(self.config.seed), None))
        # Run them one at a time: a CPU's devices could deadlock, waiting for each other.
        return [jax.block_until_ready(compiled(state, make_batch(at, 0))) for at in range(3)]


def _check_config(c, mesh):
    check_batch(c, mesh)
    # With chunks, trees that no loss uses would order their layers differently from the rest.
    for name, usual, why in (
            ("lora_rank", 0, "has no adapters"), ("chunks", 1, "sees layers in their own order"),
            ("ema", 0, "keeps its own average, as a tree that init returns and the step updates")):
        if (value := flat(c)[name]) != usual:
            raise ConfigError(f"--{name} {value:g}: a custom step {why}; leave it out")
    if c.network.dtype == "float16":
        raise ConfigError("--dtype float16: a custom step has no loss scale; give bfloat16")


def _trace():
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


def _of_user(state):
    return only(state, "params", "opt", "step")


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _means(gradient, sums):
    """Return the gradient of the mean, and the numbers to log. If the loss isn't finite or its
    count is 0, that gradient is meaningless, so make it NaN; then `update` changes nothing."""
    total, count, others = sums
    divisor = jnp.where(count == 0, 1, count)
    gradient = jax.tree.map(lambda g: g * (1 / divisor.astype(g.dtype)), gradient)
    norm, is_loss = optax.tree.norm(gradient), jnp.isfinite(total)
    gradient = jax.tree.map(lambda g: jnp.where(is_loss & (count != 0), g, jnp.nan), gradient)
    return gradient, {"loss": total / divisor, "grad_norm": norm, "tokens": count,
                      "skipped": 1 - (jnp.isfinite(norm) & is_loss),
                      **{name: x / divisor for name, x in others.items()}}


def _check_like(what, found, wanted, kind):
    """Reject a tree whose leaves differ from the leaves of `wanted` in path or kind."""
    found, wanted = ({path: kind(x) for path, x in by_path(_shapes(tree)).items()}
                     for tree in (found, wanted))
    for path in [*wanted, *found]:
        a, b = (kinds.get(path, "nothing") for kinds in (found, wanted))
        if a != b:
            raise ConfigError(f"{what} has {a} at {path}, where init returned {b}")
