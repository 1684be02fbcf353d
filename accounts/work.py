"""The work of a compiled program, by the source that asked for it, parsed from its text."""

import collections
import re
import types
from typing import Any, NamedTuple

from zigzag.core.chips import chip_of
from zigzag.core.mesh import abstract_mesh
from zigzag.core.parts import part
from zigzag.parallel.hlo import NAME, add_up, executed, sends, sizes_of

arithmetic, estimate = (part(f"forecast.{name}", "--against") for name in (
    "arithmetic", "estimate"))


class Call(NamedTuple):
    """A place in the source that jax traced an operation for. Without a file, it's a weight."""
    file: str
    line: int
    function: str


# {what: {calls, the innermost first: how much}}
Work = dict[Any, collections.Counter]

# stack_frame_id=799
_FRAME = re.compile(r"stack_frame_id=(\d+)")
#   %x.1 = (f32[8,32], u32[]) fusion(...)
_OPERATION = re.compile(r" = (?P<result>\(.*?\)|\S+) (?P<name>[\w\-]+)\(")
# %param.2 = f32[64,32]{1,0} parameter(30), ... metadata={op_name="state['params']['w_down']"}
_ARGUMENT = re.compile(r" = (\S+) parameter\(.*op_name=\"\w+\[.*\[\\*'(\w+)\\*'\]\"")
# Operations that take no time of their own.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
        "call", "after-all", "partition-id"}


def calls_of(text: str) -> dict[str, tuple[Call, ...]]:
    """Return {stack_frame_id: calls} from the tables at the top of a program's text:

        FileNames                       FunctionNames       FileLocations
        1 "/home/me/zigzag/model.py"    1 "mlp"             1 {file_name_id=1 function_name_id=1 ...
        StackFrames
        2 {file_location_id=1 parent_frame_id=2}        the caller is frame 2 - 1; 0 is none
    """
    files, functions, places, frames = (
        [line.partition(" ")[2] for line in table.group(1).splitlines()] if table else []
        for table in (re.search(rf"^{name}\n(.*?)\n\n", text, re.S | re.M) for name in (
            "FileNames", "FunctionNames", "FileLocations", "StackFrames")))
    found = [()]
    for frame in frames:
        place, parent = map(int, re.findall(r"=(\d+)", frame))
        file, function, line = map(int, re.findall(r"=(\d+)", places[place - 1])[:3])
        found.append((Call(files[file - 1][1:-1].replace("\\'", "'"), line, re.sub(
            r"\.<\w+>", "", functions[function - 1][1:-1])), *found[parent - 1]))
    return {str(number): calls for number, calls in enumerate(found)}


def work_of(facts: dict[str, Any]) -> Work:
    """Return what a device does in one run of a program, by the calls that asked for it."""
    text, mesh = facts["text"], abstract_mesh(facts["mesh"])
    stacks, work = calls_of(text), collections.defaultdict(collections.Counter)
    inner, enters, calls = set(), False, ()     # inner: computations that aren't run by themselves
    for line, times, computation in executed(text):
        if enters:
            inner.add(computation)
        enters = " fusion(" in line or "to_apply=" in line and " call(" not in line
        # In a fusion, an operation without calls has the fusion's.
        if (frame := _FRAME.search(line)) or computation not in inner:
            calls = stacks[frame[1]] if frame else ()
        if flops := times * arithmetic.operations(line, computation):
            work["arithmetic"][calls] += flops
            operand = NAME.findall(line)[1]
            work["float32"][calls] += flops * (f"%{operand} = f32[" in computation)
        for row in sends(line, times, computation, mesh):
            sent, = add_up([row])
            for what, amount in ("collectives", sent.count), ("sends", sent.bytes):
                work[what][calls] += amount
                work[what, sent.kind, sent.axis][calls] += amount
        found = _OPERATION.search(line)
        if found and computation not in inner and found["name"] not in FREE:
            work["operations"][calls] += times
            work["results"][calls] += sum(sizes_of(found["result"]))
    for result, name in _ARGUMENT.findall(text):
        work["arguments"][Call("", 0, name),] += sum(sizes_of(result))
    compiled = types.SimpleNamespace(
        memory_analysis=lambda: types.SimpleNamespace(**facts["memory"]))
    work["peak memory"][()] = estimate.peak_memory(compiled)
    if chip := chip_of(types.SimpleNamespace(device_kind=facts["device_kind"])):
        work["at least"][()] = max(estimate.least_times(
            compiled, total(work, "arithmetic"), total(work, "sends"), chip).values())
    return work


def total(work: Work, what: Any) -> float:
    return sum(work[what].values())
