"""A step of one's own, fit(step=...): for several networks or losses, and for what a run keeps
beside its weights (an average, statistics, a buffer).

    init(key) -> {name: tree}       the networks, and everything else that the run keeps
    step(state, batch, gradients, update) -> state, metrics

        state                               {"params": {name: tree}, "opt": ..., "step": number}
        gradients(loss, trees, name, batch) the gradient, with respect to trees[name], of the mean
                                            of loss(trees, batch), and a dict of numbers to log
        update(state, name, gradient)       the state after the optimizer's update of that tree

Only the losses run in pieces, inside train.make_step's shard_map. Everything else in a step is
ordinary jax on whole arrays, which the compiler splits. How a step is prepared:

    asked       the step is traced once with shapes, to see which gradients it asks for
    places      the rule sees all losses together, so each weight has one place for all of them
    planned     each loss, with the tree in which its gradient is taken, has a Plan of its own
    check       each of them is compared with one device, on batches that the step makes
"""

import dataclasses
import functools
import re
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, did_you_mean, named
from zigzag.core.flags import change
from zigzag.core.mesh import batch_spec, by_path, cast, flatten, row_groups, untyped
from zigzag.rule.rule import plan_sharding
from zigzag.run.checks import check_batch, check_overrides
from zigzag.run.custom_loss import check_loss, sums_and_gradient
from zigzag.run.plan import (
    Plan,
    Program,
    loss_sums,
    make_plan,
    make_program,
    resolve_dtype,
    see_matrices,
    with_checked_sums,
)


class Asked(NamedTuple):
    """A gradient that a step asks for."""
    loss: Callable
    trees: Any              # shapes
    name: str               # of the tree in which the gradient is taken
    batch: Any              # shapes

    @property
    def key(self) -> Any:
        """Equal for the same call in another trace, where a lambda is another object."""
        loss = self.loss
        while isinstance(loss, functools.partial):
            loss = loss.func
        return getattr(loss, "__code__", loss), self.name, str((self.trees, self.batch))

    def __str__(self) -> str:
        return f"gradients({getattr(self.loss, '__name__', 'loss')}, ..., {self.name!r}, ...)"


