"""Muon, with one home for each matrix.

    the momentum, split as the weights are
      -> all-to-all         each matrix is whole on one device, its home
      -> Newton-Schulz      the expensive part: 15 matmuls per matrix
      -> all-to-all         each device has its parts of the results
      -> all-gather         devices that hold copies of the same parts share the results

If the compiler did this, devices with copies would all do the same work, and others would send in
each matmul. Matrices with the same shape and the same split form a pool, which is dealt out evenly.
Without a mesh from jax.set_mesh (your own loop may lack one), the compiler does this after all.
"""

import functools
import math
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import get_abstract_mesh

from zigzag.core.mesh import devices_over, drop_trivial_axes, entry_axes, full_spec, spec_axes
from zigzag.parallel.rule import matrices_of_layers, moment_specs

COEFFICIENTS = (3.4445, -4.7750, 2.0315)    # Keller Jordan's, for 5 iterations
ITERATIONS = 5
RMS = 0.2       # of an update's elements, to match AdamW's (arXiv:2502.16982)


class Pool(NamedTuple):
    """Matrices with the same shape and the same split, and how they are dealt to their homes."""
    members: list       # for each leaf, its index, the dimensions that count matrices, and a
                        # matrix's own dimensions, rows before columns
    matrix: list        # how many rows and columns a matrix has
    count: int          # how many matrices there are, on all devices together
    splits: list        # (axis, dimension) pairs that split a matrix, over n devices in all
    copies: tuple       # the axes over which devices hold copies of the same parts
    same: int           # how many devices hold copies
    shares: int         # how many of those devices share the work
    n: int
    each: int           # matrices per home; the last ones may be zeros


def muon(config: Any, decisions: Any) -> optax.GradientTransformation:
    """Use Muon, scaled to AdamW's rates, for the layers' matrices, and Adam with Nesterov for the
    rest. The rule provides the dimensions of each matrix that contract with activations."""
    dims = jax.tree.map(lambda _, dims: dims and optax.contrib.MuonDimensionNumbers(*dims),
                        decisions, matrices_of_layers(decisions))
    # With no iterations, and "aol" normalizing in the first of them, optax only keeps the momentum.
    # (It also scales by shape, which newton_schulz undoes when it normalizes.)
    momentum = optax.contrib.muon(-1.0, ns_steps=0, preconditioning="aol",
                                  muon_weight_dimension_numbers=dims, adam_b1=config.beta1,
                                  adam_b2=config.beta2)

    def update(grads, state, params=None):
        updates, state = momentum.update(grads, state, params)
        return orthogonalize(updates, decisions, config), state

    return optax.GradientTransformation(momentum.init, update)


def orthogonalize(updates: Any, decisions: Any, config: Any) -> Any:
    """Replace the update of each layer matrix with the nearest orthogonal matrix, scaled. On a
    mesh, the matrices move to their homes, in a shard_map."""
    mesh = get_abstract_mesh()
    specs = moment_specs(updates, decisions, mesh, config)
    found = pools(updates, specs, decisions, mesh)

    def on_device(updates):
        leaves, tree = jax.tree.flatten(updates)
        for pool in found:
            # Collecting parts only moves numbers, so its transpose moves the results back.
            parts, back = jax.vjp(functools.partial(_collect, pool),
                                  [leaves[i] for i, *_ in pool.members])
            done, = back(_at_home(pool, parts))
            for x, (i, *_) in zip(done, pool.members):
                leaves[i] = x
        return jax.tree.unflatten(tree, leaves)

    if mesh.size > 1 and not mesh.manual_axes:
        # (A result that was gathered is the same on all devices, which jax can't know.)
        on_device = jax.shard_map(on_device, in_specs=(specs,), out_specs=specs, check_vma=False)
    return on_device(updates)


