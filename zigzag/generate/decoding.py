"""How an id is chosen, and decoding on a mesh.

The state is a dict of arrays (passes.py has a table of them). If rows are split over devices, all
devices go on until the last row has ended, because they may have to gather weights together.

On a mesh, a forward pass is one shard_map, as a training step is. It takes the weights, which are
split as in training except that each device has all layers, and the state: the rows (padded to a
number that the mesh divides), the cache (zigzag/generate/cache.py), and what all rows share.
"""

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import (
    axis_size,
    cast,
    mesh_of,
    shardings,
    varying,
    without_axis,
)
from zigzag.generate.cache import layer_specs, new_layer
from zigzag.parallel.collectives import all_gather
from zigzag.weights import lora
from zigzag.weights.network import Layer, Network
from zigzag.weights.table import layer_counts


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How an id is chosen: the options of `generate` that are compiled into the loop."""
    temperature: float = 1.0            # 0: greedy
    top_k: int = 0                      # keep the k likeliest ids; 0: all
    top_p: float = 1.0                  # keep the likeliest ids whose probabilities add up to this
    min_p: float = 0.0                  # keep ids with this share of the largest probability
    repetition_penalty: float = 1.0     # divides positive logits of earlier ids, multiplies others

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1
                and 0 <= self.min_p <= 1 and self.repetition_penalty > 0):
            raise ConfigError(f"{self}: temperature and top_k must be 0 or more, top_p above 0 and "
                              f"at most 1, min_p from 0 to 1, and repetition_penalty above 0")


GREEDY = Sampling(temperature=0)


def sampling_of(sampling: Sampling | float, changes: dict[str, Any]) -> Sampling:
    """The Sampling with these of its fields changed; a number is one with this temperature."""
    if isinstance(sampling, Sampling):
        return dataclasses.replace(sampling, **changes)
    return Sampling(temperature=sampling, **changes)


def end_ids(ends: Any, vocab_size: int) -> list[int]:
    """The ids in `ends` (one, several or None) that are in the vocabulary."""
    return [int(i) for i in np.ravel([] if ends is None else ends) if 0 <= i < vocab_size]


def penalised(logits: Array, seen: Array, penalty: float) -> Array:
    """Logits [B, V], lower for the ids that are `seen` [B, V]."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def ids_seen(rows: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Which ids [B, V] appear in these rows."""
    seen = np.zeros((len(rows), vocab_size), bool)
    for of_row, ids in zip(seen, rows):
        of_row[ids] = True
    return seen


def before_ids(seeds: Any, ends: Sequence[int], count: Any = 0) -> dict[str, Any]:
    """The state of rows with these seeds [B, 3] before an id is chosen for them. `count` [B] new
    ids are there."""
    return {"seeds": seeds, "count": np.zeros(len(seeds), np.int32) + np.array(count, np.int32),
            "ended": np.zeros(len(seeds), bool),
            # (Padded with -1, which is no id, to 8 ends: other ends then need no compilation.)
            "ends": np.array([*ends, *[-1] * max(1, 8 - len(ends))], np.int32)}


def keys_of(seeds: Array, count: Array | int) -> Array:
    """The random keys [B] for new id number `count` (of all rows, or [B]), of rows with these seeds
    [B, 3]."""
    return jax.vmap(lambda seed, count: functools.reduce(
        jax.random.fold_in, (seed[1], seed[2], count), jax.random.key(seed[0])))(
            seeds, jnp.broadcast_to(count, len(seeds)))


def choose(state: dict[str, Any], logits: Array, sampling: Sampling, draw: Callable
           ) -> tuple[dict[str, Any], Array]:
    """The state with a `newest` id in each row, which draw (sample.draw) chooses from these logits
    [B, V]; and the ids' log-probabilities [B]. Rows that have ended get ids too, which nobody
    reads."""
    has_penalty = "seen" in state
    scores = penalised(logits, state["seen"], sampling.repetition_penalty
                       ) if has_penalty else logits
    ids = draw(scores, keys_of(state["seeds"], state["count"]), sampling)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1)[:, 0]
    new = {"newest": ids, "count": state["count"] + 1,
           "ended": state["ended"] | (ids[:, None] == state["ends"]).any(-1)}
    if has_penalty:
        new["seen"] = state["seen"] | (jnp.arange(logits.shape[1]) == ids[:, None])
    return state | new, logprobs


def any_device(x: Array) -> Array:
    """Whether x has a True on any device."""
    x, axes = x.any(), tuple(sorted(varying(x)))
    return lax.pmax(x.astype(jnp.int32), axes) > 0 if axes else x