class OwnStep:
    """A step of the user's, and what is planned for it.

    schedule(step)                      the learning rate
    make_optimizer(config, decisions, name)     the optimizer of a tree
    make_gradients(plan)                the device half of train.make_step"""

    def __init__(self, step: Callable, config: Any, mesh: Any, init: Callable, loss: Callable,
                 batch: Any, overrides: Sequence[tuple[str, P]], schedule: Callable,
                 make_optimizer: Callable, make_gradients: Callable):
        self.step, self.mesh, self.init, self.schedule = step, mesh, init, schedule
        self.config = resolve_dtype(config, mesh)
        self.make_gradients = make_gradients
        check_batch(self.config, mesh)
        if config.lora_rank:
            raise ConfigError("--lora_rank: a step of one's own has no adapters; leave it out")
        if config.ema:
            raise ConfigError(f"--ema {config.ema:g}: a step of one's own keeps its own average, "
                              f"as a tree of init's that the step updates; leave it out")
        self.params = jax.eval_shape(init, jax.random.key(0))
        if not isinstance(self.params, dict) or not all(isinstance(n, str) for n in self.params):
            raise ConfigError("with a step of one's own, init(key) must return a dict "
                              "{name: tree}, with a tree for each network")
        self.asked, self.updated = [], []
        self.metrics = self._record(batch)
        self.evaluated = Asked(loss, self.params, self.asked[0].name if self.asked else "", batch)
        self.places = self._places(overrides)
        self.optimizers = {name: make_optimizer(self.config, self.places[name], name)
                           for name in self.updated}
        self.plans, self.as_one_device = {}, set()

    # -- the first trace, with shapes alone

    def _record(self, batch):
        """Fill `asked` and `updated`; the shapes of the step's metrics."""
        def gradients(loss, trees, name, batch):
            asked = Asked(loss, *_shapes((trees,)), name, *_shapes((batch,)))
            _check_asked(asked, trees, batch)
            self.asked.append(asked)
            return _means(jax.tree.map(jnp.zeros_like, trees[name]),
                          loss_sums(loss(trees, batch)))

        def update(state, name, gradient):
            self._check_update(name, gradient)
            if name not in self.updated:
                self.updated.append(name)
            return state

        state = {"params": self.params, "opt": {}, "step": jax.ShapeDtypeStruct((), jnp.int32)}
        new, metrics = jax.eval_shape(lambda s, b: _pair(self.step(s, b, gradients, update)),
                                      state, batch)
        self._check_state(new)
        if not self.asked:
            raise ConfigError("step asked for no gradients: call gradients(loss, trees, name, "
                              "batch) in it")
        if not isinstance(metrics, dict) or "loss" not in metrics:
            raise ConfigError("step must return (state, metrics), with metrics a dict that has a "
                              "\"loss\" among its numbers")
        return metrics

    def _check_update(self, name, gradient):
        if name not in self.params:
            raise ConfigError(f"update(state, {name!r}, ...): init returned no tree of this name"
                              + did_you_mean(str(name), self.params))
        _check_like(f"the gradient that update(state, {name!r}, ...) is given", gradient,
                    self.params[name])

    def _check_state(self, new):
        if not isinstance(new, dict) or not {"params", "opt", "step"} <= new.keys():
            raise ConfigError("step must return (state, metrics), with the state as it was given: "
                              "a dict of params, opt and step")
        _check_like("the state that step returned", new["params"], self.params)

    # -- where weights live

    def _places(self, overrides):
        """A Decision for every array of the trees, from all losses together."""
        c, parts = self.config, row_groups(self.mesh) * self.config.accumulate
        pairs = [*self.asked, self.evaluated]

        def all_losses(params, given):
            sums = [loss_sums(pair.loss({**others, **{n: params[n] for n in pair.trees
                                                      if n in params}}, batch))[0]
                    for pair, (others, batch) in zip(pairs, given, strict=True)]
            return sum(sums), sum(sums)

        def given(parts):
            return [(cast({n: x for n, x in pair.trees.items() if n not in self.params}, c.dtype),
                     jax.tree.map(lambda x: x.update(shape=(x.shape[0] // parts, *x.shape[1:])),
                                  pair.batch)) for pair in pairs]

        weights = jax.eval_shape(lambda p: cast(p, c.dtype), self.params)
        decisions = plan_sharding(
            all_losses, weights, given(parts), mesh=self.mesh, fsdp_min=c.fsdp_min,
            overrides=check_overrides(c.override, self.params, self.mesh, overrides))
        return see_matrices(decisions, all_losses, weights, given(1))

    def planned(self, asked: Asked) -> Plan:
        """The Plan of a loss and the tree in which its gradient is taken."""
        if asked.key not in self.plans:
            self.plans[asked.key] = self._plan(asked)
        # (Another trace may have a loss of the same code that closes over other numbers.)
        return dataclasses.replace(self.plans[asked.key], loss=with_checked_sums(asked.loss)[0])

    def _plan(self, asked):
        rows = jax.tree.leaves(asked.batch)[0].shape[0]
        others = {n: x for n, x in asked.trees.items() if n not in self.params}

        def init(key):
            known = {n: x for n, x in self.init(key).items() if n in asked.trees}
            return {**known, **jax.tree.map(
                lambda x, key: jax.random.normal(key, x.shape).astype(x.dtype),
                others, optax.tree.split_key_like(key, others))}

        known = {n: d for n, d in self.places.items() if n in asked.trees}
        exactly = [(f"^{re.escape(path)}$", d.spec) for path, d in by_path(known).items()]
        with named(str(asked)):
            plan = make_plan(change(self.config, batch=rows, override=()), self.mesh, init,
                             asked.loss, asked.batch, exactly,
                             asked.key not in self.as_one_device, schedule=self.schedule,
                             learned=asked.name)
        paths, decisions, tree = flatten(plan.decisions)
        reasons = {path: d.reason for path, d in by_path(known).items()}
        return dataclasses.replace(plan, decisions=jax.tree.unflatten(tree, [
            dataclasses.replace(d, reason=reasons.get(path, d.reason))
            for path, d in zip(paths, decisions)]))

    # -- what a step calls

    def gradients(self, loss: Callable, trees: Any, name: str, batch: Any) -> tuple[Any, Any]:
        plan = self.planned(Asked(loss, *_shapes((trees,)), name, *_shapes((batch,))))
        trained, frozen = plan.in_two(trees)
        grads, sums = self.make_gradients(plan)(trained, batch, frozen)
        return _means(grads[name], sums)

    def update(self, state: Any, name: str, gradient: Any) -> Any:
        self._check_update(name, gradient)
        params, opt = state["params"][name], state["opt"][name]
        updates, new_opt = self.optimizers[name].update(gradient, opt, params)
        rate = self.schedule(state["step"])
        new = jax.tree.map(lambda p, u: p - rate * u, params, updates), new_opt
        # (A gradient that is not finite would spoil every weight for good.)
        learns = jnp.isfinite(optax.tree.norm(gradient))
        params, opt = jax.tree.map(lambda a, b: jnp.where(learns, a.astype(b.dtype), b),
                                   new, (params, opt))
        return {**state, "params": {**state["params"], name: params},
                "opt": {**state["opt"], name: opt}}

    # -- the program

    def program(self, make_evaluate: Callable) -> Program:
        plan = self._plan(self.evaluated._replace(name=""))
        plan = dataclasses.replace(plan, config=self.config)

        def step(state, batch):
            own = {name: state[name] for name in ("params", "opt", "step")}
            new, metrics = _pair(self.step(own, batch, self.gradients, self.update))
            self._check_state(new)
            usual = {"lr": self.schedule(state["step"]), "grad_norm": jnp.float32(0),
                     "tokens": jnp.float32(self.config.batch),
                     "skipped": 1 - jnp.isfinite(metrics["loss"])}
            return ({**state, "params": new["params"], "opt": new["opt"],
                     "step": state["step"] + 1}, {**usual, **metrics})

        return dataclasses.replace(make_program(plan, self._optimizer(), step,
                                                make_evaluate(plan)), own=self)

    def _optimizer(self):
        """The optimizers of all trees as one."""
        def init(trees):
            return {name: one.init(trees[name]) for name, one in self.optimizers.items()}

        def update(grads, state, trees):
            found = {name: one.update(grads[name], state[name], trees[name])
                     for name, one in self.optimizers.items()}
            return ({**grads, **{name: updates for name, (updates, _) in found.items()}},
                    {name: new for name, (_, new) in found.items()})

        return optax.GradientTransformation(init, update)

    # -- the check

    def check(self, program: Program, make_evaluate: Callable, make_batch: Callable,
              evaluates: bool, say: Callable) -> None:
        """Compare every gradient that the step asks for, and the evaluation, with one device."""
        made = self._batches(program, make_batch)
        pairs = [(pair, [batches[i] for batches in made], False)
                 for i, pair in enumerate(self.asked)]
        if evaluates:
            held = [make_batch(at, 0) for at in range(len(made))]
            pairs.append((self.evaluated, held, True))
        for pair, batches, is_held_out in pairs:
            def batch(at, rows, batches=batches):
                place = NamedSharding(self.mesh, batch_spec(self.mesh))
                return jax.jit(lambda b: jax.tree.map(lambda x: x[:rows], b),
                               out_shardings=place)(batches[at])

            with named("the loss that fit evaluates" if is_held_out else str(pair)):
                while not check_loss(self.planned(pair), self.make_gradients, make_evaluate,
                                     batch, is_held_out, say):
                    self.as_one_device.add(pair.key)
                    del self.plans[pair.key]

    def _batches(self, program, make_batch):
        """For each of the first updates, the batches for which the step asks for gradients, at new
        weights and on one device."""
        def batches(state, batch):
            found = []

            def gradients(loss, trees, name, batch):
                found.append(batch)
                others = {n: x for n, x in trees.items() if n != name}
                sums, grads = untyped(functools.partial(
                    sums_and_gradient, with_checked_sums(loss)[0]))(
                        {name: trees[name]}, others, batch)
                return _means(grads[name], sums)

            self.step(state, batch, gradients, self.update)
            return found

        state = program.start(jax.random.key(self.config.seed), None)
        own = {name: state[name] for name in ("params", "opt", "step")}
        compiled = jax.jit(batches, compiler_options=program.plan.compiler_options,
                           out_shardings=NamedSharding(self.mesh, P()))
        return [compiled(own, make_batch(at, 0)) for at in range(3)]


def _shapes(trees):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), trees)


