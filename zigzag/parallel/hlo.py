"""The collectives of a compiled program, parsed from its text. forecast/arithmetic.py counts FLOPs.

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
import math
import re
from typing import Any, Callable, Iterable, Iterator, NamedTuple

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
    This assumes that every branch is taken, so it includes a pipeline's idle ticks. It also assumes
    that all tokens reach their experts in the first round of shard.exchange."""
    mesh = mesh_of(compiled.input_shardings)
    return [] if mesh is None else add_up(row for found in executed(compiled.as_text())
                                          for row in sends(*found, mesh))


def sends(line: str, times: int, computation: str, mesh: Any) -> Iterator[tuple]:
    """Yield the rows for add_up of a line that `executed` yields."""
    found = _COLLECTIVE.search(line)
    if sent := _BETWEEN_SLICES.search(line):
        yield "send between slices", "data", 1, times, sizes_of(sent[0])[0]
    # On TPU, a collective that overlaps with other work appears in every computation of its chain.
    # Count it only in the computation that starts it.
    if found and ("chain_id=" not in line or "AsyncCollectiveStart" in computation):
        yield _row(found, line, mesh, times)


def add_up(rows: Iterable[tuple[str, str, int, float, float]]) -> list[Collective]:
    """Sum rows into one Collective per kind and axis. A row is (kind, axis, the number n of devices
    on the axis, how often it runs, the bytes of its result per device, or of its operand for a
    reduce-scatter). On the shortest ring, a device sends (n-1)/n of these bytes in an all-gather, a
    reduce-scatter or an all-to-all, twice as much in an all-reduce, and all of them in a
    collective-permute."""
    counts, sizes = collections.Counter(), collections.Counter()
    for kind, axis, n, count, size in rows:
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1, "send between slices": 1
                 }.get(kind, (n - 1) / n)
        counts[kind, axis] += count
        sizes[kind, axis] += count * size * share
    return [Collective(*key, round(counts[key]), round(sizes[key])) for key in sorted(counts)]


# -------------------------------------------------------------------------------------------
# Lines, and how often they run

