"""Shuffles without lists: which example stands at a place of an endless, shuffled sequence.

A place is a number from 0 to anything. The sequence runs through all examples again and again, each
time in another order, without repeats. Everything is a pure function of the seed and the place, so
a run has no position to save, and any number of processes agree.
"""

import numpy as np

from zigzag.core.errors import ConfigError


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
