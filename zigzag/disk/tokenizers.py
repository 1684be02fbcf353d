"""Tokenizers: text to ids, and back.

    bytes           Bytes           the 256 bytes
    sentencepiece   Pieces          tokenizer.model: trained by data.py, or published
    spiece.model    PiecesT5        a published T5's: sentencepiece, plus 100 ids for gaps
    tokenizer.json  TokenizerJson   a published model's, read by the tokenizers package
    tiktoken        Tiktoken        token ranks, read by the tiktoken package (tools/)
    ids             Ids             no tokenizer: the ids of token files, as numbers

Each has

    encode, decode      a text to ids, and back (without special tokens; `spelled`: with them)
    with_places         a text's ids, with each id's first character and end (only if the
                        tokenizer has a folder, which may have a chat template)
    prompt              the ids that the model expects first, then a text's ids
    with_ends           a text's ids, plus the ids its tokenizer adds (at least an end)
    separator           the id before each document
    ends                the ids that end a text, most common first
    bytes_of            the bytes of text for an id (a special id: none); lengths: the number of
                        bytes for each id

This file needs no jax.
"""

import functools
import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import Callable, Iterator, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, one_line, optional_package
from zigzag.core.files import as_json, digest, read_json, sha256, write_whole
from zigzag.core.options import only
from zigzag.core.parts import part
from zigzag.disk.lines import Record

# Files next to a published tokenizer's file, copied along with it.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
          "chat_template.jinja")


