"""Many prompts through a few rows: when an answer has ended, a prompt that waits takes its row.

    row 0   | a a a a a a | d d d d d ...
    row 1   | b b | c c c c c c c | e ...
              time ->

All rows share `slot`, the slot of the token that is read next, which grows without end: the cache
is a ring with as many slots as the longest row has tokens. The prompts of new rows are read into a
small cache of their own, and rolled so that they end where the others are. Few programs are
compiled: the passes for all rows, for an eighth of them, and for chunks of a prompt of at most
three lengths.

If positions scale with a row's length (Network.decoding_length), only prompts of one such length
are answered together, so that an answer does not depend on the other prompts.
"""

import collections
import functools
from typing import Any, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import batch_spec, row_groups
from zigzag.generate import decoding, passes
from zigzag.generate.decoding import Sampling, mesh_of_weights
from zigzag.generate.passes import Engine
from zigzag.generate.rows import Contexts, content_of, pad_rows, padded_length, seeds_from

PIECE = 8       # the most ids that are written before new prompts are looked for
CHUNK = 64      # the most tokens of a prompt that are read at once
NEAR = 4        # prompts are sorted by length among as many as fill the rows 4 times
HASHED = 1024   # prompts that are made arrays at once, for their seeds


def in_turn(engine: Engine, params: Any, contexts: Contexts, tokens: int, sampling: Sampling,
            ends: Sequence[int], batch: int, seed: int | Sequence[int], piece: int,
            logprobs: bool) -> Iterator[list]:
    """The pieces of sample.stream for more prompts than `batch`: at most `batch` (more if the mesh
    does not divide it) are answered at once. A piece has None for prompts without new ids."""
    if batch < 1:
        raise ConfigError(f"batch {batch}: must be at least 1")
    rows = Rows(engine, params, contexts, tokens, sampling, ends, seed, batch)
    waiting: dict[int, collections.deque] = {}      # {length for positions: prompts}
    for number in _by_length(contexts.rows, NEAR * rows.count):
        waiting.setdefault(rows.length_of(number), collections.deque()).append(number)
    answers: list[list[int]] = [[] for _ in contexts.rows]      # their ids so far

    def give(places, pieces):
        """The piece to yield, from the new ids of the rows at these places. It frees the rows whose
        answer has ended. A row with a full context is freed too, and its last half goes to the
        front of the queue."""
        new: list[Any] = [None if goes_on else ([], []) for goes_on in contexts.goes_on]
        for row in places:
            number, (ids, logs) = rows.owners[row], pieces[row]
            left = tokens - len(answers[number])
            new[number] = ids, logs = contexts.add_to(number, ids[:left], logs[:left], ends)
            answers[number] += ids
            contexts.goes_on[number] &= len(answers[number]) < tokens
            if not contexts.goes_on[number]:
                rows.owners[row] = None
            elif contexts.is_full(number):
                rows.owners[row] = None
                contexts.keep_last_half(number)
                queue = waiting.setdefault(rows.length_of(number), collections.deque())
                queue.appendleft(number)
        return new if logprobs else [pair and pair[0] for pair in new]

    def next_numbers(count):
        """The next prompts that wait, at most `count`. (One may have ended meanwhile.)"""
        found, queue = [], waiting[rows.length]
        while queue and len(found) < count:
            number = queue.popleft()
            found += [number] if contexts.goes_on[number] else []
        return found

    def free_ended():
        """Free the rows of answers that have all that they need."""
        goes_on = contexts.unfinished
        for row in rows.taken():
            if not goes_on[rows.owners[row]]:
                rows.owners[row] = None

    while waiting:
        rows.length = next(iter(waiting))
        while waiting[rows.length] or rows.taken():
            while waiting[rows.length] and (places := rows.next_places()):
                if numbers := next_numbers(len(places)):
                    begun = [answers[number] for number in numbers]
                    yield give(places[:len(numbers)], rows.read(places, numbers, begun))
                    free_ended()
            if taken := rows.taken():
                numbers = [rows.owners[row] for row in taken]
                most = min(max(tokens - len(answers[n]) for n in numbers),
                           min(contexts.context + 1 - len(contexts.rows[n]) for n in numbers))
                yield give(taken, rows.write(min(most, piece, PIECE)))
                free_ended()
        del waiting[rows.length]


