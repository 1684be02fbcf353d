"""Held-out examples, each predicted once and in order on any mesh; metrics of the predictions; the
best checkpoint, which is kept; samples."""

import dataclasses
import fractions
import json
import math
import os
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import sample
import tasks
from tasks import metrics
from tasks.examples import Pairs
from tests.common import (
    SMALL,
    all_succeed,
    digit_pairs,
    hosts,
    net,
    peer,
    refused,
    refuses,
    slow,
    started,
    succeeds,
    survives_kills,
)
from tests.helpers import (
    ROOT,
    TINY,
    KeepRows,
    assert_close,
    learn,
    losses_of,
    make,
    rows_of,
    run_of,
    tokens_of,
)
from zigzag.commands import continued as continued_run
from zigzag.commands import text as text_task
from zigzag.core.errors import ConfigError
from zigzag.disk.checkpoint import best_step, run_steps
from zigzag.disk.corpus import opened_sources
from zigzag.disk.tokenizers import Bytes
from zigzag.generate.prompts import step_of
from zigzag.parallel.saved import load_run
from zigzag.run import evaluation
from zigzag.run.continuing import record_of

VECTORS = list(np.random.default_rng(0).normal(size=(203, 8)).astype(np.float32))


def network_of_loss(params, batch):
    error = batch["x"] @ params["w"] - batch["x"]
    return jnp.sum(error ** 2), len(batch["x"]), {"far": jnp.sum(jnp.abs(error) > 1),
                                                  "errors": jnp.sum(jnp.abs(error), 0)}


# A task with 203 held-out examples.
OWN = dict(init=lambda key: {"w": jax.random.normal(key, (8, 8)) / 3}, examples=VECTORS,
           held_out=VECTORS, collate=lambda e: {"x": np.stack(e)}, loss=network_of_loss,
           predict=lambda p, b: {"y": b["x"] @ p["w"], "id": b["x"].argmax(-1)})


def own(mesh="", given=(), **changes):
    """learn(), with one step unless another number is given: that task, with these changes of it
    and of the configuration."""
    return learn(make(**{"steps": 1, **changes}), mesh, **{**OWN, **dict(given)})


def evaluations(rows):
    return [row for row in rows if "eval_loss" in row]


# -------------------------------------------------------------------------------------------
# Predictions

