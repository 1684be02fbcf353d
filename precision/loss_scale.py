"""--dtype float16: a scale of the loss that follows from the gradients.

float16 reaches from 6e-8 to 65504, and gradients are often smaller. So the step takes the gradient
of scale times the loss, and divides it by the scale in float32. A gradient beyond 65504 is an
overflow: the update is skipped, and the scale is halved. After GOOD updates without one, it is
doubled. The scale is part of the state, which checkpoints hold.

The state's scale is what a loss's sum over the batch is multiplied by, a power of two, so that it
rounds nothing. The log has it per token, as the factor of the mean loss, like --initial_scale.
"""

import dataclasses
import math
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from zigzag.core.errors import ConfigError

GOOD = 2000                     # updates in a row without an overflow, before the scale is doubled
TOP = np.finfo(np.float16).max


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale of a run: its part of the state, and what it does around a step."""
    plan: Any

    def __post_init__(self):
        network = self.plan.config.network
        if network.schedule == "1f1b" and self.plan.sizes["pipe"] > 1:
            raise ConfigError("--dtype float16: --schedule 1f1b computes the gradient of the loss "
                              "without a scale; give gpipe or interleaved, or --dtype bfloat16")

    @property
    def terms(self) -> int:
        """Return about how many terms the sum of a batch's loss has: its tokens, or its rows."""
        tokens = self.plan.batch.get("tokens")
        return self.plan.config.batch if tokens is None else tokens.size

    def first(self) -> Any:
        """Return the state's first scale, and how many updates in a row had no overflow."""
        per_term = self.plan.config.initial_scale / self.terms
        return {"scale": np.float32(2.0 ** round(math.log2(per_term))), "good": np.int32(0)}

    def around(self, step: Callable) -> Callable:
        """Extend the step to change the scale, and to log the one it used."""
        def scaled(state, batch):
            new, metrics = step(state, batch)
            good = jnp.where(metrics["skipped"] > 0, 0, state["good"] + 1)
            factor = jnp.where(good == 0, 0.5, jnp.where(good % GOOD == 0, 2.0, 1.0))
            return ({**new, "scale": state["scale"] * factor, "good": good},
                    {**metrics, "loss_scale": state["scale"] * self.terms})

        return scaled


def unscaled(gradients: Callable) -> Callable:
    """Wrap train.make_gradients' function to return the gradients without the scale. If one is
    beyond float16's range, it becomes infinite: on a mesh that splits the rows, each device has a
    part of the sum that may still be within it, and all meshes must skip the same updates."""
    def divided(params, batch, frozen={}, scale=None):
        grads, sums = gradients(params, batch, frozen, scale)
        return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > TOP, jnp.inf, g) / scale, grads), sums

    return divided
