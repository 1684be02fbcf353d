"""Rows of documents, mixtures and conversations: every document once, every batch a function of the
seed and the step, and a document in a row is what it is alone."""

import json
import shlex

import jax
import numpy as np
import pytest

import data
import sample
from tests.common import SMALL, TOKENS, go, net, prepared, refused, token_shards
from tests.helpers import make
from zigzag.core.errors import ConfigError
from zigzag.disk import mixture, packing
from zigzag.disk.corpus import opened_sources
from zigzag.disk.token_files import TokenFiles


def documents(lengths, learned=None):
    """Documents whose tokens are 1000 times their number, plus 0, 1, 2 ..."""
    tokens = np.concatenate([1000 * i + np.arange(n) for i, n in enumerate(lengths)])
    return packing.Documents(tokens, np.cumsum(lengths) - lengths, 7, learned)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_token_is_once_in_a_row(monkeypatch, seed):
    """Documents that are lost at the border of a block, cut without need, or packed twice; targets
    from the next document."""
    monkeypatch.setattr(packing, "BLOCK", 16)
    lengths = np.random.default_rng(seed).integers(1, 60, 100)
    docs = documents(lengths)
    rows = packing.Packed(docs, 32, seed)
    seen = []
    for row in map(rows.__getitem__, range(len(rows))):
        assert sum(len(part.tokens) for part in row) <= 32
        for part in row:
            seen += part.tokens.tolist()
            document, last = divmod(int(part.tokens[-1]), 1000)
            end = last == lengths[document] - 1
            assert part.targets.tolist() == [*part.tokens[1:], 7 if end else part.tokens[-1] + 1]
            assert len(part.tokens) == 32 or part.tokens[0] % 1000 % 32 == 0
    assert sorted(seen) == sorted(docs.tokens.tolist())
    assert lengths.sum() / (32 * len(rows)) > 0.85
    again = packing.Packed(docs, 32, seed)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(rows[3], again[3], strict=True))


def test_rows_of_an_epoch_come_once_and_block_after_block(monkeypatch):
    """Rows that are seen twice in an epoch, or never; an order that depends on the request, or that
    packs a block for each row."""
    monkeypatch.setattr(packing, "BLOCK", 16)
    rows = packing.Packed(documents(np.random.default_rng(0).integers(1, 60, 100)), 32)
    n = len(rows)
    everything = rows.order_at(5, np.arange(3 * n))
    epochs = everything.reshape(3, n)
    assert all(sorted(e) == list(range(n)) for e in epochs) and (epochs[0] != epochs[1]).any()
    for places in ([0], [n - 1, n, 2 * n + 5], np.arange(40, 50)):
        assert rows.order_at(5, np.array(places)).tolist() == everything[places].tolist()
    blocks = np.searchsorted(rows.starts[1:], everything[:n], "right")
    assert (np.diff(blocks) >= 0).all()


def test_a_conversation_is_not_cut_in_the_middle():
    """The second half of a conversation, learned without the first."""
    docs = documents([10, 100, 30], np.ones(140, np.uint8))
    rows = packing.Packed(docs, 32, cut=False)
    found = sorted(part.tokens.tolist() for row in map(rows.__getitem__, range(len(rows)))
                   for part in row)
    assert [f[0] for f in found] == [0, 1000, 2000] and [len(f) for f in found] == [10, 32, 30]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (5, 0.01, 2)])
