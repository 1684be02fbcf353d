"""Weights of single tokens: from lines of JSON, columns and files next to token files, into the
loss as they are; one collate for every kind of row."""

import bz2
import gzip
import json
import math
import shutil
import types

import jax
import numpy as np
import pytest

import data
from tests.common import (
    SMALL,
    TOKENS,
    data_py,
    documents_of,
    full,
    go,
    json_lines,
    net,
    peer,
    prepared,
    refused,
    token_shards,
)
from tests.helpers import ROOT, TINY, learn, run_of
from zigzag.commands import text as text_task
from zigzag.disk.corpus import Corpus, opened_sources
from zigzag.disk.mixture import numbers_at
from zigzag.disk.packing import Documents
from zigzag.disk.reading import Options
from zigzag.disk.token_files import TokenFiles
from zigzag.disk.tokenizers import Bytes

WEIGHTED = Options(weight_field="w")


def rows_of_text(count=40, encode=lambda text: text.encode()):
    """Lines with every kind of weight: a number, a list, 0, null, none at all."""
    rng = np.random.default_rng(0)
    for i in range(count):
        text = f"{i} and é🙂 {i + 1}" if i % 7 else ""
        kinds = 0.5, [round(x, 3) for x in rng.random(len(encode(text)))], 0, None, 2
        yield {"text": text, **({} if i % 6 == 5 else {"w": kinds[i % 5]})}


def by_hand(rows, tokenizer):
    """[(tokens with the separator, weights)] of these lines."""
    found = []
    for row in rows:
        ids, w = tokenizer.encode(row["text"]).tolist(), row.get("w")
        w = 1 if w is None else w
        w = [*(w[:1] or [1]), *w] if isinstance(w, list) else [w] * (len(ids) + 1)
        found.append(([tokenizer.separator, *ids], np.float32(w).tolist()))
    return found


@pytest.mark.parametrize("kind", ["bytes", "pieces", "parquet"])
def test_the_weights_of_lines_are_those_of_their_tokens(tmp_path, text, kind, capsys):
    """A weight of another token or document, or 0 in place of 0.5; a separator that takes the
    weight of a token; a line without a weight that is left out, or not told."""
    tokenizer = prepared(text, tmp_path / "t", 300).tokenizer if kind == "pieces" else Bytes()
    rows = [*rows_of_text(encode=tokenizer.encode)]
    path = json_lines(tmp_path / "a.jsonl", *rows)
    if kind == "parquet":
        path, arrow = tmp_path / "a.parquet", peer("pyarrow")
        lists = [w if isinstance(w := row.get("w"), list | None) else [w] * len(
            row["text"].encode()) for row in rows]
        rows = [{**row, "w": w} for row, w in zip(rows, lists)]
        peer("pyarrow.parquet").write_table(arrow.table({
            "w": lists, "text": [row["text"] for row in rows]}), path)
    words = ["--tokenizer", tmp_path / "t"] if kind == "pieces" else ["--vocab_size", 0]
    data_py(path, "--out", tmp_path / "out", "--weight_field", "w", *words)
    corpus, want = Corpus(tmp_path / "out"), by_hand(rows, tokenizer)
    assert sorted(documents_of(corpus)) == sorted(want)
    learned, total = sum(x > 0 for _, w in want for x in w), sum(len(w) for _, w in want)
    assert 0 < learned < total and (f"learned  {learned:,} of {total:,} tokens have a weight above "
                                    f"0, by 'w'") in capsys.readouterr().out


@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_a_batch_has_the_weights_of_its_targets(tmp_path, pack):
    """Weights one token off, of the inputs in place of the targets, or cut to whole numbers; an end
    of a document that is learned more, or less, than the document."""
    long = "".join(map(chr, range(33, 126)))        # (each token once)
    rows = [*rows_of_text(), {"text": long, "w": [i / 93 for i in range(93)]}]
    corpus = prepared(json_lines(tmp_path / "a.jsonl", *rows), tmp_path / "out", options=WEIGHTED)
    examples = data.rows_of(corpus, "train", 32, pack)
    batch = data.collate([examples[i] for i in range(len(examples))], 32)
    if pack == "stream":
        found = batch["weights"].ravel()
        assert found.any() and "segments" not in batch
        assert found.tolist() == corpus.weights["train"][1:len(found) + 1].tolist()
        return
    found = []
    for row, segments in enumerate(batch["segments"]):
        for number in range(1, segments.max() + 1):
            ids, w, positions = (batch[name][row, segments == number].tolist()
                                 for name in ("tokens", "weights", "positions"))
            assert positions == [*range(len(ids))]
            found.append((ids, w))
    assert sorted(found) == sorted(
        (ids[i:i + 32], [*w, w[-1]][i + 1:i + 1 + len(ids[i:i + 32])])
        for ids, w in documents_of(corpus)[:corpus.record["train"]["documents"]]
        for i in range(0, len(ids), 32))


