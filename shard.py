"""Where every array lives, and every byte that crosses a wire.

                 x [B, T, D]  whole on every device of the tensor axis
                   |
       w_up   [D, F | F | F | F]      column: each device makes its own part of F, sends nothing
                   |
          h [B, T, F | F | F | F]     split
                   |
       w_down [F | F | F | F, D]      row: each device has a partial sum of the whole y
                   |
                 y [B, T, D]          whole again, after one all-reduce

Column, row, column, row: two matrix products for one reduction. That alternation is the zigzag,
and nobody writes it down: `infer_specs` finds it by walking the computation (part 2). Part 1 is
the mesh; part 3 is what a model calls to run on it; part 4 is what the training step calls.

Dimensions, in all files: B batch, T time, D model, H heads, K key/value heads, N per head,
F feed-forward, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import math
import os
import re
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


class Refused(ValueError):
    """What the user asked for cannot be done. The text says what was given and what would do."""


def nearest(word: str, known: Sequence[str]) -> str:
    """'; did you mean X?' for the known name closest to `word`, or nothing."""
    close = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_divisor(value: int, near: int) -> int:
    """The divisor of `value` that is nearest to `near`."""
    return min((n for n in range(1, value + 1) if value % n == 0), key=lambda n: abs(n - near))


def nearest_multiple(of: int, near: int) -> int:
    """The multiple of `of` (not 0) that is nearest to `near`."""
    return max(1, round(near / of)) * of


# -------------------------------------------------------------------------------------------
# 1. The mesh. Always all six axes, most of size 1, so that there is never a second code path
#    for "no mesh". The last axis is the one whose neighbours are closest: tensor talks most.

AXES = ("data", "fsdp", "pipe", "seq", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")       # the axes that split the rows of a batch
MANUAL = AXES[:-1]                       # our collectives; those of `tensor` are the compiler's


def mesh_sizes(text: str = "", shards: int = 0) -> dict[str, int]:
    """'data=2,tensor=4' and the number of tensor shards as {axis: size}; what is not said is
    left out."""
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.partition("=")
        if name not in AXES:
            raise Refused(f"mesh axis {name!r}: the axes are {', '.join(AXES)}"
                          + nearest(name, AXES))
        if not number.isdecimal() or int(number) < 1:
            raise Refused(f"mesh {part!r}: expected axis=size with a size of at least 1, "
                          f"for example data=2,tensor=4")
        if name in sizes:
            raise Refused(f"mesh {text!r} gives {name} twice")
        sizes[name] = int(number)
    if shards and sizes.setdefault("tensor", shards) != shards:
        raise Refused(f"--shards {shards} and tensor={sizes['tensor']} in --mesh disagree; "
                      f"--shards is the size of the tensor axis, give one of them")
    return sizes


def make_mesh(devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """The mesh over all devices. An axis left out has size 1, except data, which takes the
    devices that are left."""
    for name in sizes:
        if name not in AXES:
            raise Refused(f"mesh axis {name!r}: the axes are {', '.join(AXES)}"
                          + nearest(name, AXES))
    devices = jax.devices() if devices is None else list(devices)
    said = math.prod(sizes.values())
    if "data" not in sizes and said <= len(devices) and len(devices) % said == 0:
        sizes = {**sizes, "data": len(devices) // said}
    if math.prod(sizes.values()) != len(devices):
        asked = " x ".join(f"{a}={sizes[a]}" for a in AXES if a in sizes)
        where = devices[0].platform if devices else "no"
        if said > len(devices):
            advice = ("use --shards 1, or set JAX_PLATFORMS=cpu to simulate the devices"
                      if where != "cpu" else
                      "use a smaller mesh or more simulated devices (XLA_FLAGS="
                      f"--xla_force_host_platform_device_count={said})")
        else:
            fits = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
            advice = f"sizes that divide {len(devices)} are {', '.join(map(str, fits))}"
        raise Refused(f"mesh {asked} is {math.prod(sizes.values())} devices and there are "
                      f"{len(devices)} ({where}): {advice}")
    shape = tuple(sizes.get(a, 1) for a in AXES)
    if devices[0].platform == "tpu" and len({getattr(d, "slice_index", 0) for d in devices}) > 1:
        raise Refused("these TPUs are several slices, between which only a slow network is: give one slice")
    # Not jax.make_mesh, which on most chips has no mesh where an axis is a part of a side of the torus.
    placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    # Auto: Explicit axes cannot be left to the compiler by shard_map.
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def meshes(count: int) -> list[dict[str, int]]:
    """Every mesh of so many devices, as the sizes of its axes."""
    def over(axes, count):
        if len(axes) == 1:
            return [{axes[0]: count}]
        return [{axes[0]: n, **rest} for n in range(1, count + 1) if count % n == 0 for rest in over(axes[1:], count // n)]

    return over(AXES, count)


def abstract_mesh(sizes: dict[str, int]) -> Any:
    """A mesh of no devices, for what only looks at its shape."""
    sizes = {a: sizes.get(a, 1) for a in AXES}
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(AXES))


def simulate(count: int) -> None:
    """Let the CPU pretend to be `count` devices, unless XLA_FLAGS already says how many.

    Call it before anything touches a device. Only the CPU backend reads this setting, so with
    an accelerator in the machine it changes nothing."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):     # the devices exist already: make_mesh counts
            jax.config.update("jax_num_cpu_devices", count)


