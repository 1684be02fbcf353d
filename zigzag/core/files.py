"""File helpers: write files whole or not at all, undo moves into a run's folder, read JSON, lock,
hash, wait for files on shared disks, and reject folders that a command must not fill."""

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Callable, Iterator

import numpy as np

from zigzag.core.errors import ConfigError, listed

try:
    import fcntl
except ImportError:         # some systems lack it
    fcntl = None


# The file that orbax writes last: a checkpoint with it is complete.
MARKER = "_CHECKPOINT_METADATA"
# Harmless names in a folder that a command fills: files from git, macOS, disks, notebooks and
# launchers, check_can_make's trial folders, and logs.
HARMLESS = (r"\.git(ignore|keep|attributes)|\.(DS_Store|hydra|ipynb_checkpoints)"
            r"|\.(nfs|try-)\w+|lost\+found"
            r"|(logs?|stdout|stderr|nohup)([-_.\d].*)?|.*\.(log|out|err)")


def anyway(path: Path) -> bool:
    """A condition that holds for every path: only the name matters."""
    return True


def check_others(folder: Path, flag: str, maker: str,
                 own: dict[str, Callable[[Path], Any]] = {}) -> None:
    """Refuse to fill the folder in `flag` if it holds anything besides harmless files and files
    left by the command `maker`. `own` is {regex for names it may leave: condition on the path}."""
    known = {HARMLESS: anyway, **own}
    try:
        others = sorted(path.name for path in folder.iterdir() if not any(
            re.fullmatch(names, path.name) and is_own(path) for names, is_own in known.items()))
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"{flag} {folder}: {e.strerror}") from None
    if others:
        raise ConfigError(f"{flag} {folder} holds {listed(others, 3)}, which {maker} did not make; "
                          f"give a new folder")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: write a .part file next to it, then rename it."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def as_json(record: dict) -> bytes:
    return json.dumps(record, indent=1).encode() + b"\n"


def write_json(path: Path, record: dict) -> None:
    write_whole(path, as_json(record))


def check_can_make(out: str) -> None:
    """Reject a folder that we can't create or write to, before we spend work on its contents. Even
    for root, the only reliable test is to create something there."""
    path = there = Path(out).absolute()
    try:
        there = next(p for p in (path, *path.parents) if p.exists())
        os.rmdir(tempfile.mkdtemp(dir=there, prefix=".try-"))
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be created ({there}: {e.strerror})") from None


# For each open `taken_back`: the paths it has filled, each with a backup of what was there before,
# and a function that undoes all of it.
_placed: list[tuple[list[tuple[Path, Path]], Callable[[], None]]] = []


@contextlib.contextmanager
def taken_back(run: Path) -> Iterator[Callable[[Path, str], Path]]:
    """Yield a function put(source, name), which moves a file or folder into a run's folder and
    returns the new path. If the context ends before run_has_begun is called, it undoes all moves,
    so a rejected run leaves its folder as it was."""
    is_new, moved = not run.exists(), []

    def put(source, name):
        target, old = run / name, run / f"{name}.before"
        _remove(old)            # a killed process may have left one
        moved.append((target, old))
        if target.exists():
            os.replace(target, old)
        os.replace(source, target)
        return target

    def take_back():
        while moved:
            target, old = moved.pop()
            _remove(target)
            if old.exists():
                os.replace(old, target)
        if is_new:
            with contextlib.suppress(OSError):
                run.rmdir()             # works only if it's empty

    _placed.append((moved, take_back))
    try:
        yield put
    finally:
        _placed.pop()
        take_back()


def run_has_begun() -> None:
    """Keep whatever `put` has moved into the folder of this command's run."""
    for moved, _ in _placed:
        while moved:
            _remove(moved.pop()[1])


def take_back_all() -> None:
    """Undo all of `put`'s moves, before this process exits without unwinding."""
    for _, take_back in reversed(_placed):
        take_back()


def _remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(file: IO) -> None:
    """Lock an open file until it is closed or the process ends. Raise BlockingIOError if another
    process holds the lock."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_json(path: Path) -> Any:
    """Read a JSON file from a published model's folder. If that fails, a ConfigError says why."""
    try:
        return json.loads(path.read_text())
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}; expected a folder with a published model "
                          f"(config.json and model.safetensors)") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is damaged: not JSON") from None


def check_format(record: dict[str, Any], wanted: int, name: str, how: str) -> None:
    """Reject a folder (`name` in messages) whose record doesn't have the expected format number.
    `how` tells the user what to do."""
    if record.get("format") != wanted:
        has = f"format {record['format']!r:.20}" if "format" in record else "no format number"
        raise ConfigError(f"{name}: {has}; this code reads and writes only format {wanted}: {how}")


def digest(content: bytes) -> str:
    """Return the hex digest of these bytes."""
    return hashlib.sha256(content).hexdigest()


def record_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in one of our own files, or {} if the file is missing or damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def sha256(path: Path) -> str:
    """Return the hex digest of a file of up to 256 MiB. For a larger file, return a digest of its
    size plus 256 evenly spaced 1 MiB chunks."""
    size, found = path.stat().st_size, hashlib.sha256()
    starts = range(0, size, 2**20)
    if size > 2**28:
        found.update(str(size).encode())
        starts = [i * (size - 2**20) // 255 for i in range(256)]
    with open(path, "rb") as f:
        for start in starts:
            f.seek(start)
            found.update(f.read(2**20))
    return found.hexdigest()


def read_at_random(array: Any) -> None:
    """Tell the operating system that we read a memory-mapped array in random order. Otherwise it
    reads far ahead every time, and reading 64 windows of a 20 GB file takes 100 times as long."""
    mapping = getattr(array, "_mmap", None)
    if mapping is not None and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def appears(is_there: Callable[[], bool], folder: Path, seconds: float) -> bool:
    """Return whether is_there() becomes true within this many seconds. On a shared disk, a file
    written by another machine may take a while to appear; listing the folder helps."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if is_there():
                return True
        if time.monotonic() > until:
            return False
        for place in (folder.parent, folder):
            with contextlib.suppress(OSError):
                os.listdir(place)
        time.sleep(0.25)


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics.jsonl, except its step. A list, such as the load per
    expert, becomes two numbers: its smallest and its largest."""
    found = {}
    for name, x in row.items():
        if isinstance(x, list) and np.size(x):
            numbers = np.array(x, float)
            found[f"{name}/smallest"] = float(numbers.min())
            found[f"{name}/largest"] = float(numbers.max())
        elif isinstance(x, (int, float)) and name != "step":
            found[name] = float(x)
    return found
