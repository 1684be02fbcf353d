"""Rows packed with whole documents, so that attention can stay within each document.

    documents -> shuffled into blocks of 4,096 -> rows of each block, by best fit

    row        | document 7        | document 912 | document 31    |.|
    segments    1 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 3 3 3 3 3 3 3 3 0
    positions   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7 0

A block's documents and rows are a pure function of the seed and the block's number. A start packs
each block once, to count its rows. Training takes rows block by block, and reorders them within a
block in each epoch. A document longer than a row spans several. This file needs numpy, not jax.
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
    """Consecutive tokens of a document, within a single row."""
    tokens: np.ndarray
    targets: np.ndarray     # the token after each token
    weights: np.ndarray     # the weight of each target in the loss; 0: not learned


def parts_of(example: Any) -> Sequence[Part]:
    """Return the parts of an example: a packed row, a single part, or the ids of running text."""
    if isinstance(example, list):
        return example
    return [example if isinstance(example, Part) else Part(
        example[:-1], example[1:], np.ones(max(len(example) - 1, 0), np.float32))]


def ids_of(tokens: Any, start: int, stop: int, vocab_size: int) -> np.ndarray:
    """Return tokens[start:stop] as int32 ids. Reject ids out of range, for which a device would
    silently look up another id's vector."""
    found = numbers_below(vocab_size, tokens, start, stop, np.int64, "id",
                          f"the vocabulary has {vocab_size}")
    return found.astype(np.int32)


class Documents:
    """Documents on disk, concatenated; document i begins at starts[i]. The id `end` follows each
    document's last token and has that token's weight, or 0 if not `ends_learned`. `weights`, if
    given, are the weights of the tokens as targets."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, end: int,
                 weights: np.ndarray | None = None, vocab_size: int = 2**31,
                 ends_learned: bool = False):
        for array in (tokens, starts, weights):
            read_at_random(array)
        self.tokens, self.starts, self.end = tokens, starts, end
        self.weights, self.vocab_size, self.ends_learned = weights, vocab_size, ends_learned
        if weights is None:         # broadcasting a 1 takes no memory
            self.weights, self.ends_learned = np.broadcast_to(np.float32(1), len(tokens)), True

    def __len__(self) -> int:
        return len(self.starts)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of tokens in each of these documents."""
        ends = np.where(numbers + 1 < len(self), np.take(self.starts, numbers + 1, mode="clip"),
                        len(self.tokens))
        return (ends - self.starts[numbers]).astype(np.int64)

    def unlearned(self, length: int) -> int:
        """Count the documents longer than `length` that have no learned target in their first
        `length` tokens."""
        long = self.lengths(np.arange(len(self))) > length
        weights = np.asarray(self.weights)      # slices of a memmap are slow
        return sum(not weights[start + 1:start + length + 1].any()
                   for start in self.starts[long].tolist())

    def part(self, number: int, first: int, length: int) -> Part:
        """Return `length` tokens of a document, starting at token number `first`."""
        start = int(self.starts[number])
        end = start + int(self.lengths(np.array([number]))[0])
        begin, stop = start + first, min(start + first + length + 1, end)
        tokens = ids_of(self.tokens, begin, stop, self.vocab_size)
        weights = np.asarray(self.weights[begin + 1:stop], np.float32)
        if len(tokens) == length:       # the end of the document
            # After a conversation, `end` isn't learned: a template's answers have their own end.
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
        """Return a block's rows, each a list of parts (document, first token, length)."""
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
        """Return the numbers of the rows at these indices in the endless order, which goes block by
        block. Within a block, each epoch has a new order."""
        epoch, place = np.divmod(np.asarray(places, np.int64), len(self))
        blocks = np.searchsorted(self.starts, place, "right") - 1
        found = np.empty(len(place), np.int64)
        for block in np.unique(blocks).tolist():
            before, end = self.starts[block:block + 2].tolist()
            count = end - before
            here = blocks == block
            # order_at shuffles each run of `count` indices separately; a run is an epoch.
            found[here] = before + order_at(count, seed + block,
                                            epoch[here] * count + place[here] - before)
        return found


def question_in(rows: Iterable[Sequence[Part]], most: int) -> np.ndarray:
    """Return a question from packed rows: in the first part that has an answer, the last `most` ids
    before it, or fewer if the part begins later. Return no ids if there is no answer."""
    for part in (part for row in rows for part in row):
        if part.weights.any():
            return part.tokens[:int((part.weights > 0).argmax()) + 1][-most:]
    return np.zeros(0, np.int32)


def best_fit(parts: Sequence[tuple[int, int, int]], length: int
             ) -> list[list[tuple[int, int, int]]]:
    """Pack parts (document, first, length), sorted longest first, into rows. Each part goes into
    the row with the least room that still fits it, or starts a new row."""
    rows, room = [], []         # room: sorted pairs (tokens left, row number)
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