def topology(name: str) -> list[Any]:
    """The devices of hardware that is not here: programs can be compiled for them, and not run."""
    from jax.experimental import topologies
    kind, _, size = name.partition(":")
    gpu = kind == "h100"
    jax.config.update("jax_platforms", "cpu")       # nothing here is to be taken, or looked for
    module, wheels = (("jax_plugins.xla_cuda12", f"jax-cuda12-plugin=={jax.__version__} nvidia-cuda-nvcc-cu12")
                      if gpu else ("libtpu", "libtpu"))
    try:
        here = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        here = None
    if not here:
        raise Refused(f"--topology {name}: its compiler is not here: pip install {wheels}")
    # Several compilations beside each other, on a machine that is no TPU.
    for key, value in dict(ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1", TPU_MIN_LOG_LEVEL="3",
                           TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v5litepod-1").items():
        os.environ.setdefault(key, value)
    if gpu:     # jax would ask the cuDNN that is here for its version, where a program calls for its kernels
        from jax._src.cudnn import fused_attention_stablehlo
        fused_attention_stablehlo.check_cudnn_version = lambda: 91000
    more = {"chip_config_name": "megacore"} if kind == "v4" else {}     # a chip is a device, as it is in use
    try:
        return (topologies.get_topology_desc(platform="cuda", topology_name=size, topology=size, target_config=H100)
                if gpu else topologies.get_topology_desc(platform="tpu", topology_name=name, **more)).devices
    except Exception as e:      # of the compiler's own kinds
        raise Refused(f"--topology {name}: not known ({' '.join(str(e).split())[:150]}); expected one like v4:2x2x2, "
                      f"v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:2x2x2 or h100:1x2x8 (slices x hosts x GPUs)") from None


# What a compiler needs to know of a GPU that is not here, in XLA's words.
H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
device_address_bits: 64 pcie_bandwidth: 34359738368 name: "NVIDIA H100 80GB HBM3" driver_version: "12.9.0"
runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.8.0" }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3" """


def live(spec: P, mesh: Any) -> P:
    """The spec without the axes of size 1. The one place where they are dropped: the compiler
    fails on them, or sends whole gradients to nobody."""
    sizes = {a: 1 for a in AXES} | dict(mesh.shape)
    kept = [tuple(a for a in _names(entry) if sizes[a] > 1) for entry in spec]
    return _trimmed([names[0] if len(names) == 1 else names or None for names in kept])


def manual(specs: Any) -> Any:
    """Specs as shard_map takes them: without the axis that is left to the compiler."""
    return jax.tree.map(lambda s: P(*[None if e == "tensor" else e for e in s]), specs,
                        is_leaf=_is_spec)


def batch_spec(mesh: Any) -> P:
    """Rows of a batch are split over every axis that has rows of its own."""
    return live(P(BATCH), mesh)


def rows(mesh: Any) -> int:
    """Over how many groups of devices the rows of a batch are split."""
    return math.prod(dict(mesh.shape)[a] for a in BATCH)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays (or the places) of the tree lie on, if they lie on one."""
    places = [getattr(x, "sharding", x) for x in jax.tree.leaves(tree)]
    return next((p.mesh for p in places if isinstance(p, NamedSharding)), None)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of specs as a tree of places on this mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=_is_spec)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _names(entry: Any) -> tuple[str, ...]:
    """The axes that one entry of a spec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _axes_in(spec: P) -> set[str]:
    return {a for entry in spec for a in _names(entry)}


def _trimmed(entries: list[Any]) -> P:
    """The spec of these entries, without the empty ones at its end."""
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


# -------------------------------------------------------------------------------------------
# 2. The rule. Reads no names: it walks the function's jaxpr.
#
#    Two dimensions that a computation ties together (added, multiplied, copied, contracted
#    with each other) must be split together or not at all: they are one *thread*. A residual
#    stream is one long thread through the whole network. The hidden dimension of an MLP is a
#    short one: out of w_gate and w_up, into w_down. So are the heads, and the vocabulary.
#    Splitting a thread has a price, the bytes that must be reduced wherever it is summed over,
#    forward and backward, or sent where it is sliced. The rule splits the threads that cost
#    least per byte of weights, never two in one weight. Columns and rows alternate by
#    themselves: a weight's two dimensions are different threads.
#
#    Some threads are not for sale (`refuse`): what does not divide; heads where they do not, and
#    the inside of a head (two activations meet head by head); what is read before any weight has
#    made it; the rows of all but one of the tables that are added up; experts, which have an axis
#    of their own; and what is not worth a reduction: low ranks, few labels, a stem.
#
#    Read it as: the walk (`run`, `step`, and a method for each kind of operation) notes what is
#    tied, priced, cut and used how; `settle` draws the conclusions; `choose` chooses.

@dataclasses.dataclass(frozen=True)
class Decision:
    """Where one leaf lives, and why."""
    spec: P
    reason: str
    matrix: bool        # met another value in a product or was indexed; else a scale or a bias
    stacked: bool       # its dimension `pipe` counts layers
    sides: tuple = ((), ())     # its dimensions that are contracted with an activation, and the others of the product
    reductions: tuple = ()      # (count, bytes) of each that its thread costs, told by one leaf
    used: P | None = None       # how the loss is given it, if not as it lies: only an override makes these differ


# For how many devices the rule follows a function, which is traced without a mesh: it may have one of its own.
# (jax's own kind of variable: what it has traced is known by it, too.)
_WALKED = jax.make_user_context(1)


def infer_specs(fn: Callable, params: Any, *args: Any, mesh: Any,
                overrides: Sequence[tuple[str, P]] = ()) -> Any:
    """A PartitionSpec for each leaf of `params`, derived from how `fn(params, *args)` uses it.

    `params` and `args` may be arrays or jax.ShapeDtypeStruct; nothing runs on a device. Leaves
    that are not arrays (an Equinox module's functions) are left as they are, with the spec P().
    `overrides`, a list of (path regex, PartitionSpec), win over the rule."""
    return jax.tree.map(lambda d: d.spec, decide(fn, params, *args, mesh=mesh,
                                                 overrides=overrides))


def decide(fn: Callable, params: Any, *args: Any, mesh: Any,
           overrides: Sequence[tuple[str, P]] = ()) -> Any:
    """As infer_specs, with the reason beside each spec."""
    sizes = {a: 1 for a in AXES} | dict(mesh.shape)
    paths, leaves, tree = flatten(params)
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def call(values, args):
        whole = list(leaves)
        for i, value in zip(arrays, values):
            whole[i] = value
        return fn(jax.tree.unflatten(tree, whole), *args)

    with _WALKED(sizes["tensor"]):
        closed = jax.make_jaxpr(call)([leaves[i] for i in arrays], args)
    walk, given = _Walk(sizes["tensor"], [leaves[i] for i in arrays]), closed.jaxpr.invars[len(arrays):]
    # Without arguments what the function closes over, or draws, are its data.
    walk.closed = not given
    walk.run(closed.jaxpr, [walk.value(c, data=walk.closed) for c in closed.consts],
             walk.weights + [walk.value(v.aval, data=True) for v in given])
    chosen = walk.choose()
    decisions = [Decision(P(), "not an array", False, False)] * len(leaves)
    for k, i in enumerate(arrays):
        found = _decide_leaf(walk, k, chosen[k], sizes)
        decisions[i] = dataclasses.replace(found, spec=live(found.spec, mesh))
    for i, pattern, spec in overridden([(paths[i], i, leaves[i].shape) for i in arrays], overrides, sizes):
        rule = decisions[i].used if decisions[i].used is not None else decisions[i].spec
        used = _as_used(live(spec, mesh), rule, len(leaves[i].shape), decisions[i].stacked)
        decisions[i] = dataclasses.replace(decisions[i], spec=live(spec, mesh), used=used,
                                           reason=f"override {pattern!r}")
    return jax.tree.unflatten(tree, decisions)


def overridden(weights: Sequence[tuple[str, Any, tuple[int, ...]]], overrides: Sequence[tuple[str, P]],
               sizes: dict[str, int]) -> list[tuple[Any, str, P]]:
    """Of weights, as (path, key, shape), the key of each that an override matches, with the override."""
    found = []
    for pattern, spec in overrides:
        try:
            hits = [(path, key, shape) for path, key, shape in weights if re.search(pattern, path)]
        except re.error as e:
            raise Refused(f"override {pattern!r} is not a regular expression: {e}") from None
        if not hits:
            raise Refused(f"override {pattern!r} matches no parameter"
                          + nearest(pattern, [path for path, *_ in weights]))
        for path, key, shape in hits:
            _check_spec(path, shape, spec, sizes)
            found.append((key, pattern, spec))
    return found


def _as_used(stored: P, rule: P, rank: int, stacked: bool) -> P:
    """How a loss is given a weight that lies as an override says. Layers go to their stages and experts
    to their devices as the rule has it; `tensor` is as the override says, and so is `fsdp`, but on the
    dimension that counts layers or experts, of which each device uses all that are its own. What else
    the override splits is gathered before the loss sees it (`as_used`)."""
    stored, rule = ([*spec, *[None] * (rank - len(spec))] for spec in (stored, rule))
    native = [a if a in ("pipe", "expert") else None for a in rule]
    free = [not (native[d] or stacked and d == 0) for d in range(rank)]
    return _trimmed([native[d] or (a if a == "tensor" or a == "fsdp" and free[d] else None)
                     for d, a in enumerate(stored)])


def flatten(params: Any) -> tuple[list[str], list[Any], Any]:
    pairs, tree = jax.tree_util.tree_flatten_with_path(params)
    return ([jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in pairs],
            [leaf for _, leaf in pairs], tree)


def _check_spec(path: str, shape: tuple[int, ...], spec: P, sizes: dict[str, int]) -> None:
    if len(spec) > len(shape):
        raise Refused(f"{path}: {spec} has {len(spec)} dimensions, the weight has {len(shape)}")
    seen: set[str] = set()
    for dim, entry in zip(shape, spec):
        names = _names(entry)
        for name in names:
            if name not in AXES:
                raise Refused(f"{path}: {spec} names the axis {name!r}; the axes are "
                              f"{', '.join(AXES)}" + nearest(name, AXES))
            if name in seen:
                raise Refused(f"{path}: {spec} names the axis {name!r} twice")
            seen.add(name)
        if dim % math.prod(sizes[a] for a in names):
            raise Refused(f"{path}: {spec} splits {dim} into "
                          f"{math.prod(sizes[a] for a in names)}, which does not divide")


# Below this many elements a weight stays whole on every device of the fsdp axis: gathering it
# would cost more in latency than the memory is worth.
FSDP_MINIMUM = 2**12


def _decide_leaf(walk: "_Walk", leaf: int, choice: tuple[int | None, str],
                 sizes: dict[str, int]) -> Decision:
    shape, roles = walk.leaves[leaf].shape, walk.roles[leaf]
    dim, reason = choice
    entries: list[Any] = [None] * len(shape)
    if dim is not None:
        entries[dim] = "tensor"
    why = [reason] if reason else []
    stacks = [d for d, names in roles.items() if "stacked" in names]
    for axis, dims, what in (("pipe", stacks, "layers"), ("expert", walk.expert_dims(leaf), "experts")):
        free = [d for d in dims if entries[d] is None]
        if free and shape[free[0]] % sizes[axis] == 0:
            entries[free[0]] = axis
            why += [f"{axis}: it counts {what}"] * (sizes[axis] > 1)
        elif free:
            why.append(f"whole over {axis}: {shape[free[0]]} does not divide by {sizes[axis]}")
    _on_largest(entries, shape, "fsdp", sizes["fsdp"])
    if sizes["fsdp"] > 1:
        why.append("fsdp: its largest dimension left" if "fsdp" in entries else "whole over fsdp: "
                   + (f"fewer than {FSDP_MINIMUM:,} elements" if math.prod(shape) < FSDP_MINIMUM
                      else f"no other dimension divides by {sizes['fsdp']}"))
    matrix = any(names & MATRIX for names in roles.values())
    sides = [tuple(d for d, names in sorted(roles.items()) if side in names and not names & {"stacked", "batch"})
             for side in ("contracted", "free")]
    if any("indexed" in names for names in roles.values()) or set(sides[0]) & set(sides[1]):
        sides = (), ()
    return Decision(P(*entries), "; ".join(why) or "whole: nothing to split it over", matrix, bool(stacks),
                    tuple(sides), tuple(walk.paid.get(leaf, ())))


def _on_largest(entries: list[Any], shape: tuple[int, ...], axis: str, size: int) -> None:
    """Put the axis where the largest dimension left is that it divides, if there is one and the
    weight is worth it."""
    free = [d for d, length in enumerate(shape) if entries[d] is None and length % size == 0]
    if size > 1 and free and math.prod(shape) >= FSDP_MINIMUM:
        entries[max(free, key=lambda d: shape[d])] = axis


@dataclasses.dataclass
class _Value:
    """One value of the computation."""
    ids: list[int]                      # the thread of each dimension
    data: bool = False                  # follows from the function's other arguments
    grad: bool = False                  # follows from parameters: it has a gradient
    source: list[frozenset] = dataclasses.field(default_factory=list)
    #                                     of each dimension: which (leaf, dimension)s it is
    tables: frozenset = frozenset()     # the (leaf, dimension)s whose rows were looked up and added
    mask: bool = False                  # of zeros and ones: a product with it is a lookup
    deep: bool = False                  # follows from a product

    @property
    def weight(self) -> bool:
        """Made from parameters alone."""
        return self.grad and not self.data


# What a weight's dimension can be in its uses. Columns and rows are made of the first two.
MATRIX = {"free", "contracted", "indexed", "placed", "batch", "grouped", "inner"}

ELEMENTWISE = set("""add add_any sub mul div rem max min pow integer_pow neg sign abs floor ceil
round exp exp2 expm1 log log1p log2 sqrt rsqrt cbrt square one_minus_square sin cos tan tanh asin
acos atan atan2 sinh cosh asinh acosh atanh logistic erf erfc erf_inv lgamma digamma polygamma zeta
igamma igammac regularized_incomplete_beta bessel_i0e bessel_i1e is_finite not and or xor eq ne lt
le gt ge nextafter select_n clamp convert_element_type bitcast_convert_type reduce_precision clz
stop_gradient copy real imag complex conj shift_left shift_right_logical shift_right_arithmetic
population_count mulhi sharding_constraint layout_constraint reshard relayout pvary psum pmax pmin
psum_invariant reduced_vary_cast vary_unreduced_cast optimization_barrier name device_put
with_memory_space_constraint zeros_like random_wrap random_unwrap""".split())
REDUCE = set("""reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor
argmax argmin""".split())
# The dimensions that these cut, join, turn, sort or sum along come out anew.
ALONG = set("""slice dynamic_slice dynamic_update_slice pad rev concatenate split tile sort top_k
approx_top_k cumsum cumprod cummax cummin cumlogsumexp fft reduce_window_sum reduce_window_max
reduce_window_min reduce_window""".split())

# Not worth a reduction: a thread this many times narrower than what its columns read (low rank,
# few labels), a table with this many times fewer rows than each is long (token types), and what
# only reads raw features or only makes last outputs, below this share of all weights.
NARROW, SHORT, ENDS = 4, 16, 1 / 8
# What a link carries while one more reduction begins.
LATENCY = 2**18


class _Walk:
    """Follows the dimensions of the parameters through a jaxpr (union-find over dimensions)."""

    def __init__(self, shards: int, leaves: list[Any]):
        self.shards, self.leaves = shards, leaves
        self.parent: list[int] = []
        self.prices: list[tuple[int, int, float, Any]] = []    # thread, count, bytes, counted once as
        self.roles: list[dict[int, set[str]]] = [{} for _ in leaves]
        self.uses: list[tuple[int, int, str]] = []        # leaf, dimension, role, in order
        self.cuts: list[tuple[int, str]] = []             # thread, why it cannot be split
        self.links: list[tuple[int, int, bool]] = []      # threads that a split crosses, resent
        self.heads: list[int] = []                        # threads that pass between activations
        self.sizes: list[tuple[int, int]] = []            # threads in products, and their length
        self.outer: list[tuple[int, int]] = []            # threads split together with outer dims
        self.added: list[frozenset] = []                  # tables whose rows are added up
        self.repeat = 1                                   # how often the present scan body runs
        self.alone = False                                # whether the present operation has one operand
        self.closed = False                               # whether what is drawn are the data
        self.paid: dict[int, list] = {}                   # leaf: the reductions of its thread
        self.weights = [self.value(leaf, grad=True) for leaf in leaves]
        for i, value in enumerate(self.weights):
            value.source = [frozenset([(i, d)]) for d in range(len(value.ids))]

    # -- threads
    def value(self, like: Any, **of: bool) -> _Value:
        """A new value in the shape of `like`, each dimension a thread of its own."""
        rank = len(jnp.shape(like))
        return _Value(self.fresh(rank), source=[frozenset()] * rank, **of)

    def fresh(self, count: int) -> list[int]:
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        return self.parent[first:]

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def tie(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)

    def price(self, thread: int, aval: Any, key: Any = None) -> None:
        """Splitting the thread costs a reduction of this value, in each run of the loops around."""
        size = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)
        self.prices.append((thread, self.repeat, float(size * self.repeat),
                            len(self.prices) if key is None else key))

    def link(self, a: int, b: int, aval: Any, only: bool = True) -> None:
        """A split of `a` becomes one of `b` by sending: slices of a fused weight's output. It has
        no other way on, if `only`."""
        self.links.append((a, b, only))
        for thread in (a, b):
            self.price(thread, aval, ("sent", len(self.prices)))

    def cut(self, thread: int, why: str) -> None:
        self.cuts.append((thread, why))

    def role(self, value: _Value, dims: Sequence[int], role: str) -> None:
        """What becomes of dimensions of a weight, seen through its views."""
        for dim in dims:
            for leaf, d in sorted(value.source[dim]):
                self.roles[leaf].setdefault(d, set()).add(role)
                self.uses.append((leaf, d, role))

    def passes(self, x: _Value, dim: int, o: _Value, out: int) -> None:
        """This dimension of x is that one of o."""
        self.tie(x.ids[dim], o.ids[out])
        self.views(x, dim, o, out)

    def views(self, x: _Value, dim: int, o: _Value, out: int) -> None:
        if o.weight or self.alone:
            o.source[out] = o.source[out] | x.source[dim]

    # -- the walk
    def run(self, jaxpr: Any, consts: list[_Value], args: list[_Value]) -> list[_Value]:
        env: dict[Any, _Value] = {}

        def read(v: Any) -> _Value:
            return self.value(v.aval) if hasattr(v, "val") else env[v]

        env.update(zip(jaxpr.constvars, consts))
        env.update(zip(jaxpr.invars, args))
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.step(eqn, [read(v) for v in eqn.invars])))
        return [read(v) for v in jaxpr.outvars]

    def step(self, eqn: Any, ins: list[_Value]) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self.scan(eqn, ins)
        if name == "while":
            return self.while_loop(params, ins)
        if name == "cond":
            return self.branches(params, ins)
        if name not in REDUCE and (inner := _inner(eqn)) is not None:      # jit, remat, custom_vjp ...
            jaxpr, consts = inner
            return self.run(jaxpr, [self.value(c) for c in consts],
                            ins[len(ins) - len(jaxpr.invars):])

        kind = dict(data=any(x.data for x in ins) or self.closed and name.startswith("random_"),
                    grad=any(x.grad for x in ins), deep=any(x.deep for x in ins))
        outs = [self.value(v.aval, **kind) for v in eqn.outvars]
        out, shape = (outs[0], eqn.outvars[0].aval.shape) if outs else (None, ())
        shapes = [v.aval.shape for v in eqn.invars]
        self.alone = sum(bool(x.ids) for x in ins) == 1
        if len(learned := [x for x in ins if x.grad]) == 1 and outs:
            out.tables = learned[0].tables          # cast, turned, scaled: still that lookup
        if name in ELEMENTWISE:
            for o in outs:
                for x in ins:
                    if len(x.ids) == len(o.ids):
                        for d in range(len(x.ids)):
                            self.passes(x, d, o, d)
            if name in ("add", "add_any", "sub"):
                out.tables = frozenset().union(*[x.tables for x in ins])
                self.added.append(out.tables)
            for x in ins:       # a weight with its gradient (in an inner loop of learning), a mask
                if x.weight and not out.weight and len(x.ids) == len(out.ids) > 1 and math.prod(
                        shape) == max([self.size(w) for s in x.source for w, _ in s], default=0):
                    out.source = x.source
            if name == "convert_element_type":
                out.mask = ins[0].mask or eqn.invars[0].aval.dtype == bool
        elif name in ("dot_general", "ragged_dot_general"):
            self.dot(eqn, ins, out)
        elif name == "conv_general_dilated":
            self.conv(eqn, ins, out)
        elif name in REDUCE:
            axes = params["axes"] if "axes" in params else params["dimensions"]
            for o in outs:
                for k, d in enumerate(d for d in range(len(shapes[0])) if d not in axes):
                    self.passes(ins[0], d, o, k)
            for d in axes:
                self.price(ins[0].ids[d], eqn.outvars[0].aval)
        elif name == "broadcast_in_dim":
            for d, o in enumerate(params["broadcast_dimensions"]):
                if shapes[0][d] == shape[o]:
                    self.passes(ins[0], d, out, o)
        elif name == "transpose":
            for o, d in enumerate(params["permutation"]):
                self.passes(ins[0], d, out, o)
        elif name == "squeeze":
            gone = [d % len(shapes[0]) for d in params["dimensions"]]
            for o, d in enumerate(d for d in range(len(shapes[0])) if d not in gone):
                self.passes(ins[0], d, out, o)
        elif name in ("stack", "unstack"):
            one, many = (outs, ins) if name == "stack" else (ins, outs)
            kept = [d for d in range(len(one[0].ids)) if d != params["axis"]]
            for x in many:
                for d, k in enumerate(kept):
                    self.passes(*((x, d, out, k) if name == "stack" else (ins[0], k, x, d)))
        elif name == "reshape":
            self.reshape(eqn, ins[0], out)
        elif name == "gather":
            self.gather(eqn, ins, out)
        elif name.startswith("scatter"):
            self.scatter(eqn, ins, out)
        elif name in ALONG:
            self.along(eqn, ins, outs)
        else:
            # An honest stop: nothing is known, so whatever has weights in it comes in whole.
            for x in ins:
                for i in x.ids if x.grad else ():
                    self.cut(i, f"it meets {name}, of which the walk knows nothing")
        return outs

    def along(self, eqn: Any, ins: list[_Value], outs: list[_Value]) -> None:
        params = eqn.params
        mixed = {params.get("dimension"), params.get("axis")} | set(
            params.get("dimensions", ()) if eqn.primitive.name == "rev" else ())
        mixed |= {d for d, n in enumerate(params.get("window_dimensions", ())) if n > 1}
        mixed |= {len(ins[0].ids) - 1 - k for k in range(len(params.get("fft_lengths", ())))}
        for o, v in zip(outs, eqn.outvars):
            for x, var in zip(ins, eqn.invars):
                if len(x.ids) != len(o.ids):
                    continue
                for d, (a, b) in enumerate(zip(var.aval.shape, v.aval.shape)):
                    if a == b and d not in mixed:
                        self.tie(x.ids[d], o.ids[d])
                        if eqn.primitive.name == "dynamic_slice":
                            self.role(x, [d], "entry")
                    elif eqn.primitive.name == "dynamic_slice" and b == 1:
                        self.row(x, d, ins[1 + d], v.aval, o)
                        continue
                    elif a > 1:
                        self.link(x.ids[d], o.ids[d], v.aval)
                    self.views(x, d, o, d)

    def dot(self, eqn: Any, ins: list[_Value], out: _Value) -> None:
        left, right = ins[:2]
        numbers = eqn.params.get("dimension_numbers")
        if numbers is None:             # ragged: rows sorted by expert, and how many each has
            ragged = eqn.params["ragged_dot_dimension_numbers"]
            numbers = ragged.dot_dimension_numbers
            groups = list(ragged.rhs_group_dimensions)
            self.role(right, groups, "inner" if left.weight else "batch")
            for d in groups:
                self.cut(right.ids[d], "it counts groups of rows")
            for d in ragged.lhs_ragged_dimensions:
                if d in numbers[0][0]:      # rows summed by group: a gradient, not a layer
                    self.cut(left.ids[d], "it is summed in groups of rows")
        else:
            groups = []
        (lc, rc), (lb, rb) = numbers
        lfree = [d for d in range(len(left.ids)) if d not in (*lc, *lb)]
        rfree = [d for d in range(len(right.ids)) if d not in (*rc, *rb, *groups)]
        for o, (x, d) in enumerate([(left, d) for d in (*lb, *lfree)]
                                   + [(right, d) for d in rfree]):
            if o < len(out.ids):
                self.passes(x, d, out, o)
        for a, b in zip(lb, rb):
            self.passes(right, b, out, lb.index(a))
        self.product(eqn, out, (left, lc, lb, lfree), (right, rc, rb, rfree))

    def conv(self, eqn: Any, ins: list[_Value], out: _Value) -> None:
        numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
        image, kernel = ins
        (batch, feature, *space), (made, read, *_) = numbers.lhs_spec, numbers.rhs_spec
        self.passes(image, batch, out, numbers.out_spec[0])
        self.passes(kernel, made, out, numbers.out_spec[1])
        for i in [image.ids[d] for d in space]:
            self.cut(i, "a convolution slides along it")
        if groups == 1 and eqn.params["batch_group_count"] == 1:
            self.product(eqn, out, (image, [feature], [], [batch]), (kernel, [read], [], [made]))
        elif groups % self.shards == 0 and groups > 1:     # whole groups stay together
            self.tie(image.ids[feature], kernel.ids[made])
            self.role(kernel, [made], "grouped")
        else:
            for i in (image.ids[feature], kernel.ids[made]):
                self.cut(i, f"a convolution in {groups} groups mixes it")

    def product(self, eqn: Any, out: _Value, *sides: tuple) -> None:
        """Two values, each with its contracted, batch and free dimensions."""
        (left, lc, lb, lfree), (right, rc, rb, rfree) = sides
        for a, b in zip((*lc, *lb), (*rc, *rb)):
            self.tie(left.ids[a], right.ids[b])
        for d in lc:        # split and summed over: each device has a partial sum of the product
            self.price(left.ids[d], eqn.outvars[0].aval)
        for var, (this, *_) in zip(eqn.invars, sides):
            self.sizes += zip(this.ids, var.aval.shape)
        changed = not (left.weight or right.weight) and any(left.source + right.source)
        if (left.grad and right.grad and left.deep and right.deep and (lfree or rfree)
                and (lb or left.data and right.data) and not changed):
            # Attention. Scores are not left as partial sums: whole heads pass, nothing else.
            self.heads += [left.ids[d] for d in lb]
            for d in lc:
                self.cut(left.ids[d], "a split would fall inside a head")
            weights = ()
        else:
            weights = self.weights_of(left, right)
        for i, (this, contracted, batch, free) in enumerate(sides):
            other, *_, other_free = sides[1 - i]
            if i in weights:
                self.role(this, contracted, "indexed" if other.mask else "contracted")
                self.role(this, batch, "batch")
                self.role(this, free, "free")
            else:
                self.role(this, range(len(this.ids)), "inner")
                # Its gradient sums over the other side's own dimensions. The sides that share
                # an input (q, k and v; gate and up) share its reduction: counted once.
                for d in other_free if this.grad else ():
                    self.price(other.ids[d], eqn.invars[i].aval, ("gradient", *this.ids))
        out.deep = True

    def weights_of(self, left: _Value, right: _Value) -> tuple[int, ...]:
        """Which of the two sides of a product is the weight: what follows from parameters alone,
        or else is a parameter that was changed (by its gradient, in an inner loop of learning).
        Of two weights the one that was in a product, or has more dimensions, or is on the left, is
        the activation (learned queries; a low rank's first factor)."""
        if left.weight and right.weight:
            return (0,) if (right.deep, len(right.ids)) > (left.deep, len(left.ids)) else (1,)
        for test in (lambda x: x.weight, lambda x: any(x.source)):
            found = tuple(i for i, x in enumerate((left, right)) if test(x))
            if len(found) == 1:
                return found
        return ()

    def gather(self, eqn: Any, ins: list[_Value], out: _Value) -> None:
        """A lookup. Rows that are split: each device finds what it has, and one reduction adds
        the findings. What is copied whole passes through; batching dimensions stay."""
        table, index = ins[0], ins[1]
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        shape = eqn.invars[0].aval.shape
        gone = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
        window = [d for d in range(len(shape)) if d not in gone]
        rows = {d for d in numbers.start_index_map if sizes[d] == 1 < shape[d]}
        for o, d in zip(numbers.offset_dims, window):
            if sizes[d] == shape[d]:
                self.passes(table, d, out, o)
                self.role(table, [d], "entry")
                if table.weight and sum(sizes[w] > 1 for w in window) > 1:
                    out.source[o] = table.source[d]         # whole matrices are taken: weights
            elif d not in rows:
                self.link(table.ids[d], out.ids[o], eqn.outvars[0].aval)
        batch = [o for o in range(len(out.ids)) if o not in numbers.offset_dims]
        for o, i in zip(batch, index.ids):
            self.tie(out.ids[o], i)
        for a, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims):
            self.tie(table.ids[a], index.ids[b])
        for d in rows | set(numbers.collapsed_slice_dims):
            self.row(table, d, index, eqn.outvars[0].aval, out)

    def row(self, table: _Value, dim: int, index: _Value, aval: Any, out: _Value) -> None:
        """Of this dimension one entry is taken: one that the data ask for, or the same each time
        (positions, the layers of a stack)."""
        self.role(table, [dim], "indexed" if index.data else "placed")
        self.price(table.ids[dim], aval)
        if index.data:
            out.tables = out.tables | table.source[dim]

    def scatter(self, eqn: Any, ins: list[_Value], out: _Value) -> None:
        """Rows written into a value: the others pass."""
        numbers, (shape, _, update) = (eqn.params["dimension_numbers"],
                                       [v.aval.shape for v in eqn.invars[:3]])
        hit = set(numbers.scatter_dims_to_operand_dims)
        for d in range(len(shape)):
            if d in hit:
                self.link(ins[0].ids[d], out.ids[d], eqn.outvars[0].aval)
            else:
                self.tie(ins[0].ids[d], out.ids[d])
        gone = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
        window = [d for d in range(len(shape)) if d not in gone]
        for u, d in zip(numbers.update_window_dims, window):
            if update[u] == shape[d]:
                self.tie(ins[2].ids[u], out.ids[d])

    def reshape(self, eqn: Any, x: _Value, out: _Value) -> None:
        """A split survives where it falls on whole units of the outermost dimension (whole
        heads), or on those of the next one, where the outermost has fewer than there are shards
        but divides them (2 groups of 4 query heads over 4 shards)."""
        a, b = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if 0 in a:          # nothing to split
            return
        i = j = 0
        while i < len(a) and j < len(b):
            i0, j0, p, q = i, j, a[i], b[j]
            i, j = i + 1, j + 1
            while p != q:
                if p < q:
                    p, i = p * a[i], i + 1
                else:
                    q, j = q * b[j], j + 1
            olds = [d for d in range(i0, i) if a[d] > 1]
            news = [d for d in range(j0, j) if b[d] > 1]
            if not olds:
                continue
            m, k = self.carrier(a, olds), self.carrier(b, news)
            self.tie(x.ids[m], out.ids[k])
            self.outer += [(out.ids[k], math.prod(b[j0:k])), (x.ids[m], math.prod(a[i0:m]))]
            for d in olds:
                for e in news:
                    self.views(x, d, out, e)
                if d > m and x.weight:
                    self.link(x.ids[d], out.ids[k], eqn.outvars[0].aval)
                elif d > m:
                    self.cut(x.ids[d], "a split would fall inside a head")
            for d in news:
                if d > k:
                    self.link(x.ids[m], out.ids[d], eqn.outvars[0].aval, only=False)

    def carrier(self, shape: tuple[int, ...], group: list[int]) -> int:
        """Which of the dimensions that are merged or divided bears a split of them all."""
        left = self.shards
        for d in group:
            if shape[d] % left == 0:
                return d
            if left % shape[d]:
                break
            left //= shape[d]
        return group[0]

    def scan(self, eqn: Any, ins: list[_Value]) -> list[_Value]:
        body, consts, length = eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, eqn.params["length"]
        nc, nk, nx = _parts_of_scan(eqn)
        for x in ins[nc + nk:]:
            self.role(x, [0], "stacked")
        inner = ins[:nc + nk] + [dataclasses.replace(x, ids=x.ids[1:], source=x.source[1:])
                                 for x in ins[nc + nk:]]
        self.repeat *= length
        outs = self.loop(body, consts, inner[:nc], inner[nc:nc + nk], inner[nc + nk:])
        self.repeat //= length
        return outs[:nk] + [dataclasses.replace(o, ids=self.fresh(1) + o.ids,
                                                source=[frozenset(), *o.source])
                            for o in outs[nk:]]

    def loop(self, body: Any, consts: Any, fixed: list[_Value], carry: list[_Value],
             each: Sequence[_Value] = ()) -> list[_Value]:
        """The body once, and what it carries tied to what it was given. What is carried follows
        from all that the body sees."""
        seen = [*fixed, *carry, *each]
        data, grad = any(x.data for x in seen), any(x.grad for x in seen)
        moved = [dataclasses.replace(x, tables=frozenset(), data=data, grad=grad, deep=grad)
                 for x in carry]
        outs = self.run(body, [self.value(c) for c in consts], [*fixed, *moved, *each])
        for x, o in zip(carry, outs):
            for a, b in zip(x.ids, o.ids):
                self.tie(a, b)
        return outs

    def while_loop(self, params: dict[str, Any], ins: list[_Value]) -> list[_Value]:
        n, m = params["cond_nconsts"], params["body_nconsts"]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        self.run(test.jaxpr, [self.value(c) for c in test.consts], ins[:n] + ins[n + m:])
        return self.loop(body.jaxpr, body.consts, ins[n:n + m], ins[n + m:])

    def branches(self, params: dict[str, Any], ins: list[_Value]) -> list[_Value]:
        every = [self.run(b.jaxpr, [self.value(c) for c in b.consts], ins[1:])
                 for b in params["branches"]]
        outs = []
        for values in zip(*every):
            out = dataclasses.replace(values[0], source=[frozenset()] * len(values[0].ids),
                                      data=any(x.data for x in (ins[0], *values)),
                                      grad=any(x.grad for x in values))
            for x in values:
                for d in range(len(x.ids)):
                    self.passes(x, d, out, d)
            outs.append(out)
        return outs

    # -- the choice
    def choose(self) -> list[tuple[int | None, str]]:
        """For each leaf the dimension to split over `tensor`, if any, and why."""
        self.settle()
        if self.shards == 1:
            return [(None, "")] * len(self.leaves)
        cost: dict[int, dict[Any, tuple[int, float]]] = {}
        for thread, count, size, key in self.prices:
            cost.setdefault(self.find(thread), {})[key] = count, size
        ranked, refused = [], {}
        for thread, places in self.places.items():
            if why := self.refuse(thread, places):
                refused[thread] = why
                continue
            weight = sum(self.size(leaf) for leaf, _ in places)
            when = min((self.first.get(leaf, len(self.uses)), d) for leaf, d in places)
            price = sum(size + LATENCY * n for n, size in cost.get(thread, {}).values())
            ranked.append((price / weight, -weight, when, thread))
        chosen: dict[int, tuple[int | None, str]] = {}
        for thread in self.arriving(self.independent(sorted(ranked)), refused):
            for leaf, d in self.places[thread]:
                chosen[leaf] = (d, self.why(leaf, d))
            self.paid[self.places[thread][0][0]] = [
                paid for key, paid in cost.get(thread, {}).items()
                if not (isinstance(key, tuple) and key[0] == "sent")]
        return [chosen.get(i) or (None, self.why_whole(i, refused)) for i in range(len(self.leaves))]

    def independent(self, ranked: list[tuple]) -> set[int]:
        """Threads of which no two share a weight: the cheapest first; then one of about the same
        price takes the place of those that it excludes where it splits a quarter more."""
        threads = {thread: (ratio, -less) for ratio, less, _, thread in ranked}
        owner: dict[int, int] = {}
        for again in (False, True, True):
            for thread, (ratio, weight) in threads.items():
                out = {owner[leaf] for leaf, _ in self.places[thread] if leaf in owner} - {thread}
                lost = sum(threads[t][1] for t in out)
                paid = sum(threads[t][0] * threads[t][1] for t in out)
                if not out or again and weight > 1.25 * lost and ratio * lost <= 1.25 * paid:
                    owner = {leaf: t for leaf, t in owner.items() if t not in out}
                    owner.update(dict.fromkeys((leaf for leaf, _ in self.places[thread]), thread))
        return set(owner.values())

    def arriving(self, threads: set[int], refused: dict[int, str]) -> set[int]:
        """Without those that are only sliced into what weights read whole: the slices of a fused
        query, key and value stay split, by heads, those of a modulation would be gathered."""
        while True:
            reach = set(threads)
            while new := {a for a, bs in self.onward.items() if bs & reach} - reach:
                reach |= new
            lost = {t for t in threads if t in self.onward and not self.onward[t] & reach
                    and self.onward[t] & self.places.keys()}
            if not lost:
                return threads
            refused.update(dict.fromkeys(lost, "its slices would be gathered again"))
            threads = threads - lost

    def settle(self) -> None:
        """What is known only after the whole walk."""
        n = range(len(self.leaves))
        self.places: dict[int, list[tuple[int, int]]] = {}
        for leaf in n:
            for d, i in enumerate(self.weights[leaf].ids):
                if "stacked" not in self.roles[leaf].get(d, ()):
                    self.places.setdefault(self.find(i), []).append((leaf, d))
        having = lambda *roles: {self.at(leaf, d) for leaf in n      # noqa: E731
                                 for d, names in self.roles[leaf].items() if names & set(roles)}
        self.read = having("contracted")
        # Experts: matched one to one with a dimension of what they meet, never contracted (heads
        # that meet a weight of their own are, by the output's).
        self.experts = having("batch") - self.read
        # A row needs a column before it: what a weight reads before any has made it is whole.
        self.first: dict[int, int] = {}
        made: dict[int, bool] = {}
        for when, (leaf, d, role) in enumerate(self.uses):
            self.first.setdefault(leaf, when)
            if role in ("free", "indexed", "batch", "grouped", "contracted"):
                made.setdefault(self.at(leaf, d), role != "contracted")
        self.made = {thread for thread, first in made.items() if first}
        self.raw = having("contracted") - having("free", "batch", "grouped", "entry", "inner")
        links = [(self.find(a), self.find(b), only) for a, b, only in self.links]
        while new := {b for a, b, _ in links if a in self.made} - self.made:
            self.made |= new
        # Inside a head: of the dimensions that a weight has beside its heads, the last.
        heads = {self.find(i) for i in self.heads}
        for leaf in n:
            for role in ("free", "contracted"):
                dims = [d for d, names in sorted(self.roles[leaf].items()) if role in names]
                rest = [d for d in dims if self.at(leaf, d) not in heads]
                if rest and any(self.leaves[leaf].shape[d] > 1 for d in set(dims) - set(rest)):
                    self.cut(self.weights[leaf].ids[rest[-1]], "a split would fall inside a head")
        # Of tables whose rows are added up one is split: the one that is an output too, or else
        # the largest. A second would be a second reduction, for positions.
        groups: list[set] = []
        for tables in self.added:
            hit = [g for g in groups if g & tables]
            groups = [g for g in groups if not g & tables] + [set(tables).union(*hit)]
        for group in groups:
            best = max(group, key=lambda t: ("free" in self.roles[t[0]][t[1]],
                                             self.leaves[t[0]].shape[t[1]], -self.first[t[0]], t[1]),
                       default=None)
            for leaf, d in group - {best}:
                self.cut(self.weights[leaf].ids[d], "its rows are added to those of a larger "
                                                    "table, whose reduction would be one more")
        self.why_cut: dict[int, str] = {}
        outer: dict[int, set[int]] = {}
        for thread, count in self.outer:
            outer.setdefault(self.find(thread), {1}).add(count)
        for thread, size in self.sizes:
            if all(k * size % self.shards for k in outer.get(self.find(thread), {1})):
                self.cut(thread, f"{size} does not divide by {self.shards}")
        for thread, why in self.cuts:
            self.why_cut.setdefault(self.find(thread), why)
        # What is sent on only to where it cannot stay split is not split either.
        self.onward: dict[int, set[int]] = {}
        for a, b, only in links:
            if only:
                self.onward.setdefault(a, set()).add(b)
        while new := {a: self.why_cut[min(bs)] for a, bs in self.onward.items()
                      if a not in self.why_cut and bs <= self.why_cut.keys()}:
            self.why_cut |= new
        # Threads of the same form (one a layer, say) count together.
        self.alike: dict[Any, int] = {}
        for places in self.places.values():
            form = self.form(places)
            self.alike[form] = self.alike.get(form, 0) + sum(self.size(leaf) for leaf, _ in places)
        self.total = sum(map(self.size, n))

    def size(self, leaf: int) -> int:
        return math.prod(self.leaves[leaf].shape)

    def form(self, places: list[tuple[int, int]]) -> Any:
        return tuple(sorted((self.leaves[leaf].shape, d) for leaf, d in places))

    def dims(self, leaf: int, role: str) -> list[int]:
        return [d for d, names in self.roles[leaf].items() if role in names
                and "stacked" not in names]

    def refuse(self, thread: int, places: list[tuple[int, int]]) -> str:
        """Why a thread is not split, whatever its price; or nothing."""
        if thread not in self.made or not any(self.roles[leaf].get(d) for leaf, d in places):
            return "it reads what comes in whole"
        if thread in self.experts:
            return "it counts experts, whose place is the expert axis"
        for leaf, d in places:
            if self.leaves[leaf].shape[d] % self.shards:
                return f"{self.leaves[leaf].shape[d]} does not divide by {self.shards}"
        if thread in self.why_cut:
            return self.why_cut[thread]
        if len({leaf for leaf, _ in places}) < len(places):
            return "it is two dimensions of one weight"
        columns = [leaf for leaf, d in places if "free" in self.roles[leaf].get(d, ())]
        rows = [leaf for leaf, d in places if "contracted" in self.roles[leaf].get(d, ())]
        tables = [(leaf, d) for leaf, d in places if "indexed" in self.roles[leaf].get(d, ())]
        wide = lambda leaf, role: math.prod(                                             # noqa: E731
            [self.leaves[leaf].shape[d] for d in self.dims(leaf, role)])
        if columns and all(NARROW * wide(w, "free") <= wide(w, "contracted") for w in columns) and all(
                NARROW * wide(w, "contracted") <= wide(w, "free") for w in rows):
            return f"{wide(columns[0], 'free')} is too narrow to be worth a reduction"
        if tables and not columns and all(
                SHORT * self.leaves[w].shape[d] <= self.size(w) // self.leaves[w].shape[d]
                for w, d in tables):
            return f"{self.leaves[tables[0][0]].shape[tables[0][1]]} rows are not worth a reduction"
        small = self.alike[self.form(places)] < ENDS * self.total
        raw = columns and not tables and all(
            self.at(w, d) in self.raw for w in columns for d in self.dims(w, "contracted"))
        last = rows and not tables and all(
            self.at(w, d) not in self.read for w in rows for d in self.dims(w, "free"))
        if small and (raw or last):
            return "a small part of the model at its " + ("input" if raw else "output")
        return ""

    def at(self, leaf: int, dim: int) -> int:
        return self.find(self.weights[leaf].ids[dim])

    def expert_dims(self, leaf: int) -> list[int]:
        """The dimensions that count experts, of a leaf that has others: a router has not."""
        mine = [d for d in range(len(self.leaves[leaf].shape)) if self.at(leaf, d) in self.experts]
        others = [d for d in range(len(self.leaves[leaf].shape))
                  if d not in mine and not self.roles[leaf].get(d, set()) & {"contracted", "stacked"}]
        return [d for d in mine if others or "batch" in self.roles[leaf].get(d, ())]

    def why(self, leaf: int, dim: int) -> str:
        roles = self.roles[leaf].get(dim, set())
        if "indexed" in roles:
            return "table: looked up by row" + (", and used again as a product's columns"
                                                if "free" in roles else "")
        if "contracted" in roles:
            return "row: meets an activation split the same way; its sum is one reduction"
        if "free" in roles:
            return "column: meets a whole activation"
        return "follows the split activation it meets"

    def why_whole(self, leaf: int, refused: dict[int, str]) -> str:
        for role in ("indexed", "free", "grouped", "contracted"):
            for d, names in sorted(self.roles[leaf].items()):
                if role in names and "stacked" not in names and self.at(leaf, d) in refused:
                    return "whole: " + refused[self.at(leaf, d)]
        roles = set().union(*self.roles[leaf].values()) & MATRIX
        if not roles:
            return "whole: it scales, or is added to, what is whole"
        return "whole: " + ("its rows are the same ones each time" if roles == {"placed"} else
                            "it meets weights alone" if roles == {"inner"} else
                            "it reads and writes what is whole between the layers")


def _parts_of_scan(eqn: Any) -> tuple[int, int, int]:
    """How many constants, carried values and scanned-over ones it has. What is carried looks the same inside and out;
    what is scanned over has one dimension more outside. (The numbers of each have other names in every version of jax.)"""
    body = eqn.params["jaxpr"].jaxpr
    carried = sum(o.aval.shape == i.aval.shape for o, i in zip(eqn.outvars, body.outvars))
    scanned = sum(len(o.aval.shape) > len(i.aval.shape) for o, i in zip(eqn.invars, body.invars))
    return len(eqn.invars) - carried - scanned, carried, scanned


def _inner(eqn: Any) -> Any:
    """The jaxpr that an operation carries, and its constants: of one that calls it with the last
    of its operands (jit, remat, custom_vjp, shard_map, and what future versions add)."""
    rank = lambda vs: [len(v.aval.shape) for v in vs]       # noqa: E731
    for inner in eqn.params.values():
        jaxpr = getattr(inner, "jaxpr", inner)
        if (hasattr(jaxpr, "eqns") and rank(jaxpr.outvars) == rank(eqn.outvars)
                and rank(jaxpr.invars) == rank(eqn.invars)[len(eqn.invars) - len(jaxpr.invars):]):
            return jaxpr, getattr(inner, "consts", ())
    return None


def explain(decisions: Any, params: Any, mesh: Any, zero: bool = False) -> str:
    """The table of what is split where, and why, for a person: of what `decide` gives, or (then
    without reasons) infer_specs. Ends with what a device holds (of moments, with `zero`, its part over
    data), and what of it is copies."""
    paths, leaves, _ = flatten(params)
    sizes = {a: 1 for a in AXES} | dict(mesh.shape)
    table, total, moments = [("weight", "shape", "split", "per device", "why")], 0, 0
    copies: dict[str, dict[str, list[int]]] = {a: {} for a in ("tensor", "fsdp", "pipe") if sizes[a] > 1}
    for path, leaf, d in zip(paths, leaves, jax.tree.leaves(decisions, is_leaf=_is_spec)):
        if not hasattr(leaf, "shape"):
            continue
        d = Decision(d, "as given", True, False) if _is_spec(d) else d
        size, split = math.prod(leaf.shape) * leaf.dtype.itemsize, _axes_in(d.spec)
        here = size // math.prod(sizes[a] for a in split)
        total += here
        moments += 2 * size // math.prod(sizes[a] for a in _axes_in(
            over_data(leaf, d.spec, mesh) if zero else d.spec))
        for axis in copies.keys() - split:
            why = next((w for w in d.reason.split("; ") if w.startswith(f"whole over {axis}")), {
                "pipe": "no layer's own", "tensor": d.reason.split("; ")[0]}.get(axis, d.reason))
            copies[axis].setdefault(re.sub("^whole(.*?): ", "", why), []).append(here)
        shown = ["+".join(_names(e)) or "-" for e in d.spec]
        shown += ["-"] * (len(leaf.shape) - len(shown))
        table.append((path, str(list(leaf.shape)).replace(" ", ""), "[" + ",".join(shown) + "]",
                      human(here), d.reason))
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    lines = ["  ".join([*(c.rjust(w) if i == 3 else c.ljust(w)
                          for i, (c, w) in enumerate(zip(row, widths))), row[4]]).rstrip()
             for row in table]
    lines.append(f"a device holds {human(total)} of weights, {human(total)} of gradients and "
                 f"{human(moments)} of AdamW's two moments: {human(2 * total + moments)}")
    for axis, reasons in copies.items():
        held = sum(map(sum, reasons.values()))
        if held:
            lines.append(f"of the weights {human(held)} ({held / total:.2%}) are the same on all "
                         f"{sizes[axis]} devices of {axis}:")
        for why, sizes_held in sorted(reasons.items(), key=lambda r: -sum(r[1])):
            lines.append(f"{human(sum(sizes_held)):>9} in {len(sizes_held)}: {why}")
    return "\n".join(lines)


