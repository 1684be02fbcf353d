"""The collectives and FLOPs of a compiled program, parsed from its text.

The text is HLO: a list of computations, with one operation per line. The program starts at ENTRY.
A line may call other computations; for example, a loop calls its body once per iteration:

    %body.2 (param.1: (s32[], f32[8,32])) -> (s32[], f32[8,32]) {
      %psum.1 = f32[8,32]{1,0} all-reduce(%x.1), replica_groups={{0,1},{2,3}}, to_apply=%add.7
    }
    ENTRY %main.9_spmd (param.0: f32[8,32]) -> f32[8,32] {
      %while.4 = (s32[], f32[8,32]) while(%tuple.3), condition=%less.3, body=%body.2,
          backend_config={"known_trip_count":{"n":"5"}}
    }

Here, each device runs 5 all-reduces. Above each pattern below is an example of what it matches.
"""

import collections
import functools
import math
import re
from typing import Any, Iterable, NamedTuple

import numpy as np

from zigzag.core.mesh import mesh_of


class Collective(NamedTuple):
    """One kind of collective over one mesh axis, totaled over a single run of a program."""
    kind: str       # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axis: str       # the mesh axis, or several joined by +
    count: int      # how often it runs, with loops multiplied out
    bytes: int      # the total bytes sent per device in these runs, on the shortest ring


def collectives(compiled: Any) -> list[Collective]:
    """List the collectives of a compiled program (a jax.stages.Compiled), by kind and mesh axis.
    This assumes that every branch is taken, so it includes a pipeline's idle ticks."""
    mesh = mesh_of(compiled.input_shardings)
    if mesh is None:
        return []
    rows = []
    for line, times, computation in _executed(compiled.as_text()):
        found = _COLLECTIVE.search(line)
        # On TPU, a collective that overlaps with other work appears in every computation of its
        # chain. Count it only in the computation that starts it.
        if found and ("chain_id=" not in line or "AsyncCollectiveStart" in computation):
            rows.append(_row(found, line, mesh, times))
    return add_up(rows)


def add_up(rows: Iterable[tuple[str, str, int, float, float]]) -> list[Collective]:
    """Sum rows into one Collective per kind and axis. A row is (kind, axis, the axis's n devices,
    how often it runs, the bytes of its result per device, or of its operand for a reduce-scatter).
    On the shortest ring, a device sends (n-1)/n of these bytes in an all-gather, a reduce-scatter
    or an all-to-all, twice as much in an all-reduce, and all of them in a collective-permute."""
    counts, sizes = collections.Counter(), collections.Counter()
    for kind, axis, n, count, size in rows:
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
        counts[kind, axis] += count
        sizes[kind, axis] += count * size * share
    return [Collective(*key, round(counts[key]), round(sizes[key])) for key in sorted(counts)]


def arithmetic(compiled: Any, ragged: float = 1.0) -> float:
    """Return the FLOPs per device of a compiled program's matmuls and convolutions: 2 for each
    multiply-add, with loops multiplied out (the compiler's own count includes a loop's body only
    once). Of several branches, count only the one with the most FLOPs. Ragged matmuls, whether
    in a TPU's kernel or our loop over blocks, skip rows outside all groups; `ragged` is the share
    of rows inside groups."""
    return _work(_executed(compiled.as_text(), ragged, one_branch=True), ragged)


def _work(lines, ragged):
    return sum(times * _operations(line, computation, ragged) for line, times, computation in lines)


# -------------------------------------------------------------------------------------------
# Lines, and how often they run

