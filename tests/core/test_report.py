"""The output of a run: devices, configuration, collectives, steps and evaluations."""

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tests.common import SMALL, succeeds
from tests.helpers import build, learn, make, mesh_of, program_of, tokens_of
from zigzag.commands import programs
from zigzag.core import report
from zigzag.core.errors import human_bytes
from zigzag.run import loop


class Network(NamedTuple):
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields that a header reads."""
    network: Any = Network()
    collectives: str = "explicit"
    topology: str = ""


# A row of metrics.
ROW = {"step": 1, "loss": 2.0, "mfu": None, "tokens": 30, "grad_norm": 1.0, "lr": 0.5}


def header(capsys, program, **more):
    """What a run of this program prints first."""
    loop.report_header(program, report.Reporter(1, **more))
    return capsys.readouterr().out


def fake_mesh(processes, each, kind="TPU v5 lite", platform="tpu"):
    """A stand-in for a mesh with everything that a header reads, with ids like JAX's for processes
    on CPU."""
    devices = np.array([SimpleNamespace(id=2048 * p + i, process_index=p, device_kind=kind,
                                        platform=platform)
                        for p in range(processes) for i in range(each)]).reshape(processes, each)
    return SimpleNamespace(devices=devices, size=devices.size,
                           shape={"data": processes, "tensor": each})


def test_the_header_has_a_line_for_each_process(capsys):
    """A header that does not show that a host is missing, or has fewer devices than the others."""
    reporter = report.Reporter(steps=10)
    reporter.header(Config(), fake_mesh(2, 2), ["node-a", "node-b"])
    assert capsys.readouterr().out.splitlines() == [
        "=== zigzag on 4 x TPU v5 lite | float32 | explicit collectives ===",
        "devices  process 0 on node-a: 2 x TPU v5 lite",
        "devices  process 1 on node-b: 2 x TPU v5 lite",
        "mesh     data=2 tensor=2"]
    reporter.header(Config(), fake_mesh(1, 2, "cpu", "cpu"), ["laptop"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("=== zigzag on 2 simulated CPU devices, no accelerator was found |")
    assert lines[1] == "mesh     tensor=2"
    reporter.header(Config(topology="v5e:2x2"), fake_mesh(1, 4), ["laptop"])
    lines = capsys.readouterr().out.splitlines()
    assert "that are not here: compiled, not run" in lines[0] and lines[1].startswith("mesh")


def test_each_process_keeps_its_lines_in_a_file(capsys, tmp_path):
    """A file without the first lines, or with the thousand that a terminal overwrites; a file that
    a continued run begins anew; no file of a process that prints nothing."""
    for start, goes_on in enumerate((False, True)):
        reporter = report.Reporter(steps=100)
        reporter.is_quiet, reporter.is_terminal = start == 0, start == 1
        reporter.line(f"start {start}")
        reporter.log_to(tmp_path / "log-0.txt", goes_on)
        for at in range(1, 8):
            reporter.step({**ROW, "step": at}, 0.5, 10)
    text = (tmp_path / "log-0.txt").read_text()
    said = capsys.readouterr().out
    assert "start 1" in said and "start 0" not in said
    for part, start in zip(text.split("\n\n"), (0, 1), strict=True):
        time, first, *steps = part.splitlines()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", time) and first == f"start {start}"
        assert [re.match(r"step +(\d+)/100  loss", line)[1] for line in steps] == ["1", "5"]
    reporter.log_to(tmp_path / "log-0.txt", False)
    reporter.is_quiet = True
    reporter.line("caf\udce9")      # (a path of other bytes than UTF-8)
    text = (tmp_path / "log-0.txt").read_text()
    assert "start 0" not in text and "caf\\udce9" in text


def test_the_options_are_those_that_somebody_has_changed():
    """A start of seventeen lines for a command with three flags; an option that was given and is
    not shown; a derived option that is shown as if it had been given."""
    assert report.options_text(train.parse([])) == ""
    config = train.parse(["--layers", "6", "--heads", "4", "--steps", "50", "--data", "a", "b",
                          "--tied", "--lr", "0.01", "--d_ff", "384"])
    assert report.options_text(dataclasses.replace(config, patience=9)) == (
        "options  layers=6 heads=4 tied=True data=a b steps=50 lr=0.01")    # (384 is what d_ff
    assert report.options_text(dataclasses.replace(config, eval_tokens=4096)).endswith(
        "eval_tokens=4096")                                                 # would be)
    preset = report.options_text(train.parse(["--model", "gpt2"]))
    assert " d_model=768" in preset and " norm=layer" in preset and "lr=" not in preset
    assert all(len(line) <= 100 for line in preset.splitlines())


def test_a_start_is_short(capsys, tmp_path):
    """Twenty-five lines before the first loss, of which a stranger understands six; the table of
    weights lost, where --verbose asks for it or the log is read; sizes of a decoder shown for a
    custom loss."""
    config = make(kv_heads=2, experts=4)
    program = program_of(config, "tensor=2,pipe=2")
    printed, whole = header(capsys, program), header(capsys, program, verbose=True)
    sizes = ("sizes    layers 2, d_model 32, heads 4, kv_heads 2, d_ff 64, experts 4, vocab_size "
             "61, seq_len 16\ntraining 20 steps of 8 examples, adamw, lr up to 0.0156 after 3 "
             "steps of warmup\noptions  ")
    assert sizes in printed and sizes in whole and "mesh     pipe=2 tensor=2\n" in printed
    assert "memory   a device holds " in printed and "pipe     gpipe: " in printed
    assert re.search(r"^layers.attn_norm +\[2,32\] ", whole, re.M) and "attend   causal" in whole
    assert "layers." not in printed and printed.count("\n") == 9
    # (Beside the lines of the data and of the compilation; many options take more lines.)
    lines = header(capsys, program_of(config, "")).splitlines()
    assert len([line for line in lines if line[0] != " "]) == 6
    batch = {"x": jax.ShapeDtypeStruct((8, 3), "float32")}
    custom = build(config, mesh_of(""), lambda key: {"w": jnp.ones(3)},
                   lambda p, b: (jnp.sum(b["x"] * p["w"]), len(b["x"])), batch)
    printed = header(capsys, custom)
    assert "sizes" not in printed and "training 20 steps of 8 examples, adamw" in printed
    assert "weights  3 parameters" in printed
    config = make(encoder_layers=1, source_len=12, positions="none", relative="buckets")
    printed = header(capsys, program_of(config, ""))
    assert re.search("sizes    layers 2, encoder_layers 1, ", printed)
    say = report.Reporter(1)
    say.detail("a detail")
    say.log_to(tmp_path / "log.txt", False)
    assert "a detail" in (tmp_path / "log.txt").read_text() and not capsys.readouterr().out


def test_what_a_device_holds_is_what_the_program_keeps(capsys):
    """Bytes that are not counted; AdamW's moments for another optimizer."""
    program = program_of(make(optimizer="muon"), "tensor=2")
    # (Muon's matrices have one moment. The text must say what the program's state takes.)
    state = 4 * sum(math.prod(x.sharding.shard_shape(x.shape))
                    for x in jax.tree.leaves(program.state["opt"]))
    assert f"{human_bytes(state)} of the optimizer's state" in header(capsys, program)
    programs.show_sharding(["--optimizer", "muon", "--shards", "2", *map(str, SMALL[2:])])
    shown = capsys.readouterr().out
    assert "layers.attn_norm" in shown and "AdamW" not in shown
    # A stage's part of the embedding and of the head, too.
    words = ["--mesh", "pipe=2", *map(str, SMALL[2:])]
    said = header(capsys, programs.program_of(train.parse(words)))
    programs.show_sharding(words)
    assert re.search("a device holds (.*)", capsys.readouterr().out)[1] in said


