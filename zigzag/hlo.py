"""What a compiled program sends and computes, read off its text.

The text is HLO: computations, with one operation on each line. It runs from ENTRY, and a line may
call other computations, a loop's body for example as often as the loop turns:

    %body.2 (param.1: (s32[], f32[8,32])) -> (s32[], f32[8,32]) {
      %psum.1 = f32[8,32]{1,0} all-reduce(%x.1), replica_groups={{0,1},{2,3}}, to_apply=%add.7
    }
    ENTRY %main.9_spmd (param.0: f32[8,32]) -> f32[8,32] {
      %while.4 = (s32[], f32[8,32]) while(%tuple.3), condition=%less.3, body=%body.2,
          backend_config={"known_trip_count":{"n":"5"}}
    }

Here a device sends 5 all-reduces. Each pattern below stands after an example of what it matches.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from typing import Any, Iterable, NamedTuple

import numpy as np

from zigzag.mesh import mesh_of


class Collective(NamedTuple):
    """One kind of collective over one mesh axis, in one run of a program."""
    kind: str       # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axis: str       # of the mesh; several are joined by +
    count: int      # how often it runs, loops multiplied out
    bytes: int      # that a device sends in all these runs, on the shortest ring


def collectives(compiled: Any) -> list[Collective]:
    """Every collective of a compiled program (a jax.stages.Compiled), by kind and mesh axis.
    Branches count as if they were taken each time: a pipeline's idle ticks are in it."""
    mesh = mesh_of(compiled.input_shardings)
    if mesh is None:
        return []
    rows = []
    for line, times, computation in _executed(compiled.as_text()):
        found = _COLLECTIVE.search(line)
        # On TPU a collective that overlaps with other work is in every computation of its chain:
        # it is counted in the one that starts it.
        if found and ("chain_id=" not in line or computation.starts_a_chain):
            kind, axis, size = _sent(found, line, mesh)
            rows.append((kind, axis, times, times * size))
    return add_up(rows)


def add_up(rows: Iterable[tuple[str, str, float, float]]) -> list[Collective]:
    """Rows of (kind, axis, count, bytes), those of one kind and axis together."""
    counts, sizes = collections.Counter(), collections.Counter()
    for kind, axis, count, size in rows:
        counts[kind, axis] += count
        sizes[kind, axis] += size
    return [Collective(*key, round(counts[key]), round(sizes[key])) for key in sorted(counts)]


def arithmetic(compiled: Any, ragged: float = 1.0) -> float:
    """Operations of a compiled program's matrix products and convolutions on one device, loops
    multiplied out (the compiler's own count takes a loop's body once), 2 for each product of two
    numbers. Branches count as if they were taken each time. Ragged products, by a TPU's kernel or
    by our loop of blocks, skip the rows that are in no group: `ragged` is the share that is in
    one."""
    return sum((times * _operations(line, computation, ragged) for line, times, computation
                in _executed(compiled.as_text(), ragged)), 0.0)


# -------------------------------------------------------------------------------------------
# The lines that run, and how often

# ENTRY %main.9_spmd (param.0: f32[8,32]) -> f32[8,32] {
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*{$")
# condition=%less.3, body=%body.2    or    branch_computations={%idle.1, %work.2}
_CALLS = re.compile(r"(?:body|condition|calls|branch_computations|true_computation|"
                    r"false_computation|to_apply)=({[^}]*}|%?[\w.\-]+)")
_NAME = re.compile(r"[\w.\-]+")
# backend_config={"known_trip_count":{"n":"5"}}
_TRIP_COUNT = re.compile(r"known_trip_count\D*(\d+)")
# condition=%less.3
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
# %constant.6 = s32[]{:T(128)} constant(5)
_CONSTANT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
#   %x.1 = f32[8,32]{1,0} multiply(...)    (a tuple has no single shape, and is not matched)
_RESULT = re.compile(r" *(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]")


@dataclasses.dataclass
class _Computation:
    lines: list[str] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def shapes(self):
        """The shape of each value that is made here."""
        return {m[1]: _ints(m[2]) for line in self.lines if (m := _RESULT.match(line))}

    @functools.cached_property
    def starts_a_chain(self):
        return any("AsyncCollectiveStart" in line for line in self.lines)


def _executed(text, ragged=1.0):
    """Each line that runs, how often, and its computation."""
    computations, entry = _parse(text)

    def visit(name, times):
        computation = computations.get(name, _Computation())
        for line in computation.lines:
            yield line, times, computation
            inside = times * _repeats(line, computations, ragged)
            for callees in _CALLS.findall(line):
                for callee in _NAME.findall(callees):
                    yield from visit(callee, inside)

    return visit(entry, 1)


def _parse(text):
    """All computations by name, and the name of the one that runs first."""
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in text.splitlines():
        if found := _HEADER.match(line):
            current = computations[found["name"]] = _Computation()
            entry = found["name"] if found["entry"] else entry
        else:
            current.lines.append(line)
    return computations, entry


def _repeats(line, computations, ragged):
    """How often a line runs what it calls."""
    if " while(" in line:
        trips = (_TRIP_COUNT.search(line)
                 or _loop_bound(computations[_CONDITION.search(line)[1]].lines))
        return int(trips[1]) if trips else 1
    # The loop of blocks of a ragged product skips blocks by a condition.
    return ragged if " conditional(" in line and "/ragged/" in line else 1


def _loop_bound(condition):
    """The constant, of a loop that counts from 0 while it is less than a constant."""
    if not any("direction=LT" in line for line in condition):
        return None
    return next(filter(None, map(_CONSTANT.search, condition)), None)


def _ints(text):
    return [int(x) for x in text.split(",") if x]


# -------------------------------------------------------------------------------------------
# Bytes of a collective, and its axis

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
          "ragged-all-to-all")
