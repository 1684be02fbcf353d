"""Decoding on a mesh: which device has which rows, weights and parts of the cache.

A pass over the network is one shard_map, as a training step is, over a dict of arrays, its state:
the rows (always as many as groups of devices can share), the cache (zigzag/cache.py), and what all
rows have in common. The weights are split as in training, but each device has all layers.
"""

import contextlib
from typing import Any, Callable, Iterable, Iterator

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from zigzag.cache import layer_specs, new_layer
from zigzag.mesh import batch_spec, cast, mesh_of, shardings, without_axis

WHOLE = {"at", "slot", "ends", "limit"}     # what all rows of a state have in common


@contextlib.contextmanager
def mesh_of_weights(params: Any) -> Iterator[None]:
    """The mesh that the weights lie on, as jax's ambient one."""
    mesh = mesh_of(params)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        yield


def apart(tree: Any, c: Any, of_layer: Callable) -> Any:
    """A tree of weights, or of what each has, with that of each layer apart, in a list:
    of_layer(what the stack has, number in the stack)."""
    counts = {"dense_layers": c.dense_layers, "layers": c.layers - c.dense_layers}
    return {**{name: w for name, w in tree.items() if name not in counts}, "layers": [
        jax.tree.map(lambda w: of_layer(w, i), tree[name])
        for name, count in counts.items() for i in range(count)]}


def decoding_specs(weight_specs: Any, c: Any) -> Any:
    """The specs of training's weights as decoding has them."""
    return apart(without_axis(weight_specs, "pipe"), c, lambda spec, i: P(*spec[1:]))


def for_decoding(params: Any, c: Any, specs: Any) -> Any:
    """The weights with those of each layer apart, in c.dtype, all layers on each device of the
    ambient mesh. (Who generates often with the same weights does it once.)"""
    if isinstance(params["layers"], list):
        return params
    # (Outside a compiled function the number is an argument: one program for all layers.)
    params = apart(cast(params, c.dtype), c,
                   lambda w, i: lax.dynamic_index_in_dim(w, i, 0, keepdims=False))
    return placed(params, specs)


def places(c: Any, shapes: Any, specs: Any, mesh: Any) -> Any:
    """Shapes of the weights as for_decoding gives them, with their places on the mesh."""
    shapes = jax.eval_shape(lambda params: for_decoding(params, c, None), shapes)
    specs = jax.tree.map(lambda _: P(), shapes) if specs is None else specs
    return jax.tree.map(lambda shape, place: shape.update(sharding=place), shapes,
                        shardings(specs, mesh))


def placed(tree: Any, specs: Any) -> Any:
    """The tree, as the ambient mesh splits it; without one, as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if specs is None else lax.with_sharding_constraint(tree, shardings(specs, mesh))


def cache_specs(c: Any, specs: Any) -> list[dict[str, P]]:
    """How the cache is split, by the specs of the weights."""
    mesh = jax.sharding.get_abstract_mesh()
    return [layer_specs(c, layer, batch_spec(mesh), mesh.shape["tensor"])
            for layer in specs["layers"]]


def empty_cache(c: Any, rows: int, slots: int, dtype: Any, specs: Any) -> list[dict[str, Any]]:
    """A cache with so many slots for so many rows."""
    tensor = jax.sharding.get_abstract_mesh().shape["tensor"] if specs else 1
    cache = [new_layer(c, i, rows, slots, dtype, specs and specs["layers"][i], tensor)
             for i in range(c.layers)]
    places = specs and [{name: place[name] for name in layer}
                        for layer, place in zip(cache, cache_specs(c, specs))]
    return placed(cache, places)


def on_mesh(fn: Callable, params: Any, state: dict[str, Any], c: Any, specs: Any,
            gives: Iterable[str]) -> dict[str, Any]:
    """fn(params, state) in a shard_map over the ambient mesh, if there is one (specs is not None):
    a state with the names `gives`. fn has each device's own part of the weights."""
    if specs is None:
        return fn(params, state)
    rows, cache = batch_spec(jax.sharding.get_abstract_mesh()), cache_specs(c, specs)

    def specs_of(names):
        return {name: [{n: s for n, s in layer.items() if name == "cache" or n.startswith(name)}
                       for layer in cache] if name in ("cache", "cross") else
                P() if name in WHOLE else rows for name in names}

    return jax.shard_map(fn, in_specs=(specs if params else P(), specs_of(state)),
                         out_specs=specs_of(gives))(params, state)
