"""Helpers shared by the data readers: lines of JSON, paths, numbers and .npy files."""

import errno
import json
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, did_you_mean, naming, one_line

Record = dict[str, Any]         # a JSON object
Marked = tuple[np.ndarray, np.ndarray]      # ids, and each one's weight or whether it is learned


def existing(path: str | Path, name: str = "") -> Path:
    """Return the path if it exists; otherwise raise a ConfigError that calls it `name`."""
    path = Path(path)
    try:
        path.stat()
    except OSError as e:
        near = [p.name for p in path.parent.glob("*")] if e.errno == errno.ENOENT else []
        raise ConfigError(f"{name or path!s:.200}: {e.strerror.lower()}"
                          + did_you_mean(path.name, near)) from None
    return path


def lacks(field: str, there: Sequence[str] | Record) -> str:
    """Return an error message for a missing field; `there` has the names that exist."""
    names = ", ".join(map(repr, list(there)[:5])) or "nothing"
    return f"no field {field!r}, it has {names[:80]}{did_you_mean(field, there)}"


def parsed(raw: str | bytes) -> Record:
    """Parse a line of JSON. Raise ConfigError unless it is an object."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        raise ConfigError(f"not JSON with an object ({text.strip()[:40]!r}); expected one on each "
                          f"line")
    return record


def texts_in(record: Record, fields: Sequence[str]) -> tuple[str, ...]:
    """Return the texts in these fields of a record. Raise ConfigError if any isn't text."""
    for field in fields:
        if field not in record:
            raise ConfigError(lacks(field, record))
        if not is_text(record[field]):
            raise ConfigError(f"{field!r} is {record[field]!r:.40}, which is not text, or has half "
                              f"a character; expected text")
    return tuple(record[field] for field in fields)


def texts_of(raw: str | bytes, where: str, fields: Sequence[str]) -> tuple[str, ...]:
    """Return the texts in these fields of a line of JSON. Any ConfigError names the line."""
    with naming(where):
        return texts_in(parsed(raw), fields)


def is_text(x: Any) -> bool:
    """Return whether x is a string without lone surrogates (half characters)."""
    try:
        return isinstance(x, str) and x.encode() is not None
    except UnicodeEncodeError:
        return False


def read_npy(path: Path) -> np.ndarray:
    """Memory-map the array in a .npy file."""
    return numbers_in(path, lambda: np.load(path, mmap_mode="r", allow_pickle=False))


def is_arrays(path: str | Path) -> bool:
    """Return whether the path is a .npz file, or a folder with a source.npy or no *.jsonl files."""
    path = Path(path)
    if not path.is_dir():
        return path.suffix == ".npz"
    return (path / "source.npy").exists() or not any(path.glob("*.jsonl"))


def numbers_in(where, read):
    """Return the result of read(): an array or a .npz. Reject dtypes that devices can't handle."""
    try:
        found = read()
    except Exception as e:      # numpy, zipfile and zlib each raise different errors
        raise ConfigError(f"{where} is damaged or not a numpy file ({one_line(e)})") from None
    if isinstance(found, np.lib.npyio.NpzFile):
        return found
    dtype = getattr(found, "dtype", np.dtype(object))
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ConfigError(f"{where}: an array of {dtype}; expected numbers of up to 64 bits")
    return found


def numbers_below(limit: float, array: Any, start: int, stop: int, dtype: Any, what: str,
                  expected: str) -> np.ndarray:
    """Return array[start:stop] in this dtype. If any number is negative, or not below the limit,
    raise a ConfigError that names the first such number and its position."""
    found = np.asarray(array[start:stop], dtype)
    if (bad := ~((found >= 0) & (found < limit))).any():
        at = int(bad.argmax())
        raise ConfigError(f"{getattr(array, 'filename', None) or 'the data'}: {what} {found[at]} "
                          f"at position {start + at}; {expected}")
    return found
