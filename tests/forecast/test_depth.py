"""--depth: a model and its training from one number, by the rules of docs/running.md."""

import json
import re

import pytest

import data
import train
from forecast import bench, depth
from tests.common import refused, refuses
from tests.helpers import ROOT, rows_of
from zigzag.core.flags import change
from zigzag.parallel.network import flops_of_update, network_of


def record_of(run):
    return json.loads((run / "config.json").read_text())


@pytest.mark.parametrize("number, vocabulary, seq_len", [
    (1, 257, 128), (2, 257, 128), (3, 257, 128), (6, 8192, 512), (12, 50257, 1024),
    (32, 50257, 1024), (61, 128000, 4096)])
def test_sizes_and_steps_follow_from_the_depth(number, vocabulary, seq_len):
    """Heads that do not divide the width; tokens that are counted without the vocabulary, or in
    rows; a rate or a batch that no published model of this size has."""
    c = train.parse(["--depth", str(number), "--vocab_size", str(vocabulary),
                     "--seq_len", str(seq_len)])
    n, small = c.network, number < 8
    assert n.layers == number and n.head_dim == (32 if small else 64)
    assert 0 <= n.d_model - 32 * number < 64
    parameters, _ = network_of(c).parameters(n)
    tokens = c.batch * seq_len
    assert 0 <= c.steps * tokens - 20 * parameters < tokens
    assert c.batch & (c.batch - 1) == 0 and c.warmup == max(1, c.steps // 20)
    assert c.lr * c.weight_decay * c.steps == pytest.approx(5, rel=0.02)
    assert 5e-4 < c.lr < (0.03 if small else 0.005) and 1_000 < tokens < 5_000_000


def test_the_table_in_the_docs_is_what_it_chooses():
    """A rule that docs/running.md describes, and the code no longer has."""
    rows = re.findall(r"\| (\d+) \| (\d+), (\d+) \| \d+ M \|" + r" ([\d,.]+) \|" * 4,
                      (ROOT / "docs/running.md").read_text())
    for number, *want in rows:
        c = train.parse(["--depth", number, "--vocab_size", "50257", "--seq_len", "1024"])
        found = (c.network.d_model, c.network.heads, c.batch * 1024, c.steps, c.lr, c.weight_decay)
        assert [*found] == [float(value.replace(",", "")) for value in want]
    assert len(rows) == 4


def test_larger_models_have_lower_rates_and_larger_batches():
    """A power of the cost with the wrong sign."""
    configs = [train.parse(["--depth", str(n)]) for n in (2, 4, 8, 16, 32)]
    rates, batches = ([getattr(c, name) for c in configs] for name in ("lr", "batch"))
    assert rates == sorted(rates, reverse=True) and batches == sorted(batches)


def test_the_vocabulary_is_that_of_the_data(text, tmp_path):
    """Steps for a vocabulary of bytes, on subwords."""
    data.prepare([str(text)], tmp_path / "tokens", 300)
    words = ["--depth", "2", "--batch", "16"]
    known = train.parse([*words, "--vocab_size", "300"])
    assert train.parse([*words, "--data", str(tmp_path / "tokens")]).steps == known.steps
    assert train.parse([*words, "--data", str(text)]).steps < known.steps


@pytest.mark.parametrize("name, value", [
    ("d_model", 96), ("heads", 4), ("batch", 24), ("lr", 0.02), ("weight_decay", 0.3),
    ("warmup", 7), ("steps", 400), ("seq_len", 64), ("d_ff", 128), ("tied", True)])
def test_a_flag_overrides_the_rule(name, value):
    """A flag that --depth replaces."""
    c = train.parse(["--depth", "2", f"--{name}", str(value)])
    assert getattr(c, name, None) == value or getattr(c.network, name, None) == value


def test_what_follows_from_an_overridden_option():
    """Weight decay for the rate or the steps that were not taken; steps for another batch, or
    besides --tokens; a decay of more than all of a weight in a short trial; a division by zero."""
    usual = train.parse(["--depth", "2"])
    faster = train.parse(["--depth", "2", "--lr", str(2 * usual.lr)])
    assert faster.weight_decay == pytest.approx(usual.weight_decay / 2, rel=0.01)
    fewer = train.parse(["--depth", "2", "--batch", str(2 * usual.batch)])
    assert fewer.steps == pytest.approx(usual.steps / 2, abs=1) and fewer.lr == usual.lr
    tokens = usual.batch * 128
    more = train.parse(["--depth", "2", "--tokens", str(9000 * tokens)])
    assert more.steps * more.batch * 128 >= 9000 * tokens and more.lr < usual.lr
    assert more.lr * more.weight_decay * more.steps == pytest.approx(5, rel=0.02)
    assert train.parse(["--depth", "2", "--steps", "3"]).weight_decay == 1
    assert train.parse(["--depth", "2", "--lr", "0"]).lr == 0


def test_what_depth_does_not_fit_is_one_line(capsys):
    """Sizes of a published model, or of a run, that --depth changes; --layers that it ignores."""
    for flag, value in (("layers", 4), ("model", "124m"), ("model", "gpt2"), ("init_from", "run")):
        assert f"--depth 6 --{flag} {value}: both choose the model" in refused(
            capsys, "--depth", 6, f"--{flag}", value)
    for number in (0, -1):
        with refuses(f"--depth {number}: must be a number of at least 1"):
            train.parse(["--depth", str(number)])
    assert "--batch 8 does not divide among 8 groups" in refused(
        capsys, "--depth", 1, "--mesh", "data=8", "--accumulate", 2)
    with pytest.raises(SystemExit):
        train.main(["--depth", "6", "--help"])
    assert re.search(r"--d_model .*\[192\]", capsys.readouterr().out)


@pytest.mark.full
def test_a_run_keeps_what_its_depth_chose(text, tmp_path, capsys, monkeypatch):
    """A run that continues by rules that have changed since, or as a model of another depth; a cost
    that is printed again, or that counts the steps of the trial."""
    def train_some(config, mesh, task, say):
        say.took = [9.0] * bench.WARM + [1.5, 1.5, 1.5]

    monkeypatch.setattr(bench, "train_some", train_some)
    run = tmp_path / "run"
    words = ["--data", str(text), "--out", str(run), "--eval_every", "0", "--seq_len", "32"]
    given = ["--depth", "1", "--steps", "4", "--batch", "8"]
    train.main([*words, *given])
    line, = (x for x in capsys.readouterr().out.splitlines() if x.startswith("depth "))
    assert line.startswith("depth    1: d_model 32, heads 1, batch 8, steps 4, lr 0.0")
    assert line.endswith("FLOPs, 0.1 minutes at 1,500 ms a step")
    record = record_of(run)
    config = train.parse(given + ["--seq_len", "32"])
    whole = change(config, vocab_size=record["vocab_size"])         # the head counts too
    assert f"; {4 * flops_of_update(whole):.2g} FLOPs" in line
    for name in ("depth", "layers", "d_model", "heads", "batch", "lr", "weight_decay", "warmup"):
        assert record[name] == getattr(config, name, None) or getattr(config.network, name)

    monkeypatch.setattr(depth, "chosen", None)      # (called only for a new run)
    for again in ([], given[:2]):
        train.main([*words, *again, "--steps", "5"])
        assert "depth " not in capsys.readouterr().out and record_of(run)["lr"] == record["lr"]
    assert len(rows_of(run)) == 5
    assert "depth 1, not 2" in refused(capsys, *words, "--depth", 2)


def test_bad_values_beside_depth_are_refused_in_one_line(capsys):
    """Options that are computed from a batch or tokens before these are checked; a number of steps
    that two flags choose."""
    for words, says in ((["--batch", 0], "--batch 0"), (["--tokens", -5], "--tokens -5"),
                        (["--epochs", 1], "both choose the steps")):
        assert says in refused(capsys, "--depth", 2, *words)
