"""sample.py --choices: questions with several choices, and their accuracy."""

import json
import math

import numpy as np
import pytest

import sample
from tests.common import compiled_forward, far_apart, log_probabilities, refused, weights_on
from tests.generate.test_sample_command import FakeModel, sampled
from tests.helpers import config_of
from tools.choices import Item, read_items, split_ids
from zigzag.core.errors import ConfigError
from zigzag.disk.tokenizers import Bytes


def read(*records):
    return read_items((f"line {n}", json.dumps(record)) for n, record in enumerate(records, 1))


def test_the_fields_of_published_files_are_read():
    """A letter or a label that is read as another choice: ARC has the labels 1 to 4 in some lines,
    and HellaSwag an index from 0 as text."""
    ours = {"question": "q", "choices": ["a", "b", "c"], "answer": 1}
    arc = {"id": "x", "question": "q", "answerKey": "2",
           "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}}
    lettered = {**arc, "choices": {**arc["choices"], "label": ["A", "B", "C"]}, "answerKey": "B"}
    hellaswag = {"ind": 4, "ctx_a": "q", "ctx": "q", "endings": ["a", "b", "c"], "label": "1"}
    others = {"query": "q", "choices": ["a", "b", "c"], "gold": 1}
    assert read(ours, arc, lettered, hellaswag, others, {**ours, "answer": "b"}) == [
        Item("q", ("a", "b", "c"), 1)] * 6


@pytest.mark.parametrize("change", [
    dict(answer=-1), dict(answer=True), dict(answer="D"), dict(answer="9" * 5000),
    dict(choices={"text": ["a", "b"], "label": ["1", "2"]}, answer=0),
    dict(choices={"text": ["a", "b"], "label": ["1"]}, answer="1"), dict(choices=["a"]),
    dict(choices="ab"), dict(choices=["a", " "]), dict(question=" "),
    dict(choices=["a", "\ud83d"]), dict(question=1), dict(choices=None)], ids=str)
def test_a_wrong_line_is_named(change):
    """A traceback; a test set without answers, of which every first choice would be right."""
    ours = {"question": "q", "choices": ["a", "b", "c"], "answer": 0}
    with pytest.raises(ConfigError, match='^line 2: .* expected {"question": "...", "choices"'):
        read(ours, {**ours, **change})
    with pytest.raises(ConfigError, match='^line 1: .*and an answer that is an index'):
        read({"question": "q", "choices": ["a", "b"]})


def test_context_and_choice_are_encoded_as_one_text():
    """A choice without the tokens of the space before it; spaces at the end of a question that are
    context, so that the choice would begin in the middle of a token."""
    assert split_ids(Bytes(), "ab", " c") == ([256, *b"ab c"], 3)
    assert split_ids(Bytes(), "ab \n", " c") == ([256, *b"ab \n c"], 3)

    class Pairs(Bytes):         # two bytes are one token: its first byte, and 256 more
        def prompt(self, text):
            return list(text.encode()[::2])

    assert split_ids(Pairs(), "abc", " d") == ([*b"ac d"[:2], ord("d")], 2)
    assert split_ids(Pairs(), "ab", " ") == ([*b"a "], 1)
    assert split_ids(Pairs(), "abc", "d") == ([*b"ac"], 1)       # (a token of both is scored)


QUESTIONS = [{"question": "q", "choices": ["yes", "no"], "answer": 1},
             {"question": "q", "choices": ["aaaa", "b"], "answer": 0},
             {"question": "q", "choices": ["a", "b"], "answer": 0}]


def test_accuracy_by_the_sum_and_by_the_length(capsys, monkeypatch, tmp_path):
    """acc_norm that divides by tokens, or by the length with the space; the wrong count in the
    standard error; a flag that does not reach the scores; a score of another question."""
    FakeModel(monkeypatch, [])
    found = {"yes": -2.0, "no": -3.0, "aaaa": -7.0, "b": -2.0, "a": -1.0}

    def score(params, rows, config, batch, given):
        assert batch == 5 and all(row[:3] == [256, ord("q"), ord(" ")] for row in rows)
        return [(found[bytes(row[3:]).decode()], len(row) - n) for row, n in zip(rows, given)]

    monkeypatch.setattr(sample, "score", score)
    (tmp_path / "f").write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    flags = ["--choices", tmp_path / "f", "--batch", 5]
    first, second, third, total = map(json.loads, sampled(capsys, *flags, "--json").splitlines())
    assert first == {"question": "q", "answer": 1, "choice": 0, "choice_norm": 0,
                     "logprobs": [-2.0, -3.0]}
    assert second["choice"] == 1 and second["choice_norm"] == 0
    assert second["logprobs"] == [-7.0, -2.0] and third["logprobs"] == [-1.0, -2.0]
    assert total == {"questions": 3, "acc": 1 / 3, "acc_stderr": pytest.approx(1 / 3),
                     "acc_norm": 2 / 3, "acc_norm_stderr": pytest.approx(math.sqrt(2) / 3 / 2**.5)}
    assert sampled(capsys, *flags).splitlines() == [
        "3 questions           share  standard error",
        "acc                  0.3333          0.3333",
        "acc_norm             0.6667          0.3333"]


def test_what_choices_cannot_read_is_one_line(capsys, monkeypatch, tmp_path):
    """A traceback, or an encoder-decoder whose choices are scored without a source."""
    def says(*words):
        return refused(capsys, "--choices", tmp_path / "f", *words, main=sample.main)

    assert "--choices" in says() and "expected a file" in says()
    (tmp_path / "f").write_text(json.dumps(QUESTIONS[0]) + "\n[]\n")
    FakeModel(monkeypatch, [])
    assert "line 2: '[]'; expected {" in says()
    (tmp_path / "f").write_text(json.dumps(QUESTIONS[0]))
    FakeModel(monkeypatch, [], encoder_layers=1)
    assert "expected a decoder; this model has an encoder" in says()
    (tmp_path / "f").write_text("a text")
    assert "expected a decoder" in refused(capsys, "--score", tmp_path / "f", main=sample.main)


@pytest.mark.parametrize("mesh", ["", pytest.param("tensor=2", marks=pytest.mark.slow)])
def test_given_ids_are_context_and_are_not_scored(mesh):
    """A given id that is scored; a row longer than the context that loses the ids to score, or is
    read in two windows though one has room for them; a likeliest id that is not counted."""
    config = config_of(layers=1, seq_len=16, vocab_size=64)
    params = far_apart(config)
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 64, n).tolist() for n in (9, 16, 40, 40, 30, 1)]
    given = [4, 15, 36, 1, 8, 1]
    rows.append(rows[4][7:])

    def likeliest():
        ids = np.array([rows[0] + 7 * [0], rows[1]])
        return np.asarray(compiled_forward(config)(params, ids)).argmax(-1)

    best = likeliest()
    rows[0][6], rows[0][8], rows[1][15] = best[0, 5], 63 - best[0, 7], best[1, 14]
    on = weights_on(params, config, mesh)
    found = sample.score(on, rows, config, batch=32, given=[*given, 1], likeliest=True)
    assert [count for _, count, _ in found] == [5, 1, 4, 39, 22, 0, 22]
    logs = log_probabilities(params, config, [rows[0], rows[1], rows[2][-16:]])
    want = [logs[0][3:8].sum(), logs[1][14:].sum(), logs[2][-4:].sum()]
    assert [total for total, *_ in found[:3]] == pytest.approx(want, abs=1e-3)
    right = sum(likeliest()[0, 3:8] == rows[0][4:9])
    assert found[0][2] == right in (1, 2, 3, 4) and found[1][2] == 1
    # Too many to score for one window: given ids are left out first.
    assert found[4] == (pytest.approx(found[6][0], abs=1e-3), *found[6][1:])
    assert sample.score(on, rows, config, batch=32, given=[*given, 1]) == [
        (pytest.approx(total, abs=1e-3), count) for total, count, _ in found]
