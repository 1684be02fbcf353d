"""Token files that other programs wrote.

    .bin    uint16 or uint32 without a header (nanoGPT), or after llm.c's header of 1,024 bytes
    .npy    shards of uint16 or uint32, of one dimension

A file, several, or those that match a pattern or lie in a folder, in the order of their names;
those with val, valid, test or held_out in their names are held out, else the last tenth. Such files
do not say which ids exist, nor where documents begin. Next to a.bin or a.npy, a.weights.npy has the
weight of each token as a target, float16 or float32; without it, all are 1.
"""

import glob
import hashlib
import os
import re
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.files import read_at_random, sha256
from zigzag.disk.examples import read_npy
from zigzag.disk.tokenizers import Ids, Tokenizer, tokenizer_record
from zigzag.disk.weights import finite_weights

# llm.c's header: 256 numbers of 32 bits, {magic: (version, type of the tokens)}.
HEADER = 1024
MAGIC = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test|held_out)([^a-z]|$)", re.I)


WEIGHTS = ".weights.npy"


class Joined:
    """Arrays one after the other, as one array that can be sliced."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        for array in arrays:
            read_at_random(array)
        self.arrays = [np.asarray(array) for array in arrays]    # (slices of a memmap are slow)
        self.starts = np.cumsum([0, *map(len, arrays)])
        self.dtype = arrays[0].dtype if arrays else np.dtype(np.uint16)
        self.filename = ""      # (for messages)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return self[index:index + 1][0]
        start, stop, _ = index.indices(len(self))
        parts, at = [], int(np.searchsorted(self.starts, start, "right")) - 1
        while start < stop:
            before = int(self.starts[at])
            part = self.arrays[at][start - before:stop - before]
            parts.append(np.asarray(part))
            start, at = start + len(part), at + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])


def token_files(paths: Sequence[str | Path]) -> list[Path]:
    """The token files that all of these paths stand for, in order, each once; [] if a path stands
    for anything else."""
    found = list(map(files_of, paths))
    files = [file for files in found for file in files] if all(found) else []
    return list({file.resolve(): file for file in files}.values())


def files_of(path: str | Path) -> list[Path]:
    """The token files that a path stands for: itself, those in a folder, or those that match a
    pattern. [] if other files are there, too, and train is in the name of none."""
    text = str(path)
    if os.path.isdir(text):
        return _chosen(sorted(file for file in Path(path).glob("*") if file.is_file()))
    matches = [text] if os.path.exists(text) else sorted(glob.glob(text, recursive=True))
    folders = [match for match in matches if os.path.isdir(match)]
    parts = [files_of(folder) for folder in folders]
    if len(folders) < len(matches):
        parts.append(_chosen([Path(match) for match in matches if match not in folders]))
    return [file for part in parts for file in part] if all(parts) else []


def _chosen(there):
    """The token files among files that lie, or were named, together."""
    there = [file for file in there if not file.name.endswith(WEIGHTS)]
    files = [file for file in there if file.suffix in (".bin", ".npy")]
    is_prepared = any(file.name == "data.json" for file in there)
    has_train = any("train" in file.stem for file in files)
    return files if files == there or has_train and not is_prepared else []


class TokenFiles:
    """Tokens of other programs, with the attributes of a prepared folder (corpus.Corpus). `path` is
    one path or several, of which token_files gives the files."""

    def __init__(self, path: str | Path | Sequence[str | Path], vocab_size: int,
                 tokenizer: Tokenizer | None = None, flag: str = "--data"):
        paths = [path] if isinstance(path, (str, Path)) else path
        self.folder = path = " ".join(map(str, paths))      # (for messages)
        files = token_files(paths)
        arrays = {file: _open(file) for file in files}
        held_out = {file for file in files if HELD_OUT.search(file.stem) and flag == "--data"}
        if files and len(held_out) == len(files):
            raise ConfigError(f"{path}: all of its files are held out, by their names; expected "
                              f"one to learn from")

        def splits(arrays):
            """What is learned of the arrays of all files, and what is held out."""
            train, held = ([a for file, a in arrays.items() if (file in held_out) == is_held]
                           for is_held in (False, True))
            if not held and flag == "--data":
                total = sum(map(len, train))
                keep = total - total // 10
                train, held = _between(train, 0, keep), _between(train, keep, total)
            return Joined(train), Joined(held)

        self.train, self.held_out = splits(arrays)
        self.train.filename = self.held_out.filename = path
        weighted, weights = _weights(arrays, [Path(p) for p in paths if os.path.isdir(p)])
        self.weights = dict(zip(("train", "held_out"), splits(weights) if weighted else
                                (None, None)))
        self.weighted = f"; weights of {len(weighted)} of {len(files)} files" if weighted else ""
        if not vocab_size:
            raise ConfigError(f"{flag} {path}: its files do not say how many ids there are; give "
                              f"--vocab_size (50257 for GPT-2's tokens)")
        self.tokenizer = tokenizer or Ids(vocab_size)
        self.fingerprint = hashlib.sha256("".join(
            file.name + sha256(file) for file in (*files, *weighted)).encode()).hexdigest()
        self.record = {**tokenizer_record(self.tokenizer), "vocab_size": vocab_size}
        parts = [part for a in arrays.values() for part in (a[:10**6], a[-10**6:]) if len(part)]
        if not parts:
            raise ConfigError(f"{flag} {path}: no tokens in it")
        least = min(int(part.min()) for part in parts)
        largest = max(int(part.max()) for part in parts)
        if least < 0 or largest >= vocab_size:
            raise ConfigError(f"{flag} {path}: has the id {least if least < 0 else largest}; the "
                              f"vocabulary has {vocab_size} (--vocab_size)")

    is_learned_in_part = False

    def documents(self, split: str) -> Any:
        """Refused: nothing says where the documents begin."""
        raise ConfigError(f"--data {self.folder}: its files do not say where documents begin; give "
                          f"--pack stream, or the text itself")

    def __str__(self) -> str:
        kind = "" if self.tokenizer.kind == "ids" else f" of {self.tokenizer.kind}"
        return (f"{self.folder}: {len(self.train):,} tokens to learn from, {len(self.held_out):,} "
                f"held out; {self.train.dtype} ids{kind}, of {self.record['vocab_size']:,}"
                f"{self.weighted}")


def _between(arrays, first, last):
    """The tokens from number `first` to `last` of these arrays, as arrays."""
    found, at = [], 0
    for a in arrays:
        found.append(a[max(first - at, 0):max(last - at, 0)])
        at += len(a)
    return [a for a in found if len(a)]


def _weights(arrays, folders):
    """(the files of weights next to token files, {token file: its weights}) for {token file: its
    tokens}. Without a file, they are 1, and take no memory. In `folders` given as a whole, weights
    of no token file are refused."""
    for path in (path for folder in folders for path in folder.glob(f"*{WEIGHTS}")):
        name = path.name.removesuffix(WEIGHTS)
        if not any(path.with_name(f"{name}{end}").exists() for end in (".bin", ".npy")):
            raise ConfigError(f"{path}: weights of no token file; expected {name}.bin or "
                              f"{name}.npy next to it")
    files, found = [], {}
    for file, tokens in arrays.items():
        path, count = file.with_suffix(WEIGHTS), len(tokens)
        found[file] = np.broadcast_to(np.float32(1), count)
        if path.exists():
            files.append(path)
            found[file] = _npy(path, ("float16", "float32"), "float16 or float32")
            if len(found[file]) != count:
                raise ConfigError(f"{path}: {len(found[file]):,} weights for the {count:,} tokens "
                                  f"of {file.name}; expected one for each")
            for start in (0, max(count - 10**6, 0)):        # (the others when they are read)
                finite_weights(found[file], start, 10**6)
    return files, found


def _npy(path, dtypes, expected):
    """The array of one dimension in a file, mapped into memory."""
    found = read_npy(path)
    if found.ndim != 1 or not {found.dtype.name, found.dtype.kind} & {*dtypes}:
        raise ConfigError(f"{path}: {found.dtype}{list(found.shape)}; expected one dimension of "
                          f"{expected}")
    return found


def _open(path: Path) -> np.ndarray:
    """The tokens of a file, mapped into memory."""
    size = path.stat().st_size
    if path.suffix == ".npy":
        return _npy(path, "iu", "whole numbers")
    header = np.fromfile(path, "<i4", 256) if size >= HEADER else np.zeros(1, int)
    if header[0] in MAGIC:
        if header[1] != MAGIC[header[0]][0]:
            raise ConfigError(f"{path}: llm.c's format, version {header[1]}; expected version "
                              f"{MAGIC[header[0]][0]}")
        dtype, count = np.dtype(MAGIC[header[0]][1]), int(header[2])
        if size != HEADER + count * dtype.itemsize:
            raise ConfigError(f"{path}: {size:,} bytes; its header says {count:,} tokens of "
                              f"{dtype}, which are {HEADER + count * dtype.itemsize:,}: it was cut "
                              f"short, or is damaged")
        return np.memmap(path, dtype, "r", HEADER)
    if size % 2 or not size:
        raise ConfigError(f"{path}: {size:,} bytes, which is not a whole number of uint16 tokens")
    # In uint32, the upper half of each number is 0, or small.
    halves = np.fromfile(path, "<u2", 2**16)
    low, high = halves[::2], halves[1::2]
    is_32 = size % 4 == 0 and len(halves) > 2 and low.any() and (
        high.max() < 16 < low.max() or not high.any())
    if is_32 and size % 8 == 0 and not low[1::2].any():
        raise ConfigError(f"{path}: every second token of 32 bits is 0, as if it were of 64 bits; "
                          f"expected uint16 or uint32 (or a .npy, which says what it has)")
    return np.memmap(path, np.uint32 if is_32 else np.uint16, "r")


