"""What is compiled, or ready to be, to train with a loss on a mesh."""

import dataclasses
import functools
import hashlib
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zigzag import lora
from zigzag.mesh import batch_spec, by_path, cast, shardings
from zigzag.plan import JIT, Plan
from zigzag.rule import state_specs
from zigzag.storage import permute_layers


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    plan: Plan
    state: Any              # shapes with their places: params, opt, step
    batch: Any              # the same for a batch
    start: Any              # key, and weights in place of init's if there are any -> state
    step: Any               # state, batch -> state, metrics
    evaluate: Any           # params, batch -> (sum, count, other sums)

    @property
    def config(self) -> Any:
        return self.plan.config

    @property
    def mesh(self) -> Any:
        return self.plan.mesh

    def permute(self, state: Any, back: bool = False) -> Any:
        """A state, what is saved of it, or the params of either, with layers in the order of the
        pipeline's stages, or (`back`) in their own, in which they are saved."""
        chunks = 1 if self.plan.mode == JIT else self.config.chunks
        states = self.state, self.saved(self.state)
        like = next(x for s in states for x in (s, s["params"])
                    if jax.tree.structure(x) == jax.tree.structure(state))
        return permute_layers(state, jax.tree.map(lambda x: x.sharding, like), chunks, back)

    def saved(self, state: Any) -> Any:
        """What a checkpoint has of a state: frozen weights come again from where they came from."""
        return {**state, "params": self.plan.split(state["params"])[0]}

    def restored(self, saved: Any, first: Any) -> Any:
        """The state of which this was saved; `first` is a state that the run began with."""
        return {**saved, "params": lora.join(saved["params"],
                                             first and self.plan.split(first["params"])[1])}


def make_program(plan: Plan, optimizer: Any, step: Callable, evaluate: Callable) -> Program:
    """`step` and `evaluate`, ready to be compiled for the places of everything they are given."""
    mesh, c = plan.mesh, plan.config

    def start(key, weights=None):
        """The state of a run that begins, with these weights (adapters aside) or with init's."""
        params = plan.init(key)
        if weights is not None:
            adapters, _ = plan.split(params)
            params = lora.join(adapters, cast(weights, c.dtype)) if c.lora_rank else weights
        return {"params": params, "opt": optimizer.init(plan.split(params)[0]),
                "step": jnp.zeros((), jnp.int32)}

    opt = state_specs(optimizer, plan.split(plan.params)[0], plan.moments)
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
    """By which a run that continues knows its weights."""
    text = str([(path, w.shape, str(w.dtype)) for path, w in by_path(params).items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
