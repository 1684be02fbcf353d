"""Engine: a model that generates text, and how a mesh splits its rows, weights and cache.

On a mesh, a forward pass is a single shard_map, like a training step. It takes the weights and the
state (passes.py). The weights are split as in training, except that each device has all layers.
The state consists of the rows (padded so that the mesh divides their number), the cache, and the
values that all rows share.
"""

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Iterable, Iterator

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

from zigzag.core.mesh import (
    axis_size,
    batch_spec,
    cast,
    mesh_of,
    shardings,
    with_shardings,
    without_axis,
)
from zigzag.core.options import without
from zigzag.generate.cache import layer_specs, new_layer
from zigzag.generate.decoding import State
from zigzag.parallel import low_rank
from zigzag.parallel.collectives import all_gather
from zigzag.parallel.network import Network
from zigzag.parallel.table import layer_counts

REPLICATED = {"slot", "ends", "limit", "written"}     # state values that all rows share


@contextlib.contextmanager
def mesh_of_weights(params: Any) -> Iterator[None]:
    """Make the weights' mesh jax's ambient mesh."""
    mesh = mesh_of(params)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        yield


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model that generates text. Its specs are for jax's ambient mesh."""
    network: Network
    config: Any             # the network's config

    def decoder_of(self, tree: Any) -> Any:
        return self.network.decoder_of(tree) if self.network.decoder_of else tree

    @property
    def specs(self) -> Any:
        """The weights' specs for decoding, or None on a single device."""
        return _specs(self, get_abstract_mesh())

    def unstacked(self, params: Any) -> Any:
        """Return the weights in the decoding dtype, with the layers as a list."""
        params = cast(self.decoder_of(params), self.config.dtype)
        return unstack_layers(params, layer_counts(params), lambda w, i: w[i])

    def for_decoding(self, params: Any) -> Any:
        """Prepare the weights for decoding: cast them, split them, and turn the layers into a list.
        If they're already prepared, return them unchanged."""
        return params if isinstance(params.get("layers"), list) else _prepared(params, engine=self)

    def places(self, mesh: Any) -> Any:
        """Return the shapes and shardings that for_decoding produces on this mesh."""
        shapes = jax.eval_shape(self.unstacked, self.network.weight_shapes(self.config))
        return with_shardings(shapes, _specs(self, mesh), mesh)

    def cache_specs(self, cache: Any = None) -> list[dict[str, P]]:
        """Return the specs of all arrays in the cache, or only of arrays in `cache`."""
        mesh = get_abstract_mesh()
        found = [layer_specs(layer, own, mesh) for layer, own in zip(
            self.network.cache_layers(self.config), self.specs["layers"], strict=True)]
        return found if cache is None else [
            {name: of_layer[name] for name in own} for own, of_layer in zip(cache, found)]

    def placed_cache(self, cache: Any) -> Any:
        """Split the cache the way the passes expect."""
        return placed(cache, self.specs and self.cache_specs(cache))

    def empty_cache(self, rows: int, slots: int, dtype: Any) -> list[State]:
        """Return an empty cache with this many rows and slots."""
        tensor = get_abstract_mesh().shape.get("tensor", 1)
        return self.placed_cache([new_layer(layer, rows, slots, dtype, tensor)
                                  for layer in self.network.cache_layers(self.config)])

    def on_mesh(self, fn: Callable, params: Any, state: State, outputs: Iterable[str]) -> State:
        """Run fn(params, specs, state) in a single shard_map over the ambient mesh, or directly if
        there's no mesh. fn gets this device's part of the state and the weights; layer weights are
        still split over fsdp. fn returns a dict with the keys `outputs`."""
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


@jax.jit(static_argnames="engine")
def _prepared(params, engine):
    # One program for all weights: simulated devices could block one another in many small ones.
    return placed(engine.unstacked(params), engine.specs)


def unstack_layers(tree: Any, counts: dict[str, int], of_layer: Callable) -> Any:
    """Replace a tree's stacked weights [L, ...] with a list of layers, each a dict. `counts` maps
    the names of the stacks, in order, to the number of layers in each. of_layer(leaf, i) returns
    layer i's leaf, given a stacked leaf (a weight or its spec). A stack's layers in `between` come
    before its own, for each i."""
    layers = []
    for name, count in counts.items():
        for i in range(count):
            own = jax.tree.map(lambda w: of_layer(w, i), tree[name])
            between = own.pop("between", {})
            layers += [*(between[key] for key in sorted(between, key=int)), own]
    return {**without(tree, *counts), "layers": [*map(low_rank.adapted, layers)]}


@functools.cache
def _specs(engine, mesh):
    """Return the weights' specs: the training specs without the layer dimension."""
    if mesh.size <= 1:
        return None
    network, config = engine.network, engine.config
    specs = engine.decoder_of(without_axis(network.weight_specs(config, mesh), "pipe"))
    return unstack_layers(specs, layer_counts(engine.decoder_of(network.table(config))),
                          lambda spec, i: P(*spec[1:]))


def placed(tree: Any, specs: Any) -> Any:
    """Split the tree over the ambient mesh by its specs; if they're None, return it unchanged."""
    mesh = get_abstract_mesh()
    return tree if specs is None else lax.with_sharding_constraint(tree, shardings(specs, mesh))


def gather_all_but_layers(params: Any, specs: Any) -> Any:
    """All-gather the weights over fsdp, except for layers: model.extend gathers a layer's weights
    when it gets to that layer."""
    def whole(path, w, spec):
        if "fsdp" not in spec or any(getattr(key, "key", "").endswith("layers") for key in path):
            return w
        return all_gather(w, "fsdp", list(spec).index("fsdp"), spec)

    if axis_size("fsdp") == 1:
        return params
    return jax.tree_util.tree_map_with_path(whole, params, specs)
