"""The lessons run, their predictions hold, and their exercises have the right answers."""

import json
import subprocess
import sys

import pytest

from learn import lesson
from learn.answers import ANSWERS
from tests.common import full
from tests.helpers import ROOT

RUN = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
from learn.answers import ANSWERS
from learn.lesson import check
for name, (right, why) in ANSWERS.items():
    assert check(name, right), name
    assert not check(name, "nothing" if isinstance(right, str) else 3 * right + 1), name
"""


def code_of(path):
    return [text for kind, text in lesson.cells(path) if kind == "code"]


@pytest.mark.parametrize("number", [n if n in "5" else full(n) for n in lesson.LESSONS])
def test_a_lesson_runs(number):
    """A prediction that the compiled program does not keep to; a bug that its check misses; an
    exercise without an answer, or with a wrong one."""
    path = lesson.LESSONS[number]
    done = subprocess.run([sys.executable, "-c", RUN, str(path)], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    asked = [line.split('"')[1] for text in code_of(path) for line in text.splitlines()
             if line.startswith("check(")]
    assert asked == [name for name in ANSWERS if name[0] == number] and len(asked) >= 3
    text = path.read_text()
    for part in ("## When it pays", "## Exercises", "One idea: **"):
        assert part in text, part


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
