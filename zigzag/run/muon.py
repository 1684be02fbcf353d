"""Muon, with one home for each matrix.

    the momentum, split as the weights are
      -> all-to-all         each matrix is whole on one device, its home
      -> Newton-Schulz      the expensive part: 15 matmuls per matrix
      -> all-to-all         each device has its parts of the results
      -> all-gather         devices that hold copies of the same parts share the results

Left to the compiler, devices with copies compute the same, and others send in each matmul. Matrices
with the same shape and the same split form a pool, which is dealt out evenly. Without a mesh from
jax.set_mesh, which a loop of your own may lack, the compiler decides after all.
"""

import math
from collections import defaultdict
from typing import Any, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import get_abstract_mesh

from zigzag.core.mesh import entry_axes, full_spec
from zigzag.parallel.rule import matrices_of_layers, zero1_specs

COEFFICIENTS = (3.4445, -4.7750, 2.0315)    # Keller Jordan's, for 5 iterations
ITERATIONS = 5
RMS = 0.2       # of an update's elements, to match AdamW's (arXiv:2502.16982)


class Pool(NamedTuple):
    """Matrices with the same shape and the same split."""
    rows: tuple         # the (size, axes) of each dimension that forms the matrix's rows
    columns: tuple
    dealt: frozenset    # the axes that split the layers or the experts, and so leave matrices whole


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
    """Replace the update of each of the layers' matrices by the nearest orthogonal one, scaled. On
    a mesh, the matrices move to their homes, in a shard_map."""
    mesh = get_abstract_mesh()
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    leaves, tree = jax.tree.flatten(updates)
    specs = jax.tree.map(lambda d: d.spec, decisions)
    if config.zero and sizes:
        specs = zero1_specs(updates, specs, mesh, config.fsdp_min)
    specs = jax.tree.leaves(specs)
    found = pools(leaves, specs, decisions)

    def on_device(leaves):
        leaves = list(leaves)
        for pool, members in found.items():
            # From each leaf, a list of matrices: [matrices, *rows, *columns].
            lists = [leaves[i].transpose(order) for i, order in members]
            rank = len(pool.rows) + len(pool.columns)
            merged = [x.reshape(-1, *x.shape[-rank:]) for x in lists]
            done = _at_home(jnp.concatenate(merged), pool, sizes)
            ends = np.cumsum([len(x) for x in merged])[:-1]
            for (i, order), x, part in zip(members, lists, jnp.split(done, ends)):
                leaves[i] = part.reshape(x.shape).transpose(_inverse(order))
        return leaves

    if sizes and not mesh.manual_axes:
        # (A result that was gathered is the same on all devices, which jax can't know.)
        on_device = jax.shard_map(on_device, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.tree.unflatten(tree, on_device(leaves))


def pools(leaves: Sequence[Any], specs: Sequence[Any], decisions: Any,
          ) -> dict[Pool, list[tuple[int, tuple[int, ...]]]]:
    """Group the layers' matrices into pools. For each pool, return the index of each leaf, and the
    order of its dimensions: those that count matrices, then rows, then columns. A matrix may be
    transposed, which only transposes the result."""
    found = defaultdict(list)
    each = jax.tree.structure(decisions).flatten_up_to(matrices_of_layers(decisions))
    for i, (leaf, spec, dims) in enumerate(zip(leaves, specs, each, strict=True)):
        if dims:
            axes = [entry_axes(entry) for entry in full_spec(spec, leaf.ndim)]
            sides = sorted((tuple((leaf.shape[d], axes[d]) for d in side), side) for side in dims)
            (rows, at_rows), (columns, at_columns) = sides
            count = [d for d in range(leaf.ndim) if d not in (*at_rows, *at_columns)]
            dealt = frozenset(axis for d in count for axis in axes[d])
            found[Pool(rows, columns, dealt)].append((i, (*count, *at_rows, *at_columns)))
    return dict(found)


class Homes(NamedTuple):
    """How the matrices of a pool are dealt to their homes."""
    splits: list        # (axis, dimension) pairs that split a matrix, over n devices in all
    copies: tuple       # the axes over which devices hold copies of the same parts
    devices: int        # devices with parts of these matrices, or copies of those
    n: int
    shares: int         # how many devices with copies share the work
    each: int           # matrices per home, of which the last may be zeros


def homes(pool: Pool, count: int, sizes: Mapping[str, int]) -> Homes:
    """Deal `count` matrices, of which each device has parts, to as few homes as possible without
    giving any home more of them. Then devices send the least padding."""
    splits = [(axis, d) for d, (_, axes) in enumerate((*pool.rows, *pool.columns))
              for axis in axes if axis in sizes]
    taken = {axis for axis, _ in splits} | pool.dealt
    copies = tuple(axis for axis in sizes if axis not in taken)
    n, same = (math.prod(sizes[axis] for axis in axes) for axes in (dict(splits), copies))
    each = -(-count // (n * same))
    shares = next(q for q in range(1, same + 1) if same % q == 0 and n * q * each >= count)
    return Homes(splits, copies, n * same, n, shares, each)


def matrix_shape(pool: Pool) -> list[int]:
    """Return how many rows and columns a matrix has."""
    return [math.prod(size for size, _ in side) for side in (pool.rows, pool.columns)]


def all_homes(plan: Any) -> list[tuple[Pool, int, Homes]]:
    """Return every pool of a Plan's weights, how many of its matrices a device has parts of, and
    their homes."""
    sizes = {axis: size for axis, size in plan.mesh.shape.items() if size > 1}
    leaves = jax.tree.leaves(plan.in_two(plan.params)[0])
    found = []
    for pool, members in pools(leaves, jax.tree.leaves(plan.optimizer_specs), plan.trained).items():
        rank = len(pool.rows) + len(pool.columns)
        count = sum(math.prod(leaves[i].shape[d] for d in order[:-rank]) for i, order in members)
        count //= math.prod(sizes[axis] for axis in pool.dealt)
        found.append((pool, count, homes(pool, count, sizes)))
    return found


def idle(plan: Any) -> float:
    """Return the share of the orthogonalization's time in which an average device waits."""
    used = taken = 0
    for pool, count, home in all_homes(plan):
        short, long = sorted(matrix_shape(pool))
        flops = short**2 * (2 * long + short)       # of one iteration, for each matrix
        used += flops * count / home.devices
        taken += flops * home.each
    return 1 - used / taken if taken else 0.0


def _at_home(parts, pool, sizes):
    """Orthogonalize matrices of which this device has parts: [matrices, *rows, *columns]."""
    count, *local = parts.shape
    splits, copies, devices, n, shares, each = homes(pool, count, sizes)
    parts = jnp.pad(parts, [(0, n * shares * each - count), *[(0, 0)] * len(local)])
    if shares > 1:
        share = lax.axis_index(copies) % shares
        parts = lax.dynamic_index_in_dim(parts.reshape(shares, -1, *local), share, keepdims=False)

    def exchange(x):
        x = x.reshape(n, each, *local)
        return lax.all_to_all(x, tuple(axis for axis, _ in splits), 0, 0) if n > 1 else x

    # Put each leading dimension, one per axis, before the dimension that the axis splits.
    lengths = [sizes[axis] for axis, _ in splits]
    order = [len(lengths)]
    for d in range(len(local)):
        order += [i for i, (_, split) in enumerate(splits) if split == d] + [order[0] + 1 + d]
    spread = exchange(parts).reshape(*lengths, each, *local).transpose(order)
    done = jax.vmap(newton_schulz)(spread.reshape(each, *matrix_shape(pool))).reshape(spread.shape)
    done = exchange(done.transpose(_inverse(order))).reshape(-1, *local)
    if shares > 1:
        near = [list(range(i, i + shares)) for i in range(0, devices // n, shares)]
        done = lax.all_gather(done, copies, axis_index_groups=near, tiled=True)
    return done[:count]


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


def _inverse(order):
    return sorted(range(len(order)), key=order.__getitem__)
