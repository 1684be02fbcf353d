"""On a TPU whose tensor axis splits a layer, the layer takes a device's rows in strips.

    strip 0     gather tokens | multiply      | scatter tokens |
    strip 1                   | gather tokens | multiply       | scatter tokens

No strip needs another, so the compiler sends one while it multiplies another. The values between
two products also fit into a chip's fast memory more often. The layer gathers its weights over fsdp
once for all strips, and sends as many bytes as without strips. It adds up the strips' gradients of
a weight in the dtype of the computation. docs/measurements.md has the gain by the compiler's
estimates: 8.6% of a step of 1.2B on 4 x 4 chips of v5e, 1.2% on 8 x 2. Without tensor, strips may
cost more than they save.

Strips are for our own networks, because a custom loss may compare rows within a layer. Layers of
experts do without, because their products would get small. The comparison of an edited model.py
with one device uses strips of any size, so it finds a model that compares rows.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array

from zigzag.core.mesh import ambient, around, axis_size, is_split, platform

PLATFORMS = ("tpu",)
LEAST = 4096    # the fewest tokens of a strip (at 2,048 on v5e, products get too small)
MOST = 8        # the most strips: each is a copy of the layer in the program


def least(config: Any) -> int:
    """The fewest tokens of a strip in a run of one of our networks; 0: no strips. --overlap has its
    own way to send while it multiplies."""
    c = config.network
    return 0 if c.overlap or config.step == "jit" or getattr(c, "experts", 0) else LEAST


def count(rows: int, time: int, sizes: Any, where: str, tokens: int) -> int:
    """The number of strips for `rows` of `time` tokens, on a mesh with these axis `sizes` and this
    platform; a strip has at least `tokens` tokens. Strips with seq were never measured."""
    if not tokens or where not in PLATFORMS or sizes.get("tensor", 1) == 1 or max(
            sizes.get("seq", 1), sizes.get("expert", 1)) > 1:
        return 1
    return max(n for n in range(1, MOST + 1)
               if rows % n == 0 and (n == 1 or rows * time >= n * tokens))


def in_strips(layers: Callable, block: Callable, x: Array, batch: Any) -> tuple[Array, Any]:
    """Call layers(block, x), and block(w, x, i, batch) for each layer, in strips of rows."""
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
