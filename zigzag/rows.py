"""Rows of ids for decoding: padded to few lengths and to rows that groups of devices can share, so
that few programs are compiled.

    . . t h e |        prompts are padded on the left: places before a row's start are never seen
    o n c e   |
              ^ all rows choose their first new id at the same place
"""

from typing import Any, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from zigzag import stems
from zigzag.cache import CHUNK
from zigzag.errors import ConfigError
from zigzag.mesh import row_groups


def room(length: int) -> int:
    """To how many tokens so many are padded."""
    if length > CHUNK:
        return -(-length // CHUNK) * CHUNK
    return max(16, 2 ** (length - 1).bit_length())


def padded_prompts(prompts: Sequence[Sequence[int]], c: Any, tokens: int
                   ) -> tuple[np.ndarray, np.ndarray]:
    """Prompts that `tokens` ids are to follow as [B, P], padded on the left, and where each
    begins."""
    longest, known = _check_ids("prompt", prompts, c), c.seq_len
    if longest > known:
        raise ConfigError(f"a prompt has {longest} tokens; the model's context has {known}")
    if c.positions == "learned" and longest + tokens > (
            known := c.position_rows - c.position_offset):
        raise ConfigError(f"a prompt of {longest} tokens and {tokens} new ones: the model has "
                          f"positions for {known}")
    padded = np.zeros((len(prompts), room(longest)), np.int32)
    for row, ids in zip(padded, prompts):
        row[-len(ids):] = ids
    return padded, np.array([padded.shape[1] - len(ids) for ids in prompts], np.int32)


def _check_ids(what, rows, c):
    """The length of the longest row."""
    if not len(rows) or not all(map(len, rows)):
        raise ConfigError(f"a {what} is empty: generation needs at least one id to begin with")
    for number, row in enumerate(rows):
        if wrong := [i for i in row if not 0 <= i < c.vocab_size]:
            raise ConfigError(f"{what} {number} has the id {wrong[0]}; the model knows 0 to "
                              f"{c.vocab_size - 1}")
    return max(map(len, rows))


def source_arrays(source: Any, c: Any, rows: int) -> dict[str, np.ndarray]:
    """What an encoder is given of these sources; nothing, where there is no encoder."""
    if (source is None) == (c.encoder_layers > 0):
        raise ConfigError("this model has an encoder: give it a source" if source is None else
                          "this model has no encoder to give a source to")
    if source is None:
        return {}
    if len(source) != rows:
        raise ConfigError(f"{rows} prompts and {len(source)} sources: expected one for each")
    if c.stem != "tokens":
        shape, array = stems.source_shape(c, rows), np.asarray(source, np.float32)
        if array.shape != shape:
            raise ConfigError(f"sources have the shape {list(array.shape)}; expected "
                              f"{list(shape)}")
        return {"source": array}
    longest = _check_ids("source", source, c)
    padded = np.zeros((rows, max(longest, min(room(longest), c.source_len))), np.int32)
    mask = np.zeros(padded.shape, np.float32)
    for row, known, ids in zip(padded, mask, source):
        row[:len(ids)], known[:len(ids)] = ids, 1
    return {"source": padded, "source_mask": mask}


def whole_groups(rows: Any, xp: Any = np) -> Any:
    """An array of rows with more of the last, until the ambient mesh's groups can share them."""
    mesh = jax.sharding.get_abstract_mesh()
    more = 0 if mesh.empty else -len(rows) % row_groups(mesh)
    return xp.concatenate([rows, xp.repeat(rows[-1:], more, 0)]) if more else rows


def rows_of(prompts: Sequence[Sequence[int]], c: Any, tokens: int, source: Any
            ) -> dict[str, np.ndarray]:
    """Prompts and sources as arrays, of as many rows as groups of devices can share."""
    padded, start = padded_prompts(prompts, c, tokens)
    return {name: whole_groups(x) for name, x in {
        "tokens": padded, "start": start, **source_arrays(source, c, len(prompts))}.items()}


def on_host(x: Any) -> np.ndarray:
    """An array that several processes may have parts of."""
    if not getattr(x, "is_fully_addressable", True):
        whole = jax.sharding.NamedSharding(x.sharding.mesh, P())
        x = jax.jit(lambda x: x, out_shardings=whole)(x)
    return np.asarray(x)


# -------------------------------------------------------------------------------------------
# Seeds

def content_hash(rows: Any, first: Any = 0, xp: Any = np) -> Any:
    """A number for the content of each row [B, ...] from its place `first` [B] on."""
    rows = rows.reshape(len(rows), -1)
    if rows.dtype == np.float32:
        rows = rows.view(np.uint32)
    place = xp.arange(rows.shape[1])[None] - xp.asarray(first).reshape(-1, 1)
    mixed = (rows.astype(np.uint32) ^ place.astype(np.uint32) * np.uint32(0x9E3779B1)
             ) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return xp.where(place >= 0, mixed ^ mixed >> np.uint32(16), np.uint32(0)).sum(
        1, dtype=np.uint32)


def seeds_of(rows: dict[str, Any], seed: int | Sequence[int], xp: Any = np, count: int = 0) -> Any:
    """The three numbers [B, 3] that the choices of a row follow from: its seed, its content, and
    (unless traced) how often the same came before. So a text depends neither on what else is in the
    batch nor on its order, and the same prompt again has another one.
    A seed for each row is one for each of the `count` that were there before whole_groups."""
    content = content_hash(rows["tokens"], rows["start"], xp)
    if "source" in rows:
        content = content + content_hash(rows["source"], 0, xp) * np.uint32(31)
    if np.ndim(seed):
        if len(seed) != count:
            raise ConfigError(f"{count} prompts and {len(seed)} seeds: expected one for each")
        seed = whole_groups(np.asarray(seed))
    seeds = xp.broadcast_to(xp.asarray(seed).astype(np.uint32), content.shape)
    nth, known = np.zeros(len(content), np.uint32), {}
    for row, name in enumerate(zip(seeds.tolist(), content.tolist()) if xp is np else ()):
        nth[row] = known[name] = known.get(name, -1) + 1
    return xp.stack([seeds, content, nth], 1)


# -------------------------------------------------------------------------------------------
# Ends and windows

def until(ends: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """The ids before the first end."""
    return ids[:next((at for at, i in enumerate(ids) if i in ends), len(ids))]


def overlapping(rows: Sequence[Sequence[int]], length: int
                ) -> Iterator[tuple[int, Sequence[int], int]]:
    """Windows of rows: the row's number, its ids there, and how many of them are only read. They
    overlap by half."""
    half = max(1, length // 2)
    for number, ids in enumerate(rows):
        begin, given = 0, 1
        while begin == 0 or begin + length - half < len(ids):
            yield number, ids[begin:begin + length], given
            begin, given = begin + half, length - half
