"""Many prompts through a few rows: when an answer has ended, a prompt that waits takes its row.

    row 0   | a a a a a a | d d d d d ...
    row 1   | b b | c c c c c c c | e ...
              time ->

All rows share `slot`, the slot of the token that is read next, which grows without end: the cache
is a ring with as many slots as the longest row has tokens. The prompts of new rows are read into a
small cache of their own, and rolled so that they end where the others are. Few programs are
compiled: the passes for all rows, for an eighth of them, and for chunks of a prompt of at most
three lengths.
"""

import collections
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zigzag.core.mesh import row_groups
from zigzag.generate import decoding, passes
from zigzag.generate.decoding import Sampling, mesh_of_weights
from zigzag.generate.passes import Engine
from zigzag.generate.rows import Contexts, padded_length, seeds_of

PIECE = 8       # the most ids that are written before new prompts are looked for
CHUNK = 64      # the most tokens of a prompt that are read at once
NEAR = 16       # prompts are sorted by length among as many as fill the rows 16 times


def in_turn(engine: Engine, params: Any, contexts: Contexts, tokens: int, sampling: Sampling,
            ends: Sequence[int], batch: int, seed: int | Sequence[int],
            has_ended: Callable[[int], Any], logprobs: bool) -> Iterator[list]:
    """The pieces of sample.stream for more prompts than `batch`: at most so many (more if the mesh
    does not divide it) are answered at once. A piece has None for prompts that wait. An answer also
    ends if has_ended(its number) says so, after a piece."""
    rows = Rows(engine, params, contexts, tokens, sampling, ends, seed, batch)
    waiting = collections.deque(_by_length(contexts.rows, NEAR * rows.count))
    answers: list[list[int]] = [[] for _ in contexts.rows]      # their ids so far
    is_done = [False] * len(answers)

    def give(places, pieces):
        """A piece, from those of these rows. A row whose answer has ended is free then; so is one
        whose context is full, and its last half is the first of the prompts that wait."""
        new: list[Any] = [([], []) if done else None for done in is_done]
        for row in places:
            number, (ids, logs) = rows.owners[row], pieces[row]
            left = tokens - len(answers[number])
            new[number] = ids, logs = contexts.add_to(number, ids[:left], logs[:left], ends)
            answers[number] += ids
            is_done[number] = not contexts.unfinished[number] or len(answers[number]) == tokens
            if is_done[number]:
                rows.owners[row] = None
            elif contexts.is_full(number):
                rows.owners[row] = None
                contexts.keep_last_half(number)
                waiting.appendleft(number)
        return new if logprobs else [pair and pair[0] for pair in new]

    while waiting or rows.taken():
        while waiting and (places := rows.next_places()):
            numbers = [waiting.popleft() for _ in range(min(len(places), len(waiting)))]
            begun = [answers[number] for number in numbers]
            yield give(places[:len(numbers)], rows.read(places, numbers, begun))
        for row in rows.taken():
            if has_ended(rows.owners[row]):
                is_done[rows.owners[row]], rows.owners[row] = True, None
        if taken := rows.taken():
            numbers = [rows.owners[row] for row in taken]
            most = min(max(tokens - len(answers[n]) for n in numbers),
                       min(contexts.context + 1 - len(contexts.rows[n]) for n in numbers))
            yield give(taken, rows.write(min(most, PIECE)))


def _by_length(rows, near):
    """The numbers of the rows, sorted by length among each `near` of them."""
    for first in range(0, len(rows), near):
        yield from sorted(range(first, min(first + near, len(rows))), key=lambda n: len(rows[n]))