def predict(decisions: Any, params: Any, mesh: Any, itemsize: int = 4, parts: int = 1,
            zero: bool = False, turns: float = 1, gathered: int = 1, sum_size: int = 0) -> list["Collective"]:
    """What an update must send by the formula, in the rows of `collectives`: the reductions that
    the rule counted (of each value once, whoever shares it), each weight of fsdp gathered and its
    gradient scattered in each of the micro-batches (those of layers in each of `turns` in a pipeline,
    and gathered again for the backward pass), in numbers of `sum_size` bytes, and the sum of the gradients."""
    sizes = {a: 1 for a in AXES} | dict(mesh.shape)
    n, found = sizes["tensor"], {}

    def add(kind, axes, count, size):
        axis = "+".join(a for a in axes if sizes[a] > 1)
        if axis:
            total = found.setdefault((kind, axis), [0, 0.0])
            total[0], total[1] = total[0] + count, total[1] + size

    def scatter(axis, count, size):
        kind, stages = scattering(sizes[axis], mesh)
        add(kind, [axis], count * stages, size)

    specs = jax.tree.map(lambda d: d.spec, decisions)
    kept = over_data(params, specs, mesh) if zero else specs        # the optimizer's state
    for leaf, d, part in zip(*[jax.tree.leaves(t, is_leaf=_is_spec) for t in (params, decisions, kept)]):
        for count, size in d.reductions:
            add("all-reduce", ["tensor"], parts * count, parts * size * 2 * (n - 1) / n)
        split, used = _axes_in(d.spec), _axes_in(d.spec if d.used is None else d.used)
        local, summed_size = math.prod(leaf.shape) / math.prod([sizes[a] for a in used - {"fsdp"}]), sum_size or itemsize
        if "fsdp" in used:
            f, layers = sizes["fsdp"], leaf.shape[0] // sizes["pipe"] if d.stacked else 1
            size = local * (f - 1) / f
            again = parts * turns if d.stacked else parts
            gathers = again * gathered if d.stacked else 1  # what no layer owns, once for all parts
            add("all-gather", ["fsdp"], gathers * layers, gathers * size * itemsize)
            scatter("fsdp", again * layers, again * size * summed_size)
            local /= f
        # What an override has put elsewhere than the loss uses it: gathered once for all parts.
        local = math.prod(leaf.shape) / math.prod([sizes[a] for a in split])
        lies, uses = ([*s, *[None] * (len(leaf.shape) - len(s))] for s in (d.spec, d.spec if d.used is None else d.used))
        whole = local
        for axis in [a for a, u in zip(lies, uses) if a and a != u]:
            whole *= sizes[axis]
            size = whole * (sizes[axis] - 1) / sizes[axis]
            add("all-gather", [axis], 1, size * itemsize)
            if axis != "tensor":        # (whose devices have equal gradients then)
                scatter(axis, parts, parts * size * (itemsize if axis == "expert" else summed_size))
        summed = [a for a in MANUAL if a not in split]
        if "data" in summed and "data" in part:     # the update is scattered, and the weights gathered again
            summed.remove("data")
            g = sizes["data"]
            scatter("data", 1, 4 * local * (g - 1) / g)
            add("all-gather", ["data"], 1, 4 * local * (g - 1) / g)
            local /= g
        g = math.prod(sizes[a] for a in summed)
        add("all-reduce", summed, 0, 4 * local * 2 * (g - 1) / g)
    return [Collective(kind, axis, round(n) or 1, round(b)) for (kind, axis), (n, b) in sorted(found.items())]