@pytest.mark.parametrize("mesh", ["", "data=2", "data=8", "tensor=2"])
def test_every_held_out_example_is_predicted_in_its_order(mesh):
    """A few rows that depend on the mesh; a last batch that is dropped, or whose padding counts; a
    program that is compiled for each number of rows, or at each evaluation."""
    shapes = []

    def predict(params, batch):
        shapes.append(batch["x"].shape)
        return OWN["predict"](params, batch)

    _, result = own(mesh, dict(predict=predict), steps=2, eval_every=1, batch=16)
    assert shapes == [(16, 8)]
    assert isinstance(result.outputs["y"], np.ndarray)
    np.testing.assert_array_equal(result.outputs["id"], np.argmax(VECTORS, 1))
    np.testing.assert_allclose(result.outputs["y"], VECTORS @ np.asarray(result.params["w"]),
                               rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", ["", "data=8"])
def test_fewer_are_predicted_where_that_is_enough(mesh):
    """A few predictions that take the time of all held-out text, or whose number depends on the
    mesh."""
    shapes = []

    def predict(params, batch):
        shapes.append(len(batch["x"]))
        return batch["x"].sum(-1)

    given = []
    _, result = own(mesh, dict(predict=predict, predicted=1,
                               metric=lambda outputs, examples: given.extend(examples) or 0))
    assert shapes == [8 if mesh else 1] and len(given) == 1
    np.testing.assert_allclose(result.outputs, [VECTORS[0].sum()], rtol=1e-6)


def test_outputs_that_have_no_row_for_each_example_are_refused():
    """Outputs of two batches that are put together wrongly, or a traceback of numpy's."""
    def collate(examples):          # the last held-out batch is wider
        width = 1 + any(x is VECTORS[-1] for x in examples)
        return {"x": np.stack(examples), "n": np.zeros((len(examples), width))}

    for predict, says in (
            (lambda p, b: b["x"].sum(), r"shapes \[\(\)\] for 8 examples"),
            (lambda p, b: p["w"][:3], r"shapes \[\(3, 8\)\] for 8 examples"),
            (lambda p, b: b["n"], r"shapes \[\(8, 2\)\] for 8 examples, not \[\(8, 1\)\]")):
        with refuses(says):
            own(given=dict(predict=predict, collate=collate), eval_first=True)


@pytest.mark.full
def test_a_metric_of_texts_is_that_of_each_answer_and_its_pair(tmp_path):
    """203 answers of up to nine tokens that are compared with other targets, or after their
    ends."""
    path = digit_pairs(tmp_path / "digits.jsonl", 2200)
    config = make(encoder_layers=1, layers=1, vocab_size=257, source_len=10, seq_len=10, batch=16,
                  steps=60, lr=0.01, metric="exact")
    pairs = Pairs(path, Bytes())
    task = tasks.pairs.task_of(config, pairs.tokenizer, pairs.train, pairs.held_out)
    task = dataclasses.replace(task, held_out=[pairs.held_out[i] for i in range(203)])
    rows, result = learn(config, **vars(task))
    given, want = result.outputs
    for source, is_there, pair in zip(
            given["source"], given["source_mask"], task.held_out, strict=True):
        np.testing.assert_array_equal(source[is_there > 0], pair[0])
    correct = [[*row[:list(row).index(256)]] == list(pair[1][:-1]) if 256 in row else False
               for row, pair in zip(want, task.held_out)]
    assert rows[-1]["exact"] == pytest.approx(np.mean(correct))


# A custom task in several processes; each records its arguments.
TWO_PROCESSES = """
import os, sys
sys.path.insert(0, os.getcwd())
import jax, jax.numpy as jnp, numpy as np, train
from zigzag.core.flags import run_main
vectors = list(np.random.default_rng(0).normal(size=(203, 8)).astype(np.float32))
def loss(params, batch):
    return jnp.sum((batch["x"] @ params["w"] - batch["x"]) ** 2), len(batch["x"])
def predict(params, batch):
    return {"y": batch["x"] @ params["w"], "id": batch["x"].argmax(-1)}
def metric(outputs, examples):
    if jax.process_index():         # what the others say must not count
        return {"own": -1.0}
    return {"own": float(np.mean(outputs["y"])), "count": len(examples)}
def main():
    config = train.parse(sys.argv[1:])
    result = train.fit(config, train.Task(
        lambda key: {"w": jax.random.normal(key, (8, 8)) / 3},
        lambda e: {"x": np.stack(e)}, loss, predict, vectors, vectors, metric=metric))
    np.savez(f"{config.out}/by-{jax.process_index()}.npz", best=result.best, **result.outputs)
run_main(main)
"""


@pytest.mark.full
def test_every_process_has_all_predictions(tmp_path):
    """A process with the predictions of only its own rows, which then saves another step as the
    best."""
    file = tmp_path / "two.py"
    file.write_text(TWO_PROCESSES)
    words = ("--steps", 4, "--eval_every", 1, "--batch", 8, "--best", "largest:own", "--warmup", 1,
             "--keep", 1, "--eval_first", "true")
    all_succeed(hosts(2, *words, "--mesh", "data=2,tensor=2", "--out", tmp_path / "two", file=file))
    succeeds(*words, "--out", tmp_path / "one", file=file)
    want = np.load(tmp_path / "one/by-0.npz")
    for i in range(2):
        got = np.load(tmp_path / f"two/by-{i}.npz")
        np.testing.assert_array_equal(got["id"], np.argmax(VECTORS, 1))
        np.testing.assert_allclose(got["y"], want["y"], rtol=1e-4, atol=1e-5)
        assert got["best"] == want["best"] == best_step(tmp_path / "two")
    found = evaluations(rows_of(tmp_path / "two"))
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4]
    assert all(row["count"] == 203 and row["own"] != -1 for row in found)


