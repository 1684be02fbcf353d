"""How decoding chooses an id.

If a mesh splits the rows, all devices keep going until the last row ends, because they may need to
gather weights together.
"""

import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import varying

# {name: array of rows}; passes.py lists the names.
State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose an id: the options of `generate` that jax compiles into the loop."""
    temperature: float = 1.0            # 0: greedy
    top_k: int = 0                      # keep the k most likely ids; 0: all
    top_p: float = 1.0                  # keep the most likely ids, up to this total probability
    min_p: float = 0.0                  # keep ids with this fraction of the largest probability
    repetition_penalty: float = 1.0     # divides old ids' logits if positive, else multiplies them

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1
                and 0 <= self.min_p <= 1 and self.repetition_penalty > 0):
            raise ConfigError(f"{self}: temperature and top_k must be 0 or more, top_p above 0 and "
                              f"at most 1, min_p from 0 to 1, and repetition_penalty above 0")


GREEDY = Sampling(temperature=0)


def sampling_of(sampling: Sampling | float, changes: dict[str, Any]) -> Sampling:
    """Return the Sampling with these changes. A number means a Sampling with that temperature."""
    if isinstance(sampling, Sampling):
        return dataclasses.replace(sampling, **changes)
    return Sampling(temperature=sampling, **changes)


def end_ids(ends: Any, vocab_size: int) -> list[int]:
    """Return the ids in `ends` (a single id, several or None) that are in the vocabulary."""
    return [int(i) for i in np.ravel([] if ends is None else ends) if 0 <= i < vocab_size]


def penalised(logits: Array, seen: Array, penalty: float) -> Array:
    """Return the logits [B, V], lowered for the ids in `seen` [B, V]."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def ids_seen(rows: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Return whether each id appears in each of these rows, [B, V]."""
    seen = np.zeros((len(rows), vocab_size), bool)
    for of_row, ids in zip(seen, rows):
        of_row[ids] = True
    return seen


def before_ids(seeds: Any, ends: Sequence[int], count: Any = 0) -> State:
    """Return the state of rows with these seeds [B, 3] before the next id is chosen. Each row
    already has `count` [B] new ids."""
    return {"seeds": seeds, "count": np.zeros(len(seeds), np.int32) + np.array(count, np.int32),
            "ended": np.zeros(len(seeds), bool),
            # Pad to 8 ends with -1, which isn't a valid id, so that new ends don't recompile.
            "ends": np.array([*ends, *[-1] * max(1, 8 - len(ends))], np.int32)}


def keys_of(seeds: Array, count: Array | int) -> Array:
    """Return the random keys [B] for new id number `count` (a single number for all rows, or [B])
    of rows with these seeds [B, 3]."""
    return jax.vmap(lambda seed, count: functools.reduce(
        jax.random.fold_in, (seed[1], seed[2], count), jax.random.key(seed[0])))(
            seeds, jnp.broadcast_to(count, len(seeds)))


def choose(state: State, logits: Array, sampling: Sampling, draw: Callable) -> tuple[State, Array]:
    """Choose an id for each row from these logits [B, V] with draw (sample.draw). Return the state
    with the chosen ids as `newest`, and their log-probabilities [B]. Rows that have ended get ids
    too, but nothing reads them."""
    has_penalty = "seen" in state
    scores = penalised(logits, state["seen"], sampling.repetition_penalty
                       ) if has_penalty else logits
    ids = draw(scores, keys_of(state["seeds"], state["count"]), sampling)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1)[:, 0]
    new = {"newest": ids, "count": state["count"] + 1,
           "ended": state["ended"] | (ids[:, None] == state["ends"]).any(-1)}
    if has_penalty:
        new["seen"] = state["seen"] | (jnp.arange(logits.shape[1]) == ids[:, None])
    return state | new, logprobs


def any_device(x: Array) -> Array:
    """Return whether x contains a True on any device."""
    x, axes = x.any(), tuple(sorted(varying(x)))
    return lax.pmax(x.astype(jnp.int32), axes) > 0 if axes else x
