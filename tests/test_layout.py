"""The law of imports, the sizes of functions and lines, and a few habits of the prose, read from
the source. They keep each file readable from top to bottom: whoever opens one needs only the files
below it."""

import ast
import functools
import graphlib
import re

import pytest

from tests import parts
from tests.helpers import ROOT
from tests.parts import BUDGETS, FIVE, PARTS, is_there
from tests.parts import FILES as NEEDED

# {wing of zigzag/: the wings that it may import}. (Each may also import its own files.)
WINGS = {
    "core": set(),
    "disk": {"core"},
    "parallel": {"core", "disk"},
    "generate": {"core", "disk", "parallel"},
    "run": {"core", "disk", "parallel", "generate"},
}
# The wing above the top-level files: it may import everything but parts, and only functions of
# those files import it.
ABOVE = "commands"
# {file or part beside zigzag/: the files, wings and parts that it may import}
ENGINE = set(WINGS)
TOP = {
    "shard": ENGINE,
    "data": ENGINE,
    "model": ENGINE | {"shard"},
    "sample": ENGINE | {"shard", "data", "model"},
    "train": ENGINE | {"shard", "data", "model", "sample"},
}
# (tests/parts.py says what else a file needs at run time.)
TOP |= {f"{part}/": {*FIVE, *ENGINE, ABOVE, f"{part}/", *(f"{n}/" for n in PARTS[part].needs)}
        for part in PARTS}
TOP["recipes/"] |= {f"{part}/" for needs in NEEDED.values() for part in needs}
# Packages that are imported where they are used: optional ones, and private ones of jax for other
# hardware.
OPTIONAL = ("sentencepiece", "libtpu", "orbax", "jax.experimental.pallas", "jax_cuda12_plugin",
            "jax._src.cudnn")