def pools(weights: Any, specs: Any, decisions: Any, mesh: Any) -> list[Pool]:
    """Group the layers' matrices into pools, and deal each pool to its homes. The momentum is split
    by `specs`. A matrix may be transposed, which only transposes the result."""
    leaves, found = jax.tree.leaves(weights), defaultdict(list)
    each = matrices_of_layers(jax.tree.leaves(decisions))
    for i, (leaf, spec, dims) in enumerate(zip(leaves, jax.tree.leaves(specs), each, strict=True)):
        if dims:
            spec = drop_trivial_axes(spec, mesh)
            split = list(zip(leaf.shape, map(entry_axes, full_spec(spec, leaf.ndim))))
            sides = sorted((tuple(split[d] for d in side), side) for side in dims)
            (rows, at_rows), (columns, at_columns) = sides
            counts = tuple(d for d in range(leaf.ndim) if d not in at_rows + at_columns)
            alike = rows, columns, frozenset(spec_axes(spec))
            found[alike].append((i, counts, at_rows + at_columns))
    return [_deal(members, sum(leaves[i].size for i, *_ in members), *alike, mesh.shape)
            for alike, members in found.items()]


def _deal(members, elements, rows, columns, axes, sizes):
    """Deal a pool's matrices to as few homes as possible without giving any home more matrices.
    This minimizes the padding that devices send. `rows` and `columns` are each dimension's (size,
    axes); `axes` are all axes that split the leaves."""
    matrix = [math.prod(size for size, _ in side) for side in (rows, columns)]
    splits = [(axis, d) for d, (_, split) in enumerate(rows + columns) for axis in split]
    copies = tuple(axis for axis in sizes if sizes[axis] > 1 and axis not in axes)
    n, same, devices = (devices_over(some, sizes) for some in (dict(splits), copies, sizes))
    count = elements // math.prod(matrix)
    each = -(-count // devices)
    here = count * n * same // devices      # the matrices that a device has parts of
    shares = next(q for q in range(1, same + 1) if same % q == 0 and n * q * each >= here)
    return Pool(members, matrix, count, splits, copies, same, shares, n, each)


def pools_of(plan: Any) -> list[Pool]:
    """Return the pools of a Plan's weights."""
    return pools(plan.in_two(plan.params)[0], plan.optimizer_specs, plan.trained, plan.mesh)


def idle(plan: Any) -> float:
    """Return the fraction of the orthogonalization's time in which an average device waits."""
    used = taken = 0
    for pool in pools_of(plan):
        short, long = sorted(pool.matrix)
        flops = short**2 * (2 * long + short)       # for one iteration on one matrix
        used += flops * pool.count / plan.mesh.size
        taken += flops * pool.each
    return 1 - used / taken if taken else 0.0


def _collect(pool, leaves):
    """Return this device's parts of a pool's matrices, by share and home, with zeros where homes
    have room for more: [shares, n, each, *rows, *columns]."""
    parts = []
    for x, (_, counts, dims) in zip(leaves, pool.members):
        x = x.transpose(counts + dims)
        parts.append(x.reshape(-1, *x.shape[len(counts):]))
    parts = jnp.concatenate(parts)
    homes, (count, *local) = (pool.shares, pool.n, pool.each), parts.shape
    empty = math.prod(homes) - count
    return jnp.pad(parts, [(0, empty), *[(0, 0)] * len(local)]).reshape(*homes, *local)


def _at_home(pool, parts):
    """Orthogonalize matrices that devices hold parts of: [shares, n, each, *rows, *columns]."""
    axes, local = tuple(axis for axis, _ in pool.splits), parts.shape[3:]

    def exchange(x):        # [n, each, *rows, *columns] -> [each, rows, columns]
        x = lax.all_to_all(x, axes, 0, 0) if axes else x
        # Put each leading dimension, one per axis, before the dimension that the axis splits.
        x = x.reshape(*map(lax.axis_size, axes), pool.each, *local)
        at = [*(d for _, d in pool.splits), -1, *range(len(local))]
        return x.transpose(np.argsort(at, stable=True)).reshape(pool.each, *pool.matrix)

    share = lax.axis_index(pool.copies) % pool.shares
    matrices, back = jax.vjp(exchange, parts[share])    # its transpose sends the results back
    done, = back(jax.vmap(newton_schulz)(matrices))
    if pool.shares == 1:
        return done[None]
    near = [list(range(i, i + pool.shares)) for i in range(0, pool.same, pool.shares)]
    return lax.all_gather(done, pool.copies, axis_index_groups=near)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Move a matrix's singular values close to 1, then scale it so that its elements have RMS."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x /= jnp.linalg.norm(x) + 1e-8
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return RMS * max(x.shape) ** 0.5 * (x.T if is_tall else x)
