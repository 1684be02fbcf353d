"""What a device holds and sends at each line of a block, from the trace of the real training step.

    python -m learn.walk --mesh data=2,tensor=2
    python -m learn.walk networks/transformer.py:block --model transformer --mesh tensor=4
    python -m learn.walk model.py:norm --mesh fsdp=2,seq=2,tensor=2 --experts 4

prints the lines of model.py's block (or of the functions given), and of the functions in the same
file that it calls, if they send anything. Under each line are

    the arrays that it makes: their shape on one device, and the mesh axes over which they vary
    what it sends in the forward pass, and what autodiff sends for it in the backward pass

All other flags are those of train.py. Nothing is computed: the step is traced, not compiled.
"""

import ast
import collections
import inspect
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import jax

import networks
import shard
import train
from zigzag.measure import forecast, hlo
from zigzag.rule.jaxprs import equations_below

# {the name that jax gives a collective: ours}
COLLECTIVES = {
    "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "psum_invariant": "all-reduce", "pmax": "all-reduce",
    "all_to_all": "all-to-all", "ppermute": "collective-permute"}


class Sent(NamedTuple):
    """A collective: where it is in the code, as (file, function, line), innermost first."""
    places: list[tuple[str, str, int]]
    is_backward: bool
    text: str
    bytes: int              # that a device sends, each time it runs


def trace(config: Any, watched: set[str]
          ) -> tuple[list[Sent], dict[tuple[str, str, int], dict], Any]:
    """(what the step sends, {(file, function, line): {name: array made there}} for functions of the
    files `watched`, the configuration with its sizes)."""
    made: dict[tuple[str, str, int], dict] = {}
    entered = set()

    def enter(frame, event, _):
        """Called by Python at each call; returns what it calls at each line in it."""
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

    config, _ = train.commands.choose_mesh(config, train.TRAINER)
    program, before = train.commands.program_of(config, train.TRAINER), sys.gettrace()
    sys.settrace(enter)
    try:
        traced = program.step.trace(program.state, program.batch)
    finally:
        sys.settrace(before)
    sizes, sent = program.mesh.shape, []
    for eqn, above in equations_below(traced.jaxpr.jaxpr):
        if eqn.primitive.name in COLLECTIVES and eqn.source_info.traceback:
            places = [(f.file_name, f.function_name, f.line_num)
                      for f in eqn.source_info.traceback.frames]
            is_backward = any("transpose" in str(e.source_info.name_stack) for e in (*above, eqn))
            sent.append(Sent(places, is_backward, *_text_and_bytes(eqn, sizes)))
    return sent, made, program.config


def _arrays(x):
    known = isinstance(x, (jax.core.Tracer, dict, list, tuple))
    return [a for a in jax.tree.leaves(x) if isinstance(a, jax.core.Tracer)] if known else []


def _text_and_bytes(eqn, sizes):
    """A collective in words (its name, axes and shapes), and the bytes that a device sends."""
    kind = COLLECTIVES[eqn.primitive.name]
    axes = eqn.params.get("axes") or eqn.params["axis_name"]
    axes = (axes,) if isinstance(axes, str) else axes
    counted = eqn.invars if kind == "reduce-scatter" else eqn.outvars
    size = sum(v.aval.size * v.aval.dtype.itemsize for v in counted)
    found, = hlo.add_up([(kind, "+".join(axes), math.prod(sizes[axis] for axis in axes), 1, size)])
    shapes = dict.fromkeys((_shape(eqn.invars[0].aval), _shape(eqn.outvars[0].aval)))
    name = f"{kind} (max)" if eqn.primitive.name == "pmax" else kind
    text = f"{name} over {', '.join(axes)}: {' -> '.join(shapes)}"
    return f"{text}, sends {forecast.human_bytes(found.bytes)}", found.bytes


def _shape(x):
    return f"[{', '.join(map(str, x.shape))}]"


# -------------------------------------------------------------------------------------------

def statements(file: str, function: str) -> list[tuple[int, int]]:
    """The first and last line of each statement of a function, from its decorators on. (Of one with
    a body, such as an if, the lines before the body.)"""
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


def annotated(file: str, function: str, sent: list[Sent], made: dict) -> str:
    """The lines of a function, each with what it makes and sends."""
    lines = Path(file).read_text().splitlines()
    if not any((where, name) == (file, function) for where, name, _ in made):
        raise shard.ConfigError(f"{Path(file).name}:{function} is not called in this step")
    out = [f"\n{Path(file).name}:{function}\n"]
    for first, last in sorted(statements(file, function)):
        out += lines[first - 1:last]
        here = range(first, last + 1)
        for number in here:
            for name, x in made.get((file, function, number), {}).items():
                for path, a in jax.tree.leaves_with_path(x):
                    if _arrays(a):
                        over = ", ".join(sorted(shard.varying(a))) or "no axis"
                        what = name + jax.tree_util.keystr(path)
                        out.append(f"        {what:24} {_shape(a):20} varies over {over}")
        here = [(one.is_backward, one.text) for one in sent if any(
            place[:2] == (file, function) and place[2] in here for place in one.places)]
        for (is_backward, text), count in collections.Counter(here).items():
            out.append(f"        {'backward' if is_backward else 'forward'}: {text}"
                       f"{f', {count} times' if count > 1 else ''}")
    return "\n".join(out)


def callees(file: str, function: str, sent: list[Sent]) -> list[str]:
    """The functions of the same file that this one calls, and that send in the forward pass."""
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
    print(text(config, chosen))


def text(config: Any, chosen: Sequence[tuple[str, str]] = ()) -> str:
    """What `main` prints for the functions `chosen`, each (file, function); () for the block of
    the configuration's network."""
    if not chosen:
        chosen = [(inspect.getsourcefile(networks.network_of(config.network).loss), "block")]
    for where in chosen:
        statements(*where)      # (refuses what is not there)
    sent, made, c = trace(config, {file for file, _ in chosen})
    heading = (f"{c.batch} rows of {c.seq_len} tokens, {c.accumulate} parts; {c.dtype}; "
               f"--mesh {c.mesh}")
    return "\n".join([heading, *(annotated(file, name, sent, made) for file, function in chosen
                                 for name in (function, *callees(file, function, sent)))])


if __name__ == "__main__":
    train.run_main(main)
