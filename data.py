"""Text to tokens to batches.

    files --prepare--> train.bin, held_out.bin, data.json --Windows--> examples --collate--> batch

Tokens lie on disk as plain arrays of uint16 (uint32 above 65,536 ids) with a small JSON beside
them, and are mapped, never loaded. Which examples make the batch of a step is a pure function of
(seed, step): nothing about the position needs saving, and any number of processes agree on it.

    python data.py PATH ... --out DIR --vocab_size 8192     train a tokenizer and encode with it
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from shard import Refused, nearest

SPLITS = ("train", "held_out")


# -------------------------------------------------------------------------------------------
# Documents

def library_sources() -> tuple[Path, list[Path]]:
    """The Python standard library's own source: a corpus that every machine already has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]
    if not files:
        raise Refused(f"this Python has no library sources in {root} to learn from: pass "
                      f"--data with a text file, a folder of them, or what data.py made")
    return root, files


def documents(paths: Sequence[str]) -> list[tuple[str, Path]]:
    """(name, file) of every text file under the paths, in a fixed order. No paths: the Python
    library. The name is what a file is called from where it was asked for, so that it does not
    depend on the machine."""
    if not paths:
        root, files = library_sources()
        return [(p.relative_to(root).as_posix(), p) for p in files]
    found = []
    for path in paths:
        if not path:
            raise Refused("--data '': an empty path; expected a text file or a folder")
        path = Path(path)
        if (path / "data.json").exists():
            raise Refused(f"--data {path} was made by data.py: give it alone, to train.py")
        if not path.exists():
            near = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else []
            raise Refused(f"--data {path}: no such file or folder" + nearest(path.name, near))
        files = [path] if path.is_file() else sorted(
            p for p in path.rglob("*") if p.is_file()
            and not any(part.startswith(".") for part in p.relative_to(path).parts))
        root = path.parent if path.is_file() else path
        found += [(p.relative_to(root).as_posix(), p) for p in files if not _binary(p)]
    if not any(p.stat().st_size for _, p in found):
        raise Refused(f"--data {' '.join(map(str, paths))}: no text in it; expected a text file, "
                      f"a folder of text files, or a folder made by data.py")
    return found


def _binary(path: Path) -> bool:
    with open(path, "rb") as f:
        return b"\0" in f.read(8192)