def _by_length(rows, near):
    """The numbers of the rows, sorted by length among each `near` of them."""
    for first in range(0, len(rows), near):
        yield from sorted(range(first, min(first + near, len(rows))), key=lambda n: len(rows[n]))


class Rows:
    """The rows on the devices. `owners` has the number of the prompt that is answered in each, or
    None. `length` is that of positions, of all prompts that are being answered."""

    def __init__(self, engine: Engine, params: Any, contexts: Contexts, tokens: int,
                 sampling: Sampling, ends: Sequence[int], seed: Any, count: int):
        self.engine, self.sampling, self.ends, self.contexts = engine, sampling, ends, contexts
        self.prompts = [list(row) for row in contexts.rows]
        self.tokens, self.length, self.state = tokens, 0, None
        with mesh_of_weights(params):
            self.params = engine.for_decoding(params)
            parts = [self.prompts[at:at + HASHED] for at in range(0, len(self.prompts), HASHED)]
            content = np.concatenate([content_of(engine.arrays(part, 0, None))[:len(part)]
                                      for part in parts])
            self.seeds = seeds_from(pad_rows(content), seed, count=len(self.prompts))
            mesh = jax.sharding.get_abstract_mesh()
            groups = 1 if mesh.empty else row_groups(mesh)
        self.count = -(-count // groups) * groups
        self.some = -(-self.count // (8 * groups)) * groups
        self.slots = padded_length(max(len(row) + self._room(row) for row in contexts.rows))
        self.owners: list[int | None] = [None] * self.count

    def _room(self, row):
        return min(self.tokens, self.contexts.context + 1 - len(row))

    def length_of(self, number: int) -> int:
        """The length on which the scaling of a prompt's positions depends, as if it were alone."""
        row = self.contexts.rows[number]
        return self.engine.network.decoding_length(
            self.engine.config, padded_length(len(row)) + self._room(row), self.slots)

    def taken(self) -> list[int]:
        return [row for row, owner in enumerate(self.owners) if owner is not None]

    def next_places(self) -> list[int]:
        """The rows that are read next: all if all are free, else some if an eighth is free."""
        free = [row for row, owner in enumerate(self.owners) if owner is None]
        if len(free) == self.count:
            return free
        return free[:self.some] if len(free) >= max(1, self.count // 8) else []

    def read(self, places: Sequence[int], numbers: Sequence[int], begun: Sequence[Sequence[int]]
             ) -> list[tuple[list, list]]:
        """Read these prompts into rows `places`, of which some may stay free. The answers have
        begun with some ids, if a full context is read again. Returns the next id of all rows, with
        its log-probability."""
        is_all = not self.taken()
        for row, number in zip(places, numbers):
            self.owners[row] = number
        size = self.count if is_all else self.some
        more = size - len(numbers)
        at = np.array([*places[:len(numbers)], *[self.count] * more], np.int32)
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
            if is_all:
                self.state = None       # (its memory is the new one's)
            new, _ = passes.begin(self.engine, self.params, new, rows, 0, self.sampling,
                                  min(CHUNK, rows["tokens"].shape[1]), self.slots, self.length)
            self.state = new if is_all else put_rows(
                self.engine, keep_last_ids(self.state, np.array(False)), new, at)
        return passes.new_ids(self.state, 0, 1)[0]

    def write(self, steps: int) -> list[tuple[list, list]]:
        """Write this many ids in each row that is taken. Returns the next ids of all rows, with
        their log-probabilities."""
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


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="state")
def put_rows(engine: Engine, state: dict[str, Any], new: dict[str, Any], places: Any
             ) -> dict[str, Any]:
    """The state with the rows of another at these places; those beyond its end are dropped. Both
    have one new id in each row."""
    def put(rows, new):
        return rows.at[places].set(new, mode="drop")

    moved = state["slot"] - new["slot"]
    cache = [{name: put(layer[name], jnp.roll(of_new[name], moved, 2)) for name in layer}
             for layer, of_new in zip(state["cache"], new["cache"], strict=True)]
    new = new | {"start": new["start"] + moved}
    others = {name: put(state[name], new[name]) for name in state
              if name not in decoding.REPLICATED and name != "cache"}
    if (specs := engine.specs) is not None:     # where the other passes have them
        cache = decoding.placed_cache(cache, engine.network.cache_layers(engine.config), specs)
        rows = batch_spec(jax.sharding.get_abstract_mesh())
        others = decoding.placed(others, dict.fromkeys(others, rows))
    return state | {"cache": cache} | others
