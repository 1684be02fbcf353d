"""The lessons run, their predictions hold, and their exercises have the right answers."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from learn import lesson
from learn.solutions import ANSWERS, GUESSES
from tests.common import full
from tests.helpers import ROOT
from zigzag.core.chips import CHIPS

# Runs a lesson, checks its answers, then runs its exercise in code with the solution, and twice
# with a wrong answer, between lines that begin with @.
RUN = """
import json, sys
path, number, wrong = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, "")
lesson = {"__name__": "__main__"}
exec(compile(open(path).read(), path, "exec"), lesson)
from pathlib import Path
from learn.lesson import cells, check
from learn.solutions import ANSWERS, CODE
for name, (right, hint, why, *also) in ANSWERS.items():
    if right != "code" and name.startswith(number + "."):
        assert all(check(name, one) for one in (right, *also)), name
        assert not check(name, "nothing" if isinstance(right, str) else 3 * right + 1), name
for name, code in wrong.items():
    cell, = (text for kind, text in cells(Path(path)) if f'check("{name}", lesson.' in text)
    for written in (CODE[name], code, code):
        print("@", name)
        exec(cell.replace("return ...", "return " + written).replace(
            "wrong, right = ..., ...", "wrong, right = " + written), lesson)
print("@ end")
"""

# {exercise in code: (a wrong answer that one may give, what is said of it)}
WRONG = {
    "1.4": ('lax.psum(x.sum(0), "tensor")', "ValueError: .*statically inferred"),
    "2.4": ('lax.pcast(w, "data", to="varying")', "a device sends"),
    "3.4": ('lax.dynamic_slice_in_dim(grads, 64 * lax.axis_index("fsdp"), 64)', "wrong by"),
    "4.4": ('lax.psum(h @ w, "tensor")', r"a result \[2, 256, 128\] in place of \[2, 64, 128\]"),
    "5.4": ("(4 * rows * D + 2**18) / (2 * D * F)", "wrong by"),
    "6.4": ("me * size + jnp.arange(size)", "wrong by"),
    "7.4": ("m + s, m + s + 1", "has no gradient for"),
    "8.4": ('"own == jnp", "own >= jnp"', "wrong by"),
    "9.4": ("flops / bandwidth", "wrong by"),
    "10.4": ('"x[:, -1:]", "x[:, :1]"', "wrong by")}


# {lesson: {planted bug: what finds it}}, as the lessons say. Kept: it is not wrong, only unusual.
# Those of SERIAL are wrong on one device as well; the others are right there, unless a type finds
# them.
FOUND = {"type": "ValueError: shard_map .* can't be statically inferred",
         "shape": "TypeError: dot_general requires contracting dimensions",
         "comparison": r"wrong by (?!0\.0)\d|losses differ by \d*[1-9]\d*\.\d%",
         "right": r"wrong by 0\.00|losses differ by 0\.0%", "kept": "no error",
         "refusal": "ConfigError: ", "ids": r"[1-8] of 8 ids differ"}
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
    "6": dict.fromkeys(["the mask by local places", "the mask of the device after", "no mask"],
                       "comparison"),
    "7": {"results from the first tick on": "comparison",
          "the results of all stages": "comparison", "no sum over stages": "type"},
    "8": dict.fromkeys(["an expert's number that counts from 0 on each device",
                        "results in the wrong order", "shares of this device's tokens alone"],
                       "comparison"),
    "9": dict.fromkeys(["tensor=3", "pipe=4,data=2", "fsdp=8,tensor=2", "tensr=2"], "refusal"),
    "10": dict.fromkeys(["a cache that is not kept", "the logits after the prompt's first token",
                         "a first token that counts as padding"], "ids")}


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
LONG = {"2": "def losses(", "9": "def by_program("}


def predicted(number, text):
    """A lesson's text with the right predictions."""
    for dots, guess in GUESSES[number].items():
        assert dots in text or number in LONG, dots
        text = text.replace(dots, guess, 1)
    return text


def code_of(path):
    return [text for kind, text in lesson.cells(path) if kind == "code"]


def without(word, text):
    """A lesson's text without the cell that has this word."""
    cells = text.split("# %%")
    kept = [cell for cell in cells if word not in cell]
    assert len(kept) == len(cells) - 1
    return "# %%".join(kept)