def _held_out(name: str) -> bool:
    """A tenth of the documents, by the hash of their name: adding one moves no other."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 10 == 0


# -------------------------------------------------------------------------------------------
# Tokenizers: encode and decode, a separator that stands before each document, and how many
# bytes of text each id is worth.

class Bytes:
    """The 256 bytes, and one separator."""
    kind, vocab_size, separator = "bytes", 257, 256

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text if isinstance(text, bytes) else text.encode("utf-8")
        return np.frombuffer(raw, np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def lengths(self) -> np.ndarray:
        return np.array([1] * 256 + [0])


class Pieces:
    """A sentencepiece model: byte-pair pieces, and bytes for whatever has none."""
    kind = "sentencepiece"

    def __init__(self, path: Path):
        import sentencepiece
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError):
            raise Refused(f"{path} is not a sentencepiece model") from None
        self.vocab_size, self.separator = self.model.vocab_size(), self.model.bos_id()

    def encode(self, text: str | bytes) -> np.ndarray:
        if isinstance(text, str):
            text.encode("utf-8")        # a text that is none is the caller's error, not ours
        else:
            text = text.decode("utf-8", errors="replace")
        return np.array(self.model.encode(text), np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids if i < self.vocab_size])

    def lengths(self) -> np.ndarray:
        m = self.model
        return np.array([0 if m.is_control(i) or m.is_unknown(i) else 1 if m.is_byte(i)
                         else len(m.id_to_piece(i).replace("\u2581", " ").encode())
                         for i in range(self.vocab_size)])


def train_pieces(files: list[tuple[str, Path]], out: Path, vocab_size: int) -> Pieces:
    """Train a sentencepiece model on the lines of the files and save it as `out`."""
    import sentencepiece

    def lines() -> Iterator[str]:
        for _, path in files:
            with open(path, encoding="utf-8", errors="replace") as f:
                for line in f:
                    # In parts: the trainer drops a sentence of more than 4192 bytes.
                    line = line.rstrip("\n").replace("\0", " ")
                    yield from (line[i:i + 1000] for i in range(0, len(line), 1000))

    try:
        # Nothing is normalised away: decode(encode(text)) is the text.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(), model_prefix=str(out.with_suffix("")),
            vocab_size=vocab_size, model_type="bpe", byte_fallback=True,
            character_coverage=0.9995, normalization_rule_name="identity",
            remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=True, split_digits=True, input_sentence_size=1_000_000,
            num_threads=os.cpu_count(), minloglevel=2)
    except (RuntimeError, ValueError) as e:
        most = re.search(r"value <= (\d+)", str(e))
        raise Refused(f"--vocab_size {vocab_size}: " + (
            f"the text has pieces for {most[1]} at most" if most
            else str(e).splitlines()[-1].strip())) from None
    out.with_suffix(".vocab").unlink(missing_ok=True)
    return Pieces(out)


# -------------------------------------------------------------------------------------------
# Tokens on disk

def prepare(paths: Sequence[str], out: str | Path, vocab_size: int = 0) -> "Corpus":
    """Encode the text of the paths into `out`: as bytes, or with a new tokenizer of vocab_size
    pieces. data.json is written last, so that a folder that has it is whole."""
    out, files = Path(out), documents(paths)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Refused(f"--out {out}: {e.strerror}") from None
    if (out / "data.json").exists():
        raise Refused(f"{out} already holds prepared data; give another --out or remove it")
    groups = {"train": [f for f in files if not _held_out(f[0])],
              "held_out": [f for f in files if _held_out(f[0])]}
    # With a handful of files the hash may hold out almost nothing, or most of it: then the end.
    size = {k: sum(p.stat().st_size for _, p in g) for k, g in groups.items()}
    by_end = not 0.03 < size["held_out"] / (size["train"] + size["held_out"]) < 0.3
    if by_end:
        groups = {"train": files, "held_out": []}
    tokenizer = (train_pieces(groups["train"], out / "tokenizer.model", vocab_size)
                 if vocab_size else Bytes())
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    lengths = tokenizer.lengths()
    record: dict[str, Any] = {"tokenizer": tokenizer.kind, "vocab_size": tokenizer.vocab_size,
                              "dtype": np.dtype(dtype).name}
    for split, group in groups.items():
        with open(out / f"{split}.bin", "wb") as f:
            for i, (name, path) in enumerate(group):
                np.array([tokenizer.separator], dtype).tofile(f)
                for part in _parts(path):
                    ids = np.asarray(tokenizer.encode(part))
                    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                        raise Refused(f"{path}: its tokenizer made an id outside 0 to {tokenizer.vocab_size - 1}")
                    ids.astype(dtype).tofile(f)
                if sys.stderr.isatty() and i % 20 == 0:
                    print(f"\r{split}: {i + 1}/{len(group)} files", end="\x1b[K", file=sys.stderr)
    if by_end:
        size = (out / "train.bin").stat().st_size // dtype().itemsize
        keep = (size - size // 10) * dtype().itemsize
        np.fromfile(out / "train.bin", dtype, offset=keep).tofile(out / "held_out.bin")
        os.truncate(out / "train.bin", keep)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if vocab_size:
        record["tokenizer_sha256"] = _sha256(out / "tokenizer.model")
    for split in SPLITS:
        tokens = _map(out / f"{split}.bin", dtype)
        count = sum(int(lengths[tokens[i:i + 2**20]].sum()) for i in range(0, len(tokens), 2**20))
        record[split] = {"tokens": len(tokens), "bytes": count, "documents": len(groups[split]),
                         "digest": _sha256(out / f"{split}.bin")}
    write_json(out / "data.json", record)
    return Corpus(out)


def _parts(path: Path) -> Iterator[bytes]:
    """A file in parts of about a megabyte, cut after line ends where there are any (elsewhere
    a character may be cut in two, and a tokenizer then sees it as two broken ones)."""
    with open(path, "rb") as f:
        rest = b""
        while chunk := f.read(2**20):
            rest += chunk
            cut = rest.rfind(b"\n") + 1
            if cut or len(rest) > 2**24:
                yield rest[:cut or len(rest)]
                rest = rest[cut or len(rest):]
        if rest:
            yield rest


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    with open(part, "w") as f:
        f.write(json.dumps(record, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def _sha256(path: Path) -> str:
    """Of a file of up to 256 MiB all is looked at; of a larger one its size and as many MiB, evenly spread."""
    size, digest = path.stat().st_size, hashlib.sha256()
    if size > 2**28:
        digest.update(str(size).encode())
    with open(path, "rb") as f:
        for i in range(min(256, -(-size // 2**20))):
            f.seek(i * 2**20 if size <= 2**28 else i * (size - 2**20) // 255)
            digest.update(f.read(2**20))
    return digest.hexdigest()


def _changed(path: Path, digest: str | None) -> bool:
    """Whether a file is not what it was when that was written down of it, if it was."""
    return bool(digest) and _sha256(path) != digest


def _map(path: Path, dtype: Any) -> np.ndarray:
    size, item = path.stat().st_size, np.dtype(dtype).itemsize
    if size % item:
        raise Refused(f"{path} has {size} bytes, which is not a whole number of {dtype} tokens")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


class Corpus:
    """A folder that `prepare` made: .train, .held_out, .tokenizer, .record."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.record = json.loads((self.folder / "data.json").read_text())
            for split in SPLITS:
                tokens = _map(self.folder / f"{split}.bin", np.dtype(self.record["dtype"]))
                if len(tokens) != self.record[split]["tokens"]:
                    raise Refused(f"{self.folder / split}.bin has {len(tokens)} tokens; data.json "
                                  f"says {self.record[split]['tokens']}")
                if _changed(self.folder / f"{split}.bin", self.record[split].get("digest")):
                    raise Refused(f"{self.folder / split}.bin is not what data.json says it is: it was changed, or is "
                                  f"damaged; make the folder again")
                setattr(self, split, tokens)
            self.fingerprint = self.record["train"].get("digest") or self.record["train"]["sha256"]
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as e:
            raise Refused(f"{self.folder} is not a folder made by data.py ({e})") from None
        self.tokenizer = tokenizer_of(self.folder, self.record)

    def __repr__(self) -> str:
        r = self.record
        return (f"{self.folder}: {r['train']['tokens']:,} tokens to learn from, "
                f"{r['held_out']['tokens']:,} held out, {r['tokenizer']} of {r['vocab_size']}")


