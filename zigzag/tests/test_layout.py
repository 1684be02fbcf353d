"""The law of imports and the limits of sizes, read from the source. They keep each file readable
from top to bottom: whoever opens one needs only those below it."""

import ast
import functools
import graphlib
import re

import pytest

from zigzag.tests.common import ROOT

# What each top-level file imports of the others.
ALLOWED = {"shard": set(), "data": set(), "model": {"shard"}, "families": {"model", "families"},
           "sample": {"model", "shard", "data", "families"},
           "train": {"model", "shard", "data", "families", "sample"}}
# What not everybody has installed, or is private to jax and for hardware that is not here: imported
# where it is used.
OPTIONAL = ("sentencepiece", "libtpu", "orbax", "jax.experimental.pallas", "jax_cuda12_plugin",
            "jax._src.cudnn")

FILES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
         for pattern in ("*.py", "families/*.py", "zigzag/*.py", "zigzag/tests/*.py")
         for path in sorted(ROOT.glob(pattern)) if path.name != "__init__.py"}
FILES["families"] = ROOT / "families/__init__.py"
# A kind of model is made of the transformer's parts, and knows no other kind.
KINDS = {name: {"model", "shard", "families.towers"} - {name} for name in FILES
         if name.startswith("families.")}
LIBRARY = [name for name in FILES if name.startswith("zigzag.") and ".tests." not in name]


@functools.cache
def tree_of(name):
    return ast.parse(FILES[name].read_text())


def imported(node):
    """The modules that an import statement names. (`from zigzag import mesh` is zigzag.mesh.)"""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"line {node.lineno}: a relative import"
    return [full if (full := f"{node.module}.{alias.name}") in FILES else node.module
            for alias in node.names]


def imports(name):
    """(module, line, whether it stands at the top level) of each import in a file, but for what
    stands under `if __name__ == "__main__":`."""
    found = []

    def visit(node, is_top):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.extend((module, node.lineno, is_top) for module in imported(node))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, is_top and not inside)

    visit(tree_of(name), True)
    return found


def test_imports_follow_the_law():
    """Two files that need each other: neither can be read, or changed, alone. A lower file is given
    what it needs of a higher one, as an argument."""
    wrong = []
    for name in [*LIBRARY, *KINDS, *ALLOWED]:
        for module, line, _ in imports(name):
            known = {**ALLOWED, **KINDS}.get(name, set())
            top = module if module in known else module.split(".")[0]
            if (top in {*ALLOWED, "test_all"} - known) or module.startswith("zigzag.tests"):
                wrong.append(f"{FILES[name]}:{line}: {name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_library_imports_in_no_circle():
    """a imports b, and b imports a inside a function: it runs, and cannot be taken apart."""
    graphlib.TopologicalSorter({
        name: {module for module, *_ in imports(name) if module in LIBRARY} for name in LIBRARY
    }).prepare()        # raises CycleError, with the circle


def test_the_imports_of_a_file_stand_at_its_top():
    """An import inside a function hides what a file needs, and most of all a circle."""
    wrong = [f"{FILES[name]}:{line}: {module}" for name in [*LIBRARY, *KINDS, *ALLOWED]
             for module, line, is_top in imports(name)
             if not is_top and not any((module + ".").startswith(o + ".") for o in OPTIONAL)]
    assert not wrong, "\n".join(wrong)


def test_files_are_short_enough_to_be_read():
    """The first design had files of 2,500 and 1,800 lines, with 13 and 14 concerns."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    long = {name: n for name, n in lengths.items() if n > (
        900 if ".tests." in name else 400 if name == "test_all" else 650)}
    assert not long, long
    top = {name: lengths[name] for name in ALLOWED if name != "families"}
    assert sum(top.values()) < 2700, top


def test_functions_are_short_enough_to_be_read():
    """A function of 260 lines with eleven others inside. (Those inside count as its lines.)"""
    long = {f"{name}.{node.name}": length for name in FILES for node in ast.walk(tree_of(name))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (length := node.end_lineno - node.lineno + 1) > 80}
    assert not long, long


def test_lines_fit_on_a_page():
    """Lines of 160 columns, of which a diff or a second window shows half. (A table's may be.)"""
    paths = [*FILES.values(), *ROOT.glob("*.md"), *ROOT.glob("*.txt"), *ROOT.glob("*.ini"),
             *ROOT.glob("*.toml"), *ROOT.glob(".ci/*")]
    long = [f"{path}:{number}: {len(line)} columns" for path in paths
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if len(line) > 100 and not (path.suffix == ".md" and line.startswith("|"))]
    assert not long, "\n".join(long)


# Of each section of shard.py the collectives that its head is about.
SECTIONS = {"data": {"psum", "reduce_scatter"}, "fsdp": {"all_gather", "with_reduce_scatter"},
            "tensor": {"all_gather", "psum_scatter", "psum"},
            "The vocabulary": {"psum", "pmax"}, "seq": {"ppermute"}, "expert": {"all_to_all"},
            "pipe": {"ppermute", "psum_scatter"}}


def sections():
    """title -> (lines of the head, lines of the code) of each section of shard.py."""
    found, title, lines = {}, "", (ROOT / "shard.py").read_text().splitlines()
    for i, line in enumerate(lines):
        begins = re.match(r"# (\w[\w ]*)", line)
        if begins and lines[i - 1].startswith(("# ---", "")) and (
                lines[i + 1] == "#" or lines[i - 1].startswith("# ---")):
            title = begins[1]
            found[title] = ([], [])
        if title:
            found[title][0 if line.startswith("#") else 1].append(line)
    return found


@pytest.mark.parametrize("title", SECTIONS)
def test_each_parallelism_is_one_section(title):
    """A parallelism that can only be understood from four files, or whose comment says another
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
