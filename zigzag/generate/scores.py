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
    with mesh_of_weights(params):
        params = engine.for_decoding(params)
        if given is not None and sources is None:
            shared, windows = _with_a_common_beginning(windows)
            check_ids("row", rows, engine.config)
            for number, count, sums in _sums_of_shared(engine, params, shared, batch):
                totals[number] += sums[0], count, sums[1]
        for first in range(0, len(windows), batch):
            numbers, arrays, scored = _arrays(engine, windows[first:first + batch], sources)
            sums = _sums(engine, params, arrays, pad_rows(scored))[:len(scored)]
            np.add.at(totals, numbers, np.insert(sums, 1, scored.sum(1), 1))
    return [(float(total), int(count), int(best)) for total, count, best in totals]


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


def _arrays(engine, windows, sources):
    """(the row numbers of these windows, their arrays, which tokens [B, P] are scored)."""
    numbers, ids, context = zip(*windows)
    sources = None if sources is None else [sources[n] for n in numbers]
    arrays = engine.arrays(ids, 0, sources)
    P = arrays["tokens"].shape[1]
    begin = P - np.array([len(row) - n for row, n in zip(ids, context)])
    return list(numbers), arrays, np.arange(P) >= begin[:, None]


def _chunk(engine, rows):
    """The number of tokens of these rows that are read at once: their logits must fit in memory."""
    chunk, B = CHUNK, len(rows["tokens"])
    while chunk > 16 and B * chunk * engine.config.vocab_size > LOGITS:
        chunk //= 2
    return chunk


def _sums(engine, params, rows, scored):
    """The sums [B, 2] of read_chunk over each row's tokens that are scored."""
    # (Rolling makes the first token the last target. Its weight is 0.)
    rows = rows | {"targets": np.roll(rows["tokens"], -1, 1), "weights": np.roll(scored, -1, 1)}
    return on_host(prefill(engine, params, rows, 0, _chunk(engine, rows))[0]["sums"])


# -------------------------------------------------------------------------------------------
# Rows with a common beginning

def _with_a_common_beginning(windows):
    """(the windows that share their given ids with another: {the ids: [(number, the others)]}; all
    other windows). The last given id is among the others: what follows it is scored."""
    found = collections.defaultdict(list)
    for number, (_, row, given) in enumerate(windows):
        if SHARED < given < len(row):
            found[tuple(row[:given - 1])].append(number)
    found = {ids: numbers for ids, numbers in found.items() if len(numbers) > 1}
    shared = {ids: [(windows[n][0], windows[n][1][len(ids):]) for n in numbers]
              for ids, numbers in found.items()}
    others = {*range(len(windows))}.difference(*found.values())
    return shared, [windows[n] for n in sorted(others)]


def _sums_of_shared(engine, params, shared, batch):
    """Yield (number, count, sums [2]) of each window in `shared`: `batch` beginnings are read, then
    what follows them, `batch` rows at a time."""
    begun = sorted(shared, key=len)
    for first in range(0, len(begun), batch):
        some = begun[first:first + batch]
        rest = sorted(((number, at, ids) for at, beginning in enumerate(some)
                       for number, ids in shared[beginning]), key=lambda one: len(one[2]))
        whole = [[*some[at], *ids] for _, at, ids in rest]
        engine.arrays(whole, 0, None)       # (refuses what has no positions)
        rows = engine.arrays(_filled(some, min(batch, len(begun))), 0, None)
        P = rows["tokens"].shape[1]
        slots = P + padded_length(len(rest[-1][2]))
        length = engine.network.decoding_length(
            engine.config, padded_length(max(map(len, whole))), slots)
        state, length = prefill(engine, params, rows, 0, min(64, CHUNK, P), slots, length)
        for few in (rest[at:at + batch] for at in range(0, len(rest), batch)):
            sums = _sums_of_rest(engine, params, state, length, _filled(few, batch))
            yield from ((number, len(ids) - 1, of_row)
                        for (number, _, ids), of_row in zip(few, sums))
        del state           # (its memory is the next one's)


def _filled(items, count):
    """The items, the last of them repeated up to `count`."""
    return [*items, *[items[-1]] * (count - len(items))]


def _sums_of_rest(engine, params, state, length, rest):
    """The sums of rows `rest`: (number, the row of its beginning in the state, ids)."""
    tokens = np.zeros((len(rest), padded_length(max(len(ids) for *_, ids in rest))), np.int32)
    weights = np.zeros(tokens.shape, bool)
    for row, weight, (*_, ids) in zip(tokens, weights, rest):
        row[:len(ids)], weight[:len(ids) - 1] = ids, True
    at = pad_rows(np.array([at for _, at, _ in rest]))
    rows = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}
    rows = {name: pad_rows(x) for name, x in rows.items()} | {"start": state["start"][at]}
    # (No longer than the slots before it: so a chunk does not cross the end of a window's ring.)
    slot = int(state["slot"])
    chunk = min(_chunk(engine, rows), tokens.shape[1], slot)
    read = read_chunks(engine, params, take_rows(state["cache"], at), rows, length, chunk,
                       range(0, tokens.shape[1], chunk), slot)
    return on_host(read["sums"])


@jax.jit
def take_rows(cache: Any, at: Any) -> Any:
    """A cache with these rows of another."""
    return jax.tree.map(lambda a: a[at], cache)
