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
import math
import os
import re
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


class Refused(ValueError):
    """What the user asked for cannot be done. The text says what was given and what would do."""


def nearest(word: str, known: Sequence[str]) -> str:
    """'; did you mean X?' for the known name closest to `word`, or nothing."""
    close = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


# -------------------------------------------------------------------------------------------
# 1. The mesh. Always all six axes, most of size 1, so that there is never a second code path
#    for "no mesh". The last axis is the one whose neighbours are closest: tensor talks most.

AXES = ("data", "fsdp", "pipe", "seq", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")       # the axes that split the rows of a batch
MANUAL = AXES[:-1]                       # our collectives; those of `tensor` are the compiler's
BUILT = ("data", "fsdp", "tensor")       # what the step can use so far


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
    # Auto, because jax.make_mesh otherwise makes Explicit axes, which shard_map cannot leave
    # to the compiler.
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def simulate(count: int) -> None:
    """Let the CPU pretend to be `count` devices, unless XLA_FLAGS already says how many.

    Call it before anything touches a device. Only the CPU backend reads this setting, so with
    an accelerator in the machine it changes nothing."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):     # the devices exist already: make_mesh counts
            jax.config.update("jax_num_cpu_devices", count)


def live(spec: P, mesh: Any) -> P:
    """The spec without the axes of size 1. The one place where they are dropped: the compiler
    fails on them, or sends whole gradients to nobody."""
    sizes = dict(mesh.shape)
    kept = []
    for entry in spec:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        names = tuple(a for a in names if sizes[a] > 1)
        kept.append(names[0] if len(names) == 1 else names or None)
    while kept and kept[-1] is None:
        kept.pop()
    return P(*kept)


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


def _axes_in(spec: P) -> set[str]:
    return {a for entry in spec for a in ((entry,) if isinstance(entry, str) else entry or ())}


# -------------------------------------------------------------------------------------------
# 2. The rule. Reads no names: it walks the function's jaxpr.
#
#    Two dimensions that a computation ties together (added, multiplied, copied, contracted
#    with each other) must be split together or not at all: they are one *thread*. A residual
#    stream is one long thread through the whole network. The hidden dimension of an MLP is a
#    short one: out of w_gate and w_up, into w_down. So are the heads, and the vocabulary.
#    Splitting a thread has a price, the bytes that must be reduced wherever it is summed over,
#    forward and backward; one that is cut on the way (through a head, by a slice) is not split.
#    The rule splits the threads that cost least per byte of weights, never two in one weight.
#    Columns and rows alternate by themselves: a weight's two dimensions are different threads.

@dataclasses.dataclass(frozen=True)
class Decision:
    """Where one leaf lives, and why."""
    spec: P
    reason: str
    matrix: bool        # met an activation in a product or was indexed; else a scale or a bias
    stacked: bool       # the leading dimension counts layers


def infer_specs(fn: Callable, params: Any, *args: Any, mesh: Any,
                overrides: Sequence[tuple[str, P]] = ()) -> Any:
    """A PartitionSpec for each leaf of `params`, derived from how `fn(params, *args)` uses it.

    `params` and `args` may be arrays or jax.ShapeDtypeStruct; nothing runs on a device.
    `overrides`, a list of (path regex, PartitionSpec), win over the rule."""
    return jax.tree.map(lambda d: d.spec, decide(fn, params, *args, mesh=mesh,
                                                 overrides=overrides))


def decide(fn: Callable, params: Any, *args: Any, mesh: Any,
           overrides: Sequence[tuple[str, P]] = ()) -> Any:
    """As infer_specs, with the reason beside each spec."""
    sizes = dict(mesh.shape)
    n = sizes["tensor"]
    paths, leaves, tree = flatten(params)
    walk = _Walk(n, leaves)
    jaxpr = jax.make_jaxpr(fn)(params, *args)
    flat_args = [_Value(walk.fresh(v.aval.shape)) for v in jaxpr.jaxpr.invars[len(leaves):]]
    walk.run(jaxpr.jaxpr, [_Value(walk.fresh(jnp.shape(c))) for c in jaxpr.consts],
             [_Value(ids, leaf) for leaf, ids in enumerate(walk.leaf_ids)] + flat_args)
    chosen = walk.choose() if n > 1 else {}
    decisions = [_decide_leaf(walk, leaf, chosen.get(leaf), sizes) for leaf in range(len(leaves))]
    for pattern, spec in overrides:
        hits = [i for i, path in enumerate(paths) if re.search(pattern, path)]
        if not hits:
            raise Refused(f"override {pattern!r} matches no parameter"
                          + nearest(pattern, paths))
        for i in hits:
            _check_spec(paths[i], leaves[i].shape, spec, sizes)
            decisions[i] = dataclasses.replace(decisions[i], spec=live(spec, mesh),
                                               reason=f"override {pattern!r}")
    return jax.tree.unflatten(tree, decisions)


def flatten(params: Any) -> tuple[list[str], list[Any], Any]:
    pairs, tree = jax.tree_util.tree_flatten_with_path(params)
    return ([jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in pairs],
            [leaf for _, leaf in pairs], tree)


def _check_spec(path: str, shape: tuple[int, ...], spec: P, sizes: dict[str, int]) -> None:
    if len(spec) > len(shape):
        raise Refused(f"{path}: {spec} has {len(spec)} dimensions, the weight has {len(shape)}")
    for dim, entry in zip(shape, spec):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        for name in names:
            if name not in AXES:
                raise Refused(f"{path}: {spec} names the axis {name!r}; the axes are "
                              f"{', '.join(AXES)}" + nearest(name, AXES))
        if dim % math.prod(sizes[a] for a in names):
            raise Refused(f"{path}: {spec} splits {dim} into "
                          f"{math.prod(sizes[a] for a in names)}, which does not divide")


# Below this many elements a weight stays whole on every device of the fsdp axis: gathering it
# would cost more in latency than the memory is worth.
FSDP_MINIMUM = 2**12


def _decide_leaf(walk: "_Walk", leaf: int, choice: tuple[int, str] | None,
                 sizes: dict[str, int]) -> Decision:
    shape, roles = walk.leaves[leaf].shape, walk.roles[leaf]
    entries: list[Any] = [None] * len(shape)
    stacked = "stacked" in roles.get(0, ())
    matrix = any(r in ("free", "contracted", "indexed") for rs in roles.values() for r in rs)
    if choice:
        dim, reason = choice
        entries[dim] = "tensor"
    elif sizes["tensor"] > 1:
        reason = walk.why_whole(leaf, matrix)
    else:
        reason = "the tensor axis has size 1"
    if stacked:
        entries[0] = "pipe"
    free = [d for d, size in enumerate(shape) if entries[d] is None and size % sizes["fsdp"] == 0]
    if sizes["fsdp"] > 1 and free and math.prod(shape) >= FSDP_MINIMUM:
        entries[max(free, key=lambda d: shape[d])] = "fsdp"
    # `live` needs only sizes; a mesh and a dict both serve.
    spec = live(P(*entries), type("Sizes", (), {"shape": sizes}))
    return Decision(spec, reason, matrix, stacked)


@dataclasses.dataclass
class _Value:
    """One value of the computation: the thread of each dimension, and the leaf that it is a
    mere view of (a cast, a transpose), if any. Whatever depends on a leaf has a gradient."""
    ids: list[int]
    leaf: int | None = None


ELEMENTWISE = set("""add add_any sub mul div rem max min pow integer_pow neg sign abs floor ceil
round exp exp2 expm1 log log1p sqrt rsqrt cbrt square sin cos tan tanh asin acos atan atan2 sinh
cosh asinh acosh atanh logistic erf erfc erf_inv lgamma digamma is_finite not and or xor eq ne lt
le gt ge nextafter select_n clamp convert_element_type reduce_precision stop_gradient copy copy_p
real imag complex conj shift_left shift_right_logical shift_right_arithmetic population_count
sharding_constraint pvary pcast optimization_barrier name random_wrap""".split())
REDUCE = set("""reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin
reduce_xor""".split())
CALLS = set("""jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call
custom_vjp_call custom_vjp_call_jaxpr custom_lin shard_map""".split())


class _Walk:
    """Follows the dimensions of the parameters through a jaxpr (union-find over dimensions)."""

    def __init__(self, shards: int, leaves: list[Any]):
        self.shards, self.leaves = shards, leaves
        self.parent: list[int] = []
        self.prices: list[tuple[int, float, Any]] = []   # thread, bytes, what it is (counted once)
        self.roles: list[dict[int, set[str]]] = [{} for _ in leaves]
        self.cuts: list[int] = []                         # threads that end before they are summed
        self.repeat = 1                                   # how often the present scan body runs
        self.leaf_ids = [self.fresh(leaf.shape) for leaf in leaves]

    # -- threads
    def fresh(self, shape: Sequence[int]) -> list[int]:
        first = len(self.parent)
        self.parent.extend(range(first, first + len(shape)))
        return list(range(first, first + len(shape)))

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def tie(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)

    def price(self, thread: int, aval: Any, key: Any = None) -> None:
        size = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4) * self.repeat
        self.prices.append((thread, float(size), key if key is not None else len(self.prices)))

    def cut(self, thread: int) -> None:
        """A split would have to be gathered again here: through a head, through a slice."""
        self.cuts.append(thread)

    def role(self, value: _Value, dim: int, role: str) -> None:
        """What became of a dimension of a leaf, seen through its views."""
        if value.leaf is not None:
            for d, i in enumerate(self.leaf_ids[value.leaf]):
                if i == value.ids[dim] or self.find(i) == self.find(value.ids[dim]):
                    self.roles[value.leaf].setdefault(d, set()).add(role)

    # -- the walk
    def run(self, jaxpr: Any, consts: list[_Value], args: list[_Value]) -> list[_Value]:
        env: dict[Any, _Value] = {}

        def read(v: Any) -> _Value:
            return _Value(self.fresh(v.aval.shape)) if hasattr(v, "val") else env[v]

        env.update(zip(jaxpr.constvars, consts))
        env.update(zip(jaxpr.invars, args))
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.step(eqn, [read(v) for v in eqn.invars])))
        return [read(v) for v in jaxpr.outvars]

    def step(self, eqn: Any, ins: list[_Value]) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        outs = [_Value(self.fresh(v.aval.shape)) for v in eqn.outvars]
        out, out_shape = outs[0] if outs else None, eqn.outvars[0].aval.shape if outs else ()
        shapes = [v.aval.shape for v in eqn.invars]

        if name in ELEMENTWISE:
            for o in outs:
                for x in ins:
                    if len(x.ids) == len(o.ids):
                        for a, b in zip(x.ids, o.ids):
                            self.tie(a, b)
                # Cast, or times a number: still the weight.
                arrays = [x for x in ins if x.ids]
                o.leaf = arrays[0].leaf if len(arrays) == 1 else None
        elif name == "dot_general":
            self.product(eqn, ins, out)
        elif name in REDUCE:
            axes = params["axes"]
            for o in outs:
                for i, b in zip([i for d, i in enumerate(ins[0].ids) if d not in axes], o.ids):
                    self.tie(i, b)
            for d in axes:
                self.price(ins[0].ids[d], eqn.outvars[0].aval)
        elif name == "broadcast_in_dim":
            for d, o in enumerate(params["broadcast_dimensions"]):
                if shapes[0][d] == out_shape[o]:
                    self.tie(ins[0].ids[d], out.ids[o])
            out.leaf = ins[0].leaf
        elif name == "transpose":
            for d, i in enumerate(params["permutation"]):
                self.tie(ins[0].ids[i], out.ids[d])
            out.leaf = ins[0].leaf
        elif name == "reshape":
            self.reshape(eqn, ins[0], out)
            out.leaf = ins[0].leaf
        elif name == "squeeze":
            kept = [d for d in range(len(shapes[0]))
                    if d not in [k % len(shapes[0]) for k in params["dimensions"]]]
            for o, d in zip(out.ids, kept):
                self.tie(ins[0].ids[d], o)
            out.leaf = ins[0].leaf
        elif name == "gather":
            self.gather(eqn, ins, out)
        elif name == "iota":
            pass
        elif name == "scan":
            return self.scan(eqn, ins)
        elif name in CALLS and (inner := _inner(params)) is not None:
            jaxpr, consts = inner
            return self.run(jaxpr, [_Value(self.fresh(jnp.shape(c))) for c in consts],
                            ins[len(ins) - len(jaxpr.invars):])
        elif name in ("slice", "dynamic_slice", "pad", "rev", "cumsum", "cumlogsumexp", "cummax",
                      "sort", "concatenate", "dynamic_update_slice", "split"):
            # The dimensions that are cut, joined, turned or summed along would have to be whole,
            # and come out anew (splitting those is free, but their gradients must be gathered);
            # the others pass through.
            along = {params.get("dimension", params.get("axis"))} - {None}
            along |= set(params.get("dimensions", ())) if name == "rev" else set()
            for o, v in zip(outs, eqn.outvars):
                for x, shape in zip(ins, shapes):
                    if len(shape) != len(v.aval.shape):
                        continue
                    for d, (a, b) in enumerate(zip(shape, v.aval.shape)):
                        if a == b and d not in along:
                            self.tie(x.ids[d], o.ids[d])
                        elif a > 1:
                            self.cut(x.ids[d])
                            self.price(o.ids[d], v.aval)
        else:
            # An honest stop: nothing is known, so whatever comes in must come in whole.
            for x in ins:
                for i in x.ids:
                    self.cut(i)
        return outs

    def product(self, eqn: Any, ins: list[_Value], out: _Value) -> None:
        (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
        left, right = ins
        lfree = [d for d in range(len(left.ids)) if d not in lc and d not in lb]
        rfree = [d for d in range(len(right.ids)) if d not in rc and d not in rb]
        for o, i in zip(out.ids, [left.ids[d] for d in lb] + [left.ids[d] for d in lfree]
                        + [right.ids[d] for d in rfree]):
            self.tie(o, i)
        for a, b in zip(lb, rb):
            self.tie(left.ids[a], right.ids[b])
        for a, b in zip(lc, rc):
            self.tie(left.ids[a], right.ids[b])
            # Split and summed over: each device has a partial sum of the whole product.
            self.price(left.ids[a], eqn.outvars[0].aval)
        # Backward, the gradient of one side sums over the other side's own dimensions. The
        # sides that share an input (q, k and v; gate and up) share its reduction: counted once.
        for this, var, other, free in ((left, eqn.invars[0], right, rfree),
                                       (right, eqn.invars[1], left, lfree)):
            if this.leaf is None:
                for d in free:
                    self.price(other.ids[d], var.aval, (var, "gradient"))
        for value, contracted, batch, free in ((left, lc, lb, lfree), (right, rc, rb, rfree)):
            for dims, role in ((contracted, "contracted"), (free, "free"), (batch, "batch")):
                for d in dims:
                    self.role(value, d, role)

    def gather(self, eqn: Any, ins: list[_Value], out: _Value) -> None:
        """A lookup. Rows that are split: each device finds what it has, and one reduction adds
        the findings. What is copied whole passes through; batching dimensions stay."""
        table, index = ins[0], ins[1]
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        shape = eqn.invars[0].aval.shape
        gone = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
        window = [d for d in range(len(shape)) if d not in gone]
        for o, d in zip(numbers.offset_dims, window):
            if sizes[d] == shape[d]:
                self.tie(table.ids[d], out.ids[o])
            else:
                self.cut(table.ids[d])
        batch = [o for o in range(len(out.ids)) if o not in numbers.offset_dims]
        for o, i in zip(batch, index.ids):
            self.tie(out.ids[o], i)
        for a, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims):
            self.tie(table.ids[a], index.ids[b])
        for d in numbers.collapsed_slice_dims:
            self.price(table.ids[d], eqn.outvars[0].aval)
            self.role(table, d, "indexed")

    def reshape(self, eqn: Any, x: _Value, out: _Value) -> None:
        """A split survives a reshape on the outermost dimension of each group that is merged or
        divided, and only where it falls on whole units of it (whole heads)."""
        a, b = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        i = j = 0
        while i < len(a) and j < len(b):
            i0, j0, p, q = i, j, a[i], b[j]
            i, j = i + 1, j + 1
            while p != q:
                if p < q:
                    p, i = p * a[i], i + 1
                else:
                    q, j = q * b[j], j + 1
            for d in [d for d in range(i0, i) if a[d] > 1][1:]:
                self.cut(x.ids[d])
            for d in [d for d in range(j0, j) if b[d] > 1][1:]:
                self.price(out.ids[d], eqn.outvars[0].aval)
            m = next((d for d in range(i0, i) if a[d] > 1), None)
            k = next((d for d in range(j0, j) if b[d] > 1), None)
            if m is not None and k is not None:
                if a[m] == b[k] or (a[m] % self.shards == 0 and b[k] % self.shards == 0):
                    self.tie(x.ids[m], out.ids[k])
                else:
                    self.cut(x.ids[m])
                    self.price(out.ids[k], eqn.invars[0].aval)

    def scan(self, eqn: Any, ins: list[_Value]) -> list[_Value]:
        body, consts = _inner(eqn.params)
        length = eqn.params["length"]
        # What is carried looks the same inside and out; what is scanned over has one dimension
        # more outside. (The numbers of each have other names in every version of jax.)
        nk = sum(o.aval.shape == i.aval.shape for o, i in zip(eqn.outvars, body.outvars))
        nx = sum(len(o.aval.shape) > len(i.aval.shape) for o, i in zip(eqn.invars, body.invars))
        nc = len(ins) - nk - nx
        for x in ins[nc + nk:]:
            self.role(x, 0, "stacked")
        inner = ins[:nc + nk] + [_Value(x.ids[1:], x.leaf) for x in ins[nc + nk:]]
        self.repeat *= length
        outs = self.run(body, [_Value(self.fresh(jnp.shape(c))) for c in consts],
                        [_Value(x.ids, x.leaf if i < nc or i >= nc + nk else None)
                         for i, x in enumerate(inner)])
        self.repeat //= length
        for x, o in zip(ins[nc:nc + nk], outs):
            for a, b in zip(x.ids, o.ids):
                self.tie(a, b)
        return outs[:nk] + [_Value(self.fresh((1,)) + o.ids) for o in outs[nk:]]

    # -- the choice
    def choose(self) -> dict[int, tuple[int, str]]:
        """{leaf: (dimension to split over `tensor`, why)}."""
        threads: dict[int, list[tuple[int, int]]] = {}
        for leaf, ids in enumerate(self.leaf_ids):
            for d, i in enumerate(ids):
                if "stacked" not in self.roles[leaf].get(d, ()):
                    threads.setdefault(self.find(i), []).append((leaf, d))
        cost: dict[int, dict[Any, float]] = {}
        for thread, size, key in self.prices:
            cost.setdefault(self.find(thread), {})[key] = size
        cut = {self.find(i) for i in self.cuts}
        ranked = []
        for thread, places in threads.items():
            whose = [leaf for leaf, _ in places]
            if (thread not in cut and len(set(whose)) == len(whose)
                    and all(self.leaves[leaf].shape[d] % self.shards == 0 for leaf, d in places)
                    and any(self.roles[leaf].get(d) for leaf, d in places)):
                weight = sum(math.prod(self.leaves[leaf].shape) for leaf in whose)
                ranked.append((sum(cost.get(thread, {}).values()) / weight, -weight, thread))
        chosen: dict[int, tuple[int, str]] = {}
        for _, _, thread in sorted(ranked):
            if not any(leaf in chosen for leaf, _ in threads[thread]):
                for leaf, d in threads[thread]:
                    chosen[leaf] = (d, self.why(leaf, d))
        return chosen

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

    def why_whole(self, leaf: int, matrix: bool) -> str:
        if not matrix:
            return "whole: meets a whole activation"
        dims = [s for d, s in enumerate(self.leaves[leaf].shape)
                if "stacked" not in self.roles[leaf].get(d, ())]
        if all(s % self.shards for s in dims):
            return f"whole: none of {dims} divides by {self.shards}"
        return "whole: every split of it would be cut again, through a head or a slice"


def _inner(params: dict[str, Any]) -> Any:
    """The jaxpr that a call-like primitive carries and its constants, whatever jax calls it."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            inner = params[key]
            return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
    return None


def explain(decisions: Any, params: Any, mesh: Any) -> str:
    """The table of what is split where, and why, for a person: of what `decide` gives, or (then
    without reasons) infer_specs."""
    paths, leaves, _ = flatten(params)
    sizes = dict(mesh.shape)
    table, total, whole = [("weight", "shape", "split", "per device", "why")], 0, 0
    for path, leaf, d in zip(paths, leaves, jax.tree.leaves(decisions, is_leaf=_is_spec)):
        d = Decision(d, "as given", True, False) if _is_spec(d) else d
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        here = size // math.prod(sizes[a] for a in _axes_in(d.spec))
        total, whole = total + here, whole + (here if here == size else 0)
        split = [e if isinstance(e, str) else "+".join(e) if e else "-" for e in d.spec]
        split += ["-"] * (len(leaf.shape) - len(split))
        table.append((path, str(list(leaf.shape)).replace(" ", ""), "[" + ",".join(split) + "]",
                      human(here), d.reason))
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    lines = ["  ".join([*(c.rjust(w) if i == 3 else c.ljust(w)
                          for i, (c, w) in enumerate(zip(row, widths))), row[4]]).rstrip()
             for row in table]
    lines.append(f"weights {human(total)} a device, of which {human(whole)} are whole copies; "
                 f"with gradients and AdamW's two moments {human(4 * total)}")
    return "\n".join(lines)


def human(size: float) -> str:
    """Bytes for a person: 1.5 kB, 12 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            break
        size /= 1000
    else:
        unit = "TB"
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def state_specs(state: Any, params: Any, specs: Any) -> Any:
    """Specs for an optimizer's state: what has a weight's path and shape lives with the weight,
    the rest is whole."""
    homes = list(zip(*[flatten(params)[0], jax.tree.leaves(params),
                       jax.tree.leaves(specs, is_leaf=_is_spec)]))

    def place(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator=".")
        fits = [(len(p), s) for p, w, s in homes if w.shape == leaf.shape
                and (path == p or path.endswith("." + p))]
        return max(fits, key=lambda f: f[0])[1] if fits else P()

    return jax.tree_util.tree_map_with_path(place, state)


# -------------------------------------------------------------------------------------------
# 3. What a model calls. Outside a mesh each of these is the plain computation, so a model runs
#    the same with and without one. The mesh is jax's own ambient one: nothing is passed around.

def _ambient() -> tuple[dict[str, int], set[str]]:
    """Sizes of the ambient mesh's axes, and those that are manual where we are."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict(mesh.shape), set(mesh.manual_axes)


def stream(x: jax.Array) -> jax.Array:
    """The residual stream [B, T, D]: whole on every device of the tensor axis."""
    return _place(x, None)


def inner(x: jax.Array, dim: int) -> jax.Array:
    """An activation inside a block, split over tensor along `dim` (heads, hidden, vocabulary)."""
    return _place(x, dim)


def _place(x: jax.Array, dim: int | None) -> jax.Array:
    # The compiler, left alone, sometimes gathers weights where activations should move, so the
    # places are stated, once each.
    sizes, manual = _ambient()
    if sizes.get("tensor", 1) == 1 or (dim is not None and x.shape[dim] % sizes["tensor"]):
        return x
    entries: list[Any] = [None] * x.ndim
    if not manual:          # --step jit, and sampling: the rows are the compiler's to split too
        groups = tuple(a for a in BATCH if sizes[a] > 1)
        if groups and x.shape[0] % math.prod(sizes[a] for a in groups) == 0:
            entries[0] = groups
    if dim is not None:
        entries[dim] = "tensor"
    return lax.with_sharding_constraint(x, P(*entries))


def attend(attention: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
           ) -> jax.Array:
    """attention(q, k, v, mask) with whole heads on each device; q, k, v: [B, T, H, N]. A ring
    over `seq` belongs here."""
    q, k, v = (inner(a, 2) for a in (q, k, v))
    return inner(attention(q, k, v, mask), 2)


def stack(layer: Callable, weights: Any, x: Any, each: Any = None, specs: Any = None,
          remat: str = "none") -> tuple[Any, Any]:
    """x through a stack of identical layers: `x, out = layer(w, x, e)` for the w of each layer,
    and the e of each layer, if there are any. Gives the last x and all the outs, stacked.

    `weights` have the layers as their leading dimension. Under fsdp each layer's weights are
    gathered here, where they are used, and again in the backward pass if they are not kept.
    remat: none keeps what the backward pass needs; selective keeps the products with weights
    and recomputes the rest; full keeps the layer's input alone."""
    layer_specs = None if specs is None else jax.tree.map(
        lambda s: P(*s[1:]), specs, is_leaf=_is_spec)

    def body(x, one):
        w, e = one
        return layer(gather(w, layer_specs), x, e)

    if remat != "none":
        policy = jax.checkpoint_policies
        body = jax.checkpoint(body, prevent_cse=False, policy={
            "selective": policy.dots_with_no_batch_dims_saveable,
            "full": policy.nothing_saveable}[remat])
    return lax.scan(body, x, (weights, each))


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
        # The partitioner would gather `tensor` along with `fsdp` (right values, four times the
        # bytes), so tensor is made manual just around this collective.
        local = P(*[a if a == "tensor" else None for a in spec])
        call = lambda w: lax.all_gather(w, "fsdp", axis=dim, tiled=True)  # noqa: E731
        if sizes["tensor"] == 1:
            return call(w)
        return jax.shard_map(call, in_specs=local, out_specs=local, axis_names={"tensor"})(w)

    return jax.tree.map(whole, weights, specs)


# -------------------------------------------------------------------------------------------
# 4. What the training step calls.

def cast(tree: Any, dtype: str) -> Any:
    """Float leaves in the compute precision; as they are, where none is named."""
    return tree if not dtype else jax.tree.map(
        lambda w: w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w, tree)


def varying(*trees: Any) -> set[str]:
    """The manual axes on which the leaves may differ from device to device."""
    return set().union(*[jax.typeof(x).mat.varying for x in jax.tree.leaves(trees)])


def vary(tree: Any, *like: Any) -> Any:
    """`tree`, marked as differing wherever `like` differs, so that its gradient stays local:
    marked before differentiating, the sum over devices is ours to place, once per update;
    otherwise autodiff would put one in every micro-batch."""
    axes = varying(*like)

    def mark(w):
        new = tuple(sorted(axes - varying(w)))
        return lax.pcast(w, new, to="varying") if new else w

    return jax.tree.map(mark, tree)


def reduce(tree: Any, specs: Any = None) -> Any:
    """Each leaf summed over every axis on which it differs, but for those that split it: there
    the differences are different parts (and a gathered weight's gradient is already summed)."""
    def total(x, spec):
        axes = tuple(sorted(varying(x) - _axes_in(spec)))
        return lax.psum(x, axes) if axes else x

    specs = jax.tree.map(lambda _: P(), tree) if specs is None else specs
    return jax.tree.map(total, tree, specs)


def agree(tree: Any) -> Any:
    """Each leaf, which every device has computed for itself, as the one value that it is: weights
    that were gathered are equal everywhere, but their type does not say so."""
    return jax.tree.map(lambda x: lax.pmean(x, tuple(sorted(varying(x)))) if varying(x) else x,
                        tree)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """What this program asks of XLA beyond the user's XLA_FLAGS, in one place."""
    if mesh.devices.flat[0].platform == "cpu":
        # This pass aborts the process on a bfloat16 psum inside a shard_map that leaves an axis
        # to the compiler ("Invalid binary instruction opcode copy", jax 0.10.2 and 0.12.0.1).
        return {"xla_disable_hlo_passes": "all-reduce-promotion"}
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
    """Every collective of a compiled program (a jax.stages.Compiled), by kind and mesh axis."""
    mesh = mesh_of(compiled.input_shardings)
    if mesh is None:
        return []
    parts, entry = _computations(compiled.as_text())
    found: dict[tuple[str, str], list[float]] = {}

    def visit(name: str, times: int) -> None:
        for line in parts.get(name, ()):
            if m := _OPERATION.search(line):
                kind, axis, sent = _sent(m, line, mesh)
                total = found.setdefault((kind, axis), [0, 0])
                total[0], total[1] = total[0] + times, total[1] + times * sent
            inside = times
            if " while(" in line:
                trips = re.search(r'known_trip_count\D*(\d+)', line)
                inside = times * int(trips[1]) if trips else times
            for group in re.findall(r"(?:body|condition|calls|branch_computations|"
                                    r"true_computation|false_computation|to_apply)="
                                    r"({[^}]*}|%?[\w.\-]+)", line):
                for callee in re.findall(r"[\w.\-]+", group):
                    visit(callee, inside)

    visit(entry, 1)
    return [Collective(kind, axis, round(n), round(b)) for (kind, axis), (n, b)
            in sorted(found.items())]


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
    sizes = {a: 1 for a in AXES} | mesh_sizes(config.mesh, config.shards)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes),
                                     axis_types=(AxisType.Auto,) * len(AXES))
    if not config.vocab_size:
        config = dataclasses.replace(config, vocab_size=257)
    params = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    train.check_model(config, mesh)
    found = decide(lambda p, b: model.loss(p, b, config), params, model.a_batch(config, 1),
                   mesh=mesh)
    print(explain(found, params, mesh))


if __name__ == "__main__":
    import shard       # the module, not the script: there must be one Refused
    import train
    train.run(shard.main)