def human(size: float) -> str:
    """Bytes for a person: 1.5 kB, 12 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            break
        size /= 1000
    else:
        unit = "TB"
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def state_specs(optimizer: Any, params: Any, specs: Any) -> Any:
    """Specs for an optax optimizer's state. The same walk, through its update: a dimension of the
    state that is tied to one of a weight's gradient is split with it (a moment's, and the rows of a
    factored one); what is tied to none, or to several that differ, is whole."""
    state, walk = jax.eval_shape(optimizer.init, params), _Walk(1, [])
    closed = jax.make_jaxpr(lambda s, g: optimizer.update(g, s, g))(state, params)
    values = [walk.value(v.aval) for v in closed.jaxpr.invars]
    walk.run(closed.jaxpr, [walk.value(c) for c in closed.consts], values)
    leaves, tree = jax.tree.flatten(state)
    home: dict[int, set] = {}
    for value, spec in zip(values[len(leaves):], jax.tree.leaves(specs, is_leaf=_is_spec)):
        for i, entry in zip(value.ids, [*spec, *[None] * len(value.ids)]):
            home.setdefault(walk.find(i), set()).add(entry)

    def place(value):
        entries: list[Any] = []
        for i in value.ids:
            known = home.get(walk.find(i), set())
            entry = next(iter(known)) if len(known) == 1 else None
            entries.append(None if entry in entries else entry)
        return _trimmed(entries)

    return jax.tree.unflatten(tree, [place(v) for v in values[:len(leaves)]])


# -------------------------------------------------------------------------------------------
# 3. What a model calls. Outside a mesh each of these is the plain computation, so a model runs
#    the same with and without one. The mesh is jax's own ambient one: nothing is passed around.

def _ambient() -> tuple[dict[str, int], set[str]]:
    """Sizes of the ambient mesh's axes, and those that are manual where we are."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict(mesh.shape), set(mesh.manual_axes)


DIFFERENTIATED = "differentiated"