# -------------------------------------------------------------------------------------------
# Metrics

def test_a_metric_is_of_all_predictions_and_is_logged():
    """A metric that is averaged over batches, includes padding, or is not logged."""
    def metric(outputs, examples):
        assert examples is VECTORS and len(outputs["y"]) == 203
        return {"largest": outputs["y"].max(), "n": len(examples), "even": jnp.float32(2)}

    rows, result = own("data=2", dict(metric=metric))
    assert rows[-1]["largest"] == result.outputs["y"].max() == result.evaluation["largest"]
    assert (rows[-1]["n"], rows[-1]["even"]) == (203, 2)
    for half in (np.float32(0.5), fractions.Fraction(1, 2)):
        rows, _ = own(given=dict(metric=lambda outputs, examples: half))
        assert rows[-1]["metric"] == 0.5


@pytest.mark.parametrize("metric, error, says", [
    (lambda o, e: 1 / 0, ZeroDivisionError, "division by zero"),
    (lambda o, e: {"x": [1, 2]}, ConfigError, r"gave \[1, 2\] as 'x': expected a number"),
    (lambda o, e: None, ConfigError, "gave None as 'metric': expected a number"),
    (lambda o, e: np.datetime64("2026-11-24"), ConfigError, "expected a number"),
    (lambda o, e: {"eval_far": 1.0}, ConfigError, "the name 'eval_far'"),
    *((lambda o, e, name=name: {name: 1.0}, ConfigError,
       f"the name {name!r}: expected a name other than .*, eval_loss, grad_norm, loss, .*, which a")
      for name in ("loss", 1))])
def test_a_broken_metric_is_a_clear_error_and_is_found_at_once(metric, error, says):
    """What is found after the first hour of training, although --eval_first was given."""
    rows = []
    with pytest.raises(error, match=says):
        own(given=dict(metric=metric, say=KeepRows(rows, [])), eval_first=True)
    assert not rows


def test_what_a_task_has_nothing_for_is_refused():
    """A flag that is silently ignored."""
    for changes, given, says in (
            (dict(eval_first=True), dict(held_out=()), "--eval_first True: there are no held-out"),
            (dict(best="smallest:eval_loss"), dict(held_out=()), "--best .*no held-out examples"),
            (dict(metric="exact"), {}, "--metric exact: .*for pairs of texts"),
            ({}, dict(held_out=(), metric=len), "fit.s metric: there are no held-out"),
            ({}, dict(metric=len, predict=None), "give fit a predict")):
        with refuses(says):
            own(given=given, **changes)


@pytest.mark.parametrize("mesh", ["", "data=8", "fsdp=2,tensor=2"])
def test_other_sums_of_held_out_examples_are_logged(mesh):
    """Other sums that are logged only in training, or as means of batches' means, although the last
    batch is smaller."""
    rows, result = own(mesh, batch=16)
    error = np.abs(VECTORS @ np.asarray(result.params["w"]) - VECTORS)
    assert rows[-1]["eval_far"] == pytest.approx((error > 1).sum() / 203, rel=1e-6)
    assert rows[-1]["eval_errors"] == pytest.approx(error.sum(0) / 203, abs=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [slow("data=2,pipe=2"), slow("fsdp=2,seq=2"), slow("tensor=2")])
def test_other_sums_count_once_where_devices_have_the_same_rows(mesh):
    """Other sums that are added over devices with the same rows: those of one row's layers or time,
    or all devices if rows (13) do not divide."""
    config = make(steps=1)

    def loss(params, batch, specs=None):
        s, n = net.loss(params, batch, config, specs)
        return s, n, {"asked": n, "twice": 2 * s}

    row = learn(config, mesh, loss=loss, held_out=tokens_of(config, 13, 5))[1].evaluation
    assert row["eval_asked"] == 1
    assert row["eval_twice"] == pytest.approx(2 * row["eval_loss"], rel=1e-6)


