"""docs/changes.md: each diff applies, trains on the mesh of its command, and samples."""

import re
import shlex
import subprocess

import pytest

from tests.parts import PARTS
from tests.readme import ROOT
from tests.test_parts import copy_without, run

SECTION = re.compile(r"^## \d+\. (.*?)\n.*?```diff\n(.*?)```(.*?)(?=^## |\Z)", re.M | re.S)
CHANGES = SECTION.findall((ROOT / "docs/changes.md").read_text())
SMALL = ["--steps", "4", "--layers", "4", "--d_model", "64", "--heads", "4", "--seq_len", "64"]


def test_there_are_ten_and_each_applies():
    """Code that moved below a diff, which only the longest tests would notice."""
    assert len(CHANGES) == 10
    for _, diff, _ in CHANGES:
        subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=diff, text=True,
                       check=True)


@pytest.mark.full
@pytest.mark.parametrize("title, diff, rest", CHANGES, ids=[title for title, *_ in CHANGES])
def test_a_change_applies_trains_and_samples(title, diff, rest, text, tmp_path):
    """A diff of code that has moved, or whose loss on a mesh is not that of one device."""
    folder = copy_without(tmp_path, *PARTS)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)
    train, *sample = [shlex.split(line) for line in re.findall(r"^    python (.*)$", rest, re.M)]
    said, status = run(folder, *train, *SMALL, "--data", text)
    assert status == 0 and "held-out loss" in said, said
    # (A run compares its loss with one device's by itself, if an edit may have changed it.)
    edited = set(re.findall(r"^\+\+\+ b/(.*)$", diff, re.M))
    assert ("gradients match one device" in said) == bool(
        edited & {"model.py", "train.py", "zigzag/core/mesh.py"}), said
    for words in sample:
        said, status = run(folder, *words, "--tokens", 8)
        assert status == 0 and said.startswith("def "), said