def _seam(x: jax.Array, name: str) -> jax.Array:
    """x with a name, for `seams` to see; with another one where a gradient is taken through it. Nothing
    inside a shard_map: what a loss calls is looked at before."""
    return x if _ambient()[1] else _named(x, name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _named(x: jax.Array, name: str) -> jax.Array:
    return checkpoint_name(x, name)


@_named.defjvp
def _named_jvp(name: str, primals: tuple, tangents: tuple) -> tuple:
    return checkpoint_name(primals[0], DIFFERENTIATED), tangents[0]


def seams(fn: Callable, *args: Any) -> set[str]:
    """The names of the seams below that a function goes through: their results carry them. Among them is
    DIFFERENTIATED if the function takes a gradient through one of them, within itself."""
    return {eqn.params["name"] for eqn in _equations(jax.make_jaxpr(fn)(*args).jaxpr) if eqn.primitive.name == "name"}


def computes_in_16_bits(fn: Callable, *args: Any) -> bool:
    """Whether a function has floats of fewer than 32 bits anywhere, whatever it is given."""
    kinds = {v.aval.dtype for eqn in _equations(jax.make_jaxpr(fn)(*args).jaxpr) for v in eqn.outvars
             if hasattr(v.aval, "dtype")}
    return any(jnp.issubdtype(kind, jnp.floating) and kind.itemsize < 4 for kind in kinds)


def needs_no_tensor(fn: Callable, params: Any, batch: Any) -> str:
    """Why no compiler may split fn over tensor, or nothing: branches and loops that some rows take and others do not
    (an exchange in them waits for ever for devices that do not come), and calls out of the program."""
    closed, why = jax.make_jaxpr(fn)(params, batch), ""

    def run(jaxpr, data):
        """For each result whether it follows from the batch."""
        nonlocal why
        env = dict(zip(jaxpr.invars, data))
        for eqn in jaxpr.eqns:
            ins, name, more = [not hasattr(v, "val") and env.get(v, False) for v in eqn.invars], eqn.primitive.name, eqn.params
            if name == "cond":
                why = "branches follow from the data" if ins[0] else why
                outs = [ins[0] or any(each) for each in zip(*[run(b.jaxpr, ins[1:]) for b in more["branches"]])]
            elif name == "while":
                n, m = more["cond_nconsts"], more["body_nconsts"]
                outs = until_same(lambda carry: run(more["body_jaxpr"].jaxpr, ins[n:n + m] + carry), ins[n + m:])
                why = "the length of a loop follows from the data" if run(more["cond_jaxpr"].jaxpr, ins[:n] + outs)[0] else why
            elif name == "scan":
                consts, carried, _ = _parts_of_scan(eqn)
                first, each, body = ins[:consts], ins[consts + carried:], more["jaxpr"].jaxpr
                carry = until_same(lambda carry: run(body, first + carry + each)[:carried], ins[consts:consts + carried])
                outs = carry + run(body, first + carry + each)[carried:]
            elif name not in REDUCE and (inner := _inner(eqn)) is not None:
                outs = run(inner[0], ins[len(ins) - len(inner[0].invars):])
            else:
                why = "the program calls Python" if "callback" in name or name == "debug_print" else why
                outs = [any(ins)] * len(eqn.outvars)
            env.update(zip(eqn.outvars, outs))
        return [not hasattr(v, "val") and env.get(v, False) for v in jaxpr.outvars]

    def until_same(body, carry):
        while (new := [a or b for a, b in zip(carry, body(carry))]) != carry:
            carry = new
        return carry

    given = len(jax.tree.leaves(params))
    run(closed.jaxpr, [i >= given for i in range(len(closed.jaxpr.invars))])
    return why


def _equations(jaxpr: Any) -> Any:
    """Every equation of a jaxpr, and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inside in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inside = getattr(inside, "jaxpr", inside)
            yield from _equations(inside) if hasattr(inside, "eqns") else ()


def stream(x: jax.Array) -> jax.Array:
    """The residual stream [B, T, D]: over tensor its time is split, where that divides, so that what
    is done to it between the products is done once (sequence parallelism); else it is whole. Where it is
    split every layer keeps it, or it would be sent again."""
    split = _time_shards(x.shape[1]) > 1
    x = inner(x, 1 if split else None)
    return checkpoint_name(x, "stream") if split else x


def inner(x: jax.Array, dim: int | None) -> jax.Array:
    """An activation inside a block, split over tensor along `dim` (heads, hidden, vocabulary), or whole
    on each of its devices."""
    # The compiler, left alone, sometimes gathers weights where activations should move, so the
    # places are stated, once each.
    sizes, _ = _ambient()
    if sizes.get("tensor", 1) == 1 or (dim is not None and x.shape[dim] % sizes["tensor"]):
        return x
    return lax.with_sharding_constraint(x, _inside(x, dim))


def _inside(x: jax.Array, dim: int | None) -> P:
    """How the axes that are the compiler's split an activation inside a block."""
    sizes, manual = _ambient()
    entries: list[Any] = [None] * x.ndim
    if not manual:          # --step jit, and sampling: the rows are the compiler's to split too
        groups = tuple(a for a in BATCH if sizes[a] > 1)
        if groups and x.shape[0] % math.prod(sizes[a] for a in groups) == 0:
            entries[0] = groups
    if dim is not None:
        entries[dim] = "tensor"
    return P(*entries)


def _time_shards(time: int) -> int:
    """Over how many devices of tensor the time of the residual stream is split."""
    sizes, manual = _ambient()
    n = sizes.get("tensor", 1)
    return n if manual and time % n == 0 else 1


# Into a block and out of it. Where the stream's time is split, n copies of it are made, one for each
# device of tensor, [n, B, T, D] split over n: an all-gather. The products have n as a batch dimension,
# so that each device makes those with its own part of the weights. What they add up to is n partial
# sums [n, B, T, D], and the stream is their sum: a reduce-scatter. Each is the other's derivative.

# One operation in each map, no more: when the backward pass computes a part of a map again, jax cannot
# place what was kept of it.

def _copies(x: jax.Array, n: int) -> jax.Array:
    x = x[None]
    return x if n == 1 else jax.shard_map(
        lambda x: lax.all_gather(x, "tensor", axis=2, tiled=True),
        in_specs=P(None, None, "tensor"), out_specs=P("tensor"), axis_names={"tensor"})(x)


def _sum_of(parts: jax.Array) -> jax.Array:
    if parts.shape[0] > 1:
        parts = jax.shard_map(
            lambda p: lax.psum_scatter(p, "tensor", scatter_dimension=2, tiled=True),
            in_specs=P("tensor"), out_specs=P(None, None, "tensor"), axis_names={"tensor"})(parts)
    return parts[0]


def columns(x: jax.Array, *weights: jax.Array, dtype: Any = None) -> tuple[jax.Array, ...]:
    """The stream x [B, T, D] times each of the weights [D, F, ...]: into a block. All of them share
    one all-gather of x, and one reduce-scatter of its gradient. `dtype` is the products', if not x's."""
    alike = len({(w.shape, w.dtype) for w in weights}) == 1 < len(weights)
    if alike and weights[0].ndim == 2 and _ANEW.value and platform() == "tpu":
        # As one product, matrices take a tenth less to compile and, as that compiler estimates, a little less time.
        return tuple(jnp.unstack(*columns(x, jnp.stack(weights, 2), dtype=dtype), axis=-1))
    n = _time_shards(x.shape[1])
    divides = [n > 1 and w.shape[1] % n == 0 for w in weights]
    copies = _copies(x, n) if any(divides) else None

    def times(w, split):
        if not split:
            out = _product(x, w, (((2,), (0,)), ((), ())), dtype)
            return inner(out, None if n > 1 else 2)
        w = w.reshape(w.shape[0], n, -1, *w.shape[2:])
        out = _product(copies, w, (((3,), (0,)), ((0,), (1,))), dtype)          # [n, B, T, F / n, ...]
        out = jnp.moveaxis(checkpoint_name(out, "product"), 0, 2)
        return inner(out.reshape(*x.shape[:2], -1, *w.shape[3:]), 2)

    return tuple(map(times, weights, divides))


def heads(w: jax.Array, asking: int) -> jax.Array:
    """Weights [D, K, N] of keys or values with each head as often as it takes for tensor to divide them, as it divides
    the `asking` heads of queries: a device then makes those that its own ask, where it would make all, or be sent them."""
    count = math.lcm(w.shape[1], _ambient()[0].get("tensor", _WALKED.value))
    times = count // w.shape[1] if asking % count == 0 else 1
    if times == 1:
        return w
    # A product: as a view the rule would cut it, and backward what it sums over is split, where of products the compiler
    # knows what to send. But forward of a gradient a view, which no policy keeps for later: it would be a whole weight.
    each = lambda: inner(jnp.repeat(jnp.eye(w.shape[1], dtype=w.dtype), times, 1), 1)      # noqa: E731
    repeated = jax.custom_vjp(lambda w: jnp.einsum("dkn,kj->djn", w, each()))
    repeated.defvjp(lambda w: (inner(jnp.repeat(w, times, 1), 1), None),
                    lambda _, change: (jnp.einsum("djn,kj->dkn", change, each()),))
    return repeated(w)


def _product(x: jax.Array, w: jax.Array, dims: tuple, dtype: Any = None) -> jax.Array:
    """lax.dot_general of activations and weights. The gradient of the weights is a product with x on the left,
    where autodiff would have x on the right: a CPU turns the left one over in memory first, and x is smaller than
    the gradients of several products with it, and the same for all."""
    (inside, of_w), (batch, batch_of_w) = dims
    kept = [d for d in range(x.ndim) if d not in inside + batch]

    def plain(x, w):
        return lax.dot_general(x, w, dims, preferred_element_type=dtype)

    def backward(given, change):
        x, w = given
        dx, = jax.linear_transpose(lambda x: plain(x, w), x)(change)
        over = (tuple(kept), tuple(range(len(batch), len(batch) + len(kept))))
        dw = lax.dot_general(x, change, (over, (batch, tuple(range(len(batch))))), preferred_element_type=dtype)
        # It has the dimensions of x that were summed over in x's order, then those of w that were not.
        order = [*batch_of_w, *(of_w[inside.index(d)] for d in sorted(inside))]
        order += [d for d in range(w.ndim) if d not in order]
        return dx, dw.transpose(np.argsort(order)).astype(w.dtype)

    product = jax.custom_vjp(plain)         # (plain in the next line too: it is what remat looks at)
    product.defvjp(lambda x, w: (plain(x, w), (x, w)), backward)
    return product(vary(x, w), vary(w, x))


def row(*pairs: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The sum of the products of activations [B, T, F, ...] with weights [F, ..., D]: out of a block
    and into the stream [B, T, D]. All of them share one reduction."""
    return _seam(_row(_time_shards(pairs[0][0].shape[1]), None, pairs), "row")


def _row(n: int, parts: jax.Array | None, pairs: Any) -> jax.Array:
    """What n partial sums [n, B, T, D], if there are any, and these products add up to."""
    parts, whole = [] if parts is None else [parts], []
    for h, w in pairs:
        if n == 1 or w.shape[0] % n:
            inside = tuple(range(w.ndim - 1))
            whole.append(_product(h, w, ((tuple(d + 2 for d in inside), inside), ((), ()))))
        else:
            h = jnp.moveaxis(h.reshape(*h.shape[:2], n, -1, *h.shape[3:]), 2, 0)
            w = w.reshape(n, -1, *w.shape[1:])
            inside = tuple(range(1, w.ndim - 1))
            parts.append(_product(h, w, ((tuple(d + 2 for d in inside), inside), ((0,), (0,)))))
    if parts:
        whole.append(checkpoint_name(_sum_of(sum(parts)), "product"))
    return stream(sum(whole))


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of a table [V, D] that ids [B, T] ask for, as the stream [B, T, D]."""
    n = _time_shards(ids.shape[1])
    if n == 1 or table.shape[0] % n:
        return stream(table[ids])
    table = table.reshape(n, -1, table.shape[1])
    here = ids - jnp.arange(n)[:, None, None] * table.shape[1]                  # [n, B, T]
    mine, here = ((here >= 0) & (here < table.shape[1]))[..., None], jnp.clip(here, 0, table.shape[1] - 1)
    # Left alone, a partitioner may gather what is to be added to the rows of each.
    found = _each(lambda table, here, mine: jnp.where(mine, table[0][here], 0), [P("tensor")] * 3, 1,
                  *(vary(a, table, ids) for a in (table, here, mine)))
    return stream(_sum_of(found))


def _each(fn: Callable, specs: Sequence[P], floats: int, *args: jax.Array) -> jax.Array:
    """fn(*args) by each device of tensor for itself, and its gradients for the first few of args, too: a map for each
    direction, as jax cannot turn a map around that keeps something for it."""
    split = functools.partial(jax.shard_map, axis_names={"tensor"})

    @jax.custom_vjp
    def each(*args):
        return split(fn, in_specs=tuple(specs), out_specs=P("tensor"))(*args)

    def back(kept, change):
        def turned(change, *args):
            return jax.vjp(lambda *first: fn(*first, *args[floats:]), *args[:floats])[1](change)

        changes = split(turned, in_specs=(P("tensor"), *specs), out_specs=tuple(specs[:floats]))(change, *kept)
        return *changes, *[None] * (len(kept) - floats)

    each.defvjp(lambda *args: (each(*args), args), back)
    return each(*args)


def experts(x: jax.Array, chosen: jax.Array, shares: jax.Array, into: Sequence[jax.Array],
            between: Callable, back: jax.Array, *beside: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Each token of the stream x [B, T, D] through the experts that it has chosen [B, T, K], into the
    stream: the sum of what they make of it, by shares [B, T, K]. An expert is columns `into`, each
    [E, D, F], then between(...), then rows `back` [E, F, D]. None is dropped: tokens are sorted by
    expert and multiplied group by group. Under `expert` a token is sent to the devices that have one of
    its experts, and each sends back its part of the sum. `beside` are pairs as `row` takes them, of what
    all tokens visit: they are added, in the same reduction."""
    (B, T, D), K, n = x.shape, chosen.shape[-1], _time_shards(x.shape[1])
    n = n if back.shape[1] % n == 0 else 1
    sizes, manual = _ambient()
    e, own = sizes.get("expert", 1) if "expert" in manual else 1, back.shape[0]
    into = [jnp.moveaxis(w.reshape(own, D, n, -1), 2, 0) for w in into]         # [n, E, D, F / n]
    back = jnp.moveaxis(back.reshape(own, n, -1, D), 1, 0)                      # [n, E, F / n, D]
    chosen, shares = (inner(a, None).reshape(-1, K) for a in (chosen, shares.astype(x.dtype)))
    rows = (_copies(x, n) if n > 1 else inner(x, None)[None]).reshape(n, B * T, D)
    if e > 1:
        rows, chosen, shares = _to_experts(rows, chosen, shares, e, own)

    # Sorted by expert, stably. Those of others' experts come last: they are in no group, and what a
    # product makes of them is not said (zeros on CPU, whatever was there on TPU).
    k = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1))
    counts = (chosen.reshape(-1) == jnp.arange(own)[:, None]).sum(-1, dtype=jnp.int32)
    ours = lambda x: jnp.where((jnp.arange(len(order)) < counts.sum())[:, None], x, 0)     # noqa: E731
    product = lambda x, w: checkpoint_name(_ragged(x, w, counts, B * T * K), "product")     # noqa: E731
    sorted_rows = ours(rows[:, order // k])
    out = ours(product(between(*[product(sorted_rows, w) for w in into]), back))
    out = out[:, jnp.argsort(order)].reshape(n, -1, k, D)
    out = (out * shares[..., None]).sum(2)
    if e > 1:
        out = _swap(out.reshape(n, e, -1, D)).sum(1, dtype=jnp.float32).astype(x.dtype)
    out = _seam(checkpoint_name(out, "experts"), "experts")
    return _row(n, out.reshape(n, B, T, D), beside)


def _to_experts(rows: jax.Array, chosen: jax.Array, shares: jax.Array, e: int, own: int) -> tuple:
    """What all devices of `expert` send to the experts here, as many as `own`: rows [n, e R, D], each
    row's choices among them (numbered from 0; `own` is another's), and their shares.

    There is room for every row in what goes to each device, so that none can be too many; what has no
    business there is zero."""
    asked = (chosen // own == jnp.arange(e)[:, None, None]).any(-1)             # [e, R]
    rows = _swap(jnp.where(asked[..., None], rows[:, None], 0)).reshape(rows.shape[0], -1, rows.shape[2])
    chosen, shares = lax.all_gather(chosen, "expert", tiled=True), _gathered(shares, 0, "expert")
    chosen = chosen - lax.axis_index("expert") * own
    chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
    if chosen.shape[1] > own:       # at most as many of a row's choices are here as there are experts
        first = jnp.argsort(chosen, -1)[:, :own]
        chosen, shares = (jnp.take_along_axis(a, first, -1) for a in (chosen, shares))
    return rows, chosen, shares


def _ragged(x: jax.Array, w: jax.Array, counts: jax.Array, usual: int) -> jax.Array:
    """For each of n the rows of x [n, R, D], in groups of so many (`usual` in all), times the weights of
    their group [n, E, D, F]. Split n ways over tensor: a TPU has no ragged product with a batch dimension."""
    n, both = x.shape[0], lambda a: a.reshape(-1, *a.shape[2:])
    x, w, counts = vary(x, w), vary(w, x), vary(counts, x)
    sizes, manual = _ambient()
    if platform() not in ("", "tpu") and (manual or math.prod(sizes.values()) == 1):       # else rows are the compiler's to split
        return _by_blocks(x, w, counts, usual)
    if n == 1:
        return lax.ragged_dot(x[0], w[0], counts)[None]
    made = _each(lax.ragged_dot, [P("tensor"), P("tensor"), P()], 2, both(x), both(w), counts)
    return made.reshape(n, -1, w.shape[-1])


def _by_blocks(x: jax.Array, w: jax.Array, counts: jax.Array, usual: int) -> jax.Array:
    """As _ragged, where XLA would multiply every row with the weights of every group: a loop over blocks of rows of one
    group, of which a group of the usual length has four and a part."""
    (n, R, _), E = x.shape, w.shape[1]
    size, wide = 1 << min(2048, max(8, usual // (4 * E))).bit_length() - 1, jnp.promote_types(x.dtype, jnp.float32)

    def loop(make, put, shape, dtype, counts, *rows):
        """What put(all, group, first, made) puts together of what make(group, of each of `rows` those of the block) makes."""
        need, ends = -(-counts // size), jnp.cumsum(counts)
        number, last = jnp.arange(-(-R // size) + E), jnp.cumsum(need)
        group = jnp.minimum((number[:, None] >= last).sum(1), E - 1)
        first = (ends - counts)[group] + (number - (last - need)[group]) * size
        many = jnp.where(number < last[-1], jnp.minimum(ends[group] - first, size), 0)
        rows = [jnp.pad(a, ((0, 0), (0, size), (0, 0))) for a in rows]

        def turn(out, block):
            group, first, many = block
            own = (jnp.arange(size) < many)[:, None]
            work = lambda: make(group, *[jnp.where(own, lax.dynamic_slice_in_dim(a, first, size, 1), 0) for a in rows])     # noqa: E731
            with jax.named_scope("ragged"):
                made = lax.cond(many > 0, work, lambda: jnp.zeros_like(work()))
            return put(out, group, first, made), None

        return lax.scan(turn, inner(vary(jnp.zeros(shape, dtype), *rows), 0), (group, first, many))[0]

    def product(x, w, counts, of_w):
        # In the order of the rows: what a block writes beyond its own, the next ones write over.
        return loop(lambda group, x: lax.dot_general(x, w[:, group], (((2,), (of_w,)), ((0,), (0,)))),
                    lambda out, group, first, made: lax.dynamic_update_slice_in_dim(out, made, first, 1),
                    (n, R + size, w.shape[4 - of_w]), x.dtype, counts, x)[:, :R]

    def back(kept, change):
        x, w, counts = kept
        dw = loop(lambda group, *of: lax.dot_general(*of, (((1,), (1,)), ((0,), (0,))), preferred_element_type=wide),
                  lambda out, group, first, made: out.at[:, group].add(made), w.shape, wide, counts, x, change)
        return product(change, w, counts, 2), dw.astype(w.dtype), None

    forward = lambda *args: product(*args, 1)               # noqa: E731
    by_blocks = jax.custom_vjp(forward)
    by_blocks.defvjp(lambda *args: (forward(*args), args), back)
    return by_blocks(x, w, counts)


def _swap(x: jax.Array) -> jax.Array:
    """x [n, e, ...], split n ways over tensor: part j goes to the device j of expert, and its to us."""
    return _keeping_tensor(lambda x: lax.all_to_all(x, "expert", 1, 1, tiled=True), P(
        "tensor" if x.shape[0] > 1 else None))(x)


def over_time(x: jax.Array) -> jax.Array:
    """What each device of `seq` has summed over its part of the time, summed over all of it."""
    sizes, manual = _ambient()
    return lax.psum(x, "seq") if sizes.get("seq", 1) > 1 and "seq" in manual else x


def attend(attention: Callable, q: jax.Array, k: jax.Array, v: jax.Array, seen: Callable,
           asking: Any, asked: Any, ordered: bool = False, kernel: Callable | None = None) -> jax.Array:
    """`attention(q, k, v, mask)` with whole heads on each device; q [B, T, H, N], k and v
    [B, S, K, N]. It gives what was found [B, T, H, N] and the logarithm of the sum of its weights
    [B, H, T]. The mask is seen(asking, asked), of what is known of each query and of each key
    (trees of [B, T] and [B, S]: places, documents). Under `seq` the keys go round a ring; else, where no
    query sees a key with a higher index (`ordered`), what it does not see is not computed. Where the device has a kernel
    of its own, and `kernel(q, k, v)` says how the same is asked of it, that is what is computed."""
    q, k, v = (inner(a, 2) for a in (q, k, v))
    sizes, manual = _ambient()
    if sizes.get("seq", 1) > 1 and "seq" in manual:
        ring = _ring if ordered else _whole_ring
        return inner(ring(attention, q, k, v, seen, asking, asked, sizes["seq"]), 2)
    if kernel and all(a.shape[2] % sizes.get("tensor", 1) == 0 for a in (q, k)) and fused(q.dtype, q.shape[1], q.shape[-1]):
        found = _by_kernel(kernel, q, k, v)
    else:
        found = _in_blocks(attention, q, k, v, seen, asking, asked, sizes.get("tensor", 1), ordered)
    return _seam(inner(checkpoint_name(found, "attend"), 2), "attend")


def fused(dtype: Any, time: int, width: int, mesh: Any = None) -> str:
    """Which kernel a device has for causal attention in this precision over so many with heads so wide, if any."""
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_mesh.abstract_device
    kind, dtype = device.device_kind if device is not None else "", jnp.dtype(dtype)
    if kind.startswith("TPU") and kind[4:6] not in ("v2", "v3"):       # (for which it does not compile)
        return "splash" * (time % 128 == 0 and width % 64 == 0 and dtype == jnp.bfloat16)
    return "cuDNN" * (kind.startswith("NVIDIA") and time % 2 == 0 and width % 8 == 0 and width <= 128
                      and dtype in (jnp.bfloat16, jnp.float16)
                      and float(getattr(jax.local_devices()[0], "compute_capability", 8)) >= 8)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by the device's kernel; q [B, T, H, N], k and v [B, T, K, N]."""
    B, T, H, N = q.shape
    if fused(q.dtype, T, N) != "splash":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    block = math.gcd(T, 512)
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in (
        "q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")})
    # What it finds, and what it divided by, selective remat keeps.
    kernel = splash.make_splash_mha_single_device(masks.MultiHeadMask([masks.CausalMask((T, T))] * B * H), block_sizes=sizes,
                                                  residual_checkpoint_name="product")
    found = kernel(*(x.swapaxes(1, 2).reshape(-1, *x.shape[1::2]) for x in (q * N ** -0.5, k, v)))      # rows are heads, too
    return found.reshape(B, H, T, N).swapaxes(1, 2)


def _by_kernel(kernel: Callable, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """kernel(q, k, v) of each device's rows and heads: the compiler, which splits the rest, cannot split a kernel."""
    _, manual = _ambient()
    place, form, rest = _inside(q, 2), None, set(AXES) - manual
    each = P(tuple(axis for axis in AXES if axis in rest))

    def split(fn, ins, outs):
        def plain(*args):
            """fn, traced as if nothing differed from device to device: a kernel does not say of what it makes that it does."""
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
            traced, made = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*like)     # (not one of before)
            return jax.tree.unflatten(jax.tree.structure(made), jaxpr_as_fun(traced)(*jax.tree.leaves(args)))

        whole = jax.shard_map(plain, in_specs=ins, out_specs=outs, axis_names=rest, check_vma=False)
        return lambda *args: vary(whole(*args), args)

    def forward(q, k, v):
        def local(q, k, v):
            nonlocal form
            found, back = jax.vjp(kernel, q, k, v)
            kept, form = jax.tree.flatten(back)
            return found, [x[None] for x in kept]           # (each device's own)

        return split(local, place, (place, each))(q, k, v)

    def backward(kept, change):
        def local(kept, change):
            return jax.tree.unflatten(form, [x[0] for x in kept])(change)

        return split(local, (each, place), place)(kept, change)

    attention = jax.custom_vjp(split(kernel, place, place))
    attention.defvjp(forward, backward)
    return attention(q, k, v)