def module_of(path):
    """The dotted name of a file; for an __init__.py, its folder's."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Our own files. A script that a fork saves beside train.py is not one of them.
FILES = {module_of(path): path
         for pattern in (*(f"{name}.py" for name in FIVE), "conftest.py", "test_all.py",
                         *(f"{part}/*.py" for part in PARTS), "tests/**/*.py", "zigzag/**/*.py")
         for path in sorted(ROOT.glob(pattern))}
TESTS = {name for name in FILES if name in ("test_all", "conftest")
         or name.split(".")[0] == "tests"
         or name.rpartition(".")[2].startswith("test_")}
CODE = [name for name in FILES if name not in TESTS]


def place_of(module):
    """The wing, the top-level file or the folder of a module: a key of WINGS or TOP, or a name that
    nothing may import (tests, `zigzag` without a wing). "" for third-party packages."""
    first, _, rest = module.partition(".")
    if first == "zigzag":
        return rest.split(".")[0] or "zigzag"
    if first in PARTS:
        return f"{first}/"
    return first if first in TOP or module in FILES else ""


def allowed(name):
    """The places that a file may import."""
    place = place_of(name)
    if place == ABOVE:
        return {ABOVE, *FIVE, *WINGS}
    return {place} | WINGS[place] if place in WINGS else TOP.get(place, set())


def is_command(name, module):
    """Whether a top-level file imports a file of the wing above it."""
    return place_of(module) == ABOVE and name in TOP


@functools.cache
def tree_of(name):
    return ast.parse(FILES[name].read_text())


def imported(node):
    """The modules that an import statement names. (`from zigzag.core import mesh` is
    zigzag.core.mesh.)"""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"line {node.lineno}: a relative import"
    return [full if (full := f"{node.module}.{alias.name}") in FILES else node.module
            for alias in node.names]


def imports(name):
    """(module, line, whether it stands at the top level) of each import in a file, except those
    under `if __name__ == "__main__":`."""
    found = []

    def visit(node, is_top):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            for child in node.orelse:
                visit(child, is_top)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.extend((module, node.lineno, is_top) for module in imported(node))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, is_top and not inside)

    visit(tree_of(name), True)
    return found


def test_imports_follow_the_law():
    """Two files that need each other: neither can be read, or changed, alone. A lower file gets
    what it needs from a higher one as an argument."""
    wrong = [f"{FILES[name]}:{line}: {name} imports {module}"
             for name in CODE for module, line, is_top in imports(name)
             if (place := place_of(module)) and place not in allowed(name)
             and (is_top or not is_command(name, module))]
    assert not wrong, "\n".join(wrong)


def test_a_script_beside_train_is_nobodys_business(tmp_path, monkeypatch):
    """README's own script, saved where README says, that fails the tests of a fork; a law that
    leaves out files of zigzag/ too."""
    assert {path.stem for path in FILES.values() if path.parent == ROOT} <= {
        *TOP, "conftest", "test_all"}
    (tmp_path / "errors.py").write_text("def wrong():\n    import train\n    return train\n")
    monkeypatch.setitem(FILES, "zigzag.core.errors", tmp_path / "errors.py")
    tree_of.cache_clear()
    with pytest.raises(AssertionError, match="zigzag.core.errors imports train"):
        test_imports_follow_the_law()
    tree_of.cache_clear()


def test_nothing_imports_in_a_circle():
    """Files that import each other: they run in only one order of imports, and cannot be taken
    apart. The table above does not see this inside a wing, or among the files of a part."""
    graphlib.TopologicalSorter({
        name: {module for module, _, is_top in imports(name)
               if module in CODE and (is_top or not is_command(name, module))}
        for name in CODE}).prepare()        # raises CycleError, with the circle


def test_the_imports_of_a_file_stand_at_its_top():
    """An import inside a function hides what a file needs, and most of all a circle."""
    wrong = [f"{FILES[name]}:{line}: {module}" for name in CODE
             for module, line, is_top in imports(name)
             if not is_top and not is_command(name, module)
             and not any((module + ".").startswith(o + ".") for o in OPTIONAL)]
    assert not wrong, "\n".join(wrong)


def test_every_file_of_zigzag_lies_in_a_wing():
    """A file beside the wings, or a new wing. The table above does not have it, so nothing would
    check its imports, and a reader would not know whether to open it."""
    known = {ROOT / "zigzag/__init__.py",
             *(path for wing in (*WINGS, ABOVE)
               for path in (ROOT / "zigzag" / wing).glob("*.py"))}
    wrong = [str(FILES[name]) for name in CODE
             if name.split(".")[0] == "zigzag" and FILES[name] not in known]
    assert not wrong, wrong


@pytest.mark.parametrize("wing", [*WINGS, ABOVE])
def test_a_wing_says_what_it_is_and_runs_nothing(wing):
    """A wing without a docstring, or one whose __init__.py imports its files: importing one of them
    would then import all, and the test for circles would not see it."""
    body = ast.parse((ROOT / "zigzag" / wing / "__init__.py").read_text()).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant) and len(body[0].value.value.split()) > 10


@pytest.mark.parametrize("part", [*filter(is_there, PARTS)])
def test_a_part_says_what_it_is(part):
    """A part of which a fork cannot tell whether it needs it."""
    about = ROOT / part / "__init__.py"
    text = (ast.get_docstring(ast.parse(about.read_text())) if about.exists() else "") or (
        ROOT / part / "README.md").read_text()
    assert len(text.split()) > 30, part


@pytest.mark.parametrize("name", BUDGETS)
def test_a_folder_keeps_to_its_budget(name):
    """A folder that grows, each line for a good reason."""
    assert parts.lines(name) <= BUDGETS[name], f"{name}/: {parts.lines(name):,} lines"


def test_no_two_files_share_a_name():
    """Two reading.py, of which a reader opens the wrong one."""
    names = [path.stem for name, path in FILES.items() if name in CODE]
    twice = {name for name in names if names.count(name) > 1} - {"__init__", "adds"}
    assert not twice, twice


def test_functions_are_short_enough_to_be_read():
    """A function of 260 lines with eleven others inside. (Inner functions count as its lines.)"""
    long = {f"{name}.{node.name}": length for name in FILES for node in ast.walk(tree_of(name))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (length := node.end_lineno - node.lineno + 1) > 80}
    assert not long, long


def lines_of(*patterns):
    """(place, line) of all lines of our own files and of these."""
    for path in (*FILES.values(), *(path for each in patterns for path in ROOT.glob(each))):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path}:{number}", line


def test_lines_fit_on_a_page():
    """Lines of 160 columns, which a diff or a second window cuts in half. (Rows of a table may be
    that long.)"""
    long = [f"{at}: {len(line)} columns" for at, line in lines_of(
        "*.md", "docs/*.md", "*.txt", "*.ini", "*.toml", ".ci/*", "recipes/*.sh")
            if len(line) > 100 and not (".md:" in at and line.startswith("|"))]
    assert not long, "\n".join(long)


# The collectives that the head of each section of shard.py is about.
SECTIONS = {"data": {"psum", "reduce_scatter"}, "fsdp": {"all_gather", "gather"},
            "tensor": {"all_gather", "psum_scatter", "psum"},
            "The vocabulary": {"psum", "pmax"}, "seq": {"ppermute"}, "expert": {"all_to_all"},
            "pipe": {"ppermute", "psum_scatter"}}


def sections():
    """title -> (lines of the head, lines of the code) of each section of shard.py."""
    found, title, lines = {}, "", (ROOT / "shard.py").read_text().splitlines()
    for i, line in enumerate(lines):
        begins = re.match(r"# (\w[\w ]*)", line)
        if begins and (lines[i - 1].startswith("# ---") or
                       lines[i - 1] == "" and lines[i + 1] == "#"):
            title = begins[1]
            found[title] = ([], [])
        if title:
            found[title][0 if line.startswith("#") else 1].append(line)
    return found


@pytest.mark.parametrize("title", SECTIONS)
def test_each_parallelism_is_one_section(title):
    """A parallelism that can be understood only from four files, or whose comment names another
    collective than its code calls."""
    head, lines = sections()[title]
    given = [m[1] for line in head if (m := re.match(r"#   (\w+)  +\S", line))]
    assert given == ["split", "collective", "bytes", "correct", "more"]
    code = ast.parse("\n".join(lines))
    called = {node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
              for node in ast.walk(code) if isinstance(node, ast.Call)
              and isinstance(node.func, (ast.Attribute, ast.Name))}
    assert SECTIONS[title] <= called
    assert len([line for line in lines if line.strip()]) <= 80
