"""From text to tokens to batches: nothing is lost, no change goes unseen, and the order of examples
is a function of (seed, step)."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import data
import sample
from tests.common import SMALL, WORDS, order, prepared, refused
from tests.helpers import ROOT
from zigzag.core.errors import ConfigError
from zigzag.core.files import sha256
from zigzag.disk import reading
from zigzag.disk.corpus import Corpus
from zigzag.disk.mixture import spread
from zigzag.disk.tokenizers import Bytes


def test_data_needs_no_jax():
    """A script that only prepares text, and imports jax: seconds, and devices that it occupies."""
    code = "import data, sys; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 1000, 4097])
def test_each_epoch_is_a_shuffle_without_repeats(count):
    """An example that is seen twice in an epoch, or never; an order that depends on the size of the
    request."""
    everything = order(count, 7, 0, 3 * count)
    epochs = everything.reshape(3, count)
    assert all(sorted(e) == list(range(count)) for e in epochs)
    pieces = [order(count, 7, a, 1)[0] for a in range(min(3 * count, 200))]
    assert pieces == everything[:len(pieces)].tolist()
    if count > 60:
        assert (epochs[0] != epochs[1]).any()
        assert (epochs[0] != order(count, 8, 0, count)).any()
        five_sigma = 5 / count**0.5
        assert abs(np.corrcoef(epochs[0], np.arange(count))[0, 1]) < five_sigma


def test_the_order_is_as_data_py_shows_it():
    """An example of the order that nobody would get."""
    line = re.search("#     example    (.*)", (ROOT / "data.py").read_text())[1]
    assert order(5, 0, 0, 10).tolist() == [int(n) for n in line.replace("|", "").split()]


def test_order_takes_no_memory():
    """A list of all examples, of which there may be 10**15."""
    assert (order(10**15, 0, 10**14, 4) < 10**15).all()


def test_data_that_was_changed_is_refused(tmp_path, text):
    """Silent training on tokens that were changed since they were made, or that have another type
    or tokenizer."""
    folder = tmp_path / "d"
    prepared(text, folder, 400)

    def says(file, change):
        was = (folder / file).read_bytes()
        (folder / file).write_bytes(change(was))
        with pytest.raises(ConfigError) as e:
            Corpus(folder)
        (folder / file).write_bytes(was)
        return str(e.value)

    def flip(raw):
        return raw[:500] + bytes([raw[500] ^ 1]) + raw[501:]

    assert "does not match data.json" in says("train.bin", flip)
    assert "does not match data.json" in says("held_out.bin", flip)
    for change in (lambda raw: raw[:-1], lambda raw: b""):
        assert "match data.json" in says("train.bin", change)
    assert "match data.json" in says("data.json", lambda raw: raw.replace(b"uint16", b"uint32"))
    assert "was edited or damaged" in says("tokenizer.model", flip)
    assert "format 2; this code reads and writes only format 1: make it" in says(
        "data.json", lambda raw: raw.replace(b'"format": 1', b'"format": 2'))
    for raw in (b"{", b"[]", b"null"):
        assert "not a folder made by data.py" in says("data.json", lambda _, raw=raw: raw)
    Corpus(folder)
    (folder / "train.bin").unlink()
    with pytest.raises(ConfigError, match="train.bin"):
        Corpus(folder)


def test_an_id_that_does_not_exist_is_refused_with_its_place(tmp_path, text, capsys):
    """An id that does not exist, for which a lookup silently takes another row."""
    folder, out = tmp_path / "d", tmp_path / "run"
    prepared(text, folder)
    tokens = np.memmap(folder / "train.bin", np.uint16, "r+")
    tokens[100:-100:40] = 300
    tokens.flush()
    record = json.loads((folder / "data.json").read_text())
    record["train"]["digest"] = sha256(folder / "train.bin")
    (folder / "data.json").write_text(json.dumps(record))
    error = refused(capsys, *SMALL, "--batch", 8, "--data", folder, "--out", out, "--steps", 5)
    assert re.search(r"train.bin: id 300 at position \d+; the vocabulary has 257", error)
    with pytest.raises(ConfigError, match="id -1 at position 3"):
        data.Windows(np.array([0, 1, 2, -1, 4]), 4)[0]


def test_any_text_is_learned_as_bytes(tmp_path):
    """As bytes: empty files, characters of four bytes, or one very long line, which are left out or
    crash; ids that wrap around in uint16."""
    folder = tmp_path / "t"
    folder.mkdir()
    words = " ".join(a + b for a in WORDS for b in WORDS)
    for name, text in dict(a="", b="é🙂\ufffd", c="x" * 300_000, d=words).items():
        (folder / name).write_text(text)
    corpus = prepared(folder, tmp_path / "bytes")
    assert len(corpus.train) + len(corpus.held_out) == 4 + 9 + 300_000 + len(words)
    assert len(prepared(folder, tmp_path / "pieces", 300).train) > 100
    for count, kind in ((2**16, "uint16"), (2**16 + 1, "uint32")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bytes, "vocab_size", count)
            patch.setattr(Bytes, "lengths", lambda self: np.ones(2**17))
            assert prepared(folder, tmp_path / kind).record["dtype"] == kind


def test_one_file_still_has_a_held_out_end(tmp_path):
    """Nothing held out, or everything, because the hash of a single name decides."""
    (tmp_path / "a.txt").write_text("abcdefghij" * 100)
    corpus = prepared(tmp_path / "a.txt", tmp_path / "d")
    assert len(corpus.held_out) == 100 and len(corpus.train) == 901


def test_without_library_sources_the_way_out_is_named(monkeypatch, tmp_path):
    """An empty default corpus, in a Python without its sources, and no advice."""
    monkeypatch.setattr(reading.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="--data"):
        reading.library_sources()


def test_windows_cover_everything_once():
    """A token that is never a target, or twice."""
    rows = data.Windows(np.arange(101), 10)
    assert len(rows) == 10 and [r[0] for r in rows] == list(range(0, 100, 10))
    assert all(len(r) == 11 for r in rows)
    assert len(spread(rows, 99)) == 10


def test_bad_data_is_one_line(capsys, tmp_path):
    """A traceback, or a folder left behind by a run that was refused."""
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "none").mkdir()
    (tmp_path / "file").touch()
    out = tmp_path / "out"
    assert "no text" in refused(capsys, "--data", tmp_path / "none", "--out", out)
    assert not out.exists()
    assert "--seq_len 128" in refused(capsys, "--data", tmp_path / "short.txt", "--out", out)
    assert not out.exists(), "what was prepared for a run that was refused is gone"
    assert "empty path" in refused(capsys, "--data", "", "--out", out)
    assert "Not a directory" in refused(capsys, "--out", tmp_path / "file")
    assert "no run" in refused(capsys, "--run", tmp_path / "none", main=sample.main)
    assert "no PATH" in refused(capsys, "--out", out, main=data.main)
    assert "at least 300" in refused(capsys, tmp_path / "short.txt", "--vocab_size", 50,
                                     main=data.main)


def test_messages_of_data_py_speak_of_its_own_words(tmp_path, capsys):
    """A message of data.py about --data, a flag that it does not have."""
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    prepared(tmp_path / "a.txt", tmp_path / "made")
    (tmp_path / "empty").write_text("")
    for path, says in (("made", "was made by data.py, so its text is already encoded; give it"),
                       ("empty", "no text in it; expected text files"), ("b.txt", "'a.txt'")):
        error = refused(capsys, tmp_path / path, "--out", tmp_path / "out", main=data.main)
        assert error.startswith(f"error: {tmp_path / path}") and says in error
    with pytest.raises(ConfigError, match="--data .*made was made by data.py, so .* as --data"):
        reading.find([str(tmp_path / "made"), str(tmp_path / "a.txt")])
