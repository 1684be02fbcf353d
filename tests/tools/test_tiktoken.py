"""Vocabularies of the package tiktoken, built by hand: nothing is downloaded."""

import base64
import json

import numpy as np
import pytest

from tools.tiktoken import LLAMA_3, PUBLISHED, QWEN, Tiktoken, save
from zigzag.core.errors import ConfigError

tiktoken = pytest.importorskip("tiktoken", reason="pip install tiktoken")
TEXTS = ("the cat sat", "", "\n\n  the\tcat's 12345", "naïve café ☃🙂 日本語", "a<|endoftext|>b")


def ranks_of(count):
    """So many tokens: the 256 bytes, pieces of English, then filling."""
    ranks = {bytes([i]): i for i in range(256)}
    for piece in (b"th", b"the", b" t", b" th", b" the", b"at", b"cat", b" c", b" cat",
                  "é".encode(), "☃".encode()[:2]):
        ranks[piece] = len(ranks)
    return ranks | {b"\xff" + rank.to_bytes(3, "big"): rank for rank in range(len(ranks), count)}


def write_ranks(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank
                              for token, rank in ranks.items()))
    return path


@pytest.fixture
def encoding():
    return tiktoken.Encoding("tiny", pat_str=PUBLISHED[151_643][0], mergeable_ranks=ranks_of(267),
                             special_tokens={"<|endoftext|>": 270, "<|im_end|>": 268})


def test_a_saved_vocabulary_encodes_as_tiktoken_does(encoding, tmp_path):
    """A rank that moves; a special token that is spelled out in pieces, or printed; the length of
    another id, or of a gap."""
    t = Tiktoken(save(encoding, tmp_path))
    assert (t.vocab_size, t.separator, t.ends) == (271, 270, (270, 268))
    for text in TEXTS:
        ids = encoding.encode(text, allowed_special="all")
        assert t.encode(text).tolist() == ids
        assert t.prompt(text) == (ids or [270]) and t.with_ends(text) == [*ids, 270]
        assert t.decode([*ids, 269, 300]) == text.replace("<|endoftext|>", "")
        assert t.lengths()[ids].sum() == len(text.replace("<|endoftext|>", "").encode())
    assert t.lengths()[[256, 257, 267, 268, 269, 270]].tolist() == [2, 3, 0, 0, 0, 0]
    assert t.encode("").dtype == np.int64
    blank = "a" + 1_000_000 * " " + "b"
    assert t.decode(t.encode(blank)) == blank, "the pattern's backtracking overflows"
    with pytest.raises(UnicodeEncodeError):
        t.encode("half \ud83d")


@pytest.mark.parametrize("name, count, special, begins, ends", [
    ("qwen.tiktoken", 151_643, QWEN, [], ["<|endoftext|>", "<|im_end|>"]),
    ("tokenizer.model", 128_000, LLAMA_3, ["<|begin_of_text|>"],
     ["<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>"])])
def test_published_ranks_have_their_pattern_and_special_tokens(name, count, special, begins, ends,
                                                               tmp_path):
    """Digits that are split as the other family's; an end of a conversation that does not end."""
    t = Tiktoken(write_ranks(tmp_path / name, ranks_of(count)))
    ids = {text: count + i for i, text in enumerate(special)}
    assert t.vocab_size == {128_000: 128_256, 151_643: 151_851}[count] == count + len(special)
    assert t.prompt("the") == [*(ids[b] for b in begins), 257]
    assert t.ends == tuple(ids[end] for end in ends) and t.encode(ends[0]).tolist() == [t.ends[0]]
    assert t.model._pat_str.count(r"\p{N}{1,3}") == (count == 128_000)
    assert Tiktoken(save(t.model, tmp_path)).encode("the cat\n12345<|im_end|>").tolist() == (
        t.encode("the cat\n12345<|im_end|>").tolist())


def test_other_files_are_one_line(encoding, tmp_path):
    """A traceback; a vocabulary that is read with another one's pattern."""
    def says(path):
        with pytest.raises(ConfigError) as e:
            Tiktoken(path)
        return str(e.value)

    assert "has 300 ranks, but not the pattern" in says(
        write_ranks(tmp_path / "x.tiktoken", ranks_of(300)))
    (tmp_path / "y.tiktoken").write_bytes(b"YQ== 0\n\n\x00\x01 spm 3\n")
    assert "y.tiktoken line 3:" in says(tmp_path / "y.tiktoken")
    (tmp_path / "w.tiktoken").write_bytes(b"YQ== 0\nY*g== 1\n")
    assert "w.tiktoken line 2:" in says(tmp_path / "w.tiktoken")
    record = json.loads(save(encoding, tmp_path).read_text())
    for change, what in (({"ranks": 3}, "is damaged"), ({"pattern": "("}, "not a vocabulary"),
                         ({"special_tokens": {}}, "no special token to separate documents")):
        (tmp_path / "z.json").write_text(json.dumps(record | change))
        assert what in says(tmp_path / "z.json")
