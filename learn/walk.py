"""What a device holds and sends at each line of a block, taken from a trace of the real step.

    python -m learn.walk --mesh data=2,tensor=2
    python -m learn.walk published/transformer.py:block --model transformer --mesh tensor=4
    python -m learn.walk model.py:norm --mesh fsdp=2,seq=2,tensor=2 --experts 4

This prints the lines of model.py's block (or of the functions you name). It also prints the
functions in the same file that these call, if they send anything. Under each line, it prints

    the arrays the line makes: their shape per device, and the mesh axes over which they vary
    what the line sends in the forward pass, and what autodiff sends for it in the backward pass

The remaining flags are train.py's. It only traces the step; it doesn't compile or compute anything.
"""

import ast
import collections
import inspect
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import jax

import shard
import train
from zigzag.commands import programs
from zigzag.core.errors import human_bytes
from zigzag.parallel import hlo
from zigzag.parallel.jaxprs import equations_below
from zigzag.parallel.network import network_of

# {jax's name for a collective: ours}
COLLECTIVES = {
    "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "psum_invariant": "all-reduce", "pmax": "all-reduce",
    "all_to_all": "all-to-all", "ppermute": "collective-permute"}


class Sent(NamedTuple):
    """A collective."""
    places: list[tuple[str, str, int]]      # (file, function, line), innermost first
    loops: list[tuple[list, int]]           # (places, iterations) of the loops around it
    is_backward: bool
    text: str
    bytes: int              # per device, each time it runs

    def times(self, file: str, function: str, lines: range = range(sys.maxsize)) -> int:
        """How many times it runs per call of this function, because of these lines."""
        def is_in(places):
            return any(place[:2] == (file, function) and place[2] in lines for place in places)

        return is_in(self.places) * math.prod(n for places, n in self.loops if is_in(places))


class Line(NamedTuple):
    """A statement in a function, the arrays it makes on a device, and what it sends."""
    code: list[str]
    arrays: list[tuple[str, Any]]
    sent: dict[str, int]    # {text: how many times}


class Traced(NamedTuple):
    """The results of tracing a step."""
    sent: list[Sent]
    made: dict[tuple[str, str, int], dict]      # {(file, function, line): {name: array made there}}
    config: Any                                 # with its sizes filled in


def trace(config: Any, watched: set[str]) -> Traced:
    """What a config's step sends, and what it makes in functions in the `watched` files."""
    config, _ = programs.choose_mesh(config)
    program = programs.program_of(config)
    made: dict[tuple[str, str, int], dict] = {}
    entered = set()

    def enter(frame, event, _):
        """Python calls this at each call; it returns the function to call at each line."""
        code = frame.f_code
        if code.co_filename not in watched or code in entered:
            return None
        entered.add(code)
        last = [code.co_firstlineno, {}]        # the line that runs, and the variables before it

        def line(frame, event, _):
            now = {name: x for name, x in frame.f_locals.items() if _arrays(x)}
            new = {name: x for name, x in now.items() if last[1].get(name) is not x}
            made.setdefault((code.co_filename, code.co_name, last[0]), {}).update(new)
            last[:] = frame.f_lineno, now
            return line

        return line(frame, event, _)

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        with jax.set_mesh(program.mesh):        # (a lesson sets a different one)
            traced = program.step.trace(program.state, program.batch)
    finally:
        sys.settrace(before)
    sizes, sent = program.mesh.shape, []
    for eqn, above in equations_below(traced.jaxpr.jaxpr):
        if eqn.primitive.name in COLLECTIVES and eqn.source_info.traceback:
            around = (eqn, *reversed(above))        # (the stack of what is in a loop begins there)
            is_backward = any("transpose" in str(e.source_info.name_stack) for e in around)
            loops = [(_places(e), e.params["length"]) for e in above if e.primitive.name == "scan"]
            sent.append(Sent(sum(map(_places, around), []), loops, is_backward,
                             *_text_and_bytes(eqn, sizes)))
    return Traced(sent, made, program.config)


