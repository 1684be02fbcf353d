"""Continuous batching over a few rows: when an answer ends, a waiting prompt takes its row.

    row 0   | a a a a a a | d d d d d ...
    row 1   | b b | c c c c c c c | e ...
              time ->

All rows share `slot`, the slot of their newest ids, which keeps growing. The cache is a ring with
as many slots as the longest row has tokens. We read prompts for new rows into a small separate
cache, then roll it so that they end at the shared slot. When a row's context is full, we also free
the row, and queue the second half of its text to be read again. jax compiles only a few programs:
one set of passes for all rows and one for an eighth of them, with prompt chunks of up to five
lengths.

If positions scale with a row's length (Network.decoding_length), we run only prompts with the same
length together, so an answer doesn't depend on the other prompts.
"""

import collections
import dataclasses
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import get_abstract_mesh

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import row_groups
from zigzag.generate import decoding, passes
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import Sampling
from zigzag.generate.engine import Engine, mesh_of_weights
from zigzag.generate.rows import (
    check_ids,
    check_writes,
    context_of,
    cut_at_end,
    on_host,
    padded_length,
    padded_prompts,
    seeds_of,
    source_arrays,
)

PIECE = 8       # while prompts wait, write at most this many ids before looking for free rows
NEAR = 4        # sort prompts by length within groups of 4 times the number of rows


@dataclasses.dataclass(eq=False)
class Text:
    """A prompt and its answer."""
    number: int             # the index of its prompt
    ids: list[int]          # the prompt's ids that fit in the context, then the new ids
    left: int               # how many more new ids it may get; 0: it has ended
    count: int = 0          # how many new ids it has
    begin: int = 0          # where its context begins in `ids`
    length: int = 0         # Network.decoding_length

    @property
    def size(self) -> int:
        return len(self.ids) - self.begin

    def add(self, new: list[int], ends: Sequence[int]) -> int:
        """Add the next ids up to the first one in `ends`, and return how many were added."""
        kept = cut_at_end(ends, new)[:self.left]
        self.ids += kept
        self.count += len(kept)
        self.left = self.left - len(kept) if len(kept) == len(new) else 0
        return len(kept)


