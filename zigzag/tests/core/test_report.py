"""What a person sees: devices, configuration, collectives, steps and evaluations."""

import dataclasses
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from zigzag.core import flags, report
from zigzag.tests.common import SMALL, command, learn, make, tokens_of


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields that a header shows."""
    dtype: str = "float32"
    step: str = "shard_map"
    topology: str = ""
    batch: int = 8
    seq_len: int = 16
    data: tuple[str, ...] = ("a", "b")
    mesh: str = ""
    patience: int = 120


def fake_mesh(processes, each, kind="TPU v5 lite", platform="tpu"):
    """What a header reads of a mesh, with ids as JAX gives them to processes on CPU."""
    devices = np.array([SimpleNamespace(id=2048 * p + i, process_index=p, device_kind=kind,
                                        platform=platform)
                        for p in range(processes) for i in range(each)]).reshape(processes, each)
    return SimpleNamespace(devices=devices, size=devices.size,
                           shape={"data": processes, "tensor": each})


def test_the_header_has_a_line_for_each_process(capsys):
    """A host that is missing, or has fewer devices than the others, is found here or never."""
    reporter = report.Reporter(steps=10)
    reporter.header(Config(), fake_mesh(2, 2), "5 parameters", "the table", "the timeline",
                    ["node-a", "node-b"], ("patience",))
    assert capsys.readouterr().out.splitlines() == [
        "=== zigzag on 4 x TPU v5 lite in 2 processes | float32 | step by shard_map ===",
        "devices  process 0 on node-a: 2 x TPU v5 lite (0, 1)",
        "devices  process 1 on node-b: 2 x TPU v5 lite (2048, 2049)",
        "mesh     data=2 tensor=2", "config   topology=- batch=8 seq_len=16 data=a b",
        "weights  5 parameters", "the table", "the timeline"]
    reporter.header(Config(), fake_mesh(1, 2, "cpu", "cpu"), "", "", "", ["laptop"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("=== zigzag on 2 simulated CPU devices, no accelerator was found |")
    assert lines[1] == "devices  process 0 on laptop: 2 x cpu (0, 1)"
    reporter.header(Config(topology="v5e:2x2"), fake_mesh(1, 4), "", "", "", ["laptop"])
    lines = capsys.readouterr().out.splitlines()
    assert "that are not here: compiled, not run" in lines[0] and lines[1].startswith("mesh")


def test_only_process_0_prints(capsys):
    """Every line once for each process."""
    reporter = report.Reporter(steps=1)
    reporter.is_quiet = True
    reporter.line("text")
    reporter.line("text", live=True)
    assert not capsys.readouterr().out


def test_the_configuration_fits_in_100_columns():
    """A field that is left out, or a line that a terminal breaks."""
    config = make(data=("x" * 60, "y" * 30))
    text = report.config_text(config, {"layers"})
    assert all(len(line) <= 100 or "data=" in line for line in text.splitlines())
    for name in flags.flat(config):
        assert (f" {name}=" in text) == (name != "layers"), name


def test_collectives_are_told_beside_what_was_expected(capsys):
    """One that nobody expected, or that is missing, must be seen."""
    def collective(kind, size):
        return SimpleNamespace(kind=kind, axis="tensor", count=3, bytes=size)

    report.Reporter(steps=1).collectives(
        [collective("all-gather", 7.1e6), collective("all-reduce", 100)],
        [collective("all-gather", 7e6), collective("all-to-all", 50)])
    assert capsys.readouterr().out.splitlines() == [
        "sends     7.1 MB a device and update in 3 all-gather over tensor (expected: 7.0 MB in 3)",
        "sends      100 B a device and update in 3 all-reduce over tensor (expected: none)",
        "sends    nothing in all-to-all over tensor (expected: 50 B in 3)"]


def test_a_step_is_a_line_now_and_then_and_a_live_line_on_a_terminal(capsys):
    """A log of a million lines; a rate that the first step's compiling spoils."""
    reporter = report.Reporter(steps=100)
    for at in range(1, 101):
        reporter.step({"step": at, "loss": 2.0, "mfu": None, "tokens": 100, "grad_norm": 1.0,
                       "lr": 0.5}, 60.0 if at == 1 else 0.5, 2 * 10**6)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert lines[-1] == ("step 100/100  loss 2.0000  200 tokens/s  mfu n/a  grad 1.00  "
                         "lr 5.00e-01  2.0 MB  0 s left")
    reporter.is_terminal = True
    reporter.step({"step": 7, "loss": 2.0, "mfu": 0.25, "tokens": 100, "grad_norm": 1.0,
                   "lr": 0.5}, 0.5, 10)
    said = capsys.readouterr().out
    assert said.startswith("\r\x1b[Kstep   7/100") and "mfu 25.0%" in said and "\n" not in said