def _places(eqn):
    """Where an equation comes from."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    return [(f.file_name, f.function_name, f.line_num) for f in frames]


def _arrays(x):
    known = isinstance(x, (jax.core.Tracer, dict, list, tuple))
    return [a for a in jax.tree.leaves(x) if isinstance(a, jax.core.Tracer)] if known else []


def _text_and_bytes(eqn, sizes):
    """A collective as text (its name, axes and shapes), and the bytes a device sends."""
    kind = COLLECTIVES[eqn.primitive.name]
    axes = eqn.params.get("axes") or eqn.params["axis_name"]
    axes = (axes,) if isinstance(axes, str) else axes
    counted = eqn.invars if kind == "reduce-scatter" else eqn.outvars
    size = sum(v.aval.size * v.aval.dtype.itemsize for v in counted)
    found, = hlo.add_up([(kind, "+".join(axes), math.prod(sizes[axis] for axis in axes), 1, size)])
    shapes = dict.fromkeys((_shape(eqn.invars[0].aval), _shape(eqn.outvars[0].aval)))
    name = f"{kind} (max)" if eqn.primitive.name == "pmax" else kind
    text = f"{name} over {', '.join(axes)}: {' -> '.join(shapes)}"
    return f"{text}, sends {human_bytes(found.bytes)}", found.bytes


def _shape(x):
    return f"[{', '.join(map(str, x.shape))}]"


# -------------------------------------------------------------------------------------------

def statements(file: str, function: str) -> list[tuple[int, int]]:
    """The first and last line of each statement in a function, starting from its decorators. For
    a statement with a body, such as an if, only the lines before the body."""
    if not Path(file).is_file():
        raise shard.ConfigError(f"{Path(file).name}: no such file; expected FILE.py:FUNCTION")
    found = [node for node in ast.walk(ast.parse(Path(file).read_text()))
             if isinstance(node, ast.FunctionDef) and node.name == function]
    if not found:
        raise shard.ConfigError(f"{Path(file).name}: no function {function} in it")
    return [(min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]),
             node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno)
            for node in ast.walk(found[0]) if isinstance(node, ast.stmt)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def lines_of(file: str, function: str, sent: list[Sent], made: dict) -> list[Line]:
    """The statements of a function, built from the trace."""
    code, found = Path(file).read_text().splitlines(), []
    if not any((where, name) == (file, function) for where, name, _ in made):
        raise shard.ConfigError(f"{Path(file).name}:{function} is not called in this step")
    for first, last in sorted(statements(file, function)):
        here = range(first, last + 1)
        arrays = [(name + jax.tree_util.keystr(path), a) for number in here
                  for name, x in made.get((file, function, number), {}).items()
                  for path, a in jax.tree.leaves_with_path(x) if _arrays(a)]
        times = collections.Counter()
        for one in sent:
            if count := one.times(file, function, here):
                times[f"{'backward' if one.is_backward else 'forward'}: {one.text}"] += count
        found.append(Line(code[first - 1:last], arrays, times))
    return found


def annotated(file: str, function: str, sent: list[Sent], made: dict) -> str:
    """A function's lines, each with the arrays it makes and the bytes it sends."""
    out = [f"\n{Path(file).name}:{function}\n"]
    for line in lines_of(file, function, sent, made):
        out += line.code
        for name, a in line.arrays:
            over = ", ".join(sorted(shard.varying(a))) or "no axis"
            out.append(f"        {name:24} {_shape(a):20} varies over {over}")
        out += [f"        {text}{f', {count} times' if count > 1 else ''}"
                for text, count in line.sent.items()]
    return "\n".join(out)


def callees(file: str, function: str, sent: list[Sent]) -> list[str]:
    """Functions in the same file that this one calls and that send in the forward pass."""
    found = []
    for one in sent:
        names = [name for where, name, _ in one.places if where == file]
        if function in names and not one.is_backward:
            found += names[:names.index(function)]
    return [*dict.fromkeys(found)]


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    if "-h" in argv or "--help" in argv:
        return print(__doc__)
    chosen = []
    while argv and ".py:" in argv[0]:
        file, _, function = argv.pop(0).partition(":")
        chosen.append((str(Path(file).resolve()), function))
    config = train.parse(argv)
    chosen = chosen or [block_of(config)]
    print(text(walk(config, chosen), chosen))


def block_of(config: Any) -> tuple[str, str]:
    """A network's block: its file and its name."""
    return inspect.getsourcefile(network_of(config.network).loss), "block"


def walk(config: Any, chosen: Sequence[tuple[str, str]]) -> Traced:
    """Trace the step for the `chosen` functions, pairs (file, function), which must exist."""
    for where in chosen:
        statements(*where)
    return trace(config, {file for file, _ in chosen})


def text(found: Traced, chosen: Sequence[tuple[str, str]]) -> str:
    """The text `main` prints for these functions."""
    sent, made, c = found
    heading = (f"{c.batch} rows of {c.network.seq_len} tokens, {c.accumulate} parts; "
               f"{c.network.dtype}; --mesh {c.mesh}")
    return "\n".join([heading, *(annotated(file, name, sent, made) for file, function in chosen
                                 for name in (function, *callees(file, function, sent)))])


if __name__ == "__main__":
    train.run_main(main)