# %send.1 = (f32[128,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(...), ... "xla_megascale_runtime"
_BETWEEN_SLICES = re.compile(r" = \(\w+\[.* send\(.*xla_megascale_runtime")
# ENTRY %main.9_spmd (param.0: f32[8,32]) -> f32[8,32] {
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) .*{$", re.M)
# condition=%less.3, body=%body.2    or    branch_computations={%idle.1, %work.2}
_CALLS = re.compile(r"(?:body|condition|calls|branch_computations|true_computation|"
                    r"false_computation|to_apply)=({[^}]*}|%[\w.\-]+)")
NAME = re.compile(r"%([\w.\-]+)")
# backend_config={"known_trip_count":{"n":"5"}}
_TRIP_COUNT = re.compile(r"known_trip_count\D*(\d+)")
# %constant.6 = s32[]{:T(128)} constant(5)
_CONSTANT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")


def executed(text: str, ragged: float = 1.0, work: Callable | None = None
             ) -> Iterator[tuple[str, int, str]]:
    """Yield (line, how often it runs, its computation's text) for each line that runs, in all
    branches or, given work(lines) -> a number, only in the branch with the most work. Conditionals
    of a ragged matmul run `ragged` times."""
    _, *parts = _HEADER.split(text)     # for each computation: "ENTRY " or None, its name, its text
    entries, names, texts = parts[::3], parts[1::3], parts[2::3]
    computations = dict(zip(names, texts))

    def visit(name, times):
        for line in computations[name].splitlines():
            yield line, times, computations[name]
            callees = NAME.findall(" ".join(_CALLS.findall(line)))
            inside = _repeats(line, callees, computations, ragged, times)
            if work and " conditional(" in line:
                callees = [max(callees, key=lambda name: work(visit(name, 1)))]
            for callee in callees:
                yield from visit(callee, inside)

    return visit(names[entries.index("ENTRY ")], 1)


def _repeats(line, callees, computations, ragged, times):
    """Return how many times a line runs its callees if it runs `times` itself: for a loop, the
    condition and the body."""
    if " while(" in line:
        if "/further_rounds/" in line:      # we expect tokens to reach their experts in one round
            return 0
        trips, condition = _TRIP_COUNT.search(line), computations[callees[0]]
        if not trips and "direction=LT" in condition:
            # The loop counts up from 0 while the counter is below a constant.
            trips = _CONSTANT.search(condition)
        return times * int(trips[1]) if trips else times
    if " conditional(" in line:
        if taken := re.search(r'/(\d+)_of_(\d+)/cond"', line):     # 1F1B's head
            return times * int(taken[1]) // int(taken[2])
        # In a ragged matmul's loop over blocks, a conditional skips the empty blocks.
        return times * ragged if "/ragged/" in line else times
    return times


def ints(text: str) -> list[int]:
    """Return the numbers in a text such as 8,32."""
    return [int(x) for x in text.split(",") if x]


# -------------------------------------------------------------------------------------------
# Bytes of a collective, and its axis

# %all-gather-start = (bf16[8,128], bf16[8,512]) all-gather-start(%x.1), replica_groups=...
_COLLECTIVE = re.compile(r" = (?P<result>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|"
                         r"(?:ragged-)?all-to-all|collective-permute)(?P<start>-start)?"
                         r"\((?P<operands>.*?)\)(?:, |$)")
# f32[8,32]{1,0}
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
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
    kind, groups, sizes = found["kind"], _groups(line, mesh), sizes_of(found["result"])
    if found["start"] and kind != "all-reduce":     # the result is (operands, results, ...)
        k = found["operands"].count("%")
        sizes = sizes[k:2 * k]
    n = len(groups[0])
    parts = n if kind == "reduce-scatter" else 1        # its result is one n-th of its operand
    return kind, _axes_within(groups, mesh), n, times, sum(sizes) * parts


def sizes_of(text: str) -> list[float]:
    """List the size in bytes of each array whose shape is in the text."""
    return [math.prod(ints(dims)) * _bits(name) / 8 for name, dims in SHAPE.findall(text)]


def _bits(name):
    """Return a type's width in bits (bf16, s32, f8e4m3fn, pred), or 0 if it has none (token)."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else {"pred": 8}.get(name, 0)


def _groups(line, mesh):
    """Return a collective's device groups, in any of the forms that XLA writes. If XLA writes none,
    all devices form a single group."""
    if found := _IOTA.search(line):
        return _count(found[2], found[3]).reshape(ints(found[1]))
    if found := _MESH.search(line):
        names = re.findall(r"'(\w+)'", found["axes"])
        shape = ",".join(re.findall(r"=(\d+)", found["axes"]))
        over = [names.index(name) for name in re.findall(r"'(\w+)'", found["over"])]
        ids = _count(found["shape"] or shape, found["order"]).reshape(ints(shape))
        size = math.prod(ids.shape[d] for d in over)
        return np.moveaxis(ids, over, range(-len(over), 0)).reshape(-1, size)
    if found := _LISTED.search(line):
        return [ints(group) for group in _GROUP.findall(found[1])]
    return [range(mesh.size)]


def _count(shape, order):
    """Return the numbers 0, 1, 2, ... reshaped to `shape` and transposed to `order`."""
    ids = np.arange(math.prod(ints(shape))).reshape(ints(shape))
    return ids.transpose(ints(order)) if order else ids


def _axes_within(groups, mesh):
    """Return the axes along which members of a group differ, joined by +. A program numbers the
    mesh's devices in order."""
    differ = {d for group in groups
              for d, places in enumerate(np.unravel_index(group, mesh.axis_sizes))
              if len(set(places)) > 1}
    return "+".join(mesh.axis_names[d] for d in sorted(differ)) or "none"
