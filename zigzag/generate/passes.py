"""The compiled passes of generation, on a single device or a mesh.

    new_cache       create an empty cache; with an encoder, add the sources' keys and values
    read_chunk      read some tokens of each row into the cache
    prefill         read all tokens into a new cache, chunk by chunk
    decode          loop in compiled code: read each row's newest id, choose the next
    ids_of_rows     prefill, then decode; works inside a compiled function

The first argument is an Engine (a model). On a mesh, a pass is a single shard_map (Engine.on_mesh).
In it, a device has its rows, all layers, and its part of each weight and of the cache. A pass also
takes the state of its rows, a dict of arrays:

    start      [B]        the slot where each row begins, after its padding
    slot       []         the slot of the newest ids
    newest     [B]        each row's newest id, to read next; initially the prompt's last id, which
                          is read twice
    count      [B]        the number of new ids in each row
    ended      [B]        whether the row has one of `ends` (end ids, padded with -1 to 8 or more)
    seeds      [B, 3]     together with `count`, these determine a row's random numbers
    seen       [B, V]     whether each id is in the row; only with a repetition_penalty
"""

from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zigzag.core.mesh import mark_varying
from zigzag.core.options import only
from zigzag.generate import decoding
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import Sampling, State
from zigzag.generate.engine import Engine
from zigzag.generate.rows import pad_rows, padded_length, seeds_of


@jax.jit(static_argnames=("engine", "slots"))
def new_cache(engine: Engine, params: Any, rows: State, slots: int) -> Any:
    """Return a cache for these rows. It is empty, except for the sources' keys and values if there
    is an encoder."""
    cache = engine.empty_cache(len(rows["start"]), slots, params["embed"].dtype)

    def encode(params, specs, state):
        cache = state.pop("cache")
        encoded = engine.network.encode_source(params, state, engine.config, specs)
        return {"cache": [layer | of_source for layer, of_source in zip(cache, encoded)]}

    source = only(rows, "source", "source_mask", "source_tokens")
    if source:
        cache = engine.on_mesh(encode, params, source | {"cache": cache}, ["cache"])["cache"]
    return cache


@jax.jit(static_argnames=("engine", "length"), donate_argnames="cache")
def read_chunk(engine: Engine, params: Any, cache: Any, rows: State, length: int) -> State:
    """Run the rows' `tokens` [B, T] through the network and into the cache. If rows have `targets`,
    also return their `sums` [B, 2] updated with this chunk: the weighted sum of the targets'
    log-probabilities, and the total weight of the targets that are the argmax."""
    network, config = engine.network, engine.config

    def read(params, specs, state):
        x, cache = network.extend(params, state["cache"], state["tokens"], state["slot"],
                                  state["start"], config, length, specs)
        if "targets" not in state:
            return {"cache": cache}
        logs = jax.nn.log_softmax(network.head_logits(params, x, config))
        of_targets = jnp.take_along_axis(logs, state["targets"][..., None], 2)
        found = jnp.concatenate([of_targets, of_targets == logs.max(-1, keepdims=True)], 2)
        return {"cache": cache,
                "sums": state["sums"] + jnp.sum(found * state["weights"][..., None], 1)}

    return engine.on_mesh(read, params, {**rows, "cache": cache},
                          ("cache", "sums") if "sums" in rows else ("cache",))


def prefill(engine: Engine, params: Any, rows: State, slots: int, length: int, chunk: int = CHUNK
            ) -> State:
    """Read rows chunk by chunk into a new cache with this many slots. Return the resulting state
    (cache, start, slot and newest), plus read_chunk's `sums` if rows have targets."""
    tokens, start = rows["tokens"], rows["start"]
    read = {"cache": new_cache(engine, params, rows, slots)}
    if "targets" in rows:
        read["sums"] = np.zeros((len(tokens), 2), np.float32)
    # Skip the first chunks if they hold only padding.
    first = start.min() // chunk * chunk if isinstance(start, np.ndarray) else 0
    for at in range(first, tokens.shape[1], chunk):
        part = {name: rows[name][:, at:at + chunk] for name in ("tokens", "targets", "weights")
                if name in rows}
        read = read_chunk(engine, params, read.pop("cache"), {
            **part, **read, "start": start, "slot": np.int32(at)}, length)
    return {**read, "start": start, "slot": np.int32(tokens.shape[1] - 1), "newest": tokens[:, -1]}


