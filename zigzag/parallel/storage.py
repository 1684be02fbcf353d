"""Conversions for weights that are stored differently from how the loss uses them.

    --override    the override decides how a weight is stored. Before the loss, `stored_to_used`
                  gathers the weight over any axes that the loss doesn't expect, and each device
                  keeps the part that the loss expects
    pipe          pipe splits the layers, but also the large weights outside them (the embedding,
                  the head): each stage stores a part, and all stages gather them before the
                  loss. With --chunks, these weights stay whole
    --chunks      layers are in model order on disk, but in stage order in training:
                  with 2 stages of 3 chunks, stage 0 has layers 0 2 4, stage 1 has 1 3 5
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from zigzag.core.mesh import (
    ambient,
    beside_auto_tensor,
    devices_over,
    entry_axes,
    full_spec,
    spec_axes,
    trimmed,
)
from zigzag.parallel.collectives import all_gather, reduce_scatter


def split_over_data(grads: Any, specs: Any, accumulated: Any) -> Any:
    """Sum gradients over data, in float32, if each device accumulates only its part of them, as
    with --zero 2. `specs` are the weights' own."""
    def one(g, spec, own):
        if "data" not in spec_axes(own) - spec_axes(spec):
            return g
        return reduce_scatter(g.astype(jnp.float32), "data", list(own).index("data"), spec)

    return jax.tree.map(one, grads, specs, accumulated)


def stored_to_used(weights: Any, decisions: Any, chunks: int, sum_dtype: str) -> Any:
    """Convert weights inside a shard_map from each decision's `spec` to its `spec_in_loss`. In the
    backward pass, the transposes (reduce-scatters and zero padding) split gradients by `spec`."""
    sizes, manual = ambient()
    if not manual:          # --collectives compiler: the compiler inserts the collectives
        return weights

    def gather(w, axis, dim, spec):
        if axis != "tensor":
            return all_gather(w, axis, dim, spec, sum_dtype if axis != "expert" else "")
        # The gradient is equal on all devices, so the transpose is a slice.
        return beside_auto_tensor(lambda w: lax.all_gather(
            w, axis, axis=dim, tiled=True, to="invarying"), spec)(w)

    def convert(w, decision):
        stored, used = full_spec(decision.spec, w.ndim), full_spec(decision.spec_in_loss, w.ndim)
        for dim, entry in enumerate(stored):
            for axis in reversed(entry_axes(entry)):
                if axis in manual and axis not in entry_axes(used[dim]):
                    w = gather(w, axis, dim, P(*stored))
            if entry == "pipe" and dim == 0 and used[0] != "pipe":
                order = layer_order(w.shape[0], sizes["pipe"], chunks, back=True)
                w = w if order is None else w[order]
        for dim, axis in enumerate(used):
            if axis in ("pipe", "expert", "tensor") and axis != stored[dim]:
                w = _own(w, dim, axis, sizes[axis], chunks if axis == "pipe" else 1)
        return w

    return jax.tree.map(convert, weights, decisions)


def _own(w, dim, axis, size, chunks):
    """Return this device's entries along `dim`: its slice, its experts, or its stage's layers from
    each chunk."""
    w = jnp.moveaxis(w, dim, 0)
    parts = w.reshape(chunks, size, -1, *w.shape[1:])
    own = lax.dynamic_index_in_dim(parts, lax.axis_index(axis), 1, keepdims=False)
    return jnp.moveaxis(own.reshape(-1, *w.shape[1:]), 0, dim)


def split_ends(params: Any, decisions: Any, mesh: Any, config: Any) -> Any:
    """Let each stage of a pipeline store a part of each weight outside the layers that has at least
    --fsdp_min elements. Stages need all of them, and gather them once per update. With chunks, a
    pipeline keeps them whole: permute_layers assumes that a dimension 0 split by pipe is layers."""
    stages = mesh.shape["pipe"]

    def one(leaf, decision):
        entries = [entry_axes(entry) for entry in full_spec(decision.spec, leaf.ndim)]
        own = {d: n // devices_over(entries[d], mesh.shape)
               for d, n in enumerate(leaf.shape)}
        free = [d for d, n in own.items() if n % stages == 0 and "tensor" not in entries[d]]
        if (decision.stacked or decision.in_loss is not None or "pipe" in spec_axes(decision.spec)
                or leaf.size < config.fsdp_min or not free):
            return decision
        at = max(free, key=own.get)
        entries[at] += ("pipe",)
        return dataclasses.replace(
            decision, in_loss=decision.spec, reason=f"{decision.reason}; pipe: gathered once",
            spec=trimmed(entries))

    keeps = stages == 1 or config.network.chunks > 1
    return decisions if keeps else jax.tree.map(one, params, decisions)


# -------------------------------------------------------------------------------------------
# The order of layers

def layer_order(layers: int, stages: int, chunks: int, back: bool = False) -> np.ndarray | None:
    """Return the layer indices [layers] in the order that a pipeline's stages with chunks hold
    them, or, with `back`, the inverse permutation. Return None if nothing moves."""
    if chunks == 1 or layers % (stages * chunks):
        return None
    order = np.arange(layers).reshape(chunks, stages, -1).transpose(1, 0, 2).reshape(-1)
    return (np.argsort(order) if back else order).astype(np.int32)


def permute_layers(tree: Any, places: Any, chunks: int, back: bool = False) -> Any:
    """Permute the layers of every array that pipe splits into stage order or, with `back`, into
    model order. `places` are the arrays' shardings. A single program moves all arrays. With one
    program per array, a CPU client couldn't hold all the programs that wait for each other, and the
    devices would wait forever."""
    leaves, structure = jax.tree.flatten(tree)
    places = structure.flatten_up_to(places)
    moved = [i for i, (x, place) in enumerate(zip(leaves, places)) if "pipe" in place.spec[:1]
             and layer_order(len(x), place.mesh.shape["pipe"], chunks) is not None]
    if moved:
        program = _compiled(chunks, back, tuple(places[i] for i in moved))
        for i, x in zip(moved, program([leaves[i] for i in moved])):
            leaves[i] = x
    return structure.unflatten(leaves)


@functools.cache
def _compiled(chunks, back, places):
    def permute(arrays):
        done = []
        for x, place in zip(arrays, places):
            if done:    # go one at a time; otherwise all arrays would be gathered at once
                x, done[-1] = lax.optimization_barrier((x, done[-1]))
            done.append(x[layer_order(len(x), place.mesh.shape["pipe"], chunks, back)])
        return done

    return jax.jit(permute, out_shardings=list(places))