def tokenizer_of(folder: Path, record: dict[str, Any]) -> Bytes | Pieces:
    """The tokenizer of a prepared folder or a run, of which `record` says what it must be."""
    if record["tokenizer"] == "bytes":
        return Bytes()
    path = folder / "tokenizer.model"
    if path.exists() and _changed(path, record.get("tokenizer_sha256")):
        raise Refused(f"{path} is not the tokenizer that the text was encoded with: it was changed, or is damaged")
    return Pieces(path)


@contextlib.contextmanager
def opened(paths: Sequence[str], run: Path, ready: float = 0) -> Iterator[Corpus]:
    """The corpus behind --data: a folder made by data.py as it is, or text, encoded as bytes into
    the run's own folder when the run begins. Only if what is done with it here passes is it kept,
    so that a run that is refused leaves nothing behind; a run that goes on keeps what it has. `ready`:
    another process has made it already, and it must appear in so many seconds."""
    made, part = run / "data", run / "data.part"
    given = len(paths) == 1 and bool(paths[0]) and (Path(paths[0]) / "data.json").exists()
    if ready and not given and not appears((made / "data.json").exists, run, ready):
        raise Refused(f"--out {run}: this process does not see what process 0 wrote there; give a folder that every "
                      f"process sees")
    if given or ready or ((run / "config.json").exists() and (made / "data.json").exists()):
        corpus = Corpus(paths[0] if given else made)
        yield corpus
    else:
        new = not run.exists()
        shutil.rmtree(part, ignore_errors=True)
        try:
            corpus = prepare(paths, part)
            yield corpus
            shutil.rmtree(made, ignore_errors=True)
            os.replace(part, made)
            corpus.folder = made
        finally:
            shutil.rmtree(part, ignore_errors=True)
            if new:
                with contextlib.suppress(OSError):
                    run.rmdir()                 # goes only if it is empty
    if given and not ready and corpus.tokenizer.kind != "bytes":
        try:
            run.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(corpus.folder / "tokenizer.model", run / "tokenizer.part")
            os.replace(run / "tokenizer.part", run / "tokenizer.model")
        except OSError as e:
            raise Refused(f"--out {run}: cannot be written ({e.strerror})") from None