# As many scores of an attention may a device have in memory at once; fewer queries in a block are not
# worth what they save. (Each block is compiled: eight are worth that where attention is much of the work.)
SCORES, BLOCK = 2**25, 128


def blocks(scores: int, time: int, ordered: bool = True, looped: bool = True) -> tuple[list[int], int]:
    """Where the blocks of queries end in which an attention with so many scores on a device is computed, each with
    the keys up to its last query, if they are ordered (of few the last is halved: it has most keys); and in how many
    parts, for memory, each of those: at least two where layers may be no loop, for a compiler makes one of what is
    computed twice, but of loops."""
    wide = max(n for n in (1, 2, 4, 8) if n == 1 or ordered and time % n == 0 and time // n >= BLOCK * (4 if n == 8 else 1))
    each = last = time // wide
    if wide == 4 and each >= 2 * BLOCK and each % 2 == 0:
        last = each // 2
    ends = sorted({*range(each, time + 1, each), time - last} - {0})
    parts = (n for n in range(1 if looped or scores <= SCORES else 2, last + 1) if last % n == 0)
    return ends, next((n for n in parts if scores <= n * wide * SCORES), last)


def _in_blocks(attention, q, k, v, seen, asking, asked, shards, ordered):
    B, T, H, _ = q.shape
    ordered, scores = ordered and k.shape[1] == T, B * H * T * k.shape[1] // shards
    ends, parts = blocks(scores, T, ordered, not lone_cpu())
    cut = lambda tree, a, b: jax.tree.map(lambda x: x[:, a:b], tree)       # noqa: E731
    one = lambda q, asking, k, v, asked: attention(q, k, v, seen(asking, asked))[0]      # noqa: E731
    if scores > SCORES:
        one = jax.checkpoint(one, prevent_cse=False)
    found = []
    for begin, end in zip([0, *ends], ends):
        mine, keys = cut((q, asking), begin, end), cut((k, v, asked), 0, end if ordered else None)
        if parts == 1:
            found.append(one(*mine, *keys))
            continue
        split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(B, parts, -1, *x.shape[2:]), 1, 0), mine)
        each = lax.map(lambda part: one(*part, *keys), split)
        found.append(jnp.moveaxis(each, 0, 1).reshape(B, end - begin, *q.shape[2:]))
    return jnp.concatenate(found, 1) if len(ends) > 1 else found[0]


def zigzag(time: int, devices: int) -> np.ndarray:
    """The order in which `devices` hold a causal sequence: device i has the i-th part of 2 n and
    the i-th from the end. Each then has as many keys to look at as the others."""
    parts = np.arange(time).reshape(2 * devices, -1)
    return np.concatenate([p for i in range(devices) for p in (parts[i], parts[-1 - i])])


def _look(attention: Callable, seen: Callable, query: Any, key: Any) -> tuple[jax.Array, jax.Array]:
    """What a query finds among some of the keys, in float32, and the logarithm of its weights' sum."""
    (q, asking), (k, v, asked) = query, key
    found, weight = attention(q, k, v, seen(asking, asked))
    return found.astype(jnp.float32), weight


def _join(a: tuple, b: tuple) -> tuple[jax.Array, jax.Array]:
    """Two findings, each normalised by itself, as one."""
    (x, s), (y, t) = a, b
    both = jnp.logaddexp(s, t)
    share = lambda s: jnp.exp(s - both).transpose(0, 2, 1)[..., None]       # noqa: E731
    return x * share(s) + y * share(t), both


def _around(key: Any, n: int) -> Any:
    """Keys, values and what is known of them, from the device before in the ring."""
    return jax.tree.map(lambda x: lax.ppermute(x, "seq", [(i, (i + 1) % n) for i in range(n)]), key)


def _whole_ring(attention: Callable, q: jax.Array, k: jax.Array, v: jax.Array, seen: Callable,
                asking: Any, asked: Any, n: int) -> jax.Array:
    """Attention in which a query may see any key: it looks at those of every device in turn."""
    look = jax.checkpoint(functools.partial(_look, attention, seen, (q, asking)))

    def turn(state, _):
        key, found = state
        key = _around(key, n)
        return (key, _join(found, look(key))), None

    key = vary((k, v, asked), q, lax.axis_index("seq"))
    (_, (found, _)), _ = lax.scan(turn, (key, look(key)), None, length=n - 1)
    return found.astype(q.dtype)


def _ring(attention: Callable, q: jax.Array, k: jax.Array, v: jax.Array, seen: Callable,
          asking: Any, asked: Any, n: int) -> jax.Array:
    """Causal attention over a sequence in zigzag order. Device i asks with an early part and a
    late one; keys come by from each device j in turn. The late part sees every early one. Else,
    from j before i both parts see the early keys, from j after i the late one sees both: of four
    quarters two are looked at in each round, by everyone."""
    me, half = lax.axis_index("seq"), q.shape[1] // 2
    early = lambda tree: jax.tree.map(lambda x: x[:, :half], tree)      # noqa: E731
    late = lambda tree: jax.tree.map(lambda x: x[:, half:], tree)       # noqa: E731
    choose = lambda p, a, b: jax.tree.map(lambda x, y: jnp.where(p, x, y), a, b)  # noqa: E731

    look = functools.partial(_look, attention, seen)
    query, key = (q, asking), (k, v, asked)
    first, last = early(query), late(query)

    @jax.checkpoint         # of each turn the keys and what was found before are kept, no more
    def look_on(key, before, one, two):
        two = _join(two, look(last, early(key)))
        found, weight = look(choose(before, first, last), choose(before, early(key), late(key)))
        never = jnp.full_like(weight, -jnp.inf)
        return (_join(one, (found, jnp.where(before, weight, never))),
                _join(two, (found, jnp.where(before, never, weight))))

    def turn(state, _):
        key, whose, one, two = state
        key, whose = _around(key, n), (whose - 1) % n
        return (key, whose, *look_on(key, whose < me, one, two)), None

    state = key, me, look(first, early(key)), look(last, key)
    (_, _, one, two), _ = lax.scan(turn, state, None, length=n - 1)
    return jnp.concatenate([one[0], two[0]], 1).astype(q.dtype)


def in_pieces(fn: Callable, count: int, weights: Any, *arrays: jax.Array) -> jax.Array:
    """The sum of the scalar fn(weights, *arrays) over `count` pieces of the time of arrays
    [B, T, ...], with one piece in memory at a time. Where it is differentiated, a piece's gradients are made
    with the piece, in the forward pass: they only wait to be scaled, and nothing is computed again."""
    if count == 1:
        return fn(weights, *arrays)
    # All vary where any does before anything is summed here, where autodiff does not see it.
    weights, arrays = vary((weights, arrays), weights, arrays)
    cut = [jnp.moveaxis(_parts_of_time(a, count), 2, 0) for a in arrays]
    cut = [a.reshape(count, a.shape[1], -1, *a.shape[4:]) for a in cut]
    zeros = lambda x: vary(jnp.zeros(x.shape, jnp.float32), weights, arrays)      # noqa: E731
    types = jax.tree.map(lambda w: w.dtype, weights)

    @jax.custom_vjp
    def total(weights, cut):
        return lax.scan(lambda s, piece: (s + fn(weights, *piece), None), zeros(jnp.zeros(())), cut)[0]

    def forward(weights, cut):
        def one(carry, piece):
            s, grads = carry
            floats = {i: a for i, a in enumerate(piece) if jnp.issubdtype(a.dtype, jnp.floating)}
            found, back = jax.vjp(lambda w, floats: fn(w, *(floats.get(i, a) for i, a in enumerate(piece))),
                                  weights, floats)
            grad, change = back(jnp.ones_like(found))
            return (s + found, jax.tree.map(lambda g, x: g + x.astype(g.dtype), grads, grad)), change

        (s, grads), changes = lax.scan(one, (zeros(jnp.zeros(())), jax.tree.map(zeros, weights)), cut)
        return s, (grads, changes)

    def backward(kept, by):
        grads, changes = kept
        return (jax.tree.map(lambda g, dtype: (g * by).astype(dtype), grads, types),
                [(changes[i] * by).astype(changes[i].dtype) if i in changes else
                 np.zeros(a.shape, jax.dtypes.float0) for i, a in enumerate(cut)])

    total.defvjp(forward, backward)
    return total(weights, cut)


def _parts_of_time(x: jax.Array, count: int) -> jax.Array:
    """x [B, T, ...] as [B, n, count, T / count / n, ...]: for `count` parts of the time, each of which
    tensor splits n ways as it splits the whole. In a part time is not in order."""
    n = _time_shards(x.shape[1] // count)
    return x.reshape(x.shape[0], n, count, -1, *x.shape[2:])


def _widened(tree: Any) -> tuple[Any, Callable]:
    """Weights in float32 and the way back to their precision, for use inside a loop: autodiff then
    adds their gradients up in float32."""
    types = jax.tree.map(lambda w: w.dtype, tree)
    return (jax.tree.map(lambda w: w.astype(jnp.float32), tree),
            lambda wide: jax.tree.map(lambda w, dtype: w.astype(dtype), wide, types))


# What is as good as its operand.
VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "name", "pvary",
         "sharding_constraint", "copy"}


def _not_weights(operation: Any, *_: Any, **params: Any) -> bool:
    """What is kept for a backward pass that is to have all but whole weights: neither what gathers or
    picks them, nor their views."""
    return operation.name not in VIEWS and not _gathers(operation.name, params)


def _gathers(name: str, params: dict[str, Any]) -> bool:
    inside = getattr(params.get("jaxpr"), "eqns", ())
    return (name == "all_gather" and "fsdp" in params["axis_name"] or name == "dynamic_slice"
            or any(_gathers(eqn.primitive.name, eqn.params) for eqn in inside))


# What a layer keeps for its backward pass, by `remat`.
KEPT = {
    "none": _not_weights,
    "selective": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("product", "stream")),
    "full": jax.checkpoint_policies.save_only_these_names("stream"),
}


# Up to so many layers are no loop on a CPU that is not pretended to be several: 5 to 10% faster with 6, 12 and 16
# layers (measured), for half a second to two more of compiling.
UNROLLED = 16


# Whether the stack that is traced makes all products of a layer anew in the backward pass.
_ANEW = jax.make_user_context(False)


def stack(layer: Callable, weights: Any, x: Any, each: Any = None, specs: Any = None,
          remat: str = "none") -> tuple[Any, Any]:
    """x through a stack of identical layers: `x, out = layer(w, x, e)` for the w of each layer and
    its e, if there are any. Gives the last x and all the outs, stacked.

    `weights` have the layers as their leading dimension. Under fsdp each layer's weights are
    gathered here, where they are used, and again in the backward pass: no device keeps them.
    remat: none keeps what the backward pass needs; selective keeps the products with weights
    and recomputes the rest; full keeps the layer's input alone. (A jax.checkpoint of the layer's own
    is undone by a CPU's compiler where layers are no loop.)"""
    layer_specs = None if specs is None else jax.tree.map(
        lambda s: P(*s[1:]), specs, is_leaf=_is_spec)

    def body(x, one):
        w, e = one
        return layer(gather(w, layer_specs), x, e)

    if remat != "none" or layer_specs is not None and _ambient()[0].get("fsdp", 1) > 1:
        body = jax.checkpoint(body, prevent_cse=False, policy=KEPT[remat])
    # A loop keeps what layers leave for the backward pass in arrays of all layers, and copies it there and back.
    few = remat == "none" and jax.tree.leaves((weights, each))[0].shape[0] <= UNROLLED
    # What comes into a layer has a name, for the pipeline to keep it.
    with _ANEW(remat == "full"):
        return lax.scan(lambda x, one: body(jax.tree.map(lambda a: checkpoint_name(a, "stream"), x), one),
                        x, (weights, each), unroll=few and lone_cpu())


def through(enter: Callable, layer: Callable, leave: Callable, params: Any, weights: Any,
            each: Any, rows: Any, specs: Any = None, remat: str = "none", microbatches: int = 1,
            schedule: str = "gpipe", chunks: int = 1) -> tuple:
    """A loss with a stack of layers in the middle, as a sum and a count:

        x = enter(params, rows);  x, more = layer(w, x, e, rows) for each;  leave(params, x, rows)

    `rows` is all that belongs to the rows of a batch (a tree of [B, ...]). `more` is None, or a pair of
    what the layer adds to the sum and a tree of other sums, without gradients, that are wanted of all
    layers together: they are then given third. Under `pipe` rows go through in microbatches, each device
    has its layers, and `leave` is given a part of the time of x and of rows on each device, so that it
    is computed once, by all of them together: its sum and count are of that part. What a loss adds to
    them outside is added on each device; a penalty on weights, say, by its share of the count."""
    def run(x, weights, each, rows):
        x, more = stack(lambda w, x, e: layer(w, x, e, rows), weights, x, each, specs, remat)
        return x, jax.tree.map(lambda a: a.sum(0), more)

    sizes, manual = _ambient()
    if sizes.get("pipe", 1) == 1 or "pipe" not in manual:
        x, more = run(enter(params, rows), weights, each, rows)
        s, *others = _with(leave(params, x, rows), more)
        return _seam(checkpoint_name(s, "through"), "through"), *others
    if specs is None or not all("pipe" in s for s in jax.tree.leaves(specs, is_leaf=_is_spec)):
        raise Refused(f"mesh axis pipe={sizes['pipe']}: the number of layers must divide by it, and "
                      f"shard.through must be given their specs")
    layers = sizes["pipe"] * jax.tree.leaves(weights)[0].shape[0]
    if layers % (sizes["pipe"] * chunks):
        raise Refused(f"mesh axis pipe={sizes['pipe']} x --chunks {chunks}: {layers} layers do not "
                      f"divide into {sizes['pipe'] * chunks}")
    M = math.gcd(microbatches, jax.tree.leaves(rows)[0].shape[0])
    if schedule == "1f1b":
        # A stage goes back right after it has gone forward: of one layer nothing is worth computing again.
        remat = remat if layers > sizes["pipe"] else "none"
        return _one_forward_one_backward(enter, run, leave, params, weights, each, rows,
                                         sizes["pipe"], M)
    x, more = _pipeline(run, weights, enter(params, rows), each, rows, sizes["pipe"], M, chunks, remat)
    return _with(vary(leave(params, x, spread(rows)), x), more)


def _with(pair: tuple, more: Any) -> tuple:
    """A sum and a count, and what the layers add."""
    return pair if more is None else (pair[0] + more[0], pair[1], more[1])


def _cut(tree: Any, count: int) -> Any:
    """Each [B, ...] as [count, B / count, ...]."""
    return jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), tree)


def _pick(tree: Any, index: Any) -> Any:
    """Of each array the entry with this number, or the nearest that it has."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(
        a, jnp.clip(index, 0, a.shape[0] - 1), keepdims=False), tree)


def _work(t: Any, stage: Any, stages: int, chunks: int) -> tuple[Any, Any]:
    """The microbatch and the chunk of layers that a stage has in tick t (of microbatches that are
    not there: none)."""
    turn = t - stage
    lap = stages * chunks
    return turn // lap * stages + turn % stages, turn % lap // stages


def _in_turns(t: Any, stage: Any, stages: int) -> tuple[Any, Any]:
    """In 1F1B the microbatch that a stage has in tick t on its way forward, and that on its way back."""
    return t - stage, t - (2 * stages - 1 - stage)


def ticks(stages: int, microbatches: int, schedule: str, chunks: int) -> tuple[int, int]:
    """How many ticks a pipeline takes, and how many chunks of layers a stage really has."""
    S, M, V = stages, microbatches, chunks if schedule == "interleaved" else 1
    if schedule == "1f1b":
        return M + 2 * S - 1, 1
    return S + (M - 1) // S * S * V + (V - 1) * S + (M - 1) % S, V


def _skipping(busy: jax.Array, work: Callable, idle: Callable, x: Any) -> Any:
    """work(x) in the ticks in which a stage has some, else idle(x). Skipped, but for seq: its ring
    is one collective-permute of all devices, idle ones too."""
    if _ambient()[0]["seq"] > 1:
        return jax.tree.map(lambda a, b: jnp.where(busy, a, b), work(x), idle(x))
    return lax.cond(busy, work, idle, x)


def _pipeline(run: Callable, weights: Any, x: jax.Array, each: Any, rows: Any, stages: int,
              microbatches: int, chunks: int, remat: str = "none") -> tuple[jax.Array, Any]:
    """The rows of x in microbatches through the stages, chunk after chunk of layers.

        stage 0 | 0 1 0 1 2 3 2 3 . |      2 stages of 2 chunks, 4 microbatches: a number is a
        stage 1 | . 0 1 0 1 2 3 2 3 |      microbatch, and stage 1's last chunk of it ends it

    One scan of ticks; autodiff makes the backward pass, in the opposite order. Chunk number c of
    stage s are layers (c stages + s) and on: chunks = 1 is GPipe, more of them make the bubble
    smaller. A tick without work is skipped."""
    M, S, V = microbatches, stages, chunks
    me = lax.axis_index("pipe")
    if x.shape[1] % S:
        raise Refused(f"mesh axis pipe={S}: {x.shape[1]} tokens of a device do not divide by {S}")
    xs, rows = _cut(x, M), _cut(rows, M)
    wide, narrow = _widened(weights)
    wide = _cut(wide, V)
    each = jax.tree.map(lambda e: e.reshape(V, S, -1, *e.shape[1:]), each)
    last = [S - 1 + r * S * V + (V - 1) * S + j for r in range(-(-M // S)) for j in range(S)][:M]

    def tick(x, t):
        batch, chunk = _work(t, me, S, V)
        busy = (batch >= 0) & (batch < M)
        x = jnp.where((me == 0) & (chunk == 0), _pick(xs, batch), x)

        # The chunk's weights are picked again in the backward pass, or each tick would keep them. (What
        # is kept of the layers inside is decided here, too: the outer policy wins.)
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=KEPT[remat])
        def turn(x):
            def work(x):
                now = narrow(_pick(wide, chunk))
                return alike(run(x, now, _pick(_pick(each, chunk), me), _pick(rows, batch)))

            return _skipping(busy, work, lambda x: alike((x, _nothing_of(work, x)[1])), x)

        x, more = turn(x)
        return _onward(x, S), (x, more)

    alike = lambda tree: vary(tree, xs, rows, weights, me)      # noqa: E731
    start = alike(jnp.zeros_like(xs[0]))
    _, (out, more) = lax.scan(tick, start, jnp.arange(ticks(S, M, "interleaved", V)[0]))
    out = jnp.where(me == S - 1, out[np.array(last)], 0).reshape(-1, *x.shape[1:])
    return stream(_shared_out(out, S)), jax.tree.map(lambda a: a.sum(0), more)


def _nothing_of(fn: Callable, *args: Any) -> Any:
    """Zeros of the shapes that fn makes."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, *args))


