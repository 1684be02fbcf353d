"""Mix several sources of examples by weight.

    Mixture      several sequences of examples as a single sequence, with a training order
    Part         some of a sequence's examples
    numbers_at   the numbers of the examples at given indices in a sequence's endless order

The endless order cycles through all examples forever. Every thousand indices are divided among the
sources by their rounded weights, then shuffled. A source goes through all of its examples before it
starts over in a new order.

The example at an index is a pure function of the seed and index. This file needs numpy, not jax.
"""

import dataclasses
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError

ROUND = 1000


@dataclasses.dataclass
class Part:
    """The examples with these numbers in a sequence."""
    examples: Any
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Any:
        return self.examples[int(self.numbers[i])]


def spread(examples: Sequence, count: int) -> Part:
    """Choose `count` evenly spaced examples from a sequence, always the same examples."""
    count = min(count, len(examples))
    return Part(examples, np.arange(count) * len(examples) // max(count, 1))


class Mixture:
    """The examples of several sequences. `weights` are the sources' shares of the training
    examples; they don't have to sum to 1."""

    def __init__(self, sources: Sequence[Sequence], weights: Sequence[float]):
        self.sources, self.shares = sources, rounded(weights)
        self.starts = np.cumsum([0, *map(len, sources)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, i: int) -> Any:
        source, number = located(self.starts, i)
        return self.sources[source][number]

    def order_at(self, seed: int, places: np.ndarray) -> np.ndarray:
        """Return the numbers of the examples at these indices in the endless order."""
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
    """Locate example i of several sequences: return (which sequence, its number there). Sequence n
    has the numbers from starts[n] to starts[n + 1] - 1."""
    if not 0 <= i < starts[-1]:
        raise IndexError(i)
    which = int(np.searchsorted(starts, i, "right")) - 1
    return which, int(i - starts[which])


def mixed(sources: Sequence[Sequence], weights: Sequence[str] = ()) -> Sequence:
    """Mix the examples in these sequences by these weights (default: equal weights)."""
    return sources[0] if len(sources) == 1 else Mixture(
        sources, list(map(float, weights)) or [1.0] * len(sources))


def rounded(weights: Sequence[float]) -> np.ndarray:
    """Scale and round the weights to integers that sum to ROUND, a thousand."""
    weights = np.array(weights, float)
    if not ((weights > 0) & (weights < np.inf)).all():
        raise ConfigError(f"--mix {' '.join(map(str, weights))}: expected numbers above 0")
    weights = weights / weights.max()       # their sum may be infinite
    exact = weights / weights.sum() * ROUND
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[:ROUND - shares.sum()]] += 1
    if (shares == 0).any():
        raise ConfigError(f"--mix {' '.join(map(str, weights))}: each share must be at least "
                          f"0.001")
    return shares


def numbers_at(examples: Sequence, seed: int, places: np.ndarray) -> np.ndarray:
    """Return the numbers of the examples at these indices in the endless order. If `examples` has a
    method order_at, it defines the order; otherwise the order is a shuffle."""
    if hasattr(examples, "order_at"):
        return examples.order_at(seed, places)
    return order_at(len(examples), seed, places)


# -------------------------------------------------------------------------------------------
# Shuffles without lists. An index counts from 0 in an endless order that cycles through all
# examples. Each epoch has a new order, without repeats. The example is a pure function of the seed
# and the index, so a run has no position to save, and all processes agree.

def order_at(count: int, seed: int, places: np.ndarray) -> np.ndarray:
    """Return the numbers, below `count`, of the examples at these indices, without making a list of
    examples. A Feistel network permutes [0, 4^k); apply it until each number is below `count`."""
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