class Tokenizer:
    """The methods that tokenizers share. Subclasses override what differs."""
    path: Path | None = None        # the tokenizer's file, if it has one
    folder: Path | None = None      # that file's folder, with the files named in BESIDE
    begins: Sequence[int] = ()      # the ids that the model expects first

    def prompt(self, text: str) -> list[int]:
        return [*self.begins, *self.encode(text).tolist()] or [self.separator]

    def with_ends(self, text: str) -> list[int]:
        return [*self.encode(text).tolist(), self.ends[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.bytes_of(int(i)) for i in ids).decode(errors="replace")

    def spelled(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def lengths(self) -> np.ndarray:
        return np.array([len(self.bytes_of(i)) for i in range(self.vocab_size)])

    def content(self) -> bytes:
        """Return what `file` contains, in a folder that gets a copy."""
        return self.path.read_bytes()


class Bytes(Tokenizer):
    """The 256 bytes, plus a separator."""
    kind, file, vocab_size, separator, ends, begins = "bytes", "", 257, 256, (256,), (256,)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def bytes_of(self, i: int) -> bytes:
        return bytes([i]) if i < 256 else b""


class Ids(Tokenizer):
    """No tokenizer: the text is just the ids, written as numbers."""
    kind, file, separator, ends = "ids", "", 0, ()

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        ids = [int(word) if word.isdecimal() else -1 for word in words]
        if not all(0 <= i < self.vocab_size for i in ids):
            raise ConfigError(f"{' '.join(words)[:40]!r}: this run has no tokenizer; expected ids "
                              f"below {self.vocab_size}, such as 12 5 7")
        return np.array(ids, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def bytes_of(self, i: int) -> bytes:
        return b""


class Pieces(Tokenizer):
    """A sentencepiece model: byte-pair subwords, with bytes for any text without a subword."""
    kind, file = "sentencepiece", "tokenizer.model"

    def __init__(self, path: Path):
        import sentencepiece
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError):
            raise ConfigError(f"{path} is not a sentencepiece model") from None
        self.path, self.folder, self.vocab_size = path, path.parent, self.model.vocab_size()
        self.separator, self.ends = _special_ids(self.folder, self.vocab_size, self._id,
                                                 self.model.bos_id())
        config = read_record(self.folder / "tokenizer_config.json")
        begins = config.get("add_bos_token", self.model.bos_id() >= 0)
        self.begins = [self.separator] * bool(begins)

    def _id(self, piece):
        i = self.model.piece_to_id(piece)
        return i if self.model.id_to_piece(i) == piece else None

    def encode(self, text: str) -> np.ndarray:
        # sentencepiece takes much longer on a long text than on its lines. StringIO splits only at
        # \n, and is faster than a loop.
        parts = [checked(text)]
        if self._ends_at_lines:
            parts = io.StringIO(text, newline="\n").readlines()
        ids = self.model.encode(parts, num_threads=1)
        return np.fromiter(itertools.chain.from_iterable(ids), np.int64)

    def with_places(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found, at = [], 0
        for words in self.between.split(checked(text)):
            if words in self.special:
                found.append((self.special[words], at, at + len(words)))
            elif words:
                for piece in self.model.encode(words, out_type="immutable_proto").pieces:
                    # sentencepiece gives a position only to the last byte of a character.
                    is_inner = piece.begin == piece.end and self.model.is_byte(piece.id)
                    found.append((piece.id, at + piece.begin, at + piece.end + is_inner))
            at += len(words)
        return tuple(np.array(found, np.int64).reshape(-1, 3).T)

    @functools.cached_property
    def special(self) -> dict[str, int]:
        """{a control subword that a chat template may write, such as </s>: its id}"""
        return {self.model.id_to_piece(i): i for i in range(self.model.vocab_size())
                if self.model.is_control(i)}

    @functools.cached_property
    def between(self) -> re.Pattern:
        """A pattern that splits a text at its special subwords and keeps them."""
        names = "|".join(map(re.escape, self.special))
        return re.compile(f"({names})" if names else "(?!)")

    @functools.cached_property
    def _ends_at_lines(self):
        """Whether a text's ids are its lines' ids, concatenated. This holds if no subword extends
        past a line's end, and the model adds nothing to a text and removes nothing."""
        m = self.model
        if any("\n" in m.id_to_piece(i)[:-1] for i in range(m.vocab_size())):
            return False
        lines = [" a  b \n", "\n", "  c\n", "d"]
        return [i for line in lines for i in m.encode(line)] == m.encode("".join(lines))

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids if i < self.model.vocab_size()])

    def bytes_of(self, i: int) -> bytes:
        m = self.model
        if i >= m.vocab_size() or m.is_control(i) or m.is_unknown(i):
            return b""
        piece = m.id_to_piece(i)
        return bytes([int(piece[1:-1], 16)]) if m.is_byte(i) else (
            piece.replace("\u2581", " ").encode())


class PiecesT5(Pieces):
    """T5's sentencepiece model, followed by <extra_id_99> .. <extra_id_0>, which name gaps in a
    text. Any of these, or </s>, <pad> or <unk>, becomes a single id where a text spells it out."""
    kind = file = "spiece.model"

    def __init__(self, path: Path):
        super().__init__(path)
        if self._id("[CLS]") is not None or self._id("</s>") is None:
            raise ConfigError(f"{path} is not T5's (it has [CLS], or no </s>): give a "
                              f"tokenizer.json, written by transformers' save_pretrained")
        count = read_record(path.parent / "tokenizer_config.json").get("extra_ids", 100)
        self.vocab_size += count
        self.special = {f"<extra_id_{i}>": self.vocab_size - 1 - i for i in range(count)}
        self.special |= {piece: i for piece in ("</s>", "<pad>", "<unk>")
                         if (i := self._id(piece)) is not None}

    def encode(self, text: str) -> np.ndarray:
        ids = ([self.special[piece]] if piece in self.special else self.model.encode(piece)
               for piece in self.between.split(checked(text)))
        return np.array([i for part in ids for i in part], np.int64)


class TokenizerJson(Tokenizer):
    """A tokenizer.json. A special token spelled out in a text becomes a single id, and `decode`
    omits it, as in transformers."""
    kind = file = "tokenizer.json"

    def __init__(self, path: Path):
        package = optional_package("tokenizers", f"{path.name} of a published model")
        try:
            self.model = package.Tokenizer.from_file(str(path))
        except Exception as e:      # a Rust library, which raises plain Exceptions
            raise ConfigError(f"{path} is not a tokenizer ({one_line(e)})") from None
        self.model.no_truncation()
        self.model.no_padding()
        self.path, self.folder, vocabulary = path, path.parent, self.model.get_vocab(True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1      # ids may have gaps
        self.separator, self.ends = _special_ids(self.folder, self.vocab_size, vocabulary.get)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.model.encode(checked(text), add_special_tokens=False).ids, np.int64)

    def with_places(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = self.model.encode(checked(text), add_special_tokens=False)
        places = np.array(found.offsets, int).reshape(-1, 2)
        return np.array(found.ids, np.int64), places[:, 0], places[:, 1]

    def prompt(self, text: str) -> list[int]:
        return self.model.encode(checked(text)).ids or [self.separator]

    def with_ends(self, text: str) -> list[int]:
        ids = self.model.encode(checked(text)).ids
        return ids if ids[-1:] == [self.ends[0]] else [*ids, self.ends[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids if i < self.vocab_size])

    def spelled(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids), skip_special_tokens=False)

    def lengths(self) -> np.ndarray:
        record = json.loads(self.model.to_str())
        is_byte_level = '"ByteLevel"' in json.dumps(record["decoder"])

        lengths = np.zeros(self.vocab_size, np.int64)
        # A vocabulary spells tokens with one character per byte, or as plain text.
        for token, i in self.model.get_vocab(False).items():
            if is_byte_level:
                lengths[i] = len(token)
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):
                lengths[i] = 1
            else:
                lengths[i] = len(token.replace("\u2581", " ").encode())
        for token in record["added_tokens"]:
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return lengths


