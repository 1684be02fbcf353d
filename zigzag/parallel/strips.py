"""On a TPU whose tensor axis splits a layer, the layer takes a device's rows in strips.

    strip 0     gather the time | multiply        | scatter the time |
    strip 1                     | gather the time | multiply         | scatter the time

No strip needs another one, so the compiler sends one while another is multiplied, and what it
computes between two products more often fits into a chip's fast memory. The layer's weights are
gathered over fsdp once for all strips, and as many bytes are sent. What it brings, by the
compiler's own estimates, is in docs/measurements.md (some 7% of a step; without tensor under 2%).
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array

from zigzag.core.mesh import OVERLAP, ambient, axis_size, is_split, platform

PLATFORMS = ("tpu",)
LEAST = 4096    # tokens of a strip (2,048 on v5e: products get too small)
MOST = 8        # strips: each is a copy of the layer in the program


def count(rows: int, time: int, sizes: Any, where: str) -> int:
    """The number of strips for these rows of so many tokens, on a mesh with these sizes of axes and
    on this platform. (With seq and expert it was not measured.)"""
    if where not in PLATFORMS or sizes.get("tensor", 1) == 1 or max(
            sizes.get("seq", 1), sizes.get("expert", 1)) > 1:
        return 1
    return max(n for n in range(1, MOST + 1)
               if rows % n == 0 and (n == 1 or rows * time >= n * LEAST))


def in_strips(layers: Callable, block: Callable, x: Array, batch: Any) -> tuple[Array, Any]:
    """layers(block, x), which calls block(w, x, i, batch) for each layer, in strips of rows. (Not
    if an array of the batch has another number of rows, or for --overlap, which has its own way to
    send while it multiplies.)"""
    rows, time = len(x), x.shape[1] * (axis_size("tensor") if is_split(x) else 1)
    sizes, manual = ambient()
    n = 1
    if "tensor" in manual and not OVERLAP.value and all(
            a.shape[:1] == (rows,) for a in jax.tree.leaves(batch)):
        n = count(rows, time, sizes, platform())
    if n == 1:
        return layers(lambda w, x, i: block(w, x, i, batch), x)
    batches = [jax.tree.map(lambda a: jnp.split(a, n)[k], batch) for k in range(n)]

    def in_turn(w, strips, i):
        strips, added = zip(*[block(w, x, i, b) for x, b in zip(strips, batches)])
        return strips, jax.tree.map(lambda *sums: sum(sums), *added)

    strips, added = layers(in_turn, tuple(jnp.split(x, n)))
    return jnp.concatenate(strips), added
