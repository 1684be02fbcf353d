"""What the lessons use: eight devices, pictures of who holds what, what a program sends, quoted
code, bugs to plant, and answers to check.

    python learn/lesson1_mesh.py            a lesson runs as a script
    python -m learn.lesson 1 lesson1.ipynb  and becomes a notebook

An editor that knows cells (VS Code, PyCharm, Spyder) runs it cell by cell: each begins with # %%.
"""

import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax
import numpy as np

import shard
from learn.solutions import ANSWERS

HERE = Path(__file__).parent
LESSONS = {path.name[6]: path for path in sorted(HERE.glob("lesson[0-9]_*.py"))}


def begin(devices: int = 8) -> None:
    """Simulate so many devices on the CPU. (Call it before anything else asks jax for devices.)"""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.devices()       # from here on they are fixed: a mesh of three devices is then refused


def mesh(**sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices with these axes, which is jax's mesh from here on."""
    count = int(np.prod([*sizes.values()]))
    made = jax.make_mesh((*sizes.values(),), (*sizes,), devices=jax.devices()[:count],
                         axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    jax.set_mesh(made)
    return made


def show(x: jax.Array) -> None:
    """Print which devices hold which part of an array of one or two dimensions."""
    held = np.full(x.shape, "", object)
    for part in x.addressable_shards:
        held[part.index] += str(part.device.id)
    cells = np.atleast_2d(held).tolist()
    width = max(len(cell) for row in cells for cell in row)
    print(f"{list(x.shape)}, split as {x.sharding.spec}; each number with the devices that hold it")
    for row in cells:
        print("   ", " ".join(cell.ljust(width) for cell in row))


class Picture(NamedTuple):
    """A picture of docs/pictures."""
    path: Path

    def _repr_svg_(self) -> str:        # (what a notebook shows, if a cell ends with the picture)
        return self.path.read_text()


def picture(name: str) -> Picture:
    """Say where a picture is, and show it in a notebook."""
    path = HERE.parent / "docs" / "pictures" / f"{name}.svg"
    print(f"picture: {path.relative_to(HERE.parent)}")
    return Picture(path)


def sends(function: Callable, *args: Any) -> dict[str, int]:
    """The bytes that a device sends in one call of the compiled function, by kind and axis of the
    collectives, which it also prints."""
    args = jax.device_put(args, jax.NamedSharding(jax.sharding.get_mesh(), jax.P()))
    found = shard.collectives(jax.jit(function).lower(*args).compile())
    for one in found:
        print(f"    {one.count} {one.kind} over {one.axis}: {one.bytes:,} bytes")
    if not found:
        print("    nothing")
    return {f"{one.kind} over {one.axis}": one.bytes for one in found}


def quote(function: Callable) -> None:
    """Print a function's code, as it is now, without its docstring."""
    code = inspect.getsource(function)
    doc = inspect.getdoc(function)
    if doc:
        begin, end = code.index('"""'), code.index('"""', code.index('"""') + 3) + 3
        code = code[:begin].rstrip() + code[end:]
    print(code.rstrip())


def with_bug(module: types.ModuleType, right: str, wrong: str) -> types.ModuleType:
    """A copy of a module in which this text is replaced."""
    code = Path(module.__file__).read_text()
    if right not in code:
        raise ValueError(f"{right!r} is not in {module.__name__}")
    copy = types.ModuleType(f"{module.__name__} with a bug")
    copy.__file__ = module.__file__
    exec(compile(code.replace(right, wrong), module.__file__, "exec"), copy.__dict__)
    return copy


def planted(function: Callable, right: str, wrong: str) -> Callable:
    """A copy of a lesson's function in which this text is replaced."""
    code = inspect.getsource(function)
    if right not in code:
        raise ValueError(f"{right!r} is not in {function.__name__}")
    names = dict(function.__globals__)
    exec(compile(code.replace(right, wrong), "planted", "exec"), names)
    return names[function.__name__]


def attempt(function: Callable, *args: Any) -> tuple[Any, str]:
    """(the result of a call, ""), or (None, the first line of what it raises)."""
    try:
        return function(*args), ""
    except Exception as e:
        return None, f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"


def error_of(function: Callable, *args: Any) -> str:
    """The first line of what this call raises, or that it raises nothing."""
    return attempt(function, *args)[1] or "no error"


def fault(function: Callable, want: Any, *args: Any) -> str:
    """What is wrong with a program: what it raises, or how far its result is from `want`."""
    found, error = attempt(jax.jit(function), *args)
    return error or f"wrong by {abs(np.asarray(found) - np.asarray(want)).max():.2f}"


def report(bug: str, function: Callable, in_specs: Any, out_specs: Any, want: Any, *args: Any
           ) -> None:
    """Print what is wrong with a function that has this bug: on jax's mesh, and on one device."""
    whole = jax.sharding.get_mesh()
    one = mesh(**dict.fromkeys(whole.axis_names, 1))
    for place, grid in ((bug, whole), ("    on one device", one)):
        jax.set_mesh(grid)
        program = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)
        print(f"{place}: {fault(program, want, *args)}")
    jax.set_mesh(whole)


def check(exercise: str, answer: Any = ...) -> bool:
    """Whether the answer is right (whole numbers exactly, others within 2%), and why."""
    right, why = ANSWERS[exercise]
    if answer is ...:
        print(f"{exercise}: put your answer in place of the dots")
        return False
    if isinstance(right, float) and isinstance(answer, (int, float)):
        good = abs(answer - right) <= 0.02 * abs(right)
    else:
        good = str(answer).strip().lower() == str(right).lower()
    print(f"{exercise}: {'right' if good else 'not ' + str(answer)}. {why}")
    return good


def cells(path: Path) -> list[tuple[str, str]]:
    """The cells of a lesson: pairs of markdown or code, and its text."""
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
