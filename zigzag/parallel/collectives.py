"""The collectives of shard.py, in the form that each compiler needs.

Each is a single lax call (reduce_scatter is lax.psum_scatter), with three exceptions. On a TPU,
`reduce_scatter` is built from all-to-alls, because the compiler would send twice as many bytes.
`sum_dtype` gives `all_gather` a custom transpose. If a custom loss leaves tensor to the compiler,
each collective takes an array that `tensor` splits according to `spec` (`beside_auto_tensor`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from zigzag.core.mesh import ambient, beside_auto_tensor, platform


def all_gather(x: jax.Array, axis: str, dim: int, spec: P = P(), sum_dtype: str = "") -> jax.Array:
    """Gather x along `dim` from the parts that the devices along `axis` hold. The transpose is the
    reduce_scatter below, computed in `sum_dtype` unless that is empty."""
    def gather(x):
        return lax.all_gather(x, axis, axis=dim, tiled=True)

    def scatter(_, g):
        return (_reduce_scatter(g.astype(sum_dtype or g.dtype), axis, dim).astype(g.dtype),)

    if platform() == "tpu" or sum_dtype:    # otherwise autodiff's own transpose is right
        plain, gather = gather, jax.custom_vjp(gather)  # remat policies look inside `plain`
        gather.defvjp(lambda x: (plain(x), None), scatter)
    return beside_auto_tensor(gather, spec)(x)


def reduce_scatter(x: jax.Array, axis: str, dim: int, spec: P = P()) -> jax.Array:
    """Sum x over `axis`; each device keeps its part along `dim`. On a TPU this isn't
    lax.psum_scatter, which the compiler would turn into an all-reduce with twice the bytes.
    Instead it runs in stages: in each, a few devices exchange parts in an all-to-all and add them
    in float32. Together the stages send as many bytes as a single reduce-scatter."""
    return beside_auto_tensor(lambda x: _reduce_scatter(x, axis, dim), spec)(x)


def _reduce_scatter(x, axis, dim):
    if platform() != "tpu":
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    n = ambient()[0][axis]
    x, stride = jnp.moveaxis(x, dim, 0), n
    wide = jnp.promote_types(x.dtype, jnp.float32)
    for few in _stages(n):
        stride //= few
        groups = np.arange(n).reshape(-1, few, stride).swapaxes(1, 2).reshape(-1, few).tolist()
        x = lax.all_to_all(x, axis, 0, 0, tiled=True, axis_index_groups=groups)
        # Add them one at a time: the TPU compiler estimates three times as long for a single `sum`.
        x = sum(part.astype(wide) for part in jnp.split(x, few)).astype(x.dtype)
    return jnp.moveaxis(x, 0, dim)


def all_to_all(x: jax.Array, axis: str) -> jax.Array:
    """Send x[j] to device j along `axis`, and receive the part that device j sends to this one."""
    return beside_auto_tensor(lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True), P())(x)


def psum_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Apply lax.psum_scatter, on every platform."""
    return beside_auto_tensor(lambda x: lax.psum_scatter(
        x, axis, scatter_dimension=dim, tiled=True), P())(x)


def psum(x: jax.Array, axis: str) -> jax.Array:
    """Sum x over `axis`; every device gets the whole sum."""
    return beside_auto_tensor(lambda x: lax.psum(x, axis), P())(x)


def scattering(n: int, mesh: Any) -> tuple[str, int]:
    """Return the name of the collective that implements a reduce-scatter over n devices on this
    mesh, and the number of stages it takes."""
    if platform(mesh) == "tpu":
        return "all-to-all", max(1, len(_stages(n)))
    return "reduce-scatter", 1


def _stages(n):
    """Return each stage's group size: the factors of n, trying 4 and 2 first."""
    few = next((d for d in (4, 2, *range(3, n + 1)) if n % d == 0), 1)
    return [few, *_stages(n // few)] if n > 1 else []
