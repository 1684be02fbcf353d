"""--plot: curves of runs, from their metrics.jsonl alone."""

import json
import os
import sys

import pytest

from tests.common import command, peer, refused
from zigzag.core.errors import ConfigError
from zigzag.run import plots


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
                row["expert_load"] = [[0.2, 0.8], [0.5, 0.5]]
        rows[10]["loss"] = None         # (not finite)
        rows.insert(50, {"step": 50, "eval_loss": 3.5, "train_loss": 3.6, "right": 0.25})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text[:-9] if name == "b" else text)
    return tmp_path


def test_the_speed_is_a_running_median(runs):
    """A curve of tokens/s that is the noise of single steps, or that the slow first step bends."""
    path = runs / "a" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "tokens_per_second" in row:
            row["tokens_per_second"] = 100 if row["step"] == 1 else 5000 + 900 * (row["step"] % 3)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve, = plots.series(str(runs / "a"))[plots.SPEED]
    assert len(curve) == 100 and {*curve[:, 1]} <= {5900.0, 5450.0} and "median" in plots.SPEED


def test_a_chart_of_text_has_every_curve_in_its_place(runs, capsys):
    """A curve upside down, or stretched over the width of another run; a line that is being
    written, and ends in a traceback."""
    plots.draw([str(runs / "a"), str(runs / "b")])
    text = capsys.readouterr().out
    first, second, *_ = text.splitlines()
    assert first == f"* {runs / 'a'}: step 100, loss 2.0000, held-out loss 3.5000 at step 50"
    assert second == f"o {runs / 'b'}: step 50, loss 3.0000"
    panels = {panel.splitlines()[0]: panel.splitlines() for panel in text.split("\n\n")[1:]}
    assert list(panels) == ["loss", "held-out loss", "learning rate",
                            "gradient norm (logarithmic)", plots.SPEED,
                            "expert load: smallest and largest share", "right"]
    loss = panels["loss"]
    width = len(loss[-2]) - 12
    rows = [line.partition("|")[2] for line in loss[1:-2]]
    assert len(rows) == plots.ROWS and "o" in rows[0][:3] and "*" in rows[-1][width - 3:]
    assert max(row.rfind("o") for row in rows) <= width / 2 and loss[-1].endswith("100")
    experts = [line for line in panels["expert load: smallest and largest share"] if "o" in line]
    assert "0.8 |o" in experts[1] and "0.2 |o" in experts[2], "the first is the title"
    assert max(len(line) for panel in panels.values() for line in panel) <= 80


def test_runs_with_different_tokenizers_are_drawn_in_bits_per_byte(runs, capsys):
    """Losses per byte and per piece in one panel, of which the lower one looks better; bits per
    byte where the tokenizers are equal; a traceback for a run without them."""
    def chart():
        plots.draw([str(runs / "a"), str(runs / "c")])
        return capsys.readouterr().out

    def tell(name, kind, digest, size):
        (runs / name / "config.json").write_text(json.dumps(
            {"tokenizer": kind, "tokenizer_sha256": digest, "vocab_size": size}))

    (runs / "c").mkdir()
    row = json.loads((runs / "a/metrics.jsonl").read_text().splitlines()[50])
    for name, loss, bits in (("a", 3.5, 1.25), ("c", 1.5, 2.25)):
        with open(runs / name / "metrics.jsonl", "a") as f:
            for at, number in ((60, bits), (100, bits + 0.5)):
                f.write(json.dumps({**row, "step": at, "eval_loss": loss, "loss": 3.0,
                                    "bits_per_byte": number}) + "\n")
    tell("a", "sentencepiece", "ab12", 8192)
    for is_known in (False, True):      # (an old run may not say what its tokenizer is)
        if is_known:
            tell("c", "sentencepiece", "ab12", 8192)
        text = chart()
        assert "\nheld-out loss\n" in text and "bits per byte" not in text
        assert f"o {runs / 'c'}: step 100, loss 3.0000, held-out loss 1.5000\n" in text
    for other in (("bytes", "", 257), ("sentencepiece", "cd34", 8192), ("ids", "", 300)):
        tell("c", *other)
        text = chart()
        assert "\nheld-out bits per byte\n" in text and "held-out loss" not in text
        assert f"o {runs / 'c'}: step 100, loss 3.0000, held-out bits per byte 2.7500\n" in text
        assert (f"The tokenizers differ ({runs / 'a'}: sentencepiece, 8,192 ids; {runs / 'c'}: "
                f"{other[0]}, {other[2]:,} ids), so losses per token" in " ".join(text.split()))
    path = runs / "c/metrics.jsonl"
    path.write_text(path.read_text().replace('"bits_per_byte": 2.', '"bits": 2.'))
    text = chart()
    assert f"Without them: {runs / 'c'}." in " ".join(text.split())
    panel = text.partition("\nheld-out bits per byte\n")[2].split("\n\n")[0]
    assert "*" in panel and "o" not in panel
    peer("matplotlib")
    plots.draw([str(runs / "a"), str(runs / "c")], str(runs / "both.svg"))
    assert "The tokenizers differ (" in capsys.readouterr().out
    assert "tokenizers differ" in (runs / "both.svg").read_text()


def test_a_picture_is_written_by_matplotlib(runs, capsys, monkeypatch):
    """A picture of an empty page; a file of a kind that nobody can open; a traceback where
    matplotlib is missing."""
    peer("matplotlib")
    names = [str(runs / "a"), str(runs / "b")]
    plots.draw(names, str(runs / "both.png"))
    content = (runs / "both.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000
    assert "are in " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--save .*both.xyz: .*not supported"):
        plots.draw(names, str(runs / "both.xyz"))
    with pytest.raises(ConfigError, match="--save .*both: expected a name that ends with .png"):
        plots.draw(names, str(runs / "both"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="--save b.png needs .*pip install matplotlib"):
        plots.draw(names, "b.png")


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
    done = command("--plot", runs / "b", env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"* {runs / 'b'}: step 50") and "+---" in done.stdout
    done = command("--plot", runs / "b", "--steps", 3)
    assert done.returncode == 2 and "--steps is not an option" in done.stderr
