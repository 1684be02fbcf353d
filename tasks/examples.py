"""Examples other than windows of one long text.

    Pairs     lines of JSON, each with two texts     -> (source ids, target ids)
              or an array's name and a text          -> (source array, target ids)
    Arrays    a folder of .npy files, or a .npz      -> {name: a row of that array}

Each has `train` and `held_out`, two sequences of examples (a tenth is held out; none if `whole`);
`fingerprint`, a digest of the data; and str(), a description to print. Memory holds only each
example's location, and `[i]` reads an example on demand, but a .npz is loaded whole. This file
needs numpy, not jax.
"""

import array
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, one_line
from zigzag.core.files import digest, sha256
from zigzag.core.parts import here
from zigzag.disk.lines import existing, lacks, numbers_in, read_npy, texts_of
from zigzag.disk.mixture import Part
from zigzag.disk.tokenizers import Tokenizer, is_tenth


def _split(examples, is_held_out, what, whole):
    """Split the examples into two `Part`s, (train, held_out), by `is_held_out`. If that holds out
    too few or too many, hold out the last tenth instead. If `whole`, hold out nothing."""
    marks = np.array(is_held_out, bool)
    if whole:
        marks[:] = False
    elif len(marks) < 2:
        raise ConfigError(f"{what}: {len(marks)} examples; expected at least two, one to train on "
                          f"and one to hold out")
    elif not 0.03 < marks.mean() < 0.3:
        marks = np.arange(len(marks)) >= len(marks) - max(1, len(marks) // 10)
    return Part(examples, np.flatnonzero(~marks)), Part(examples, np.flatnonzero(marks))


def opened(config: Any, read: Callable) -> tuple[Any, Part, str, str]:
    """Read --data with read(paths, whole=...). Return (the data set, the held-out examples, a
    description, a digest). Held-out examples come from --held_out if given."""
    own = read(here(config.data), whole=bool(config.held_out))
    if not config.held_out:
        return own, own.held_out, str(own), own.fingerprint
    other = read(here(config.held_out), whole=True)
    return (own, other.train, f"{own}\n         evaluated on {other}",
            digest(f"{own.fingerprint} {other.fingerprint}".encode()))


# -------------------------------------------------------------------------------------------
# Pairs of texts

class Pairs:
    """Pairs of texts from *.jsonl files, or folders of them; each line is an object with two texts.
    A hash of the source decides whether a pair is held out. So adding a line never moves another,
    and training never sees a held-out pair's source. For a model that reads images or sound,
    `shape` is the shape of a source, and the first text names its file (named_array)."""

    def __init__(self, paths: str | Path | Sequence[str | Path], tokenizer: Tokenizer,
                 fields: tuple[str, str] = ("source", "target"), whole: bool = False,
                 shape: tuple[int, ...] = ()):
        self.tokenizer, self.fields, self.shape = tokenizer, tuple(fields), shape
        paths = [paths] if isinstance(paths, (str, Path)) else paths
        self.name = " ".join(map(str, paths))
        self.files = [file for path in paths for file in _jsonl_files(path)]
        self.states = list(map(_state, self.files))
        # Three numbers per pair: its file, its line, and the offset of its first byte.
        self.places, is_held_out, arrays = array.array("q"), bytearray(), set()
        found = hashlib.sha256(json.dumps(self.fields).encode())
        for number, file in enumerate(self.files):
            start = 0
            with open(file, "rb") as f:
                for line, raw in enumerate(f, 1):       # in bytes, only \n ends a line
                    if raw.strip():
                        where = f"{file} line {line}"
                        source, _ = texts_of(raw, where, self.fields)
                        if shape:
                            named_array(source, where, file, shape)
                            arrays.add(array_file(source, file)[0])
                        is_held_out.append(is_tenth(source))
                        self.places.extend((number, line, start))
                    found.update(raw)
                    start += len(raw)
        if not is_held_out:
            raise ConfigError(f"{self.name}: no lines in it; expected an object with the texts "
                              f"{' and '.join(self.fields)} on each line")
        for path in sorted(arrays):
            found.update(sha256(path).encode())
        self.fingerprint = found.hexdigest()
        self.train, self.held_out = _split(self, is_held_out, self.name, whole)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (source ids or array, target ids). Ids include the ends the tokenizer adds."""
        number, line, start = self.places[3 * i:3 * i + 3]
        file = self.files[number]
        where = f"{file} line {line}"
        if _state(file) != self.states[number]:
            raise ConfigError(f"{file} has changed since it was first read; start again")
        with open(file, "rb") as f:
            f.seek(start)
            source, target = texts_of(f.readline(), where, self.fields)
        source = (np.asarray(named_array(source, where, file, self.shape), np.float32)
                  if self.shape else self._ids(source, where, self.fields[0]))
        return source, self._ids(target, where, self.fields[1])

    def _ids(self, text, where, field):
        ids, count = np.array(self.tokenizer.with_ends(text), np.int64), self.tokenizer.vocab_size
        # For an id out of range, a lookup would silently take another row.
        if (bad := (ids < 0) | (ids >= count)).any():
            raise ConfigError(f"{where}: {field!r} has the id {ids[bad][0]}; the vocabulary has "
                              f"{count}")
        return ids.astype(np.int32)

    def __str__(self) -> str:
        return (f"{self.name}: {len(self.train):,} pairs to train on, {len(self.held_out):,} held "
                f"out, {self.tokenizer.kind} of {self.tokenizer.vocab_size}")


def _state(path):
    """Return a value that changes when the file is written to."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def named_array(name: str, where: str, beside: str | Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an array of this shape that a line in the file `beside` names. The name is a .npy file,
    relative to the folder of `beside`, or a single row of it: "cat.npy", "pictures.npy:3"."""
    path, row = array_file(name, beside)
    expected = (f"{where}: {name!r}: expected a .npy file with an array of {list(shape)}, or "
                f"one of its rows, as in pictures.npy:3")
    try:
        x = _open_npy(path, _state(path))
        x = x[int(row)] if row.isdecimal() else x
    except (OSError, ConfigError, IndexError, ValueError) as e:
        raise ConfigError(f"{expected} ({one_line(e)})") from None
    if x.shape != shape or row and not row.isdecimal():
        raise ConfigError(f"{expected}; it has {list(x.shape)}")
    return x


def array_file(name: str, beside: str | Path) -> tuple[Path, str]:
    """Return (file, row or "") for the array that a line in the file `beside` names."""
    path, _, row = name.partition(".npy:")
    return Path(beside).parent / (f"{path}.npy" if row else path), row


@functools.lru_cache(maxsize=64)
def _open_npy(path, state):
    return read_npy(path)


def _jsonl_files(path):
    path = existing(path)
    if path.is_file():
        return [path]
    files = [p for p in sorted(path.rglob("*.jsonl")) if p.is_file()
             and not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files:
        raise ConfigError(f"{path}: no *.jsonl file in this folder")
    return files


# -------------------------------------------------------------------------------------------
# Arrays

# Optional arrays in a batch of token ids: {name: whether they are integers}.
OPTIONAL = {"mask": False, "token_types": True, "task_types": True, "segments": True,
            "positions": True}


class Arrays:
    """The arrays in a folder of .npy files (memory-mapped) or in a .npz (loaded). Each array has
    the name of a batch entry and a row per example. `shapes` are the shapes of a model's batch; ids
    and classes must be below their `limits`, {name: count}. The last tenth is held out. Nothing is
    ever unpickled."""

    def __init__(self, path: str | Path, shapes: Mapping[str, Any] = {},
                 limits: Mapping[str, int] = {}, whole: bool = False):
        path = self.path = existing(path)
        files = [path] if path.is_file() else sorted(path.glob("*.npy"))
        self.arrays = _npz(path) if path.is_file() else {p.stem: read_npy(p) for p in files}
        if not self.arrays:
            raise ConfigError(f"{path}: no arrays in it; expected a .npz, or a folder of .npy "
                              f"files")
        lengths = {name: a.shape[0] if a.ndim else 0 for name, a in self.arrays.items()}
        if len(set(lengths.values())) > 1 or "seeds" in lengths:
            raise ConfigError(f"{path}: arrays with these rows: {lengths}; expected a row in each "
                              f"for each example, and no array named 'seeds' (each batch's random "
                              f"numbers)")
        wanted = {name: (x.shape[1:], x.dtype.kind == "i") for name, x in shapes.items()}
        if "tokens" in shapes:
            wanted = {name: (wanted["tokens"][0], is_whole) for name, is_whole in OPTIONAL.items()
                      if name in lengths} | wanted
        self.below = {}
        for name, (row, is_whole) in wanted.items():
            if name not in lengths:
                raise ConfigError(f"{path}: {lacks(name, lengths)}")
            found = self.arrays[name]
            if found.shape[1:] != row or is_whole and found.dtype.kind not in "iu":
                expected = "integers" if is_whole else "numbers"
                raise ConfigError(f"{path}: {name} has rows of {found.dtype}"
                                  f"{list(found.shape[1:])}; expected {expected} of {list(row)}")
            if is_whole and limits.get(name):
                self.below[name] = limits[name]
        self.fingerprint = digest("".join(
            p.name * path.is_dir() + sha256(p) for p in files).encode())
        marks = np.zeros(next(iter(lengths.values())), bool)    # so _split holds out the last tenth
        self.train, self.held_out = _split(self, marks, path, whole)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        rows = {name: np.asarray(a[i]) for name, a in self.arrays.items()}
        for name, count in self.below.items():
            x = rows[name]
            if (bad := (x < 0) | (x >= count)).any():
                raise ConfigError(f"{self.path}: {name} has {x[bad][0]} in row {i}; expected 0 to "
                                  f"{count - 1}")
        return rows

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {a.dtype}{list(a.shape[1:])}"
                           for name, a in self.arrays.items())
        return (f"{self.path}: {len(self.train):,} examples to train on, {len(self.held_out):,} "
                f"held out, of {shapes}")


def collate_arrays(examples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack examples {name: row} into a batch {name: array [rows, ...]}. Convert 64-bit numbers to
    32 bits, which devices compute in."""
    batch = {name: np.stack([e[name] for e in examples]) for name in examples[0]}
    for name, x in batch.items():
        if x.dtype.itemsize == 8:
            found = x.astype(np.float32 if x.dtype.kind == "f" else np.int32)
            if found.dtype.kind == "i" and (bad := found != x).any():
                raise ConfigError(f"{name} has {x[bad][0]}, which does not fit in 32 bits")
            x = found
        batch[name] = x.astype(x.dtype.newbyteorder("="))
    return batch


def _npz(path):
    """Read {name: array} from a .npz."""
    content = numbers_in(path, lambda: np.load(path, allow_pickle=False))
    return {name: numbers_in(f"{path}: {name}", lambda: content[name]) for name in content}
