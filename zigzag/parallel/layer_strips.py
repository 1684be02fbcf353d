"""On a TPU whose tensor axis splits a layer, the layer takes a device's rows in strips.

    strip 0     gather the time | multiply        | scatter the time |
    strip 1                     | gather the time | multiply         | scatter the time

No strip needs another one, so the compiler sends one while another is multiplied, and what it
computes between two products more often fits into a chip's fast memory. The layer's weights are
gathered over fsdp once for all strips, and as many bytes are sent. The strips' gradients of a
weight are added up in the dtype of the computation. docs/measurements.md has what it brings by the
compiler's estimates: 8.6% of a step of 1.2B on 4 x 4 chips of v5e, 1.2% on 8 x 2; without tensor it
may cost more than it brings.

Strips are for our own networks, and not for layers of experts, whose products would get small. A
custom loss may compare rows within a layer. (Where an edited model.py is compared with one device,
it is computed in strips of any size, so one that compares rows is found.)
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array

from zigzag.core.mesh import ambient, around, axis_size, is_split, platform

PLATFORMS = ("tpu",)
LEAST = 4096    # tokens of a strip (2,048 on v5e: products get too small)
MOST = 8        # strips: each is a copy of the layer in the program


def least(config: Any) -> int:
    """The least tokens of a strip in a run of one of our networks; 0: no strips. (--overlap has its
    own way to send while it multiplies.)"""
    c = config.network
    return 0 if c.overlap or config.step == "jit" or getattr(c, "experts", 0) else LEAST


def count(rows: int, time: int, sizes: Any, where: str, tokens: int) -> int:
    """The number of strips for these rows of so much time, on a mesh with these sizes of axes and
    on this platform, if a strip has at least so many tokens. (With seq it was not measured.)"""
    if not tokens or where not in PLATFORMS or sizes.get("tensor", 1) == 1 or max(
            sizes.get("seq", 1), sizes.get("expert", 1)) > 1:
        return 1
    return max(n for n in range(1, MOST + 1)
               if rows % n == 0 and (n == 1 or rows * time >= n * tokens))


def in_strips(layers: Callable, block: Callable, x: Array, batch: Any) -> tuple[Array, Any]:
    """layers(block, x), which calls block(w, x, i, batch) for each layer, in strips of rows."""
    time = x.shape[1] * (axis_size("tensor") if is_split(x) else 1)
    n = count(len(x), time, ambient()[0], platform(), around().strip)
    if n == 1:
        return layers(lambda w, x, i: block(w, x, i, batch), x)
    batches = [jax.tree.map(lambda a: jnp.split(a, n)[k], batch) for k in range(n)]

    def in_turn(w, strips, i):
        strips, added = zip(*[block(w, x, i, b) for x, b in zip(strips, batches)])
        return strips, jax.tree.map(lambda *sums: sum(sums), *added)

    strips, added = layers(in_turn, tuple(jnp.split(x, n)))
    return jnp.concatenate(strips), added