# %all-gather-start = (bf16[8,128], bf16[8,512]) all-gather-start(%x.1), replica_groups=...
_COLLECTIVE = re.compile(rf" = (?P<result>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?"
                         r"\((?P<operands>.*?)\)(?:, |$)")
# f32[8,32]{1,0}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
# replica_groups={{0,1},{2,3}}    or, of a collective-permute, source_target_pairs={{0,4},{4,0}}
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)={({.*?})}")
_GROUP = re.compile(r"{([\d,]+)}")
# replica_groups=[2,2]<=[2,2]T(1,0): 0 to 3, reshaped to [2,2], transposed, reshaped to [2,2]
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}
_MESH = re.compile(r"replica_groups=mesh\[(?P<axes>.*?)\](?:, device_ids=\(\[(?P<shape>[\d,]+)\]"
                   r"(?:T\((?P<order>[\d,]+)\))?\))? {(?P<over>.*?)}")


def _sent(found, line, mesh):
    """Kind and axis of the collective on this line, and the bytes that a device sends in it."""
    kind, sizes = found["kind"], [math.prod(_ints(dims)) * _bits(name) / 8
                                  for name, dims in _SHAPE.findall(found["result"])]
    if found["start"] and kind != "all-reduce":      # its result is (operands, results, ...)
        k = found["operands"].count("%")
        sizes = sizes[k:2 * k]
    groups = _groups(line, mesh)
    n = len(groups[0])
    # Of the result's size: a reduce-scatter's is one n-th of what is reduced.
    share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1,
             "collective-permute": 1}.get(kind, (n - 1) / n)
    return kind, _axes_within(groups, mesh), sum(sizes) * share


