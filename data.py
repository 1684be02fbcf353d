"""Text to tokens to batches.

    files --prepare--> train.bin, held_out.bin, data.json --Windows--> examples --collate--> batch
    *.jsonl --zigzag/disk/examples.py: Pairs--> (source ids, target ids) --collate_pairs--> batch

On disk, tokens are plain arrays of uint16 (uint32 above 65,536 ids) beside a small JSON file. They
are memory-mapped, never loaded whole. The examples in a step's batch are a pure function of (seed,
step): there is no position to save, and any number of processes agree. This file needs numpy, not
jax.

    python data.py PATH ... --out DIR --vocab_size 8192     train a tokenizer and encode with it
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, did_you_mean
from zigzag.core.files import appears, sha256, write_json
from zigzag.core.flags import from_flags, run_main
from zigzag.disk.examples import has_json_lines
from zigzag.disk.tokenizers import KINDS, Bytes, Tokenizer, copy_files, train_pieces

SPLITS = ("train", "held_out")


# -------------------------------------------------------------------------------------------
# Documents

def _library_sources():
    """The source of Python's standard library: a corpus that every machine already has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if skip.isdisjoint(p.relative_to(root).parts)]
    if not files:
        raise ConfigError(f"this Python has no library sources in {root} to learn from: give "
                          f"--data a text file, a folder of text files, or one made by data.py")
    return root, files


def documents(paths: Sequence[str], flag: str = "--data") -> list[tuple[str, Path]]:
    """(name, file) for every text file under the paths (none: the Python library), in a fixed
    order. Names are relative to the path, so that they do not depend on the machine. `flag` is what
    messages call the paths."""
    places = [_text_files(path, flag) for path in paths] or [_library_sources()]
    found = [(p.relative_to(root).as_posix(), p) for root, files in places for p in files]
    if not any(p.stat().st_size for _, p in found):
        made = ", or one folder made by data.py" if flag == "--data" else ""
        name = " ".join([flag, *map(str, paths)]).strip()
        raise ConfigError(f"{name}: no text in it; expected text files or folders of them{made}")
    return found


