"""What may be deleted is deleted, and the rest runs."""

import inspect
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.parts import PARTS, is_there, needs_of_test
from zigzag.core.parts import added

there = [part for part in PARTS if is_there(part)]
SMALL = ("--d_model", 32, "--layers", 2, "--heads", 4, "--seq_len", 32)


def copy_without(folder, *parts):
    """A copy of this repository without these parts and their tests."""
    for path in ROOT.rglob("*"):
        at = path.relative_to(ROOT)
        is_ours = at.parts[0] in {*PARTS, "zigzag", "tests", "docs"} or len(at.parts) == 1
        is_gone = at.parts[0] in parts or at.parts[0] == "tests" and at.parts[1:2] and (
            at.parts[1] in parts)
        if is_ours and not is_gone and path.is_file() and "__pycache__" not in at.parts:
            (folder / at).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / at)
    return folder


def run(folder, *words):
    """What a command prints in a copy, and its status."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return done.stdout + done.stderr, done.returncode


def counted(text):
    """{outcome: number} of pytest's last line."""
    return {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped|failed|error)", text)}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return copy_without(tmp_path_factory.mktemp("bare"), *PARTS)


def test_what_remains_trains_samples_and_passes_its_tests(bare, text):
    """A fork of the decoder alone, after the rm -r of README."""
    said, status = run(bare, "train.py", "--mesh", "data=2,tensor=2", "--steps", 20, "--data", text,
                       *SMALL)
    assert status == 0 and "saved in out" in said, said
    said, status = run(bare, "sample.py", "--prompt", "ba", "--tokens", 4)
    assert status == 0 and said.startswith("ba"), said
    said, status = run(bare, "-m", "pytest", "-q", "test_all.py", "-k", "step and jit or later")
    assert status == 0 and counted(said).keys() == {"passed"}, said


# What asks for a part, and the line in which it ends without it.
ASKS = {"published": (["train.py", "--model", "smollm2"], ["sample.py", "--model", "smollm2"],
                      ["model.py", "--export", "to"], ["shard.py", "--model", "gpt2"],
                      ["data.py", "hf://datasets/org/name"]),
        "forecast": (["train.py", "--mesh", "auto"],),
        "stores": (["train.py", "--out", "s3://bucket/run"],
                   ["sample.py", "--run", "gs://bucket/run"])}


@pytest.mark.full
def test_what_is_gone_is_one_line_and_not_in_the_help(bare):
    """A traceback, or a flag that does nothing."""
    for part, commands in ASKS.items():
        for words in commands:
            said, status = run(bare, *words)
            assert (status, said.count("\n")) == (2, 1), said
            assert f"needs {part}/, which this copy does not have" in said
    said, _ = run(bare, "train.py", "--help", "all")
    shown = set(re.findall(r"--(\w+)", said))
    assert {"steps", "mesh", "d_model"} <= shown
    assert not shown & {"edited"}.union(*map(inspect.get_annotations, added("OfTraining")))
    said, status = run(bare, "train.py", "--bench")
    assert status == 2 and said.startswith("error: --bench is not an option") and (
        "tools/ or tasks/ or accounts/ or precision/, which this copy does not have" in said)
    (bare / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n')
    said, status = run(bare, "data.py", "chats.jsonl", "--out", "tokens")
    assert (status, said) == (2, "error: chats.jsonl: messages: needs tools/, which this copy does "
                                 "not have\n")
    for name in ("beam_search", "score"):
        said, _ = run(bare, "-c", f"import sample, model; sample.{name}(None, [], model.Config())")
        assert f"sample.{name}: needs tools/, which this copy does not have" in said


@pytest.mark.full
def test_all_of_test_all_passes_without_any_part(bare):
    """A test of the five files that needs a part."""
    said, status = run(bare, "-m", "pytest", "-q", "test_all.py", "-n", 2)
    assert status == 0 and counted(said).keys() == {"passed"}, said


@pytest.mark.full
@pytest.mark.parametrize("part", there)
def test_the_rest_passes_without_a_part(part, tmp_path):
    """A test outside of a part's folder that fails without it. Those that need it are skipped:
    files that import it are not collected, and a refusal is a skip (tests/conftest.py)."""
    folder = copy_without(tmp_path, part)
    left_out = [path for path in (folder / "tests").rglob("test_*.py")
                if part in needs_of_test(path, folder)]
    # Nothing asks for recipes/ and learn/: that the tests of the rest are found is enough.
    how = ["--collect-only"] if part in ("recipes", "learn") else ["-n", 2]
    said, status = run(folder, "-m", "pytest", "-q", "tests", *how)
    assert status == 0, said[-8000:]
    count = len(left_out)
    files = "1 file of tests is" if count == 1 else f"{count} files of tests are"
    assert f"{files} left out: {part}/ is not here" in said or not count, said[-2000:]


def loaded(folder, code):
    """The lines of ours that this code loads."""
    said, _ = run(folder, "-c", (
        f"import os, runpy, sys\n{code}\n"
        "files = [m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)]\n"
        "own = [f for f in files if f.startswith(os.getcwd())]\n"
        "print(sum(open(f).read().count('\\n') for f in own))"))
    return int(said.split()[-1])


def test_a_plain_run_loads_what_it_uses(bare, text, tmp_path):
    """A part that is imported by every run; text, or a conversation, that importing train reads."""
    assert loaded(bare, "import train") <= 13_110
    assert loaded(ROOT, "import train") <= 13_510
    assert loaded(ROOT, "import sample") <= 10_100

    def of_command(folder, file, *words):
        return loaded(folder, f"sys.argv[1:] = {[*map(str, words)]}\n"
                              f"runpy.run_path({file!r}, run_name='__main__')")

    out = tmp_path / "out"
    words = "--shards", 4, "--steps", 1, "--data", text, "--out", out, *SMALL
    assert of_command(ROOT, "train.py", *words) <= 17_200
    assert of_command(ROOT, "sample.py", "--run", out, "--prompt", "ba", "--tokens", 4) <= 10_820