def appears(there: Callable[[], bool], folder: Path, seconds: float) -> bool:
    """Whether it is there. What another machine wrote may take a while to be seen, and be asked for."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if there():
                return True
        if time.monotonic() > until:
            return False
        for place in (folder.parent, folder):
            with contextlib.suppress(OSError):
                os.listdir(place)
        time.sleep(0.25)


# -------------------------------------------------------------------------------------------
# Examples, and their order

class Windows:
    """A row of tokens as examples of T + 1: T to read, T to say. The last may be shorter."""

    def __init__(self, tokens: np.ndarray, length: int, count: int | None = None, vocab_size: int = 2**31):
        self.tokens, self.length, self.vocab_size = tokens, length, vocab_size
        self.total = max(len(tokens) - 1, 0) // length or (1 if len(tokens) > 1 else 0)
        # With a count, that many, evenly spread: the same ones each time.
        self.count = self.total if count is None else min(count, self.total)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < self.count:
            raise IndexError(i)
        start = i * self.total // self.count * self.length
        found = np.asarray(self.tokens[start:start + self.length + 1], np.int64)
        # A device would take another id for one that does not exist, and say nothing.
        if (bad := (found < 0) | (found >= self.vocab_size)).any():
            at = start + int(bad.argmax())
            raise Refused(f"{getattr(self.tokens, 'filename', None) or 'the tokens'}: id {self.tokens[at]} at position "
                          f"{at}; the vocabulary has {self.vocab_size}")
        return found.astype(np.int32)


def collate(examples: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Examples as a batch: tokens and targets [B, T], weights 0 where nothing is asked."""
    batch = {"tokens": np.zeros((len(examples), length), np.int32),
             "targets": np.zeros((len(examples), length), np.int32),
             "weights": np.zeros((len(examples), length), np.float32)}
    for row, e in enumerate(examples):
        batch["tokens"][row, :len(e) - 1], batch["targets"][row, :len(e) - 1] = e[:-1], e[1:]
        batch["weights"][row, :len(e) - 1] = 1
    return batch


def order(count: int, seed: int, first: int, size: int) -> np.ndarray:
    """Places first .. first + size of an endless sequence of example numbers below `count`,
    in which each epoch is a shuffle of its own, without repeats. No list of the examples is
    ever made: a Feistel network permutes [0, 4^k), and what falls outside walks on."""
    if count < 1:
        raise Refused("there are no examples to learn from")
    place = np.arange(first, first + size, dtype=np.uint64)
    epoch, x = place // np.uint64(count), place % np.uint64(count)
    bits = max(1, (count - 1).bit_length() + 1 >> 1)
    mask, half = np.uint64(2**bits - 1), np.uint64(bits)
    key = mix(epoch * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed % 2**64))

    def once(v):
        left, right = v >> half, v & mask
        for i in range(4):
            left, right = right, left ^ (mix(right ^ key + np.uint64(i)) & mask)
        return left << half | right

    x = once(x)
    while (outside := x >= count).any():
        x = np.where(outside, once(x), x)
    return x.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: every bit of the result depends on every bit of x."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


# -------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config:
    """python data.py PATH ... --out DIR [--vocab_size N]: encode text for train.py --data DIR"""
    out: str = "data"           # folder to make
    vocab_size: int = 8192      # pieces of the tokenizer that is trained; 0: bytes


def main(argv: Sequence[str] | None = None) -> None:
    import train
    paths, config = train.flags(Config(), argv, positional="PATH")
    if not paths:
        raise Refused("no PATH given: python data.py PATH ... --out DIR, with text files or "
                      "folders of them")
    if config.vocab_size and config.vocab_size < 300:
        raise Refused(f"--vocab_size {config.vocab_size}: at least 300 (256 bytes and some "
                      f"pieces), or 0 for bytes alone")
    print(prepare(paths, config.out, config.vocab_size))


if __name__ == "__main__":
    import data
    import train
    train.run(data.main)