def test_a_mixture_has_its_shares_and_every_example_once(weights):
    """Shares that drift, or that hold only in the long run; a source whose examples are repeated
    before all have been seen; numbers that depend on the request."""
    sources = [[(i, j) for j in range(7 + 40 * i)] for i in range(len(weights))]
    mixed = mixture.Mixture(sources, weights)
    n = 5000
    numbers = mixed.order_at(3, np.arange(n))
    chosen = [mixed[int(i)] for i in numbers]
    shares = np.array(weights) / sum(weights)
    for source, share in enumerate(shares):
        own = [j for i, j in chosen if i == source]
        for thousand in range(5):
            count = sum(i == source for i, _ in chosen[thousand * 1000:(thousand + 1) * 1000])
            assert abs(count - 1000 * share) <= 1
        size = len(sources[source])
        assert sorted(set(own)) == list(range(size)) or len(own) < size
        # (Within a thousand the order is shuffled: an epoch may begin before the last has ended.)
        counts = np.bincount(own, minlength=size)
        assert counts.max() - counts.min() <= 1 + 1000 * share // size + 1
    assert mixed.order_at(3, np.arange(1234, 1240)).tolist() == numbers[1234:1240].tolist()
    assert len(mixed) == sum(map(len, sources)) and mixed[len(mixed) - 1] == sources[-1][-1]


def text_folder(path, documents_):
    path.mkdir()
    for i, text in enumerate(documents_):
        (path / f"{i:03}.txt").write_text(text)
    return path


@pytest.fixture
def two(tmp_path):
    """Two folders of texts."""
    return [text_folder(tmp_path / name, [f"{name} {i} and {i + 1}\n" * (1 + i % 9)
                                          for i in range(30)]) for name in "ab"]


def test_the_loss_of_a_packed_document_is_its_loss_alone(tmp_path):
    """Attention, or positions, that go on from one document into the next; sums that count the
    padding. (tests/parallel/test_attention.py compares meshes.)"""
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(3, 15, 60)]
    corpus = prepared(text_folder(tmp_path / "t", texts), tmp_path / "d")
    config = make(vocab_size=257, seq_len=32, batch=8).network
    examples = data.rows_of(corpus, "train", 32, "documents")
    rows = [examples[i] for i in range(8)]
    params = net.init(config, jax.random.key(0))
    loss = jax.jit(lambda batch: net.loss(params, batch, config))
    got, count = map(float, loss(data.collate(rows, 32)))
    total, targets = np.sum([loss({name: x[None] for name, x in part._asdict().items()})
                             for row in rows for part in row], 0, np.float64)
    assert count == targets and got == pytest.approx(total, rel=1e-5)


@pytest.mark.full
def test_documents_and_streams_are_trained(tmp_path, text, two, capsys):
    """The flags of a mixture on the command line: a run that continues with other rows, a loss that
    is not logged, a refusal without the numbers."""
    out = tmp_path / "run"
    words = [*SMALL, "--data", *two, "--mix", 3, 1, "--held_out", text, "--pack", "documents",
             "--batch", 4]
    for steps in (4, 8):
        go(*words, "--steps", steps, "--eval_every", 4, "--out", out,
           *(["--change", "decay"] if steps == 8 else []))
    assert f"evaluated on {out / 'held_out'}" in capsys.readouterr().out
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 9))
    split = tmp_path / "split"
    (tmp_path / "short.txt").write_text("bala 3")
    assert "the source short has only" in refused(
        capsys, *SMALL, "--data", two[0], tmp_path / "short.txt", "--mix", 3, 1, "--batch", 8,
        "--out", split)
    (tmp_path / "bad.jsonl").write_text('{"text": "abc"}\n{"txt": "no"}\n{broken\n')
    assert "below 4; 2 lines without text; the first is" in refused(
        capsys, *SMALL, "--data", tmp_path / "bad.jsonl", "--batch", 8, "--out", split)
    go(*SMALL, "--data", *two, "--mix", 3, 1, "--steps", 2, "--batch", 4, "--out", split)
    last = [json.loads(line) for line in open(split / "metrics.jsonl")][-1]
    assert {"eval_loss", "eval_loss_a", "eval_loss_b"} <= set(last)
    assert min(last["eval_loss_a"], last["eval_loss_b"]) <= last["eval_loss"] <= max(
        last["eval_loss_a"], last["eval_loss_b"])
    for more, says in ((["--mix", 1], "1 for 2 paths"), (["--mix", 1, 0], "above 0"),
                       (["--mix", "x", 1], "above 0"), (["--pack", "rows"], "stream or doc")):
        assert says in refused(capsys, "--data", *two, *more, "--out", tmp_path / "no")


