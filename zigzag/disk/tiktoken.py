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
from typing import Any

from zigzag.core.errors import ConfigError, one_line
from zigzag.core.files import as_json, read_json, write_whole

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
FILE = "tiktoken.json"
# Names of the tokens that begin and end a text, most common first.
BEGINS = ("<|begin_of_text|>", "<|startoftext|>")
ENDS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>")


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
                          f"zigzag.disk.tiktoken.save")
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


def has_ranks(path: Path) -> bool:
    """Return whether a file's first line is a base64 token and rank 0."""
    with open(path, "rb") as f:
        return bool(re.fullmatch(rb"[A-Za-z0-9+/=]+ 0\r?\n", f.readline(200)))


def content_of(encoding: Any) -> bytes:
    """Return the content of tiktoken.json for a tiktoken.Encoding."""
    ranks = {base64.b64encode(token).decode(): rank
             for token, rank in encoding._mergeable_ranks.items()}
    return as_json({"pattern": encoding._pat_str, "special_tokens": encoding._special_tokens,
                    "ranks": ranks})


def save(encoding: Any, folder: str | Path) -> Path:
    """Save a tiktoken.Encoding as tiktoken.json in a folder. Return the file's path."""
    path = Path(folder) / FILE
    write_whole(path, content_of(encoding))
    return path
