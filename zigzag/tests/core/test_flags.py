"""The command line: a refusal is one line that names what would be accepted; help; statuses."""

import dataclasses
import re
from pathlib import Path

import pytest

import model
import train
from zigzag.core import errors, flags
from zigzag.tests.common import SMALL, command, refused


@dataclasses.dataclass(frozen=True)
class Few:
    """a command with few flags"""
    # A comment before the first field is nobody's.
    size: int = 3               # how large; what does not fit in the line
                                # goes on here, and "# here"
    rate: float = 0.5           # how fast
    name: str = ""              # what it is called

    # Nor is a heading between fields.
    path: tuple[str, ...] = ()  # where
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class More(Few):
    """a command with more flags"""
    rate: float = 0.25          # how slowly
    last: int = 0               # the last one


@pytest.mark.parametrize("words, says", [
    (["--layer", 3], "--layers"), (["--layers", "three"], "whole number"),
    (["--lr", "nan"], "finite"), (["--lr", "-1"], "at least 0"), (["--shards", 3], "8"),
    (["--layers"], "needs a value"), (["layers=3"], "alone"), (["--heads", 5], "divide"),
    (["--batch", 3, "--mesh", "data=2,tensor=4"], "--batch 4"),
    (["--heads", 4, "--kv_heads", 3], "kv_heads"), (["--mesh", "tensr=2"], "'tensor'"),
    (["--mesh", "tensor=0"], "at least 1"), (["--mesh", "tensor=2", "--shards", 4], "disagree"),
    (["--mesh", "expert=8", "--experts", 4], "expert=4"), (["--mesh", "pipe=8"], "--layers 8"),
    (["--mesh", "seq=8", "--seq_len", 60], "--seq_len 64"),
    (["--mesh", "tensor=8", "--microbatches", 3], "--microbatches 2"),
    (["--mesh", "pipe=2,tensor=4", "--seq_len", 63], "--seq_len 64"),
    (["--chunks", 2], "interleaved"), (["--zero", 2], "fsdp"),
    (["--schedule", "interleaved"], "--chunks"), (["--schedule", "1f1"], "'1f1b'"),
    (["--model", "tinny"], "'tiny'"), (["--dtype", "float16"], "bfloat16"),
    (["--step", "pjit"], "jit"), (["--dropout", 1], "below 1"), (["--vocab_size", 10], "257"),
    (["--data", "no/such/file"], "no such file"), (["--batch", 5, "--accumulate", 2], "accumulate"),
    (["--tied", "maybe"], "true or false"),
    (["--experts", 2, "--experts_per_token", 3], "--experts 2"),
    (["--best", "smallest:a", "--best", "largest:b"], "given twice"),
    (["--beams", 4], "has none"), (["--fields", "a", "b"], "no encoder"),
    (["--model", "transformer", "--head", "classes", "--labels", 3], "--causal false"),
    (["--qk_norm", "true"], "--model transformer has it"),
    (["--model", "transformer", "--shared_experts", 1], "--experts"),
    (["--model", "transformer", "--qk_norm_wide", "true"], "--qk_norm true"),
    (["--model", "transformer", "--rotary_layers", "rl"], "a letter for each layer, r"),
    (["--model", "transformer", "--rotary_layers", "rn", "--positions", "none"], "rotary"),
    (["--model", "transformer", "--norm_place", "out", "--parallel_block", "true"], "before it"),
    (["--optimizer", "sgd"], "adamw or muon"),
    (["--processes", 2], "need all of --coordinator"),
    (["--coordinator", "here", "--processes", 2, "--process_id", 0], "HOST:PORT"),
    (["--coordinator", "a:70000", "--processes", 2, "--process_id", 0], "HOST:PORT"),
    (["--coordinator", "a:7000", "--processes", 2, "--process_id", 2], "0 to 1"),
    (["--coordinator", "a:7000", "--processes", 2, "--process_id", 0, "--distributed"],
     "one of them"),
    (["--shards", 0], "at least 1"), (["--out", "gs://bucket/run"], "that every process sees"),
    (["--sum_dtype", "float23"], "'float32'"),
    (["--step", "jit", "--mesh", "pipe=2,seq=2"], "pipe=2 and seq=2"),
    (["--override", "w_up"], "REGEX=axis"), (["--override", "w_up=-,tensr"], "'tensor'"),
    (["--override", "w_upp=-"], "'layers.w_up'"),
    (["--override", "w_up=-,-,-,fsdp"], "4 dimensions"),
    (["--override", "_norm=-,data", "w_up=data", "--mesh", "data=8"], "splits 4 into 8"),
    (["--steps", 0], "at least 1"), (["--steps", 10**11], "2**31"),
    (["--seq_len", "1e3"], "whole number")])
def test_bad_input_is_one_line_and_nothing_is_touched(capsys, tmp_path, monkeypatch, words, says):
    """A traceback, or a folder left behind by a run that was refused."""
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, "--out", tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())


