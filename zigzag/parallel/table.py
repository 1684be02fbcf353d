"""`Weight`, a row of a weight table, and what a table determines: initial values, and parameter and
FLOP counts. A table is a tree of `Weight`, defined in the network's file."""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Weight:
    """A row of a weight table."""
    axes: tuple[str, ...]   # a letter per dimension; L counts layers, E experts
    shape: tuple[int, ...]
    scale: float | None     # initial standard deviation; None: all ones
    mesh_axes: tuple[str, ...]      # the mesh axis that splits each dimension; '': none
    values: Any = None      # a function from shape to initial values, used instead of scale

    @property
    def tensor(self) -> int:
        """The dimension that tensor splits, or -1."""
        return self.mesh_axes.index("tensor") if "tensor" in self.mesh_axes else -1

    @property
    def is_table(self) -> bool:
        """Whether tokens look up its rows, judging by its first letter: no matmul uses it."""
        return next((a for a in self.axes if a not in ("L", "1")), "") in LOOKED_UP

    @property
    def is_of_experts(self) -> bool:
        """Whether it holds a matrix per expert, unlike a router [D, E], which ends with E."""
        return "E" in self.axes[:-1]


# Letters of dimensions whose rows tokens look up: V vocabulary ids, P positions, J distances,
# Z token types.
LOOKED_UP = {"V", "P", "J", "Z"}
# {a mesh axis that a row may name: the letter that it splits; '': any letter}
MESH_AXES = {"tensor": "", "fsdp": "", "pipe": "L", "expert": "E"}


class Table:
    """Make Weights from letters: Table(D=128, F=384)("D/fsdp F/tensor", 0.1) is [128, 384] with
    standard deviation 0.1; fsdp splits D, and tensor splits F.

    An axis splits the letter before it, unless its size doesn't divide that dimension, or the axis
    is fsdp and the weight has fewer elements than --fsdp_min. In those cases, and without an axis,
    the dimension stays whole. pipe always splits L. expert always splits E, except in a router
    [D, E], which ends with E. Use /tensor only if the network's code accepts part of the dimension.
    Some letters have a fixed meaning: L layers, E experts, 1 one, and the letters in LOOKED_UP."""

    def __init__(self, **sizes: int):
        self.sizes = {"1": 1, **sizes}

    def __call__(self, axes: str, scale: float | None = None, values: Any = None) -> Weight:
        letters, mesh_axes = [], []
        for entry in axes.split():
            letter, _, axis = entry.partition("/")
            if axis and (axis in mesh_axes or MESH_AXES.get(axis) not in ("", letter)):
                raise ValueError(f"{axes!r}: expected letters, some followed by /tensor, /fsdp, "
                                 f"/pipe (L) or /expert (E), each once")
            letters.append(letter)
            mesh_axes.append(axis)
        if "L" in letters and "pipe" not in mesh_axes or (
                "E" in letters[:-1] and "expert" not in mesh_axes):
            raise ValueError(f"{axes!r}: must name all axes that split it: pipe always splits L, "
                             f"and expert E: L/pipe, E/expert")
        return Weight(tuple(letters), tuple(self.sizes[a] for a in letters), scale,
                      tuple(mesh_axes), values)


def padded(vocab_size: int) -> int:
    """Return the number of embedding rows for this vocabulary: vocab_size rounded up to a multiple
    of 128, a TPU's lane width. It doesn't depend on the mesh, so a checkpoint fits any mesh. No
    token uses the extra rows."""
    return -(-vocab_size // 128) * 128


def layer_counts(tree: Any) -> dict[str, int]:
    """Return {name: number of layers} for the layer stacks in a table or a tree of weights, in the
    order they run."""
    return {name: jax.tree.leaves(tree[name])[0].shape[0] for name in ("dense_layers", "layers")
            if name in tree}


def first_values(table: Any, key: Array) -> Any:
    """Return new float32 weights. Each value depends on the key, the weight's path and the index,
    but not on the mesh or other weights. So under jit with out_shardings, each device computes only
    its own part."""
    def one(path, w):
        if w.values:
            return jnp.asarray(w.values(*w.shape))
        if not w.scale:
            return jnp.full(w.shape, 1 if w.scale is None else 0, jnp.float32)
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return w.scale * jax.random.normal(own, w.shape, jnp.float32)

    return jax.tree.map_with_path(one, table)


def count(weights: Any) -> int:
    """Return the number of parameters."""
    return sum(math.prod(w.shape) for w in jax.tree.leaves(weights))


def parameters(table: Any, padding: int, visits: float) -> tuple[int, int]:
    """Return (the number of parameters, how many of them each token visits), excluding the
    vocabulary's `padding` rows. `visits` is the fraction of the experts that a token visits."""
    def sizes(w):
        size = math.prod(w.shape)
        if "V" in w.axes:
            size -= size // w.shape[w.axes.index("V")] * padding
        return size, round(size * visits) if w.is_of_experts else size

    all_of_them, visited = map(sum, zip(*map(sizes, jax.tree.leaves(table))))
    return all_of_them, visited


def product_flops(table: Any, visits: float = 1.0, tied: bool = False) -> float:
    """Return the training FLOPs per token of matmuls with weights: 6 per matrix element, or 4 if
    frozen (adapters, which have a dimension r, freeze everything else). `visits` is the fraction of
    the experts that a token visits; `tied` means that the embedding table is also the head."""
    leaves = jax.tree.leaves(table)
    is_frozen = any("r" in w.axes for w in leaves)

    def flops(w):
        is_head = tied and "V" in w.axes
        if w.is_table and not is_head or "1" in w.axes or len(set(w.axes) - {"L"}) < 2:
            return 0.0      # "1" means a bias
        share = visits if w.is_of_experts else 1
        return (4 if is_frozen and "r" not in w.axes else 6) * math.prod(w.shape) * share

    return float(sum(map(flops, leaves)))


def attention_flops(keys: float, heads: int, width: int, value_width: int) -> float:
    """Return the training FLOPs per token of attention: the matmuls of queries with keys and of
    probabilities with values. `keys` is the number of keys per query, summed over layers."""
    return 6.0 * keys * heads * (width + value_width)
