"""--find_nan: where a number first became infinite or NaN.

An update whose loss or gradient isn't finite learns nothing, so its weights are still there. After
the first such update in a row, we compute the gradients of its batch again, as a program that also
records, for each array, the time of the operation from which its NaN or infinity descends:

    q = x @ w          finite                                  -
    s = q @ k.T        infinite, and its inputs were finite    inf made here, at time 17
    p = softmax(s)     NaN, from an infinity                   NaN made at time 19, from time 17

A time is the place of an operation in the order in which a device runs them, with loops unrolled. A
NaN that never reaches the loss or the gradient, such as one that a mask removes, isn't reported.
Nor are infinities that the code itself writes, such as a mask's -inf. The program is the step's
jaxpr, evaluated operation by operation on the same mesh, and compiled once, when first needed.
"""

import functools
import sysconfig
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun, jaxprs_in_params
from jax.sharding import PartitionSpec as P

import train
from zigzag.core.errors import ConfigError, one_line
from zigzag.core.hosts import process_allgather, watchdog
from zigzag.core.mesh import ambient, by_path, mark_varying
from zigzag.core.options import ROOT
from zigzag.disk.mixture import numbers_at
from zigzag.parallel.jaxprs import inner_call, interpret, scan_operands
from zigzag.parallel.pipeline import work_1f1b, work_in
from zigzag.run.plan import in_one

NEVER = 2**31 - 1
WRITTEN = NEVER - 1         # the time of an infinity that the code itself writes
CLEAN = np.full(3, NEVER, np.int32)
# Operations that only move numbers: their result is finite if their operand is.
VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "pvary", "copy", "name",
         "stop_gradient", "rev", "sharding_constraint"}
# Operations whose result is still a weight, if their operand is.
STILL_A_WEIGHT = VIEWS | {"convert_element_type", "reduce_precision", "all_gather", "slice",
                          "dynamic_slice"}
LIBRARIES = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")}


class Value(NamedTuple):
    """An array, and when it became what it is."""
    x: Any
    since: Any = None       # int32 [3], when these were made: its first NaN, the infinity behind
                            # that NaN, its first infinity. None: it's known to be finite
    weight: Any = None      # (path, first layer) if it's a weight, or some layers of one


class Loop(NamedTuple):
    """A loop with a fixed number of turns."""
    length: int
    size: int               # the operations in one turn
    is_reversed: bool
    first: int | None       # the number of its first layer; None: a loop over something else


class Place(NamedTuple):
    """Where the replay is in the program."""
    start: int              # the time of the next operation, in the first turn of every loop
    shift: Any              # what later turns, and this device's stage, add to it
    above: tuple = ()       # the operations that enclose it


# -------------------------------------------------------------------------------------------
# The replay

def check(program: Any) -> None:
    """Reject a custom step."""
    if program.own:
        raise ConfigError("--find_nan: no effect on a custom step, fit(step=...); leave it out")


def watched(loop: Any) -> Callable:
    """Return loop.step, with a replay after each update that is the first in a row to be
    skipped."""
    program = loop.program
    step, replay = loop.step, Replay(program.plan)
    before = loop.skipped > 0

    def watch(state, batch):
        nonlocal before
        state, metrics = step(state, batch)
        skipped, scale = jax.device_get((metrics["skipped"], metrics.get("loss_scale", 0)))
        skipped = skipped and scale <= 1    # (with float16, a larger one may be what overflows)
        if skipped and not before:
            watchdog.arm("a replay")
            try:
                with loop.reporter.hours.of("evaluation"):
                    times = replay.times(state["params"], batch, state["frozen"])
                    found = lines(replay, times, program, loop.task, state, batch, loop.at)
            except Exception as e:      # it doesn't fit, or we can't name the place: train on
                found = [one_line(e)]
            for line in found:
                loop.reporter.line(f"step {loop.at + 1}: {line}")
            watchdog.arm("a step")
        before = skipped
        return state, metrics

    return watch


