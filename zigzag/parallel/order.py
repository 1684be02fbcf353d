"""The zigzag order, in which the devices of seq hold the time of a row."""

from typing import Any, Sequence

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError


def zigzag_order(time: int, devices: int) -> np.ndarray:
    """The slots of a row in the order of the devices that hold them. With 8 tokens on 2 devices:
    0 1 6 7 | 2 3 4 5."""
    parts = np.arange(time).reshape(2 * devices, -1)
    return np.concatenate([p for i in range(devices) for p in (parts[i], parts[-1 - i])])


def shard_time(batch: dict[str, Array], mesh: Any, row_axes: Any = None,
               untimed: Sequence[str] = ()) -> tuple[dict, dict]:
    """A batch in the order in which seq splits it, and specs that split it (and its rows over
    `row_axes`). Arrays [B, T, ...] go into zigzag order and are split; others, and those named in
    `untimed`, whose second dimension is not this time, stay whole. All devices of seq were given
    the whole batch: nothing is sent."""
    n = mesh.shape["seq"]
    if n == 1 or "tokens" not in batch and not batch.keys().isdisjoint(untimed):
        return batch, {k: P(row_axes) for k in batch}
    if np.ndim(batch.get("tokens")) != 2:
        raise ConfigError(f"mesh axis seq={n}: a batch of this task has no 'tokens' [B, T] whose "
                          f"time could be split")
    T = batch["tokens"].shape[1]
    if T % (2 * n):
        raise ConfigError(f"mesh axis seq={n}: {T} tokens do not divide into {2 * n} parts, an "
                          f"early and a late one for each device")
    order = zigzag_order(T, n)
    timed = {k for k, x in batch.items() if x.shape[1:2] == (T,) and k not in untimed}
    return ({k: x[:, order] if k in timed else x for k, x in batch.items()},
            {k: P(row_axes, "seq") if k in timed else P(row_axes) for k in batch})
