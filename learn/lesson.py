"""Helpers for the lessons: simulate devices, show who holds what, compare predictions, count the
bytes a program sends, quote code, plant bugs, and check answers.

    python -m learn.lesson 1 lesson1.ipynb      a lesson as a notebook (README.md has more ways)
"""

import collections
import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

import shard
from learn.solutions import ANSWERS, BROKEN

__all__ = ["P", "jax", "jnp", "lax", "np", "shard"]     # (lessons import these from here)
HERE = Path(__file__).parent
LESSONS = {str(n): path for n in range(1, 11) for path in HERE.glob(f"lesson{n}_*.py")}


def begin(devices: int = 8) -> None:
    """Simulate this many devices on the CPU. Call it before anything asks jax for devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.devices()       # jax fixes them here, so a mesh of three devices fails later


def mesh(**sizes: int) -> jax.sharding.Mesh:
    """Make a mesh of the first devices with these axes, and set it as jax's mesh."""
    count = int(np.prod([*sizes.values()]))
    made = jax.make_mesh((*sizes.values(),), (*sizes,), devices=jax.devices()[:count],
                         axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    jax.set_mesh(made)
    return made


def place(x: Any, spec: P) -> jax.Array:
    """Split an array over jax's mesh."""
    return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def show(x: jax.Array) -> None:
    """Print which devices hold which part of a one- or two-dimensional array."""
    held = np.full(x.shape, "", object)
    for part in x.addressable_shards:
        held[part.index] += str(part.device.id)
    cells = np.atleast_2d(held).tolist()
    width = max(len(cell) for row in cells for cell in row)
    print(f"{list(x.shape)}, split as {x.sharding.spec}; each number with the devices that hold it")
    for row in cells:
        print("   ", " ".join(cell.ljust(width) for cell in row))


class Picture(NamedTuple):
    """A picture in docs/pictures."""
    path: Path

    def _repr_svg_(self) -> str:        # (a notebook shows this if a cell ends with it)
        return self.path.read_text()


def picture(name: str) -> Picture:
    """Print where a picture is, and show it in a notebook."""
    path = HERE.parent / "docs" / "pictures" / f"{name}.svg"
    print(f"picture: {path.relative_to(HERE.parent)}")
    return Picture(path)


def sends(function: Callable, *args: Any) -> dict[str, int]:
    """Print and return the bytes that a device sends in one call of the compiled function, by kind
    and axis of collective."""
    args = jax.device_put(args, jax.NamedSharding(jax.sharding.get_mesh(), P()))
    found = shard.collectives(jax.jit(function).lower(*args).compile())
    for one in found:
        print(f"    {one.count} {one.kind} over {one.axis}: {one.bytes:,} bytes")
    return {f"{one.kind} over {one.axis}": one.bytes for one in found}


def compare(guess: Any, found: float, unit: str = "bytes") -> None:
    """Print your prediction and the program's figure."""
    figure = "{:,.0f}" if abs(found) >= 1000 else "{:.4g}"
    said = "" if guess is ... else f"you predicted {figure.format(guess)}, which is " + (
        "right: " if _same(guess, float(found)) else
        f"{guess / found:.3g} times as much: " if found else "too much: ")
    print(f"    {said}{figure.format(found)} {unit}")


def quote(function: Callable, docstring: bool = False) -> None:
    """Print a function's current code."""
    code = inspect.getsource(function)
    if not docstring and inspect.getdoc(function):
        begin, end = code.index('"""'), code.index('"""', code.index('"""') + 3) + 3
        code = code[:begin].rstrip() + code[end:]
    print(code.rstrip())


def with_bug(module: types.ModuleType, right: str, wrong: str) -> types.ModuleType:
    """A copy of a module with this text replaced."""
    copy = types.ModuleType(f"{module.__name__} with a bug")
    copy.__file__ = module.__file__
    exec(compile(_changed(module, right, wrong), module.__file__, "exec"), copy.__dict__)
    return copy


def planted(function: Callable, right: str, wrong: str) -> Callable:
    """A copy of a function with this text replaced."""
    return _of_code(function, _changed(function, right, wrong))


def _changed(function, right, wrong):
    code = inspect.getsource(function)
    if right not in code:
        raise ValueError(f"{right!r} is not in {function.__name__}")
    return code.replace(right, wrong)


def _of_code(function, code):
    names = dict(function.__globals__)
    exec(compile(code, "planted", "exec"), names)
    return names[function.__name__]


def attempt(function: Callable, *args: Any, lines: int = 1) -> tuple[Any, str]:
    """(the result of a call, ""), or (None, the first lines of its error)."""
    try:
        return function(*args), ""
    except Exception as e:
        said = "\n".join(str(e).strip().splitlines()[:lines])
        return None, f"{type(e).__name__}: {said}"


def error_of(function: Callable, *args: Any, lines: int = 1) -> str:
    """The first lines of this call's error, or "no error"."""
    return attempt(function, *args, lines=lines)[1] or "no error"


def fault(function: Callable, want: Any, *args: Any, lines: int = 1) -> str:
    """What is wrong with a program: its error, or how far its result is from `want`."""
    found, error = attempt(jax.jit(function) if args else function, *args, lines=lines)
    if not error and np.shape(found) != np.shape(want):
        return f"a result {[*np.shape(found)]} in place of {[*np.shape(want)]}"
    return error or f"wrong by {abs(np.asarray(found) - np.asarray(want)).max():.2f}"


def report(bug: str, function: Callable, in_specs: Any, out_specs: Any, want: Any, *args: Any
           ) -> None:
    """Print what is wrong with a buggy function, on jax's mesh and on one device."""
    whole = jax.sharding.get_mesh()
    one = mesh(**dict.fromkeys(whole.axis_names, 1))
    for place, grid in ((bug, whole), ("    on one device", one)):
        jax.set_mesh(grid)
        program = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)
        print(f"{place}: {fault(program, want, *args)}")
    jax.set_mesh(whole)


