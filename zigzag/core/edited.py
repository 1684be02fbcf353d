"""Tracks which files have passed the tests, and which were edited since.

    pytest test_all.py, if all of it passes      writes .tested: a hash of each file (conftest.py)
    a run on several devices, if a hash differs  first checks its loss and gradients against a
                                                 single device's (must_compare in
                                                 zigzag/run/custom_loss.py)

Normally a run doesn't check a network's own loss when it starts, because the tests have checked it
on every axis. After an edit, that no longer holds until the tests pass again.

After an edit to a network's loss, shard.py, train.py or the machinery below them (MACHINERY), the
loss on a mesh may differ from a single device's. The record also covers data.py and sample.py, but
editing those two triggers no check: no loss imports them, and the mesh and the single device get
the same batch.

test_all.py trains model.py's network. The tests for the networks in published/ are in
tests/published. A run of such a network looks up the folder published/ instead of model.py, and
test_all.py doesn't renew that entry. Once the tests of published/ have passed, run:

    python -m zigzag.core.edited        records published/
"""

import json
import sys
from pathlib import Path
from typing import Any, Sequence

from zigzag.core.files import digest, record_in, write_whole

ROOT = Path(__file__).resolve().parents[2]
NAME = ".tested"
# The code below model.py and shard.py that every loss on a mesh depends on.
MACHINERY = ("zigzag/core/mesh.py", "zigzag/parallel", "zigzag/run/modes.py")
FILES = ("model.py", "shard.py", "train.py", "data.py", "sample.py", *MACHINERY)


def hash_of(path: Path) -> str:
    """Hash a file's text, or all Python files in a folder; return "" if it can't be read."""
    try:
        return digest(b"".join(
            file.name.encode() + file.read_bytes().replace(b"\r\n", b"\n")
            for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])))[:12]
    except OSError:
        return ""


# {file or folder: its hash}, computed once at import, for the code that this process runs.
RUNNING = {name: hash_of(ROOT / name) for name in (*FILES, "published")
           if name in FILES or (ROOT / name).exists()}


def read_record() -> dict[str, str]:
    """Return {file or folder: its hash when its tests passed}, or {} if no record is readable."""
    return record_in(ROOT / NAME)


def renew_record(names: Sequence[str]) -> bool:
    """Record that these files have passed their tests, in the version that this process imported.
    Return whether the record changed."""
    old = read_record()
    new = old | {name: RUNNING[name] for name in names if name in RUNNING}
    if new != old:
        write_whole(ROOT / NAME, json.dumps(new).encode() + b"\n")
    return new != old


def file_of(function: Any) -> str:
    """Return the record's name for a function's file, or "published" if the file is in that folder.
    For a function outside the recorded files, return its file's full path."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = Path(getattr(module, "__file__", None) or "an unknown file").resolve()
    if path.parent == ROOT / "published":
        return "published"
    return path.name if path.parent == ROOT else str(path)


def why_untested(names: Sequence[str]) -> str:
    """Return a message naming any of these files that have been edited since their tests passed, or
    that have no record of passing; "" if there are none."""
    record, tests = read_record(), "the tests" if "published" in names else "test_all.py"
    edited = [name for name in names
              if not RUNNING.get(name) or record.get(name) != RUNNING[name]]
    return f"{' and '.join(edited)} edited since {tests} passed" if edited else ""


if __name__ == "__main__":
    renew_record(["published"])