class Replay:
    """The gradients' program, evaluated with times. It numbers the operations as it goes."""

    def __init__(self, plan: Any):
        self.plan, self.compiled = plan, None
        self.stages = plan.sizes["pipe"] if "pipe" in plan.manual else 1
        self.notes: dict[int, tuple] = {}       # {time: (operation, those above it, its weight)}
        self.loops: dict[int, Loop] = {}        # {time of the first operation: loop}
        self.inputs: list[tuple[str, str]] = []     # the weights and the batch's arrays: kind, name

    def times(self, *given: Any) -> np.ndarray:
        """Return the loss's times and the gradient's, [2, 3]. An input's time is negative. `given`:
        weights, batch, frozen weights."""
        if self.compiled is None:
            self.inputs = [(kind, path) for kind, tree in zip(("weight", "batch", "weight"), given)
                           for path in by_path(tree)]
            place = jax.NamedSharding(self.plan.mesh, P())
            problem = ""
            try:
                self.compiled = jax.jit(self.program(*given), out_shardings=place,
                                        compiler_options=self.plan.compiler_options
                                        ).lower(*given).compile()
            except Exception as e:
                problem = one_line(e)
            if problems := [*filter(None, process_allgather(problem))]:     # of any process
                raise ConfigError(f"--find_nan: {problems[0]}")
        return np.stack(jax.device_get(self.compiled(*given)))

    def program(self, *given: Any) -> Callable:
        """Make the program: (weights, batch, frozen weights) -> the times."""
        traced, made = jax.make_jaxpr(train.make_gradients(self.plan), return_shape=True)(*given)
        if (total := _size(traced.jaxpr) * self.stages) >= WRITTEN:
            raise ConfigError(f"--find_nan: this step has {total:,} operations on a device; it can "
                              f"number {WRITTEN:,}")

        def run(*given):
            leaves = jax.tree.leaves(given)
            values = [Value(x, _since(x, CLEAN, i - len(leaves)),
                            (name, 0) if kind == "weight" else None)
                      for i, (x, (kind, name)) in enumerate(zip(leaves, self.inputs))]
            outs = self.evaluate(traced.jaxpr, traced.consts, values, Place(0, jnp.int32(0)))
            gradients, (total, count, _) = jax.tree.unflatten(jax.tree.structure(made), [
                value.since for value in map(_filled, outs)])
            return _first([total, count]), _first(jax.tree.leaves(gradients))

        return run

    def evaluate(self, jaxpr: Any, consts: Any, operands: list[Value], place: Place
                 ) -> list[Value]:
        """Return a jaxpr's results. All operations below number themselves from `place` on."""
        fixed = dict(zip(jaxpr.constvars, consts))
        start = place.start

        def operation(eqn, ins):
            nonlocal start
            here, start = place._replace(start=start), start + _size_of(eqn)
            outs = self.operation(eqn, ins, here)
            weight = next((v.weight for v in ins), None)
            if weight and eqn.primitive.name in STILL_A_WEIGHT:
                if eqn.primitive.name == "slice":
                    weight = (weight[0], weight[1] + eqn.params["start_indices"][0])
                outs = [v._replace(weight=weight) for v in outs]
            return outs

        return interpret(jaxpr, operands, lambda v: _constant(
            v.val if isinstance(v, Literal) else fixed[v]), operation)

    def operation(self, eqn, ins, place):
        """Run one operation: as jax would, with its times, or by evaluating what it contains."""
        name, inside = eqn.primitive.name, place._replace(
            start=place.start + 1, above=(*place.above, eqn))
        if control := {"scan": self.scan, "while": self.while_loop, "cond": self.cond,
                       "shard_map": self.shard_map}.get(name):
            if "branches_platforms" not in eqn.params:
                return control(eqn, [*map(_filled, ins)], inside)
        if call := inner_call(eqn, ins):
            consts = next(getattr(p, "consts", ()) for p in eqn.params.values()
                          if getattr(p, "jaxpr", p) is call[0])
            return self.evaluate(call[0], consts, call[1], inside)
        weight = next((v.weight for v in ins if v.weight), None)
        self.notes[place.start] = eqn, place.above, weight
        with eqn.ctx.manager:
            outs = eqn.primitive.bind(*[v.x for v in ins], **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        if name in VIEWS:
            return [Value(outs[0], ins[0].since)]
        before = _first([v.since for v in ins if v.since is not None])
        if axes := _axes_of(eqn):       # it may bring a NaN from another device
            before = _first(lax.all_gather(before, axes))
        time = place.start * self.stages + place.shift
        return [Value(x, _since(x, before, time)) for x in outs]

    def scan(self, eqn, ins, place):
        """Run a loop whose turns have times of their own."""
        fixed, carry, stacks = scan_operands(eqn, ins)
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        is_reversed, size = eqn.params["reverse"], _size(body.jaxpr)
        layers = [v.weight[1] for v in stacks if v.weight]
        self.loops[place.start] = Loop(length, size, is_reversed, layers[0] if layers else None)
        turns, weights = jnp.arange(length)[::-1 if is_reversed else 1], []

        def turn(carry, given):
            number, slices = given
            here = place._replace(shift=place.shift + number * size * self.stages)
            sliced = [Value(x, v.since if v.since is None else _since(x, v.since, 0), v.weight)
                      for x, v in zip(slices, stacks)]
            outs = self.evaluate(body.jaxpr, body.consts, [*fixed, *_values(carry), *sliced], here)
            weights[:] = [v.weight for v in outs]
            return _packed(outs[:len(carry)]), _packed(outs[len(carry):])

        carry, outs = lax.scan(turn, _packed(carry), (turns, [v.x for v in stacks]), length,
                               reverse=is_reversed)
        outs = [(x, None if since is None else _first(since)) for x, since in outs]
        return [v._replace(weight=weight)
                for v, weight in zip(_values([*carry, *outs]), [None] * len(carry)
                                     + weights[len(carry):])]

    def while_loop(self, eqn, ins, place):
        """Run a loop whose turns share their times, because their number isn't known."""
        p = eqn.params
        n, m, is_on, body = (p["cond_nconsts"], p["body_nconsts"], jaxpr_as_fun(p["cond_jaxpr"]),
                             p["body_jaxpr"])

        def turn(carry):
            return _packed(self.evaluate(body.jaxpr, body.consts,
                                         [*ins[n:n + m], *_values(carry)], place))

        return _values(lax.while_loop(lambda carry: is_on(
            *[v.x for v in ins[:n]], *[x for x, _ in carry])[0], turn, _packed(ins[n + m:])))

    def cond(self, eqn, ins, place):
        """Run a branch. The times of the branches don't overlap."""
        index, *operands = ins
        start, branches = place.start, []
        for closed in eqn.params["branches"]:
            branches.append(functools.partial(
                lambda closed, here: _packed(self.evaluate(
                    closed.jaxpr, closed.consts, operands, here)),
                closed, place._replace(start=start)))
            start += _size(closed.jaxpr)
        return _values(lax.switch(index.x, branches))

    def shard_map(self, eqn, ins, place):
        """Run on each device, then merge what the devices found."""
        p = eqn.params
        axes = tuple(sorted(p["newly_manual_axes"]))

        def on_device(shift, xs, since):
            if "pipe" in axes:
                shift += lax.axis_index("pipe")
            shift, since = _marked((shift, since))
            outs = self.evaluate(p["jaxpr"], (), [
                Value(x, s, v.weight) for x, s, v in zip(xs, since, ins)],
                place._replace(shift=shift))
            return [(x, None if s is None else s[None]) for x, s in _packed(outs)]

        outs = jax.shard_map(
            on_device, mesh=p["mesh"], axis_names=set(axes), check_vma=p["check_vma"],
            in_specs=(P(), [*p["in_specs"]], P()), out_specs=[
                (spec, P(axes)) for spec in p["out_specs"]])(
            place.shift, [v.x for v in ins], [v.since for v in ins])
        return [Value(x, None if since is None else _first(since)) for x, since in outs]


def _size(jaxpr):
    return sum(map(_size_of, jaxpr.eqns))


def _size_of(eqn):
    """Return how many times an operation takes: more than one if it contains others."""
    return 1 + eqn.params.get("length", 1) ** (eqn.primitive.name == "scan") * sum(
        map(_size, jaxprs_in_params(eqn.params)))


def _axes_of(eqn):
    """Return the mesh axes over which an operation communicates."""
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    return tuple(a for a in (axes if isinstance(axes, (tuple, list)) else (axes,))
                 if isinstance(a, str))


def _marked(tree):
    """Mark the tree as varying over all manual axes, as all times do inside a shard_map."""
    return mark_varying(tree, also=ambient()[1])


def _is_float(x):
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _constant(x):
    is_infinite = _is_float(x) and bool(np.isinf(np.asarray(x, np.complex128)).any())
    return Value(x, _marked(jnp.array([NEVER, NEVER, WRITTEN])) if is_infinite else None)


def _filled(value):
    return value._replace(since=_marked(jnp.asarray(CLEAN))) if (
        value.since is None and _is_float(value.x)) else value


def _packed(values):
    return [(v.x, v.since) for v in map(_filled, values)]


def _values(pairs):
    return [Value(x, since) for x, since in pairs]


def _first(since):
    """Merge several arrays' times into one [3]: the first NaN and its infinity, the first
    infinity."""
    if not len(since):
        return _marked(jnp.asarray(CLEAN))
    since = jnp.stack([*since])
    nan, behind, _ = since[since[:, 0].argmin()]
    return jnp.stack([nan, behind, since[:, 2].min()])


def _since(x, before, time):
    """Return x's times, if its operation runs at `time` on operands that have the times
    `before`."""
    if not _is_float(x):
        return None
    has_nan, has_inf = _marked((jnp.isnan(x).any(), jnp.isinf(x).any()))
    nan, behind, inf = before
    made = jnp.stack([jnp.where(nan == NEVER, time, nan), jnp.where(nan == NEVER, inf, behind),
                      jnp.where(inf == NEVER, time, inf)])
    return jnp.where(jnp.stack([has_nan, has_nan, has_inf]), made, NEVER)


# -------------------------------------------------------------------------------------------
# What a time means

def lines(replay: Replay, times: np.ndarray, program: Any, task: Any, state: Any, batch: Any,
          at: int) -> list[str]:
    """Return what to print: where the first number that isn't finite was made, in update `at`."""
    found = [time for time in times.ravel().tolist() if time < WRITTEN]
    if not found:
        return ["in a replay, the loss and each gradient are finite; the gradient's norm "
                "overflows, or the compiler rounds the step differently"]

    def name(time):
        if time >= 0:
            return _operation(replay, time, times[0].min() >= WRITTEN)
        kind, path = replay.inputs[time]
        if kind == "batch":
            row, *_ = where = _first_entry(by_path(batch)[path])
            example, = numbers_at(task.examples, program.config.seed,
                                  np.array([at * program.config.batch + row]))
            return f"in the batch's {path}{where}: row {row}, example {example}"
        weights = program.permute(in_one(state["params"], state["frozen"]), back=True)
        where = _first_entry(by_path(weights)[path])
        entry = where[0] if by_path(program.plan.decisions)[path].stacked else None
        return f"in the weight {path}{_of_layer(program.plan, entry)}, at {where}"

    first, (nan, behind, _) = min(found), times[times[:, 0].argmin()].tolist()
    is_nan = first in times[:, 0]
    text = [f"the first {'NaN' if is_nan else 'infinity'} is {name(first)}"]
    return [*text, f"it becomes NaN: {name(nan)}"] if first == behind else text


def _first_entry(x):
    """Return the index of an array's first number that isn't finite, found by dimension."""
    bad = ~jnp.isfinite(x)
    return [int(bad.any([*range(d), *range(d + 1, x.ndim)]).argmax()) for d in range(x.ndim)]


def _names(operations):
    return " ".join(str(e.source_info.name_stack) for e in operations)


def _of_layer(plan, entry):
    """Return words for an entry of the stack of layers, which may be several; "" for None."""
    c = plan.config.network
    entries = getattr(c, "layer_groups", 0) or getattr(c, "expert_layers", None)
    kind = "layer" if entries in (None, getattr(c, "layers", 0)) else "stack entry"
    return "" if entry is None else f" of {kind} {entry}"


def _layer(plan, turns, stage, path):
    """Return the entry of the stack of layers that these turns of loops are in, or None. `path`
    lists the operations around the one that we ask about, and that one."""
    depth = max((d for d, (loop, _) in enumerate(turns) if loop.first is not None), default=None)
    if depth is None:
        return None
    c, stages = plan.config.network, plan.sizes["pipe"] if "pipe" in plan.manual else 1
    numbers = [loop.length - 1 - turn if loop.is_reversed else turn for loop, turn in turns]
    loop, entry = turns[depth][0], turns[depth][0].first + numbers[depth]
    if stages == 1 or depth == 0:
        return entry
    tick = numbers[depth - 1]
    chunk = work_in(tick - stage, stages, c.chunks)[1]
    scans = [d for d, e in enumerate(path) if e.primitive.name == "scan"]
    if c.schedule == "1f1b" and "jvp" in _names(path[scans[depth - 1] + 1:]):
        chunk = work_1f1b(tick, stage, stages, c.chunks)[1][1]
    return (chunk * stages + stage) * loop.length + entry


def _operation(replay, time, is_loss_finite):
    """Say which operation runs at this time, of which layer, function and weight."""
    at, stage = divmod(time, replay.stages)
    turns = []          # the loops around it, each with its turn
    for start, loop in sorted(replay.loops.items()):
        if start <= at < start + loop.length * loop.size:
            turn, inside = divmod(at - start, loop.size)
            at = start + inside
            turns.append((loop, turn))
    eqn, above, weight = replay.notes[at]
    names = _names((*above, eqn))
    layer = _layer(replay.plan, turns, stage, (*above, eqn))
    kind = ("in the backward pass" if "transpose(" in names else
            "for the gradient" if is_loss_finite else "in the forward pass")
    return (f"made by {eqn.primitive.name} {kind}{_of_layer(replay.plan, layer)}, "
            f"{_function(eqn, above)}{f', from the weight {weight[0]}' if weight else ''}")


def _function(eqn, above):
    """Name the user's function whose line ran an operation, and its caller."""
    # jax ends a traceback where it began to trace a nested jaxpr, so those above have the rest.
    frames = []
    for e in (eqn, *reversed(above)):
        for frame in e.source_info.traceback.frames:
            if Path(frame.file_name) in (ROOT / "train.py", Path(__file__)):
                frames += [] if frames else [frame]
                break
            if not _is_library(frame.file_name):
                frames.append(frame)
    inner, *outer = frames
    outer = [f for f in outer if Path(f.file_name).name != "shard.py"][:1]
    return ", called from ".join(map(_line, [inner, *outer]))


def _line(frame):
    path = Path(frame.file_name)
    path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    name = [part for part in frame.function_name.split(".") if part[0] != "<"][-1]
    return f"{name} ({path}:{frame.line_num})"


def _is_library(file):
    """Return whether a file isn't the user's: jax's, another package's, or one of zigzag/."""
    path = Path(file)
    return file.startswith("<") or "site-packages" in path.parts or any(
        path.is_relative_to(folder) for folder in (*LIBRARIES, ROOT / "zigzag"))
