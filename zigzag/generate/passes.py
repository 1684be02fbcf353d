"""The compiled passes of generation, on one device or on a mesh.

    new_cache       an empty cache; with an encoder, the keys and values of its sources
    read_chunk      some tokens of each row, into the cache
    read_chunks     all of them, chunk by chunk; prefill: into a new cache
    choose_ids      one id for each row, from the logits after its prompt
    decode          a compiled loop: read each row's newest id, choose the next
    write_ids       all of it, inside a compiled function

Each takes an Engine first: a model. On a mesh a pass is one shard_map (Engine.on_mesh), in which
a device has its rows, all layers, and its part of each weight and of the cache. A pass also takes
the state of its rows, a dict of arrays:

    start      [B]        the slot where a row begins, after its padding
    slot       []         the slot of the next token to be read
    newest     [B]        a row's newest id, which is not in the cache yet
    count      [B]        how many new ids a row has
    ended      [B]        whether a row has one of `ends` (end ids, padded with -1 to 8 or more)
    seeds      [B, 3]     a row's random numbers follow from these and from `count`
    seen       [B, V]     the ids in a row; only with a repetition_penalty
"""

import dataclasses
from typing import Any, Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from zigzag.core.mesh import batch_spec, mark_varying
from zigzag.generate import decoding
from zigzag.generate.cache import CHUNK
from zigzag.generate.decoding import Sampling
from zigzag.generate.rows import pad_rows, padded_length, prompt_arrays, seeds_of
from zigzag.weights.network import Network

REPLICATED = {"slot", "last", "ends", "limit", "written"}     # in a state: the same for all rows


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model that generates text."""
    network: Network
    config: Any             # the network's own

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
        mesh. fn gets this device's part of the state and, of the weights, what it has before it
        reaches a layer. It returns a dict with the names `outputs`."""
        specs = self.specs
        if specs is None:
            return fn(params, None, state)
        rows = batch_spec(jax.sharding.get_abstract_mesh())
        cache = decoding.cache_specs(self.network.cache_layers(self.config), specs)

        def run(params, state):
            return fn(decoding.gather_all_but_layers(params, specs), specs, state)

        def specs_of(names):
            return {name: [{n: s for n, s in layer.items() if name == "cache" or n.startswith(name)}
                           for layer in cache] if name in ("cache", "cross") else
                    P() if name in REPLICATED else rows for name in names}

        return jax.shard_map(run, in_specs=(specs if params else P(), specs_of(state)),
                             out_specs=specs_of(outputs))(params, state)


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
    size = rows["tokens"].shape[1]
    slots = slots or size + (padded_length(tokens) if tokens else 0)
    length = length or engine.network.decoding_length(engine.config, size + tokens, slots)
    # (Chunks of padding alone need not be read.)
    first = rows["start"].min() // chunk * chunk if isinstance(rows["start"], np.ndarray) else 0
    state = read_chunks(engine, params, new_cache(engine, params, rows, slots), rows, length, chunk,
                        range(first, size, chunk))
    return {**state, "start": rows["start"], "slot": np.int32(size)}, length


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


@jax.jit(static_argnames=("engine", "sampling", "draw"))
def choose_ids(engine: Engine, state: dict[str, Any], logits: Array, sampling: Sampling,
               draw: Callable) -> dict[str, Any]:
    """The state with one more id in each row, chosen by these logits [B, V], and `logprobs` [B]."""
    def run(_, specs, state):
        state, logprobs = decoding.choose(state, state.pop("logits"), sampling, draw)
        return state | {"logprobs": logprobs}

    return engine.on_mesh(run, {}, state | {"logits": logits}, {*state, "newest", "logprobs"})


@jax.jit(static_argnames=("engine", "room", "length", "sampling", "draw"), donate_argnames="cache")
def decode(engine: Engine, params: Any, cache: Any, state: dict[str, Any], limit: Array, room: int,
           length: int, sampling: Sampling, draw: Callable) -> dict[str, Any]:
    """`limit` new ids of each row, or fewer if all rows end before: the cache, `ids` [B, room] with
    their `logprobs`, and the number of those that are `written`."""
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


# -------------------------------------------------------------------------------------------
# Inside a compiled function

def traced_rows(engine: Engine, params: Any, rows: dict[str, Array]) -> tuple[Any, dict[str, Any]]:
    """(the weights, the rows) as the passes take them, inside a compiled function."""
    start = jnp.zeros(len(rows["tokens"]), jnp.int32)
    rows = {name: pad_rows(x, jnp) for name, x in {"start": start, **rows}.items()}
    return engine.for_decoding(params), rows


@jax.jit(static_argnames=("engine", "tokens", "sampling", "ends", "draw"))
def write_ids(engine: Engine, params: Any, rows: dict[str, Array], tokens: int,
              sampling: Sampling, seed: int, ends: tuple[int, ...], draw: Callable) -> Array:
    """New ids [B, tokens] of these rows; those after the first one in `ends` mean nothing."""
    count = len(rows["tokens"])
    params, rows = traced_rows(engine, params, rows)
    read, length = prefill(engine, params, rows, tokens)
    cache, logits = read.pop("cache"), read.pop("logits")
    state = read | decoding.before_ids(seeds_of(rows, seed, jnp), ends)
    if sampling.repetition_penalty != 1:
        real = jnp.arange(rows["tokens"].shape[1]) >= rows["start"][:, None]
        state["seen"] = jnp.zeros(logits.shape, bool).at[
            jnp.arange(len(real))[:, None], rows["tokens"]].max(real)
    state = choose_ids(engine, state, logits, sampling, draw)
    state.pop("logprobs")
    more = decode(engine, params, cache, state, tokens - 1, max(1, tokens - 1), length, sampling,
                  draw)["ids"]
    return jnp.concatenate([state["newest"][:, None], more], 1)[:count, :tokens]
