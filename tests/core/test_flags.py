"""The command line: refusals of one line that name what would be accepted, help, exit statuses."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import model
import sample
import train
from tests.common import SMALL, command, refused
from tests.helpers import ROOT
from zigzag.commands import command_line
from zigzag.core import errors, flags, start
from zigzag.core.options import comments, has_part, options
from zigzag.generate import prompts
from zigzag.parallel.network import NETWORKS


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
    (["--layer", 3], "--layers"), (["--layers", "three"], "an integer"),
    (["--lr", "nan"], "finite"), (["--lr", "-1"], "at least 0"), (["--shards", 3], "8"),
    (["--layers"], "needs a value"), (["layers=3"], "no flag in front"), (["--heads", 5], "divide"),
    (["--batch", 3, "--mesh", "data=2,tensor=4"], "--batch 4"),
    (["--heads", 4, "--kv_heads", 3], "kv_heads"), (["--mesh", "tensr=2"], "'tensor'"),
    (["--mesh", "tensor=0"], "at least 1"), (["--mesh", "tensor=2", "--shards", 4], "disagree"),
    (["--mesh", "expert=8", "--experts", 4], "expert=4"), (["--mesh", "pipe=8"], "--layers 8"),
    (["--mesh", "seq=8", "--seq_len", 60], "--seq_len 64"),
    (["--mesh", "tensor=8", "--microbatches", 3], "--microbatches 2"),
    (["--mesh", "pipe=2,tensor=4", "--seq_len", 63], "--seq_len 64"),
    (["--chunks", 2], "interleaved"), (["--zero", 3], "expected 0 or 1 or 2"),
    (["--zero", 2, "--collectives", "compiler"], "needs --collectives explicit"),
    (["--schedule", "interleaved"], "--chunks"), (["--schedule", "1f1"], "'1f1b'"),
    (["--model", "tinny"], "are tiny, "),
    (["--dropout", 1], "below 1"), (["--vocab_size", 10], "257"),
    (["--batch", 5, "--accumulate", 2], "accumulate"),
    (["--tied", "maybe"], "true or false"),
    (["--experts", 2, "--experts_per_token", 3], "--experts 2"),
    (["--best", "smallest:a", "--best", "biggest:b"], "--best biggest:b: expected smallest:NAME"),
    (["--beams", 4], "--beams 4: no effect on text"),
    (["--model", "transformer", "--head", "classes", "--labels", 3], "--causal false"),
    (["--qk_norm", "true"], "--model transformer has it"),
    (["--model", "transformer", "--shared_experts", 1], "--experts"),
    (["--model", "transformer", "--qk_norm_wide", "true"], "--qk_norm true"),
    (["--model", "transformer", "--rotary_layers", "rl"], "a letter for each layer, r"),
    (["--model", "transformer", "--rotary_layers", "rn", "--positions", "none"], "rotary"),
    (["--model", "transformer", "--norm_place", "out", "--parallel_block", "true"], "before it"),
    (["--processes", 2], "need all of --coordinator"),
    (["--coordinator", "a", "--processes", 2, "--process_id", 0], "HOST:PORT"),
    (["--coordinator", "a:7000", "--processes", 2, "--process_id", 2], "0 to 1"),
    (["--coordinator", "a:7000", "--processes", 2, "--process_id", 0, "--distributed"],
     "or only --distributed"),
    (["--shards", 0], "at least 1"), (["--out", "ftp://bucket/run"], "such as s3://BUCKET"),
    (["--collectives", "compiler", "--mesh", "pipe=2,seq=2"], "pipe=2 and seq=2"),
    (["--override", "w_up"], "REGEX=axis"), (["--override", "w_up=-,tensr"], "'tensor'"),
    (["--override", "w_upp=-"], "'layers.w_up'"),
    (["--override", "w_up=-,-,-,fsdp"], "4 dimensions"),
    (["--override", "_norm=-,data", "w_up=data", "--mesh", "data=8"], "splits 4 into 8"),
    (["--steps", 0], "at least 1"), (["--steps", 10**11], "2**31"),
    (["--tokens", "1e18"], "--steps 976562500000000: must be a number of at least 1 and below 2.1"),
    (["--seq_len", "1.5e0"], "1.5e0: expected an integer"),
    (["--out", "/proc/no/run"], "/proc/no/run: cannot be created (/proc: "),
    (["extra", "words"], "--name value\n")])
def test_bad_input_is_one_line_and_nothing_is_touched(capsys, tmp_path, monkeypatch, words, says):
    """A traceback, or a folder left behind by a run that was refused."""
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, "--out", tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())


def test_dashes_equals_and_presets():
    """A preset's width that is kept although another is given; a value after = read as a flag."""
    a = train.parse(["--d-model=64", "--heads", "4", "--data", "a", "b", "--tied",
                     "--mesh=tensor=2"])
    assert (a.network.d_model, a.network.head_dim, a.data, a.network.tied, a.mesh) == (
        64, 16, ("a", "b"), True, "tensor=2")
    c = train.parse(["--steps", "2.5e4", "--batch", "1_000", "--seed", "7.0"])
    assert (c.steps, c.batch, c.seed) == (25_000, 1000, 7)      # (1e3 was refused)
    assert train.parse(["--tokens", "1e10"]).steps == 9_765_625     # (2**31 was the limit)
    b = train.parse(["--model", "llama-7b", "--layers", "2"])
    assert (b.network.d_model, b.network.d_ff, b.network.layers, b.lr) == (
        4096, 11008, 2, 0.5 / 4096)
    assert train.parse(["--tied", "false"]).network.tied is False