def room_for(engine: Engine, rows: State, tokens: int) -> tuple[int, int]:
    """Return how many cache slots these rows and `tokens` new ids need, and the length that scales
    their positions (Network.decoding_length)."""
    size = rows["tokens"].shape[1]
    slots = size + (padded_length(tokens) if tokens else 0)
    return slots, engine.network.decoding_length(engine.config, size + tokens, slots)


@jax.jit(static_argnames=("engine", "room", "length", "sampling", "draw"), donate_argnames="cache")
def decode(engine: Engine, params: Any, cache: Any, state: State, limit: Array, room: int,
           length: int, sampling: Sampling, draw: Callable) -> State:
    """Generate `limit` new ids per row, or fewer if all rows end earlier. Return the cache, `ids`
    [B, room] with their `logprobs`, and how many were `written` per row."""
    network, config = engine.network, engine.config

    def run(params, specs, state):
        limit, slot = state.pop("limit"), state.pop("slot")
        empty = mark_varying(jnp.zeros((len(state["newest"]), room), jnp.int32), state["newest"])

        def write_one(carry):
            state, written, found, _ = carry
            x, cache = network.extend(params, state["cache"], state["newest"][:, None],
                                      slot + written, state["start"], config, length, specs)
            logits = network.head_logits(params, x, config)[:, 0]
            state, logprobs = decoding.choose(state | {"cache": cache}, logits, sampling, draw)
            found = [jax.lax.dynamic_update_slice_in_dim(old, new[:, None], written, 1)
                     for old, new in zip(found, (state["newest"], logprobs))]
            return state, written + 1, found, decoding.any_device(~state["ended"])

        def goes_on(carry):
            _, written, _, any_is_unfinished = carry
            return any_is_unfinished & (written < limit)

        state, written, (ids, logprobs), _ = jax.lax.while_loop(goes_on, write_one, (
            state, jnp.int32(0), [empty, empty.astype(jnp.float32)],
            decoding.any_device(~state["ended"])))
        return {"cache": state["cache"], "ids": ids, "logprobs": logprobs, "written": written}

    return engine.on_mesh(run, params, {**state, "cache": cache, "limit": limit},
                          ("cache", "ids", "logprobs", "written"))


def ids_of_rows(engine: Engine, params: Any, rows: State, tokens: int, sampling: Sampling,
                seed: int, ends: Sequence[int], draw: Callable) -> Array:
    """Generate ids [B, tokens] for these rows. Ids after the first one in `ends` are meaningless.
    This works inside a compiled function."""
    def write(params, rows):
        slots, length = room_for(engine, rows, tokens)
        state = prefill(engine, params, rows, slots, length)
        state |= decoding.before_ids(seeds_of(rows, seed, jnp), ends)
        if sampling.repetition_penalty != 1:
            real = jnp.arange(rows["tokens"].shape[1]) >= rows["start"][:, None]
            state["seen"] = jnp.zeros((len(real), engine.config.vocab_size), bool).at[
                jnp.arange(len(real))[:, None], rows["tokens"]].max(real)
        return decode(engine, params, state.pop("cache"), state, tokens, tokens, length, sampling,
                      draw)["ids"]

    return of_padded(engine, params, rows, write)


def of_padded(engine: Engine, params: Any, rows: State, write: Callable) -> Array:
    """Return write(params, rows) for these rows. Before the call, prepare the weights for decoding
    and pad the rows until the mesh divides their number."""
    start = jnp.zeros(len(rows["tokens"]), jnp.int32)
    rows = {name: pad_rows(x, jnp) for name, x in {"start": start, **rows}.items()}
    return write(engine.for_decoding(params), rows)[:len(start)]
