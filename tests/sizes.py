"""The lines of our own files, in docs/compared.md.

    python -m tests.sizes            print the table
    python -m tests.sizes write      write it into the page, and our row of the comparison

A test compares the page with the same functions.
"""

import datetime
import re
import sys
from pathlib import Path

from tests.parts import PARTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/compared.md"
PLAIN = "model.py", "shard.py", "train.py", "sample.py", "data.py"
TOGETHER = "these together"

TABLE = re.compile(r"(?<=<!-- sizes -->\n).*?(?=<!-- end of sizes -->)", re.S)
COMPARISON = re.compile(r"^\| zigzag \| \d.*$", re.M)       # our row: the only one with figures
FIGURE = re.compile(r"^\| `?([\w./ ]+?)`? \| ([\d,]+) \|$", re.M)


def lines(*paths):
    """The lines of these files together, counted as wc -l does."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def sizes():
    """{part of the repository: its lines}. In docs/ the lines of its pages are counted, elsewhere
    those of Python files."""
    wings = sorted(path.parent.name for path in (ROOT / "zigzag").glob("*/__init__.py"))
    folders = *(f"zigzag/{wing}" for wing in wings), *list(PARTS)[:6]
    code = {name: lines(ROOT / name) for name in PLAIN} | {
        f"{folder}/": lines(*(ROOT / folder).glob("*.py")) for folder in folders}
    return {**code, TOGETHER: sum(code.values()), "tests/": lines(*(ROOT / "tests").rglob("*.py")),
            "docs/": lines(*(ROOT / "docs").rglob("*.md"))}


def table():
    """The markdown table of sizes()."""
    rows = ((part if part == TOGETHER else f"`{part}`", n) for part, n in sizes().items())
    return "\n".join([f"| | lines, {datetime.date.today()} |", "|---|---|",
                      *(f"| {part} | {n:,} |" for part, n in rows), ""])


def comparison():
    """Our row in the comparison of sizes."""
    n = sizes()
    split = n["shard.py"] + n["zigzag/parallel/"]
    loop = n["train.py"] + n["zigzag/run/"]
    return (f"| zigzag | {n['model.py']:,} | {split:,} (shard.py, `parallel`) "
            f"| {loop:,} (train.py, `run`) | {n[TOGETHER]:,} (below) |")


def figures(text):
    """{part: its lines} of a table as table() makes it."""
    return {part: int(n.replace(",", "")) for part, n in FIGURE.findall(text)}


def write():
    """Write the table and the row into their page."""
    text = TABLE.sub(lambda _: table(), PAGE.read_text())
    PAGE.write_text(COMPARISON.sub(lambda _: comparison(), text))


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    else:
        print(table(), end="")
