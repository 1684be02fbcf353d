"""Published tokenizers and chat templates: the ids and texts that their models were trained on."""

import json
import sys

import numpy as np
import pytest

from tests.common import peer, prepared, rewrite
from tests.helpers import needed
from zigzag.core.errors import ConfigError
from zigzag.disk import tokenizers
from zigzag.disk.corpus import Corpus
from zigzag.disk.reading import find
from zigzag.disk.tokenizers import Bytes, is_tenth

chat = needed("tools.chat")

TEXTS = ("7 and 8 are 15\n", "  two  spaces\n\n\ttab", "naïve 日本語 🙂", "", " x")


def read(folder, rows=400):
    return tokenizers.published_tokenizer(folder, rows)


# -------------------------------------------------------------------------------------------
# tokenizer.json

@pytest.mark.parametrize("kind", ["bytes", "pieces", "tokenizer.json"])
def test_a_tokenizer_gives_the_text_back_and_ends_it(tmp_path, folder, text, kind):
    """Newlines, runs of spaces, tabs and other scripts that a normaliser changes; text that is
    truncated or padded as a tokenizer.json says, special tokens in decoded text, bits per byte with
    a wrong number of bytes; bytes that are not text; a target without an end."""
    rewrite(folder / "tokenizer.json", truncation={
        "max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"})
    if kind == "pieces":
        prepared(text, folder := tmp_path / "p", 400)
    is_json, tokenizer = kind == "tokenizer.json", Bytes() if kind == "bytes" else read(folder)
    for words in TEXTS:
        ids = tokenizer.encode(words)
        assert tokenizer.decode(ids) == words
        assert list(tokenizer.with_ends(words)) == [*ids, tokenizer.ends[0]]
        assert tokenizer.lengths()[ids].sum() == len(words.encode())
        if is_json:
            assert tokenizer.decode([tokenizer.separator, *ids, 5000, 1]) == words
    if kind != "bytes":
        assert tokenizer.vocab_size == (300 if is_json else 400)
        assert len(tokenizer.encode("7 and 8 are 15\n")) < 12, "it has learned pieces"
    if is_json:
        assert tokenizer.lengths()[[0, 1]].tolist() == [0, 0], "special tokens stand for no text"
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\udcff")


def test_pieces_of_a_tokenizer_json_are_counted_in_bytes(tmp_path):
    """A piece in sentencepiece's spelling: its mark is a space, <0x0A> is one byte."""
    package = peer("tokenizers")
    vocabulary = {"<s>": 0, "\u2581": 1, "\u2581né": 2, "<0x0A>": 3, "a": 4, "added": 5}
    made = package.Tokenizer(package.models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = package.decoders.Sequence([
        package.decoders.Replace("\u2581", " "), package.decoders.ByteFallback()])
    made.add_special_tokens(["<s>"])
    made.add_tokens(["added"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"bos_token_id": 0}')
    assert read(tmp_path).lengths().tolist() == [0, 1, 4, 1, 1, 5]


@pytest.mark.parametrize("files, want", [
    ({"tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}}, (0, (1, 0))),
    ({"tokenizer_config": {"bos_token": None, "eos_token": "</s>"}}, (1, (1,))),
    ({"special_tokens_map": {"bos_token": "<s>"}, "config": {"eos_token_id": [7, 8]}},
     (0, (7, 8, 0))),
    ({"generation_config": {"eos_token_id": [1, 9]},
      "config": {"bos_token_id": 5, "eos_token_id": 1}}, (5, (1, 9, 5))),
    ({"config": {"bos_token_id": 1000, "eos_token_id": None}}, (1, (1,))),
    ({}, (1, (1,)))])
def test_what_stands_between_documents(folder, files, want):
    """A separator that means something else to the model; a text that continues after its end. (If
    no file names one, it is </s>, if there is one.)"""
    for name in ("tokenizer_config", "special_tokens_map", "generation_config", "config"):
        (folder / f"{name}.json").write_text(json.dumps(files.get(name, {})))
    tokenizer = read(folder)
    assert (tokenizer.separator, tokenizer.ends) == want


def test_a_prompt_begins_as_the_model_expects(folder):
    """A <s> that the model has never seen, or a missing one that every text had. (Training text has
    only the separators that we insert.)"""
    tokenizer = read(folder)
    ids = tokenizer.encode("and").tolist()
    assert tokenizer.prompt("and") == ids and tokenizer.prompt("") == [0]
    rewrite(folder / "tokenizer.json", post_processor={
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}})
    tokenizer = read(folder)
    assert tokenizer.prompt("and") == [0, *ids] and tokenizer.prompt("") == [0]
    assert tokenizer.encode("and").tolist() == ids


def test_a_sentencepiece_model_of_a_published_folder(tmp_path, text):
    """A bos before a prompt although the folder says none, or none by default; an eos that does not
    end a text."""
    prepared(text, tmp_path, 400)
    own = read(tmp_path)
    assert own.kind == "sentencepiece" and (own.separator, own.ends) == (1, (1,))
    ids = own.encode("and").tolist()
    assert own.prompt("and") == [1, *ids]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>"}))
    theirs = read(tmp_path)
    assert theirs.prompt("and") == ids and (theirs.separator, theirs.ends) == (1, (2, 1))


def test_a_bad_tokenizer_is_one_line(folder, monkeypatch):
    """An id without a row in the embedding, which silently takes another one; a traceback for a
    Rust library's panic or for a missing package."""
    with pytest.raises(ConfigError, match="ids up to 299, but its embedding has only 299 rows"):
        read(folder, 299)
    with pytest.raises(ConfigError, match="nor|expected tokenizer.json or tokenizer.model"):
        read(folder.parent)
    for file, raw in (("tokenizer_config.json", "[]"), ("tokenizer_config.json", "{"),
                      ("tokenizer.json", "{}"), ("tokenizer.json", "\0")):
        was = (folder / file).read_text()
        (folder / file).write_text(raw)
        with pytest.raises(ConfigError, match=file):
            read(folder)
        (folder / file).write_text(was)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        read(folder)


def test_text_is_prepared_with_a_published_tokenizer(tmp_path, folder, text):
    """Tokens on disk that differ from the tokenizer's, or lack separators; a folder that cannot be
    opened without the one that the tokenizer came from."""
    corpus = prepared(text, tmp_path / "d", tokenizer=read(folder))
    for path in folder.iterdir():
        path.unlink()
    corpus = Corpus(tmp_path / "d")
    learned = [file for file in find([str(text)])[0] if not is_tenth(file.name)]
    ids = corpus.tokenizer.encode(open(learned[0].path).read())
    assert corpus.train[0] == corpus.tokenizer.separator == 0
    np.testing.assert_array_equal(corpus.train[1:1 + len(ids)], ids)
    split = corpus.record["train"]
    assert split["bytes"] == sum(file.size for file in learned)
    assert split["documents"] == (corpus.train == 0).sum()
    with open(tmp_path / "d/tokenizer.json", "a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match="not the tokenizer that encoded the text"):
        Corpus(tmp_path / "d")
