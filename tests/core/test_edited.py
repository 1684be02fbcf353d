"""The record of the files on which the tests have passed: who renews it, and what it says."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.common import SMALL, full
from tests.helpers import ROOT
from zigzag.core import edited as tested

HOW = {name: "pytest test_all.py" for name in tested.FILES} | {
    "published": "pytest tests/published, then python -m zigzag.core.edited"}


def test_the_record_is_up_to_date():
    """A clone of which every run on a mesh compares its loss first, although nobody edited it."""
    record = tested.read_record()
    old = [f"{name} ({HOW[name]})" for name, now in tested.RUNNING.items()
           if record.get(name) != now]
    assert not old, (f"{', '.join(old)} changed since .tested was written: run what is in "
                     f"brackets, and commit .tested")
    assert record.keys() >= tested.RUNNING.keys()


@pytest.fixture
def small(tmp_path):
    """A folder like the repository, with small files, and tests that pass."""
    (tmp_path / "zigzag/core").mkdir(parents=True)
    for name in ("__init__", "errors", "files", "edited"):
        shutil.copy(ROOT / f"zigzag/core/{name}.py", tmp_path / "zigzag/core")
    for name in ("zigzag/__init__.py", "conftest.py", "pytest.ini"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "published").mkdir()
    for name in (*tested.FILES, "published/clip.py", "published/swin.py"):
        path = tmp_path / (name if name.endswith(".py") else f"{name}/one.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "test_all.py").write_text(
        "import pytest\n"
        "def test_first(): pass\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_second(x): pass\n")
    (tmp_path / "test_other.py").write_text("def test_other(): assert False\n")
    return tmp_path


def run_tests(folder, *words):
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *words], cwd=folder, text=True,
                          capture_output=True).stdout


def module_in(folder):
    """zigzag/core/edited.py as a process that runs in this folder imports it."""
    spec = importlib.util.spec_from_file_location("tested_there", folder / "zigzag/core/edited.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words, renews", [
    (["test_all.py"], True), (["test_all.py", "test_other.py"], True),
    full(["test_all.py", "-n", "2"], True), (["test_all.py", "-k", "first"], False),
    full(["test_all.py", "-n", "2", "-k", "first"], False),
    (["test_all.py::test_first", "test_all.py::test_second"], False), (["test_other.py"], False),
    (["test_all.py", "--deselect", "test_all.py::test_second[2]"], False),
    (["test_all.py", "--collect-only"], False)], ids=lambda words: " ".join(words) if isinstance(
        words, list) else "")
def test_only_all_of_test_all_renews_the_record(small, words, renews):
    """A record after a part of the tests, or after other tests: a wrong edit is then trusted. One
    that is not written when all have passed: each run goes on comparing."""
    (small / ".tested").write_text('{"model.py": "old", "published": "old"}\n')
    text = run_tests(small, *words)
    there = module_in(small)
    assert ("is up to date" in text) == renews, text
    if renews:
        assert there.why_untested(tested.FILES) == ""
        assert "published edited" in there.why_untested(["published"])    # others test that one
        assert (small / ".tested").read_text().count("\n") == 1
        assert "is up to date" not in run_tests(small, *words)
    else:
        assert there.read_record() == {"model.py": "old", "published": "old"}


@pytest.mark.parametrize("body", ["assert False", "pytest.skip('')", "pytest.xfail('')",
                                  "request.addfinalizer(lambda: 1 / 0)"])
def test_a_test_that_does_not_pass_renews_nothing(small, body):
    """A record written by the very edit that fails."""
    with open(small / "test_all.py", "a") as file:
        file.write(f"def test_third(request):\n    {body}\n")
    run_tests(small, "test_all.py")
    assert not (small / ".tested").exists()


def test_what_was_edited_is_named(small):
    """An edit that is not seen, or a file that is named though nobody touched it."""
    module_in(small).renew_record(tested.FILES)
    assert module_in(small).why_untested(tested.FILES) == ""
    (small / "model.py").write_bytes(b"# model.py\r\n")         # as git may check it out
    assert module_in(small).why_untested(tested.FILES) == ""
    before = module_in(small)
    (small / "model.py").write_text("# model.py \n")
    assert module_in(small).why_untested(["model.py", "shard.py"]) == (
        "model.py edited since test_all.py passed")
    assert before.why_untested(tested.FILES) == ""              # it runs what it has imported
    (small / "zigzag/parallel/one.py").write_text("an edit\n")
    assert module_in(small).why_untested(tested.MACHINERY) == (
        "zigzag/parallel edited since test_all.py passed")
    (small / "shard.py").write_text("")
    assert module_in(small).why_untested(["model.py", "shard.py", "train.py"]) == (
        "model.py and shard.py edited since test_all.py passed")
    assert "published" in module_in(small).why_untested(["published", "train.py"])
    subprocess.run([sys.executable, "-m", "zigzag.core.edited"], cwd=small, check=True)
    assert module_in(small).why_untested(["published", "train.py"]) == ""
    (small / "published/alibi.py").write_text("")
    assert module_in(small).why_untested(["published"]) == (
        "published edited since the tests passed")


@pytest.mark.parametrize("break_it", [
    lambda folder: (folder / ".tested").unlink(),
    lambda folder: (folder / ".tested").write_text("<<<<<<< HEAD\n"),
    lambda folder: (folder / ".tested").write_text("5"),
    lambda folder: (folder / "model.py").unlink()],
    ids=["none", "conflict", "another form", "no model.py"])
def test_without_a_record_nothing_is_trusted(small, break_it):
    """A fork that deleted .tested, a merge conflict in it, files that cannot be read: a traceback,
    or a loss that is trusted."""
    module_in(small).renew_record(tested.FILES)
    break_it(small)
    assert "model.py edited since test_all.py passed" in module_in(
        small).why_untested(["model.py"])


@pytest.mark.full
def test_a_command_compares_what_was_edited(tmp_path, text):
    """The steps above that do not add up to what README says: an edit of the positions that is
    right on one device, and trains to another loss on seq."""
    for name in ("zigzag", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*(f for f in tested.FILES if f not in tested.MACHINERY), ".tested"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".tested").write_text(json.dumps(tested.RUNNING))

    def run(*words):
        return subprocess.run(
            [sys.executable, "train.py", *map(str, SMALL), "--steps", "2", "--data", text, *words],
            cwd=tmp_path, text=True, capture_output=True, timeout=600,
            env={**os.environ, "JAX_PLATFORMS": "cpu"})

    done = run("--mesh", "seq=2", "--out", "pristine")
    assert done.returncode == 0 and "check  " not in done.stdout, done.stderr
    code = (tmp_path / "model.py").read_text()
    edited = code.replace('rotary(a, batch["positions"], c)',
                          "rotary(a, jnp.arange(a.shape[1])[None], c)")
    assert edited != code
    (tmp_path / "model.py").write_text(edited)
    done = run("--mesh", "seq=2", "--out", "wrong")
    assert "model.py edited since test_all.py passed: comparing" in done.stdout
    assert done.returncode == 2 and "error: --mesh seq=2: " in done.stderr, done.stderr
    assert not (tmp_path / "wrong/metrics.jsonl").exists()
    done = run("--out", "one")
    assert done.returncode == 0 and "check  " not in done.stdout, done.stderr