@pytest.mark.parametrize("number, long", [
    *((n, "") if n == "1" else full(n, "") for n in lesson.LESSONS),
    *(full(*long) for long in LONG.items())])
def test_a_lesson_runs(number, long, tmp_path):
    """A prediction that the compiled program does not keep to; a planted bug that is found by
    something else than the lesson says, or not at all; one that is wrong on one device, where the
    lesson calls it right; an exercise without an answer, or with a wrong one; a picture that
    is not there."""
    text = lesson.LESSONS[number].read_text()
    path = tmp_path / lesson.LESSONS[number].name
    path.write_text(predicted(number, without(long, text) if long else text))
    wrong = {name: code for name, (code, _) in WRONG.items() if name.startswith(f"{number}.")}
    done = subprocess.run([sys.executable, "-c", RUN, str(path), number, json.dumps(wrong)],
                          cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    asked = re.findall(r'^check\("([\d.]+)"', text, re.M)
    assert asked == [name for name in ANSWERS if name.startswith(f"{number}.")]
    assert len(asked) == 4 and len(wrong) == 1
    # Predictions: each is compared with what the program shows, and the right ones are right.
    shown = re.findall(r"^    you(?:r prediction:| predicted .* which is) (.*)$", done.stdout, re.M)
    count = len(GUESSES[number]) - (2 if long else 0)
    assert len(shown) >= count and all(said.startswith("right") for said in shown), done.stdout
    # The exercise in code: its solution, a wrong answer, and the same again.
    (name, (_, said)), = ((name, WRONG[name]) for name in wrong)
    printed, right, first, second, _ = re.split(r"^@ .*\n", done.stdout, flags=re.M)
    _, hint, why = ANSWERS[name]
    assert f"{name}: right. {why}\n" in right, right
    assert re.search(rf"{name}: not yet \(.*{said}", first), first
    assert first.rstrip().endswith(f"Hint: {hint}") and why in second
    if long != LONG["2"]:       # (whose bugs are in that cell)
        assert_found(BUGS[number], printed.splitlines())
    for name in re.findall(r"^picture: (.*)$", done.stdout, re.M):
        assert (ROOT / name).is_file(), name
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
    "1": {"chip does 197 tera": FLOPS / 1e12, "about 2,200,": BYTE},
    "2": {"does 2,200": BYTE, "about 2,900 tokens": 8 / 6 * BYTE},
    "3": {"does 2,200": BYTE, "from 2,200": BYTE, "on (1,470 backward)": BYTE / 1.5},
    "4": {"does 2,200": BYTE, "about 80%": 100 * BYTE / (8192 / 3),
          "tensor=2 adds 27%": 100 * BYTE / 8192},
    "5": {"16,384 bytes": 64 * 64 * 4, "= 8.5": (64 * 64 * 4 + 256 * 1024) / 32768,
          "table shows 28": (2 * 64 * 256 * 4 + 3 * 256 * 1024) / 32768,
          "gives 20.": (2 * 64 * 256 * 4 + 2 * 256 * 1024) / 32768},
    "6": {"2,200 counts": BYTE, "that, 4,400": 2 * BYTE,
          "has 8,192": 2 * 2048**2 * 8 / (2 * 2 * 2048)},
    "7": {"490,000": STAGE, "about 220 times": STAGE / BYTE},
    "8": {"1.6 GB": EXPERTS / 1e9, "fsdp=8 sends 4.2": 3 * 7 / 8 * EXPERTS / 1e9,
          "X = 33.6 MB": X / 1e6, "sends 0.94 GB": 4 * 7 * X / 1e9, "10 ms": 1e3 * 4 * 7 * X / LINK,
          "and 3 ms": 1e3 * 6 * 2 * MLP * 4096 / FLOPS,
          "with 47 ms": 1e3 * 3 * 7 / 8 * EXPERTS / LINK,
          "becomes 0.28 GB": 4 * 7 * X * 1.25 * (1 - 56 * 55 / (64 * 63)) / 1e9},
    "9": {"(128 GB)": 16 * 8, "would take 16 GB": 16 * 8 / 8, "does 197 tera": FLOPS / 1e12,
          "memory moves 819 GB/s": CHIPS["TPU v5 lite"].bandwidth / 1e9}}


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


