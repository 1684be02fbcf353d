"""Strips: on TPUs with a tensor axis, a layer processes each device's rows in several strips.

    strip 0     gather tokens | multiply      | scatter tokens |
    strip 1                   | gather tokens | multiply       | scatter tokens

Strips don't depend on each other, so the compiler can send one while it multiplies another. The
values between two matmuls also fit in a chip's fast memory more often. The layer gathers its
weights over fsdp once for all strips, and sends as many bytes as it would without them. It adds up
the strips' weight gradients in the compute dtype. By the compiler's estimates, strips save 8.6% of
a 1.2B model's step on 4 x 4 v5e chips, and 1.2% on 8 x 2 (docs/measurements.md). Without tensor,
strips may cost more than they save.

Only our own networks use strips, because a custom loss may compare rows within a layer. Expert
layers don't, because their matmuls would get too small. The check of an edited model.py against a
single device allows strips of any size, so it catches a model that compares rows.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array

from zigzag.core.mesh import ambient, axis_size, is_tensor_split, platform, trace_settings

PLATFORMS = ("tpu",)
LEAST = 4096    # minimum tokens per strip (with 2,048 on v5e, matmuls get too small)
MOST = 8        # maximum number of strips: each adds a copy of the layer to the program


def least(config: Any) -> int:
    """Return the minimum number of tokens per strip for a run of our own network, or 0 for no
    strips: for example with --overlap, which has its own way to send while it multiplies."""
    c = config.network
    return 0 if c.overlap or config.collectives == "compiler" or getattr(c, "experts", 0) else LEAST


def count(rows: int, time: int, sizes: Any, where: str, tokens: int) -> int:
    """Return how many strips to cut `rows` of `time` tokens into, given a mesh's axis `sizes` and
    platform `where`. A strip has at least `tokens` tokens. With seq, where strips are unmeasured,
    return 1."""
    if not tokens or where not in PLATFORMS or sizes.get("tensor", 1) == 1 or max(
            sizes.get("seq", 1), sizes.get("expert", 1)) > 1:
        return 1
    return max(n for n in range(1, MOST + 1)
               if rows % n == 0 and (n == 1 or rows * time >= n * tokens))


def in_strips(layers: Callable, block: Callable, x: Array, batch: Any) -> tuple[Array, Any]:
    """Run layers(block, x) in strips of rows. It calls block(w, x, i, batch) for each layer."""
    time = x.shape[1] * (axis_size("tensor") if is_tensor_split(x) else 1)
    n = count(len(x), time, ambient()[0], platform(), trace_settings().strip)
    if n == 1:
        return layers(lambda w, x, i: block(w, x, i, batch), x)
    batches = [jax.tree.map(lambda a: jnp.split(a, n)[k], batch) for k in range(n)]

    def in_turn(w, strips, i):
        strips, added = zip(*[block(w, x, i, b) for x, b in zip(strips, batches)])
        return strips, jax.tree.map(lambda *sums: sum(sums), *added)

    strips, added = layers(in_turn, tuple(jnp.split(x, n)))
    return jnp.concatenate(strips), added
