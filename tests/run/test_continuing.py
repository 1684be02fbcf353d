"""Continuing a run by its folder: flags that are not given are the run's, given ones must agree."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import data
import train
from forecast import bench, dry_run
from tests.common import (
    SMALL,
    all_succeed,
    continued,
    go,
    hosts,
    opened,
    refused,
    refuses,
    succeeds,
)
from tests.helpers import StopAt, learn, make, rows_of
from zigzag.core.flags import change
from zigzag.disk.checkpoint import FORMAT
from zigzag.disk.corpus import opened_sources
from zigzag.parallel.network import network_of
from zigzag.run.continuing import old_config

WORDS = (*SMALL, "--lr", 0.004, "--steps", 4, "--save_every", 2, "--eval_every", 4)


def record_of(run):
    return json.loads((run / "config.json").read_text())


def text_of(config, run):
    """The text on which a run trains."""
    record = record_of(run)
    with opened_sources(config.data, False, (), run, fingerprint=record["fingerprint"]) as sources:
        assert sources.fingerprint == record["fingerprint"]
        corpus, = sources.corpora
        ids = np.concatenate([corpus.train, corpus.held_out]).tolist()
        return corpus.tokenizer.decode(ids).strip()


@pytest.fixture(scope="module")
def begun(tmp_path_factory, text):
    """A run of four updates on tokens of its own, which data.py made."""
    folder = tmp_path_factory.mktemp("begun")
    data.prepare([str(text)], folder / "tokens", 300)
    go(*WORDS, "--data", folder / "tokens", "--out", folder / "run")
    return folder / "run"


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


@pytest.mark.full
def test_a_run_continues_by_its_folder_alone(run, capsys):
    """A missing flag that is taken for its default, so that the run is refused; a learning rate
    that silently jumps."""
    was = record_of(run)
    go("--out", run, "--steps", 6)
    (data, *lines), now = capsys.readouterr().out.splitlines(), record_of(run)
    assert data.startswith("data ") and lines[0] == f"continuing {run} at step 4 of 6"
    rows = {row["step"]: row for row in rows_of(run) if "loss" in row}
    assert list(rows) == [1, 2, 3, 4, 5, 6]
    held = f"{rows[4]['lr']:.1e}"
    assert lines[1].startswith(
        f"schedule steps 4 -> 6, decay_steps None -> 4: the learning rate was {held} at step 4 and "
        f"will be {held} at step 5 (--change decay spreads ") and "--change lr" in lines[1]
    differs = {name for name in was if was[name] != now[name]}
    assert differs == {"steps", "out", "decay_steps", "rates"} and was.keys() == now.keys()
    go("--out", run, "--steps", 9, "--change", "decay")
    _, *lines = capsys.readouterr().out.splitlines()        # (after the data)
    rates = [f"{row['lr']:.1e}" for row in rows_of(run) if "lr" in row]
    assert f"was {rates[5]} at step 6 and will be {rates[6]} at step 7" in lines[1]
    assert float(rates[6]) > float(rates[5])
    assert any(line.startswith("changed  --steps 6 -> 9; --decay_steps 4 -> None,")
               for line in lines)
    log = (run / "log-0.txt").read_text()
    # (The log has what --verbose prints, too.)
    assert log.count("\ncontinuing ") == 2
    assert all(line + "\n" in log for line in lines), "what it printed"


@pytest.mark.full
def test_more_epochs_continue_a_run(run, capsys):
    """Epochs that a continued run ignores."""
    with opened(old_config(train.Config, str(run)), run, ready=1) as learned:
        count = len(learned.make_task().examples)
    go("--out", run, "--epochs", 6 * 4 / count)
    assert record_of(run)["steps"] == 6 and "epochs" not in record_of(run)
    assert "at step 4 of 6" in capsys.readouterr().out


def test_what_is_given_is_compared_and_all_of_it_is_told(run, capsys):
    """Differences reported one at a time; a refusal of a flag that agrees with the run; flags that
    belong together taken apart."""
    error = refused(capsys, "--out", run, "--heads", 8, "--lr", 0.1, "--steps", 6, "--layers", 3)
    for says in ("layers 2, not 3", "heads 4, not 8", "lr 0.004, not 0.1", "--change lr allows"):
        assert says in error
    assert "weight_decay" not in error
    error = refused(capsys, "--out", run, "--model", "gpt2")
    assert "network 'decoder', not " in error and "layers 2, not 12" in error
    assert "heads 4, not 3" in refused(capsys, "--out", run, "--heads", 3)
    old = old_config(train.Config, str(run))
    same = continued("--out", run, "--kv_heads", 0, "--heads", 4, "--model", "tiny", "--lr", 0.004)
    assert same == change(old, out=str(run))
    for name, value in (("mesh", "data=2,tensor=2"), ("shards", 2)):
        record = {**record_of(run), "mesh": "", "shards": 0, name: value}
        (run / "config.json").write_text(json.dumps(record))
        assert getattr(continued("--out", run), name) == value
        other = continued("--out", run, "--mesh", "data=4")
        assert (other.mesh, other.shards) == ("data=4", 0)
        other = continued("--out", run, "--shards", 4)
        assert (other.mesh, other.shards) == ("", 4)


def test_other_commands_and_functions_look_at_no_run(run, monkeypatch):
    """A benchmark, or a script that parses flags, that reads a run which happens to be in `out`."""
    monkeypatch.chdir(run.parent)
    run.rename("out")
    assert train.parse([]).network.layers == 4
    assert continued("--steps", 9).network.layers == 2
    seen = []
    monkeypatch.setattr(dry_run, "run", seen.append)
    monkeypatch.setattr(bench, "run", seen.append)
    train.main(["--topology", "v5e:2x2"])
    train.main(["--bench", "--mesh", "data=8"])
    assert [config.network.layers for config in seen] == [4, 4]


@pytest.mark.full
def test_what_is_changed_on_purpose_is_noted_and_stays(run, text, tmp_path, capsys):
    """New text in another tokenizer's ids; a change that the next start undoes, or that is not
    recorded."""
    was, more = record_of(run), tmp_path / "more"
    shutil.copytree(text, more)
    (more / "new.txt").write_text("what the first run never saw\n" * 9)
    go("--out", run, "--steps", 5, "--lr", 0.002, "--data", more, "--change", "lr", "data")
    said, now = capsys.readouterr().out, record_of(run)
    assert f"changed  --data {was['data']} -> {[str(more)]}; --lr 0.004 -> 0.002, noted" in said
    change, = now["changes"]
    assert change["step"] == 4 and change["lr"] == [0.004, 0.002]
    assert change["data"] == [was["data"], [str(more)]] and "change" not in now
    assert now["fingerprint"] == change["fingerprint"][1] != was["fingerprint"]
    config = continued("--out", run, "--steps", 6)
    assert (config.lr, config.data) == (0.002, (str(more),))
    new, learned = (more / "new.txt").read_bytes(), text_of(config, run)
    shutil.rmtree(more)         # (the run has its text)
    assert text_of(config, run) == learned and new.decode() in learned
    assert now["tokenizer_sha256"] == was["tokenizer_sha256"]
    more.mkdir()
    (more / "other.txt").write_bytes(b"what stands at the same path by now\n" * 99)
    assert text_of(continued("--out", run), run) == learned
    go("--out", run, "--steps", 6, "--weight_decay", 0, "--change", "weight_decay", "data")
    again = record_of(run)["changes"]
    assert again[0] == change and again[1]["step"] == 5 and again[1]["weight_decay"] == [0.1, 0]
    assert again[1].keys() == {"step", "weight_decay", "fingerprint"}
    assert text_of(config, run).startswith("what stands at the same path by now\n")


def test_fewer_steps_than_were_made_are_refused(run, capsys):
    """A record that says two steps for a run that has made four, and no training."""
    before = record_of(run)
    says = refused(capsys, "--out", run, "--steps", 2)
    assert "--steps 2: " in says and "is at step 4 already; give more than that" in says
    assert record_of(run) == before


@pytest.mark.full
def test_the_same_text_given_again_is_no_change(text, tmp_path, capsys):
    """A change that is noted, after --change data with the text that the run already has."""
    run = tmp_path / "run"
    go(*WORDS, "--data", text, "--out", run)
    go("--out", run, "--steps", 5, "--change", "data")
    assert "changes" not in record_of(run)
    assert capsys.readouterr().out.count(f"continuing {run} at step 4") == 1


def test_a_change_that_is_refused_leaves_the_run_as_it_was(run, text, tmp_path, capsys):
    """A run whose text is replaced before its start is refused."""
    before = sorted((p, p.read_bytes()) for p in run.rglob("*") if p.is_file())
    data.prepare([str(text)], tmp_path / "bytes")
    for words, says in (
            (("--change", "lr"), "give --lr too"),
            (("--lr", 1, "--change", "lr"), "has done its 4 steps, so this"),
            (("--change", "lrr"), "'lr'"),
            (("--change", "data", "--data", tmp_path / "bytes"), "not from the tokenizer of"),
            (("--change", "data", "--data", text, "--lr", 1), "lr 0.004, not 1.0")):
        assert says in refused(capsys, "--out", run, "--mesh", "tensor=8", *words)
    assert sorted((p, p.read_bytes()) for p in run.rglob("*") if p.is_file()) == before
    assert "holds no run to change" in refused(capsys, "--out", tmp_path / "new", "--lr", 1,
                                               "--change", "lr")


def test_runs_that_lack_a_field_continue_by_their_folder(tmp_path, capsys, monkeypatch):
    """A refusal because a field was added since the run began; a traceback for a damaged
    record."""
    record = dict(format=FORMAT, layers=2, d_model=32, heads=4, vocab_size=257, seq_len=32,
                  dtype="float32", steps=20, data=[], lr=0.5, tokenizer="bytes")
    for network, more in (("decoder", {}), ("transformer", dict(window=8))):
        (tmp_path / "config.json").write_text(json.dumps({**record, **more, "network": network}))
        config = continued("--out", tmp_path)
        assert network_of(config).name == network
        assert (config.network.layers, config.lr, config.steps, config.warmup) == (2, 0.5, 20, 1)
        assert "of a different task" not in refused(capsys, "--out", tmp_path, "--layers", 3)
    assert config.network.window == 8
    (tmp_path / "config.json").write_text("{")
    assert "no run there (cannot read " in refused(capsys, "--out", tmp_path)
    monkeypatch.chdir(tmp_path)         # (a config.json that no --out names)
    assert "--out '': expected a folder" in refused(capsys, "--out", "", "--mesh", "data=8")


@pytest.mark.full
def test_several_processes_change_the_data_of_a_run(tmp_path, text):
    """One process that continues with the old text, or reads before the new text is written."""
    out, more = tmp_path / "run", tmp_path / "more.txt"
    more.write_text("once more with other words\n" * 2000)
    succeeds(*WORDS, "--mesh", "data=2", "--data", text, "--out", out)
    results = all_succeed(hosts(2, "--out", out, "--steps", 6, "--data", more, "--change", "data"))
    assert record_of(out)["changes"][0]["step"] == 4
    assert "\ncontinuing " in results[0][1] and "continuing" not in results[1][1]
    with refuses("data .*, not "):
        continued("--out", out, "--data", text)


def test_a_script_that_continues_with_other_steps_is_told(tmp_path):
    """A recipe's default of 400 steps that silently ends a run of 1,500 at the step where it was
    stopped, or gives it another schedule without a line."""
    config, lines = make(steps=6, save_every=4, warmup=1, out=str(tmp_path / "run")), []
    learn(config, say=StopAt(4))
    with refuses("--steps 3: --out .* is at step [45] already"):
        learn(dataclasses.replace(config, steps=3))
    learn(dataclasses.replace(config, steps=9), lines=lines)
    assert any(line.startswith("schedule steps 6 -> 9: the learning rate was") for line in lines)