def _bits(name):
    """The width of a type: bf16, s32, f8e4m3fn, pred, or one that is not sent, as token."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else {"pred": 8}.get(name, 0)


def _groups(line, mesh):
    """The devices that take part in a collective together, in any of the ways in which XLA writes
    them. Where it writes none, all devices are one group."""
    if found := _IOTA.search(line):
        return _count(found[2], found[3]).reshape(_ints(found[1])).tolist()
    if found := _MESH.search(line):
        names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", found["axes"]))
        over = [names.index(name) for name in re.findall(r"'(\w+)'", found["over"])]
        rest = [d for d in range(len(names)) if d not in over]
        ids = _count(found["shape"] or ",".join(sizes), found["order"])
        ids = ids.reshape([int(n) for n in sizes]).transpose(rest + over)
        return ids.reshape(-1, math.prod(ids.shape[len(rest):])).tolist()
    listed = _LISTED.search(line)
    groups = [_ints(group) for group in _GROUP.findall(listed[1])] if listed else []
    return groups or [list(range(mesh.size))]


def _count(shape, order):
    """0, 1, 2, ... in this shape, transposed to this order."""
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _axes_within(groups, mesh):
    """The axes along which the members of a group differ, as one name. (A program numbers the
    mesh's devices in order.)"""
    differ = {d for group in groups
              for d, places in enumerate(np.unravel_index(list(group), mesh.axis_sizes))
              if (places != places[0]).any()}
    return "+".join(mesh.axis_names[d] for d in sorted(differ)) or "none"


# -------------------------------------------------------------------------------------------
# Operations of a product

# %dot.1 = bf16[384,4096]{0,1} dot(%a.1, %b.2), lhs_contracting_dims={0}, rhs_contracting_dims={1}
# %convolution.1 = f32[512,4]{1,0} convolution(%a.1, %b.2), window={size=4 pad=3_3}, dim_labels=...
_PRODUCT = re.compile(r".* = \w+\[(?P<shape>[\d,]*)\]\S* (?P<kind>dot|convolution)"
                      r"\((?P<operands>.*?)\)(?P<options>.*)")
# Before an operand may stand its type, f32[8,32]{1,0}, and its number, /*index=5*/.
_BESIDE_OPERAND = re.compile(r"\w+\[[^\]]*\]\S* |/\*.*?\*/")
_OPERAND = re.compile(r"%?([\w.\-]+)(?:,|$)")
_CONTRACTED = re.compile(r"lhs_contracting_dims={([\d,]*)}")
# dim_labels=b01f_01io->b01f: of the image, of the kernel, of the result
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# window={size=3x3 stride=2x2 pad=0_0x1_1 lhs_dilate=16x1}
_WINDOW = re.compile(r"window={(.*?)}")
_SETTING = re.compile(r"(\w+)=([\dx_\-]+)")
# %splash_mha_fwd_residuals.10 = (...) custom-call(...), custom_call_target="tpu_custom_call", ...
_SPLASH = re.compile(r"%splash_mha_(fwd|dq|dkv)")
# Products of a block of queries and keys in each of splash attention's kernels: two forward;
# backward three and four, of which two are computed in both.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# operand_layout_constraints={bf16[8,512,1,128]{3,2,1,0}, bf16[8,512,1,128]{3,2,1,0}}
_DIMS = re.compile(r"\w+\[([\d,]+)\]")


def _operations(line, computation, ragged):
    """Operations of a line, if it is a product or a kernel that has some."""
    if "tpu_custom_call" in line and "ragged_dot_tiling" in line:
        return 2 * ragged * _ragged_products(line)
    if 'custom_call_target="__cudnn$fmha' in line:
        return _cudnn_operations(line)
    if "tpu_custom_call" in line and (found := _SPLASH.search(line)):
        return _splash_operations(found[1], line)
    if not (found := _PRODUCT.match(line)):
        return 0
    left, right = (computation.shapes[name] for name in _OPERAND.findall(
        _BESIDE_OPERAND.sub("", found["operands"])))
    result = _ints(found["shape"])
    if found["kind"] == "convolution":
        return 2 * _convolution_products(result, left, right, found["options"])
    contracted = _ints(_CONTRACTED.search(found["options"])[1])
    return 2 * math.prod(result) * math.prod(left[d] for d in contracted)


def _inputs(line):
    """The shapes of a kernel's operands."""
    return line.split("operand_layout_constraints=")[1]


def _ragged_products(line):
    """A TPU's kernel for a ragged product. Of its two matrices and its result, one has a
    dimension of groups: each dimension of the product is in two of the three."""
    result, *_, left, right = _DIMS.findall(line.split(" custom-call(")[0]
                                            + _inputs(line).split("frontend_attributes")[0])
    return math.isqrt(math.prod(math.prod(_ints(dims)[-2:]) for dims in (result, left, right)))


def _cudnn_operations(line):
    """cuDNN's attention, of queries [B, T, H, N] and keys [B, S, K, N]: two products forward,
    five backward, half of each where it is causal."""
    (B, T, H, N), (_, S, *_) = map(_ints, _DIMS.findall(_inputs(line))[:2])
    products = 5 if "Backward" in line else 2
    return products * B * T * S * H * N * (1 if '"CAUSAL"' in line else 2)


def _splash_operations(kernel, line):
    """A TPU's attention, of queries [B H, T, N]. Of n x n blocks, which its first operand
    [1, n, n] counts, it computes those up to the diagonal."""
    inputs = _inputs(line)
    n = int(re.search(r"(\d+)\]", inputs)[1])
    BH, T, N = _ints(re.search(r"bf16\[([\d,]+)", inputs)[1])
    return _SPLASH_PRODUCTS[kernel] * BH * T * T * N * (n + 1) / n


def _convolution_products(result, image, kernel, options):
    """How many products of two numbers a convolution has: one with padding, or between the
    numbers of a dilated side, is none. (TPU programs write batched products as convolutions.)"""
    image_dims, kernel_dims, result_dims = _DIM_LABELS.search(options).groups()
    window = dict(_SETTING.findall("".join(_WINDOW.findall(options))))

    def setting(name, dim, default="1"):
        return window[name].split("x")[dim] if name in window else default

    products = (result[result_dims.index("b")] * result[result_dims.index("f")]
                * kernel[kernel_dims.index("i")])
    for k, label in enumerate(sorted(set(result_dims) - {"b", "f"})):
        starts = np.arange(result[result_dims.index(label)])[:, None] * int(setting("stride", k))
        taps = np.arange(kernel[kernel_dims.index(label)]) * int(setting("rhs_dilate", k))
        at = starts + taps - int(setting("pad", k, "0_0").split("_")[0])
        step = int(setting("lhs_dilate", k))
        inside = (at >= 0) & (at % step == 0) & (at // step < image[image_dims.index(label)])
        products *= int(inside.sum())
    return products
