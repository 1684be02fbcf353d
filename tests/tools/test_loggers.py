"""--log and fit's log: every number goes to a logger, and no logger stops a run."""

import shutil
import sys
import types

import jax
import pytest

from tests.common import peer, refused, refuses
from tests.helpers import learn, make, rows_of, tokens_of
from tools import trackers
from zigzag.run import loggers


def config_of(out, **changes):
    return make(**dict(steps=4, save_every=2, eval_every=2, layers=1, out=str(out)) | changes)


@pytest.mark.full
def test_tensorboard_reads_every_number_once(tmp_path):
    """Event files that TensorBoard cannot read; steps that it shows twice, because the run was
    continued from a checkpoint before them."""
    peer("tensorboard")
    reader = peer("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    config = config_of(run, log=("tensorboard",))
    held_out = tokens_of(config, 8, 1)
    learn(config, held_out=held_out)
    shutil.rmtree(run / "checkpoints/4")
    learn(config, held_out=held_out)
    events = reader.EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    for name in ("loss", "lr", "tokens_per_second", "eval_loss"):
        wanted = [(row["step"], row[name]) for row in rows_of(run) if name in row]
        assert [step for step, _ in wanted] == ([2, 4] if name == "eval_loss" else [1, 2, 3, 4])
        assert [(e.step, e.value) for e in events.Scalars(name)] == [
            (step, pytest.approx(x)) for step, x in wanted]
    assert "mfu" not in events.Tags()["scalars"], "null, on a CPU"


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package wandb, whose runs keep what they are given."""
    module = types.ModuleType("wandb")
    module.runs, module.fails_at = [], None

    def init(**given):
        run = types.SimpleNamespace(given=given, rows=[], is_closed=False)

        def log(numbers, step):
            if step == module.fails_at:
                raise OSError("the network\nis gone")
            run.rows.append((step, numbers))

        run.log, run.finish = log, lambda: setattr(run, "is_closed", True)
        module.runs.append(run)
        return run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.full
def test_a_run_of_wandb_continues_under_its_id(tmp_path, wandb):
    """A new run of wandb for each start; two runs with one id; a logger that is not told to
    finish."""
    out, other = tmp_path / "a", tmp_path / "b"
    learn(config_of(out, log=("wandb",), steps=2))
    learn(config_of(out, log=("wandb", "none")))
    first, second = wandb.runs
    assert [step for step, _ in first.rows + second.rows] == [1, 2, 3, 4]
    assert second.rows[1][1]["loss"] == rows_of(out)[3]["loss"]
    assert first.is_closed and second.is_closed and second.given["config"]["d_model"] == 32
    assert second.given["dir"] == str(out) and second.given["resume"] == "allow"
    assert first.given["id"] == second.given["id"]
    other.mkdir()
    loggers.Loggers(("wandb",), str(other), 0, {}, None, print)
    assert wandb.runs[-1].given["id"] != first.given["id"]


def test_a_logger_that_fails_is_off_and_the_run_goes_on(tmp_path, wandb):
    """A run of a week that ends because a website did not answer; a warning at every step."""
    wandb.fails_at, lines, seen = 2, [], []
    rows, _ = learn(config_of(tmp_path, log=("wandb",)), lines=lines,
                    log=lambda step, numbers: seen.append((step, numbers["loss"])))
    assert len(rows) == 4 and [step for step, _ in wandb.runs[0].rows] == [1]
    assert [line for line in lines if line.startswith("warning")] == [
        "warning  --log wandb failed and is off from here on: OSError: the network is gone"]
    assert seen == [(row["step"], row["loss"]) for row in rows]
    wandb.init, lines = None, []        # (it cannot even begin)
    with loggers.Loggers(("wandb",), str(tmp_path), 0, {}, lambda step: None, lines.append) as log:
        log.write(rows[0])
        log.write(rows[1])
    assert len(lines) == 2 and "--log wandb failed" in lines[0] and "fit's log failed" in lines[1]


def test_a_logger_that_is_not_there_is_refused_at_the_start(tmp_path, capsys, monkeypatch, text):
    """A run that ends at its first step, or runs for a week without the logs that were asked
    for."""
    monkeypatch.setitem(sys.modules, "trackio", None)       # (an import of it fails)
    out = tmp_path / "run"
    words = ("--data", text, "--mesh", "data=8", "--out")
    assert "--log trackio needs the package trackio: pip install trackio" in refused(
        capsys, *words, out, "--log", "trackio")
    assert "--log wandbb: expected some of tensorboard, wandb, trackio" in refused(
        capsys, *words, out, "--log", "wandbb")
    assert not out.exists()
    with refuses("--log tensorboard: a run without a folder"):
        learn(make(steps=1, layers=1, log=("tensorboard",)))


def test_only_process_0_logs(tmp_path, wandb, monkeypatch):
    """A run of wandb for each process; a package that every host needs."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setitem(sys.modules, "trackio", None)
    trackers.check(("trackio",), "out")
    opened = loggers.Loggers(("wandb",), str(tmp_path), 0, {}, print, print)
    opened.write({"step": 1, "loss": 2.0})
    assert not opened.opened and not wandb.runs and not [*tmp_path.iterdir()]
