"""--ema: an average of the weights over updates, which evaluations and checkpoints use.

With it, a state also has "average". A checkpoint swaps the two: its params are the average, which
sample.py, exports and --init_from read. The weights themselves are stored next to the optimizer's
state, which only training reads.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp


def with_average(step: Callable, ema: float) -> Callable:
    """The step, which then also updates the average: the average moves by the fraction 1 - ema
    toward the new weights. The first updates move it by more, 9 / (10 + n) after n updates;
    otherwise it would be mostly the first weights."""
    def averaged(state, batch):
        new, metrics = step(state, batch)
        share = jnp.maximum(1 - ema, 9 / (10 + state["step"]))
        return {**new, "average": jax.tree.map(
            lambda a, w: (a + share * (w - a)).astype(a.dtype), state["average"],
            new["params"])}, metrics

    return averaged if ema else step


def used(state: Any) -> Any:
    """The trained weights for evaluations: the average, if there is one."""
    return state.get("average", state["params"])


def to_disk(state: Any) -> Any:
    """The state with the average, if there is one, in place of the weights."""
    return _exchanged(state, "average", "weights")


def from_disk(state: Any) -> Any:
    """Undo to_disk."""
    return _exchanged(state, "weights", "average")


def _exchanged(state, name, other):
    """The state with its entry `name` (if any) as params, and its params as `other`."""
    if name not in state:
        return state
    others = {key: x for key, x in state.items() if key != name}
    return {**others, "params": state[name], other: state["params"]}
