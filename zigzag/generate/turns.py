"""Prompts through a few rows: when an answer has ended, a prompt that waits takes its row.

    row 0   | a a a a a a | d d d d d ...
    row 1   | b b | c c c c c c c | e ...
              time ->

All rows share `slot`, the slot of the token that is read next, which grows without end: the cache
is a ring with as many slots as the longest row has tokens. The prompts of new rows are read into a
small cache of their own, and rolled so that they end where the others are. A row whose context is
full is freed too, and what is left of its text waits to be read again. Few programs are compiled:
the passes for all rows, for an eighth of them, and, if prompts wait, for chunks of a prompt of at
most three lengths.

If positions scale with a row's length (Network.decoding_length), only prompts of one such length
are answered together, so that an answer does not depend on the other prompts.
"""

import collections
import dataclasses
import functools
from typing import Any, Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import row_groups
from zigzag.generate import cache as kv_cache
from zigzag.generate import decoding, passes
from zigzag.generate.decoding import Sampling, mesh_of_weights
from zigzag.generate.passes import Engine
from zigzag.generate.rows import (
    check_ids,
    check_writes,
    content_hash,
    context_of,
    cut_at_end,
    on_host,
    padded_length,
    padded_prompts,
    seeds_from,
    source_arrays,
)

# While prompts wait: the most ids that are written before others are looked for, and the most
# tokens of a prompt that are read at once.
PIECE, CHUNK = 8, 64
NEAR = 4        # prompts are sorted by length among as many as fill the rows 4 times
Found = Iterable[tuple["Text", list[int], list[float]]]     # new ids and their log-probabilities


@dataclasses.dataclass(eq=False)
class Text:
    """A prompt and its answer."""
    number: int             # the prompt's
    ids: list[int]          # those of the prompt that fit into the context, then the new ones
    left: int               # how many new ids it may still get
    count: int = 0          # how many it has
    begin: int = 0          # where its context begins in ids
    length: int = 0         # Network.decoding_length
    goes_on: bool = True

    @property
    def size(self) -> int:
        return len(self.ids) - self.begin

    def add(self, ids: list[int], logs: list[float], ends: Sequence[int]
            ) -> tuple[list[int], list[float]]:
        """Add the next ids up to the first one in `ends`, and return them."""
        kept = cut_at_end(ends, ids)[:self.left]
        self.ids += kept
        self.left -= len(kept)
        self.count += len(kept)
        self.goes_on = len(kept) == len(ids) and self.left > 0
        return kept, logs[:len(kept)]


def texts_of(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, stop_at_context: bool,
             say: Callable[[str], Any]) -> list[Text]:
    """The prompts as Texts. `say` reports what does not fit into the context."""
    check_writes(engine.network, engine.config, "sample")
    if tokens < 0:
        raise ConfigError(f"tokens {tokens}: must be at least 0")
    longest = check_ids("prompt", prompts, engine.config)
    size = context_of(engine.network, engine.config)
    if longest > size:
        say(f"a prompt has {longest:,} tokens, and the context of this model is {size:,}: the "
            f"last {size:,} are read")
    if min(longest, size) + tokens - 1 > size and not stop_at_context:
        say(f"the context of this model is {size:,} tokens: a text that fills it goes on from "
            f"its last {max(1, size // 2):,} (--stop_at_context ends it there)")
    rows = [list(prompt[-size:]) for prompt in prompts]
    return [Text(number, row, min(tokens, size - len(row) + 1) if stop_at_context else tokens)
            for number, row in enumerate(rows)]


