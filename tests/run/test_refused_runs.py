"""What a run that continues must have in common with what it was; a refused run changes nothing;
held-out data of one's own."""

import dataclasses
import json
import shutil

import numpy as np
import optax
import pytest

import data
import train
from tests.common import SMALL, SMALL_PAIRS, digit_pairs, ends, go, hosts, opened, refused, refuses
from tests.helpers import learn, make, needed, tokens_of
from zigzag.core.flags import change
from zigzag.disk.tokenizers import Bytes

folders = needed("published.folders")


def all_of(folder):
    """{path: content} of a folder, with folders."""
    return {path: path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*"))}


def wrong_best(folder):
    """Flags that only train.fit can refuse, when the data has been opened and the loss traced."""
    return "--mesh", "data=4,tensor=2", "--best", "smallest:nosuch", "--out", folder


@pytest.mark.parametrize("kind", ["text", "tokens", "pairs"])
def test_a_refused_run_leaves_its_folder_as_it_was(tmp_path, text, capsys, kind):
    """A folder with encoded text or a tokenizer, and no run, which the next command takes for one;
    the data of an earlier command that was killed, replaced."""
    words = (*SMALL, "--data", text)
    if kind == "tokens":
        words = (*SMALL, "--data", data.prepare([str(text)], tmp_path / "t", 300).folder)
    if kind == "pairs":
        words = (*SMALL_PAIRS, "--data", digit_pairs(tmp_path / "a.jsonl", 40, digits=3))
    before = all_of(tmp_path)
    assert "nosuch" in refused(capsys, *words, *wrong_best(tmp_path / "run"))
    assert all_of(tmp_path) == before
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/data/data.json").write_text("{}")
    (tmp_path / "run/log.txt").write_text("the output of the command")
    before = all_of(tmp_path)
    assert "nosuch" in refused(capsys, *words, *wrong_best(tmp_path / "run"))
    assert all_of(tmp_path) == before


@pytest.mark.full
def test_no_command_writes_among_files_that_it_did_not_make(tmp_path, text, capsys):
    """A run whose tokenizer data.py replaced, so that nothing reads it any more; a run, or tokens,
    among texts, prepared data or a published model; a folder refused for what harms nobody."""
    run, tokens = tmp_path / "run", data.prepare([str(text)], tmp_path / "tokens", 300).folder
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a text")
    words = *SMALL, "--batch", 8, "--steps", 1, "--data", tokens
    (run / "data.part").mkdir(parents=True)             # (of a beginning that was killed)
    (tmp_path / "new").mkdir()
    for folder in run, tmp_path / "new":
        for name in ".gitignore", ".DS_Store", "log.txt", "slurm-12.out":
            (folder / name).touch()
    go(*words, "--out", run)
    (run / "notes.md").write_text("a user's own")
    go(*words, "--out", run)                # a run that continues may have more beside it
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.profile").touch()
    (tmp_path / "checkout/.git").mkdir(parents=True)
    (tmp_path / "older/checkpoints/100").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.model").write_text("another tokenizer")
    before = all_of(tmp_path)
    for name in "texts", "tokens", "home", "checkout", "older", "other":
        assert f"--out {tmp_path / name} holds" in refused(capsys, *words, "--out", tmp_path / name)
    for name in "run", "texts", "home", "checkout", "older", "other":
        assert "which data.py did not make" in refused(
            capsys, text / "1.txt", "--out", tmp_path / name, main=data.main)
        assert "which this export did not make" in refused(
            capsys, "--run", run, "--export", tmp_path / name,
            main=folders.export)
    assert all_of(tmp_path) == before
    data.main([str(text / "1.txt"), "--out", str(tmp_path / "new"), "--vocab_size", "0"])
    assert "already holds prepared data" in refused(capsys, text, "--out", tokens, main=data.main)


def test_a_change_of_data_that_is_refused_late_leaves_the_run_as_it_was(tmp_path, text, capsys):
    """New text in the folder of a run that does not learn it."""
    run, more = tmp_path / "run", tmp_path / "more.txt"
    more.write_text("what the first run never saw\n" * 200)
    go(*SMALL, "--steps", 2, "--data", text, "--out", run)
    before = all_of(run)
    assert "nosuch" in refused(capsys, "--data", more, "--change", "data", "--steps", 3,
                               *wrong_best(run))
    assert all_of(run) == before


# -------------------------------------------------------------------------------------------
# What must be the same

@pytest.mark.full
def test_an_edited_learning_rate_is_noticed(tmp_path, monkeypatch):
    """A run that goes on with another rate, because the function was edited and no flag was."""
    run = str(tmp_path / "run")
    config = make(steps=6, save_every=3, out=run, layers=1)
    learn(config)
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    learn(config)                                   # (the same, again)
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    own = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda c, step: own(c, step) * 1.01)
    with refuses("learning rate at step 1 was .* is now .*: the schedule was edited"):
        learn(config)
    learn(dataclasses.replace(config, change=("lr",)))
    record = json.loads((tmp_path / "run/config.json").read_text())
    assert record["rates"]["0"] == pytest.approx(1.01 * float(own(config, 0)), rel=1e-5)


