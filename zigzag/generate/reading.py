"""The row of a conversation, whose cache is kept from turn to turn.

    prompt of a turn   the beginning, which is in the cache | READ ids | READ ids | ...
    its answer         id by id, into the same cache

A turn reads only new ids, in chunks of one length, into a cache of one length. So all programs are
compiled before the first turn: one that reads a chunk, one that chooses an id, and one that reads
an id and chooses the next. (The last chunk is padded. No query sees the slots of the padding, which
come after it, before real ids overwrite them.)
"""

from typing import Any, Iterator, Sequence

import numpy as np

from zigzag.generate import passes
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import Sampling, empty_ids, end_ids, mesh_of_weights
from zigzag.generate.passes import Engine
from zigzag.generate.rows import context_of, on_host, pad_rows, seeds_of

# The ids in a chunk; the slots of the first cache, which doubles when it is full; and the most ids
# of an answer in one state of decoding (a longer answer begins a new state).
READ, SLOTS, NEW_IDS = 64, 2048, 4096


class Reading:
    """The row of a conversation with a decoder, and its cache."""

    def __init__(self, engine: Engine, params: Any, sampling: Sampling):
        self.engine, self.params, self.sampling = engine, params, sampling
        self.context = context_of(engine.network, engine.config)
        self.has_windows = any(layer.window
                               for layer in engine.network.cache_layers(engine.config))
        self.slots = self._rounded(SLOTS)
        self.ids, self.cache = [], None     # the ids whose keys and values are in the cache
        self.is_ready = False               # whether everything is compiled
        self.has_rolled = False             # whether the context was full in the last answer

    def compile(self) -> Iterator[None]:
        """Compile everything, by reading and writing dummy ids."""
        for _ in self.stream([0], 2, 0, ()):
            yield None
        self.ids, self.is_ready = [], True

    def stream(self, ids: Sequence[int], tokens: int, seed: int, stop: Sequence[int],
               stop_at_context: bool = False) -> Iterator[list[list[int]] | None]:
        """Yield the new ids of the row `ids`, one at a time, in the form of sample.stream; yield
        None while the row is being read."""
        row, ends = list(ids[-self.context:]), end_ids(stop, self.engine.config.vocab_size)
        written, count, has_read, self.has_rolled = None, 0, False, False
        for _ in range(tokens):
            if len(row) > self.context:
                if stop_at_context:
                    return
                row, has_read, self.has_rolled = row[-max(1, self.context // 2):], False, True
            while len(row) > self.slots:
                self.slots, self.cache, has_read = self._rounded(2 * self.slots), None, False
            if count == NEW_IDS:
                written, count, has_read = None, 0, False
            if has_read:
                written = self._go_on(row, written, count)
            else:
                for _ in self._read(row):
                    yield None
                written, has_read = self._begin(row, seed, ends, written), True
            new, count = int(on_host(written["ids"])[0, count]), count + 1
            if new in ends:
                yield [[]]
                return
            row.append(new)
            yield [[new]]

    def _length(self):
        """The length for positions whose scaling depends on it: the cache's. (With the text's, each
        turn would have to read all of it again.)"""
        return self.engine.network.decoding_length(
            self.engine.config, min(self.slots, self.context), self.slots)

    def _rounded(self, slots):
        return -(-min(slots, self.context) // READ) * READ

    def _read(self, row):
        """Read the ids of a row that are not in the cache, chunk by chunk."""
        if self.cache is None:
            self.ids = []
            with mesh_of_weights(self.params):
                start = {"start": pad_rows(np.zeros(1, np.int32))}
                self.cache = passes.new_cache(self.engine, self.params, start, self.slots)
        length = self._length()
        for at in range(self._known(row), len(row), READ):
            part = row[at:at + READ]
            tokens = np.zeros((1, READ), np.int32)
            tokens[0, :len(part)] = part
            with mesh_of_weights(self.params):
                out = passes.read_chunk(self.engine, self.params, self.cache, {
                    "tokens": pad_rows(tokens), "start": pad_rows(np.zeros(1, np.int32)),
                    "slot": np.int32(at), "last": np.int32(len(part) - 1)}, length)
            self.cache, self.logits, self.ids = out["cache"], out["logits"], row[:at + len(part)]
            yield

    def _known(self, row):
        """The number of ids at the beginning of a row that are in the cache, in whole chunks. The
        last id is always read again: the next one follows from its logits."""
        same = next((n for n, (a, b) in enumerate(zip(row, self.ids)) if a != b),
                    min(len(row), len(self.ids)))
        same = min(same, len(row) - 1) // READ * READ
        # (A cache with a window has overwritten ids that far back.)
        return 0 if self.has_windows and len(self.ids) - same > CHUNK else same

    def _begin(self, row, seed, ends, written):
        """The state of decoding after a row has been read: with one more id than was written."""
        tokens = np.zeros((1, self.slots), np.int32)
        tokens[0, -len(row):] = row
        with mesh_of_weights(self.params):
            rows = {"tokens": pad_rows(tokens),
                    "start": pad_rows(np.array([self.slots - len(row)], np.int32))}
            if written is None:
                written = empty_ids(rows, NEW_IDS, seeds_of(rows, seed, count=1), ends,
                                    self.sampling, self.engine.config.vocab_size)
            state = written | {"cache": self.cache, "start": np.zeros_like(rows["start"]),
                               "slot": np.int32(len(row))}
            state = passes.choose_ids(self.engine, state, self.logits, self.sampling)
        self.cache = state.pop("cache")
        return state

    def _go_on(self, row, written, count):
        """The state of decoding with one more id, after reading the last id of the row."""
        with mesh_of_weights(self.params):
            state = passes.decode(self.engine, self.params, written | {"cache": self.cache},
                                  np.int32(count + 1), self._length(), self.sampling)
        self.cache, self.ids = state.pop("cache"), list(row)
        return state
