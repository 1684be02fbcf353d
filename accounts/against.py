"""python train.py --against REVISION [flags]: what an edit costs. Also python shard.py --against.

It compiles the training step and the generation of one token, of this tree with its uncommitted
edits and of another git revision, for this machine or a --topology. Then it compares the work of
the compiled programs, and names the lines that ask for more of it:

    model.block sends 131 kB more per device and update: 4 more all-gather over tensor, from
    model.py:138

    compiled_in    compile a tree's programs in a process of its own (compile_once.py)
    Lines          which line of this tree a call is on
    worse          what got worse, and from which lines

A program that does the same work reports nothing, whatever the names and the order of its source.
"""

import collections
import contextlib
import difflib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from pathlib import Path
from typing import Any, Iterator, Sequence

from accounts.work import Call, Work, total, work_of
from zigzag.core.errors import ConfigError, RunError, human_bytes
from zigzag.core.options import ROOT
from zigzag.core.parts import part

units = part("forecast.dry_run", "--against")
# An amount that grows by more than this share of itself got worse.
MORE = 0.01
# How many lines to blame for it, and the least of what the first one added that another one must.
BLAMED, SHARE = 3, 0.2
ONCE = ROOT / "accounts/compile_once.py"


def flops(x: float) -> str:
    return units.in_units(x, {**units.FLOPS, "kflop": 1e3}, 2)


# {what work_of counts: how to print it}
SHOWN = {"arithmetic": flops, "peak memory": human_bytes, "sends": human_bytes,
         "collectives": "{:,}".format, "operations": "{:,}".format,
         "at least": lambda x: units.in_units(x, units.TIMES)}


def run(config: Any) -> None:
    """Print what differs between this tree and the revision in config.against. Fail, with status 1,
    if anything got worse. The flags are the command line's."""
    revision, words = config.against, sys.argv[1:]
    at = next((i for i, word in enumerate(words) if word.startswith("--against")), None)
    if at is None:
        raise ConfigError("--against is for a command line: python shard.py --against HEAD")
    del words[at:at + 1 + ("=" not in words[at])]
    with checked_out(revision) as old:
        programs = compiled_in(old, words, revision), compiled_in(ROOT, words, "this tree")
        meshes = [one["step"]["mesh"] for one in programs]
        if meshes[0] != meshes[1]:
            raise ConfigError(f"--against {revision}: it chose the mesh {meshes[0]}, and this tree "
                              f"{meshes[1]}; give --mesh")
        if compared(*programs, Lines(old, ROOT)):
            raise RunError(f"this tree costs more than {revision}, by over {MORE:.0%}")
    print("nothing got worse")


def compared(before: dict[str, Any], after: dict[str, Any], lines: "Lines") -> list[str]:
    """Print a comparison of two trees' programs. Return what got worse."""
    found = []
    for name, unit in ("step", "update"), ("token", "token"):
        if failed := before[name].get("error") or after[name].get("error"):
            say(name, f"not compared: {failed}")
            if "error" not in before[name]:
                found.append(f"the {name} no longer compiles")
            continue
        works, amounts = (work_of(before[name]), work_of(after[name])), []
        for what, shown in SHOWN.items():
            old, new = (total(work, what) for work in works)
            change = f" -> {shown(new)} ({new / old - 1:+.1%})" if 0 < old != new else ""
            amounts += [f"{what} {shown(old or new)}{change}"] if old or new else []
        say(name, ", ".join(amounts))
        found += worse(*works, lines, unit)
    for one in found:
        say("worse", one)
    return found


def say(name: str, text: str) -> None:
    """Print a named text in lines of 96 columns."""
    print(textwrap.fill(f"{name:8} {text}", 96, subsequent_indent=9 * " ", break_long_words=False,
                        break_on_hyphens=False))


# -------------------------------------------------------------------------------------------
# Two trees, compiled