@pytest.mark.full
def test_another_schedule_for_fit_is_noticed(tmp_path):
    """A run that goes on with another schedule(step); one that is refused though it is the same."""
    config = make(steps=4, save_every=2, out=str(tmp_path / "run"), layers=1)
    learn(config, schedule=optax.constant_schedule(0.01))
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    longer = change(config, steps=6)
    for schedule in (None, optax.constant_schedule(0.02)):
        with refuses("or fit got a different"):
            learn(longer, schedule=schedule)
    assert learn(longer, schedule=optax.constant_schedule(0.01))[1].step == 6


@pytest.mark.full
def test_other_data_for_fit_are_noticed(tmp_path):
    """Examples of another file, from which a run goes on to learn without a word."""
    config = make(steps=2, out=str(tmp_path / "run"), layers=1)
    learn(config, examples=tokens_of(config, 16))
    longer, other = change(config, steps=4), tokens_of(config, 16, 3)
    assert learn(longer, examples=tokens_of(config, 16))[1].step == 4
    with refuses("first_example .*--change data allows"):
        learn(change(config, steps=5), examples=other)
    changed = dataclasses.replace(change(config, steps=5), change=("data",))
    assert learn(changed, examples=other)[1].step == 5


# -------------------------------------------------------------------------------------------
# Held-out data of one's own

def test_pairs_are_evaluated_on_the_held_out_ones(tmp_path):
    """--held_out that is ignored for pairs; a tenth of --data that is held out beside it."""
    for name, count in (("a", 30), ("b", 7)):
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"source": f"{name}{i}", "target": "x"}) + "\n" for i in range(count)))
    config = train.parse([*map(str, SMALL_PAIRS), "--data", str(tmp_path / "a.jsonl")])
    with opened(config, tmp_path / "run") as alone:
        whole = alone.make_task().held_out
        assert len(alone.make_task().examples) + len(whole) == 30 and len(whole) > 1
    with opened(dataclasses.replace(config, held_out=(str(tmp_path / "b.jsonl"),)),
                tmp_path / "run") as beside:
        task = beside.make_task()
    assert (len(task.examples), len(task.held_out)) == (30, 7)
    assert Bytes().decode(task.held_out[3][0].tolist()).strip() == "b3"
    assert beside.record["fingerprint"] != alone.record["fingerprint"]
    assert "evaluated on" in beside.description


def test_arrays_are_evaluated_on_the_held_out_ones(tmp_path, capsys):
    """--held_out that is ignored for arrays."""
    for name, count in (("a", 20), ("b", 3)):
        np.savez(tmp_path / f"{name}.npz", tokens=np.full((count, 4), count % 9, np.int32),
                 mask=np.ones((count, 4), np.float32),
                 labels=np.arange(count, dtype=np.int32) % 2)
    words = ("--model", "transformer", "--causal", "false", "--head", "classes", "--labels", 2,
             "--vocab_size", 30, "--seq_len", 4, "--layers", 1, "--d_model", 8, "--heads", 2)
    config = train.parse([str(w) for w in (*words, "--data", tmp_path / "a.npz", "--held_out",
                                           tmp_path / "b.npz")])
    with opened(config, tmp_path / "run") as learned:
        task = learned.make_task()
    assert (len(task.examples), len(task.held_out)) == (20, 3)
    assert task.held_out[0]["tokens"][0] == 3
    assert "--held_out" in refused(capsys, *words, "--data", tmp_path / "a.npz", "--held_out",
                                   tmp_path / "a.npz", tmp_path / "b.npz", "--out",
                                   tmp_path / "out")


# -------------------------------------------------------------------------------------------
# Several processes

@pytest.mark.full
@pytest.mark.slow
def test_processes_that_are_refused_leave_nothing(tmp_path, text):
    """Encoded text that stays because a process of several ends without unwinding."""
    words = (*SMALL, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    found = ends(hosts(2, *words, "--mesh", "data=2", "--best", "smallest:nosuch"))
    assert [status for status, *_ in found] == [2, 2] and "nosuch" in found[0][2], found
    assert not (tmp_path / "run").exists()