@pytest.mark.parametrize("kind", ["uint16", "uint32", "llmc", "llama", "npy"])
def test_token_files_of_other_programs(tmp_path, kind):
    """A header that is learned as tokens; 32 bits read as 16."""
    path = tmp_path / ("x.npy" if kind == "npy" else "x.bin")
    if kind == "npy":
        np.save(path, TOKENS.astype(np.uint16))
    elif kind in ("llmc", "llama"):
        header = np.zeros(256, np.int32)
        header[:3] = (20240520, 1, 5000) if kind == "llmc" else (20240801, 7, 5000)
        path.write_bytes(header.tobytes() + TOKENS.astype(
            np.uint16 if kind == "llmc" else np.uint32).tobytes())
    else:
        TOKENS.astype(kind).tofile(path)
    files = TokenFiles([path], 300)
    assert np.array_equal(files.train[:], TOKENS[:4500])
    assert np.array_equal(files.held_out[:], TOKENS[4500:])
    assert np.array_equal(data.Windows(files.train, 100)[29], TOKENS[2900:3001])
    with pytest.raises(ConfigError, match="id 299 at position .*; the vocabulary has 299"):
        TokenFiles([path], 299)
    with pytest.raises(ConfigError, match=f"^{path}: id 29[0-9] at position [0-9]+"):
        [*data.Windows(files.train, 100, vocab_size=290)]


def test_token_files_are_read_by_pattern_or_one_by_one_as_their_folder(tmp_path, capsys):
    """A pattern in quotes, or several files, in which no text is found; other tokens than those of
    the folder; a validation file that is trained on, or a text beside them that is left out."""
    shards = token_shards(tmp_path / "shards")
    (shards / "readme.md").write_text("tokens")
    files = [str(file) for file in sorted(shards.glob("*.bin"))]

    def tokens_of(*paths, held_out=()):
        with opened_sources(paths, False, held_out, tmp_path / "run", vocab_size=300) as sources:
            corpus = sources.held_out or sources.corpora[0]
            return corpus.train[:].tolist(), corpus.held_out[:].tolist(), corpus.fingerprint

    whole = tokens_of(str(shards))
    assert whole[:2] == (TOKENS[:4500].tolist(), TOKENS[4500:].tolist())
    for paths in ([f"{shards}/*.bin"], [f"{shards}/*"], [f"{tmp_path}/sha*"], files,
                  [*files, f"{shards}/*.bin"]):
        assert tokens_of(*paths) == whole, paths
    assert tokens_of(files[0], held_out=[f"{shards}/val*"])[0] == TOKENS[4500:].tolist()
    (tmp_path / "a.txt").write_text("a text")
    for paths, says in (([tmp_path / "a.txt", *files[:2]],
                         f"has both text and token files ({files[0]}, {files[1]}); give only one"),
                        ([f"{shards}/*.bin", tmp_path / "a.txt"], f"({shards}/*.bin)"),
                        ([files[0], tmp_path / "none"], "no such file")):
        assert says in refused(capsys, "--steps", 1, "--data", *paths, "--vocab_size", 300,
                               "--out", tmp_path / "o")
    # (A pattern of texts reads them, as it does in a folder; what it skips is counted.)
    TOKENS.astype(np.uint16).tofile(tmp_path / "a.bin")
    with opened_sources([f"{tmp_path}/a.*"], False, (), tmp_path / "run") as sources:
        assert sources.record["tokenizer"] == "bytes" and sources.record["skipped"] == {".bin": 1}


