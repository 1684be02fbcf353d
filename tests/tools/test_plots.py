"""--plot: curves of runs, from their metrics.jsonl alone."""

import json
import os
import sys

import pytest

from tests.common import command, peer, refused, refuses, succeeds
from tools import plots


@pytest.fixture
def runs(tmp_path):
    """Two runs of 100 and of 50 steps. The second has experts, and its last line is half
    written."""
    for name, steps in (("a", 100), ("b", 50)):
        (tmp_path / name).mkdir()
        rows = [{"step": at, "loss": 4 - at / 50, "lr": 0.01, "grad_norm": 10000 / at ** 3,
                 "tokens_per_second": 5000 + at} for at in range(1, steps + 1)]
        if name == "b":
            for row in rows:
                row |= {"expert_load": [[0.2, 0.8], [0.5, 0.5]], "mfu": None, "empty": []}
        rows[10]["loss"] = None         # (not finite)
        rows.insert(50, {"step": 50, "eval_loss": 3.5, "train_loss": 3.6, "right": 0.25})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text[:-9] if name == "b" else text)
    return tmp_path


def test_a_chart_of_text_has_every_curve_in_its_place(runs, capsys):
    """A curve upside down, or stretched over the width of another run; a line that is being
    written, and ends in a traceback; experts whose load has no panel; one for null."""
    plots.run([str(runs / "a"), str(runs / "b")])
    text = capsys.readouterr().out
    first, second, *_ = text.splitlines()
    assert first == f"* {runs / 'a'}: step 100"
    assert second == f"o {runs / 'b'}: step 50"
    panels = {panel.splitlines()[0]: panel.splitlines() for panel in text.split("\n\n")[1:]}
    assert list(panels) == ["loss", "lr", "grad_norm", "tokens_per_second", "eval_loss", "right",
                            "expert_load/smallest", "expert_load/largest"]
    loss = panels["loss"]
    width = len(loss[-2]) - 12
    rows = [line.partition("|")[2] for line in loss[1:-2]]
    assert len(rows) == plots.ROWS and "o" in rows[0][:3] and "*" in rows[-1][width - 3:]
    assert max(row.rfind("o") for row in rows) <= width / 2 and loss[-1].endswith("100")
    assert any(line.startswith("       0.2 |o") for line in panels["expert_load/smallest"])
    assert max(len(line) for panel in panels.values() for line in panel) <= 86


def test_a_picture_is_written_by_matplotlib(runs, capsys, monkeypatch):
    """A picture of an empty page; a file of a kind that nobody can open; a traceback where
    matplotlib is missing."""
    peer("matplotlib")
    names = [str(runs / "a"), str(runs / "b")]
    plots.run(names, str(runs / "both.png"))
    content = (runs / "both.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000
    assert "are in " in capsys.readouterr().out
    with refuses("--save .*both.xyz: .*not supported"):
        plots.run(names, str(runs / "both.xyz"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refuses("--save b.png needs .*pip install matplotlib"):
        plots.run(names, "b.png")


def test_what_cannot_be_drawn_is_refused(runs, capsys):
    """A traceback for a folder without a run, or with one that has not begun."""
    assert "no run there" in refused(capsys, "--plot", runs / "none")
    (runs / "a/metrics.jsonl").write_text("")
    assert "has no steps yet" in refused(capsys, "--plot", runs / "a")
    assert "--save b.png: names the picture of --plot" in refused(capsys, "--save", "b.png")


def test_a_chart_needs_no_jax(runs):
    """Seconds of waiting for a compiler that draws nothing, or a device that a run has."""
    (runs / "jax.py").write_text("raise SystemExit('jax is imported')\n")
    path = os.pathsep.join(filter(None, [str(runs), os.environ.get("PYTHONPATH")]))
    done = succeeds("--plot", runs / "b", env={"PYTHONPATH": path})
    assert done.stdout.startswith(f"* {runs / 'b'}: step 50") and "+---" in done.stdout
    done = command("--plot", runs / "b", "--steps", 3)
    assert done.returncode == 2 and "--steps is not an option" in done.stderr
