"""Files to tokens: every kind of file gives the same documents, the number of processes changes
nothing, and what cannot be read is named."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import data
from tests.common import data_py, full, json_lines, prepared, refused
from tests.helpers import ROOT
from zigzag.core.errors import ConfigError, RunError
from zigzag.core.files import lock, run_has_begun
from zigzag.disk import corpus as corpus_file
from zigzag.disk import encoding, output, reading
from zigzag.disk.corpus import Corpus
from zigzag.disk.output import SPLITS

RANDOM = np.random.default_rng(0)
WORDS = " ".join("".join(map(chr, RANDOM.integers(97, 123, 3 + i % 8))) for i in range(500))
TEXTS = 4 * ["One document.\nTwo lines of it.\n", "Short", "naïve 日本語 🙂\n" * 40,
             "x = 1\n\n\n  y = 2\n"]


def texts_of(corpus):
    """All documents of a corpus of bytes. (The last one may be partly held out.)"""
    for split in SPLITS:
        tokens, starts = np.array(getattr(corpus, split)), corpus.documents(split).starts.tolist()
        assert starts[:1] == [0][:len(tokens)]
        goes_on = len(tokens) > 0 and tokens[0] != 256
        assert np.flatnonzero(tokens == 256).tolist() == starts[int(goes_on):]
    text = "".join(chr(i) if i < 256 else "\0" for i in [*corpus.train, *corpus.held_out])
    return [part.encode("latin-1").decode() for part in text.split("\0")[1:]]


def write(folder, kind, texts):
    """The texts as files of this kind."""
    folder.mkdir()
    rows = [{"text": text, "n": 1} for text in texts]
    lines = json_lines(folder.with_suffix(".jsonl"), *rows).read_bytes()
    if kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=3)
        return
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
            "zst": lambda raw: pytest.importorskip("zstandard").compress(raw)}.get(
                kind.rpartition(".")[2], bytes)
    for i, content in enumerate([lines] if kind.startswith("jsonl") else map(str.encode, texts)):
        (folder / f"{i:02}.{kind}").write_bytes(pack(content))


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz",
                                  "jsonl.zst", "parquet"])
def test_every_kind_of_file_gives_its_documents(tmp_path, kind):
    """Braces and names of fields that are learned; documents that are lost, cut or merged."""
    write(tmp_path / "in", kind, TEXTS)
    corpus = prepared(tmp_path / "in", tmp_path / "out")
    assert sorted(texts_of(corpus)) == sorted(TEXTS)
    assert corpus.record["skipped"] == {} and corpus.record["problems"] == {}
    assert sum(corpus.record[s]["bytes"] for s in SPLITS) == sum(
        len(text.encode()) for text in TEXTS)


def corpus_files(folder, count=30, size=2000):
    """Files of lines, of which some are larger than a piece."""
    rng, words = np.random.default_rng(1), WORDS.split()
    folder.mkdir()
    for i in range(count):
        text = "\n".join(" ".join(rng.choice(words, 8)) for _ in range(size * (1 + i % 3) // 50))
        (folder / f"{i}.txt").write_text(text + "\n")
    lines = [json.dumps({"text": " ".join(rng.choice(words, 30)), "w": i % 3 / 2})
             for i in range(size // 4)]
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 2500)     # each piece is synced to the disk


def all_files(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "data.json"}


def test_the_number_of_processes_changes_nothing(tmp_path, monkeypatch, small_pieces):
    """Results that are written in the order in which they come; documents that are cut where a
    piece ends; a worker with another tokenizer."""
    corpus_files(tmp_path / "in")
    made = prepared(tmp_path / "in", tmp_path / "out1", 400, cores=1)
    monkeypatch.setattr(encoding, "FEW", 0)
    prepared(tmp_path / "in", tmp_path / "out3", 400, cores=3)
    assert all_files(tmp_path / "out1") == all_files(tmp_path / "out3")
    monkeypatch.setattr(reading, "PIECE", 2**22)
    whole = prepared(tmp_path / "in", tmp_path / "whole", tokenizer=made.tokenizer)
    assert (np.array(whole.train) == np.array(made.train)).all()


@pytest.mark.parametrize("field", ["", full("w")])
def test_an_interrupted_encoding_goes_on(tmp_path, small_pieces, stopping, field):
    """Tokens, or their weights, that are lost or doubled around the place of an interruption; a
    half that looks complete, or that goes on with other settings."""
    def encode(out, size):
        prepared(tmp_path / "in", out, size, options=reading.Options(weight_field=field))

    corpus_files(tmp_path / "in")
    for size in (400, 500):
        encode(tmp_path / f"whole{size}", size)
    for stop, size in ((1, 400), (8, 400), (60, 400), (8, 500)):
        out = tmp_path / f"out{stop}{size}"
        with stopping(stop, OSError(28, "No space left on device")):
            with pytest.raises(RunError, match="No space left.*run the same command again"):
                encode(out, 400)
        with pytest.raises(ConfigError, match="not a folder made by data.py"):
            Corpus(out)
        with pytest.raises(ConfigError, match="an interrupted encoding"):
            with corpus_file.opened([str(out)], tmp_path / "run"):
                pass
        encode(out, size)
        assert Corpus(out).record == Corpus(tmp_path / f"whole{size}").record
        assert all_files(out) == all_files(tmp_path / f"whole{size}"), (stop, size)


def test_the_encoding_of_a_run_goes_on(tmp_path, small_pieces, stopping):
    """A run that was killed while it read an hour of text, and reads all of it again; the beginning
    of another text, which is kept."""
    corpus_files(tmp_path / "in")
    (tmp_path / "other.txt").write_text(WORDS)

    def encode(path, most=10**6):
        with stopping(most) as begun:
            with corpus_file.opened([str(tmp_path / path)], tmp_path / "run"):
                run_has_begun()
        return len(begun)

    assert encode("in", 5) == 6
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["data.part"]
    whole = len([piece for file in reading.find([str(tmp_path / "in")])[0]
                 for piece in reading.pieces(file, reading.Options())])
    assert encode("in") == whole - 5
    prepared(tmp_path / "in", tmp_path / "whole")
    assert all_files(tmp_path / "run" / "data") == all_files(tmp_path / "whole")
    encode("in", 5)
    assert encode("other.txt") == 1, "the beginning of another text"
    with contextlib.suppress(ConfigError):
        with corpus_file.opened([str(tmp_path / "in")], tmp_path / "refused"):
            raise ConfigError("too short")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("texts", [["a b\n" * 900, "c d\n" * 20],
                                   [f"{i}\n" * 50 for i in range(40)]])
def test_an_interruption_at_the_end_changes_nothing(tmp_path, monkeypatch, texts):
    """Final files that are made once more of what is final already."""
    write(tmp_path / "in", "txt", texts)
    prepared(tmp_path / "in", tmp_path / "whole")
    monkeypatch.setattr(output, "PART", 1000)

    def counted(*args):
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return real(*args)

    for where, name, stop in ((output, "mapped", 1), (output, "mapped", 3),
                              (output, "_copied", 1), (output, "_copied", 2),
                              (corpus_file, "copy_files", 1), (corpus_file, "write_json", 1)):
        out, real, calls = tmp_path / f"{name}{stop}", getattr(where, name), []
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(where, name, counted)
            prepared(tmp_path / "in", out)
        assert not (out / "data.json").exists()
        prepared(tmp_path / "in", out)
        assert all_files(out) == all_files(tmp_path / "whole"), (name, stop)


def test_a_file_that_breaks_off_is_named(tmp_path):
    """Half a corpus, and no word about it; half a text that is learned as a whole one."""
    package = pytest.importorskip("zstandard")
    raw = json_lines(tmp_path / "a.jsonl", *(
        {"text": f"text {i} " + WORDS[i:i + 90]} for i in range(3000))).read_bytes()
    lines = raw.decode()
    for name, pack in (("a.jsonl.zst", package.compress), ("a.jsonl.gz", gzip.compress),
                       ("a.json.gz", gzip.compress), ("a.jsonl.xz", lzma.compress)):
        packed = pack(raw)
        for cut in (1, len(packed) // 2):
            (tmp_path / name).write_bytes(packed[:-cut])
            out = tmp_path / f"{name}{cut}"
            corpus = prepared(tmp_path / name, out)
            (kind, (_, first)), = corpus.record["problems"].items()
            assert kind == "cut short or damaged" and "the text before line" in first
            found = texts_of(corpus)
            assert found[0].startswith("text 0 ") and all(text in lines for text in found)
        (tmp_path / name).write_bytes(packed)
        assert len(texts_of(prepared(tmp_path / name, tmp_path / name[2:]))) == 3000


@pytest.mark.parametrize("pieces", [False, True])
def test_what_is_skipped_is_counted_and_named(tmp_path, capsys, pieces):
    """A corpus of which two thirds are missing without a word; one bad document that stops all
    others; Latin-1 that is learned as raw bytes, or of which a tokenizer makes pieces."""
    folder, words = tmp_path / "in", ["--vocab_size", 300 * pieces]
    folder.mkdir()
    (folder / "good.txt").write_text(WORDS)
    (folder / "latin.txt").write_bytes("café\n".encode("latin-1") * 9)
    (folder / "long.txt").write_bytes(b"text\n" * 2**18 + b"\xff")
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / "noname").write_bytes(b"\0" * 9)
    (folder / "lines.jsonl").write_bytes(
        b'{"text": "one"}\nnot json\n{"other": 1}\n{"text": "\xff"}\n{"text": "two"}\n')
    whole = gzip.compress(b"a line of text\n" * 9000)
    (folder / "short.txt.gz").write_bytes(whole[:len(whole) // 2])
    data_py(folder, "--out", tmp_path / "out", *words)
    said = capsys.readouterr().out
    assert "read     5 files; skipped 3: 2 .png, 1 without a suffix" in said
    hint = r"not UTF-8 \(b'caf\\xe9'; iconv converts it\)"
    assert re.search(rf"skipped  2 not UTF-8; the first is .*latin.txt: {hint}", said)
    assert re.search(r"skipped  3 lines without text; the first is .*l line 2: not JSON", said)
    assert re.search(r"skipped  1 cut short or damaged; the first is .*short.txt.gz", said)
    corpus = Corpus(tmp_path / "out")
    assert corpus.record["documents"] == 3, "good, one, two"
    assert corpus.tokenizer.decode([*corpus.train, *corpus.held_out]).count("t") == (
        WORDS + "two").count("t")
    shown = corpus_file.Sources([corpus], [""]).described(9)
    assert "skipped 3: 2 .png" in shown and "skipped 2 not UTF-8; the first is" in shown
    for more, says in ((["--strict"], "strict"), (["--field", "body"], "no field 'body'")):
        assert says in refused(capsys, folder, "--out", tmp_path / "other", *words, *more,
                               main=data.main)
    assert "no readable text" in (error := refused(
        capsys, folder / "latin.txt", "--out", tmp_path / "p", *words, main=data.main))
    assert "no readable text" in error and "latin.txt: not UTF-8" in error
    data_py(folder / "good.txt", "--out", tmp_path / "p", "--vocab_size", 0)


def test_each_file_is_read_once_and_through_links(tmp_path):
    """Text on another disk, left out without a word; documents that are both learned and held out,
    because two paths lead to them; a link to a folder above, followed for ever."""
    folder, disk, names = tmp_path / "in", tmp_path / "disk", {f"{i:02}.txt" for i in range(8)}
    write(disk, "txt", TEXTS[:8])
    write(folder, "txt", TEXTS[:8])
    (folder / "part").symlink_to(disk)
    (disk / "above").symlink_to(folder)
    everything = {str(path / name) for path in (folder, disk) for name in names}
    for words in ([folder], [folder, disk, folder / "00.txt"], [folder / "*"], [folder / "**"],
                  [folder / "0[0-3].txt", disk, folder], [tmp_path / "*" / "*.txt"]):
        found = reading.find([str(word) for word in words])[0]
        assert sorted(os.path.realpath(file.path) for file in found) == sorted(everything), words
    assert reading.find([str(folder)])[0][-1].name == "part/07.txt"
    with pytest.raises(ConfigError, match="too long"):
        reading.find(["x" * 300])


@pytest.mark.parametrize("name, begin", [
    ("a.jsonl", b"\xef\xbb\xbf"), ("a.JSONL", b"// a header\n"), ("a.jsonlines", b'{"about": 1}\n'),
    ("a.jl", b"\n[1]\n")])
@pytest.mark.parametrize("form", ["text", "completion"])
def test_a_first_line_does_not_decide(tmp_path, name, begin, form):
    """A whole file refused, or learned as JSON, for a byte order mark or a header."""
    rows = [{"text": f"The text {i}"} if form == "text" else
            {"prompt": f"{i} and", "completion": " so on"} for i in range(20)]
    (tmp_path / name).write_bytes(begin + json_lines(tmp_path / "rows", *rows).read_bytes())
    corpus = prepared(tmp_path / name, tmp_path / "out")
    assert corpus.record["documents"] == 20
    (tmp_path / name).write_bytes(begin + json.dumps(rows[0]).encode())
    assert reading.examined(reading.find([str(tmp_path / name)])[0], reading.Options(),
                            "").form == form
    assert sum(n for n, _ in corpus.record["problems"].values()) == (begin.strip()[:1] in b"/{[")
    if form == "text":
        assert sorted(texts_of(corpus)) == sorted(row["text"] for row in rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_without_the_field_stops_no_other(tmp_path, kind):
    """Hours of work that end at one file of a thousand."""
    write(tmp_path / "in", kind, TEXTS)
    if kind == "jsonl":
        (tmp_path / "in/0.jsonl").write_text('{"id": 1}\n' * 3)
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "in/0.parquet")
        pq.write_table(pa.table({"text": [1, 2, 3]}), tmp_path / "in/c.parquet")
    corpus = prepared(tmp_path / "in", tmp_path / "out")
    assert sorted(texts_of(corpus)) == sorted(TEXTS)
    found = {kind: n for kind, (n, _) in corpus.record["problems"].items()}
    assert found == ({"lines without text": 3} if kind == "jsonl" else
                     {"without the column 'text'": 1, "rows without text": 3})
    with pytest.raises(ConfigError, match="it has 'id'"):
        prepared(tmp_path / f"in/0.{kind}", tmp_path / "none", 300)
    assert not (tmp_path / "none/data.json").exists()


def test_an_array_of_examples_is_not_learned_as_text(tmp_path):
    """Braces and names of fields that are learned, because they are in one array."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=1))
    with pytest.raises(ConfigError, match=r"skipped 1 \.json with an array .*jq -c"):
        prepared(tmp_path, tmp_path / "none")
    for text in ('{"text": "one"}', "{", '{"a":\n{}}'):
        (tmp_path / "c.json").write_text(text)
        assert [file.kind for file in reading.find([str(tmp_path)])[0]] == ["text"]