# {kind: the name of its file}. tools/tiktoken.py reads token ranks.
FILE_OF = {kind.kind: kind.file for kind in (TokenizerJson, Pieces, PiecesT5)} | {
    "tiktoken": "tiktoken.json"}
# All tokenizer files that a model's folder may have.
FILES = *FILE_OF.values(), *BESIDE


def tokenizer_at(path: str | Path) -> Tokenizer:
    """Open the tokenizer that --tokenizer names: a file, a published model's folder or `bytes`."""
    if path == "bytes":
        return Bytes()
    path = Path(path)
    if path.is_dir():
        return published_tokenizer(path, 2**31)
    if not path.exists():
        raise ConfigError(f"--tokenizer {path}: no such file; expected a sentencepiece model, a "
                          f"tokenizer.json, a folder with one of them, or bytes")
    with open(path, "rb") as f:     # a base64 token and rank 0, as in LLaMA 3's tokenizer.model
        has_ranks = re.fullmatch(rb"[A-Za-z0-9+/=]+ 0\r?\n", f.readline(200))
    if has_ranks or path.name == FILE_OF["tiktoken"]:
        return part("tools.tiktoken", f"--tokenizer {path}").Tiktoken(path)
    return (TokenizerJson if path.suffix == ".json" else PiecesT5
            if path.name == PiecesT5.file else Pieces)(path)


def published_tokenizer(folder: str | Path, rows: int, needed: bool = True) -> Tokenizer | None:
    """Open the tokenizer in a published model's folder. Reject one with ids above the embedding's
    `rows`, for which a lookup would silently take another row. If the folder has no tokenizer,
    raise ConfigError if it is `needed`; otherwise return None."""
    files = [name for name in FILE_OF.values() if (Path(folder) / name).exists()]
    if not files:
        if needed:
            raise ConfigError(f"{folder} has no tokenizer: expected tokenizer.json or "
                              f"tokenizer.model (for T5, spiece.model)")
        return None
    tokenizer = tokenizer_at(Path(folder) / files[0])
    if tokenizer.vocab_size > rows:
        raise ConfigError(f"{folder}: its tokenizer has ids up to {tokenizer.vocab_size - 1}, but "
                          f"its embedding has only {rows} rows (a T5's spiece.model has 100 more "
                          f"ids than subwords, unless tokenizer_config.json sets extra_ids)")
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return {name: content} for the files that a tokenizer needs in a new folder."""
    if not tokenizer.path:
        return {}
    found = {name: (tokenizer.folder / name).read_bytes() for name in BESIDE
             if (tokenizer.folder / name).exists()}
    ids = only(read_record(tokenizer.folder / "config.json"), "bos_token_id", "eos_token_id")
    if ids:             # from config.json, which isn't copied
        found.setdefault("generation_config.json", as_json(ids))
    return {tokenizer.file: tokenizer.content(), **found}


def copy_files(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Copy a tokenizer's files into a model's folder. Return their names."""
    found = tokenizer_files(tokenizer)
    for name, content in found.items():
        write_whole(folder / name, content)
    return list(found)


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, str]:
    """Return what a prepared folder or a run records about its tokenizer: its kind and digest."""
    return {"tokenizer": tokenizer.kind} | (
        {"tokenizer_sha256": sha256(tokenizer.path)} if tokenizer.path else {})


