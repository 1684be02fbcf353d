"""Token files written by other programs.

    .bin    uint16 or uint32 without a header (nanoGPT), or after llm.c's 1,024-byte header
    .npy    one-dimensional arrays of integers

--data takes a file, several files, a pattern or a folder, whose files it reads in name order. Files
with val, valid, validation, test or held_out in their names are held out; if there are none, the
last tenth of the tokens is. Token files don't say which ids exist or where documents begin. Next to
a.bin or a.npy, a.weights.npy holds the tokens' weights as targets, float16 or float32 (default: 1).
"""

import glob
import os
import re
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.files import digest, read_at_random, sha256
from zigzag.disk.lines import read_npy
from zigzag.disk.output import SPLITS
from zigzag.disk.packing import ids_of
from zigzag.disk.tokenizers import Ids, Tokenizer, tokenizer_record
from zigzag.disk.weights import finite_weights

# llm.c's header is 256 32-bit integers. The first three are a magic number, the version and the
# token count. MAGIC is {magic number: (version, dtype of the tokens)}.
HEADER = 1024
MAGIC = {20240520: (1, np.dtype("uint16")), 20240801: (7, np.dtype("uint32"))}
HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test|held_out)([^a-z]|$)", re.I)
WEIGHTS = ".weights.npy"
LOOK = 10**6        # how many ids to check at each end of a file before using any


class Joined:
    """Several arrays concatenated without copying, to slice like a single array."""

    def __init__(self, arrays: Sequence[np.ndarray], filename: str):
        for array in arrays:
            read_at_random(array)
        self.arrays = [np.asarray(array) for array in arrays]    # slices of a memmap are slow
        self.starts = np.cumsum([0, *map(len, arrays)])
        self.dtype = arrays[0].dtype if arrays else np.dtype(np.uint16)
        self.filename = filename        # for messages

    def __len__(self) -> int:
        return int(self.starts[-1])

    def between(self, start: int, stop: int) -> list[np.ndarray]:
        """Return the elements from `start` to `stop`, as slices of the arrays that hold them."""
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        last = int(np.searchsorted(self.starts, stop, "left"))
        return [array[max(start - at, 0):max(stop - at, 0)] for array, at in zip(
            self.arrays[first:last], self.starts[first:last].tolist())]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        return np.concatenate([np.zeros(0, self.dtype), *self.between(start, stop)])


def token_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the token files at these paths, in order, without duplicates. A path is a file, a
    folder or a pattern. Return [] if a path is anything else, or if the token files are mixed with
    other files and none has train in its name."""
    groups = []         # each has a folder's files, or the files that a path names
    for path in map(str, paths):
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        together = {}   # {a folder, or '': the files}
        for match in map(Path, matches):
            of = sorted(filter(Path.is_file, match.iterdir())) if match.is_dir() else [match]
            together.setdefault(match if match.is_dir() else "", []).extend(of)
        groups += list(together.values()) or [[]]
    chosen = list(map(_chosen, groups))
    files = [file for group in chosen for file in group] if all(chosen) else []
    return list({file.resolve(): file for file in files}.values())


def _chosen(there):
    """Return the token files in a group, or [] if the group doesn't count as token files."""
    there = [file for file in there if not file.name.endswith(WEIGHTS)]
    files = [file for file in there if file.suffix in (".bin", ".npy")]
    is_prepared = any(file.name == "data.json" for file in there)
    has_train = any("train" in file.stem for file in files)
    return files if files == there or has_train and not is_prepared else []