def test_other_sums_that_do_not_add_up_over_held_out_rows_are_refused():
    """A number that depends on how many devices there are, logged as if it did not."""
    def loss(params, batch):
        s, n, others = network_of_loss(params, batch)
        return s, n, others if "seeds" in batch else {"one": jnp.ones(())}

    with refuses("its held-out other sum 'one' by"):
        own("data=2", dict(loss=loss))


# -------------------------------------------------------------------------------------------
# Shown outputs, and the number of evaluated examples

def test_a_few_outputs_are_shown_and_all_are_returned():
    """A show=str that prints thousands of rows; outputs that are also cut in fit's result, or for
    the metric."""
    shown, seen = [], []

    def predict(params, batch):
        return {"x": batch["tokens"][:, 0]}

    config = make(steps=1)
    _, result = learn(config, "data=2", held_out=tokens_of(config, 13, 5), predict=predict,
                      show=lambda outputs: str(shown.append(outputs["x"].shape)),
                      metric=lambda outputs, examples: seen.append(outputs["x"].shape) or 0.0)
    assert shown == [(4,)] and seen == [(13,)] and result.outputs["x"].shape == (13,)


@pytest.mark.parametrize("steps, first, batch", [
    (100, False, 8), (100, True, 8), (900, False, 8), (3, False, 8), (40, False, 4096)])
def test_evaluations_take_a_fifth_of_a_runs_time_at_most(steps, first, batch):
    """A run that trains on 102,400 tokens and evaluates 655,000."""
    config = run_of(steps=steps, eval_first=first, batch=batch)
    count = len({s for s in range(1, steps + 1) if s % config.eval_every == 0} | {steps}) + first
    training, tokens = 3 * steps * config.batch * config.network.seq_len, config.eval_tokens
    least = config.batch * config.network.seq_len
    assert 0 < tokens <= evaluation.MOST_TOKENS
    if tokens > least:
        assert count * tokens <= (training + count * tokens) / 5
    if least < tokens < evaluation.MOST_TOKENS:     # nor much less
        assert count * (tokens + 2 * evaluation.SHOWN_TEXT) > (training + count * tokens) / 5
    assert run_of(steps=steps, eval_tokens=5).eval_tokens == 5


def test_a_continued_run_keeps_its_held_out_tokens(tmp_path):
    """Held-out losses of other windows after a change of --steps."""
    def continued(record, **given):
        (tmp_path / "config.json").write_text(json.dumps(record | {"tokenizer": "bytes"}))
        given = {"out": str(tmp_path), "steps": 500} | given
        return continued_run.continued(given).eval_tokens

    record = record_of(run_of(steps=400, eval_tokens=3000))
    assert continued(record) == 3000
    assert continued(record, eval_tokens=5000) == 5000


