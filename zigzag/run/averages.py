"""--ema: an average of the weights over updates, which evaluations and checkpoints use.

A state then also has "average". On disk it is the other way round: the checkpoint's params are the
average, which is what sample.py, an export and --init_from read, and the weights themselves lie
beside the optimizer's state, which only training reads.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp


def with_average(step: Callable, ema: float) -> Callable:
    """The step, which also updates the average: it moves by the share 1 - ema from where it is to
    the new weights. In the first updates by more, 9 / (10 + n) in update n, or it would be little
    but the first weights."""
    def averaged(state, batch):
        new, metrics = step(state, batch)
        share = jnp.maximum(1 - ema, 9 / (10 + state["step"]))
        return {**new, "average": jax.tree.map(
            lambda a, w: (a + share * (w - a)).astype(a.dtype), state["average"],
            new["params"])}, metrics

    return averaged if ema else step


def used(state: Any) -> Any:
    """The trained weights that evaluations use."""
    return state.get("average", state["params"])


def to_disk(state: Any) -> Any:
    """The state with the average, if there is one, in the place of the weights."""
    return _exchanged(state, "average", "weights")


def from_disk(state: Any) -> Any:
    """Undoes to_disk."""
    return _exchanged(state, "weights", "average")


def _exchanged(state, name, other):
    """The state with what it has as `name`, if anything, in the place of params, and these as
    `other`."""
    if name not in state:
        return state
    others = {key: x for key, x in state.items() if key != name}
    return {**others, "params": state[name], other: state["params"]}