class Rows:
    """The rows on the devices. `owners` has the number of the prompt that is answered in each, or
    None."""

    def __init__(self, engine: Engine, params: Any, contexts: Contexts, tokens: int,
                 sampling: Sampling, ends: Sequence[int], seed: Any, count: int):
        self.engine, self.sampling, self.ends, self.prompts = (
            engine, sampling, ends, [list(row) for row in contexts.rows])
        self.contexts = contexts
        with mesh_of_weights(params):
            self.params = engine.for_decoding(params)
            padded = engine.arrays(contexts.rows, 0, None)
            self.seeds = seeds_of(padded, seed, count=len(self.prompts))
            mesh = jax.sharding.get_abstract_mesh()
            groups = 1 if mesh.empty else row_groups(mesh)
        self.count = -(-count // groups) * groups
        self.some = -(-self.count // (8 * groups)) * groups
        self.room = min(tokens, contexts.room())
        self.slots = padded_length(max(map(len, contexts.rows)) + self.room)
        self.length = engine.network.decoding_length(
            engine.config, padded["tokens"].shape[1] + self.room, self.slots)
        self.owners: list[int | None] = [None] * self.count
        self.state: Any = None

    def taken(self) -> list[int]:
        return [row for row, owner in enumerate(self.owners) if owner is not None]

    def next_places(self) -> list[int]:
        """The rows that are read next, if so many are free: all or an eighth."""
        free = [row for row, owner in enumerate(self.owners) if owner is None]
        size = self.count if len(free) == self.count else self.some
        return free[:size] if len(free) >= size else []

    def read(self, places: Sequence[int], numbers: Sequence[int], begun: Sequence[Sequence[int]]
             ) -> Any:
        """Read these prompts into rows `places`, of which some may stay free. The answers have
        begun with some ids, if a full context is read again. Returns {row: its next id}."""
        for row, number in zip(places, numbers):
            self.owners[row] = number
        more = len(places) - len(numbers)
        numbers, begun = [*numbers, *numbers[-1:] * more], [*begun, *begun[-1:] * more]
        with mesh_of_weights(self.params):
            rows = self.engine.arrays([self.contexts.rows[n] for n in numbers], 0, None)
            new = decoding.empty_ids(rows, PIECE + 1, self.seeds[numbers], self.ends, self.sampling,
                                     self.engine.config.vocab_size)
            new["begun"] = np.array([-len(ids) for ids in begun], np.int32)
            if "seen" in new:       # (a context that is read again has lost some)
                new["seen"] = np.zeros(new["seen"].shape, bool)
                for row, number, ids in zip(new["seen"], numbers, begun):
                    row[[*self.prompts[number], *ids]] = True
            new, _ = passes.begin(self.engine, self.params, new, rows, self.room, self.sampling,
                                  min(CHUNK, rows["tokens"].shape[1]), self.slots, self.length)
            if len(places) == self.count:
                self.state = new
            else:
                at = np.array([*places[:len(places) - more], *[self.count] * more], np.int32)
                self.state = put_rows(keep_last_ids(self.state, np.array(False)), new, at)
        return passes.new_ids(self.state, 0, 1)[0]

    def write(self, steps: int) -> Any:
        """Write this many ids in each row that is taken. Returns {row: its next ids}."""
        ended, limit = np.array([owner is None for owner in self.owners]), np.int32(1 + steps)
        with mesh_of_weights(self.params):
            self.state = passes.decode(
                self.engine, self.params, keep_last_ids(self.state, ended), limit, self.length,
                self.sampling)
        return passes.new_ids(self.state, 1, 1 + steps)[0]


@jax.jit(donate_argnames="state")
def keep_last_ids(state: dict[str, Any], ended: Any) -> dict[str, Any]:
    """The state with only the last id of each row, as its first; and with these rows ended."""
    done = state["count"] - 1
    last = {name: state[name].at[:, 0].set(jnp.take(state[name], done, 1))
            for name in ("ids", "logprobs")}
    return state | last | {"count": jnp.ones_like(done), "begun": state["begun"] - done,
                           "ended": state["ended"] | ended}


@jax.jit(donate_argnames="state")
def put_rows(state: dict[str, Any], new: dict[str, Any], places: Any) -> dict[str, Any]:
    """The state with the rows of another at these places; those beyond its end are dropped. Both
    have one new id in each row."""
    def put(rows, new):
        return rows.at[places].set(new, mode="drop")

    moved = state["slot"] - new["slot"]
    cache = [{name: put(layer[name], jnp.roll(of_new[name], moved, 2)) for name in layer}
             for layer, of_new in zip(state["cache"], new["cache"], strict=True)]
    new = new | {"start": new["start"] + moved}
    return state | {"cache": cache} | {
        name: put(state[name], new[name]) for name in state
        if name not in decoding.REPLICATED and name != "cache"}
