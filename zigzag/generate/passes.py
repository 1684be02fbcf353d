"""The compiled passes of generation, on one device or on a mesh.

    new_cache       an empty cache; with an encoder, the keys and values of its sources
    read_chunk      some tokens of each row, into the cache
    read_chunks     all of them, chunk by chunk; prefill: into a new cache
    choose_ids      one id for each row, from the logits after its prompt
    begin           both: from prompts to their first new ids
    decode          a compiled loop: read each row's last id, choose the next
    write_ids       all of it, inside a compiled function

Each takes an Engine first: a model, and two functions of top-level files. On a mesh a
pass is one shard_map (decoding.on_mesh), in which a device has its rows, all layers, and its part
of each weight and of the cache.
"""

import dataclasses
from typing import Any, Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zigzag.generate import decoding
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import Sampling
from zigzag.generate.rows import on_host, pad_rows, padded_length, prompt_arrays, seeds_of
from zigzag.weights.network import Network


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model that generates text. (zigzag/ imports no top-level file, so the two functions of such
    files come as values: an edit of them is an edit of every way to generate.)"""
    network: Network
    config: Any             # the network's own
    gather: Callable        # shard.gather
    draw: Callable          # sample.draw

    @property
    def specs(self) -> Any:
        """The specs of the weights for decoding on the ambient mesh; None if there is no mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        return decoding.specs_for_decoding(self.network, self.config, mesh)

    def for_decoding(self, params: Any) -> Any:
        """The weights as decoding uses them on the ambient mesh: cast, split, and with a list of
        layers."""
        return decoding.for_decoding(self.network, params, self.config.dtype, self.specs)

    def arrays(self, prompts: Sequence[Sequence[int]], tokens: int, source: Any) -> dict[str, Any]:
        """The prompts as arrays, and rows of padding until their number divides over the ambient
        mesh. Refused if there are no positions for `tokens` more ids."""
        return prompt_arrays(self.network, prompts, self.config, tokens, source)

    def on_mesh(self, fn: Callable, params: Any, state: dict[str, Any], outputs: Iterable[str]
                ) -> dict[str, Any]:
        """fn(params, specs, state) in one shard_map over the ambient mesh, or plainly without a
        mesh. fn returns a dict with the names `outputs`."""
        specs = self.specs

        def run(params, state):
            return fn(decoding.gather_all_but_layers(params, specs, self.gather), specs, state)

        layers = self.network.cache_layers(self.config)
        return decoding.on_mesh(run, params, state, layers, specs, outputs)


@jax.jit(static_argnames=("engine", "slots"))
def new_cache(engine: Engine, params: Any, rows: dict[str, Array], slots: int) -> Any:
    """An empty cache for these rows. With an encoder, it holds the keys and values of the
    sources."""
    network, config = engine.network, engine.config
    cache = decoding.empty_cache(network.cache_layers(config), len(rows["start"]), slots,
                                 params["embed"].dtype, engine.specs)
    source = {name: rows[name] for name in ("source", "source_mask") if name in rows}
    if source:
        def encode(params, specs, source):
            return {"cross": network.encode_source(params, source, config, specs)}

        cross = engine.on_mesh(encode, params, source, ["cross"])["cross"]
        cache = [layer | of_source for layer, of_source in zip(cache, cross)]
    return cache


@jax.jit(static_argnames=("engine", "length"), donate_argnames="cache")
def read_chunk(engine: Engine, params: Any, cache: Any, rows: dict[str, Array], length: int
               ) -> dict[str, Any]:
    """Run the rows' tokens [B, T] through the network. Returns the cache with these tokens, and the
    logits [B, V] after the last of them, or after number rows["last"]. If rows have targets, it
    returns sums [B, 2] instead of logits: the weighted sum of their log-probabilities, and of the
    targets that are likeliest."""
    network, config = engine.network, engine.config

    def read(params, specs, state):
        x, cache = network.extend(params, state["cache"], state["tokens"], state["slot"],
                                  state["start"], config, length, specs)
        if "targets" not in state:
            last = x[:, -1:]
            if "last" in state:
                last = jax.lax.dynamic_slice_in_dim(x, state["last"], 1, 1)
            return {"cache": cache, "logits": network.head_logits(params, last, config)[:, 0]}
        logs = jax.nn.log_softmax(network.head_logits(params, x, config))
        of_targets = jnp.take_along_axis(logs, state["targets"][..., None], 2)
        found = jnp.concatenate([of_targets, of_targets == logs.max(-1, keepdims=True)], 2)
        return {"cache": cache, "sums": jnp.sum(found * state["weights"][..., None], 1)}

    return engine.on_mesh(read, params, {**rows, "cache": cache},
                          ("cache", "sums" if "targets" in rows else "logits"))