def test_collectives_are_told_beside_what_was_expected(capsys):
    """A collective that is unexpected, or missing, and not visible in the report."""
    def collective(kind, size):
        return SimpleNamespace(kind=kind, axis="tensor", count=3, bytes=size)

    report.Reporter(1, verbose=True).collectives(
        [collective("all-gather", 7.1e6), collective("all-reduce", 100)],
        [collective("all-gather", 7e6), collective("all-to-all", 50)])
    whole = ["sends     7.1 MB per device per update in 3 all-gather over tensor "
             "(expected: 7.0 MB in 3)",
             "sends      100 B per device per update in 3 all-reduce over tensor (expected: none)",
             "sends    nothing in all-to-all over tensor (expected: 50 B in 3; the compiler found "
             "another way)"]
    assert capsys.readouterr().out.splitlines() == whole
    report.Reporter(1).collectives([collective("all-gather", 7.1e6), collective("all-reduce", 100)],
                                   [collective("all-gather", 7e6)], is_complete=False)
    assert capsys.readouterr().out.splitlines() == [
        whole[0].replace(" in 3)", " in 3, and more without a formula)"),
        "sends      100 B more in 3 small collectives (--verbose lists them)"]


def test_a_step_is_a_line_now_and_then_and_a_live_line_on_a_terminal(capsys):
    """A log of a million lines; a rate that includes the compilation in the first step."""
    reporter = report.Reporter(steps=100)
    for at in range(1, 101):
        reporter.step({**ROW, "step": at, "tokens": 100}, 60.0 if at == 1 else 0.5, 2 * 10**6)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert lines[-1] == ("step 100/100  loss 2.0000  200 tokens/s  grad 1.00  "
                         "lr 5.00e-01  2.0 MB  0 s left")
    reporter.is_terminal = True
    reporter.step({**ROW, "step": 7, "mfu": 0.25}, 0.5, 10)
    said = capsys.readouterr().out
    assert said.startswith("\r\x1b[Kstep   7/100") and "mfu 25.0%" in said and "\n" not in said