# -------------------------------------------------------------------------------------------
# Decoding on a mesh: which device has which rows, weights and parts of the cache

@contextlib.contextmanager
def mesh_of_weights(params: Any) -> Iterator[None]:
    """Make the mesh of the weights jax's ambient mesh."""
    mesh = mesh_of(params)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        yield


def unstack_layers(tree: Any, counts: dict[str, int], of_layer: Callable) -> Any:
    """The tree with a list of layers, each a dict of its own, in place of stacked weights [L, ...]:
    `counts` has the names of the stacks, in order, and how many layers are in each. of_layer(leaf,
    i) makes the leaf of layer i from a stacked leaf (a weight, or its spec)."""
    return {**{name: w for name, w in tree.items() if name not in counts}, "layers": [
        lora.adapted(jax.tree.map(lambda w: of_layer(w, i), tree[name]))
        for name, count in counts.items() for i in range(count)]}


@functools.cache
def specs_for_decoding(network: Network, config: Any, mesh: Any) -> Any:
    """The specs of the weights for decoding: those for training, without the dimension of layers.
    None on one device."""
    if mesh.size <= 1:
        return None
    decoder_of = network.decoder_of or (lambda tree: tree)
    specs = decoder_of(without_axis(network.weight_specs(config, mesh), "pipe"))
    return unstack_layers(specs, layer_counts(decoder_of(network.table(config))),
                          lambda spec, i: P(*spec[1:]))


def for_decoding(network: Network, params: Any, dtype: str, specs: Any) -> Any:
    """The weights in this precision, with a list of layers, on the ambient mesh. (Weights that have
    been through this are returned as they are.)"""
    if isinstance(params.get("layers"), list):
        return params
    params = network.decoder_of(params) if network.decoder_of else params
    # (w[i] would compile one slice for each i; a dynamic index compiles one for all layers.)
    params = unstack_layers(cast(params, dtype), layer_counts(params),
                            lambda w, i: lax.dynamic_index_in_dim(w, i, 0, keepdims=False))
    return placed(params, specs)


def places_for_decoding(network: Network, config: Any, mesh: Any) -> Any:
    """The shapes of for_decoding's result, each with its sharding."""
    shapes = jax.eval_shape(lambda params: for_decoding(network, params, config.dtype, None),
                            network.weight_shapes(config))
    specs = specs_for_decoding(network, config, mesh)
    specs = jax.tree.map(lambda _: P(), shapes) if specs is None else specs
    return jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes,
                        shardings(specs, mesh))


def placed(tree: Any, specs: Any) -> Any:
    """The tree, split over the ambient mesh by its specs; unchanged if they are None."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if specs is None else lax.with_sharding_constraint(tree, shardings(specs, mesh))


def cache_specs(layers: Sequence[Layer], specs: Any, cache: Any = None) -> list[dict[str, P]]:
    """The specs of the cache, from those of the weights: of all its arrays, or of those in
    `cache`."""
    mesh = jax.sharding.get_abstract_mesh()
    found = [layer_specs(layer, own, mesh) for layer, own in zip(
        layers, specs["layers"], strict=True)]
    return found if cache is None else [
        {name: of_layer[name] for name in own} for own, of_layer in zip(cache, found)]


def empty_cache(layers: Sequence[Layer], rows: int, slots: int, dtype: Any, specs: Any
                ) -> list[dict[str, Any]]:
    """A cache without tokens, for this number of rows and slots."""
    tensor = jax.sharding.get_abstract_mesh().shape["tensor"] if specs else 1
    cache = [new_layer(layer, rows, slots, dtype, tensor) for layer in layers]
    return placed_cache(cache, layers, specs)


def placed_cache(cache: Any, layers: Sequence[Layer], specs: Any) -> Any:
    """The cache, split as the passes take it, by the specs of the weights."""
    return placed(cache, specs and cache_specs(layers, specs, cache))


def gather_all_but_layers(params: Any, specs: Any) -> Any:
    """All-gather the weights over fsdp, except those of layers: model.extend gathers a layer's
    weights when it reaches the layer."""
    def whole(path, w, spec):
        if "fsdp" not in spec or any(getattr(key, "key", "").endswith("layers") for key in path):
            return w
        return all_gather(w, "fsdp", list(spec).index("fsdp"), spec)

    if not params or axis_size("fsdp") == 1:
        return params
    return jax.tree_util.tree_map_with_path(whole, params, specs)