def test_held_out_windows_are_spread_over_all_of_the_text(tmp_path, text):
    """A limited number of windows, all from the first held-out file."""
    config, opened = corpus_of(tmp_path, text, eval_tokens=64, seq_len=16)
    with opened as corpus:
        held_out = text_task.task_of(config, corpus).held_out
        windows, (whole,) = held_out.examples, corpus.corpora
        assert len(held_out) == 4 < len(windows)
        where = [i * len(windows) // 4 * 16 for i in range(4)]
        assert max(where) > len(whole.held_out) / 2
        for i, start in enumerate(where):
            np.testing.assert_array_equal(held_out[i], whole.held_out[start:start + 17])


# -------------------------------------------------------------------------------------------
# Metrics of texts

def test_rouge_by_hand():
    """A longest common subsequence that counts a word twice, or only adjacent words; ids."""
    assert metrics.rouge(["The cat, (sat)."], ["the CAT sat"])["rouge2"] == 1
    ids = metrics.rouge([[1, 2, 3, 4]], [[1, 3, 2, 4]])
    assert ids == {"rouge1": 1, "rouge2": 0, "rougeL": 0.75}
    assert metrics.rouge(["a a b"], ["a b b"]) == {
        "rouge1": pytest.approx(2 / 3), "rouge2": 0.5, "rougeL": pytest.approx(2 / 3)}


def test_rouge_is_that_of_rouge_score():
    """Stems of words of three letters, which rouge_score leaves as they are; another stemmer than
    its own; ids that are stemmed."""
    theirs = peer("rouge_score.rouge_scorer").RougeScorer
    rng = np.random.default_rng(0)
    words = re.findall(r"[A-Za-z]+", (ROOT / "README.md").read_text()) + ["was", "news", "dying"]
    texts = [("", "x"), ("...", "?"), ("a_b c-d 3.5%", "A B C D 3 5"), ("it's as was", "its a wa")]
    texts += [["".join(word + rng.choice([" ", "s, ", "ing\n", "ed-", "ly. "]) for word in
                       rng.choice(some, rng.integers(0, 20))) for _ in range(2)]
              for some in rng.choice(words, (200, 9))]
    for stems, ours in ((False, metrics.rouge), (True, metrics.rouge_stemmed)):
        scorer = theirs(["rouge1", "rouge2", "rougeL"], use_stemmer=stems)
        for p, r in texts:
            want = {name: score.fmeasure for name, score in scorer.score(r, p).items()}
            assert ours([p], [r]) == pytest.approx(want), (p, r)
    assert metrics.rouge_stemmed([[1, 22222]], [[22222, 1]])["rouge1"] == 1


def test_metrics_by_hand():
    """An empty text that counts as right, or divides by zero; words in another order; one character
    of a text for an id."""
    assert metrics.f1(["The cat sat.", "", "x", ""], ["a cat, sat down", "", "y", "z"]) == {
        "f1": pytest.approx((0.8 + 1 + 0 + 0) / 4)}
    assert metrics.f1([[1, 1, 2]], [[1, 2, 2]]) == {"f1": pytest.approx(2 / 3)}
    assert metrics.exact(["a", "b ", [1, 2], np.array([1])], ["a", "b", (1, 2), [1, 2]]) == {
        "exact": 0.5}
    assert metrics.accuracy(np.array([1, 2, 3]), [1, 0, 3]) == {"accuracy": pytest.approx(2 / 3)}
    assert metrics.accuracy([[1, 2], [3]], [[1, 9], [3, 4]]) == {"accuracy": 0.5}
    with refuses("1 predictions and 2 references"):
        metrics.exact(["a"], ["a", "b"])


# -------------------------------------------------------------------------------------------
# The best checkpoint, and the first evaluation

def scored(scores):
    """A metric that returns these scores, one for each evaluation."""
    left = iter(scores)
    return lambda outputs, examples: {"score": next(left)}


@pytest.mark.full
def test_the_best_checkpoint_stays_and_is_known_when_a_run_goes_on(tmp_path):
    """Best weights that are deleted, or not saved between two saves; a continued run that takes its
    first evaluation for the best; the later of two equal scores; a NaN as the best."""
    run = tmp_path / "run"
    config = dict(eval_every=1, save_every=4, keep=1, out=str(run), best="largest:score")
    nan = math.nan

    def learned(steps, *scores, **changes):
        return own(given=dict(metric=scored(scores)), steps=steps, **{**config, **changes})

    _, result = learned(4, nan, 5, 7, 7)
    assert result.best == best_step(run) == 3 and run_steps(run) == [4, 3]
    assert result.evaluation["score"] == 7
    _, result = learned(8, 1, nan, 6, 2)
    assert result.best == best_step(run) == 3 and run_steps(run) == [8, 3]
    _, result = learned(10, 9, 8)
    assert result.best == best_step(run) == 9 and run_steps(run) == [10, 9]
    _, result = learned(10, 8)
    assert result.best == 9, "a finished run"
    with refuses("--best smallest:scor: .*did you mean 'score'"):
        learned(11, 8, best="smallest:scor", eval_first=True)
    # (Each checkpoint has its evaluation, so another --best can be found later.)
    _, result = learned(11, 10, best="smallest:score")
    assert result.best == best_step(run) == 10
    shutil.rmtree(run / "checkpoints/10")
    assert best_step(run) == 11


def test_two_numbers_may_each_have_their_best_checkpoint(tmp_path):
    """The best by one number that is deleted for the best by the other, or when the run goes on."""
    run, left = tmp_path / "run", iter([(1, 5), (3, 4), (2, 3), (2, 6), (0, 1)])

    def metric(outputs, examples):
        return dict(zip(("right", "wrong"), next(left)))

    config = dict(eval_every=1, save_every=0, keep=1, out=str(run),
                  best=("largest:right", "smallest:wrong"))
    _, result = own(given=dict(metric=metric), steps=4, **config)
    assert result.best == 2 and run_steps(run) == [4, 3, 2]
    _, result = own(given=dict(metric=metric), steps=5, **config)
    assert result.best == best_step(run) == 2 and run_steps(run) == [5, 2]
    assert best_step(run, by="smallest:wrong") == step_of(str(run), "smallest:wrong") == 5
    assert step_of(str(run), "best") == step_of(str(run), "largest:right") == 2
    with refuses("has a number for smallest:right_"):
        step_of(str(run), "smallest:right_")
    assert make(best=("none",)).best == make(best="").best == ()


@pytest.mark.full
def test_an_evaluation_has_its_own_batch():
    """Rows that count twice, or predictions out of order, with another batch."""
    found = [own(mesh, steps=2, eval_every=2, eval_batch=rows)
             for mesh in ("", "data=2,tensor=2") for rows in (None, 6, 500)]
    losses = [rows[-1]["eval_loss"] for rows, _ in found]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5)
    for _, result in found[1:]:
        assert_close(result.outputs, found[0][1].outputs, atol=1e-4)