def test_a_refusal_advises_no_axis_that_it_refused():
    """A refusal over tensor that ends with: trains on data, fsdp and tensor."""
    assert errors.any_loss("pipe=2").endswith("on data, fsdp and tensor")
    assert errors.any_loss("tensor=2", "seq=2").endswith("on data and fsdp")
    assert errors.any_loss("data=2", "tensor=2").endswith("on fsdp")
    assert errors.any_loss("data=2", "fsdp=2", "tensor=2").endswith("on one device")


def test_flags_of_any_dataclass():
    """A tuple given twice that loses its first values; = that does not begin a tuple; words without
    a flag where none are expected; a missing value that is not noticed."""
    argv = ["a", "--path=x", "y", "--tied", "no", "--path", "z", "-"]
    given, words = flags.parse_flags(More, argv, "PATH")
    assert given == {"path": ("x", "y", "z", "-"), "tied": False} and words == ["a"]
    assert flags.from_flags(More(), ["--rate", "-1", "--tied"]) == More(rate=-1.0, tied=True)
    assert flags.from_flags(Few(size=4), ["b"], "PATH") == (["b"], Few(size=4))
    for argv, says in ((["--path"], "at least one value"), (["--size"], r"needs a value \(int\)"),
                       (["--size", "--tied"], "needs a value"), (["--siz", "1"], "mean --size"),
                       (["--q", "1"], "--help lists the options")):
        with pytest.raises(errors.ConfigError, match=says):
            flags.parse_flags(More, argv)


def help_of(capsys, *words, main=train.main):
    with pytest.raises(SystemExit) as e:
        main(list(words))
    assert e.value.code == 0
    return capsys.readouterr().out


def test_every_flag_is_in_the_help_and_the_everyday_ones_come_first(capsys):
    """A flag without help, or whose comment is no longer beside it in the source; --data in line
    86, after flags that few people need; a flag without a group."""
    text, whole = help_of(capsys, "--help"), help_of(capsys, "--help", "all")
    shown = re.findall(r"^  --(\w+) +\S", text, re.M)
    own = {name: comment for c in (model.Config, train.Config)
           for name, comment in comments(c).items()
           if has_part(options(c)[name].part or "zigzag")}
    assert set(shown) == {name for name, comment in own.items() if not comment.is_rare}
    assert all(comment.help and comment.group for comment in own.values())
    assert len(shown) <= 45 and {"data", "lr", "seq_len"} <= set(re.findall(
        r"--(\w+) ", "\n".join(text.splitlines()[:25])))
    assert "context length" in text and text.splitlines()[-1] == command_line.LAST
    all_shown = re.findall(r"^  --(\w+) +\S", whole, re.M)
    assert set(all_shown) == set(own) | {
        name for network in NETWORKS.values() for name, option in options(network.config).items()
        if has_part(option.part or "zigzag")}
    assert len(all_shown) == len(set(all_shown))
    gpt2 = help_of(capsys, "--help", "--model", "gpt2")
    assert gpt2 == help_of(capsys, "--model", "gpt2", "--help")
    names = re.findall(r"^  --(\w+) +\S", gpt2, re.M)
    assert names[:len(shown)] == shown and "--qk_norm" not in text
    assert re.search(r"--layers +\w.* +\[12\]", gpt2), "gpt2's, not the default"
    assert "--qk_norm" in gpt2.partition("options of the network transformer:")[2]
    shown = re.findall(r"^  --(\w+) +\S", help_of(capsys, "--help", main=sample.main), re.M)
    assert sorted(shown) == sorted(f.name for f in dataclasses.fields(prompts.Flags))


def test_a_flag_of_a_fork_is_in_the_help():
    """A fork's field that is missing from --help, because no table of groups has it."""
    @dataclasses.dataclass(frozen=True)
    class Own(model.Config):
        mine: int = 0

    @dataclasses.dataclass(frozen=True)
    class Run(train.Config):
        also: int = 0
        # data
        third: int = 0

    groups = command_line.groups_of(Own, Run)
    assert "mine" in groups["model"] and "also" in groups["training"]
    assert "third" in groups["data"]


def test_a_reader_may_close_the_pipe(tmp_path):
    """A BrokenPipeError after `--help | head -3`, in print or when Python exits."""
    file = tmp_path / "prints.py"
    file.write_text("import sys\nfrom zigzag.core import flags\ndef main():\n    print('done')\n"
                    "    sys.stdout.write('x' * int(sys.argv[1]))\nflags.run_main(main)\n")
    for words, status in ((["train.py", "--help"], 0), ([file, 9], 0), ([file, 10**6], 1)):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
                            "PYTHONUNBUFFERED": ""})
        os.close(writer)
        assert done.returncode == status and done.stderr.count("\n") == status, done.stderr


