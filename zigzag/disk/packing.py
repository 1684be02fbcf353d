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

from zigzag.core.files import read_at_random
from zigzag.disk.lines import numbers_below
from zigzag.disk.mixture import located, order_at

BLOCK = 4096


class Part(NamedTuple):
    """Some tokens of a document, which stand together in a row."""
    tokens: np.ndarray
    targets: np.ndarray     # the token after each
    weights: np.ndarray     # of each target in the loss; 0: it is not learned


def parts_of(example: Any) -> Sequence[Part]:
    """The parts of an example: a row of documents, one part, or the ids of running text."""
    if isinstance(example, list):
        return example
    return [example if isinstance(example, Part) else Part(
        example[:-1], example[1:], np.ones(max(len(example) - 1, 0), np.float32))]


def ids_of(tokens: Any, start: int, stop: int, vocab_size: int) -> np.ndarray:
    """The tokens of a file from number `start` to `stop`, as ids. (For an id that does not exist a
    device would silently look up another id's vector.)"""
    found = numbers_below(vocab_size, tokens, start, stop, np.int64, "id",
                          f"the vocabulary has {vocab_size}")
    return found.astype(np.int32)


class Documents:
    """Documents on disk, one after the other: number i begins at starts[i]. After its last token
    comes `end`, which has the weight of that token, or 0 if not `ends_learned`. `weights`, if
    given, are those of the tokens as targets."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, end: int,
                 weights: np.ndarray | None = None, vocab_size: int = 2**31,
                 ends_learned: bool = False):
        for array in (tokens, starts, weights):
            read_at_random(array)
        self.tokens, self.starts, self.end = tokens, starts, end
        self.weights, self.vocab_size, self.ends_learned = weights, vocab_size, ends_learned
        if weights is None:         # (These take no memory.)
            self.weights, self.ends_learned = np.broadcast_to(np.float32(1), len(tokens)), True

    def __len__(self) -> int:
        return len(self.starts)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """The number of tokens of each of these documents."""
        ends = np.where(numbers + 1 < len(self), np.take(self.starts, numbers + 1, mode="clip"),
                        len(self.tokens))
        return (ends - self.starts[numbers]).astype(np.int64)

    def unlearned(self, length: int) -> int:
        """The number of documents longer than `length` of whose first `length` tokens no target is
        learned."""
        long = self.lengths(np.arange(len(self))) > length
        weights = np.asarray(self.weights)      # (slices of a memmap are slow)
        return sum(not weights[start + 1:start + length + 1].any()
                   for start in self.starts[long].tolist())

    def part(self, number: int, first: int, length: int) -> Part:
        """`length` tokens of a document, from token number `first` on."""
        start = int(self.starts[number])
        end = start + int(self.lengths(np.array([number]))[0])
        begin, stop = start + first, min(start + first + length + 1, end)
        tokens = ids_of(self.tokens, begin, stop, self.vocab_size)
        weights = np.asarray(self.weights[begin + 1:stop], np.float32)
        if len(tokens) == length:       # it is the end of the document
            # (The end after a conversation is not learned: a template's answers have their own.)
            tokens = np.append(tokens, np.int32(self.end))
            weights = np.append(weights, np.float32(self.weights[end - 1] * self.ends_learned))
        return Part(tokens[:-1], tokens[1:], weights)


class Packed:
    """Rows of `length` tokens, filled with documents. An example is a list of `Part`s."""

    def __init__(self, documents: Documents, length: int, seed: int = 0, cut: bool = True):
        self.documents, self.length, self.seed, self.cut = documents, length, seed, cut
        self.block = functools.lru_cache(8)(self._block)
        self.blocks = -(-len(documents) // BLOCK)
        self.starts = np.cumsum([0, *(len(self.block(b)) for b in range(self.blocks))])

    def __len__(self) -> int:
        return int(self.starts[-1])

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
                rest.append((document, first, length - first))
        return rows + best_fit(sorted(rest, key=lambda part: -part[2]), self.length)

    def __getitem__(self, i: int) -> list[Part]:
        block, row = located(self.starts, i)
        return [self.documents.part(*part) for part in self.block(block)[row]]

    def order_at(self, seed: int, places: np.ndarray) -> np.ndarray:
        """The numbers of the rows at these places of an endless sequence: block after block, and
        within a block in another order in each epoch."""
        epoch, place = np.divmod(np.asarray(places, np.int64), len(self))
        blocks = np.searchsorted(self.starts, place, "right") - 1
        found = np.empty(len(place), np.int64)
        for block in np.unique(blocks).tolist():
            before, end = self.starts[block:block + 2].tolist()
            count = end - before
            here = blocks == block
            # (order_at shuffles each run of `count` places by itself: one run for each epoch.)
            found[here] = before + order_at(count, seed + block,
                                            epoch[here] * count + place[here] - before)
        return found


def question_in(rows: Iterable[Sequence[Part]], most: int) -> np.ndarray:
    """The ids of a question in packed rows: a document up to where its first answer begins. They
    are those of the first document with an answer (none: empty), the last `most` of them."""
    for part in (part for row in rows for part in row):
        if part.weights.any():
            return part.tokens[:int((part.weights > 0).argmax()) + 1][-most:]
    return np.zeros(0, np.int32)


def best_fit(parts: Sequence[tuple[int, int, int]], length: int
             ) -> list[list[tuple[int, int, int]]]:
    """Rows for parts (document, first, length), longest first: each goes into the row that it fills
    best, or begins a new one."""
    rows, room = [], []         # room: (what is left, number of the row), sorted
    for part in parts:
        size = part[2]
        at = bisect.bisect_left(room, (size, -1))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(part)
        if left > size:
            bisect.insort(room, (left - size, row))
    return rows
