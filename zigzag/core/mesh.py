"""The mesh, PartitionSpecs, and the types that track which axes a value varies over.

Every mesh has all six axes, most of them with size 1, so "no mesh" needs no second code path. The
last axis has the closest neighbors, because tensor communicates the most.

    data=2, tensor=4 on 8 devices:   (data 2, fsdp 1, pipe 1, seq 1, expert 1, tensor 4)
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, did_you_mean, divisors
from zigzag.core.hosts import end_at_sigterm

AXES = ("data", "fsdp", "pipe", "seq", "expert", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")     # the axes that split the rows of a batch
WITHOUT_TENSOR = AXES[:-1]                  # the manual axes if the compiler handles `tensor`
# {batch array: whether its second dimension is the sequence that seq and pipe split}. For other
# arrays [B, T, ...], a task's `timed` must say; otherwise check_time rejects them on those axes.
TIMED = {**dict.fromkeys(("tokens", "targets", "weights", "segments", "positions", "slots", "mask",
                          "document", "token_types", "task_types"), True),
         "encoded": False}      # an encoder's output; has_time adds names that start with source


class TraceSettings(NamedTuple):
    """Settings that change what shard.py's functions do while jax traces a loss."""
    tensor: int = 1             # the future size of the tensor axis: the rule traces a function
                                # before there is a mesh, and `repeat_kv` must know the size
    overlap: bool = False       # --overlap: `columns` and `row` send parts while multiplying
    strip: int = 0              # `layers`, on a TPU: the fewest tokens in a strip; 0: no strips
    recomputed: tuple[str, ...] = ()    # --remat attention,mlp: the parts of a layer to recompute
                                # in the backward pass
    expert_room: float = 1.25   # --expert_room: the size of the buckets in which tokens travel
    timed: tuple = ()           # a task's `timed`, as pairs: which arrays a pipeline splits by T
    part_of_time: bool = False  # true in the head of a pipelined loss that sees one stage's part of
                                # the sequence; functions that need all of it then raise an error
    calls: Any = None           # a function that `attend` calls with each request (a Call)


# A jax user context, not a plain global, because jax's tracing cache includes it in its keys.
_SETTINGS = jax.make_user_context(TraceSettings())


def trace_settings() -> TraceSettings:
    """Return the settings for the code that jax is tracing now."""
    return _SETTINGS.value


def within(**changes: Any) -> Any:
    """Enter a context in which some fields of `trace_settings()` change."""
    return _SETTINGS(trace_settings()._replace(**changes))


# -------------------------------------------------------------------------------------------
# Meshes

def mesh_sizes(text: str = "", shards: int = 0) -> dict[str, int]:
    """Return {axis: size} for the axes in --mesh ('data=2,tensor=4') and in --shards, which sets
    the size of the tensor axis."""
    sizes = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.partition("=")
        _check_axis(name)
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"mesh {part!r}: expected axis=size with a size of at least 1, "
                              f"for example data=2,tensor=4")
        if name in sizes:
            raise ConfigError(f"mesh {text!r} gives {name} twice")
        sizes[name] = int(number)
    if shards and sizes.setdefault("tensor", shards) != shards:
        raise ConfigError(f"--shards {shards} and tensor={sizes['tensor']} in --mesh disagree; "
                          f"--shards is the size of the tensor axis, so give only one")
    return sizes


def _check_axis(name):
    if name not in AXES:
        raise ConfigError(f"mesh axis {name!r}: the axes are {', '.join(AXES)}"
                          + did_you_mean(name, AXES))