def git(*words: str, otherwise: str = "needs a git repository") -> str:
    """Return what git prints for this tree. If it fails, raise an error that says `otherwise`."""
    try:
        found = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("--against needs git, which isn't installed") from None
    if found.returncode:
        raise ConfigError(f"--against {otherwise}: {' '.join(found.stderr.split())[:200]}")
    return found.stdout.strip()


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a temporary folder with this tree as it was at a revision."""
    commit = git("rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}",
                 otherwise=f"{revision}: git finds no such commit")
    with tempfile.TemporaryDirectory() as folder:
        tree, file = Path(folder).resolve() / "tree", Path(folder) / "tree.tar"
        git("archive", f"--output={file}", commit, otherwise=revision)
        with tarfile.open(file) as archive:
            archive.extractall(tree, filter="data")
        yield tree


def compiled_in(tree: Path, words: Sequence[str], name: str) -> dict[str, Any]:
    """Compile a tree's programs in a process of its own. Return what compile_once.py writes."""
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "programs.json"
        found = subprocess.run([sys.executable, "-P", ONCE, file, *words], capture_output=True,
                               text=True, env={
                                   **os.environ, "PYTHONPATH": os.pathsep.join(paths),
                                   # A cached program has the lines of whoever compiled it.
                                   "JAX_ENABLE_COMPILATION_CACHE": "false",
                                   # The last line of a traceback is then the error.
                                   "JAX_TRACEBACK_FILTERING": "off"})
        if not file.exists():
            said = (found.stderr.strip() or f"status {found.returncode}").splitlines()
            said = next((line for line in said if line.startswith("error: ")), said[-1])
            raise ConfigError(f"--against: {name} doesn't compile with these flags: "
                              f"{said.removeprefix('error: ')}")
        return json.loads(file.read_text())


# -------------------------------------------------------------------------------------------
# Which line of this tree a call is on

class Lines:
    """Maps the lines of the old tree to those of the new one, by their text."""

    def __init__(self, old: Path, new: Path):
        self.old, self.new, self.matches = old, new, {}

    def match(self, file: str) -> tuple[dict[int, int], set[int]]:
        """Return ({line of the old file: its line in the new one}, the new one's edited lines). A
        line that moved is not edited. An edited line stands for the old line in its place."""
        if file not in self.matches:
            old, new = (_stripped(tree / file) for tree in (self.old, self.new))
            same, gone, added = {}, {}, {}
            for kind, a, b, c, d in difflib.SequenceMatcher(
                    None, old, new, autojunk=False).get_opcodes():
                if kind == "equal":
                    same |= zip(range(a + 1, b + 1), range(c + 1, d + 1))
                else:
                    gone |= {i + 1: min(c + 1 + i - a, max(c + 1, d)) for i in range(a, b)}
                    added |= {new[i]: i + 1 for i in range(c, d) if new[i]}
            moved = {i: added[old[i - 1]] for i in gone if old[i - 1] in added}
            self.matches[file] = same | gone | moved, {*added.values()} - {*moved.values()}
        return self.matches[file]

    def is_edited(self, place: Call) -> bool:
        return place.line in self.match(place.file)[1]

    def edits(self) -> str:
        """Return where the first edit of each file is, to print after a line that isn't edited."""
        found = [f"{file}:{min(edited)}" for file, (_, edited) in self.matches.items() if edited]
        return f" (edited: {', '.join(sorted(found))})" if found else ""

    def place(self, calls: Sequence[Call], is_old: bool) -> Call | None:
        """Return the call to blame, as one of the new tree: the innermost on an edited line or, if
        there is none, the innermost in a model, else in shard.py, else anywhere in the tree."""
        tree, own = self.old if is_old else self.new, []
        for file, line, function in calls:
            if not file:
                return self.weight(function)
            if Path(file).is_relative_to(tree) and Path(file) != ONCE:
                file = Path(file).relative_to(tree).as_posix()
                line = self.match(file)[0].get(line, line) if is_old else line
                own.append(Call(file, line, function))
        return min(own, default=None, key=lambda place: (
            not self.is_edited(place), not place.file.startswith(("model.py", "published/")),
            place.file != "shard.py"))

    def weight(self, name: str) -> Call:
        """Return the row of a weight table for this weight, an edited one if there is one."""
        rows = [Call(path.relative_to(self.new).as_posix(), number, name)
                for path in (self.new / "model.py", *(self.new / "published").glob("*.py"))
                for number, line in enumerate(_stripped(path), 1) if f'"{name}": make(' in line]
        return min(rows, key=lambda row: not self.is_edited(row), default=None)


