"""--accept 0.01: whether a precision is good enough, from a run's first updates.

Each of the first UPDATES updates also computes its loss and gradient in float32, at the same
weights, on the same rows and mesh. Two numbers say how far the run's own precision is from that:

    loss        |loss - loss in float32| / |loss in float32|
    gradient    the norm of the difference of the gradients / the norm of the one in float32

The noise next to each is the same number between float32 values only: this batch's and the previous
batch's, at the same weights. Noise averages out over updates and a wrong loss doesn't, so the limit
applies to the gap of the loss itself. A run above it ends before it saves an update.
"""

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import train
from zigzag.core.errors import ConfigError, RunError
from zigzag.core.flags import change
from zigzag.core.hosts import process_allgather, watchdog
from zigzag.run import modes
from zigzag.run.plan import rewritten, with_checked_sums

# The first update shows errors of rounding. Errors of range need weights that have moved: 32
# updates take a run well into its warmup, for the price of about a hundred updates.
UPDATES = 32


def check(program: Any) -> None:
    """Reject a run with nothing to compare."""
    asked = f"--accept {program.config.accept:g}"
    if program.own:
        raise ConfigError(f"{asked}: no effect on a custom step, fit(step=...); leave it out")
    if program.plan.dtype == "float32":
        raise ConfigError(f"{asked}: this run computes in float32, so there is nothing to compare; "
                          f"leave it out, or give --dtype bfloat16")
    last_compared(program.config, 0)


def watched(loop: Any) -> Callable:
    """Return loop.step, preceded by a comparison with float32 in the first updates."""
    last = last_compared(loop.program.config, loop.at)
    config, step, dtype = loop.program.config, loop.step, loop.program.plan.dtype
    compare, found, before = Comparison(loop.program), [], None

    def watch(state, batch):
        nonlocal before
        if (at := loop.at + 1) <= last:
            with loop.reporter.hours.of("evaluation"):
                loss, exact, *gaps = compare(state, batch, before)
            before = batch
            # With float16, the loss scale may still be too large; then the step halves it.
            overflows = "scale" in state and np.isfinite(loss) and not np.isfinite(gaps[1])
            if overflows:
                gaps[1] = np.nan
            found.append(gaps)
            is_good = gaps[0] <= config.accept and (overflows or np.isfinite(gaps[1]))
            if np.isfinite(exact) and not is_good:
                raise RunError(
                    f"step {at}: the loss is {loss:.6g} in {dtype} and {exact:.6g} in float32, and "
                    f"the gradient differs by {gaps[1]:.2%}: rejected by --accept "
                    f"{config.accept:g}; no update was saved")
        if at == last:
            gap, gradient, *noise = np.fmax.reduce(found)
            loop.reporter.line(
                f"accept   {len(found)} updates in {dtype} and float32: the loss differs by up to "
                f"{gap:.3%} (two batches: {noise[0]:.3%}), the gradient by {gradient:.2%} "
                f"({noise[1]:.2%})")
        return step(state, batch)

    return watch


def last_compared(config: Any, at: int) -> int:
    """Return the last update that a run at step `at` compares. Reject one that would save before
    that update."""
    last = min(at + UPDATES, config.steps)
    for flag, every in ("save_every", config.save_every), ("eval_every", config.eval_every):
        if every and at + every - at % every < last and (flag == "save_every" or config.best):
            raise ConfigError(f"--accept {config.accept:g}: compares {UPDATES} updates before the "
                              f"run saves; give --{flag} {UPDATES} or more, or 0")
    return last


class Comparison:
    """(state, batch, the batch before or None) -> the two losses, the gaps of loss and gradient,
    and the noise of both."""

    def __init__(self, program: Any):
        plan, config = program.plan, change(program.config, dtype="float32")
        loss = plan.loss
        if plan.network:        # its loss casts to the dtype of its config
            loss, _ = with_checked_sums(functools.partial(plan.network.loss, config=config.network))
        exact = dataclasses.replace(plan, config=config, loss=loss, dtype="float32")
        values = rewritten(functools.partial(_values, plan), plan)
        args = program.state["params"], program.state["frozen"], program.batch
        self.low = _compiled(values, plan, *args, program.state.get("scale"))
        self.exact = _compiled(functools.partial(_values, exact), exact, *args)
        process_allgather("compiled")       # before devices first wait for one another

    def __call__(self, state: Any, batch: Any, before: Any) -> np.ndarray:
        watchdog.arm("comparing with float32")
        weights, scale = (state["params"], state["frozen"]), state.get("scale")
        low, exact = self.low(*weights, batch, scale), self.exact(*weights, batch)
        noise = [jnp.nan] * 2 if before is None else _gaps(self.exact(*weights, before), exact)
        found = jax.device_get([low[0], exact[0], *_gaps(low, exact), *noise])
        watchdog.arm("a step")
        return np.array(found)


def _compiled(values, plan, *args):
    return jax.jit(values, compiler_options=plan.compiler_options).lower(*args).compile()


def _values(plan, params, frozen, batch, scale=None):
    """Return the mean loss, and its gradient in float32."""
    precision = "highest" if plan.dtype == "float32" else None
    with jax.default_matmul_precision(precision):
        gradients = modes.unscaled(train.make_gradients(plan), plan)
        grads, (total, count, _) = gradients(params, batch, frozen, scale)
    return total / count, jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads)


@jax.jit
def _gaps(got, exact):
    """Return the relative differences of two losses and of their gradients."""
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, got[1], exact[1]))
    return abs(got[0] - exact[0]) / abs(exact[0]), difference / optax.tree.norm(exact[1])