def edited(*changes):
    """data.py as somebody edits it."""
    code = (ROOT / "data.py").read_text()
    for old, new in changes:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    module = types.ModuleType("data_edited")
    exec(compile(code, "data_edited", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("kind", ["ids", "weighted", "packed", "learned"])
def test_an_edit_of_collate_is_one_of_all_rows(kind):
    """A weight of 0.5 that becomes 0, or that packed rows and conversations never see; targets of a
    second head that they lack."""
    ours = edited(
        ("= np.zeros((len(examples), length), np.float32)\n",
         "= np.zeros((len(examples), length), np.float32)\n"
         "    batch['targets2'] = np.zeros((len(examples), length), np.int32)\n"),
        ('batch["weights"][here] = part.weights\n', 'batch["weights"][here] = part.weights * 0.5\n'
         "            batch['targets2'][here] = part.targets + 1\n"))
    ids, marks = np.arange(10, 31), np.arange(21, dtype=np.float32) % 3
    examples = data.Windows(ids, 8, weights=marks if kind == "weighted" else None)
    if kind in ("packed", "learned"):
        examples = data.Packed(Documents(
            ids, np.array([0, 8]), 7, marks if kind == "learned" else None), 8)
    rows = [examples[i] for i in range(len(examples))]
    before, after = data.collate(rows, 8), ours.collate(rows, 8)
    assert before["weights"].any() and (after["weights"] == before["weights"] / 2).all()
    assert (after["targets2"] == np.where(before["targets"], before["targets"] + 1, 0)).all()
    assert after.keys() - before.keys() == {"targets2"}


@pytest.mark.parametrize("weight, says", [
    ("-1", "is -1"), ("NaN", "is nan"), ("Infinity", "is inf"), ("1e39", "is 1e+39"),
    ("9" * 400, "is 9999"), ('"2"', "is '2'"), ("true", "is True"), ("{}", "is {}"),
    ("[1, 1]", "is [1, 1]; expected a number of 0 or more, or a list of 3, one for each token"),
    ("[]", "is []"), ("[1, -2, 1]", "is [1, -2, 1]"), ("[1, true, 1]", "is [1, True, 1]"),
    ("[1, [1], 1]", "is [1, [1], 1]")])
def test_a_wrong_weight_ends_the_command_with_its_line(tmp_path, capsys, weight, says):
    """A weight that is learned as another one, or skipped unseen; a line that nobody finds."""
    lines = "".join(json.dumps(row) + "\n" for row in rows_of_text())
    lines += f'\n{{"text": "abc", "w": {weight}}}\n'
    out = tmp_path / "out"
    for pack in (lambda raw: raw, gzip.compress, bz2.compress):
        (tmp_path / "a.jsonl").write_bytes(pack(lines.encode()))
        error = refused(capsys, tmp_path / "a.jsonl", "--out", out, "--vocab_size", 0,
                        "--weight_field", "w", main=data.main)
        assert f"error: {tmp_path}/a.jsonl line 42: 'w' {says}" in error
        assert not any(out.iterdir()), "a refusal that stays"


def test_a_field_that_no_line_has_is_refused(tmp_path, capsys):
    """A misspelt field, without which every weight is 1; a flag that has no effect."""
    lines = json_lines(tmp_path / "a.jsonl", *rows_of_text())
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    made = prepared(lines, tmp_path / "made").folder
    assert "no field 'x', it has 'text', 'w'" in refused(
        capsys, lines, "--out", tmp_path / "o", "--weight_field", "x", main=data.main)
    assert "--weight_field w: no field 'w', it has nothing; it works on lines of JSON" in refused(
        capsys, tmp_path / "a.txt", "--out", tmp_path / "o", "--weight_field", "w", main=data.main)
    for name in "a.txt", made:
        assert "--weight_field w: has no effect on" in refused(
            capsys, "--batch", 8, "--data", tmp_path / name, "--weight_field", "w", "--out",
            tmp_path / "o")
    assert not (tmp_path / "o").exists()


WEIGHTS = np.random.default_rng(1).random(5000).astype(np.float16)


def test_weights_beside_token_files(tmp_path, capsys):
    """Weights that are read as tokens, or loaded whole; of another file, or of the tokens before;
    a run that goes on with others."""
    folder = token_shards(tmp_path / "shards")
    np.save(folder / "train_0.weights.npy", WEIGHTS[:2000])
    np.save(folder / "train_1.weights.npy", np.float32(WEIGHTS[2000:4500]))
    for paths in ([folder], [f"{folder}/*"]):
        files = TokenFiles([str(path) for path in paths], 300)
        assert np.array_equal(files.train[:], TOKENS[:4500])
        assert np.array_equal(files.weights["train"][:], np.float32(WEIGHTS[:4500]))
        assert (files.weights["held_out"][:] == 1).all() and "weights of 2 of 3 files" in str(files)
    assert all(isinstance(a.base.base, np.memmap) for a in files.weights["train"].arrays)
    part = data.rows_of(files, "train", 100, "stream")[20]      # (across the two files)
    assert part.targets.tolist() == TOKENS[2001:2101].tolist()
    assert part.weights.tolist() == np.float32(WEIGHTS[2001:2101]).tolist()
    whole = tmp_path / "x.npy"
    np.save(whole, TOKENS)
    plain = TokenFiles([whole], 300).fingerprint
    np.save(tmp_path / "x.weights.npy", WEIGHTS)
    files = TokenFiles([whole], 300)
    assert files.fingerprint != plain and np.array_equal(files.weights["held_out"][:],
                                                         np.float32(WEIGHTS[4500:]))
    wrong = WEIGHTS.copy()
    wrong[3] = -1
    for weights, says in (
            (WEIGHTS[1:], "4,999 weights for the 5,000 tokens of x.npy"),
            (WEIGHTS.astype(float), "float64[5000]; expected one dimension of float16 or float32"),
            (WEIGHTS[None], "float16[1, 5000]; expected one"), (wrong, "weight -1.0 at position 3"),
            (np.where(wrong < 0, np.nan, wrong), "weight nan at position 3")):
        np.save(tmp_path / "x.weights.npy", weights)
        assert f"x.weights.npy: {says}" in refused(
            capsys, *SMALL, "--batch", 8, "--data", whole, "--vocab_size", 300, "--out",
            tmp_path / "o")


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    """A file of lines, most with a fractional weight."""
    folder = tmp_path_factory.mktemp("weighted")
    return json_lines(folder / "a.jsonl", *rows_of_text(400))


def by_hand_loss(params, batch, config):
    """(sum of weight times nats, sum of weights, sum of weight times bytes) in float64."""
    logits = np.asarray(net.forward(params, batch["tokens"], config, **{
        name: batch[name] for name in ("segments", "positions") if name in batch}), np.float64)
    nats = np.log(np.exp(logits[..., :257]).sum(-1)) - np.take_along_axis(
        logits, batch["targets"][..., None], -1)[..., 0]
    w = batch["weights"].astype(np.float64)
    return (w * nats).sum(), w.sum(), (w * (batch["targets"] < 256)).sum()


@pytest.mark.parametrize("pack, mesh", [
    ("stream", ""), ("documents", "data=2,seq=2"), *(full(pack, mesh) for pack, mesh in (
        ("stream", "fsdp=2,tensor=2"), ("stream", "seq=2"), ("stream", "data=2,pipe=2"),
        ("documents", "pipe=2"), ("documents", "tensor=4"), ("documents", "fsdp=4")))])
def test_losses_are_weighted_means(weighted, tmp_path, pack, mesh):
    """A loss, or bits per byte, of whole tokens; a mean of the means of devices; `tokens` in the
    log cut to a whole number."""
    config = run_of(**{**TINY, "vocab_size": 257, "data": (str(weighted),), "weight_field": "w",
                       "pack": pack, "steps": 1, "eval_tokens": 256})
    with opened_sources(config.data, False, (), tmp_path / "run", weight_field="w") as sources:
        task = text_task.task_of(config, sources)
        (first, last), result = learn(config, mesh, **vars(task))
        chosen = numbers_at(task.examples, config.seed, np.arange(config.batch))
        learned = task.collate([task.examples[int(i)] for i in chosen])
        held_out = task.collate([*task.held_out])
    total, count, _ = by_hand_loss(net.init(config.network, jax.random.key(0)), learned, config)
    assert len({*learned["weights"].ravel()}) > 8
    assert first["loss"] == pytest.approx(total / count, rel=1e-5)
    assert first["tokens"] == pytest.approx(count, rel=1e-6)
    total, count, size = by_hand_loss(jax.device_get(result.params), held_out, config)
    assert last["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert last["bits_per_byte"] == pytest.approx(total / size / math.log(2), rel=1e-5)


def test_a_run_keeps_its_weights(weighted, tmp_path, text, capsys):
    """A run that goes on with other weights, of the same tokens too; a source of a mixture, or a
    held-out file, that is refused because it has none."""
    words = (*SMALL, "--batch", 8, "--steps", 1, "--weight_field", "w")
    run, made = tmp_path / "run", tmp_path / "made"
    go(*words, "--data", weighted, text, "--mix", 1, 1, "--held_out", text, "--out", run)
    assert "tokens have a weight above 0, by 'w'" in capsys.readouterr().out
    assert "weight_field 'w', not ''" in refused(
        capsys, "--weight_field", "", "--out", run, "--steps", 2)
    rows = [*rows_of_text(400)]
    for number in range(2):
        prepared(json_lines(tmp_path / "a.jsonl", *rows), made, options=WEIGHTED)
        if not number:
            go(*SMALL, "--batch", 8, "--steps", 1, "--data", made, "--out", tmp_path / "of")
            rows[0]["w"] = 0.75
            shutil.rmtree(made)
    assert "fingerprint" in refused(capsys, "--data", made, "--out", tmp_path / "of", "--steps", 2)
    (made / "train.weights").write_bytes(b"\1" + (made / "train.weights").read_bytes()[1:])
    assert "train.weights does not match data.json" in refused(
        capsys, "--batch", 8, "--data", made, "--out", tmp_path / "o")
    zero = json_lines(tmp_path / "zero.jsonl", *({**row, "w": 0} for row in rows))
    assert "all weights are 0" in refused(capsys, *words, "--data", zero, "--out", tmp_path / "o")