def test_dashes_equals_and_presets():
    """A preset's width kept where another is given; a value after = taken for a flag."""
    a = train.parse(["--d-model=64", "--heads", "4", "--data", "a", "b", "--tied",
                     "--mesh=tensor=2"])
    assert (a.d_model, a.head_dim, a.data, a.tied, a.mesh) == (64, 16, ("a", "b"), True, "tensor=2")
    b = train.parse(["--model", "llama-7b", "--layers", "2"])
    assert (b.d_model, b.d_ff, b.layers, b.lr) == (4096, 11008, 2, 0.5 / 4096)
    assert train.parse(["--tied", "false"]).tied is False


def test_flags_of_any_dataclass():
    """A tuple that is given twice keeps both; = begins a tuple; other words go only where they are
    expected; the end of the list is no value."""
    argv = ["a", "--path=x", "y", "--tied", "no", "--path", "z", "-"]
    given, words = flags.parse_flags(More, argv, "PATH")
    assert given == {"path": ("x", "y", "z", "-"), "tied": False} and words == ["a"]
    assert flags.from_flags(More(), ["--rate", "-1", "--tied"]) == More(rate=-1.0, tied=True)
    assert flags.from_flags(Few(size=4), ["b"], "PATH") == (["b"], Few(size=4))
    for argv, says in ((["--path"], "at least one value"), (["--size"], r"needs a value \(int\)"),
                       (["--size", "--tied"], "needs a value"), (["--siz", "1"], "mean --size"),
                       (["--q", "1"], "the options are --size --rate")):
        with pytest.raises(errors.ConfigError, match=says):
            flags.parse_flags(More, argv)


def test_every_field_is_in_the_help(capsys):
    """A field without help, or one whose comment the source no longer has beside it."""
    with pytest.raises(SystemExit) as e:
        train.parse(["--help"])
    text = capsys.readouterr().out
    assert e.value.code == 0
    names = {f.name for c in (model.Config, train.Config) for f in dataclasses.fields(c)}
    for name in names - {"network"}:
        assert re.search(rf"--{name} +\S", text), name
    assert "--qk_norm" not in text
    for words in (["--model", "gpt2", "--help"], ["--help", "all"]):
        with pytest.raises(SystemExit):
            train.parse(words)
        assert "--qk_norm" in capsys.readouterr().out


def test_help_is_the_comment_with_all_its_lines():
    """Half a sentence where a comment wraps; a heading taken for help; a parent's help kept where
    a field is given anew."""
    rows = flags.flag_rows(More)
    assert sorted(rows) == [
        ("last", "0", "the last one"), ("name", "", "what it is called"), ("path", "", "where"),
        ("rate", "0.25", "how slowly"),
        ("size", "3", 'how large; what does not fit in the line goes on here, and "# here"'),
        ("tied", "False", "")]
    own = list(More.__annotations__)        # (what is inherited comes after what is a class's own)
    assert [name for name, *_ in rows][:len(own)] == own
    assert f"  --{'rate':18} how slowly  [0.25]" in flags.help_text(More).splitlines()


def test_the_users_flags_are_kept(tmp_path, text):
    """Overwriting XLA_FLAGS would lose the 8 devices that were asked for."""
    done = command(*SMALL, "--shards", 4, "--steps", 2, "--data", text, "--out", tmp_path / "o",
                   "--heads=4", env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert done.returncode == 0, done.stderr
    assert "data=2" in done.stdout and "tensor=4" in done.stdout


def test_a_bug_stays_a_traceback():
    """A bug that is told in one line cannot be found."""
    def main():
        raise ValueError("a bug")

    with pytest.raises(ValueError):
        flags.run_main(main)


@pytest.mark.parametrize("error, status, line", [
    (errors.ConfigError("two\n  lines"), 2, "error: two lines"),
    (KeyboardInterrupt(), 130, "interrupted: "),
    (type("JaxRuntimeError", (RuntimeError,), {})("RESOURCE_EXHAUSTED: 9 GB\nmore"), 1,
     "error: out of memory: RESOURCE_EXHAUSTED: 9 GB; a larger --mesh")])
def test_each_end_has_its_status_and_one_line(capsys, error, status, line):
    """Schedulers restart by the status: a refusal with status 1 would be tried for ever."""
    def main():
        raise error

    with pytest.raises(SystemExit) as e:
        flags.run_main(main)
    said = capsys.readouterr().err
    assert e.value.code == status and said.startswith(line) and said.count("\n") == 1


def test_a_fault_ends_at_once_and_keeps_what_was_printed(tmp_path):
    """os._exit loses what is still in Python's buffers."""
    file = tmp_path / "fault.py"
    file.write_text("from zigzag.core import errors, flags\n"
                    "def main():\n    print('before')\n    raise errors.RunError('full disk')\n"
                    "flags.run_main(main)\n")
    done = command(file=file, env={"PYTHONPATH": str(Path(train.__file__).parent)})
    assert (done.returncode, done.stdout, done.stderr) == (1, "before\n", "error: full disk\n")


def test_former_names_of_flags_work_with_a_warning(capsys):
    """Scripts of an earlier version that end at a name."""
    assert train.parse(["--model", "transformer", "--parallel", "true"]).parallel_block
    assert capsys.readouterr().err == "warning: --parallel is now --parallel_block\n"