def prefill(engine: Engine, params: Any, rows: dict[str, Any], tokens: int, chunk: int = CHUNK,
            slots: int = 0, length: int = 0) -> tuple[dict[str, Any], int]:
    """Read rows chunk by chunk, into a new cache with room for `tokens` more ids (or with `slots`).
    Returns the state after them (cache, start and slot), with what read_chunks gives; and the
    length that scales positions (Network.decoding_length; or `length`)."""
    P = rows["tokens"].shape[1]
    slots = slots or P + (padded_length(tokens) if tokens else 0)
    length = length or engine.network.decoding_length(engine.config, P + tokens, slots)
    # (Chunks of padding alone need not be read.)
    first = rows["start"].min() // chunk * chunk if isinstance(rows["start"], np.ndarray) else 0
    state = read_chunks(engine, params, new_cache(engine, params, rows, slots), rows, length, chunk,
                        range(first, P, chunk))
    return {**state, "start": rows["start"], "slot": np.int32(P)}, length


def read_chunks(engine: Engine, params: Any, cache: Any, rows: dict[str, Any], length: int,
                chunk: int, places: Iterable[int], slot: int = 0) -> dict[str, Any]:
    """Read the rows' tokens that begin at these places, a chunk at a time, into slots from `slot`
    on. Returns the cache, with the logits of the last chunk or, if rows have targets, the sums over
    all chunks."""
    state, has_time = {"cache": cache}, ("tokens", "targets", "weights")
    for at in places:
        inputs = {name: x[:, at:at + chunk] if name in has_time else x
                  for name, x in rows.items() if not name.startswith("source")}
        before = state.get("sums", 0)
        state = read_chunk(engine, params, state["cache"], {
            **inputs, "slot": np.int32(slot + at)}, length)
        if "sums" in state:
            state["sums"] += before
    return state


@jax.jit(static_argnames=("engine", "sampling"), donate_argnames="state")
def choose_ids(engine: Engine, state: dict[str, Any], logits: Array, sampling: Sampling
               ) -> dict[str, Any]:
    """The state with one more id in each row, chosen by these logits [B, V]."""
    def choose(_, specs, state):
        return decoding.append_ids(state, state.pop("logits"), engine.draw, sampling)

    return engine.on_mesh(choose, {}, state | {"logits": logits}, state)


@jax.jit(static_argnames=("engine", "length", "sampling"), donate_argnames="state")
def decode(engine: Engine, params: Any, state: dict[str, Any], limit: Array, length: int,
           sampling: Sampling) -> dict[str, Any]:
    """The state with `limit` new ids in each row, or fewer if all rows end before."""
    network, config = engine.network, engine.config

    def run(params, specs, state):
        limit = state.pop("limit")

        def write_one(carry):
            state, _ = carry
            last = jax.lax.dynamic_slice_in_dim(state["ids"], state["count"] - 1, 1, 1)
            x, cache = network.extend(params, state["cache"], last, state["slot"], state["start"],
                                      config, length, specs)
            logits = network.head_logits(params, x, config)[:, 0]
            state = state | {"cache": cache, "slot": state["slot"] + 1}
            state = decoding.append_ids(state, logits, engine.draw, sampling)
            return state, decoding.any_device(~state["ended"])

        def goes_on(carry):
            state, any_is_unfinished = carry
            return any_is_unfinished & (state["count"] < limit)

        first = state, decoding.any_device(~state["ended"])
        return jax.lax.while_loop(goes_on, write_one, first)[0]

    return engine.on_mesh(run, params, state | {"limit": limit}, state)


def begin(engine: Engine, params: Any, state: dict[str, Any], rows: dict[str, Any], tokens: int,
          sampling: Sampling, *how: int) -> tuple[dict[str, Any], int]:
    """The state after these rows were read and one more id was chosen for each; and the length for
    decode. `how`: chunk, slots and length of prefill."""
    read, length = prefill(engine, params, rows, tokens, *how)
    logits = read.pop("logits")
    return choose_ids(engine, state | read, logits, sampling), length


def new_ids(state: dict[str, Any], first: int, most: int) -> tuple[list[tuple[list, list]], int]:
    """The new ids of each row from number `first` on, with their log-probabilities; and how many
    the state has now, at most `most`."""
    count = min(int(on_host(state["count"])), most)
    return [*zip(*(on_host(state[name])[:, first:count].tolist()
                   for name in ("ids", "logprobs")))], count


# -------------------------------------------------------------------------------------------
# Inside a compiled function

def traced_rows(engine: Engine, params: Any, rows: dict[str, Array]) -> tuple[Any, dict[str, Any]]:
    """(the weights, the rows) as the passes take them, inside a compiled function."""
    start = jnp.zeros(len(rows["tokens"]), jnp.int32)
    rows = {name: pad_rows(x, jnp) for name, x in {"start": start, **rows}.items()}
    return engine.for_decoding(params), rows


@jax.jit(static_argnames=("engine", "tokens", "sampling", "ends"))
def write_ids(engine: Engine, params: Any, rows: dict[str, Array], tokens: int,
              sampling: Sampling, seed: int, ends: tuple[int, ...]) -> Array:
    """New ids [B, tokens] of these rows; those after the first one in `ends` mean nothing."""
    count = len(rows["tokens"])
    params, rows = traced_rows(engine, params, rows)
    state = decoding.empty_ids(rows, padded_length(tokens), seeds_of(rows, seed, jnp), ends,
                               sampling, engine.config.vocab_size)
    state, length = begin(engine, params, state, rows, tokens, sampling)
    return decode(engine, params, state, tokens, length, sampling)["ids"][:count, :tokens]