class Rows:
    """The rows on the devices: at most `batch` (more if the mesh does not divide it). `owners` has
    the Text in each, or None; `length` is that of them all."""

    def __init__(self, engine: Engine, params: Any, texts: Sequence[Text], sampling: Sampling,
                 ends: Sequence[int], source: Any, seed: int | Sequence[int], batch: int,
                 piece: int):
        if batch < 1:
            raise ConfigError(f"batch {batch}: must be at least 1")
        self.engine, self.texts, self.sampling, self.ends = engine, texts, sampling, ends
        self.network, self.config = engine.network, engine.config
        self.context = context_of(self.network, self.config)
        self.sources = source_arrays(self.network, source, self.config, len(texts))
        of_source = self.network.source_ids(self.config)
        self.seeds = seeds_from(np.concatenate([
            content_hash(np.array([[*of_source, *text.ids]], np.int32)) for text in texts]),
            self.sources.get("source"), seed)
        with mesh_of_weights(params):
            self.params = engine.for_decoding(params)
            mesh = jax.sharding.get_abstract_mesh()
            groups = 1 if mesh.empty else row_groups(mesh)
        self.count = -(-min(batch, len(texts)) // groups) * groups
        self.some = -(-self.count // (8 * groups)) * groups
        self.owners: list[Text | None] = [None] * self.count
        longest = max(texts, key=lambda text: text.size)
        room, most = self._room(longest), max(text.left for text in texts)
        tokens, _ = padded_prompts(self.network, [longest.ids], self.config, min(room, most))
        self.slots = tokens.shape[1] + padded_length(min(room, most))
        self.piece, self.size = piece, padded_length(most)
        self.chunk = CHUNK if len(texts) > self.count else kv_cache.CHUNK
        for text in texts:
            text.length = self._length_of(text)
        self.waiting = collections.deque(sorted(texts, key=lambda text: (
            text.length, text.number // (NEAR * self.count), text.size)))

    def _room(self, text):
        """The number of new ids until its context is full. (The last one is not read.)"""
        return self.context + 1 - text.size

    def _length_of(self, text):
        """The length on which the scaling of its positions depends, as if it were alone."""
        tokens = padded_length(text.size) + min(text.left, self._room(text))
        return self.network.decoding_length(self.config, tokens, self.slots)

    def go_on(self, ended: Callable[[int], Any]) -> bool:
        """Whether a text goes on. One that ended(its number) says has ended does not."""
        for text in self.texts:
            text.goes_on = text.goes_on and not ended(text.number)
        self.owners = [text if text and text.goes_on else None for text in self.owners]
        self.waiting = collections.deque(text for text in self.waiting if text.goes_on)
        return any(self.owners) or bool(self.waiting)

    def next(self, draw: Callable) -> list[tuple[list[int], list[float]] | None]:
        """The next ids of each text, with their log-probabilities: none if it has ended, None if
        there are none yet."""
        places = self._places()
        found = self._read(places, draw) if places else self._write(draw)
        new = [None if text.goes_on else ([], []) for text in self.texts]
        for text, ids, logs in found:
            new[text.number] = text.add(ids, logs, self.ends)
            if text.goes_on and text.size > self.context:
                self.owners[self.owners.index(text)] = None
                text.begin = len(text.ids) - max(1, self.context // 2)
                text.length = self._length_of(text)
                is_next = text.length == self.length
                (self.waiting.appendleft if is_next else self.waiting.append)(text)
        return new

    def _places(self):
        """The rows that are read next: all if all are free, else some if an eighth is free."""
        free = [row for row, text in enumerate(self.owners) if text is None]
        if not self.waiting or len(free) == self.count:
            return free if self.waiting else []
        is_enough = len(free) >= max(1, self.count // 8)
        return free[:self.some] if is_enough and self.waiting[0].length == self.length else []

    def _read(self, places, draw) -> Found:
        """Read texts that wait into rows `places`, of which some may stay free."""
        is_all = len(places) == self.count
        if is_all:
            self.length = self.waiting[0].length
            self.cache = None       # (its memory is the next one's)
        texts = []
        while (len(texts) < len(places) and self.waiting
               and self.waiting[0].length == self.length):
            texts.append(self.waiting.popleft())
            self.owners[places[len(texts) - 1]] = texts[-1]
        more = (self.count if is_all else self.some) - len(texts)
        at = np.array([*places[:len(texts)], *[self.count] * more], np.int32)
        filled = [*texts, *texts[-1:] * more]
        tokens, start = padded_prompts(
            self.network, [text.ids[text.begin:] for text in filled], self.config, 0)
        rows = {"tokens": tokens, "start": start, **{
            name: x[[text.number for text in filled]] for name, x in self.sources.items()}}
        with mesh_of_weights(self.params):
            read, _ = passes.prefill(self.engine, self.params, rows, 0,
                                     min(self.chunk, tokens.shape[1]), self.slots, self.length)
            new = passes.choose_ids(self.engine, self._state(filled), read["logits"],
                                    self.sampling, draw)
            if is_all:
                self.cache, self.slot, self.start = read["cache"], tokens.shape[1], start
            else:
                moved = self.slot - tokens.shape[1]
                self.cache = put_rows(self.engine, self.cache, read["cache"], at, np.int32(moved))
                self.start[at[:len(texts)]] = start[:len(texts)] + moved
        ids, logs = (on_host(new[name])[:, None].tolist() for name in ("newest", "logprobs"))
        return zip(texts, ids, logs)

    def _write(self, draw) -> Found:
        """Write the next ids of the rows that are taken."""
        taken = [text for text in self.owners if text]
        rows = [text or taken[0] for text in self.owners]
        limit = min(max(text.left for text in taken), min(map(self._room, taken)), self.piece,
                    PIECE if self.waiting else self.piece)
        state = self._state(rows) | {
            "newest": np.array([text.ids[-1] for text in rows], np.int32), "start": self.start,
            "slot": np.int32(self.slot), "ended": np.array([text is None for text in self.owners])}
        with mesh_of_weights(self.params):
            new = passes.decode(self.engine, self.params, self.cache, state, np.int32(limit),
                                self.size, self.length, self.sampling, draw)
        self.cache, written = new["cache"], int(on_host(new["written"]))
        self.slot += written
        ids, logs = (on_host(new[name])[:, :written].tolist() for name in ("ids", "logprobs"))
        return [found for found in zip(self.owners, ids, logs) if found[0]]

    def _state(self, texts):
        """The state of rows with these texts before their next id is chosen."""
        state = decoding.before_ids(self.seeds[[text.number for text in texts]], self.ends,
                                    [text.count for text in texts])
        if self.sampling.repetition_penalty != 1:
            state["seen"] = decoding.ids_seen([text.ids for text in texts], self.config.vocab_size)
        return state


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="cache")
def put_rows(engine: Engine, cache: Any, new: Any, places: Any, moved: Any) -> Any:
    """The cache with the rows of another, `moved` slots further, at these places; those beyond its
    end are dropped."""
    def put(name, rows, new):
        # (The keys of a source have no slots.)
        new = new if name.startswith("cross") else jnp.roll(new, moved, 2)
        return rows.at[places].set(new, mode="drop")

    cache = [{name: put(name, layer[name], of_new[name]) for name in layer}
             for layer, of_new in zip(cache, new, strict=True)]
    return decoding.placed_cache(cache, engine.network.cache_layers(engine.config), engine.specs)
