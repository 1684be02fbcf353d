"""Vocabularies of the tiktoken package: byte strings with ranks, and no merges file.

    tiktoken.json       written by `save`: pattern, special tokens and ranks in a single file
    *.tiktoken, tokenizer.model, tiktoken.model
                        only the ranks, as published: a base64 token and its rank on each line. The
                        publisher gives the pattern and special tokens as Python code. Two are
                        built in here: LLaMA 3's, and Qwen's, whose own code also converts text to
                        NFC. For any other, build the encoding in Python and `save` it

    save(tiktoken.get_encoding("o200k_base"), "folder")
"""

import base64
import re
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, one_line, optional_package
from zigzag.core.files import as_json, read_json, write_whole
from zigzag.disk.tokenizers import FILE_OF, Tokenizer, checked

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# PUBLISHED is {number of ranks: (pattern, special tokens in id order, numbered after the ranks)}.
LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
           "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>",
           "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
           "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)))
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
PUBLISHED = {128_000: (rf"{WORDS}\p{{N}}{{1,3}}{REST}", LLAMA_3),
             151_643: (rf"{WORDS}\p{{N}}{REST}", QWEN)}
# Encode long runs of blanks separately: on a million of them, a pattern's backtracking overflows.
BLANK = re.compile(r"(\s{25000})")
FILE = FILE_OF["tiktoken"]
# Names of the tokens that begin and end a text, most common first.
BEGINS = ("<|begin_of_text|>", "<|startoftext|>")
ENDS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>")


class Tiktoken(Tokenizer):
    """A tiktoken vocabulary. A special token spelled out in a text becomes a single id, and
    `decode` omits it, as with a tokenizer.json."""
    kind, file = "tiktoken", FILE

    def __init__(self, path: Path):
        package = optional_package("tiktoken", path.name)
        self.path, self.folder, record = path, path.parent, read_encoding(path)
        try:
            self.model = package.Encoding(path.name, **record)
        except Exception as e:      # a Rust library, which raises plain Exceptions
            raise ConfigError(f"{path} is not a vocabulary of tiktoken ({one_line(e)})") from None
        special = record["special_tokens"]
        self.special, self.vocab_size = set(special.values()), self.model.n_vocab
        self.begins = [special[name] for name in BEGINS if name in special][:1]
        ends = [special[name] for name in ENDS if name in special]
        if not ends and not self.begins:
            raise ConfigError(f"{path}: no special token to separate documents; expected one of "
                              f"{', '.join(BEGINS + ENDS)}")
        self.separator = (self.begins or ends)[0]
        self.ends = tuple(dict.fromkeys([*ends, self.separator]))

    def encode(self, text: str) -> np.ndarray:
        return np.array([i for part in BLANK.split(checked(text))
                         for i in self.model.encode(part, allowed_special="all")], np.int64)

    def with_places(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = self.encode(text)
        # For each byte, the index of its character. An id begins at its first byte's character.
        characters = np.repeat(np.arange(len(text)), [len(c.encode()) for c in text])
        size = np.array([len(self.model.decode_single_token_bytes(i)) for i in ids.tolist()], int)
        ends = np.cumsum(size)
        return ids, characters[ends - size], characters[ends - 1] + 1

    def with_ends(self, text: str) -> list[int]:
        return [*self.begins, *super().with_ends(text)]

    def spelled(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids))

    def bytes_of(self, i: int) -> bytes:
        try:
            return b"" if i in self.special else self.model.decode_single_token_bytes(i)
        except KeyError:                # an id without a token
            return b""

    def content(self) -> bytes:
        return content_of(self.model)


def content_of(encoding: Any) -> bytes:
    """Return the content of tiktoken.json for a tiktoken.Encoding."""
    ranks = {base64.b64encode(token).decode(): rank
             for token, rank in encoding._mergeable_ranks.items()}
    return as_json({"pattern": encoding._pat_str, "special_tokens": encoding._special_tokens,
                    "ranks": ranks})


def read_encoding(path: Path) -> dict[str, Any]:
    """Read a vocabulary file as arguments for tiktoken.Encoding."""
    if path.suffix == ".json":
        record = read_json(path)
        try:
            ranks = {base64.b64decode(token): rank for token, rank in record["ranks"].items()}
            return {"pat_str": record["pattern"], "mergeable_ranks": ranks,
                    "special_tokens": record["special_tokens"]}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"{path} is damaged: {one_line(e)}") from None
    ranks = read_ranks(path)
    if len(ranks) not in PUBLISHED:
        known = " and ".join(f"{count:,}" for count in PUBLISHED)
        raise ConfigError(f"{path} has {len(ranks):,} ranks, but not the pattern that splits text, "
                          f"which is known only for {known} ranks (LLaMA 3 and Qwen). Build the "
                          f"tiktoken.Encoding in Python and write it with "
                          f"tools.tiktoken.save")
    pattern, special = PUBLISHED[len(ranks)]
    return {"pat_str": pattern, "mergeable_ranks": ranks,
            "special_tokens": {name: len(ranks) + i for i, name in enumerate(special)}}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read {token: rank} from a file whose lines each hold a base64 token and its rank."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ConfigError(f"{path} line {number}: {line[:40]!r}; expected a base64 token and "
                              f"its rank") from None
    return ranks


def save(encoding: Any, folder: str | Path) -> Path:
    """Save a tiktoken.Encoding as tiktoken.json in a folder. Return the file's path."""
    path = Path(folder) / FILE
    write_whole(path, content_of(encoding))
    return path
