"""Rows of whole documents, so that attention need not cross from one into another.

    documents -> blocks of 4,096, by a shuffle of all -> rows of each block, by best fit

    row        | document 7        | document 912 | document 31    |.|
    segments    1 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 3 3 3 3 3 3 3 3 0
    positions   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7 0

The documents of a block, and its rows, are a pure function of the seed and the block's number. Rows
are taken block after block, in another order each time, so only one block is packed at a time. A
document that is longer than a row is cut into rows. This file needs numpy, not jax.
"""

import bisect
import functools
from typing import Any, Iterable, NamedTuple, Sequence

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.files import read_at_random
from zigzag.disk.shuffle import order_at

BLOCK = 4096


class Part(NamedTuple):
    """Some tokens of a document, which stand together in a row."""
    tokens: np.ndarray
    targets: np.ndarray     # the token after each
    weights: np.ndarray     # whether it is learned


class Documents:
    """Documents on disk, one after the other: number i begins at starts[i]. After its last token
    comes `end`. `learned`, if given, has 1 for the tokens that are targets."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, end: int,
                 learned: np.ndarray | None = None, vocab_size: int = 2**31):
        read_at_random(tokens)
        read_at_random(starts)
        self.tokens, self.starts, self.end = tokens, starts, end
        self.learned, self.vocab_size = learned, vocab_size

    def __len__(self) -> int:
        return len(self.starts)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """The number of tokens of each of these documents."""
        after = np.minimum(numbers + 1, len(self.starts) - 1)
        ends = np.where(numbers + 1 < len(self.starts), self.starts[after], len(self.tokens))
        return (ends - self.starts[numbers]).astype(np.int64)

    def unlearned(self, length: int) -> int:
        """The number of documents longer than `length` of whose first `length` tokens no target is
        learned."""
        numbers = np.arange(len(self))
        starts = self.starts[self.lengths(numbers) > length].astype(np.int64)
        if not len(starts):
            return 0
        bounds = np.stack([starts + 1, starts + length + 1], 1).ravel()
        bounds = bounds[bounds < len(self.learned)]     # (the last part goes on to the end)
        return int((np.maximum.reduceat(self.learned, bounds)[::2] == 0).sum())

    def part(self, number: int, first: int, length: int) -> Part:
        """`length` tokens of a document, from token number `first` on."""
        start = int(self.starts[number])
        end = start + int(self.lengths(np.array([number]))[0])
        begin = start + first
        tokens = np.asarray(self.tokens[begin:min(begin + length + 1, end)], np.int64)
        if (bad := (tokens < 0) | (tokens >= self.vocab_size)).any():
            raise ConfigError(f"{getattr(self.tokens, 'filename', None) or 'the tokens'}: id "
                              f"{tokens[bad][0]} in document {number}; the vocabulary has "
                              f"{self.vocab_size}")
        weights = np.ones(length, np.float32)
        if self.learned is not None:
            # (The end after a document is not learned: a template's answers have their own.)
            learned = np.asarray(self.learned[begin + 1:min(begin + length + 1, end)], np.float32)
            weights = np.append(learned, np.zeros(length, np.float32))[:length]
        if len(tokens) == length:       # it is the end of the document
            tokens = np.append(tokens, self.end)
        return Part(tokens[:-1].astype(np.int32), tokens[1:].astype(np.int32), weights)


class Packed:
    """Rows of `length` tokens, filled with documents. An example is a list of `Part`s."""

    def __init__(self, documents: Documents, length: int, seed: int = 0, cut: bool = True):
        self.documents, self.length, self.seed, self.cut = documents, length, seed, cut
        self.block = functools.lru_cache(8)(self._block)
        self.blocks = -(-len(documents) // BLOCK)
        self.ends = np.cumsum([len(self.block(b)) for b in range(self.blocks)])

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.blocks else 0

    def _block(self, number: int) -> list[list[tuple[int, int, int]]]:
        """The rows of a block: for each, (document, first token, length) of its parts."""
        places = np.arange(number * BLOCK, min((number + 1) * BLOCK, len(self.documents)))
        chosen = order_at(len(self.documents), self.seed, places)
        pieces, rows, rest = self.documents.lengths(chosen), [], []
        for document, length in zip(chosen.tolist(), pieces.tolist()):
            full = min(length // self.length, length if self.cut else 1)
            rows += [[(document, i * self.length, self.length)] for i in range(full)]
            first = full * self.length
            if first < length and (self.cut or not full):
                rest.append((length - first, document, first))
        return rows + best_fit(sorted(rest, key=lambda part: -part[0]), self.length)

    def __getitem__(self, i: int) -> list[Part]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        block = int(np.searchsorted(self.ends, i, "right"))
        before = int(self.ends[block - 1]) if block else 0
        return [self.documents.part(*part) for part in self.block(block)[i - before]]

    def order_at(self, seed: int, places: np.ndarray) -> np.ndarray:
        """The numbers of the rows at these places of an endless sequence: block after block, and
        within a block in another order in each epoch."""
        epoch, place = np.divmod(np.asarray(places, np.int64), len(self))
        blocks = np.searchsorted(self.ends, place, "right")
        found = np.empty(len(place), np.int64)
        for block in np.unique(blocks).tolist():
            before = int(self.ends[block - 1]) if block else 0
            count = int(self.ends[block]) - before
            here = blocks == block
            # (order_at shuffles each run of `count` places by itself: one run for each epoch.)
            found[here] = before + order_at(count, seed + block,
                                            epoch[here] * count + place[here] - before)
        return found

    @property
    def fill(self) -> float:
        """The share of positions that hold a token, in the first 16 blocks."""
        rows = [row for b in range(min(self.blocks, 16)) for row in self.block(b)]
        return sum(length for row in rows for _, _, length in row) / max(
            len(rows) * self.length, 1)


def targets_of(example: Any) -> np.ndarray:
    """The targets of an example that are learned: of a packed row, or of a row of running text."""
    if isinstance(example, np.ndarray):
        return example[1:]
    return np.concatenate([part.targets[part.weights > 0] for part in example])


def question_in(rows: Iterable[Sequence[Part]], most: int) -> np.ndarray:
    """The ids of a question in packed rows: a document up to where its first answer begins. They
    are those of the first document with an answer (none: empty), the last `most` of them."""
    for part in (part for row in rows for part in row):
        if part.weights.any():
            return part.tokens[:int(part.weights.argmax()) + 1][-most:]
    return np.zeros(0, np.int32)


def best_fit(parts: Sequence[tuple[int, int, int]], length: int
             ) -> list[list[tuple[int, int, int]]]:
    """Rows for parts (length, document, first), longest first: each goes into the row that it fills
    best, or begins a new one."""
    rows, room = [], []         # room: (what is left, number of the row), sorted
    for size, document, first in parts:
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):
            rows.append([])
            left, row = length, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append((document, first, size))
        if left > size:
            bisect.insort(room, (left - size, row))
    return rows


def collate_packed(examples: Sequence[Sequence[Part]], length: int) -> dict[str, Any]:
    """A batch of packed rows: tokens, targets, segments, positions and weights [B, T]. A weight is
    0 where there is no target, or where it is not learned."""
    shape = len(examples), length
    batch = {name: np.zeros(shape, np.int32)
             for name in ("tokens", "targets", "segments", "positions")}
    batch["weights"] = np.zeros(shape, np.float32)
    for row, parts in enumerate(examples):
        at = 0
        for number, part in enumerate(parts, 1):
            here = slice(at, at := at + len(part.tokens))
            batch["tokens"][row, here], batch["targets"][row, here] = part.tokens, part.targets
            batch["weights"][row, here] = part.weights
            batch["segments"][row, here] = number
            batch["positions"][row, here] = np.arange(len(part.tokens))
    return batch