def test_an_evaluation_is_told_beside_the_training_loss(capsys):
    """A held-out loss says little without it; what a model predicts may hold escape codes."""
    reporter = report.Reporter(steps=100)
    row = {"step": 20, "eval_loss": 2.5, "bits_per_byte": 3.6, "train_loss": 2.25}
    reporter.evaluation(row, "a\x1b[2Jb\nc")
    assert capsys.readouterr().out.splitlines() == [
        "step 20  held-out loss 2.5000  (3.6000 bits per byte)  "
        "training loss since the last evaluation 2.2500", "    | a\ufffd[2Jb", "    | c"]
    reporter.evaluation({**row, "bits_per_byte": None, "train_loss": None}, None)
    assert capsys.readouterr().out == "step 20  held-out loss 2.5000\n"


def test_the_mean_loss_skips_what_is_not_finite():
    """One step without a finite loss would hide all the others."""
    assert report.mean_loss([1.0, float("nan"), 3.0, float("inf")]) == 2.0
    assert report.mean_loss([float("nan")]) is None and report.mean_loss([]) is None


def test_each_evaluation_has_the_mean_of_the_losses_since_the_one_before():
    """Means that run on from the start of the run, or lose the step before an evaluation."""
    config = make(steps=7, eval_every=3)
    rows, _ = learn(config, held_out=tokens_of(config, 8, 5))
    losses = {r["step"]: r["loss"] for r in rows if "loss" in r}
    found = {r["step"]: r["train_loss"] for r in rows if "eval_loss" in r}
    for at, steps in {3: (1, 2, 3), 6: (4, 5, 6), 7: (7,)}.items():
        assert found.pop(at) == pytest.approx(np.mean([losses[step] for step in steps]))
    assert not found


def test_a_continued_runs_training_loss_is_that_of_a_whole_one(tmp_path):
    """Losses from before a restart that are missing from the mean, or counted twice."""
    config = make(steps=8, eval_every=5, save_every=2, out=str(tmp_path / "run"))

    def evaluations():
        learn(config, held_out=tokens_of(config, 8, 5))
        rows = [json.loads(line) for line in open(tmp_path / "run/metrics.jsonl")]
        return [(r["step"], r["train_loss"]) for r in rows if "eval_loss" in r]

    whole = evaluations()
    assert [step for step, _ in whole] == [5, 8]
    shutil.rmtree(tmp_path / "run/checkpoints/8")       # it continues between two evaluations
    assert evaluations() == whole


def test_a_command_prints_its_host_and_its_losses(tmp_path, text):
    """The parts are right and the command does not use them."""
    done = command(*SMALL, "--steps", 4, "--eval_every", 2, "--mesh", "data=2", "--data", text,
                   "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^devices  process 0 on \S+: 2 x cpu \(0, 1\)$", done.stdout, re.M)
    found = re.findall(r"^step \d  held-out loss [\d.]+  \([\d.]+ bits per byte\)  "
                       r"training loss since the last evaluation [\d.]+$", done.stdout, re.M)
    assert len(found) == 2, done.stdout


def test_a_device_of_a_torus_says_where_it_lies():
    """Which chips make an axis cannot be seen from their numbers alone."""
    assert report._place(SimpleNamespace(id=3, coords=(1, 0, 2))) == "3 at 1,0,2"
    assert report._place(SimpleNamespace(id=3)) == "3"
