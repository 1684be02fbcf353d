"""A table of weights: what each is like, its first values, how many numbers and how much arithmetic
there are. The table itself, a tree of Weight, is model.py's."""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Weight:
    axes: tuple[str, ...]   # a letter for each dimension, as model.py names them
    shape: tuple[int, ...]
    scale: float | None     # standard deviation of its first values; None: ones
    tensor: int             # the dimension that tensor may split in model.py; -1: none
    values: Any = None      # a function that makes its first values, in place of random ones


class Table:
    """Makes Weights of letters: Table(D=128, F=384)("D F", 0.1, "F")."""

    def __init__(self, **sizes: int):
        self.sizes = {"1": 1, **sizes}

    def __call__(self, axes: str, scale: float | None = None, tensor: str = "") -> Weight:
        letters = tuple(axes.split())
        return Weight(letters, tuple(self.sizes[a] for a in letters), scale,
                      letters.index(tensor) if tensor else -1)


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


def _visited(path, c):
    """The share of a weight that one token visits: of experts, those that it chooses."""
    return min(1, c.experts_per_token / c.experts) if path[-1].key.startswith("e_") else 1


def parameters(table: Any, c: Any, padding: int) -> tuple[int, int]:
    """How many parameters a model has, without the `padding` of its vocabulary, and how many of
    them one token visits."""
    def sizes(path, w):
        size = math.prod(w.shape)
        if "V" in w.axes:
            size -= size // w.shape[w.axes.index("V")] * padding
        return size, round(size * _visited(path, c))

    pairs = jax.tree.leaves(jax.tree.map_with_path(sizes, table))
    return sum(pairs[::2]), sum(pairs[1::2])


def flops(table: Any, c: Any, tokens: int) -> float:
    """Arithmetic of training on that many tokens: 6 per weight of a product and token (4 of one
    that is frozen), and the attention's two products with every key (causal or not), 12 T H N a
    layer and token. An encoder's weights meet the tokens of the source."""
    share = c.source_len / c.seq_len if c.encoder_layers else 0.0

    def of_product(path, w):
        name, axes = path[-1].key, [a for a in w.axes if a not in "L1"]
        is_product = len(axes) > 1 and "P" not in axes and not name.endswith("_bias")
        if not is_product or name == ("head" if c.tied else "embed"):
            return 0
        each = 4 if c.lora_rank and "r" not in w.axes else 6
        if path[0].key == "encoder" or name in ("cross_wk", "cross_wv"):
            each *= share
        return each * math.prod(w.shape) * _visited(path, c)

    products = sum(jax.tree.leaves(jax.tree.map_with_path(of_product, table)))
    heads = c.heads * (c.head_dim + (c.v_head_dim or c.head_dim))
    keys = c.layers * (c.seq_len + share * c.seq_len) + c.encoder_layers * share**2 * c.seq_len
    return tokens * (products + 6.0 * keys * heads)
