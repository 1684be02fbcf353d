"""Examples that are not windows of one long text.

    Pairs     lines of JSON, each with two texts     -> (source ids, target ids)
              or the name of an array and a text     -> (source array, target ids)
    Arrays    a .npz, or a folder of .npy files      -> {name: a row of that array}

Each has `train` and `held_out`, two sequences of examples (a tenth is held out; none, if `whole`);
`fingerprint`, a digest of the data; and str(), a description to print. Memory holds only the
offsets of the examples: an example is read when it is needed. This file needs numpy, not jax.
"""

import array
import contextlib
import functools
import hashlib
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, did_you_mean, human_bytes, one_line
from zigzag.core.files import sha256
from zigzag.disk.tokenizers import Tokenizer, is_tenth

# Compressed arrays have to be held in memory: at most this many bytes of them.
MOST_COMPRESSED = 2**32


class Part:
    """A part of a data set: a sequence of the examples with these numbers."""

    def __init__(self, example: Callable[[int], Any], numbers: np.ndarray):
        self.example, self.numbers = example, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < len(self.numbers):
            raise IndexError(i)
        return self.example(int(self.numbers[i]))


def _split(example, is_held_out, what, whole):
    """(train, held_out), two `Part`s, by marks for each example. If the marks hold out almost none
    or too many, the last tenth is held out instead. If `whole`, nothing is held out."""
    marks = np.array(is_held_out, bool)
    if whole:
        return Part(example, np.arange(len(marks))), Part(example, np.arange(0))
    if len(marks) < 2:
        raise ConfigError(f"{what}: {len(marks)} examples; expected at least two, one to train on "
                          f"and one to hold out")
    if not 0.03 < marks.mean() < 0.3:
        marks = np.arange(len(marks)) >= len(marks) - max(1, len(marks) // 10)
    return Part(example, np.flatnonzero(~marks)), Part(example, np.flatnonzero(marks))


def beside(own: Any, other: Any = None) -> tuple[Part, str, str]:
    """(the held-out examples, a description, a digest) of a data set, evaluated on `other` if that
    is given."""
    if other is None:
        return own.held_out, str(own), own.fingerprint
    digest = hashlib.sha256(f"{own.fingerprint} {other.fingerprint}".encode()).hexdigest()
    return other.train, f"{own}\n         evaluated on {other}", digest


def existing(path: str | Path, name: str = "") -> Path:
    """The path, if something is there; `name` is what a message calls it."""
    path = Path(path)
    try:
        is_there = path.exists()
    except OSError as e:        # (a name that is too long)
        raise ConfigError(f"{name or path!s:.200}: {e.strerror}") from None
    if not is_there:
        near = [p.name for p in path.parent.glob("*")]
        raise ConfigError(f"{name or path}: no such file or folder" + did_you_mean(path.name, near))
    return path


# -------------------------------------------------------------------------------------------
# Pairs of texts

class Pairs:
    """Pairs of texts from *.jsonl files, or folders of them; each line is an object with two texts.
    A pair is held out by the hash of its source. So adding a line moves no other, and training
    never sees the source of a held-out pair. For a model that reads pictures or sound, `shape` is
    that of a source, and the first text says where it is (named_array)."""

    def __init__(self, paths: str | Path | Sequence[str | Path], tokenizer: Tokenizer,
                 fields: tuple[str, str] = ("source", "target"), vocab_size: int = 0,
                 whole: bool = False, shape: tuple[int, ...] = ()):
        self.tokenizer, self.fields, self.shape = tokenizer, tuple(fields), shape
        self.vocab_size = vocab_size or tokenizer.vocab_size
        paths = [paths] if isinstance(paths, (str, Path)) else paths
        self.name = " ".join(map(str, paths))
        self.files = [file for path in paths for file in _jsonl_files(path)]
        # For each pair, its file, the offset of its first byte, and its line number.
        self.file, self.start, self.line = array.array("q"), array.array("q"), array.array("q")
        self.states = {}    # of each file, and of those of arrays that lines name
        is_held_out, digest = bytearray(), hashlib.sha256(json.dumps(self.fields).encode())
        arrays = set()
        for number, file in enumerate(self.files):
            start = 0
            self.states[file] = _state(file)
            with open(file, "rb") as f:
                for line, raw in enumerate(f, 1):       # (only \n ends a line of bytes)
                    if raw.strip():
                        source, _ = texts_of(raw, f"{file} line {line}", self.fields)
                        if shape:
                            named_array(source, f"{file} line {line}", file, shape)
                            arrays.add(array_file(source, file)[0])
                        is_held_out.append(is_tenth(source))
                        for list_, value in zip((self.file, self.start, self.line),
                                                (number, start, line)):
                            list_.append(value)
                    digest.update(raw)
                    start += len(raw)
        if not is_held_out:
            raise ConfigError(f"{self.name}: no line in it; expected files of "
                              f"{_expected(self.fields)}, one a line")
        for path in sorted(arrays):
            digest.update(sha256(path).encode())
        self.states |= {path: _state(path) for path in arrays}
        self.fingerprint = digest.hexdigest()
        self.train, self.held_out = _split(self._pair, is_held_out, self.name, whole)

    def _pair(self, i):
        """(source ids or array, target ids), with the tokenizer's own ends."""
        file = self.files[self.file[i]]
        where = f"{file} line {self.line[i]}"
        self._check(file)
        with open(file, "rb") as f:
            f.seek(self.start[i])
            texts = texts_of(f.readline(), where, self.fields)
        source = (self._array(texts[0], where, file) if self.shape else
                  self._ids(texts[0], where, self.fields[0]))
        return source, self._ids(texts[1], where, self.fields[1])

    def _check(self, path):
        if _state(path) != self.states[path]:
            raise ConfigError(f"{path} has changed since it was first read; start again")

    def _array(self, name, where, file):
        self._check(array_file(name, file)[0])
        return np.asarray(named_array(name, where, file, self.shape), np.float32)

    def _ids(self, text, where, field):
        ids = np.array(self.tokenizer.with_ends(text), np.int64)
        # (For an id that does not exist, a lookup would silently take another row.)
        if (bad := (ids < 0) | (ids >= self.vocab_size)).any():
            raise ConfigError(f"{where}: {field!r} has the id {ids[bad][0]}; the vocabulary has "
                              f"{self.vocab_size}")
        return ids.astype(np.int32)

    def __str__(self) -> str:
        return (f"{self.name}: {len(self.train):,} pairs to learn from, {len(self.held_out):,} "
                f"held out, {self.tokenizer.kind} of {self.tokenizer.vocab_size}")


def _state(path):
    """A value that changes when the file is written to."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def named_array(name: str, where: str, beside: str | Path, shape: tuple[int, ...]) -> np.ndarray:
    """The array of this shape that a line of the file `beside` names: that of a .npy file, as seen
    from the line's folder, or one row of it: "cat.npy", "pictures.npy:3"."""
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
    """(the file, the row in it or "") of the array that a line of the file `beside` names."""
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


def _expected(fields):
    return "{" + ", ".join(f'{json.dumps(field)}: "..."' for field in fields) + "}"


def lacks(field: str, record: dict[str, Any], expected: str = "") -> str:
    """What to say of an object without this field."""
    there = ", ".join(map(repr, list(record)[:5])) or "nothing"
    return (f"no field {field!r}, it has {there[:80]}" + (f"; {expected}" if expected else "")
            + did_you_mean(field, record))


def texts_of(raw: bytes, where: str, fields: Sequence[str]) -> tuple[str, ...]:
    """The texts in these fields of a line of JSON, or a ConfigError that names the line."""
    expected = f"expected one object a line: {_expected(fields)}"
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not JSON ({raw.decode(errors='replace').strip()[:40]!r}); "
                          f"{expected}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: {repr(record)[:40]} is not an object; {expected}")
    for field in fields:
        if field not in record:
            raise ConfigError(f"{where}: {lacks(field, record, expected)}")
        if not isinstance(record[field], str):
            raise ConfigError(f"{where}: {field!r} is {repr(record[field])[:40]}, which is not "
                              f"text; {expected}")
        try:
            record[field].encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{where}: {field!r} has half a character (a lone surrogate); "
                              f"expected text") from None
    return tuple(record[field] for field in fields)