def _means(gradient, sums):
    """The gradient of the mean, and the numbers to log."""
    total, count, others = sums
    divisor = jnp.where(count == 0, 1, count)
    gradient = jax.tree.map(lambda g: g * (1 / divisor.astype(g.dtype)), gradient)
    norm = optax.tree.norm(gradient)
    is_finite = jnp.isfinite(norm) & jnp.isfinite(total)
    return gradient, {"loss": total / divisor, "grad_norm": norm, "tokens": count,
                      "skipped": 1 - is_finite,
                      **{name: x / divisor for name, x in others.items()}}


def _pair(result):
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError("step must return (state, metrics)")
    return result


def _check_asked(asked, trees, batch):
    if not isinstance(trees, dict) or asked.name not in trees:
        raise ConfigError(f"{asked}: trees must be a dict {{name: tree}}, and have this name; "
                          f"state[\"params\"] for example")
    rows = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if not isinstance(batch, dict) or len(rows) != 1 or rows == {()}:
        raise ConfigError(f"{asked}: batch must be a dict of arrays with the same number of rows")
    constants = jax.make_jaxpr(asked.loss)(asked.trees, asked.batch).consts
    if any(isinstance(x, jax.core.Tracer) for x in constants):
        raise ConfigError(f"{asked}: the loss closes over an array that the step has computed; a "
                          f"device would not have its own part of it: give it to the loss in "
                          f"trees, or in batch if it has a row for each example")


def _check_like(what, found, wanted):
    """Refuse a tree that has not the structure, shapes and dtypes of another."""
    found, wanted = by_path(_shapes(found)), by_path(_shapes(wanted))
    for path in [*wanted, *found]:
        a, b = (f"{t[path].dtype}{list(t[path].shape)}" if path in t else "nothing"
                for t in (found, wanted))
        if a != b:
            raise ConfigError(f"{what} has {a} at {path}, where init returned {b}")