def test_long_windows_and_frames_to_skip(tmp_path):
    """The large public files (zstd --long), left out as damaged; those of pzstd, as no text."""
    package = pytest.importorskip("zstandard")
    pack = package.ZstdCompressor(compression_params=package.ZstdCompressionParameters(
        window_log=28)).compressobj()
    frame = pack.compress(WORDS.encode()) + pack.flush()
    for begin in (b"", b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"):
        (tmp_path / "a.txt.zst").write_bytes(begin + frame)
        corpus = prepared(tmp_path / "a.txt.zst", tmp_path / f"out{len(begin)}")
        assert not corpus.record["problems"] and corpus.record["documents"] == 1
        assert sum(corpus.record[split]["bytes"] for split in SPLITS) == len(WORDS)


def test_what_cannot_be_decoded_takes_nothing_else_with_it(tmp_path, small_pieces):
    """The document before a file in another encoding, left out in its place; a file that is not
    counted; all lines of a file, for a byte in one."""
    for name, content in (("a", "first\n" * 99), ("b", "@"), ("c", "x " * 999 + "@"),
                          ("d", "last")):
        for kind in ("txt", "jsonl"):
            (tmp_path / kind).mkdir(exist_ok=True)
            text = content if kind == "txt" else 2 * (json.dumps({"text": content}) + "\n")
            (tmp_path / kind / f"{name}.{kind}").write_bytes(
                text.replace("@", "\xff").encode("latin-1"))
    (tmp_path / "jsonl" / "e.jsonl").write_bytes(b'{"text": "\xff"}\n{"text": "e"}\n')
    for kind, problems in (("txt", {"not UTF-8": 2}), ("jsonl", {"lines without text": 5})):
        corpus = prepared(tmp_path / kind, tmp_path / f"{kind}.out")
        assert sorted(texts_of(corpus)) == sorted(
            ["first\n" * 99, "last"] * (1 + (kind == "jsonl")) + ["e"] * (kind == "jsonl"))
        assert {k: n for k, (n, _) in corpus.record["problems"].items()} == problems


def test_another_tokenizer_or_text_is_not_gone_on_with(tmp_path, monkeypatch, text, small_pieces,
                                                       stopping):
    """A corpus of two chat templates, or of two texts from the standard input; two processes in one
    folder; a folder inside the text's own, which is then read as text."""
    tokens = prepared(text, tmp_path / "t", 300).folder
    corpus_files(tmp_path / "in")

    def encode(out, path=tmp_path / "in", most=10**6):
        """How many pieces were encoded."""
        with stopping(most) as begun:
            prepared(path, out, tokenizer=data.tokenizer_at(tokens))
        return len(begun)

    whole = encode(tmp_path / "whole")
    for changes in (False, True):
        out = tmp_path / f"out{changes}"
        encode(out, most=3)
        if changes:
            (tokens / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
        assert encode(out) == whole - 3 * (not changes)
    for content, most in ((b"OLD\n" * 5000, 3), (b"NEW\n" * 5000, 10**6)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        encode(tmp_path / "stdin", "-", most)
    made = Corpus(tmp_path / "stdin")
    assert "OLD" not in made.tokenizer.decode([*made.train, *made.held_out])
    assert not (tmp_path / "stdin/stdin").exists()
    with pytest.raises(ConfigError, match="only data.py reads standard input"):
        with corpus_file.opened(["-"], tmp_path / "no"):
            pass
    for most in (3, 10**6):
        encode(tmp_path / "in/out", most=most)
    record = Corpus(tmp_path / "in/out").record
    assert record["files"] == 31 and not record["skipped"]
    encode(tmp_path / "locked", most=3)
    with open(tmp_path / "locked/unfinished/lock") as held:
        lock(held)
        with pytest.raises(ConfigError, match="another process encodes into this folder"):
            encode(tmp_path / "locked")


@pytest.mark.parametrize("packing", ["", "gz"])
def test_a_line_without_an_end_takes_no_memory(tmp_path, monkeypatch, packing, small_pieces):
    """A line of a gigabyte that is held in memory, or learned in part; half characters where such a
    line of text is cut."""
    monkeypatch.setattr(reading, "MOST", 3000)
    pack = gzip.compress if packing else bytes
    line = json.dumps({"text": "y" * 20_000})
    lines = f'{{"text": "one"}}\n{line}\n{{"text": "two"}}\n'
    path, other = (tmp_path / f"{name}.{packing}".rstrip(".") for name in ("a.jsonl", "b.txt"))
    path.write_bytes(pack(lines.encode()))
    corpus = prepared(path, tmp_path / "o")
    assert "".join(texts_of(corpus)) == "onetwo"
    (kind, (_, first)), = corpus.record["problems"].items()
    assert kind == "lines without text" and "line 2: not JSON" in first
    text = "日本語🙂é" * 4000
    other.write_bytes(pack(text.encode()))
    file, = reading.find([str(other)])[0]
    assert max(len(piece.content) for piece in reading.pieces(file, reading.Options())) < 5000
    (tmp_path / "c.txt").write_text(text[:100] + WORDS)
    pieces = prepared(tmp_path / "c.txt", tmp_path / "pieces", 300).tokenizer
    corpus = prepared(other, tmp_path / "p", tokenizer=pieces)
    assert corpus.record["problems"] == {}
    assert corpus.tokenizer.decode(np.concatenate([corpus.train, corpus.held_out])) == text


def test_patterns_and_the_standard_input(tmp_path, monkeypatch):
    """An empty pattern that trains on nothing; a pipe that is no file."""
    with pytest.raises(ConfigError, match="no file matches"):
        reading.find([str(tmp_path / "*.csv")])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(
        b'{"text": "from a pipe"}\n{"text": "and more"}\n')))
    corpus = prepared("-", tmp_path / "o")
    assert "".join(texts_of(corpus)) == "from a pipeand more"


def test_the_lines_of_a_text_are_encoded_as_the_text(tmp_path):
    """A tokenizer that is given lines because that is faster, and makes other ids of them; one that
    adds something to each text, and is given lines nevertheless."""
    import sentencepiece
    text = "A line.\n\n  two spaces\ttab \nx  \n\n\n" * 60
    (tmp_path / "a.txt").write_text(text)
    made = prepared(tmp_path / "a.txt", tmp_path / "o", 300).tokenizer
    assert made._ends_at_lines
    for each in (text, "", "b\n", "\n"):
        assert made.encode(each).tolist() == made.model.encode(each)
    for name, more in {"llama": dict(normalization_rule_name="identity", byte_fallback=True,
                                     remove_extra_whitespaces=False), "t5": {}}.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.split("\n")), model_prefix=str(tmp_path / name),
            vocab_size=300 if more else 30, hard_vocab_limit=False, minloglevel=2, **more)
        usual = data.tokenizer_at(str(tmp_path / f"{name}.model"))
        assert usual._ends_at_lines == (name == "t5"), name
        assert usual.encode(text).tolist() == usual.model.encode(text)


@pytest.mark.full
def test_a_killed_encoding_leaves_no_process_and_goes_on(tmp_path):
    """Workers that outlive a command that was killed; a folder that no command can finish."""
    corpus_files(tmp_path / "in", 10, 20_000)
    words = [sys.executable, "-c", "import sys; from zigzag.disk import encoding, output, reading\n"
             "reading.PIECE, encoding.FEW, output.SAVE_SECONDS = 2000, 0, 0.0\n"
             "import data; data.run_main(data.main)", str(tmp_path / "in"), "--vocab_size", "400",
             "--cores", "2", "--out"]
    command = subprocess.Popen([*words, str(tmp_path / "o")], cwd=ROOT, stdout=subprocess.PIPE)
    until = time.monotonic() + 60
    progress = tmp_path / "o" / "unfinished" / "progress.json"
    while not progress.exists() or json.loads(progress.read_text())["pieces"] < 20:
        assert time.monotonic() < until and command.poll() is None
        time.sleep(0.01)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    for out in ("o", "whole"):
        done = subprocess.run([*words, str(tmp_path / out)], cwd=ROOT, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr
    assert all_files(tmp_path / "o") == all_files(tmp_path / "whole")