def test_help_is_that_of_a_class_and_then_of_its_parent():
    """The help of a parent class for a field that is defined again; half of a comment, or a
    heading, for help."""
    assert flags.flag_rows(More) == [
        ("rate", "0.25", "how slowly"), ("last", "0", "the last one"),
        ("size", "3", 'how large; what does not fit in the line goes on here, and "# here"'),
        ("name", "", "what it is called"), ("path", "", "where"), ("tied", "False", "")]
    assert f"  --{'rate':18} how slowly  [0.25]" in flags.help_text(More).splitlines()


@pytest.mark.full
def test_the_users_flags_are_kept(tmp_path, text):
    """XLA_FLAGS overwritten, and with it the 8 devices that the user asked for."""
    done = command(*SMALL, "--shards", 3, "--data", text, "--out", tmp_path / "o",
                   env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert done.returncode == 2 and "there are 8 (cpu)" in done.stderr


def test_a_path_of_any_bytes_can_be_printed(monkeypatch):
    """A traceback after all work is done, because of one character of a file's name."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8", errors="strict"))
    flags.run_main(lambda: print("caf\udce9"))
    assert raw.getvalue() == b"caf\\udce9\n"


def test_a_bug_stays_a_traceback():
    """A bug reported in one line, which cannot be found without its traceback."""
    def main():
        raise ValueError("a bug")

    with pytest.raises(ValueError):
        flags.run_main(main)


@pytest.mark.parametrize("error, status, line", [
    (errors.ConfigError("two\n  lines"), 2, "error: two lines"),
    (KeyboardInterrupt(), 130, "interrupted: "),
    (type("JaxRuntimeError", (RuntimeError,), {})("RESOURCE_EXHAUSTED: 9 GB\nmore"), 1,
     "error: out of memory: RESOURCE_EXHAUSTED: 9 GB; try a larger --mesh")])
def test_each_end_has_its_status_and_one_line(capsys, error, status, line):
    """A wrong exit status: schedulers restart by it, and would retry a refusal with status 1 for
    ever."""
    def main():
        raise error

    with pytest.raises(SystemExit) as e:
        flags.run_main(main)
    said = capsys.readouterr().err
    assert e.value.code == status and said.startswith(line) and said.count("\n") == 1


def test_ctrl_c_is_for_the_command_once_it_has_begun(monkeypatch):
    """An interrupted command that says that nothing had begun, and clears nothing away."""
    monkeypatch.setattr(start, "_restart_with_large_pages", lambda: None)
    usual, found = signal.signal(signal.SIGINT, signal.default_int_handler), []
    try:
        start.begin()
        before = signal.getsignal(signal.SIGINT)
        flags.run_main(lambda: found.append(signal.getsignal(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert before is start._end and found == [signal.default_int_handler]


@pytest.mark.parametrize("fault,line", [
    ("raise errors.RunError('lost')", "lost"),
    ("open('/dev/full', 'w', buffering=1).write('a line\\n')",
     "[Errno 28] No space left on device")], ids=["fault", "full disk"])
def test_a_fault_ends_at_once_and_keeps_what_was_printed(tmp_path, fault, line):
    """Output lost in Python's buffers by os._exit; a traceback because a disk is full."""
    file = tmp_path / "fault.py"
    file.write_text(f"from zigzag.core import errors, flags\n"
                    f"def main():\n    print('before')\n    {fault}\n"
                    f"flags.run_main(main)\n")
    done = command(file=file, env={"PYTHONPATH": str(Path(train.__file__).parent)})
    assert (done.returncode, done.stdout, done.stderr) == (1, "before\n", f"error: {line}\n")


def test_a_command_runs_without_input_and_output(tmp_path):
    """An AttributeError of None, which Python gives in place of a closed file (<&- >&-)."""
    file = tmp_path / "closed.py"
    file.write_text("import sys\nfrom zigzag.core import flags\n"
                    "def main():\n    print(sys.stdout.isatty())\n    assert not sys.stdin.read()\n"
                    "flags.run_main(main)\n")
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, file], text=True,
                          stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")


def test_a_value_that_is_not_utf_8_is_one_line():
    """A checkpoint that cannot be saved in a folder of this name, after hours of training."""
    done = command("--out", "o\udcff")
    assert (done.returncode, done.stderr) == (2, "error: --out o\\udcff: expected text in UTF-8\n")


@pytest.mark.full
@pytest.mark.parametrize("env, words, says", [
    ({"JAX_PLATFORMS": "cuda"}, (), "error: jax finds no device (JAX_PLATFORMS=cuda)"),
    ({}, ("--mesh", "tensor=99999999"), "error: a mesh of 99,999,999 devices is too large")])
def test_devices_that_are_not_there_are_one_line(env, words, says, tmp_path):
    """A traceback; all of the machine's memory filled by simulated devices."""
    done = command(*words, "--steps", 1, "--out", "", env=env, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(says) and done.stderr.count("\n") == 1