class TokenFiles:
    """The token files at these paths (see token_files), with the same attributes as a prepared
    folder (corpus.Corpus)."""

    is_learned_in_part = False

    def __init__(self, paths: Sequence[str | Path], vocab_size: int,
                 tokenizer: Tokenizer | None = None, flag: str = "--data"):
        self.folder = " ".join(map(str, paths))     # for messages
        name, files = f"{flag} {self.folder}", token_files(paths)
        if not vocab_size:
            raise ConfigError(f"{name}: its files do not say how many ids there are; give "
                              f"--vocab_size (50257 for GPT-2's tokens)")
        held_out = [file for file in files if flag == "--data" and HELD_OUT.search(file.stem)]
        if held_out == files:
            raise ConfigError(f"{name}: all of its files are held out, by their names; expected "
                              f"one to train on")

        # Held-out files go last, and the model learns the first `keep` tokens.
        ordered = sorted(files, key=lambda file: file in held_out)
        arrays = list(map(_open, ordered))
        keep = sum(map(len, arrays[:len(files) - len(held_out)]))
        if flag == "--data" and not held_out:
            keep -= keep // 10

        def splits(arrays):
            """Split the arrays of all files into the training part and the held-out part."""
            whole = Joined(arrays, self.folder)
            return (Joined(whole.between(0, keep), self.folder),
                    Joined(whole.between(keep, len(whole)), self.folder))

        self.train, self.held_out = splits(arrays)
        weights = list(map(_weights, ordered, arrays))
        weighted = [path for file in files if (path := file.with_suffix(WEIGHTS)).exists()]
        self.weights = dict(zip(SPLITS, splits(weights) if weighted else (None, None)))
        self.weighted = f"; weights of {len(weighted)} of {len(files)} files" if weighted else ""
        # Reject out-of-range ids and weights at both ends of a file now. The rest is checked when
        # it is read.
        for tokens, numbers in zip(arrays, weights):
            for start in (0, max(len(tokens) - LOOK, 0)):
                finite_weights(numbers, start, LOOK)
                ids_of(tokens, start, start + LOOK, vocab_size)
        if not len(self.train):
            raise ConfigError(f"{name}: no tokens in it")
        self.tokenizer = tokenizer or Ids(vocab_size)
        self.record = {**tokenizer_record(self.tokenizer), "vocab_size": vocab_size}
        self.fingerprint = digest("".join(
            file.name + sha256(file) for file in [*files, *weighted]).encode())

    def documents(self, split: str) -> Any:
        """Raise ConfigError, because token files don't say where documents begin."""
        raise ConfigError(f"--data {self.folder}: its files do not say where documents begin; give "
                          f"--pack stream, or the text itself")

    def __str__(self) -> str:
        kind = "" if self.tokenizer.kind == "ids" else f" of {self.tokenizer.kind}"
        return (f"{self.folder}: {len(self.train):,} tokens to train on, {len(self.held_out):,} "
                f"held out; {self.train.dtype} ids{kind}, of "
                f"{self.record['vocab_size']:,}{self.weighted}")


def _weights(file, tokens):
    """Return the weights stored next to a token file; by default, 1s that take no memory."""
    path = file.with_suffix(WEIGHTS)
    if not path.exists():
        return np.broadcast_to(np.float32(1), len(tokens))
    weights = _npy(path, ("float16", "float32"), "float16 or float32")
    if len(weights) != len(tokens):
        raise ConfigError(f"{path}: {len(weights):,} weights for the {len(tokens):,} tokens of "
                          f"{file.name}; expected one for each")
    return weights


def _npy(path, dtypes, expected):
    """Memory-map the one-dimensional array in a file."""
    found = read_npy(path)
    if found.ndim != 1 or not {found.dtype.name, found.dtype.kind} & {*dtypes}:
        raise ConfigError(f"{path}: {found.dtype}{list(found.shape)}; expected one dimension of "
                          f"{expected}")
    return found


def _open(path: Path) -> np.ndarray:
    """Memory-map a file's tokens."""
    size = path.stat().st_size
    if path.suffix == ".npy":
        return _npy(path, "iu", "integers")
    header = np.fromfile(path, "<i4", 3).tolist() if size >= HEADER else [0]
    if header[0] in MAGIC:
        version, dtype = MAGIC[header[0]]
        expected = HEADER + header[2] * dtype.itemsize
        if header[1] != version or size != expected:
            raise ConfigError(f"{path}: {size:,} bytes; its header says {header[2]:,} tokens in "
                              f"llm.c's format, version {header[1]}; expected {expected:,} bytes "
                              f"in version {version}")
        return np.memmap(path, dtype, "r", HEADER)
    # In uint32 ids, the upper half of each number is zero or small.
    halves = np.fromfile(path, "<u2", 2**16)
    low, high = halves[::2], halves[1::2]
    is_32 = size % 4 == 0 and len(halves) > 2 and low.any() and (
        high.max() < 16 < low.max() or not high.any())
    if size % 2 or not size or is_32 and size % 8 == 0 and not low[1::2].any():
        raise ConfigError(f"{path}: {size:,} bytes, which are not tokens in uint16 or uint32; save "
                          f"64-bit tokens as .npy")
    return np.memmap(path, np.uint32 if is_32 else np.uint16, "r")
