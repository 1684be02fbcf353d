"""Decoding on a mesh: which device has which rows, weights and parts of the cache.

A forward pass is one shard_map, as a training step is. Beside the weights it takes the state, a
dict of arrays: the rows (padded to a number that divides over the mesh), the cache
(zigzag/cache.py), and what all rows share. Weights are split as in training, but each device has
all layers.
"""

import contextlib
from typing import Any, Callable, Iterable, Iterator, Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from zigzag import lora
from zigzag.cache import layer_specs, new_layer
from zigzag.mesh import batch_spec, cast, mesh_of, shardings, without_axis
from zigzag.network import Layer
from zigzag.weights import layer_counts

REPLICATED = {"count", "slot", "ends", "limit"}      # of a state: the same for all rows


@contextlib.contextmanager
def mesh_of_weights(params: Any) -> Iterator[None]:
    """Make the mesh that the weights lie on jax's ambient mesh."""
    mesh = mesh_of(params)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        yield


def unstack_layers(tree: Any, counts: dict[str, int], of_layer: Callable) -> Any:
    """The tree with a list of layers, each a dict of its own, in place of stacked ones [L, ...]:
    `counts` has the names of the stacks, in order, and how many layers are in each. of_layer(leaf,
    i) makes the leaf of layer i from a stacked leaf (a weight, or its spec)."""
    return {**{name: w for name, w in tree.items() if name not in counts}, "layers": [
        lora.adapted(jax.tree.map(lambda w: of_layer(w, i), tree[name]))
        for name, count in counts.items() for i in range(count)]}


def decoding_specs(weight_specs: Any, table: Any) -> Any:
    """The specs of decoding's weights, from those of training; `table` is the network's."""
    return unstack_layers(without_axis(weight_specs, "pipe"), layer_counts(table),
                          lambda spec, i: P(*spec[1:]))


def for_decoding(params: Any, dtype: str, specs: Any) -> Any:
    """The weights in this precision, with a list of layers, on the ambient mesh. Weights that are
    so already are returned as they are."""
    if isinstance(params["layers"], list):
        return params
    # (w[i] would compile one slice for each i; a dynamic index compiles one for all layers.)
    params = unstack_layers(cast(params, dtype), layer_counts(params),
                            lambda w, i: lax.dynamic_index_in_dim(w, i, 0, keepdims=False))
    return placed(params, specs)


def decoding_shapes(dtype: str, shapes: Any, specs: Any, mesh: Any) -> Any:
    """The shapes of for_decoding's result, each with its sharding."""
    shapes = jax.eval_shape(lambda params: for_decoding(params, dtype, None), shapes)
    specs = jax.tree.map(lambda _: P(), shapes) if specs is None else specs
    return jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes,
                        shardings(specs, mesh))


def placed(tree: Any, specs: Any) -> Any:
    """The tree, split over the ambient mesh by its specs; unchanged if they are None."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if specs is None else lax.with_sharding_constraint(tree, shardings(specs, mesh))


def cache_specs(layers: Sequence[Layer], specs: Any) -> list[dict[str, P]]:
    """The specs of the cache, from those of the weights."""
    mesh = jax.sharding.get_abstract_mesh()
    return [layer_specs(layer, own, batch_spec(mesh), mesh.shape["tensor"])
            for layer, own in zip(layers, specs["layers"], strict=True)]


def empty_cache(layers: Sequence[Layer], rows: int, slots: int, dtype: Any, specs: Any
                ) -> list[dict[str, Any]]:
    """A cache with no tokens, for so many rows and slots."""
    tensor = jax.sharding.get_abstract_mesh().shape["tensor"] if specs else 1
    cache = [new_layer(layer, rows, slots, dtype, specs and specs["layers"][i], tensor)
             for i, layer in enumerate(layers)]
    specs = specs and [{name: split[name] for name in layer}
                       for layer, split in zip(cache, cache_specs(layers, specs))]
    return placed(cache, specs)


def gather_all_but_layers(params: Any, specs: Any, gather: Callable) -> Any:
    """All-gather the weights over fsdp with `gather` (shard.gather), except those of layers:
    model.extend gathers a layer's weights when it reaches the layer."""
    if specs is None:
        return params
    gathered = {}
    for name, w in params.items():
        if isinstance(w, dict) and name != "layers":
            gathered[name] = gather_all_but_layers(w, specs[name], gather)
        else:
            gathered[name] = w if name == "layers" else gather(w, specs[name])
    return gathered


def on_mesh(fn: Callable, params: Any, state: dict[str, Any], layers: Sequence[Layer], specs: Any,
            outputs: Iterable[str]) -> dict[str, Any]:
    """fn(params, state) in a shard_map over the ambient mesh, or directly if specs is None. fn gets
    this device's part of the weights, and returns a dict with the names `outputs`."""
    if specs is None:
        return fn(params, state)
    rows, cache = batch_spec(jax.sharding.get_abstract_mesh()), cache_specs(layers, specs)

    def specs_of(names):
        return {name: [{n: s for n, s in layer.items() if name == "cache" or n.startswith(name)}
                       for layer in cache] if name in ("cache", "cross") else
                P() if name in REPLICATED else rows for name in names}

    return jax.shard_map(fn, in_specs=(specs if params else P(), specs_of(state)),
                         out_specs=specs_of(outputs))(params, state)