# ENTRY %main.9_spmd (param.0: f32[8,32]) -> f32[8,32] {
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) .*{$", re.M)
# condition=%less.3, body=%body.2    or    branch_computations={%idle.1, %work.2}
_CALLS = re.compile(r"(?:body|condition|calls|branch_computations|true_computation|"
                    r"false_computation|to_apply)=({[^}]*}|%[\w.\-]+)")
_NAME = re.compile(r"%([\w.\-]+)")
# backend_config={"known_trip_count":{"n":"5"}}
_TRIP_COUNT = re.compile(r"known_trip_count\D*(\d+)")
# condition=%less.3
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
# %constant.6 = s32[]{:T(128)} constant(5)
_CONSTANT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
#   %x.1 = f32[8,32]{1,0} multiply(...)    (a tuple has no single shape, so it does not match)
_RESULT = re.compile(r"^ *(?:ROOT )?%([\w.\-]+) = \w+\[([\d,]*)\]", re.M)


@functools.lru_cache(maxsize=64)
def _shapes(computation):
    """Return {name: shape} for the values that this computation defines."""
    return {name: _ints(dims) for name, dims in _RESULT.findall(computation)}


def _executed(text, ragged=1.0, one_branch=False):
    """Yield (line, how often it runs, its computation's text) for each line that runs, either in
    all branches or only in the one with the most FLOPs."""
    _, *parts = _HEADER.split(text)     # for each computation: "ENTRY " or None, its name, its text
    entries, names, texts = parts[::3], parts[1::3], parts[2::3]
    computations = dict(zip(names, texts))

    def visit(name, times):
        for line in computations[name].splitlines():
            yield line, times, computations[name]
            inside = times * _repeats(line, computations, ragged)
            callees = _NAME.findall(" ".join(_CALLS.findall(line)))
            if one_branch and " conditional(" in line:
                callees = [max(callees, key=lambda name: _work(visit(name, 1), ragged))]
            for callee in callees:
                yield from visit(callee, inside)

    return visit(names[entries.index("ENTRY ")], 1)


def _repeats(line, computations, ragged):
    """Return how many times a line runs the computations it calls."""
    if " while(" in line:
        trips, condition = _TRIP_COUNT.search(line), computations[_CONDITION.search(line)[1]]
        if not trips and "direction=LT" in condition:
            # The loop counts up from 0 while the counter is below a constant.
            trips = _CONSTANT.search(condition)
        return int(trips[1]) if trips else 1
    # In a ragged matmul's loop over blocks, a conditional skips the empty blocks.
    return ragged if " conditional(" in line and "/ragged/" in line else 1


def _ints(text):
    return [int(x) for x in text.split(",") if x]


# -------------------------------------------------------------------------------------------
# Bytes of a collective, and its axis

# %all-gather-start = (bf16[8,128], bf16[8,512]) all-gather-start(%x.1), replica_groups=...
_COLLECTIVE = re.compile(r" = (?P<result>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|"
                         r"(?:ragged-)?all-to-all|collective-permute)(?P<start>-start)?"
                         r"\((?P<operands>.*?)\)(?:, |$)")
# f32[8,32]{1,0}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
# replica_groups={{0,1},{2,3}}    or, in a collective-permute, source_target_pairs={{0,4},{4,0}}
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)={({\d.*?})}")
_GROUP = re.compile(r"{([\d,]+)}")
# replica_groups=[2,2]<=[2,2]T(1,0): 0 to 3, reshaped to [2,2], transposed, reshaped to [2,2]
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}
_MESH = re.compile(r"replica_groups=mesh\[(?P<axes>.*?)\](?:, device_ids=\(\[(?P<shape>[\d,]+)\]"
                   r"(?:T\((?P<order>[\d,]+)\))?\))? {(?P<over>.*?)}")


def _row(found, line, mesh, times):
    """Return the collective on this line as a row for add_up."""
    kind, groups = found["kind"], _groups(line, mesh)
    sizes = [math.prod(_ints(dims)) * _bits(name) / 8
             for name, dims in _SHAPE.findall(found["result"])]
    if found["start"] and kind != "all-reduce":     # the result is (operands, results, ...)
        k = found["operands"].count("%")
        sizes = sizes[k:2 * k]
    n = len(groups[0])
    parts = n if kind == "reduce-scatter" else 1        # its result is one n-th of its operand
    return kind, _axes_within(groups, mesh), n, times, sum(sizes) * parts


def _bits(name):
    """Return a type's width in bits (bf16, s32, f8e4m3fn, pred), or 0 if it has none (token)."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else {"pred": 8}.get(name, 0)


def _groups(line, mesh):
    """Return a collective's device groups, in any of the forms that XLA writes. If XLA writes none,
    all devices form a single group."""
    if found := _IOTA.search(line):
        return _count(found[2], found[3]).reshape(_ints(found[1]))
    if found := _MESH.search(line):
        names = re.findall(r"'(\w+)'", found["axes"])
        shape = ",".join(re.findall(r"=(\d+)", found["axes"]))
        over = [names.index(name) for name in re.findall(r"'(\w+)'", found["over"])]
        ids = _count(found["shape"] or shape, found["order"]).reshape(_ints(shape))
        size = math.prod(ids.shape[d] for d in over)
        return np.moveaxis(ids, over, range(-len(over), 0)).reshape(-1, size)
    if found := _LISTED.search(line):
        return [_ints(group) for group in _GROUP.findall(found[1])]
    return [range(mesh.size)]


def _count(shape, order):
    """Return the numbers 0, 1, 2, ... reshaped to `shape` and transposed to `order`."""
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _axes_within(groups, mesh):
    """Return the axes along which members of a group differ, joined by +. A program numbers the
    mesh's devices in order."""
    differ = {d for group in groups
              for d, places in enumerate(np.unravel_index(group, mesh.axis_sizes))
              if len(set(places)) > 1}
    return "+".join(mesh.axis_names[d] for d in sorted(differ)) or "none"


# -------------------------------------------------------------------------------------------
# The FLOPs of a matmul

# %dot.1 = bf16[384,4096]{0,1} dot(%a.1, %b.2), lhs_contracting_dims={0}, rhs_contracting_dims={1}
# %convolution.1 = f32[512,4]{1,0} convolution(%a.1, %b.2), window={size=4 pad=3_3}, dim_labels=...
_PRODUCT = re.compile(r".* = \w+\[(?P<shape>[\d,]*)\]\S* (?P<kind>dot|convolution)"
                      r"\((?P<operands>.*?)\)(?P<options>.*)")