# -------------------------------------------------------------------------------------------
# Arrays

class Arrays:
    """The arrays of a .npz, or of a folder of .npy files. They have the names of a batch's entries,
    and each has one row for each example. `names` are the arrays that must exist; `below`, {name:
    count}, the bounds for ids and classes. The last tenth is held out. Nothing is unpickled."""

    def __init__(self, path: str | Path, names: Sequence[str] = (),
                 below: dict[str, int] | None = None, whole: bool = False):
        path = self.path = existing(path)
        self.below = below or {}
        files = [path] if path.is_file() else sorted(path.glob("*.npy"))
        self.arrays = dict(_npz(path) if path.is_file() else ((p.stem, read_npy(p)) for p in files))
        if not self.arrays:
            raise ConfigError(f"{path}: no arrays in it; expected a .npz, or a folder of .npy "
                              f"files")
        for name in names:
            if name not in self.arrays:
                raise ConfigError(f"{path}: no array {name!r}, it has {', '.join(self.arrays)}"
                                  + did_you_mean(name, self.arrays))
        if "seeds" in self.arrays:
            raise ConfigError(f"{path}: an array 'seeds', the name of every batch's random "
                              f"numbers; give it another name")
        lengths = {name: a.shape[0] if a.ndim else 0 for name, a in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            rows = ", ".join(f"{name} {n}" for name, n in lengths.items())
            raise ConfigError(f"{path}: its arrays have different numbers of rows ({rows}); "
                              f"expected one row in each for each example")
        self.fingerprint = hashlib.sha256("".join(
            p.name * path.is_dir() + sha256(p) for p in files).encode()).hexdigest()
        marks = np.zeros(next(iter(lengths.values())), bool)        # (_split takes the last tenth)
        self.train, self.held_out = _split(self._rows, marks, path, whole)

    def _rows(self, i):
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
        return (f"{self.path}: {len(self.train):,} examples to learn from, "
                f"{len(self.held_out):,} held out, of {shapes}")


def is_arrays(path: str | Path) -> bool:
    """Whether this is a .npz, or a folder with the array `source` or without lines of JSON."""
    path = Path(path)
    if not path.is_dir():
        return path.suffix == ".npz"
    return (path / "source.npy").exists() or not any(path.glob("*.jsonl"))


def open_arrays(paths: Sequence[str], shapes: dict[str, Any], limits: dict[str, int],
                flag: str = "--data", whole: bool = False) -> Arrays:
    """The arrays of --data (or `flag`) for a model whose batch has these shapes. Ids and classes
    must be below their `limits`, {name: count}."""
    if len(paths) != 1:
        raise ConfigError(f"{flag} {' '.join(paths) or 'is not given'}: expected one .npz, or one "
                          f"folder of .npy files, with {', '.join(shapes)}: a row in each for each "
                          f"example")
    arrays = Arrays(paths[0], list(shapes), whole=whole)
    if "tokens" in shapes:      # optional arrays of a batch
        more = {"mask": np.float32, **dict.fromkeys(("token_types", "segments", "positions"), int)}
        shapes = {**{name: np.broadcast_to(np.zeros((), dtype), shapes["tokens"].shape)
                     for name, dtype in more.items() if name in arrays.arrays}, **shapes}
    for name, shape in shapes.items():
        found, is_whole = arrays.arrays[name], shape.dtype.kind == "i"
        if found.shape[1:] != shape.shape[1:]:
            raise ConfigError(f"{flag} {paths[0]}: {name} has rows of {list(found.shape[1:])}; "
                              f"this model has {list(shape.shape[1:])}")
        if is_whole and found.dtype.kind not in "iu":
            raise ConfigError(f"{flag} {paths[0]}: {name} is {found.dtype}; expected whole numbers")
        if is_whole and limits.get(name):
            arrays.below[name] = limits[name]
    return arrays


def collate_arrays(examples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The batch {name: array [rows, ...]} of examples {name: row}. Numbers of 64 bits are converted
    to 32, which devices compute in."""
    batch = {name: np.stack([e[name] for e in examples]) for name in examples[0]}
    for name, x in batch.items():
        dtype = np.dtype({"i8": "i4", "u8": "i4", "f8": "f4"}.get(x.dtype.str[1:], x.dtype))
        if dtype.kind == "i" and x.dtype.itemsize == 8:
            bounds = np.iinfo(dtype)
            if (bad := (x < bounds.min) | (x > bounds.max)).any():
                raise ConfigError(f"{name} has {x[bad][0]}, which does not fit in 32 bits")
        batch[name] = x.astype(dtype.newbyteorder("="))
    return batch


def read_npy(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory."""
    with _read_whole(path):
        with open(path, "rb") as f:
            shape, is_fortran, dtype = _header(f, path)
            start = f.tell()
        return _mapped(path, start, shape, is_fortran, dtype)


def _npz(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) for each array of a .npz. A file of np.savez is memory-mapped; one of
    np.savez_compressed has to be held in memory."""
    total = 0
    with _read_whole(path), zipfile.ZipFile(path) as z:
        for info in z.infolist():
            name = info.filename.removesuffix(".npy")
            with z.open(info) as f:
                shape, is_fortran, dtype = _header(f, f"{path}: {name}")
                start = f.tell()
            size = dtype.itemsize * int(np.prod(shape, dtype=object))
            if start + size != info.file_size:
                raise ValueError(f"{name} has not the size that its shape says")
            if info.compress_type == zipfile.ZIP_STORED:
                first = _first_byte(path, info) + start
                yield name, _mapped(path, first, shape, is_fortran, dtype)
                continue
            total += size
            if total > MOST_COMPRESSED:
                raise ConfigError(f"{path}: more than {human_bytes(MOST_COMPRESSED)} of compressed "
                                  f"arrays, which have to be held in memory; write it with "
                                  f"np.savez, or as a folder of .npy files")
            with z.open(info) as f:
                yield name, np.lib.format.read_array(f, allow_pickle=False)


@contextlib.contextmanager
def _read_whole(path):
    """A context that turns the errors of reading a truncated or foreign file into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError, NotImplementedError,
            zipfile.BadZipFile, zlib.error) as e:
        raise ConfigError(f"{path} is damaged, or not what numpy writes ({one_line(e)})") from None


def _header(f, where):
    """(shape, whether it is in Fortran order, dtype) of a .npy header."""
    version = np.lib.format.read_magic(f)
    read = {(1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    shape, is_fortran, dtype = read(f) if read else ((), False, np.dtype(object))
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ConfigError(f"{where}: an array of {'objects' if dtype.hasobject else dtype}; "
                          f"expected numbers of up to 64 bits")
    return shape, is_fortran, dtype


def _first_byte(path, info):
    """The offset at which the content of a file in a zip begins: after a header with its name and
    an extra field."""
    with open(path, "rb") as f:
        f.seek(info.header_offset + 26)
        return info.header_offset + 30 + sum(np.frombuffer(f.read(4), "<u2").tolist())


def _mapped(path, start, shape, is_fortran, dtype):
    if 0 in shape or not shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if is_fortran else "C")
