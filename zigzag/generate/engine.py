"""Engine: a model that generates text. It knows which device of a mesh has which rows, weights and
parts of the cache.

On a mesh, a forward pass is one shard_map, as a training step is. It takes the weights, which are
split as in training except that each device has all layers, and the state (passes.py): the rows,
padded to a number that the mesh divides, the cache, and what all rows share.
"""

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Iterable, Iterator

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

from zigzag.core.mesh import axis_size, batch_spec, cast, mesh_of, shardings, without_axis
from zigzag.generate.cache import layer_specs, new_layer
from zigzag.generate.decoding import State
from zigzag.parallel import low_rank
from zigzag.parallel.collectives import all_gather
from zigzag.parallel.network import Network
from zigzag.parallel.table import layer_counts

REPLICATED = {"slot", "ends", "limit", "written"}     # in a state: the same for all rows


@contextlib.contextmanager
def mesh_of_weights(params: Any) -> Iterator[None]:
    """Make the mesh of the weights jax's ambient mesh."""
    mesh = mesh_of(params)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        yield


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model that generates text. What it says of a mesh is of jax's ambient one."""
    network: Network
    config: Any             # the network's own

    def decoder_of(self, tree: Any) -> Any:
        return self.network.decoder_of(tree) if self.network.decoder_of else tree

    @property
    def specs(self) -> Any:
        """The specs of the weights for decoding; None on one device."""
        return _specs(self, get_abstract_mesh())

    def unstacked(self, params: Any) -> Any:
        """The weights in the precision of decoding, with a list of layers."""
        # (w[i] would compile one slice for each i; a dynamic index compiles one for all layers.)
        params = self.decoder_of(params)
        return unstack_layers(cast(params, self.config.dtype), layer_counts(params),
                              lambda w, i: lax.dynamic_index_in_dim(w, i, 0, keepdims=False))

    def for_decoding(self, params: Any) -> Any:
        """The weights as decoding uses them: cast, split, and with a list of layers. (Weights that
        have been through this are returned as they are.)"""
        if isinstance(params.get("layers"), list):
            return params
        return placed(self.unstacked(params), self.specs)

    def places(self, mesh: Any) -> Any:
        """The shapes of for_decoding's result on this mesh, each with its sharding."""
        shapes = jax.eval_shape(self.unstacked, self.network.weight_shapes(self.config))
        specs = _specs(self, mesh) or jax.tree.map(lambda _: P(), shapes)
        return jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes,
                            shardings(specs, mesh))

    def cache_specs(self, cache: Any = None) -> list[dict[str, P]]:
        """The specs of the cache: of all its arrays, or of those in `cache`."""
        mesh = get_abstract_mesh()
        found = [layer_specs(layer, own, mesh) for layer, own in zip(
            self.network.cache_layers(self.config), self.specs["layers"], strict=True)]
        return found if cache is None else [
            {name: of_layer[name] for name in own} for own, of_layer in zip(cache, found)]

    def placed_cache(self, cache: Any) -> Any:
        """The cache, split as the passes take it."""
        return placed(cache, self.specs and self.cache_specs(cache))

    def empty_cache(self, rows: int, slots: int, dtype: Any) -> list[State]:
        """A cache without tokens, for this number of rows and slots."""
        tensor = get_abstract_mesh().shape.get("tensor", 1)
        return self.placed_cache([new_layer(layer, rows, slots, dtype, tensor)
                                  for layer in self.network.cache_layers(self.config)])

    def on_mesh(self, fn: Callable, params: Any, state: State, outputs: Iterable[str]) -> State:
        """fn(params, specs, state) in one shard_map over the ambient mesh, or plainly without a
        mesh. fn gets this device's part of the state and, of the weights, what it has before it
        reaches a layer. It returns a dict with the names `outputs`."""
        specs = self.specs
        if specs is None:
            return fn(params, None, state)
        rows = batch_spec(get_abstract_mesh())

        def run(params, state):
            return fn(gather_all_but_layers(params, specs), specs, state)

        def specs_of(names, cache=None):
            return {name: self.cache_specs(cache) if name == "cache" else
                    P() if name in REPLICATED else rows for name in names}

        return jax.shard_map(
            run, in_specs=(specs, specs_of(state, state.get("cache"))),
            out_specs=specs_of(outputs))(params, state)


def unstack_layers(tree: Any, counts: dict[str, int], of_layer: Callable) -> Any:
    """The tree with a list of layers, each a dict of its own, in place of stacked weights [L, ...]:
    `counts` has the names of the stacks, in order, and how many layers are in each. of_layer(leaf,
    i) makes the leaf of layer i from a stacked leaf (a weight, or its spec)."""
    return {**{name: w for name, w in tree.items() if name not in counts}, "layers": [
        low_rank.adapted(jax.tree.map(lambda w: of_layer(w, i), tree[name]))
        for name, count in counts.items() for i in range(count)]}


@functools.cache
def _specs(engine, mesh):
    """The specs of the weights: those for training, without the dimension of layers."""
    if mesh.size <= 1:
        return None
    network, config = engine.network, engine.config
    specs = engine.decoder_of(without_axis(network.weight_specs(config, mesh), "pipe"))
    return unstack_layers(specs, layer_counts(engine.decoder_of(network.table(config))),
                          lambda spec, i: P(*spec[1:]))


def placed(tree: Any, specs: Any) -> Any:
    """The tree, split over the ambient mesh by its specs; unchanged if they are None."""
    mesh = get_abstract_mesh()
    return tree if specs is None else lax.with_sharding_constraint(tree, shardings(specs, mesh))


def gather_all_but_layers(params: Any, specs: Any) -> Any:
    """All-gather the weights over fsdp, except those of layers: model.extend gathers a layer's
    weights when it reaches the layer."""
    def whole(path, w, spec):
        if "fsdp" not in spec or any(getattr(key, "key", "").endswith("layers") for key in path):
            return w
        return all_gather(w, "fsdp", list(spec).index("fsdp"), spec)

    if axis_size("fsdp") == 1:
        return params
    return jax.tree_util.tree_map_with_path(whole, params, specs)