def test_a_run_without_a_best_checkpoint_says_so(tmp_path):
    """A traceback, or the newest, taken for the best."""
    run = tmp_path / "run"
    own(out=str(run))
    with refuses("--run .*trained without --best.*newest is step 1"):
        best_step(run)
    with refuses("--init_from .*no run there"):
        best_step(tmp_path / "none", "--init_from")
    own(given=dict(metric=scored([math.nan])), steps=2, out=str(run), best="largest:score")
    with refuses("no checkpoint yet has a number for"):
        best_step(run)


@pytest.mark.parametrize("first", [False, True])
def test_a_best_of_no_numbers_name_is_refused_as_soon_as_it_is_known(first, tmp_path):
    """A run that silently keeps no best checkpoint."""
    with refuses("--best largest:eval_fra: .*did you mean 'eval_far'"):
        own(best="largest:eval_fra", out=str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    with refuses("eval_loss, eval_far, score; did you mean 'score'"):
        own(given=dict(metric=scored([1, 2])), steps=2, eval_every=1, best="largest:scare",
            out=str(tmp_path / "b"), eval_first=first)
    assert len(losses_of(rows_of(tmp_path / "b"))) == (0 if first else 1)


@pytest.mark.full
def test_a_first_evaluation_changes_nothing_that_comes_after_it(tmp_path):
    """Other numbers in training; a second line for an evaluated step in a continued run; losses
    that are missing from the next evaluation's mean; no checkpoint of the weights evaluated."""
    losses = []
    for first in (False, True):
        out = tmp_path / f"run{first}"
        config = make(steps=6, eval_every=5, save_every=2, keep=9, out=str(out), eval_first=first)
        learn(config, **OWN)
        assert run_steps(out) == ([6, 4, 2, 0] if first else [6, 4, 2]), "the first state, too"
        for lost in ("checkpoints", "checkpoints/6") if first else ():
            shutil.rmtree(out / lost)       # it resumes between two evaluations
            learn(config, **OWN)
        rows = rows_of(out)
        assert [r["step"] for r in evaluations(rows)] == [0] * first + [5, 6]
        losses.append([(r["step"], r.get("loss"), r.get("train_loss"), r.get("eval_loss"))
                       for r in rows if r["step"]])
    assert losses[0] == losses[1]


@pytest.mark.full
def test_kills_leave_the_best_checkpoint(tmp_path, text):
    """A kill between the deletion of the old best checkpoint and the new one; a best that is
    forgotten after a kill."""
    words = (*SMALL, "--mesh", "data=2,tensor=2", "--steps", 40, "--save_every", 15, "--keep", 1,
             "--eval_every", 3, "--eval_first", "true", "--best", "smallest:eval_loss",
             "--data", text)

    def start(out):
        if (out / "checkpoints").is_dir() and any(
                p.name.isdecimal() for p in (out / "checkpoints").iterdir()):
            at = best_step(out)
            assert load_run(out, step=at)
        return [started(*words, "--out", out)]

    survives_kills(2, int(os.environ.get("KILLS", 4)), tmp_path, start)
    assert best_step(tmp_path / "run") == best_step(tmp_path / "whole")
    assert run_steps(tmp_path / "run") == run_steps(tmp_path / "whole")


# -------------------------------------------------------------------------------------------
# The command line

@pytest.mark.full
def test_pairs_have_a_metric(tmp_path, capsys, monkeypatch):
    """The command line's own way from a line of JSON to a metric and its best checkpoint; a metric
    whose package is found missing only at the first evaluation."""
    digits, out = digit_pairs(tmp_path / "digits.jsonl", 300), tmp_path / "out"
    words = ("--model", "transformer", "--encoder_layers", 1, "--source_len", 12, "--data", digits,
             "--out", out,
             *SMALL[:-2], "--batch", 16, "--steps", 4, "--eval_every", 2, "--eval_first", "true",
             "--shards", 2)
    done = succeeds(*words, "--metric", "rouge", "--best", "largest:rougeL")
    rows = evaluations(rows_of(out))
    assert [row["step"] for row in rows] == [0, 2, 4] and {"rouge1", "rouge2"} <= set(rows[0])
    assert f"rougeL {rows[-1]['rougeL']:.4f}" in done.stdout
    assert best_step(out) == max(rows, key=lambda row: row["rougeL"])["step"]
    assert "    source | " in done.stdout and "    answer | " in done.stdout
    other = tmp_path / "other"
    monkeypatch.setitem(sys.modules, "nltk.stem.porter", None)
    for more, says in ((("--metric", "rogue"), "--metric rogue: expected exact or rouge or "
                        "rouge_stemmed or f1 or accuracy; did you mean 'rouge'?"),
                       (("--metric", "rouge_stemmed", "--eval_first", "false", "--eval_every", 4),
                        "--metric rouge_stemmed needs the package nltk: pip install nltk"),
                       (("--metric", "f1", "--best", "largest:exact"), "reports eval_loss, f1")):
        assert says in refused(capsys, *words, "--out", other, *more)
    assert not other.exists() or not (other / "checkpoints").exists()


def corpus_of(tmp_path, text, **changes):
    """A configuration and a corpus for language_task."""
    config = run_of(**{**TINY, "vocab_size": 257, "data": (str(text),), **changes})
    return config, opened_sources(config.data, False, (), tmp_path / "run")


def test_the_text_that_is_shown_has_its_own_temperature(tmp_path, text, capsys):
    """A temperature that does not reach the window that is shown."""
    ids = Bytes().prompt("17 and")
    config, opened = corpus_of(tmp_path, text, layers=1, sample_temperature=0.0)
    with opened as corpus:
        task = text_task.task_of(config, corpus)
    params = model.init(config.network, jax.random.key(0))
    found = task.predict(params, {"tokens": np.array([ids])})[0, 4:10]
    want, = sample.generate(params, [ids[:4]], config.network, 6, temperature=0)
    assert found.tolist() == want
    assert "--sample_temperature -1" in refused(capsys, "--sample_temperature", -1)