def _stripped(path):
    """Return a file's lines without indentation, or no lines if there is no such file."""
    return [line.strip() for line in path.read_text().splitlines()] if path.exists() else []


# -------------------------------------------------------------------------------------------
# What got worse

def worse(before: Work, after: Work, lines: Lines, unit: str) -> list[str]:
    """List what got worse between two versions of a program. `unit` is what a run of it makes."""
    found, per = [], f"per device and {unit}"

    def change(what):
        return total(after, what) - total(before, what)

    def grew(what, of=None):
        """Return by how much an amount grew, or 0 if by at most MORE of the old amount `of`."""
        return max(0, change(what)) * (change(what) > MORE * total(before, of or what))

    def increases(what, sign=1):
        """Return {file and line: (how much more it asks for, the place)}; with sign -1, less."""
        amounts, places = collections.Counter(), {}
        for work, is_old in (before, True), (after, False):
            for calls, amount in work[what].items():
                if place := lines.place(calls, is_old):
                    amounts[place[:2]] += -sign * amount if is_old else sign * amount
                    places[place[:2]] = place
        return {key: (x, places[key]) for key, x in amounts.items() if x > 0}

    def blame(what, tells, sign=1):
        """Add tells(how much more) for the lines that added most: only edited ones, if some did."""
        rows = sorted(increases(what, sign).values(), key=lambda row: -row[0])
        rows = [row for row in rows if row[0] >= SHARE * rows[0][0]][:BLAMED]
        for x, place in [row for row in rows if lines.is_edited(row[1])] or rows:
            edits = "" if lines.is_edited(place) else lines.edits()
            found.append(f"{Path(place.file).stem}.{place.function} {tells(x)}, from {place.file}:"
                         f"{place.line}{edits}")
        if not rows:
            found.append(f"an unknown line {tells(sign * change(what))}{lines.edits()}")

    if more := grew("arithmetic"):
        blame("arithmetic", lambda x: f"computes {flops(x)} more {per}")
    if grew("float32", "arithmetic") > more:
        blame("float32", lambda x: f"computes {flops(x)} more in float32 {per}")
    if more := grew("peak memory"):
        peak = f"per device, where the peak is {human_bytes(more)} higher"
        if grew("arguments", "peak memory"):
            blame("arguments", lambda x: f"takes {human_bytes(x)} more {peak}")
        elif change("arithmetic") < -MORE * total(before, "arithmetic"):
            blame("arithmetic", lambda x: f"keeps what it recomputed with {flops(x)} {peak}", -1)
        else:
            blame("results", lambda x: f"stores {human_bytes(x)} more {peak}")
    for _, kind, axis in sorted(key for key in after if key[0] == "collectives"):
        more = change(("collectives", kind, axis))
        times = f"{more:,} more" * (more > 0) or "as many"
        if grew(("sends", kind, axis), "sends"):
            blame(("sends", kind, axis), lambda x: f"sends {human_bytes(x)} more {per}: {times} "
                  f"{kind} over {axis}")
        elif grew(("collectives", kind, axis)):
            blame(("collectives", kind, axis), lambda x: f"runs {x:,} more {kind} over {axis} {per}"
                  )
    if grew("operations"):
        blame("operations", lambda x: f"runs {x:,} more operations {per}")
    return found
