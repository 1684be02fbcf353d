"""The log-probabilities of given ids (sample.score), a row at a time.

A row that is longer than the context is read in windows that overlap by half:

    a b c d e f g       a context of 4 tokens
    a b c d             b c d are scored
        c d e f         e f
            e f g       g

Rows that begin with the same given ids, such as a question with several choices, share their
reading: its keys and values are copied for each row (Shared).

    The sky is | green      The sky    is read once
               | blue            is green, is blue    are read after it
"""

import collections
from typing import Any, Iterator, Sequence

import jax
import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import mesh_of_weights
from zigzag.generate.passes import Engine, prefill, read_chunks
from zigzag.generate.rows import check_ids, on_host, pad_rows, padded_length
from zigzag.parallel.products import LOGITS

SHARED = 16     # ids that rows have in common, from which on they are read once


def logprobs_of(engine: Engine, params: Any, rows: Sequence[Sequence[int]], sources: Any,
                batch: int, given: Sequence[int] | None = None) -> list[tuple[float, int, int]]:
    """For each row of ids, the sum of their log-probabilities, how many there are, and how many of
    them are the likeliest in their place. Every id has a log-probability except the first, or the
    first given[row] ids. A row longer than the context is read in windows that overlap by half;
    given ids that do not fit into one window with the others are left out."""
    length = engine.config.seq_len - len(engine.network.source_ids(engine.config))
    # (Rows of similar length are computed together, with little padding.)
    windows = sorted(overlapping_windows(rows, length, given), key=lambda one: len(one[1]))
    totals = np.zeros((len(rows), 3))

    def add(windows, sums):
        for (number, ids, context), (total, best) in zip(windows, sums):
            totals[number] += total, max(0, len(ids) - context), best

    with mesh_of_weights(params):
        params = engine.for_decoding(params)
        if given is not None and sources is None:
            check_ids("row", rows, engine.config)
            shared, windows = _with_a_common_beginning(windows)
            for some, sums in _sums_of_shared(engine, params, shared, batch):
                add(some, sums)
        for some in _parts(windows, batch):
            add(some, _sums(engine, params, some, sources))
    return [(float(total), int(count), int(best)) for total, count, best in totals]


def _parts(items, size):
    return [items[at:at + size] for at in range(0, len(items), size)]


def overlapping_windows(rows: Sequence[Sequence[int]], length: int,
                        given: Sequence[int] | None = None) -> Iterator[tuple[int, Any, int]]:
    """Yield windows of the rows that overlap by half: (the row's number, the window's ids, how many
    of them are only context and not scored). The first given[row] ids of a row, by default one, are
    not scored. They are left out as far as the row is longer than a window."""
    if length < 2:
        raise ConfigError(f"seq_len {length}: to score a token, the context must be at least 2")
    half = length // 2
    for number, (ids, context) in enumerate(zip(rows, given or [1] * len(rows), strict=True)):
        left_out = max(0, min(context - 1, len(ids) - length))
        ids, context, begin = ids[left_out:], context - left_out, 0
        while begin == 0 or begin + length - half < len(ids):
            yield number, ids[begin:begin + length], context
            begin, context = begin + half, length - half


def _chunk(engine, rows):
    """The number of tokens of these rows that are read at once: their logits must fit in memory."""
    chunk, B = CHUNK, len(rows["tokens"])
    while chunk > 16 and B * chunk * engine.config.vocab_size > LOGITS:
        chunk //= 2
    return chunk


def _sums(engine, params, windows, sources):
    """The sums [B, 2] of read_chunk over the ids of these windows that are scored."""
    rows = engine.arrays([ids for _, ids, _ in windows], 0,
                         None if sources is None else [sources[n] for n, *_ in windows])
    scored = [len(ids) - context for _, ids, context in windows]
    size = rows["tokens"].shape[1]
    weights = np.arange(size) >= size - pad_rows(np.array(scored))[:, None]
    # (Rolling makes the first token the last target. Its weight is 0.)
    rows |= {"targets": np.roll(rows["tokens"], -1, 1), "weights": np.roll(weights, -1, 1)}
    return on_host(prefill(engine, params, rows, 0, _chunk(engine, rows))[0]["sums"])


# -------------------------------------------------------------------------------------------
# Rows with a common beginning

def _with_a_common_beginning(windows):
    """({beginning: the windows without it that share it}, all other windows). A beginning is all
    given ids but the last, after which an id is scored."""
    found = collections.defaultdict(list)
    for number, row, given in windows:
        found[tuple(row[:given - 1]) if SHARED < given < len(row) else None].append(
            (number, row, given))
    alone = [window for beginning, some in found.items() for window in some
             if beginning is None or len(some) == 1]
    return {beginning: [(number, row[given - 1:], 1) for number, row, given in some]
            for beginning, some in found.items() if beginning is not None and len(some) > 1
            }, sorted(alone, key=lambda one: len(one[1]))


def _sums_of_shared(engine, params, shared, batch):
    """Yield (windows, their sums [B, 2]): `batch` beginnings are read, then what follows them,
    `batch` rows at a time."""
    for some in _parts(sorted(shared, key=len), batch):
        rest = sorted(((len(beginning), at, window) for at, beginning in enumerate(some)
                       for window in shared[beginning]), key=lambda one: len(one[2][1]))
        longest = max(begun + len(ids) for begun, _, (_, ids, _) in rest)
        engine.arrays([[0] * longest], 0, None)     # (refuses what has no positions)
        rows = engine.arrays(_filled(some, min(batch, len(shared))), 0, None)
        size = rows["tokens"].shape[1]
        slots = size + padded_length(len(rest[-1][2][1]))
        length = engine.network.decoding_length(engine.config, padded_length(longest), slots)
        state, length = prefill(engine, params, rows, 0, min(64, CHUNK, size), slots, length)
        for few in _parts(rest, batch):
            _, at, windows = zip(*_filled(few, batch))
            yield windows[:len(few)], _sums_of_rest(engine, params, state, length, at, windows)
        del state           # (its memory is the next one's)


def _filled(items, count):
    """The items, the last of them repeated up to `count`."""
    return [*items, *[items[-1]] * (count - len(items))]


def _sums_of_rest(engine, params, state, length, at, windows):
    """The sums of windows that follow the beginnings in the state's rows `at`."""
    size = padded_length(max(len(ids) for _, ids, _ in windows))
    tokens = np.zeros((len(windows), size), np.int32)
    for row, (_, ids, _) in zip(tokens, windows):
        row[:len(ids)] = ids
    weights = np.arange(1, size + 1) < np.array([[len(ids)] for _, ids, _ in windows])
    rows = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}
    at = pad_rows(np.array(at))
    rows = {name: pad_rows(x) for name, x in rows.items()} | {"start": state["start"][at]}
    # (No longer than the slots before it: so a chunk does not cross the end of a window's ring.)
    slot = int(state["slot"])
    chunk = min(_chunk(engine, rows), size, slot)
    read = read_chunks(engine, params, take_rows(state["cache"], at), rows, length, chunk,
                       range(0, size, chunk), slot)
    return on_host(read["sums"])


@jax.jit
def take_rows(cache: Any, at: Any) -> Any:
    """A cache with these rows of another."""
    return jax.tree.map(lambda a: a[at], cache)