def _text_files(path, flag):
    """The text files at or under a path, and the folder that their names are relative to."""
    if not path:
        raise ConfigError(f"{flag} '': an empty path; expected a text file or a folder".strip())
    name, path = f"{flag} {path}".strip(), Path(path)
    if (path / "data.json").exists():
        how = ("give it alone, without other paths" if flag == "--data" else
               f"its text is encoded already; train on it by python train.py --data {path}")
        raise ConfigError(f"{name} was made by data.py: {how}")
    if not path.exists():
        near = [p.name for p in path.parent.glob("*")]
        raise ConfigError(f"{name}: no such file or folder" + did_you_mean(path.name, near))
    root = path.parent if path.is_file() else path
    files = [p for p in (path, *sorted(path.rglob("*"))) if p.is_file() and not _binary(p)
             and not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if rows := [p for p in files if has_json_lines(p)]:
        what = name if rows[0] == path else f"{name}: {rows[0]}"
        raise ConfigError(
            f"{what} has lines of JSON, whose braces and names a decoder would learn as text: "
            f"extract the texts first (jq -r .text {rows[0].name} > text.txt); pairs of a source "
            f"and a target are for a model with an encoder (train.py --model t5-small, or --model "
            f"transformer --encoder_layers N)")
    return root, files


def _binary(path):
    with open(path, "rb") as f:
        return b"\0" in f.read(8192)


def _held_out(name):
    """Whether a document is held out: a tenth are, by a hash of the name, so that adding a document
    moves no other."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 10 == 0


# -------------------------------------------------------------------------------------------
# Tokens on disk

def prepare(paths: Sequence[str], out: str | Path, vocab_size: int = 0,
            tokenizer: Tokenizer | None = None, flag: str = "--data") -> "Corpus":
    """Encode the text of the paths into `out`: with the tokenizer given, with a new one of
    vocab_size pieces, or as bytes. data.json is written last, so a folder that has it is complete.
    Returns the Corpus."""
    out, files = Path(out), documents(paths, flag)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: {e.strerror}") from None
    if (out / "data.json").exists():
        raise ConfigError(f"{out} already holds prepared data; give another --out or remove it")
    groups = {split: [f for f in files if _held_out(f[0]) == (split == "held_out")]
              for split in SPLITS}
    # With few files the hash may hold out almost nothing, or most of the text. Then the last tenth
    # of all tokens is held out instead.
    size = {k: sum(p.stat().st_size for _, p in g) for k, g in groups.items()}
    end_held_out = not 0.03 < size["held_out"] / sum(size.values()) < 0.3
    if end_held_out:
        groups = {"train": files, "held_out": []}
    if vocab_size:
        tokenizer = train_pieces(groups["train"], out / "tokenizer.model", vocab_size)
    elif tokenizer:
        copy_files(tokenizer, out)
    else:
        tokenizer = Bytes()
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    lengths = tokenizer.lengths()
    record = {**tokenizer_record(tokenizer), "vocab_size": tokenizer.vocab_size,
              "dtype": dtype.name}
    for split, group in groups.items():
        _encode(group, tokenizer, dtype, out / f"{split}.bin")
    if end_held_out:
        tokens = _map(out / "train.bin", dtype)
        keep = len(tokens) - len(tokens) // 10
        tokens[keep:].tofile(out / "held_out.bin")
        os.truncate(out / "train.bin", keep * dtype.itemsize)
    for split in SPLITS:
        tokens = _map(out / f"{split}.bin", dtype)
        parts = np.array_split(tokens, 1 + len(tokens) // 2**20)
        count = sum(int(lengths[part].sum()) for part in parts)
        record[split] = {"tokens": len(tokens), "bytes": count, "documents": len(groups[split]),
                         "digest": sha256(out / f"{split}.bin")}
    write_json(out / "data.json", record)
    return Corpus(out)


def _encode(files, tokenizer, dtype, out):
    """Write the tokens of the files, with a separator before each file."""
    is_terminal = sys.stderr.isatty()
    with open(out, "wb") as f:
        for i, (_, path) in enumerate(files):
            np.array([tokenizer.separator], dtype).tofile(f)
            for part in _parts(path):
                ids = tokenizer.encode(part)
                if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                    raise ConfigError(f"{path}: the tokenizer made an id outside 0 to "
                                      f"{tokenizer.vocab_size - 1}")
                ids.astype(dtype).tofile(f)
            if is_terminal and i % 20 == 0:
                print(f"\r{out.stem}: {i + 1}/{len(files)} files", end="\x1b[K", file=sys.stderr)
    if is_terminal:
        print("\r\x1b[K", end="", file=sys.stderr)


def _parts(path):
    """The bytes of a file in parts of about a megabyte, cut at line ends. (Only a line of 16 MB is
    cut inside, where a character may be split into two broken ones.)"""
    rest = b""
    with open(path, "rb") as f:
        while chunk := f.read(2**20):
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            yield lines + newline
            if len(rest) > 2**24:
                yield rest
                rest = b""
    yield rest


def _changed(path, digest):
    """Whether a file differs from the one with this digest ('': nothing to compare with)."""
    return bool(digest) and sha256(path) != digest


def _map(path, dtype):
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ConfigError(f"{path} has {size} bytes, which is not a whole number of {dtype} "
                          f"tokens")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


class Corpus:
    """A folder that `prepare` made: .train, .held_out, .tokenizer, .record."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.record = json.loads((self.folder / "data.json").read_text())
            for split in SPLITS:
                file, wanted = self.folder / f"{split}.bin", self.record[split]
                tokens = _map(file, np.dtype(self.record["dtype"]))
                if len(tokens) != wanted["tokens"]:
                    raise ConfigError(f"{file} has {len(tokens)} tokens; data.json says "
                                      f"{wanted['tokens']}")
                if _changed(file, wanted.get("digest")):
                    raise ConfigError(f"{file} is not what data.json says it is: it was changed, "
                                      f"or is damaged; make the folder again")
                setattr(self, split, tokens)
            self.fingerprint = self.record["train"].get("digest") or self.record["train"]["sha256"]
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as e:
            raise ConfigError(f"{self.folder} is not a folder made by data.py ({e})") from None
        self.tokenizer = tokenizer_of(self.folder, self.record)

    def __repr__(self) -> str:
        r = self.record
        kind = "bytes" if r["tokenizer"] == "bytes" else f"pieces of {r['tokenizer']}"
        return (f"{self.folder}: {r['train']['tokens']:,} tokens to learn from, "
                f"{r['held_out']['tokens']:,} held out; tokens are {kind}, of {r['vocab_size']:,}")


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, str]:
    """What a prepared folder or a run records about its tokenizer: the kind, and a digest."""
    if tokenizer.kind == "bytes":
        return {"tokenizer": tokenizer.kind}
    digest = sha256(tokenizer.folder / tokenizer.file)
    return {"tokenizer": tokenizer.kind, "tokenizer_sha256": digest}