def test_token_files_that_are_none_are_refused(tmp_path, capsys):
    """Half a token that shifts all others; a shard that was not downloaded to its end; a traceback;
    zeros between all tokens, which are learned."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 5000
    newer = header.tobytes().replace(b"\1\0\0\0", b"\2\0\0\0", 1)
    for name, raw in (("short", header.tobytes() + bytes(7000)), ("newer", newer + bytes(10000)),
                      ("odd", bytes(4001)), ("empty", b"")):
        (tmp_path / f"{name}.bin").write_bytes(raw)
    np.save(tmp_path / "none.npy", np.zeros(0, np.uint16))
    np.save(tmp_path / "one.npy", np.ones(1, np.uint16))
    np.save(tmp_path / "good.npy", TOKENS.astype(np.uint16))
    np.save(tmp_path / "below.npy", np.where(TOKENS == TOKENS[9], -1, TOKENS))
    TOKENS.astype(np.int64).tofile(tmp_path / "64.bin")
    ids = "--vocab_size", 300
    for name, words, says in (
            ("short.bin", ids, "8,024 bytes; its header says 5,000 tokens in llm.c's format, "
                               "version 1; expected 11,024 bytes in version 1"),
            ("newer.bin", ids, "version 2; expected 11,024 bytes in version 1"),
            ("odd.bin", ids, "4,001 bytes, which are not tokens in uint16"),
            ("empty.bin", ids, "empty.bin: 0 bytes"),
            ("none.npy", ids, "none.npy: no tokens in it"), ("64.bin", ids, "save 64-bit tokens"),
            ("below.npy", ids, "below.npy: id -1 at position 9"),
            ("good.npy", (), "give --vocab_size"),
            ("good.npy", (*ids, "--pack", "documents"), "--pack stream"),
            ("good.npy", (*ids, "--held_out", tmp_path / "one.npy"), "fewer than two")):
        assert says in refused(capsys, "--data", tmp_path / name, *words, "--out",
                               tmp_path / "out")
    for dtype in (np.uint16, np.uint32):
        (TOKENS % 16).astype(dtype).tofile(tmp_path / "small.bin")
        assert TokenFiles([tmp_path / "small.bin"], 300).train[:9].tolist() == (TOKENS % 16)[
            :9].tolist()


@pytest.mark.full
def test_token_files_are_trained_and_sampled_as_numbers(tmp_path, capsys):
    """A run without a tokenizer that cannot evaluate, or write; the command that it proposes."""
    TOKENS.astype(np.uint16).tofile(tmp_path / "x.bin")
    go(*SMALL, "--data", tmp_path / "x.bin", "--vocab_size", 300, "--steps", 2, "--out",
       tmp_path / "out")
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:3] == ["sample", "python", "sample.py"]
    sample.main([*words[3:], "--tokens", "4"])
    said = capsys.readouterr().out
    assert len(said.split()) == 6 and said.startswith("5 7")


def test_a_question_ends_where_its_answer_begins():
    """A question that begins in the middle of a conversation, or that has its answer in it; one of
    a conversation without an answer in its row."""
    def part(learned):
        ids = np.arange(100, 100 + len(learned) + 1)
        return packing.Part(ids[:-1], ids[1:], np.array(learned, np.float32))

    rows = [[part([0, 0, 0])], [part([0, 0]), part([0, 0, 0, 1, 1, 0, 1])], [part([1, 1])]]
    assert packing.question_in(rows, 9).tolist() == [100, 101, 102, 103]
    assert packing.question_in(rows, 3).tolist() == [101, 102, 103], "the end is nearest"
    assert packing.question_in(rows[2:], 9).tolist() == [100]
    assert packing.question_in(rows[:1], 9).tolist() == []


@pytest.mark.parametrize("pack, weights", [("documents", (3, 1)), ("stream", (3, 1)),
                                           ("documents", ())])
def test_a_batch_does_not_depend_on_the_processes(two, pack, weights):
    """Rows that two processes both have, or neither."""
    def batch(places):
        numbers = mixture.numbers_at(examples, 1, places)
        return data.collate([examples[int(i)] for i in numbers], 16)

    corpora = [prepared(folder, folder.with_suffix(".d")) for folder in two]
    examples = mixture.mixed([data.rows_of(c, "train", 16, pack)
                              for c in corpora[:len(weights) or 1]], weights)
    whole = batch(np.arange(40, 48))
    for count in (2, 4):
        parts = list(map(batch, np.split(np.arange(40, 48), count)))
        for name, x in whole.items():
            assert np.array_equal(np.concatenate([part[name] for part in parts]), x)
