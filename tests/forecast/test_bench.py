"""--minutes: as many steps as its time allows. (--bench is tested with --topology.)"""

import pytest

import train
from forecast import bench
from tests.common import refused
from tests.helpers import rows_of

SMALL = ("--layers", "1", "--d_model", "32", "--heads", "2", "--seq_len", "32")


@pytest.mark.full
def test_minutes_become_steps_and_a_run_keeps_them(text, tmp_path, capsys, monkeypatch):
    """A schedule that ends at 900 steps; a second start that begins to count its time again."""
    def train_some(config, mesh, task, say):
        say.took = [9.0] * bench.WARM + [0.2, 1.5, 1.5]        # the first ones compile

    monkeypatch.setattr(bench, "train_some", train_some)
    words = [*SMALL, "--data", str(text), "--out", str(tmp_path / "run"), "--eval_every", "0"]
    train.main([*words, "--minutes", "0.1"])
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 4 and "minutes  0.1, at 1,500 ms a step: 4 steps" in capsys.readouterr().out
    config = train.parse(["--steps", "4"])
    assert rows[-1]["lr"] < 0.1 * config.lr        # (it ends near --final_share)
    for again in ([], ["--minutes", "1"]):
        train.main([*words, *again])
        assert len(rows_of(tmp_path / "run")) == 4
    assert "--steps 3 and --minutes 1: give only one" in refused(
        capsys, "--steps", 3, "--minutes", 1)


@pytest.mark.full
def test_the_speed_is_measured(text, tmp_path):
    """Steps from a time that includes the compilation; a measured run that leaves files."""
    train.main([*SMALL, "--data", str(text), "--out", str(tmp_path / "run"), "--minutes", "0.02"])
    assert len(rows_of(tmp_path / "run")) >= 4 and not (tmp_path / "out").exists()