def minutes(path):
    """How long a lesson takes, to five minutes: 200 words or 15 lines of code in a minute, and two
    minutes for each exercise and prediction. (README of learn/ says these.)"""
    cells = lesson.cells(path)
    words = sum(len(text.split()) for kind, text in cells if kind == "markdown")
    lines = sum(len(text.splitlines()) for kind, text in cells if kind == "code")
    asked = sum(text.count("...") for kind, text in cells if kind == "code")
    return 5 * round((words / 200 + lines / 15 + 2 * asked) / 5)


@pytest.mark.parametrize("number", lesson.LESSONS)
def test_the_readme_says_how_long_a_lesson_takes(number):
    path, text = lesson.LESSONS[number], (ROOT / "learn/README.md").read_text()
    assert re.search(rf"\[{number}\]\({path.name}\) \|.*\| {minutes(path)} \|", text), minutes(path)


@pytest.mark.parametrize("number", lesson.LESSONS)
def test_a_lesson_asks_before_it_tells(number):
    """A prediction in the cell that prints its answer, or that nothing is compared with."""
    code = code_of(lesson.LESSONS[number])
    for dots in GUESSES[number]:
        at, = (i for i, text in enumerate(code) if dots in text)
        name = dots.removesuffix(" = ...") if " = " in dots else "guess"
        assert "compare(" not in code[at], dots
        assert any(re.search(rf"compare\({name}\b", text) for text in code[at + 1:]), dots


def test_check_gives_a_hint_and_then_the_reason(capsys):
    """The solution after the first wrong answer; words that mean the same, and are refused."""
    _, hint, why, *_ = ANSWERS["3.3"]
    lesson.wrong_answers.clear()
    for answer, said in (("all-reduce", f"3.3: not all-reduce. Hint: {hint}"),
                         ("psum", f"3.3: not psum. {why}"), ("all-gather", why)):
        assert not lesson.check("3.3", answer)
        assert said in capsys.readouterr().out
    for name, answer in (("3.3", "lax.psum_scatter"), ("3.3", "Reduce scatter"), ("7.3", "C, G"),
                         ("7.3", ["C", "G"]), ("5.3", False), ("5.3", "No."), ("1.1", "262,144"),
                         ("2.3", 2.52), ("4.2", "a row")):
        assert lesson.check(name, answer), (name, answer)
    for name, answer in (("2.3", 2.6), ("4.3", 127), ("5.3", True), ("1.1", "many"), ("7.3", "C")):
        assert not lesson.check(name, answer), (name, answer)
    assert not lesson.check("1.1") and "replace the dots" in capsys.readouterr().out


def test_a_prediction_beside_what_was_found(capsys):
    for guess, found, said in ((..., 12, "    12 bytes"), (12, 12, "12, which is right: 12 bytes"),
                               (6, 12.0, "which is 0.5 times as much: 12 bytes"),
                               (1, 0, "too much"), (0, 0.0, "right"), (24, 12, "2 times as")):
        lesson.compare(guess, found)
        assert said in capsys.readouterr().out


def test_code_that_is_not_written_yet_and_code_that_is_wrong():
    """Dots that count as a wrong answer; a wrong shape or too many bytes that pass."""
    def dots(x):
        return ...

    def double(x):
        return 2 * x

    assert lesson.tried(dots, dots, 0) is ...
    assert lesson.tried(double, double, 4.0, 2.0).error == ""
    assert lesson.tried(double, double, 5.0, 2.0).error == "wrong by 1.00"
    assert "a result [3] in place of []" in lesson.tried(double, double, 4.0, np.ones(3)).error


def test_a_lesson_is_written_as_a_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lesson", "1", str(tmp_path / "one.ipynb")])
    lesson.main()
    first, *_ = json.loads((tmp_path / "one.ipynb").read_text())["cells"]
    assert "".join(first["source"]).startswith("# 1. A mesh")
    monkeypatch.setattr(sys, "argv", ["lesson", "12", "x"])
    with pytest.raises(SystemExit, match="expected: python -m learn.lesson NUMBER FILE.ipynb"):
        lesson.main()