def tokenizer_of(folder: Path, record: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a prepared folder or a run, checked against its record."""
    if record["tokenizer"] == "bytes":
        return Bytes()
    kind = KINDS.get(record["tokenizer"])
    if kind is None:
        raise ConfigError(f"{folder}: its tokenizer is of the kind {record['tokenizer']!r}; "
                          f"expected bytes, {', '.join(KINDS)}")
    # (A run keeps it beside its tokens, or alone if its tokens are in another folder.)
    path = next((path for path in (folder / kind.file, folder / "data" / kind.file)
                 if path.exists()), folder / kind.file)
    if path.exists() and _changed(path, record.get("tokenizer_sha256")):
        raise ConfigError(f"{path} is not the tokenizer that the text was encoded with: it was "
                          f"changed, or is damaged")
    return kind(path)


@contextlib.contextmanager
def opened(paths: Sequence[str], run: Path, ready: float = 0, tokenizer: Tokenizer | None = None,
           fingerprint: str = "", changes: bool = False) -> Iterator[Corpus]:
    """The corpus behind --data. A folder made by data.py is used as it is. Text is encoded with the
    tokenizer (None: as bytes) into the run's folder, when the run begins or when it `changes` its
    data; the result is kept only if the body of the `with` passes, so that a run that is refused
    leaves nothing behind. A run that continues uses the corpus it has, with this fingerprint.
    ready > 0: process 0 has made the corpus, and it must appear within `ready` seconds."""
    changed, part = run / f"data-{fingerprint[:12]}", run / "data.part"
    made = changed if (changes and ready) or (changed / "data.json").exists() else run / "data"
    given = len(paths) == 1 and paths[0] and (Path(paths[0]) / "data.json").exists()
    if ready and not given and not appears((made / "data.json").exists, run, ready):
        raise ConfigError(f"--out {run}: this process does not see what process 0 wrote there; "
                          f"give a folder that every process sees")
    has = (run / "config.json").exists() and (made / "data.json").exists() and not changes
    if given or ready or has:
        corpus = Corpus(paths[0] if given else made)
        yield corpus
    else:
        new = not run.exists()
        shutil.rmtree(part, ignore_errors=True)
        try:
            corpus = prepare(paths, part, tokenizer=tokenizer)
            yield corpus
            if changes:         # (until config.json says otherwise, the old data stays in use)
                made = run / f"data-{corpus.fingerprint[:12]}"
            if corpus.fingerprint != fingerprint:
                shutil.rmtree(made, ignore_errors=True)
                os.replace(part, made)
                corpus.folder = made
        finally:
            shutil.rmtree(part, ignore_errors=True)
            if new:
                with contextlib.suppress(OSError):
                    run.rmdir()                 # (only if it is empty)
    if given and not ready and corpus.tokenizer.kind != "bytes":
        try:
            run.mkdir(parents=True, exist_ok=True)
            copy_files(corpus.tokenizer, run)
        except OSError as e:
            raise ConfigError(f"--out {run}: cannot be written ({e.strerror})") from None


# -------------------------------------------------------------------------------------------
# Examples, and their order

class Windows:
    """A row of tokens, cut into examples of T + 1 tokens: T inputs, and the T targets one place
    later. The last example may be shorter."""

    def __init__(self, tokens: np.ndarray, length: int, count: int = sys.maxsize,
                 vocab_size: int = 2**31):
        self.tokens, self.length, self.vocab_size = tokens, length, vocab_size
        self.total = max(len(tokens) - 1, 0) // length or int(len(tokens) > 1)
        # With a count: that number of examples, evenly spread, the same ones each time.
        self.count = min(count, self.total)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < self.count:
            raise IndexError(i)
        start = i * self.total // self.count * self.length
        found = np.asarray(self.tokens[start:start + self.length + 1], np.int64)
        # (A device would silently look up another row for an id that does not exist.)
        if (bad := (found < 0) | (found >= self.vocab_size)).any():
            at = start + int(bad.argmax())
            raise ConfigError(f"{getattr(self.tokens, 'filename', None) or 'the tokens'}: id "
                              f"{self.tokens[at]} at position {at}; the vocabulary has "
                              f"{self.vocab_size}")
        return found.astype(np.int32)


def collate(examples: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """A batch of examples: tokens, targets and weights [B, T]. Weights are 0 where there is no
    target."""
    tokens, targets, weights = np.zeros((3, len(examples), length), np.int32)
    for row, e in enumerate(examples):
        n = len(e) - 1
        tokens[row, :n], targets[row, :n], weights[row, :n] = e[:-1], e[1:], 1
    return {"tokens": tokens, "targets": targets, "weights": weights.astype(np.float32)}


def collate_pairs(examples: Sequence[tuple[np.ndarray, np.ndarray]], source_len: int,
                  target_len: int, start: int, end: int | None = None, pad: int = 0
                  ) -> dict[str, np.ndarray]:
    """A batch for an encoder and a decoder, from pairs (source ids, target ids): source and
    source_mask [B, S]; tokens, targets and weights [B, T], where a weight is 0 if there is no
    target. The decoder reads its targets shifted by one, after the id `start`, which is added
    unless the target begins with it:

        start            ids of the target    tokens             targets
        T5: <pad>        a b </s>             <pad> a b          a b </s>
        BART: </s>       <s> a b </s>         </s> <s> a b       <s> a b </s>
        (others): <s>    <s> a b </s>         <s> a b            a b </s>

    Sources and targets that are too long are cut, and still end with `end` if they did."""
    def cut(ids, length):
        short = ids[:length].copy()
        if end is not None and len(ids) > length and ids[-1] == end:
            short[-1] = end
        return short

    B = len(examples)
    source, source_mask = np.zeros((2, B, source_len), np.int32)
    source += pad
    tokens, targets = np.full((2, B, target_len), pad, np.int32)
    weights = np.zeros((B, target_len), np.float32)
    for row, (ids, target) in enumerate(examples):
        ids = cut(ids, source_len)
        source[row, :len(ids)], source_mask[row, :len(ids)] = ids, 1
        # (Where one id is both start and end, a target of that id alone is an empty text.)
        if len(target) > 1 and target[0] == start:
            target = target[1:]
        target = cut(target, target_len)
        n = len(target)
        tokens[row, :n], targets[row, :n] = [start, *target[:-1]][:n], target
        weights[row, :n] = 1
    return {"source": source, "source_mask": source_mask, "tokens": tokens, "targets": targets,
            "weights": weights}


def order(count: int, seed: int, first: int, size: int) -> np.ndarray:
    """Numbers `first` to `first + size` of an endless sequence of example numbers below `count`.
    Each epoch is a shuffle of all examples, without repeats. No list of them is ever made: a
    Feistel network permutes [0, 4^k), and permutes a number again while it falls outside."""
    if count < 1:
        raise ConfigError("there are no examples to train on")
    epoch, x = np.divmod(np.arange(first, first + size, dtype=np.uint64), count)
    half = max(1, (count - 1).bit_length() + 1 >> 1)        # bits
    mask = 2**half - 1
    key = mix(epoch * 0x9E3779B97F4A7C15 + seed % 2**64)

    def permuted(v):
        left, right = v >> half, v & mask
        for i in range(4):
            left, right = right, left ^ (mix(right ^ key + i) & mask)
        return left << half | right

    x = permuted(x)
    while (outside := x >= count).any():
        x = np.where(outside, permuted(x), x)
    return x.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: every bit of the result depends on every bit of x."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
    x = (x ^ x >> 27) * 0x94D049BB133111EB
    return x ^ x >> 31


# -------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config:
    """python data.py PATH ... --out DIR [--vocab_size N]: encode text for train.py --data DIR"""
    out: str = "data"           # folder to make
    vocab_size: int = 8192      # pieces of the new tokenizer; 0: bytes, without a tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    paths, config = from_flags(Config(), argv, "PATH")
    if not paths:
        raise ConfigError("no PATH given: python data.py PATH ... --out DIR, with text files or "
                          "folders of them")
    if config.vocab_size and config.vocab_size < 300:
        raise ConfigError(f"--vocab_size {config.vocab_size}: at least 300 (256 bytes and some "
                          f"pieces), or 0 for bytes alone")
    print(prepare(paths, config.out, config.vocab_size, flag=""))


if __name__ == "__main__":
    run_main(main)
