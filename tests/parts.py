"""The parts: folders that a fork may delete. This is the only table of what needs what. The tests
of the layout, of README and of copies without a part read it.

    python -m tests.parts       print README's table
"""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FIVE = ("model", "shard", "train", "data", "sample")


class Part(NamedTuple):
    what: str
    needs: frozenset[str] = frozenset()     # the other parts that its files import
    pages: tuple[str, ...] = ()             # pages of docs/ that are about it


PARTS = {
    "published": Part("published models: networks, reading and writing folders, presets",
                      pages=("published.md", "networks.md")),
    "forecast": Part("`--topology`, `--mesh auto`, `--bench`, `--minutes`, `--depth`"),
    "tools": Part("chat, chats as `--data`, scoring, beam search, plots, loggers, tiktoken"),
    "tasks": Part("pairs and arrays as `--data`, metrics such as ROUGE, custom steps"),
    "accounts": Part("`--report`, `--against`, `--find_nan`, `--accept`, `--profile`",
                     frozenset({"forecast"})),
    "precision": Part("`--dtype float16`, `--send_dtype float8`"),
    "stores": Part("runs and data in buckets: `--out gs://...`, `--data s3://...`"),
    "recipes": Part("algorithms and recorded runs"),
    "learn": Part("lessons, `learn.explain`, `learn.walk`", frozenset({"forecast"}))}

# {file of a part: the parts that it needs in addition to those of its part}
FILES = {"recipes/caption.py": {"published", "tasks"}, "recipes/seq2seq.py": {"published", "tasks"},
         "recipes/classify.py": {"published"}, "recipes/uva3d.py": {"published"},
         "recipes/lm_eval.py": {"tools"}, "recipes/dpo.py": {"tools"}, "recipes/ddpg.py": {"tasks"},
         "recipes/ppo.py": {"tasks"}, "recipes/distill.py": {"tasks"}}

# For tests of the whole repository.
GONE = {part for part in PARTS if not (ROOT / part).is_dir()}
of_the_whole = pytest.mark.skipif(bool(GONE), reason=f"without {', '.join(sorted(GONE))}")

# The maximum number of lines of Python in each folder.
BUDGETS = {"zigzag": 14_986, "published": 6_080, "forecast": 1_120, "tools": 1_400, "tasks": 1_010,
           "accounts": 1_300, "precision": 300, "stores": 710, "recipes": 1_530, "learn": 3_050}


def is_there(part: str, root: Path = ROOT) -> bool:
    return (root / part).is_dir()


@functools.cache
def imported(path: Path, root: Path = ROOT) -> frozenset[str]:
    """The first names of the modules that a file imports at its top, and of those that its imports
    from tests/ import."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found.add(name.split(".")[0])
            if name.startswith("tests."):
                found.add(name.split(".")[1])       # that folder may be gone with its part
                for length in (len(name.split(".")), len(name.split(".")) - 1):
                    file = root.joinpath(*name.split(".")[:length]).with_suffix(".py")
                    if file.exists() and file != path:
                        found |= imported(file, root)
    return frozenset(found)


def needs_of_test(path: Path, root: Path = ROOT) -> set[str]:
    """The parts that pytest needs to collect a test file: its folder's part, the parts that it
    imports, itself or through other test files, and the parts that these need."""
    folder = path.relative_to(root / "tests").parts[0] if root / "tests" in path.parents else ""
    found = (imported(path, root) | {folder}) & PARTS.keys()
    return found.union(*(PARTS[name].needs for name in found))


def lines(folder: str, root: Path = ROOT) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (root / folder).rglob("*.py"))


def table() -> str:
    """README's table of the parts that are here."""
    rows = [f"| [{name}/]({name}/) | {part.what} | {lines(name):,} | "
            f"{', '.join(sorted(part.needs)) or '-'} |" for name, part in PARTS.items()
            if is_there(name)]
    return "\n".join(["| part | what | lines | needs |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(table(), end="")
