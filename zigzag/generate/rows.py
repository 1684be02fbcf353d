"""Turning prompts into arrays. We pad them to a few lengths, so that jax compiles few programs, and
pad their number until the mesh divides it.

    . . t h e |        we pad prompts on the left, and mask slots before a row's start
    o n c e   |
              ^ all rows choose their first new id at the same slot
"""

import collections
import sys
from typing import Any, Sequence

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import get_abstract_mesh

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import row_groups
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import State
from zigzag.parallel.network import Network, check_tensor
from zigzag.parallel.rotary import scaled_length


def padded_length(length: int) -> int:
    """Return a row's length after padding: a power of two, at least 16, or a multiple of CHUNK."""
    if length > CHUNK:
        return -(-length // CHUNK) * CHUNK
    return max(16, 2 ** (length - 1).bit_length())


def padded_prompts(network: Network, prompts: Sequence[Sequence[int]], c: Any, tokens: int
                   ) -> tuple[np.ndarray, np.ndarray]:
    """Return (prompts as [B, P], padded on the left; the slots [B] where they begin). Reject
    prompts that don't leave enough positions for `tokens` new ids; the last id is never read, so it
    needs none. If placeholder ids represent a source, put them before each prompt."""
    longest, context = check_ids("prompt", prompts, c), context_of(network, c)
    before, limit = network.source_ids(c), network.max_positions(c)
    room = context if longest > context else limit - len(before)
    if longest + max(0, tokens - 1) > room:
        raise ConfigError(f"a prompt of {longest} tokens and {tokens} new ones: the model's "
                          f"context has {room}")
    padded = np.zeros((len(prompts), padded_length(len(before) + longest)), np.int32)
    sizes = [len(before) + len(prompt) for prompt in prompts]
    for row, size, prompt in zip(padded, sizes, prompts):
        row[-size:] = [*before, *prompt]
    return padded, padded.shape[1] - np.array(sizes, np.int32)


def check_ids(what, rows, c):
    """Reject rows that are empty or not lists of valid ids. Return the longest row's length."""
    for number, row in enumerate(rows):
        is_list = np.ndim(row) == 1 and len(row)
        wrong = [i for i in row if not 0 <= i < c.vocab_size] if is_list else [row]
        if wrong:
            raise ConfigError(f"{what} {number} has {wrong[0]!r:.60}: expected a list of ids from "
                              f"0 to {c.vocab_size - 1}")
    if not len(rows):
        raise ConfigError(f"no {what}: expected at least one list of ids")
    return max(map(len, rows))


def check_writes(network: Network, c: Any, what: str, mesh: Any = None) -> None:
    """Reject a model that doesn't generate text, or that this mesh can't split."""
    if mesh is not None and mesh.shape["tensor"] > 1:
        check_tensor(c, mesh, network.weight_specs(c, mesh))
    if (gives := network.gives(c)) != "text":
        raise ConfigError(f"{what}: this model returns {gives}, not text")


def source_arrays(network: Network, source: Any, c: Any, rows: int) -> State:
    """Turn sources into the encoder's inputs, or return {} for a model without an encoder."""
    shape = network.source_shape(c)
    if (source is None) == (shape is not None):
        raise ConfigError("this model has an encoder: give it a source" if source is None else
                          "this model has no encoder: give it no source")
    if source is None:
        return {}
    if len(source) != rows:
        raise ConfigError(f"{rows} prompts and {len(source)} sources: expected one for each")
    if len(shape) == 1:
        return _padded_sources("source", source, c, shape[0])
    before, texts = network.source_text(c), {}
    if before and isinstance(source[0], tuple):     # (array, ids): the encoder reads both
        source, ids = zip(*source)
        texts = _padded_sources("source_tokens", [[*before, *row] for row in ids], c)
    array = np.asarray(source, np.float32)
    if array.shape != (rows, *shape):
        raise ConfigError(f"sources have the shape {list(array.shape)}; expected {[rows, *shape]}")
    return {"source": array, **texts}


def _padded_sources(name, rows, c, most=sys.maxsize):
    longest = check_ids("source", rows, c)
    padded = np.zeros((len(rows), max(longest, min(padded_length(longest), most))), np.int32)
    mask = np.zeros(padded.shape, np.float32)
    for row, mask_row, ids in zip(padded, mask, rows):
        row[:len(ids)], mask_row[:len(ids)] = ids, 1
    return {name: padded, "source_mask": mask}


def pad_rows(rows: Any, xp: Any = np) -> Any:
    """Repeat the last row until the mesh divides the number of rows."""
    more = -len(rows) % row_groups(get_abstract_mesh())
    return xp.concatenate([rows, xp.repeat(rows[-1:], more, 0)]) if more else rows


def prompt_arrays(network: Network, prompts: Sequence[Sequence[int]], c: Any, tokens: int,
                  source: Any) -> State:
    """Return prompts and sources as arrays, with enough rows for the ambient mesh to divide. Reject
    prompts that don't leave enough positions for `tokens` new ids."""
    check_writes(network, c, "sample")
    padded, start = padded_prompts(network, prompts, c, tokens)
    arrays = {"tokens": padded, "start": start,
              **source_arrays(network, source, c, len(prompts))}
    return {name: pad_rows(x) for name, x in arrays.items()}


def on_host(x: Any) -> np.ndarray:
    """Return the whole array as numpy, including the parts that remote processes hold."""
    if not getattr(x, "is_fully_addressable", True):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


# -------------------------------------------------------------------------------------------
# Seeds

def content_hash(rows: Any, first: Any = 0, xp: Any = np) -> Any:
    """Hash each row [B, ...], starting at index `first` [B]."""
    rows = rows.reshape(len(rows), -1)
    if rows.dtype == np.float32:
        rows = rows.view(np.uint32)
    place = xp.arange(rows.shape[1])[None] - xp.asarray(first).reshape(-1, 1)
    mixed = (rows.astype(np.uint32) ^ place.astype(np.uint32) * np.uint32(0x9E3779B1)
             ) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return xp.where(place >= 0, mixed ^ mixed >> np.uint32(16), np.uint32(0)).sum(
        1, dtype=np.uint32)


def seeds_of(rows: State, seed: int | Sequence[int], xp: Any = np) -> Any:
    """Return three integers per row [B, 3] that seed its random numbers: its seed (`seed` is a
    single seed or one per row), a hash of its content, and the number of equal rows before it (0 if
    traced). So an answer doesn't depend on the other rows or their order, yet equal prompts get
    different answers."""
    content = content_hash(rows["tokens"], rows["start"], xp)
    if "source" in rows:
        content = content + content_hash(rows["source"], 0, xp) * np.uint32(31)
    if "source_tokens" in rows:     # reversed, its padding comes first
        length = rows["source_mask"].sum(1).astype(np.int32)
        text, begin = rows["source_tokens"][:, ::-1], rows["source_mask"].shape[1] - length
        content = content + content_hash(text, begin, xp) * np.uint32(37)
    if np.ndim(seed) and len(seed) != len(content):
        raise ConfigError(f"{len(content)} prompts and {len(seed)} seeds: expected one for each")
    seeds = xp.broadcast_to(xp.asarray(seed).astype(np.uint32), content.shape)
    nth, seen = np.zeros(len(content), np.uint32), collections.Counter()
    for row, key in enumerate(zip(seeds.tolist(), content.tolist()) if xp is np else ()):
        nth[row] = seen[key]
        seen[key] += 1
    return xp.stack([seeds, content, nth], 1)


# -------------------------------------------------------------------------------------------
# Contexts and ends

def context_of(network: Network, c: Any) -> int:
    """Return the maximum number of tokens per row: seq_len (or more, if positions scale with the
    length), or the number of positions if that is smaller or there is an encoder."""
    positions = network.max_positions(c) - len(network.source_ids(c))
    if network.source_shape(c) is not None:
        return positions
    return min(scaled_length(getattr(c, "rope_scaling", ""), c.seq_len), positions)


def cut_at_end(ends: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """Return the ids before the first one in `ends`."""
    return ids[:next((n for n, i in enumerate(ids) if i in ends), len(ids))]