_CONTRACTED = re.compile(r"lhs_contracting_dims={([\d,]*)}")
# dim_labels=b01f_01io->b01f: the dimensions of the image, the kernel and the result
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# window={size=3x3 stride=2x2 pad=0_0x1_1 lhs_dilate=16x1}
_WINDOW = re.compile(r"window={(.*?)}")
_SETTING = re.compile(r"(\w+)=([\dx_\-]+)")
# %splash_mha_fwd_residuals.10 = (...) custom-call(...), custom_call_target="tpu_custom_call", ...
_SPLASH = re.compile(r"%splash_mha_(fwd|dq|dkv)")
# Matmuls per block of queries and keys in each splash attention kernel: two forward, then three and
# four backward. Two of the matmuls are the same in both backward kernels.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# backend_config={..."sliding_window_length":256...}
_SLIDING = re.compile(r'"sliding_window_length":\s*"?(\d+)')
# operand_layout_constraints={bf16[8,512,1,128]{3,2,1,0}, bf16[8,512,1,128]{3,2,1,0}}, metadata=...
_INPUTS = re.compile(r"operand_layout_constraints={(.*?)}(?:, \w+=|$)")


def _operations(line, computation, ragged):
    """Return the FLOPs of a line with a matmul or a kernel, or 0 for any other line."""
    if 'custom_call_target="__cudnn$fmha' in line:
        return _cudnn_operations(line)
    if "tpu_custom_call" in line:
        if "ragged_dot_tiling" in line:
            return 2 * ragged * _ragged_products(line)
        if found := _SPLASH.search(line):
            return _splash_operations(found[1], line)
    if not (found := _PRODUCT.match(line)):
        return 0
    left, right = (_shapes(computation)[name] for name in _NAME.findall(found["operands"]))
    result = _ints(found["shape"])
    if found["kind"] == "convolution":
        return 2 * _convolution_products(result, left, right, found["options"])
    contracted = _ints(_CONTRACTED.search(found["options"])[1])
    return 2 * math.prod(result) * math.prod(left[d] for d in contracted)


def _inputs(line):
    """List (type, shape) for each operand of a kernel."""
    return [(name, _ints(dims)) for name, dims in _SHAPE.findall(_INPUTS.search(line)[1])]


def _ragged_products(line):
    """Return the number of scalar multiplications in a TPU kernel for a ragged matmul. Among the
    two matrices and the result, one has a groups dimension; each other dimension is in two."""
    *_, (_, left), (_, right) = _inputs(line)
    result = _ints(_SHAPE.search(line)[2])
    return math.isqrt(math.prod(math.prod(shape[-2:]) for shape in (result, left, right)))


def _cudnn_operations(line):
    """Return the FLOPs of cuDNN's attention for queries [B, T, H, N] and keys [B, S, K, N]: two
    matmuls forward, five backward, and half of that if causal. A window of W leaves W T - W W / 2
    of the T T scores."""
    (_, (B, T, H, N)), (_, (_, S, *_)), *_ = _inputs(line)
    products, window = 5 if "Backward" in line else 2, _SLIDING.search(line)
    met = T * S / 2 if '"CAUSAL"' in line else T * S
    if window and 0 < int(window[1]) < T:
        met = int(window[1]) * (T - int(window[1]) / 2)
    return products * 2 * B * met * H * N


def _splash_operations(kernel, line):
    """Return the FLOPs of a TPU's attention for queries [B H, T, N] or [B, H, T, N]. There are
    n x n blocks, and a query meets at most m blocks in its row (the first operand is [1, n, m]). If
    the operands include slots (an integer matrix), a query meets no later block."""
    inputs = _inputs(line)
    m, n = sorted(inputs[0][1][1:])
    blocks = n * m - m * (m - 1) / 2 if any(
        name == "s32" and len(shape) == 2 for name, shape in inputs) else n * n
    *rows, T, N = next(shape for name, shape in inputs if name == "bf16")
    return _SPLASH_PRODUCTS[kernel] * 2 * math.prod(rows) * T * T * N * blocks / n**2


def _convolution_products(result, image, kernel, options):
    """Return the number of scalar multiplications in a convolution, excluding those with padding or
    with the zeros that dilation inserts. TPU programs write batched matmuls as convolutions."""
    image, kernel, result = (dict(zip(labels, shape)) for labels, shape in zip(
        _DIM_LABELS.search(options).groups(), (image, kernel, result)))
    window = {name: values.split("x") for name, values in _SETTING.findall(
        "".join(_WINDOW.findall(options)))}
    products = result["b"] * result["f"] * kernel["i"]
    for k, label in enumerate(sorted(result.keys() - {"b", "f"})):
        stride, spacing, step = (int(window[name][k]) if name in window else 1
                                 for name in ("stride", "rhs_dilate", "lhs_dilate"))
        before = int(window["pad"][k].split("_")[0]) if "pad" in window else 0
        at = (np.arange(result[label])[:, None] * stride + np.arange(kernel[label]) * spacing
              - before)
        inside = (at >= 0) & (at % step == 0) & (at // step < image[label])
        products *= int(inside.sum())
    return products