def test_a_step_shows_what_the_loss_logs(capsys):
    """A reward that is in metrics.jsonl alone; a line that a few numbers make too long to read."""
    reporter = report.Reporter(steps=100)
    own = {"reward": 1 / 3, "load": [1.0, 2.0], "acc": 0.5, "shift": 1e-9}
    reporter.step(ROW, 0.5, 10, own=own)
    reporter.step(ROW, 0.5, 10, own={"name" * 9: 1.0, "other": 2.0})
    first, second = capsys.readouterr().out.splitlines()
    assert "  loss 2.0000  acc 0.5  reward 0.333  60 tokens/s" in first and len(first) <= 100
    assert f"{'name' * 9} 1  other 2  60 tokens/s" in second


def test_the_time_left_has_the_evaluations_and_saves_to_come(capsys, monkeypatch):
    """A time left of 0 s before evaluations that take longer than all steps; one in which the first
    step, which compiles, counts; a speed that falls with padding."""
    now = [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    reporter = report.Reporter(steps=10)
    for at, seconds in ((1, 60.0), (2, 1.0), (3, 9.0)):         # (the last, with an evaluation)
        now[0] += seconds
        reporter.step({**ROW, "step": at}, 0.5, 10, 100)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("  -") and second.endswith("  8 s left") and third.endswith(" 35 s left")
    assert "  200 tokens/s  grad" in third


def test_an_evaluation_is_told_beside_the_training_loss(capsys):
    """A held-out loss without the training loss to compare it with; predictions that print escape
    codes; a prompt that cannot be told from the model's text."""
    reporter = report.Reporter(steps=100)
    row = {"step": 20, "eval_loss": 2.5, "bits_per_byte": 3.6, "train_loss": 2.25}
    reporter.evaluation(row, "a\x1b[2Jb\nc")
    reporter.evaluation(row, {"prompt": "d\n\ne", "written": "f\n"})
    told = ("step 20  held-out loss 2.5000  (3.6000 bits per byte)  "
            "training loss since the last evaluation 2.2500")
    assert capsys.readouterr().out.splitlines() == [
        told, "     | a\ufffd[2Jb", "     | c",
        told, "    prompt  | d", "            | ", "            | e",
        "    written | f", "            | "]
    reporter.evaluation({**row, "bits_per_byte": None, "train_loss": None})
    assert capsys.readouterr().out == "step 20  held-out loss 2.5000\n"
    reporter.end(20, "out", row)
    reporter.end(1, "", {})
    assert capsys.readouterr().out.splitlines() == [
        "done     20 steps, saved in out, held-out loss 2.5000  (3.6000 bits per byte)",
        "done     1 step"]


def test_the_mean_loss_skips_what_is_not_finite():
    """A mean loss of NaN because of one step without a finite loss."""
    for losses, mean in (([1.0, float("nan"), 3.0, float("inf")], 2.0), ([float("nan")], None),
                         ([], None)):
        say = report.Reporter(1)
        say.losses = losses
        assert say.training_loss() == mean


def test_each_evaluation_has_the_mean_of_the_losses_since_the_one_before():
    """Means over the whole run instead of since the last evaluation; a mean without the step before
    the evaluation."""
    config = make(steps=7, eval_every=3)
    rows, _ = learn(config, held_out=tokens_of(config, 8, 5))
    losses = {r["step"]: r["loss"] for r in rows if "loss" in r}
    found = {r["step"]: r["train_loss"] for r in rows if "eval_loss" in r}
    for at, steps in {3: (1, 2, 3), 6: (4, 5, 6), 7: (7,)}.items():
        assert found.pop(at) == pytest.approx(np.mean([losses[step] for step in steps]))
    assert not found


@pytest.mark.full
def test_a_command_prints_its_host_and_its_losses(tmp_path, text):
    """Correct parts that the command does not use."""
    done = succeeds(*SMALL, "--steps", 4, "--eval_every", 2, "--mesh", "data=2", "--data", text,
                    "--out", tmp_path / "run", "--verbose")
    assert re.search(r"^devices  process 0 on \S+: 2 x cpu$", done.stdout, re.M)
    assert done.stdout.splitlines()[-2].startswith(
        f"done     4 steps, saved in {tmp_path / 'run'}, held-out loss ")
    assert done.stdout.splitlines()[-1] == (
        f'sample   python sample.py --run {tmp_path / "run"} --prompt "..."')
    found = re.findall(r"^step \d  held-out loss [\d.]+  \([\d.]+ bits per byte\)  "
                       r"training loss since the last evaluation [\d.]+$", done.stdout, re.M)
    assert len(found) == 2, done.stdout