def _onward(x: Any, stages: int, step: int = 1) -> Any:
    """To the next stage (or the one before); from the last to the first."""
    return jax.tree.map(lambda a: lax.ppermute(
        a, "pipe", [(i, (i + step) % stages) for i in range(stages)]), x)


def _shared_out(x: jax.Array, stages: int) -> jax.Array:
    """x [B, T, D] that one stage has and the others hold zeros for: to each stage its part of the time."""
    place = P(None, "tensor" if _time_shards(x.shape[1] // stages) > 1 else None)
    return _keeping_tensor(lambda x: lax.psum_scatter(x, "pipe", scatter_dimension=1, tiled=True), place)(x)


def _shared_again(x: jax.Array) -> jax.Array:
    """The parts of all stages, together."""
    place = P(None, "tensor" if _time_shards(x.shape[1]) > 1 else None)
    return _keeping_tensor(lambda x: lax.all_gather(x, "pipe", axis=1, tiled=True), place)(x)


def _one_forward_one_backward(enter: Callable, run: Callable, leave: Callable, params: Any,
                              weights: Any, each: Any, rows: Any, stages: int, microbatches: int
                              ) -> tuple:
    """The same loss, with each microbatch's backward pass as soon as it can be:

        stage 0  |0 . |1 . |2 . |. 0'|. 1'|. 2'|       x' is the backward pass of x, in the
        stage 1  |. . |0 . |1 0'|2 1'|. 2'|. . |       same tick as another's forward

    so that a stage holds the inputs of 2 stages microbatches, however many there are. In each tick
    a stage takes one microbatch forward and one back, from its input again. What follows the
    layers is shared out by time in every tick. The gradient is made along with the loss, for a
    change of 1 in the sum; autodiff then has only to scale it."""
    M, S = microbatches, stages
    me, parts = lax.axis_index("pipe"), _cut(rows, M)
    mine = jax.tree.map(lambda e: _pick(e.reshape(S, -1, *e.shape[1:]), me), each)
    alike = lambda tree: vary(tree, params, rows, weights, me)          # noqa: E731
    forward = lambda w, x, i: alike(run(x, w, mine, _pick(parts, i)))   # noqa: E731
    wide = lambda tree: jax.tree.map(                                   # noqa: E731
        lambda w: vary(jnp.zeros(w.shape, jnp.float32), w, me), tree)
    add = lambda total, more: jax.tree.map(                             # noqa: E731
        lambda t, g: t + g.astype(t.dtype), total, more)
    only = lambda busy, tree: jax.tree.map(lambda a: jnp.where(busy, a, 0), tree)   # noqa: E731

    def both(params, weights):
        def tick(state, t):
            x, back, ahead, kept, (dp, dw), (s, c), total = state
            (f, b), out = _in_turns(t, me, S), t - (S - 1)
            # Forward.
            busy = (f >= 0) & (f < M)
            x = _skipping(busy & (me == 0), lambda x: vary(enter(params, _pick(parts, f)), x),
                       lambda x: x, x)
            kept = jnp.where(busy, lax.dynamic_update_index_in_dim(kept, x, f % (2 * S), 0), kept)
            y, more = _skipping(busy, lambda x: forward(weights, x, f), lambda x: (x, none), x)
            # The loss of what the last stage has just finished, by all stages.
            part = stream(_shared_out(jnp.where(me == S - 1, y, 0), S))
            here = spread(_pick(parts, out))
            pair, pull = jax.vjp(lambda p, x: leave(p, x, here), params, part)
            dlast, dpart = pull(tuple(vary(jnp.full_like(v, k), v) for k, v in zip((1, 0), pair)))
            live = (out >= 0) & (out < M)
            done = _shared_again(dpart)
            # Backward, of a microbatch that the next stage has sent back.
            back = jnp.where(me == S - 1, ahead, back)
            turn = (b >= 0) & (b < M)

            def pull_back(back):
                _, pull = jax.vjp(lambda w, x: forward(w, x, b), weights, _pick(kept, b % (2 * S)))
                return pull((back, none and (vary(jnp.ones_like(none[0]), none[0]), none[1])))

            nothing = lambda tree: jax.tree.map(jnp.zeros_like, tree)      # noqa: E731
            dws, dx = _skipping(turn, pull_back, lambda back: (nothing(weights), nothing(back)), back)
            dfirst = _skipping(turn & (me == 0), lambda dx: jax.vjp(
                lambda p: vary(enter(p, _pick(parts, b)), dx), params)[1](dx)[0],
                lambda dx: nothing(params), dx)
            dp = add(add(dp, only(live, dlast)), dfirst)
            s, c = (a + jnp.where(live, v, 0) for a, v in zip((s, c), pair))
            return (_onward(y, S), _onward(dx, S, -1), done, kept, (dp, add(dw, dws)), (s, c),
                    add(total, more)), None

        x = alike(_nothing_of(enter, params, _pick(parts, 0)))
        none = alike(_nothing_of(forward, weights, x, 0)[1])
        zero = vary(jnp.zeros(()), params, rows, me)
        state = (x, x, x, jnp.stack([x] * 2 * S), (wide(params), wide(weights)), (zero, zero), none)
        (_, _, _, _, grads, pair, more), _ = lax.scan(tick, state, jnp.arange(ticks(S, M, "1f1b", 1)[0]))
        return _with(pair, more), jax.tree.map(lambda g, w: g.astype(w.dtype), grads, (params, weights))

    @jax.custom_vjp
    def loss(params, weights):          # when no gradient is asked for
        x, more = _pipeline(run, weights, enter(params, rows), each, rows, S, M, 1)
        return _with(vary(leave(params, x, spread(rows)), x), more)

    loss.defvjp(both, lambda grads, change: jax.tree.map(lambda g: g * change[0].astype(g.dtype), grads))
    return loss(params, weights)


def timeline(stages: int, microbatches: int, schedule: str = "gpipe", chunks: int = 1) -> str:
    """Which microbatch each stage has in each tick, for a person, and how much of it is idle."""
    S, M, (count, V) = stages, microbatches, ticks(stages, microbatches, schedule, chunks)
    cells = lambda s, t: (zip(("", "'"), _in_turns(t, s, S)) if schedule == "1f1b"       # noqa: E731
                          else [("", _work(t, s, S, V)[0])])
    word = lambda s, t: " ".join(f"{m}{mark}" if 0 <= m < M else "." for mark, m in cells(s, t))  # noqa: E731
    rows = [[word(s, t) for t in range(count)] for s in range(S)]
    wide = max(len(w) for row in rows for w in row)
    fits = max(1, 84 // (wide + 1))
    lines = [f"stage {s:<2} |" + "|".join(w.center(wide) for w in row[:fits]) + "|" + "..." * (count > fits)
             for s, row in enumerate(rows)]
    back = ("; x' is the backward pass of x (a tick is a forward and a backward; in the others, one of the "
            "two)" if schedule == "1f1b" else "")
    return "\n".join([*lines, f"{schedule}: {count} ticks for {M} microbatch{'es'[:2 * (M > 1)]} of {V} chunk{'s'[:V > 1]} a "
                      f"stage, {1 - M * V / count:.0%} of them idle{back}"])


def turned(tree: Any, chunks: int, back: bool = False) -> Any:
    """Weights (or what is placed as they are) with their layers in the order in which `pipe` holds
    them when each stage has several chunks, or back in their own. What is saved is in their own."""
    def turn(x):
        spec, stages = x.sharding.spec, dict(x.sharding.mesh.shape)["pipe"]
        if chunks == 1 or not spec or spec[0] != "pipe" or x.shape[0] % (stages * chunks):
            return x
        return _turner(x.shape[0], stages, chunks, back, x.sharding)(x)

    return jax.tree.map(turn, tree)


def in_chunks(tree: Any, specs: Any, mesh: Any, chunks: int, back: bool = False) -> Any:
    """As `turned`, of weights inside a jit, where no array knows where it lies."""
    stages = dict(mesh.shape)["pipe"]
    return jax.tree.map(lambda x, s: x if chunks == 1 or not s or s[0] != "pipe" or x.shape[0] % (stages * chunks)
                        else x[_turning(x.shape[0], stages, chunks, back)], tree, specs)


@functools.lru_cache(maxsize=None)
def _turner(layers: int, stages: int, chunks: int, back: bool, place: Any) -> Callable:
    order = _turning(layers, stages, chunks, back)
    return jax.jit(lambda x: x[order], out_shardings=place)


def _turning(layers: int, stages: int, chunks: int, back: bool = False) -> np.ndarray:
    order = np.arange(layers).reshape(chunks, stages, -1).transpose(1, 0, 2).reshape(-1)
    return np.argsort(order) if back else order


def spread(tree: Any) -> Any:
    """Of arrays [B, T, ...] the part of the time for which this device of `pipe` has the last x."""
    sizes, _ = _ambient()
    def part(a):
        if a.ndim < 2:
            return a
        parts = _parts_of_time(a, sizes["pipe"])
        return lax.dynamic_index_in_dim(parts, lax.axis_index("pipe"), 2, False).reshape(
            a.shape[0], -1, *a.shape[2:])
    return jax.tree.map(part, tree)


def _keeping_tensor(collective: Callable, spec: P) -> Callable:
    """The collective for an array that `tensor` splits, too. The partitioner would gather that
    split along (right values, four times the bytes), so it is made manual just around it."""
    sizes, manual = _ambient()
    if sizes["tensor"] == 1 or "tensor" in manual:
        return collective
    local = P(*[a if a == "tensor" else None for a in spec])
    # (Where values have types, what a collective is for differs over its axis.)
    return lambda x: jax.shard_map(collective, in_specs=local, out_specs=local, axis_names={"tensor"},
                                   check_vma=bool(varying(x)))(x)


def gather(weights: Any, specs: Any) -> Any:
    """Weights split over fsdp, whole, in the precision they come in. The transpose of this
    all-gather is a reduce-scatter, so their gradients arrive summed over fsdp and split."""
    sizes, manual = _ambient()
    if specs is None or sizes.get("fsdp", 1) == 1 or "fsdp" not in manual:
        return weights

    def whole(w, spec):
        if "fsdp" not in spec:
            return w
        dim = list(spec).index("fsdp")
        return _keeping_tensor(lambda w: _gathered(w, dim, "fsdp"), spec)(w)

    return jax.tree.map(whole, weights, specs)


# The precision in which the gradient of a weight that is split over fsdp is sent and added up; empty: its own.
SUM_DTYPE = jax.make_user_context("")


def _gathered(w: jax.Array, dim: int, axis: str) -> jax.Array:
    """All-gather over fsdp or expert. Its transpose is a reduce-scatter."""
    plain = lambda w: lax.all_gather(w, axis, axis=dim, tiled=True)         # noqa: E731
    wide = jnp.dtype(SUM_DTYPE.value if SUM_DTYPE.value and axis != "expert" else w.dtype)
    if platform() != "tpu" and wide == w.dtype:         # autodiff's is the same
        return plain(w)
    whole = jax.custom_vjp(plain)           # (plain in the next line too: it is what remat looks at)
    whole.defvjp(lambda w: (plain(w), None), lambda _, change: (
        _scattered(change.astype(wide), axis, dim).astype(change.dtype),))
    return whole(w)


def _gathered_copies(w: jax.Array, dim: int, axis: str) -> jax.Array:
    """All-gather where every device of the axis then computes the same: of a gradient each keeps its own part."""
    whole = jax.custom_vjp(lambda w: lax.all_gather(w, axis, axis=dim, tiled=True))
    own = w.shape[dim]
    whole.defvjp(lambda w: (lax.all_gather(w, axis, axis=dim, tiled=True), None),
                 lambda _, change: (lax.dynamic_slice_in_dim(change, lax.axis_index(axis) * own, own, dim),))
    return whole(w)


def as_used(weights: Any, stored: Any, used: Any, chunks: int = 1) -> Any:
    """Weights as they lie, as the loss uses them: gathered over the axes that an override has named
    and the loss knows nothing of; of layers and experts, where the override has not split them, this
    device's own. The transposes, a reduce-scatter and a padding with zeros, put gradients back."""
    sizes, manual = _ambient()
    if not manual:          # --step jit: the compiler moves what it needs
        return weights

    def convert(w, lies, spec):
        lies, spec = ([*s, *[None] * (w.ndim - len(s))] for s in (lies, spec))
        for d, axis in enumerate(lies):
            if axis == "tensor" and axis in manual and spec[d] != axis:
                w = _gathered_copies(w, d, axis)
            elif axis in manual and spec[d] != axis:
                rest = P(*[a if a == "tensor" else None for a in lies])
                w = _keeping_tensor(lambda w, axis=axis, d=d: _gathered(w, d, axis), rest)(w)
                if axis == "pipe" and d == 0 and w.shape[0] % (sizes["pipe"] * chunks) == 0:
                    w = w[_turning(w.shape[0], sizes["pipe"], chunks, True)]
        for d, axis in enumerate(spec):
            if axis in ("pipe", "expert") and lies[d] != axis:
                runs = chunks if axis == "pipe" else 1      # a stage has a run of layers in each chunk
                w = jnp.moveaxis(w, d, 0)
                parts = w.reshape(runs, sizes[axis], -1, *w.shape[1:])
                own = lax.dynamic_index_in_dim(parts, lax.axis_index(axis), 1, keepdims=False)
                w = jnp.moveaxis(own.reshape(-1, *w.shape[1:]), 0, d)
        return w

    return jax.tree.map(convert, weights, stored, used)


def lone_cpu(mesh: Any = None) -> bool:
    """Whether a mesh, or the one that is set, is one device, a CPU."""
    return platform(mesh) == "cpu" and (mesh or jax.sharding.get_abstract_mesh()).size == 1


def platform(mesh: Any = None) -> str:
    """Of what kind the devices of a mesh are, or of the one that is set: cpu, tpu, gpu; '' if it has none."""
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_mesh.abstract_device
    return "" if device is None else device.platform


def _stages(n: int) -> list[int]:
    """n as a product of small numbers."""
    few = next((d for d in (4, 2, *range(3, n + 1)) if n % d == 0), 1)
    return [few, *_stages(n // few)] if n > 1 else []


def scattering(n: int, mesh: Any) -> tuple[str, int]:
    """What a reduce-scatter over n devices is there (`_scattered`), and in how many stages."""
    return ("all-to-all", max(1, len(_stages(n)))) if platform(mesh) == "tpu" else ("reduce-scatter", 1)


def _scattered(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """A reduce-scatter over an axis. A TPU's compiler makes of that an all-reduce, of twice the bytes: there parts
    are sent to whom they belong, in stages of a few devices, and added there in float32: as many bytes in all."""
    if platform() != "tpu":
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    n = _ambient()[0][axis]
    x, stride = jnp.moveaxis(x, dim, 0), n
    for few in _stages(n):
        stride //= few
        groups = np.arange(n).reshape(-1, few, stride).swapaxes(1, 2).reshape(-1, few).tolist()
        x = lax.all_to_all(x, axis, 0, 0, tiled=True, axis_index_groups=groups)
        x = x.reshape(few, -1, *x.shape[1:]).sum(0, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)
    return jnp.moveaxis(x, 0, dim)


# -------------------------------------------------------------------------------------------
# 4. What the training step calls.

def cast(tree: Any, dtype: str) -> Any:
    """Float leaves in the compute precision; as they are, where none is named."""
    return tree if not dtype else jax.tree.map(
        lambda w: w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w, tree)


def varying(*trees: Any) -> set[str]:
    """The manual axes on which the leaves may differ from device to device."""
    return set().union(*[jax.typeof(x).mat.varying for x in jax.tree.leaves(trees)])


def vary(tree: Any, *like: Any, also: set[str] = frozenset()) -> Any:
    """`tree`, marked as differing wherever `like` differs, so that its gradient stays local:
    marked before differentiating, the sum over devices is ours to place, once per update;
    otherwise autodiff would put one in every micro-batch."""
    axes = varying(*like) | also

    def mark(w):
        new = tuple(sorted(axes - varying(w)))
        return lax.pcast(w, new, to="varying") if new else w

    return jax.tree.map(mark, tree)


def on_one_device(fn: Callable) -> Callable:
    """fn as one device computes it: traced outside the mesh, where no value has a type that says over
    which axes it differs, and where no function of this file sends anything. In a shard_map with
    check_vma=False each device computes so on what it has, whatever loops, sorts and gradients are in fn."""
    def call(*args):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            traced, made = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*like)
        # What it closes over may lie on a mesh (the weights that an earlier `fit` gave back): its values are meant.
        traced = traced.replace(consts=[np.asarray(c) if isinstance(c, jax.Array) and c.is_fully_addressable else c
                                        for c in traced.consts])
        return jax.tree.unflatten(jax.tree.structure(made), jaxpr_as_fun(traced)(*jax.tree.leaves(args)))

    return call


def once(tree: Any, axes: set[str]) -> Any:
    """Each leaf, if all devices of an axis computed it alike, on the first of them and 0 on the
    others: a sum over the axis then counts it once."""
    def first(x):
        for axis in sorted(axes - varying(x)):
            x = jnp.where(lax.axis_index(axis) == 0, x, 0)
        return x

    return jax.tree.map(first, tree)


def reduce(tree: Any, specs: Any = None, only: set[str] = set(AXES), parts: Any = None, differ: Any = None) -> Any:
    """Each leaf summed over every axis on which it differs, but for those that split it: there
    the differences are different parts (and a gathered weight's gradient is already summed). Where
    `parts` splits a leaf over data, each device gets its part of the sum alone. `differ` names the axes
    where types do not."""
    def total(x, spec, part):
        axes = (varying(x) if differ is None else differ) & only - _axes_in(spec)
        scattered = axes & _axes_in(part) & {"data"}
        if scattered:       # first: what is left to sum is less
            dim = list(part).index("data")
            x = _keeping_tensor(lambda x: _scattered(x, "data", dim), spec)(x)
        return lax.psum(x, tuple(sorted(axes - scattered))) if axes - scattered else x

    specs = jax.tree.map(lambda _: P(), tree) if specs is None else specs
    return jax.tree.map(total, tree, specs, specs if parts is None else parts)


def over_data(params: Any, specs: Any, mesh: Any) -> Any:
    """The specs of an optimizer's state that is split over data too (ZeRO 1), each leaf along its
    largest dimension left."""
    def more(leaf, spec):
        entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        if "data" not in entries:
            _on_largest(entries, leaf.shape, "data", dict(mesh.shape)["data"])
        return _trimmed(entries)

    return jax.tree.map(more, params, specs)


def along_time(batch: dict[str, jax.Array], mesh: Any) -> tuple[dict, dict]:
    """A batch as `seq` splits it, and how: the time of what has as much of it as the tokens (but for a
    source, which is another sequence), in zigzag order, with the places that the tokens had. Its devices
    have it whole: nothing is sent."""
    n = dict(mesh.shape)["seq"]
    if n == 1:
        return batch, {k: P(None) for k in batch}
    if "tokens" not in batch:
        raise Refused(f"mesh axis seq={n}: a batch of this task has no 'tokens' [B, T] whose time could "
                      f"be split")
    B, T = batch["tokens"].shape
    if T % (2 * n):
        raise Refused(f"mesh axis seq={n}: {T} tokens do not divide into {2 * n} parts, an early and a "
                      f"late one for each device")
    place = jnp.broadcast_to(jnp.arange(T), (B, T))
    batch, order = {"positions": place, **batch, "places": place}, zigzag(T, n)
    timed = {k for k, x in batch.items() if x.shape[1:2] == (T,) and not k.startswith("source")}
    return ({k: x[:, order] if k in timed else x for k, x in batch.items()},
            {k: P(None, "seq") if k in timed else P(None) for k in batch})


def agree(tree: Any) -> Any:
    """Each leaf, which every device has computed for itself, as the one value that it is: weights
    that were gathered are equal everywhere, but their type does not say so."""
    return jax.tree.map(lambda x: lax.pmean(x, tuple(sorted(varying(x)))) if varying(x) else x,
                        tree)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """What this program asks of XLA beyond the user's XLA_FLAGS, in one place. (Nothing of what it overlaps: a program for
    H100s is the same with xla_gpu_enable_latency_hiding_scheduler as without, each gather with work beside it.)"""
    if platform(mesh) == "cpu":
        # This pass aborts the process on a bfloat16 psum inside a shard_map that leaves an axis
        # to the compiler ("Invalid binary instruction opcode copy", jax 0.10.2 and 0.12.0.1).
        options: dict[str, Any] = {"xla_disable_hlo_passes": "all-reduce-promotion"}
        level = "xla_backend_optimization_level"
        if level not in os.environ.get("XLA_FLAGS", "") and not jax.config.read("jax_disable_most_optimizations"):
            options[level] = 1      # a quarter less to compile (of new weights two thirds), and steps as fast
        return options
    return {}


# -------------------------------------------------------------------------------------------
# 5. What a compiled program really sends, read off its text.

class Collective(NamedTuple):
    """One kind of collective over one axis, in one run of a program."""
    kind: str       # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axis: str       # of the mesh; several are joined by +
    count: int      # how often it runs, loops multiplied out
    bytes: int      # that a device sends in it, all runs together, on the shortest ring


_KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute ragged-all-to-all".split()
_OPERATION = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\((.*?)\)(?:, |$)")
_WIDTH = {"pred": 8, "c64": 64, "c128": 128, "token": 0}


def collectives(compiled: Any) -> list[Collective]:
    """Every collective of a compiled program (a jax.stages.Compiled), by kind and mesh axis. Branches
    count as if they were taken each time: a pipeline's idle ticks are in it."""
    mesh = mesh_of(compiled.input_shardings)
    if mesh is None:
        return []
    found: dict[tuple[str, str], list[float]] = {}
    for line, times, part in _runs(compiled.as_text()):
        # On TPU one that runs beside other work stands in every piece of it: counted where it starts.
        if (m := _OPERATION.search(line)) and ("chain_id=" not in line
                                               or any("AsyncCollectiveStart" in o for o in part)):
            kind, axis, sent = _sent(m, line, mesh)
            total = found.setdefault((kind, axis), [0, 0])
            total[0], total[1] = total[0] + times, total[1] + times * sent
    return [Collective(kind, axis, round(n), round(b)) for (kind, axis), (n, b)
            in sorted(found.items())]


def arithmetic(compiled: Any, ragged: float = 1.0) -> float:
    """Operations of a compiled program's products and convolutions on one device, loops multiplied out
    (the compiler's own count takes a loop's body once): 2 for each product of two numbers. Branches count
    as if they were taken each time. Ragged products, a TPU's kernels and our loops of blocks, pass over the rows
    that are in no group: `ragged` is the share that is in one. Causal attention may be a kernel, too."""
    total, shapes, of = 0.0, {}, None
    for line, times, part in _runs(compiled.as_text(), ragged):
        if part is not of:
            shapes, of = {m[1]: [int(x) for x in m[2].split(",") if x] for o in part
                          if (m := re.match(r" *(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]", o))}, part
        if "tpu_custom_call" in line and "ragged_dot_tiling" in line:
            # Of its two matrices, and what it makes, one has groups: each dimension of the product is in two.
            made, *_, left, right = re.findall(r"\w+\[([\d,]+)\]", line.split(" custom-call(")[0] + line.split(
                "operand_layout_constraints=")[1].split("frontend_attributes")[0])
            sizes = [int(x) for matrix in (made, left, right) for x in matrix.split(",")[-2:]]
            total += times * 2 * ragged * math.isqrt(math.prod(sizes))
            continue
        if 'custom_call_target="__cudnn$fmha' in line:
            # Of queries [B, T, H, N] and keys [B, S, K, N]: two products forward, five backward, causal ones of half.
            (b, t, h, n), (_, s, *_) = (tuple(map(int, shape.split(","))) for shape in re.findall(
                r"\w+\[([\d,]+)\]", line.split("operand_layout_constraints=")[1])[:2])
            total += times * (5 if "Backward" in line else 2) * b * t * s * h * n * (1 if '"CAUSAL"' in line else 2)
            continue
        if "tpu_custom_call" in line and (m := re.search(r"%splash_mha_(fwd|dq|dkv)", line)):
            # Two products forward; backward three and four, of which two are made in both kernels. Of n x n blocks
            # [1, n, n] those up to the diagonal; queries are [B H, T, N].
            of = line.split("operand_layout_constraints=")[1]
            n, (h, t, width) = int(re.search(r"(\d+)\]", of)[1]), map(int, re.search(r"bf16\[([\d,]+)", of)[1].split(","))
            total += times * {"fwd": 2, "dq": 3, "dkv": 4}[m[1]] * h * t * t * width * (n + 1) / n
            continue
        if not (m := re.match(r".* = \w+\[([\d,]*)\]\S* (dot|convolution)\((.*?)\)(.*)", line)):
            continue
        made = [int(x) for x in m[1].split(",") if x]
        left, right = (shapes[name] for name in re.findall(r"%?([\w.\-]+)(?:,|$)", re.sub(
            r"\w+\[[^\]]*\]\S* |/\*.*?\*/", "", m[3])))
        if m[2] == "dot":
            dims = re.search(r"lhs_contracting_dims={([\d,]*)}", m[4])[1]
            total += times * 2 * math.prod(made) * math.prod(left[int(d)] for d in dims.split(",") if d)
        else:
            total += times * 2 * _taps(made, left, right, m[4])
    return total


def _taps(made: list[int], image: list[int], kernel: list[int], text: str) -> int:
    """How many products a convolution makes: those with padding, or between the numbers of a dilated
    side, are none. (TPU programs write batched products so.)"""
    ins, weights, outs = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", text).groups()
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", "".join(re.findall(r"window={(.*?)}", text))))
    total = made[outs.index("b")] * made[outs.index("f")] * kernel[weights.index("i")]
    for k, label in enumerate(sorted(set(outs) - {"b", "f"})):
        pick = lambda name, default: int(window.get(name, "x".join([default] * 9)).split("x")[k])  # noqa: E731
        low = int(window.get("pad", "x".join(["0_0"] * 9)).split("x")[k].split("_")[0])
        size, stride, wide, spread = (kernel[weights.index(label)], pick("stride", "1"),
                                      pick("lhs_dilate", "1"), pick("rhs_dilate", "1"))
        at = np.arange(made[outs.index(label)])[:, None] * stride + np.arange(size) * spread - low
        total *= int(((at >= 0) & (at % wide == 0) & (at // wide < image[ins.index(label)])).sum())
    return total


def _runs(text: str, ragged: float = 1) -> Any:
    """Each line of a compiled program, how often it runs (what a ragged product may skip: by that share), and the
    lines of its computation."""
    parts, entry = _computations(text)

    def visit(name: str, times: int) -> Any:
        for line in parts.get(name, ()):
            yield line, times, parts[name]
            inside = times
            if " while(" in line:
                trips = (re.search(r'known_trip_count\D*(\d+)', line) or _bound(
                    parts[re.search(r"condition=%?([\w.\-]+)", line)[1]]))
                inside = times * int(trips[1]) if trips else times
            if " conditional(" in line and "/ragged/" in line:
                inside = times * ragged
            for group in re.findall(r"(?:body|condition|calls|branch_computations|"
                                    r"true_computation|false_computation|to_apply)="
                                    r"({[^}]*}|%?[\w.\-]+)", line):
                for callee in re.findall(r"[\w.\-]+", group):
                    yield from visit(callee, inside)

    return visit(entry, 1)


def _bound(condition: list[str]) -> Any:
    """Of a loop that counts from 0 until it is no longer less than a constant: the constant."""
    if any("direction=LT" in line for line in condition):
        return next((m for line in condition if (m := re.search(r" = s32\[\]\S* constant\((\d+)\)", line))), None)
    return None


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation of an HLO text, and the name of the first to run."""
    parts: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if m := re.match(r"(ENTRY )?%?([\w.\-]+) .*{$", line):
            lines = parts[m[2]] = []
            entry = m[2] if m[1] else entry
        else:
            lines.append(line)
    return parts, entry


def _sent(found: re.Match, line: str, mesh: Mesh) -> tuple[str, str, float]:
    """Kind, axis and the bytes that a device sends in one run of the collective on this line."""
    result, kind, start, operands = found.groups()
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) * _bits(kind_of) / 8
             for kind_of, dims in re.findall(r"(\w+)\[([\d,]*)\]", result)]
    if start and kind != "all-reduce":      # (operands, results, ...)
        k = operands.count("%")
        sizes = sizes[k:2 * k]
    size = sum(sizes)
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs={(.*?)}}?(?:,|$)", line)[1]
        groups = {frozenset(map(int, p)) for p in re.findall(r"(\d+),(\d+)", pairs)}
        return kind, _differ(groups, mesh), size
    axis, n = _axis_of(line, mesh)
    share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}.get(kind, (n - 1) / n)
    return kind, axis, size * share


def _bits(name: str) -> int:
    digits = re.search(r"\d+", name)
    return _WIDTH.get(name, int(digits[0]) if digits else 0)


def _places(mesh: Mesh) -> list[tuple[int, ...]]:
    """The coordinates of each partition of the program: it counts the mesh's devices in order."""
    shape = mesh.devices.shape
    return [tuple(i // math.prod(shape[d + 1:]) % shape[d] for d in range(len(shape)))
            for i in range(mesh.size)]


def _differ(groups: Any, mesh: Mesh) -> str:
    """The axes along which the members of a group differ, as one name."""
    places = _places(mesh)
    axes = {d for g in groups for i in g for d in range(len(AXES))
            if places[i][d] != places[min(g)][d]}
    return "+".join(mesh.axis_names[d] for d in sorted(axes)) or "none"


def _axis_of(line: str, mesh: Mesh) -> tuple[str, int]:
    """The axes of a collective and how many devices take part. XLA writes the groups in three
    ways: {{0,1},{2,3}}, [2,2]<=[4] (a reshaped and perhaps transposed count), and, on newer
    versions, by the names of a mesh."""
    if m := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        groups = _count(m[2], m[3]).reshape([int(x) for x in m[1].split(",")])
    elif m := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\]"
                        r"(?:T\(([\d,]+)\))?\))? {(.*?)}", line):
        named = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", m[1])}
        ids = _count(m[2] or str(math.prod(named.values())), m[3]).reshape(list(named.values()))
        ours = [list(named).index(a) for a in re.findall(r"'(\w+)'", m[4])]
        rest = [d for d in range(len(named)) if d not in ours]
        groups = ids.transpose(rest + ours).reshape(-1, math.prod(ids.shape[d] for d in ours))
    elif m := re.search(r"replica_groups={(.*?)}(?:,|$)", line + ","):
        inside = re.search(r"replica_groups={({.*?})}", line)
        groups = [[int(x) for x in g.split(",")] for g in
                  re.findall(r"{([\d,]+)}", inside[1] if inside else "")]
        groups = groups or [list(range(mesh.size))]
    else:
        groups = [list(range(mesh.size))]
    groups = [[int(i) for i in g] for g in groups]
    return _differ(groups, mesh), len(groups[0])


def _count(shape: str, order: str | None) -> np.ndarray:
    shape = [int(x) for x in shape.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(x) for x in order.split(",")]) if order else ids


def main(argv: Sequence[str] | None = None) -> None:
    """python shard.py --model llama-7b --shards 4: the table, without making the model."""
    import model
    import train
    config = train.parse(argv)
    if config.topology:
        return train.foretell(config)
    mesh = abstract_mesh(mesh_sizes(config.mesh, config.shards))
    if not config.vocab_size:
        config = dataclasses.replace(config, vocab_size=257)
    params = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    train.check_model(config, mesh)
    found = decide(lambda p, b: model.loss(p, b, config), params, model.a_batch(config, 1),
                   mesh=mesh, overrides=train._overrides(config.override))
    print(explain(found, params, mesh, bool(config.zero)))


if __name__ == "__main__":
    import shard       # the module, not the script: there must be one Refused
    import train
    train.run(shard.main)
