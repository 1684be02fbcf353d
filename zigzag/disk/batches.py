"""Batches: turning examples into arrays, and placing them on the mesh.

Each process builds only the rows that its own devices hold.
"""

from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, one_line
from zigzag.core.mesh import batch_spec, row_groups


def batch_arrays(collate: Callable, examples: Sequence, shapes: Any = None
                 ) -> dict[str, np.ndarray]:
    """Run collate on these examples and check its batch {name: array [rows, ...]}. Every array must
    hold numbers, one row per example. Names, row shapes and dtypes must match `shapes`, if given.
    Return the batch."""
    batch = collate(examples)
    if not isinstance(batch, Mapping) or not batch:
        raise ConfigError(f"collate returned {repr(batch)[:40]} ({type(batch).__name__}): {BATCH}")
    batch = {name: _numbers(name, x, len(examples)) for name, x in batch.items()}
    if shapes is not None and (made := _rows(batch)) != (first := _rows(shapes)):
        raise ConfigError(f"collate made rows of {made} from some examples, but of {first} from "
                          f"the first: every batch needs the same arrays, with the same dtypes, "
                          f"padded to the same shapes")
    return batch


# What collate must return.
BATCH = "expected a dict {name: array of numbers}, with a row for each example in every array"


def _numbers(name, value, count):
    """Convert collate's array of this name to numpy. It must have one row per example (`count`)."""
    try:
        x = np.asarray(value)
    except Exception as e:      # rows of different lengths, or another library's objects
        raise ConfigError(f"collate made {name!r} a {type(value).__name__} that is not an array "
                          f"({one_line(e)}): {BATCH}") from None
    if not isinstance(name, str) or not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != bool:
        raise ConfigError(f"collate made {name!r} of {x.dtype} ({type(value).__name__}): {BATCH}")
    if x.shape[:1] != (count,):
        raise ConfigError(f"collate made {name!r} of shape {x.shape} from {count} examples: the "
                          f"first dimension must count them")
    return x


def _rows(arrays):
    """Describe one row of each array: its shape and its dtype on a device (where int64 becomes
    int32)."""
    return {name: f"{jax.dtypes.canonicalize_dtype(x.dtype)}{list(x.shape[1:])}"
            for name, x in arrays.items() if name != "seeds"}


def batch_shapes(rows: int, first: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return a training batch's shapes {name: jax.ShapeDtypeStruct [rows, ...]}, including the
    dropout "seeds". `first` holds the arrays of the first example."""
    batch = {k: jax.ShapeDtypeStruct((rows, *v.shape[1:]), v.dtype)
             for k, v in first.items()}
    return {**batch, "seeds": jax.ShapeDtypeStruct((rows,), jnp.uint32)}


def place_batch(mesh: Any, make: Callable[[int, int], dict], rows: int) -> Any:
    """Put a batch {name: array [rows, ...]} on the mesh, with its rows split over BATCH_AXES. If
    they don't divide evenly, every device gets all rows. make(first, last) returns the arrays for
    rows first to last - 1; it is called only for the rows that this process's devices hold."""
    place = NamedSharding(mesh, P() if rows % row_groups(mesh) else batch_spec(mesh))
    here = [i[0].indices(rows)[:2] for i in place.addressable_devices_indices_map((rows,)).values()]
    first, last = min(a for a, _ in here), max(b for _, b in here)

    def put(x):
        def part(index):
            begin, end, _ = index[0].indices(rows)
            return x[begin - first:end - first]

        return jax.make_array_from_callback((rows, *x.shape[1:]), place, part)

    return {k: put(x) for k, x in make(first, last).items()}