# -------------------------------------------------------------------------------------------
# Exercises

class Tried(NamedTuple):
    """The result of running an exercise's code: what is wrong, or ''."""
    error: str

    def __str__(self) -> str:
        return f"yet ({self.error})"


def tried(written: Callable, function: Callable, want: Any, *args: Any, most: float = 0) -> Any:
    """Run an exercise: `function` calls your function `written`. It should return `want` and send
    at most `most` bytes (0: any number). Returns dots if yours still only returns dots."""
    code = written.__code__
    if ... in code.co_consts and not code.co_names:
        return ...
    error = fault(function, want, *args, lines=40)
    if error == "wrong by 0.00" and most and (sent := sum(sends(function, *args).values())) > most:
        error = f"the result is right, but a device sends {sent:,} bytes"
    return Tried("" if error == "wrong by 0.00" else error)


def broken(exercise: str, function: Callable) -> None:
    """Print a function with one line changed, for an exercise that asks which line."""
    print(_changed(function, *BROKEN[exercise]))


def repaired(exercise: str, function: Callable, wrong: str, right: str, make: Callable, want: Any,
             *args: Any) -> Any:
    """Replace this text in the function that `broken` printed, and run make(function), which
    should return `want`."""
    if wrong is ... or right is ...:
        return ...
    code = _changed(function, *BROKEN[exercise])
    if code.count(wrong) != 1:
        return Tried(f"{wrong!r} occurs {code.count(wrong)} times in the code")
    mine = _of_code(function, code.replace(wrong, right))
    return tried(mine, make(mine), want, *args)


wrong_answers: collections.Counter = collections.Counter()


def check(exercise: str, answer: Any = ...) -> bool:
    """Whether the answer is right. Integers must match exactly and floats within 2%. Words may have
    several forms. Code is right if its result is. The first wrong answer prints a hint, the second
    an explanation."""
    right, hint, why, *also = ANSWERS[exercise]
    if answer is ...:
        print(f"{exercise}: replace the dots with your answer")
        return False
    good = (not answer.error if isinstance(answer, Tried) else
            any(_same(answer, one) for one in (right, *also)))
    wrong_answers[exercise] += not good
    print(f"{exercise}: right. {why}" if good else f"{exercise}: not {answer}. " + (
        why if wrong_answers[exercise] > 1 else f"Hint: {hint}"))
    return good


def _same(answer, right):
    if isinstance(right, str):
        return _plain(answer) == _plain(right)
    try:
        off = abs(float(str(answer).replace(",", "")) - right)
    except ValueError:
        return False
    return off <= (0.02 * abs(right) if isinstance(right, float) else 0)


def _plain(answer):
    return re.sub(r"\b(and|lax|the)\b|[^a-z0-9]", "", str(answer).lower())


# -------------------------------------------------------------------------------------------
# Notebooks

def cells(path: Path) -> list[tuple[str, str]]:
    """A lesson's cells, as pairs of kind (markdown or code) and text."""
    found: list[tuple[str, list[str]]] = []
    for line in path.read_text().splitlines():
        if line.startswith("# %%"):
            found.append(("markdown" if "[markdown]" in line else "code", []))
        elif found:
            found[-1][1].append(line)
    return [(kind, "\n".join(
        line[2:] if kind == "markdown" else line
        for line in lines).strip("\n")) for kind, lines in found]


def notebook(path: Path) -> dict[str, Any]:
    """A lesson as a Jupyter notebook."""
    made = []
    for kind, text in cells(path):
        code = {"outputs": [], "execution_count": None} if kind == "code" else {}
        made.append({"cell_type": kind, "metadata": {}, **code,
                     "source": text.splitlines(keepends=True)})
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in LESSONS:
        sys.exit(f"expected: python -m learn.lesson NUMBER FILE.ipynb, with one of the lessons "
                 f"{', '.join(LESSONS)}")
    Path(sys.argv[2]).write_text(json.dumps(notebook(LESSONS[sys.argv[1]]), indent=1))


if __name__ == "__main__":
    main()