def make_mesh(devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """Make the mesh over all devices. Axes default to size 1, except data, which takes the
    remaining devices. If TPUs are in several slices, only data crosses the slow network between
    them."""
    for name in sizes:
        _check_axis(name)
    devices = jax.devices() if devices is None else list(devices)
    count, needed = len(devices), math.prod(sizes.values())
    if "data" not in sizes and needed <= count and count % needed == 0:
        sizes = {**sizes, "data": count // needed}
    elif needed != count:
        raise ConfigError(_wrong_size(sizes, needed, devices))
    mesh, slices = abstract_mesh(sizes), slices_of(devices)
    data, *others = mesh.axis_sizes
    if data % slices:
        raise ConfigError(f"mesh data={data}: the devices are in {slices} slices, and only data "
                          f"crosses the slow network between them; make data a multiple of "
                          f"{slices}")
    # jax.make_mesh won't do: on most chips it rejects an axis that is part of one side of a torus.
    placed = mesh_utils.create_hybrid_device_mesh(
        (data // slices, *others), (slices, *[1] * len(others)), devices,
        allow_split_physical_axes=True) if slices > 1 else mesh_utils.create_device_mesh(
            mesh.axis_sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=mesh.axis_types)


def slices_of(devices: Iterable[Any]) -> int:
    """Return how many TPU slices these devices are in. A slow network connects slices."""
    return len({getattr(d, "slice_index", 0) for d in devices if d.platform == "tpu"}) or 1


def _wrong_size(sizes, needed, devices):
    count, platform = len(devices), devices[0].platform if devices else "no"
    if needed <= count:
        advice = f"sizes that divide {count} are {', '.join(map(str, divisors(count)))}"
    elif platform == "cpu":
        advice = ("use a smaller mesh or more simulated devices (XLA_FLAGS="
                  f"--xla_force_host_platform_device_count={needed})")
    else:
        advice = "use --shards 1, or set JAX_PLATFORMS=cpu to simulate the devices"
    text = " x ".join(f"{a}={sizes[a]}" for a in AXES if a in sizes)
    number = f"{needed} device{'s' * (needed > 1)}"
    return f"mesh {text} needs {number}, but there are {count} ({platform}): {advice}"


def abstract_mesh(sizes: dict[str, int]) -> Any:
    """Make a mesh with these axis sizes and no devices."""
    # Use Auto, because shard_map can't leave an Explicit axis to the compiler.
    return jax.sharding.AbstractMesh(tuple(sizes.get(a, 1) for a in AXES), AXES,
                                     axis_types=(AxisType.Auto,) * len(AXES))


def simulate_devices(count: int) -> None:
    """Make the CPU pretend to be `count` devices, unless XLA_FLAGS already sets the number.

    Call this before anything touches a device. Only the CPU backend reads this setting, so it has
    no effect on a machine with an accelerator."""
    if count > 2**16:
        raise ConfigError(f"a mesh of {count:,} devices is too large to simulate")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):     # if devices exist, make_mesh checks their count
            jax.config.update("jax_num_cpu_devices", count)


def axes_in_use(sizes: Mapping[str, int], among: Iterable[str] = AXES) -> list[str]:
    """Return the axes of size > 1 among these, as axis=size."""
    return [f"{axis}={size}" for axis, size in sizes.items() if size > 1 and axis in among]


def mesh_of_flags(text: str = "", shards: int = 0) -> Mesh:
    """Make the mesh that the flags ask for. Without an accelerator, simulate devices on the CPU."""
    sizes = mesh_sizes(text, shards)
    simulate_devices(math.prod(sizes.values()))
    mesh = make_mesh(**sizes)
    end_at_sigterm()
    return mesh


def simulate_own_devices(config: Any) -> None:
    """Simulate this process's share of the devices that the flags ask for, if it is known."""
    sizes = mesh_sizes(config.mesh, config.shards)
    count, rest = divmod(math.prod(sizes.values()), max(1, config.processes))
    if not config.distributed and rest == 0:
        simulate_devices(count)


def keep_compiled(least: float = 1.0) -> None:
    """If a program takes at least `least` seconds to compile, keep it in the user's cache folder
    for later runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zigzag/compiled"
    jax.config.update("jax_compilation_cache_dir",
                      os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def axis_sizes(mesh: Any) -> dict[str, int]:
    """Return the sizes of all axes: 1 for an axis that the mesh lacks."""
    return dict.fromkeys(AXES, 1) | dict(mesh.shape)


def row_groups(mesh: Any) -> int:
    """Return how many parts the mesh splits a batch's rows into."""
    return devices_over(BATCH_AXES, axis_sizes(mesh))


def devices_over(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return how many devices these axes span together."""
    return math.prod(sizes[axis] for axis in axes)


def mesh_of(tree: Any) -> Mesh | None:
    """Return the mesh of a tree's arrays or shardings, or None if they have none."""
    found = [getattr(x, "sharding", x) for x in jax.tree.leaves(tree)]
    return next((s.mesh for s in found if isinstance(s, NamedSharding)), None)


def platform(mesh: Any = None) -> str:
    """Return the platform of this mesh or the ambient one: cpu, tpu or gpu; '' if it has no
    devices."""
    device = (mesh or get_abstract_mesh()).abstract_mesh.abstract_device
    return getattr(device, "platform", "")      # device may be None


def best_dtype(mesh: Mesh) -> str:
    """Return the best compute precision for the mesh's devices: float32 on CPUs, else bfloat16."""
    return "float32" if platform(mesh) == "cpu" else "bfloat16"


def time_parts() -> int:
    """Return how many parts the ambient mesh's manual axes may split the sequence into."""
    return math.prod(map(axis_size, ("seq", "tensor", "pipe")))


def may_unroll() -> bool:
    """Return whether the ambient mesh allows unrolled layers, as a single CPU or GPU does.
    zigzag/parallel/remat.py decides when to unroll them."""
    return platform() in ("cpu", "gpu") and get_abstract_mesh().size == 1


# -------------------------------------------------------------------------------------------
# PartitionSpecs

def is_spec(x: Any) -> bool:
    return isinstance(x, P)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the axes in a single entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def spec_axes(spec: P) -> set[str]:
    """Return all axes in a spec."""
    return {axis for entry in spec for axis in entry_axes(entry)}


def full_spec(spec: P, rank: int) -> list[Any]:
    """Return a spec's entries for an array of this rank, one per dimension."""
    return [*spec, *[None] * (rank - len(spec))]


def trimmed(entries: Iterable[Any]) -> P:
    """Make the spec with these entries, dropping trailing entries without an axis."""
    entries = list(entries)
    while entries and not entries[-1]:
        entries.pop()
    return P(*entries)


def drop_trivial_axes(spec: P, mesh: Any) -> P:
    """Drop axes of size 1 from the spec. Only this function drops them. If they stayed, the
    compiler would fail or emit collectives of whole gradients within single-device groups."""
    sizes = axis_sizes(mesh)
    return trimmed(tuple(a for a in entry_axes(entry) if sizes[a] > 1) for entry in spec)


def without_axis(specs: Any, axis: str) -> Any:
    """Drop this axis from the specs, for arrays that it doesn't split, or for a shard_map that
    leaves the axis to the compiler."""
    return jax.tree.map(lambda spec: trimmed(tuple(a for a in entry_axes(entry) if a != axis)
                                             for entry in spec), specs)


def batch_spec(mesh: Any) -> P:
    """Return the spec for a batch [B, ...], which splits its rows over BATCH_AXES."""
    return drop_trivial_axes(P(BATCH_AXES), mesh)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Turn a tree of specs into a tree of shardings on this mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs)


def with_shardings(shapes: Any, specs: Any, mesh: Mesh) -> Any:
    """Return a tree of shapes with the shardings of these specs on this mesh (None: unsplit)."""
    places = shardings(specs or jax.tree.map(lambda _: P(), shapes), mesh)
    return jax.tree.map(lambda x, place: x.update(sharding=place), shapes, places)


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the paths of a tree's leaves (written a.b.c), the leaves, and the tree's structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return ([jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in pairs],
            [leaf for _, leaf in pairs], structure)


def by_path(tree: Any) -> dict[str, Any]:
    return dict(zip(*flatten(tree)[:2]))


def cast(tree: Any, dtype: str) -> Any:
    """Cast the tree's float leaves to this dtype, or do nothing if dtype is ''. A leaf called
    router_bias keeps its dtype, because experts are chosen in float32."""
    def one(path, w):
        is_exact = path and getattr(path[-1], "key", "") == "router_bias"
        return w if is_exact or not jnp.issubdtype(w.dtype, jnp.floating) else w.astype(dtype)

    return jax.tree.map_with_path(one, tree) if dtype else tree


def check_ids(tokens: Any, vocab_size: int, where: str = "the vocabulary") -> None:
    """Reject ids outside the vocabulary, because a lookup would still return numbers for them. Do
    nothing while jax traces, because the ids have no values yet."""
    if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True):
        return
    ids = np.asarray(tokens)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if vocab_size and wrong.size:
        raise ConfigError(f"the id {wrong.flat[0]} is not in {where}: expected ids from 0 to "
                          f"{vocab_size - 1}")


def has_time(name: str, said: Mapping[str, bool]) -> bool | None:
    """Return whether the batch array with this name is [B, T, ...]; None if unknown."""
    return said.get(name, False if name.startswith("source") else TIMED.get(name))


def unknown_time(name: str, length: int, axis: str, size: int) -> ConfigError:
    """Return the error for a batch array if nothing says whether it has a sequence."""
    return ConfigError(f"mesh axis {axis}={size}: the second dimension of the batch's {name!r} has "
                       f"{length} entries, the sequence length; say whether it is the sequence: "
                       f"timed={{{name!r}: True}} (or False) in train.Task, or an entry of TIMED "
                       f"in zigzag/core/mesh.py")


def split_rows(tree: Any, count: int) -> Any:
    """Reshape each array [B, ...] to [count, B / count, ...]."""
    # Don't pass -1: numpy can't infer it for an array without elements, [B, 0].
    return jax.tree.map(lambda a: a.reshape(count, len(a) // count, *a.shape[1:]), tree)


def add_to(total: Any, more: Any) -> Any:
    """Add two trees, keeping the first one's dtypes."""
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, more)


# -------------------------------------------------------------------------------------------
# Inside a shard_map: varying types (shard.py explains them)

def ambient() -> tuple[dict[str, int], set[str]]:
    """Return the ambient mesh's axis sizes, and the axes that are manual here. Our code
    communicates over a manual axis, and the compiler over an auto axis."""
    mesh = get_abstract_mesh()
    return dict(mesh.shape), set(mesh.manual_axes)


def varying(*trees: Any) -> set[str]:
    """Return the manual axes over which the leaves may differ between devices."""
    # jax.typeof fails on a ShapeDtypeStruct where tensor is auto.
    return set().union(*[(getattr(x, "manual_axis_type", None) or jax.typeof(x).mat).varying
                         for x in jax.tree.leaves(trees)])


def axis_size(axis: str) -> int:
    """Return a mesh axis's size, or 1 if it's missing or the compiler splits it (--collectives
    compiler)."""
    sizes, manual = ambient()
    return sizes[axis] if axis in manual else 1


def send(tree: Any, axis: str, by: int) -> Any:
    """Send a tree around an axis's ring, to the next device (1) or the previous one (-1)."""
    n = axis_size(axis)
    return lax.ppermute(tree, axis, [(i, (i + by) % n) for i in range(n)])


def is_tensor_split(x: Any) -> bool:
    """Return whether the devices along tensor hold different parts of x. Types don't say which
    dimension is split; the caller must know."""
    return "tensor" in varying(x)


def sum_if_tensor_split(x: jax.Array) -> jax.Array:
    """Sum x over tensor if the devices along tensor hold different parts of the sum."""
    return lax.psum(x, "tensor") if is_tensor_split(x) else x


def local_part(x: jax.Array, dim: int) -> jax.Array:
    """Given an array that every device along tensor holds whole, return this device's part
    along one dimension."""
    size = x.shape[dim] // axis_size("tensor")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)


def mark_varying(tree: Any, *like: Any, also: set[str] = frozenset()) -> Any:
    """Mark the tree as varying over every axis that `like` varies over, and over `also`. The
    transpose is a sum over these axes. If you mark weights before you differentiate, their
    gradients stay local until you sum them. If you mark an activation inside the function, jax sums
    the gradient at that point."""
    axes = varying(*like) | set(also)

    return jax.tree.map(
        lambda x: lax.pcast(x, tuple(sorted(axes - varying(x))), to="varying"), tree)


def vary_like(tree: Any, *like: Any) -> Any:
    """Mark the tree as varying over every axis that `like` varies over, except tensor. A type that
    varies over tensor means that tensor splits the array, which must not change here. For example,
    a loop's carry stays split over tensor, or whole, just as the caller passed it."""
    return mark_varying(tree, also=varying(*like) - {"tensor"})


def zeros_of(fn: Callable, *args: Any) -> Any:
    """Make zeros with the shapes, dtypes and varying types of fn(*args)."""
    # jnp.zeros_like fails on a ShapeDtypeStruct where tensor is auto.
    return jax.tree.map(lambda s: mark_varying(jnp.zeros(s.shape, s.dtype), s),
                        jax.eval_shape(fn, *args))


def float32_zeros(tree: Any) -> Any:
    """Make float32 zeros with the shapes and varying types of a tree's arrays."""
    return jax.tree.map(lambda x: mark_varying(jnp.zeros(x.shape, jnp.float32), x), tree)


def keep_on_first(tree: Any, axes: set[str]) -> Any:
    """If a leaf doesn't vary over an axis, keep it on the axis's first device and zero it on the
    others. Every device computed it, so a sum over the axis now counts it only once."""
    def first(x):
        for axis in sorted(axes - varying(x)):
            x = jnp.where(lax.axis_index(axis) == 0, x, 0)
        return x

    return jax.tree.map(first, tree)


def pmean_over(tree: Any, *axes: str) -> Any:
    """If a leaf's type says that it may differ between devices along these axes, tell jax that it
    doesn't. In the backward pass, each device receives an equal share of the leaf's gradient."""
    def one(x):
        marked = tuple(sorted(varying(x) & {*axes}))
        return lax.pmean(x, marked) if marked else x

    return jax.tree.map(one, tree)


def pmean_all(tree: Any) -> Any:
    """Apply pmean_over to all axes."""
    return pmean_over(tree, *AXES)


def untyped(fn: Callable, outside: bool = True) -> Callable:
    """Wrap fn to run without varying types, traced on plain shapes. If `outside`, trace it without
    a mesh as well, so that no function in shard.py sends anything. Use this in a shard_map with
    check_vma=False, where each device computes fn on its own arguments."""
    def call(*args):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
        with no_mesh if outside else contextlib.nullcontext():
            # Use a new lambda, because jax could return a cached trace of fn from elsewhere.
            traced, made = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*like)
        return jax.tree.unflatten(jax.tree.structure(made),
                                  jaxpr_as_fun(traced)(*jax.tree.leaves(args)))

    return call


def beside_auto_tensor(collective: Callable, spec: P) -> Callable:
    """Wrap a collective for an array that `tensor` may split as well. A custom loss leaves tensor
    to the compiler, which would gather the array over tensor first: correct, but four times the
    bytes. So this makes tensor manual around this single collective."""
    sizes, manual = ambient()
    if sizes["tensor"] == 1 or "tensor" in manual:
        return collective
    local = P(*[a if a == "tensor" else None for a in spec])
    return lambda x: jax.shard_map(collective, in_specs=local, out_specs=local,
                                   axis_names={"tensor"}, check_vma=bool(varying(x)))(x)
