"""The lessons run, their predictions hold, and their exercises have the right answers."""

import json
import re
import subprocess
import sys

import pytest

from learn import lesson
from learn.solutions import ANSWERS
from tests.common import full
from tests.helpers import ROOT
from zigzag.core.chips import CHIPS

RUN = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
from learn.solutions import ANSWERS
from learn.lesson import check
for name, (right, why) in ANSWERS.items():
    assert check(name, right), name
    assert not check(name, "nothing" if isinstance(right, str) else 3 * right + 1), name
"""


# {lesson: {planted bug: what finds it}}, as the lessons say. Kept: it is not wrong, only unusual.
# Those of SERIAL are wrong on one device as well; the others are right there, unless a type finds
# them.
FOUND = {"type": "ValueError: shard_map .* can't be statically inferred",
         "shape": "TypeError: dot_general requires contracting dimensions",
         "comparison": r"wrong by (?!0\.0)\d|losses differ by \d*[1-9]\d*\.\d%",
         "right": r"wrong by 0\.00|losses differ by 0\.0%", "kept": "no error",
         "refusal": "ConfigError: "}
SERIAL = {"the activation after a partial sum", "no mask", "results in the wrong order"}
BUGS = {
    "1": {"ValueError": "type"},
    "2": {"a missing sum": "type", "one sum too many": "comparison",
          "a count that is a mean": "comparison"},
    "3": {"a weight that is not gathered": "shape", "gathered along the wrong dimension": "shape",
          "a part that fits by chance": "comparison"},
    "4": {"no reduction": "type", "a mean for a sum": "comparison",
          "the activation after a partial sum": "comparison"},
    "5": {"('up', P(None, 'data'))": "kept", "('up', P('tensor', 'tensor'))": "refusal",
          "('u', P('tensor',))": "kept", "('upp', P('tensor',))": "refusal"},
    "6": dict.fromkeys(["the mask by local places", "the keys of the device after", "no mask"],
                       "comparison"),
    "7": {"results from the first tick on": "comparison",
          "the results of all stages": "comparison", "no sum over stages": "type"},
    "8": dict.fromkeys(["an expert's number that counts from 0 on each device",
                        "results in the wrong order", "shares of this device's tokens alone"],
                       "comparison"),
    "9": dict.fromkeys(["tensor=3", "pipe=4,data=2", "fsdp=8,tensor=2", "tensr=2"], "refusal")}


def assert_found(bugs, lines):
    """Assert that these lines say what finds each bug, on the mesh and on one device."""
    alone = "    on one device: "
    for bug, finder in bugs.items():
        at, = (at for at, line in enumerate(lines) if line.startswith(f"{bug}: "))
        pattern = "" if bug == "ValueError" else f"{re.escape(bug)}: (.*: )?"
        assert re.match(f"{pattern}({FOUND[finder]})", lines[at]), lines[at]
        if finder in ("type", "shape", "comparison") and pattern:
            wrong = finder if finder == "type" or bug in SERIAL else "right"
            assert re.match(f"{alone}(.*: )?({FOUND[wrong]})", lines[at + 1]), lines[at + 1]


# A word of the cell that .ci/run leaves out: it compiles trainers, for half a minute.
LONG = {"2": "def losses(", "9": "def compare("}


def code_of(path):
    return [text for kind, text in lesson.cells(path) if kind == "code"]


def without(word, path, folder):
    """A copy of a lesson without the cell that has this word."""
    cells = path.read_text().split("# %%")
    kept = [cell for cell in cells if word not in cell]
    assert len(kept) == len(cells) - 1
    (folder / path.name).write_text("# %%".join(kept))
    return folder / path.name


@pytest.mark.parametrize("number, long", [
    full(n, "") if n in LONG else (n, "") for n in lesson.LESSONS] + [*LONG.items()])
def test_a_lesson_runs(number, long, tmp_path):
    """A prediction that the compiled program does not keep to; a planted bug that is found by
    something else than the lesson says, or not at all; one that is wrong on one device, where the
    lesson calls it right; an exercise without an answer, or with a wrong one; a picture that
    is not there."""
    path = without(long, lesson.LESSONS[number], tmp_path) if long else lesson.LESSONS[number]
    done = subprocess.run([sys.executable, "-c", RUN, str(path)], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    asked = [line.split('"')[1] for text in code_of(path) for line in text.splitlines()
             if line.startswith("check(")]
    assert asked == [name for name in ANSWERS if name[0] == number] and len(asked) >= 3
    if long != LONG["2"]:       # (whose bugs are in that cell)
        assert_found(BUGS[number], done.stdout.splitlines())
    for name in re.findall(r"^picture: (.*)$", done.stdout, re.M):
        assert (ROOT / name).is_file(), name
    text = path.read_text()
    for part in ("## When it pays", "## Exercises", "One idea: **"):
        assert part in text, part


# What the text works out by hand: {lesson: {words around a number: its value}}. A v5e sends 45 GB/s
# each way along an axis.
FLOPS, LINK = CHIPS["TPU v5 lite"].flops, 2 * 45e9
BYTE = FLOPS / LINK                     # operations in the time of a byte
MLP = 4096 * 1024 * 3                   # weights of an expert
X, EXPERTS = 4096**2 * 2, 64 * MLP * 2  # bytes of a stream, and of all experts
STAGE = 8e9 / (4 * 4096)                # operations for each byte that a stage sends
FIGURES = {
    "1": {"multiplies 197 tera": FLOPS / 1e12, "about 2,200,": BYTE},
    "2": {"does 2,200": BYTE, "about 2,900 tokens": 8 / 6 * BYTE},
    "3": {"with 2,200": BYTE, "from 2,200": BYTE, "backward from 1,470": BYTE / 1.5},
    "4": {"does 2,200": BYTE, "about 80%": 100 * BYTE / (8192 / 3),
          "tensor=2 27%": 100 * BYTE / 8192},
    "5": {"16,384 bytes": 64 * 64 * 4, "= 8.5": (64 * 64 * 4 + 256 * 1024) / 32768},
    "6": {"4,096, against": 2 * 1024**2 * 8 / (2 * 2 * 1024), "against 2,200": BYTE},
    "7": {"490,000": STAGE, "some 220 times": STAGE / BYTE},
    "8": {"1.6 GB": EXPERTS / 1e9, "fsdp=8 sends 4.2": 3 * 7 / 8 * EXPERTS / 1e9,
          "X = 33.6 MB": X / 1e6, "sends 0.94 GB": 4 * 7 * X / 1e9, "10 ms": 1e3 * 4 * 7 * X / LINK,
          "beside 3 ms": 1e3 * 6 * 2 * MLP * 4096 / FLOPS,
          "takes 47 ms": 1e3 * 3 * 7 / 8 * EXPERTS / LINK},
    "9": {"(128 GB)": 16 * 8, "would be 16 GB": 16 * 8 / 8}}


@pytest.mark.parametrize("number", FIGURES)
def test_figures_of_the_text(number):
    """A figure of the text that its formula, or the chip's rates, do not give. (They are rounded to
    the digits that are shown: 10.4 ms is 10.)"""
    text = " ".join(" ".join(text for kind, text in lesson.cells(lesson.LESSONS[number])
                             if kind == "markdown").split())
    for words, value in FIGURES[number].items():
        assert words in text, words
        said = re.findall(r"(?<![=\d])\d[\d,]*(?:\.\d+)?", words)[0].rstrip(",").replace(",", "")
        last = 10.0 ** -len(said.partition(".")[2]) if "." in said else (
            10.0 ** (len(said) - len(said.rstrip("0"))))
        assert abs(float(said) - value) <= max(0.5 * last, 0.01 * value), (words, value)


@pytest.mark.parametrize("path", lesson.LESSONS.values(), ids=lambda path: path.stem)
def test_a_lesson_is_short_and_becomes_a_notebook(path):
    """Cells that are lost between file and notebook, or that are no Python by themselves."""
    code = code_of(path)
    lines = [line for text in code for line in text.splitlines() if line.strip()]
    assert len(lines) <= 150
    for text in code:
        compile(text, path.name, "exec")
    made = json.loads(json.dumps(lesson.notebook(path)))["cells"]
    assert code == ["".join(c["source"]) for c in made if c["cell_type"] == "code"]
    whole = "\n".join(lines)
    assert whole == "\n".join(line for line in path.read_text().splitlines()
                              if line.strip() and not line.startswith("#"))


def test_a_lesson_is_written_as_a_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lesson", "1", str(tmp_path / "one.ipynb")])
    lesson.main()
    first, *_ = json.loads((tmp_path / "one.ipynb").read_text())["cells"]
    assert "".join(first["source"]).startswith("# 1. A mesh")
    monkeypatch.setattr(sys, "argv", ["lesson", "12", "x"])
    with pytest.raises(SystemExit, match="expected: python -m learn.lesson NUMBER FILE.ipynb"):
        lesson.main()