def tokenizer_of(folder: Path, record: Record) -> Tokenizer:
    """Open a prepared folder's or a run's tokenizer, and check it against the record."""
    if record["tokenizer"] == "bytes":
        return Bytes()
    if record["tokenizer"] == "ids":
        return Ids(record["vocab_size"])
    name = FILE_OF[record["tokenizer"]]
    path, inner = folder / name, folder / "data" / name
    if inner.exists() and not path.exists():    # a run was killed before it copied its tokenizer
        path = inner
    if path.exists() and record.get("tokenizer_sha256", "") not in ("", sha256(path)):
        raise ConfigError(f"{path} is not the tokenizer that encoded the text: it was edited or "
                          f"damaged")
    return tokenizer_at(path)


def checked(text: str) -> str:
    """Return the text, or raise UnicodeEncodeError on a lone surrogate, which is a caller's bug."""
    text.encode()
    return text


def read_record(path: Path) -> Record:
    """Read the JSON object in a file; return {} if there is no such file."""
    record = read_json(path) if path.exists() else {}
    if not isinstance(record, dict):
        raise ConfigError(f"{path} is damaged: not a JSON object")
    return record


def _special_ids(folder: Path, vocab_size: int, id_of: Callable[[str], int | None],
                 default: int = -1) -> tuple[int, tuple[int, ...]]:
    """Read (separator, every id that ends a text) from the files next to a tokenizer. The separator
    is the id that begins a text or, failing that, an id that ends a text."""
    records = [read_record(folder / f"{name}.json") for name in (
        "tokenizer_config", "special_tokens_map", "generation_config", "config")]
    if isinstance(text := records[-1].get("text_config"), dict):    # a model with several towers
        records.append(text)

    def ids(name):
        found = []
        for record in records:
            token, numbers = record.get(name), record.get(f"{name}_id")
            token = token.get("content") if isinstance(token, dict) else token
            found += [id_of(token)] if isinstance(token, str) else []
            found += numbers if isinstance(numbers, list) else [numbers]
        return [i for i in found if isinstance(i, int) and i >= 0]

    begin, end = ids("bos_token"), ids("eos_token")
    for i in [*begin, default, *end, id_of("<|endoftext|>"), id_of("</s>")]:
        if i is not None and 0 <= i < vocab_size:
            return i, tuple(dict.fromkeys([*end, i]))
    raise ConfigError(f"{folder}: its tokenizer has no bos_token and no eos_token (in "
                      f"tokenizer_config.json); one of them must separate documents")


def train_pieces(lines: Iterator[str], out: Path, vocab_size: int) -> Pieces:
    """Train a sentencepiece model on lines of text and save it as `out`."""
    import sentencepiece
    model, problem = io.BytesIO(), []   # in memory, because the model would record a file's name

    def parts():
        # The trainer drops sentences over 4192 bytes, and any error the iterator raises.
        try:
            for line in lines:
                yield from (line[i:i + 1000].replace("\0", " ") for i in range(0, len(line), 1000))
        except Exception as e:
            problem.append(e)

    try:
        # Turn normalization off, so that decode(encode(text)) is the text.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=parts(), model_writer=model, vocab_size=vocab_size,
            model_type="bpe", byte_fallback=True, character_coverage=0.9995,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, allow_whitespace_only_pieces=True, split_digits=True,
            input_sentence_size=1_000_000, num_threads=os.cpu_count(), minloglevel=2)
    except (RuntimeError, ValueError) as e:
        why = str(e).splitlines()[-1].rpartition("] ")[2]
        problem.append(ConfigError(f"--vocab_size {vocab_size}: {why}"))
    if problem:
        raise problem[0]
    write_whole(out, model.getvalue())
    return Pieces(out)


def hashed(text: str) -> int:
    """Hash the text to a number below 2**64."""
    return int(digest(text.encode(errors="surrogatepass"))[:16], 16)


def is_tenth(text: str) -> bool:
    """Return whether a document with this name or text is held out. A hash chooses a tenth of them,
    so adding a document never moves another."""
    return hashed(text) % 10 == 0
