"""Collectives that a platform needs in another form than jax's own."""

from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zigzag.core.mesh import ambient, platform


def with_reduce_scatter(all_gather: Callable, axis: str, dim: int, dtype: str = "") -> Callable:
    """all_gather (over `axis`, along `dim`) with the reduce_scatter below as its transpose,
    computed in `dtype` if one is given. Without a dtype this changes something on a TPU only:
    elsewhere autodiff's transpose is the same reduce-scatter."""
    if platform() != "tpu" and not dtype:
        return all_gather
    gather = jax.custom_vjp(all_gather)     # (remat policies look into all_gather in the next line)
    gather.defvjp(lambda x: (all_gather(x), None), lambda _, g: (
        reduce_scatter(g.astype(dtype or g.dtype), axis, dim).astype(g.dtype),))
    return gather


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """x summed over `axis`, of which each device keeps its part along `dim`. On a TPU this is not
    lax.psum_scatter, which the compiler turns into an all-reduce of twice the bytes. There, each
    stage of a few devices exchanges parts by an all-to-all and adds them in float32; all stages
    together send as many bytes as one reduce-scatter."""
    if platform() != "tpu":
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    n = ambient()[0][axis]
    x, stride = jnp.moveaxis(x, dim, 0), n
    wide = jnp.promote_types(x.dtype, jnp.float32)
    for few in _stages(n):
        stride //= few
        groups = np.arange(n).reshape(-1, few, stride).swapaxes(1, 2).reshape(-1, few).tolist()
        x = lax.all_to_all(x, axis, 0, 0, tiled=True, axis_index_groups=groups)
        x = x.reshape(few, -1, *x.shape[1:]).sum(0, dtype=wide).astype(x.dtype)
    return jnp.moveaxis(x, 0, dim)


def scattering(n: int, mesh: Any) -> tuple[str, int]:
    """The name of the collective that does a reduce-scatter over n devices on this mesh, and the
    number of stages."""
    if platform(mesh) == "tpu":
        return "all-to-all", max(1, len(_stages(n)))
    return "reduce-scatter", 1


def _stages(n):
    """Factors of n, 4 and 2 first: the number of devices in a group of each stage."""
    few = next((d for d in (4, 2, *range(3, n + 1)) if n % d == 0), 1)
    return [few, *_stages(n // few)] if n > 1 else []
