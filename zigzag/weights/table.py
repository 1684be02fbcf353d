"""What follows from a network's table of weights: first values, parameter and FLOP counts. The
table itself, a tree of Weight, is the network's."""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Weight:
    axes: tuple[str, ...]   # a letter for each dimension; L numbers layers, E experts
    shape: tuple[int, ...]
    scale: float | None     # initial standard deviation; None: all ones
    tensor: int             # the dimension that the tensor axis may split; -1: none
    visits: float = 1.0     # the share of tokens that meet it: of an expert, few
    lookup: bool = False    # rows are looked up in it: no product, unless it is tied to the head
    values: Any = None      # a function of the shape that makes its first values, in place of scale


class Table:
    """Makes Weights out of letters: Table(D=128, F=384)("D F", 0.1, "F")."""

    def __init__(self, **sizes: int):
        self.sizes = {"1": 1, **sizes}

    def __call__(self, axes: str, scale: float | None = None, tensor: str = "", **more: Any
                 ) -> Weight:
        letters = tuple(axes.split())
        return Weight(letters, tuple(self.sizes[a] for a in letters), scale,
                      letters.index(tensor) if tensor else -1, **more)


def padded(vocab_size: int) -> int:
    """The rows of a table for this vocabulary: a multiple of 128, a TPU's lane width, whatever the
    mesh, so that a checkpoint fits every mesh. No token has the rows above vocab_size."""
    return -(-vocab_size // 128) * 128


def layer_counts(tree: Any) -> dict[str, int]:
    """The stacks of layers in a table, or in weights like it, in the order in which they run, and
    how many layers each has."""
    return {name: jax.tree.leaves(tree[name])[0].shape[0] for name in ("dense_layers", "layers")
            if name in tree}


def first_values(table: Any, key: Array) -> Any:
    """New float32 weights. Under jit with out_shardings each device makes only its own part: the
    values of a weight follow from the key, its path and the place in it, not from the mesh or from
    the other weights."""
    def one(path, w):
        if w.values:
            return jnp.asarray(w.values(*w.shape))
        if not w.scale:
            return jnp.full(w.shape, 1 if w.scale is None else 0, jnp.float32)
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return w.scale * jax.random.normal(own, w.shape, jnp.float32)

    return jax.tree.map_with_path(one, table)


def count(weights: Any) -> int:
    """The number of parameters."""
    return sum(math.prod(w.shape) for w in jax.tree.leaves(weights))


def parameters(table: Any, padding: int) -> tuple[int, int]:
    """How many parameters a model has, without the `padding` of its vocabulary, and how many of
    them one token visits."""
    def sizes(w):
        size = math.prod(w.shape)
        if "V" in w.axes:
            size -= size // w.shape[w.axes.index("V")] * padding
        return size, round(size * w.visits)

    pairs = [sizes(w) for w in jax.tree.leaves(table)]
    return sum(size for size, _ in pairs), sum(visited for _, visited in pairs)


def product_flops(table: Any) -> float:
    """Training FLOPs of the products with weights for each token: 6 for each element of a matrix,
    4 for each element of a frozen one (beside adapters, whose dimension is r)."""
    leaves = jax.tree.leaves(table)
    is_frozen = any("r" in w.axes for w in leaves)

    def flops(w):
        if w.lookup or "1" in w.axes or len(set(w.axes) - {"L"}) < 2:   # "1": a bias
            return 0.0
        return (4 if is_frozen and "r" not in w.axes else 6) * math.prod(w.shape) * w.visits

    return float(sum(map(flops, leaves)))


def attention_flops(keys: float, heads: int, width: int, value_width: int) -> float:
    """Training FLOPs of attention for each token: the products of queries with so many keys (of all
    layers together, causal or not), and of the weights with their values."""
    return 6.0 * keys * heads * (width + value_width)
