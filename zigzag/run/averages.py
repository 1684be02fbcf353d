"""--ema: a running average of the weights, which evaluations and checkpoints use.

With --ema, a state also has "average". A checkpoint swaps it with the weights: its params are the
average, which sample.py, exports and --init_from read. It stores the weights themselves next to the
optimizer's state, which only training reads.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp

from zigzag.core.options import without


def with_average(step: Callable, ema: float) -> Callable:
    """Extend the step to update the average, which moves by the fraction 1 - ema toward the new
    weights. Early updates move it further, by 9 / (10 + n) after n updates; otherwise it would
    consist mostly of the first weights."""
    def averaged(state, batch):
        new, metrics = step(state, batch)
        share = jnp.maximum(1 - ema, 9 / (10 + state["step"]))
        return {**new, "average": jax.tree.map(
            lambda a, w: (a + share * (w - a)).astype(a.dtype), state["average"],
            new["params"])}, metrics

    return averaged if ema else step


def used(state: Any) -> Any:
    """Return the trained weights for evaluations: the average, if there is one."""
    return state.get("average", state["params"])


def to_disk(state: Any) -> Any:
    """Return the state with the average, if any, in place of the weights."""
    return _exchanged(state, "average", "weights")


def from_disk(state: Any) -> Any:
    """Undo to_disk."""
    return _exchanged(state, "weights", "average")


def _exchanged(state, name, other):
    """Rename the state's entry `name`, if any, to params, and its params to `other`."""
    if name not in state:
        return state
    return {**without(state, name), "params": state[name], other: state["params"]}
