"""The row of a conversation, whose cache is kept from turn to turn.

    prompt of a turn   the beginning, which is in the cache | READ ids | READ ids | ...
    its answer         id by id, into the same cache

A turn reads only new ids, in chunks of one length, into a cache of one length. So all programs are
compiled before the first turn: one that reads a chunk, one that chooses an id, and one that reads
an id and chooses the next. (The last chunk is padded. No query sees the slots of the padding, which
come after it, before real ids overwrite them.)
"""

from typing import Any, Callable, Iterator, Sequence

import numpy as np

from zigzag.generate import decoding, passes
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import Sampling, mesh_of_weights
from zigzag.generate.passes import Engine
from zigzag.generate.rows import context_of, on_host, pad_rows, seeds_of

# The ids in a chunk, and the slots of the first cache, which doubles when it is full.
READ, SLOTS = 64, 2048


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

    def compile(self, draw: Callable) -> Iterator[None]:
        """Compile everything, by reading and writing dummy ids."""
        for _ in self.stream([0], 2, 0, (), draw):
            yield None
        self.ids, self.is_ready = [], True

    def stream(self, ids: Sequence[int], tokens: int, seed: int, stop: Sequence[int],
               draw: Callable, stop_at_context: bool = False
               ) -> Iterator[list[list[int]] | None]:
        """Yield the new ids of the row `ids`, one at a time, in the form of sample.stream; yield
        None while the row is being read."""
        row, ends = list(ids[-self.context:]), decoding.end_ids(stop, self.engine.config.vocab_size)
        seeds = seeds_of({"tokens": np.array([row]), "start": np.zeros(1, int)}, seed)
        text, self.has_rolled = list(row), False
        for count in range(tokens):
            if len(row) > self.context:
                if stop_at_context:
                    return
                row, self.has_rolled = row[-max(1, self.context // 2):], True
            while len(row) > self.slots:
                self.slots, self.cache = self._rounded(2 * self.slots), None
            is_read = self.cache is not None and self.ids == row[:-1]
            if not is_read:
                for _ in self._read(row):
                    yield None
            state = decoding.before_ids(seeds, ends, count)
            if self.sampling.repetition_penalty != 1:
                state["seen"] = decoding.ids_seen([text], self.engine.config.vocab_size)
            with mesh_of_weights(self.params):
                state = {name: x if name == "ends" else pad_rows(x) for name, x in state.items()}
                found = self._go_on(row, state, draw) if is_read else passes.choose_ids(
                    self.engine, state, self.logits, self.sampling, draw)["newest"]
            new = int(on_host(found).flat[0])
            if new in ends:
                yield [[]]
                return
            row.append(new)
            text.append(new)
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

    def _go_on(self, row, state, draw):
        """The next id, after reading the last id of the row."""
        state |= {"newest": pad_rows(np.array(row[-1:], np.int32)), "slot": np.int32(len(row) - 1),
                  "start": pad_rows(np.zeros(1, np.int32))}
        new = passes.decode(self.engine, self.params, self.cache, state, np.int32(1), 1,
                            self._length(), self.sampling, draw)
        self.cache, self.ids = new["cache"], list(row)
        return new["ids"]
