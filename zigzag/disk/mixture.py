"""Several sources of examples, mixed by weights.

    Mixture      the examples of several sequences: number i of all, and which of them stands at a
                 place of the endless sequence
    Part         some examples of a sequence
    numbers_at   which examples of any sequence stand at places of its endless sequence

In each thousand places of that sequence every source has its share, rounded to a thousandth, in a
shuffled order. Within a source, its own sequence goes on: all of its examples, again and again,
each time in another order. So which example stands at a place is a pure function of the seed and
the place. This file needs numpy, not jax.
"""

import dataclasses
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError

ROUND = 1000


@dataclasses.dataclass
class Part:
    """Some examples of a sequence: those with these numbers."""
    examples: Any
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Any:
        return self.examples[int(self.numbers[i])]


def spread(examples: Sequence, count: int) -> Part:
    """`count` examples of a sequence, evenly spread, the same ones each time."""
    count = min(count, len(examples))
    return Part(examples, np.arange(count) * len(examples) // max(count, 1))


class Mixture:
    """The examples of these sequences. `weights` are the shares of the sources in what is learned;
    they need not add up to 1."""

    def __init__(self, sources: Sequence[Sequence], weights: Sequence[float]):
        self.sources, self.shares = sources, rounded(weights)
        self.starts = np.cumsum([0, *map(len, sources)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, i: int) -> Any:
        source, number = located(self.starts, i)
        return self.sources[source][number]

    def order_at(self, seed: int, places: np.ndarray) -> np.ndarray:
        """The numbers of the examples at these places of the endless sequence."""
        turn, _ = np.divmod(np.asarray(places, np.int64), ROUND)
        drawn = order_at(ROUND, seed, places)       # a shuffle of each thousand
        begins = np.cumsum([0, *self.shares])
        chosen = np.searchsorted(begins, drawn, "right") - 1
        numbers = np.empty(len(drawn), np.int64)
        for source in np.unique(chosen).tolist():
            here = chosen == source
            place = turn[here] * self.shares[source] + drawn[here] - begins[source]
            numbers[here] = self.starts[source] + numbers_at(
                self.sources[source], seed + source, place)
        return numbers


def located(starts: np.ndarray, i: int) -> tuple[int, int]:
    """(which of several sequences, the number in it) of number i of them all, which begin at these
    numbers; the last of `starts` is where they end."""
    if not 0 <= i < starts[-1]:
        raise IndexError(i)
    which = int(np.searchsorted(starts, i, "right")) - 1
    return which, int(i - starts[which])


def mixed(sources: Sequence[Sequence], weights: Sequence[str] = ()) -> Sequence:
    """The examples of these sequences as one, in these shares (none: equal ones)."""
    return sources[0] if len(sources) == 1 else Mixture(
        sources, list(map(float, weights)) or [1.0] * len(sources))


def rounded(weights: Sequence[float]) -> np.ndarray:
    """The weights as whole thousandths that add up to a thousand."""
    weights = np.array(weights, float)
    if not ((weights > 0) & (weights < np.inf)).all():
        raise ConfigError(f"--weights {' '.join(map(str, weights))}: expected numbers above 0")
    weights = weights / weights.max()       # (their sum may be infinite)
    exact = weights / weights.sum() * ROUND
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[:ROUND - shares.sum()]] += 1
    if (shares == 0).any():
        raise ConfigError(f"--weights {' '.join(map(str, weights))}: a share below a thousandth")
    return shares


def numbers_at(examples: Sequence, seed: int, places: np.ndarray) -> np.ndarray:
    """The numbers of the examples at these places of the endless sequence: in the order that the
    examples define, or else shuffled."""
    if hasattr(examples, "order_at"):
        return examples.order_at(seed, places)
    return order_at(len(examples), seed, places)


# -------------------------------------------------------------------------------------------
# Shuffles without lists. A place is a number from 0 to anything, of an endless sequence that runs
# through all examples again and again, each time in another order, without repeats. All is a pure
# function of the seed and the place, so a run has no position to save, and processes agree.

def order_at(count: int, seed: int, places: np.ndarray) -> np.ndarray:
    """The numbers, below `count`, of the examples at these places. No list of them is ever made: a
    Feistel network permutes [0, 4^k), and permutes a number again while it falls outside."""
    if count < 1:
        raise ConfigError("there are no examples to train on")
    epoch, x = np.divmod(np.asarray(places).astype(np.uint64), count)
    half = max(1, (count - 1).bit_length() + 1 >> 1)        # bits
    mask = 2**half - 1
    key = mix(epoch * 0x9E3779B97F4A7C15 + seed % 2**64)

    def permuted(v):
        left, right = v >> half, v & mask
        for i in range(4):
            left, right = right, left ^ (mix(right ^ key + i) & mask)
        return left << half | right

    x = permuted(x)
    while (outside := x >= count).any():
        x = np.where(outside, permuted(x), x)
    return x.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: every bit of the result depends on every bit of x."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
    x = (x ^ x >> 27) * 0x94D049BB133111EB
    return x ^ x >> 31
