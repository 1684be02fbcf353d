"""--against: harmless edits report nothing; each harmful edit is named with its file and line."""

import json
import os
import shutil
import subprocess

import pytest

from accounts import against
from tests.accounts.edits import HARMFUL, HARMLESS, WIDER
from tests.common import refuses
from tests.helpers import ROOT
from zigzag.core.errors import RunError

WORDS = ("--layers 2 --d_model 64 --heads 4 --d_ff 128 --seq_len 64 --batch 8 --vocab_size 256 "
         "--mesh fsdp=2,tensor=2 --remat full --dtype bfloat16").split()
V5E = ["--topology", "v5e:2x2"]
# The edits that the quick tests take.
QUICK = {"a lost remat", "a weight that fsdp doesn't split"}


def cases(edits):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
            for name in edits]


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """The same programs, with quicker machine code: half the time to compile."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def tree(folder, edit=()):
    """A copy of the code with an edit."""
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for part in ("zigzag", "forecast", "published", "accounts"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part,
                            ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in edit:
        text = (folder / file).read_text()
        assert old in text, f"{file} has changed; edit tests/accounts/edits.py"
        (folder / file).write_text(text.replace(old, new))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(a copy without an edit, its programs), compiled when a test first asks for their flags."""
    found, folder = {}, tree(tmp_path_factory.mktemp("base") / "tree")

    def compiled(words):
        if tuple(words) not in found:
            found[tuple(words)] = against.compiled_in(folder, words, "base")
        return folder, found[tuple(words)]

    return compiled


def compare(base, tmp_path, edit, words):
    """What got worse by an edit, and the edited tree."""
    (old, before), new = base(words), tree(tmp_path / "edited", edit)
    after = against.compiled_in(new, words, "this tree")
    return against.compared(before, after, against.Lines(old, new)), new


def assert_named(worse, new, text):
    """Assert that a message blames a line that has this text."""
    places = [line.rpartition(", from ")[2].partition(" (")[0].split(":") for line in worse
              if ", from " in line]
    found = [(new / file).read_text().splitlines()[int(number) - 1] for file, number in places]
    assert any(text in line for line in found), worse


@pytest.mark.parametrize("name", cases(HARMLESS))
def test_a_harmless_edit_reports_nothing(base, tmp_path, name):
    """A comparison by names or line numbers, which a fork's CI would soon ignore."""
    worse, _ = compare(base, tmp_path, HARMLESS[name], WORDS)
    assert not worse


@pytest.mark.parametrize("name", cases(HARMFUL))
def test_a_harmful_edit_is_named(base, tmp_path, name):
    """A cost that the comparison misses, or blames on a line that didn't cause it."""
    edit, text = HARMFUL[name]
    assert_named(*compare(base, tmp_path, edit, WORDS), text)


@pytest.mark.parametrize("name", cases(WIDER))
def test_float32_instead_of_bfloat16_is_named(base, tmp_path, name):
    """An array that silently became float32. A CPU's program computes both in float32."""
    pytest.importorskip("libtpu")
    edit, text = WIDER[name]
    assert_named(*compare(base, tmp_path, edit, WORDS + V5E), text)


# -------------------------------------------------------------------------------------------
# The command

def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", folder, *words],
                   check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose only commit is this code."""
    folder = tree(tmp_path / "code")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    monkeypatch.setattr(against, "ROOT", folder)
    return folder


def run(monkeypatch, *words):
    """Run the command as python train.py --against HEAD."""
    monkeypatch.setattr("sys.argv", ["train.py", "--against", "HEAD", *words])
    against.run(type("Config", (), {"against": "HEAD"}))


def test_the_command_compares_a_commit_with_uncommitted_edits(repository, monkeypatch, base,
                                                              capsys):
    """A command that compares a tree with itself, leaves a worktree behind, passes --against on, or
    succeeds although something got worse."""
    seen, (_, programs) = [], base(WORDS)

    def compiled_in(tree, words, name):
        seen.append(((tree / "model.py").read_text(), words, name))
        return programs if name == "HEAD" else now

    monkeypatch.setattr(against, "compiled_in", compiled_in)
    source = (repository / "model.py").read_text()
    (repository / "model.py").write_text(source + "# an edit\n")
    now = programs
    run(monkeypatch, "--shards", "4")
    assert seen == [(source, ["--shards", "4"], "HEAD"),
                    (source + "# an edit\n", ["--shards", "4"], "this tree")]
    out = capsys.readouterr().out
    assert "step     arithmetic" in out and "token    arithmetic" in out and "->" not in out
    assert out.endswith("nothing got worse\n")

    now = json.loads(json.dumps(programs))
    now["step"]["memory"]["temp_size_in_bytes"] *= 2
    with pytest.raises(RunError, match="this tree costs more than HEAD, by over 1%"):
        run(monkeypatch)
    now = {**programs, "token": {"error": "not a decoder"}}
    with pytest.raises(RunError):       # an edit that breaks generation
        run(monkeypatch)
    assert "worse    the token no longer compiles" in capsys.readouterr().out
    programs = now
    run(monkeypatch)
    assert "token    not compared: not a decoder" in capsys.readouterr().out


def test_what_cannot_be_compared_is_one_line(repository, tmp_path, monkeypatch):
    """A traceback of git, or of an old tree that doesn't compile."""
    with refuses("--against nosuch: git finds no such commit"):
        with against.checked_out("nosuch"):
            pass
    with pytest.raises(KeyboardInterrupt):
        with against.checked_out("HEAD") as old:
            assert (old / "model.py").exists()
            raise KeyboardInterrupt
    assert not old.exists()

    with refuses("HEAD doesn't compile with these flags: --no_flag is not an option"):
        against.compiled_in(repository, ["--no_flag", "1"], "HEAD")
    (repository / "model.py").write_text("def (")
    with refuses("HEAD doesn't compile with these flags: SyntaxError: invalid syntax"):
        against.compiled_in(repository, [], "HEAD")

    monkeypatch.setattr(against, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.fspath(tmp_path.parent))
    with refuses("needs a git repository"):
        against.git("rev-parse", "--show-prefix")
    monkeypatch.setenv("PATH", "")
    with refuses("needs git, which isn't installed"):
        against.git("status")


def test_lines_are_matched_by_their_text(tmp_path):
    """An edit above a line that makes the line look like another one."""
    for name, text in ("old", "a\nb\nc\nd\n"), ("new", "# more\nc\n  a\nb2\nd\n"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(text)
    lines = against.Lines(tmp_path / "old", tmp_path / "new")
    places, edited = lines.match("model.py")
    assert (places[1], places[3], places[4]) == (3, 2, 5), "moved"
    assert places[2] == 4 and edited == {1, 4}, "edited"

    def call(line, file="old/model.py"):
        return against.Call(str(tmp_path / file), line, "f")

    assert lines.place((call(1), call(2)), True)[:2] == ("model.py", 4), "an edited line"
    assert lines.place((call(1), call(4)), True)[:2] == ("model.py", 3), "the innermost"
    assert lines.place((call(3, "old/shard.py"), call(4)), True)[:2] == ("model.py", 5)
    assert lines.place((call(3, "elsewhere/model.py"),), True) is None