class Rows:
    """The rows on the devices: at most `batch`, rounded up until the mesh divides them. `owners`
    lists the Text in each row, or None; `length` is the decoding_length that they all share."""

    def __init__(self, engine: Engine, params: Any, prompts: Sequence[Sequence[int]], tokens: int,
                 sampling: Sampling, ends: Sequence[int], source: Any, seed: int | Sequence[int],
                 batch: int, piece: int, stop_at_context: bool, say: Callable[[str], Any]):
        check_writes(engine.network, engine.config, "sample")
        if tokens < 0 or batch < 1:
            raise ConfigError(f"tokens {tokens}, batch {batch}: must be at least 0 and at least 1")
        self.engine, self.sampling, self.ends, self.piece = engine, sampling, ends, piece
        self.network, self.config = engine.network, engine.config
        self.context = size = context_of(self.network, self.config)
        longest = check_ids("prompt", prompts, self.config)
        # We never reread an encoder-decoder's text from the middle; it ends with the context.
        ends_there = stop_at_context or self.network.source_shape(self.config) is not None
        if longest > size:
            say(f"a prompt has {longest:,} tokens, but this model's context is {size:,}: it reads "
                f"the last {size:,}")
        if min(longest, size) + tokens - 1 > size and not ends_there:
            say(f"this model's context is {size:,} tokens: a text that fills it continues from its "
                f"last {max(1, size // 2):,} (--stop_at_context ends it there)")
        self.texts = [Text(number, list(prompt[-size:]), tokens)
                      for number, prompt in enumerate(prompts)]
        for text in self.texts if ends_there else ():
            text.left = min(tokens, self._room(text))
        self.sources = source_arrays(self.network, source, self.config, len(prompts))
        rows, start = padded_prompts(
            self.network, [text.ids for text in self.texts], self.config, 0)
        self.seeds = seeds_of({"tokens": rows, "start": start, **self.sources}, seed)
        self.size = padded_length(tokens)
        self.slots = rows.shape[1] + padded_length(min(tokens, min(map(self._room, self.texts))))
        with mesh_of_weights(params):
            self.params = engine.for_decoding(params)
            groups = row_groups(get_abstract_mesh())
        self.count = -(-min(batch, len(prompts)) // groups) * groups
        self.some = -(-self.count // (8 * groups)) * groups
        self.owners: list[Text | None] = [None] * self.count
        for text in self.texts:
            text.length = self._length_of(text)
        self.waiting = collections.deque(sorted(self.texts, key=lambda text: (
            text.length, text.number // (NEAR * self.count), text.size)))

    def _room(self, text):
        """Return how many new ids fill the text's context, plus one: the last is never read."""
        return self.context + 1 - text.size

    def _length_of(self, text):
        """Return the length that the text's positions would scale with if the text ran alone."""
        tokens = padded_length(text.size) + min(text.left, self._room(text))
        return self.network.decoding_length(self.config, tokens, self.slots)

    def written(self, draw: Callable, ended: Callable[[int], Any]) -> Iterator[list]:
        """Yield the next ids and their log-probabilities for each text: empty lists if the text has
        ended, None if it has none yet. A text stops once ended(its number) is true."""
        while True:
            for text in self.texts:
                if ended(text.number):
                    text.left = 0
            self.owners = [text if text and text.left else None for text in self.owners]
            self.waiting = collections.deque(text for text in self.waiting if text.left)
            while places := self._places():
                self._read(places)
            if not any(self.owners):
                return
            yield self._write(draw)

    def _places(self):
        """Return the rows to fill next: all if all are free, or some if at least an eighth are."""
        free = [row for row, text in enumerate(self.owners) if text is None]
        if not self.waiting or len(free) < max(1, self.count // 8):
            return []
        if len(free) == self.count:
            return free
        return free[:self.some] if self.waiting[0].length == self.length else []

    def _read(self, places):
        """Read waiting texts into the rows `places`, some of which may stay free."""
        is_all = len(places) == self.count
        if is_all:
            self.length = self.waiting[0].length
            self.cache = None       # frees its memory for the next cache
        texts = []
        for row in places:
            if self.waiting and self.waiting[0].length == self.length:
                self.owners[row] = self.waiting.popleft()
                texts.append(self.owners[row])
        # If there are too few texts, repeat the last one; we write it to its row several times.
        more = (self.count if is_all else self.some) - len(texts)
        texts, places = (some + some[-1:] * more for some in (texts, places[:len(texts)]))
        tokens, start = padded_prompts(
            self.network, [text.ids[text.begin:] for text in texts], self.config, 0)
        rows = {"tokens": tokens, "start": start, **{
            name: x[[text.number for text in texts]] for name, x in self.sources.items()}}
        with mesh_of_weights(self.params):
            read = passes.prefill(self.engine, self.params, rows, self.slots, self.length, CHUNK)
            if is_all:
                self.cache, self.slot, self.start = read["cache"], int(read["slot"]), start
                return
            moved = self.slot - int(read["slot"])
            self.cache = put_rows(self.engine, self.cache, read["cache"], np.array(places),
                                  np.int32(moved))
            self.start[places] = start + moved

    def _write(self, draw):
        """Generate the next ids for the occupied rows."""
        taken = [text for text in self.owners if text]
        rows = [text or taken[0] for text in self.owners]
        limit = min(max(text.left for text in taken), min(map(self._room, taken)), self.piece,
                    PIECE if self.waiting else self.piece)
        state = decoding.before_ids(self.seeds[[text.number for text in rows]], self.ends,
                                    [text.count for text in rows])
        state |= {"newest": np.array([text.ids[-1] for text in rows], np.int32),
                  "start": self.start, "slot": np.int32(self.slot),
                  "ended": np.array([text is None for text in self.owners])}
        if self.sampling.repetition_penalty != 1:
            state["seen"] = decoding.ids_seen([text.ids for text in rows], self.config.vocab_size)
        with mesh_of_weights(self.params):
            found = passes.decode(self.engine, self.params, self.cache, state, np.int32(limit),
                                  self.size, self.length, self.sampling, draw)
        self.cache, written = found["cache"], int(on_host(found["written"]))
        self.slot += written
        ids, logs = (on_host(found[name])[:, :written].tolist() for name in ("ids", "logprobs"))
        new = [None if text.left else ([], []) for text in self.texts]
        for row, text in enumerate(self.owners):
            if text:
                count = text.add(ids[row], self.ends)
                new[text.number] = ids[row][:count], logs[row][:count]
                if text.left and text.size > self.context:
                    # Its context is full, so free the row and reread the second half later.
                    self.owners[row] = None
                    text.begin = len(text.ids) - max(1, self.context // 2)
                    text.length = self._length_of(text)
                    # It goes last if it can't run together with the current rows.
                    self.waiting.insert(
                        0 if text.length == self.length else len(self.waiting), text)
        return new


@jax.jit(static_argnames="engine", donate_argnames="cache")
def put_rows(engine: Engine, cache: Any, new: Any, places: Any, moved: Any) -> Any:
    """Copy the rows of a `new` cache into the cache at `places`, shifted by `moved` slots."""
    def put(name, rows, new):
        # A source's keys have no slots, so don't roll them.
        return rows.at[places].set(new if name.startswith("cross") else jnp.roll(new, moved, 2))

    cache = [{name: put(name, layer[name], of_new[name]) for name in layer}
             for layer, of_new in zip(cache, new, strict=True)]
    return engine.placed_cache(cache)
