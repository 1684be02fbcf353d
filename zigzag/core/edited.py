"""Which files have passed the tests, and which of them were edited since.

    pytest test_all.py, if all of it passes      writes .tested: a hash of each file (conftest.py)
    a run on several devices, if a hash differs  first compares its loss and its gradients with one
                                                 device's (must_compare in
                                                 zigzag/run/custom_loss.py)

A run does not compare a network's own loss at its start, because the tests have compared it on
every axis. After an edit that no longer holds, until the tests pass again.

After an edit of a network's loss, shard.py, train.py or the machinery below them (MACHINERY), the
loss on a mesh may differ from one device's. The record includes data.py and sample.py, but an edit
of these two triggers no comparison: no loss imports them, and the mesh and the single device get
the same batch.

test_all.py trains model.py's network. The networks of published/ have their tests in
tests/published. A run of one of them looks up the folder published/ instead of model.py, and
test_all.py does not renew that entry. When the tests of published/ have passed:

    python -m zigzag.core.edited        records published/
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Sequence

from zigzag.core.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
NAME = ".tested"
# What every loss on a mesh depends on, below model.py and shard.py.
MACHINERY = ("zigzag/core/mesh.py", "zigzag/parallel", "zigzag/run/modes.py")
FILES = ("model.py", "shard.py", "train.py", "data.py", "sample.py", *MACHINERY)


def hash_of(path: Path) -> str:
    """The hash of a file's text, or of all Python files in a folder; "" if it cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.name.encode() + file.read_bytes().replace(b"\r\n", b"\n"))
    except OSError:
        return ""
    return digest.hexdigest()[:12]


# {file or folder: its hash}, computed once, at import: the code that this process runs.
RUNNING = {name: hash_of(ROOT / name) for name in (*FILES, "published")
           if name in FILES or (ROOT / name).exists()}


def read_record() -> dict[str, str]:
    """{file or folder: its hash when its tests passed}; {} without a record that can be read."""
    try:
        record = json.loads((ROOT / NAME).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def renew_record(names: Sequence[str]) -> bool:
    """Record that these files, as this process imported them, have passed their tests. Return
    whether the record changed."""
    old = read_record()
    new = old | {name: RUNNING[name] for name in names if name in RUNNING}
    if new != old:
        write_whole(ROOT / NAME, json.dumps(new).encode() + b"\n")
    return new != old


def file_of(function: Any) -> str:
    """The record's name for the file of a function, or "published" if it is in that folder. For a
    function outside the recorded files, the full path of its file."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = Path(getattr(module, "__file__", None) or "an unknown file").resolve()
    if path.parent == ROOT / "published":
        return "published"
    return path.name if path.parent == ROOT else str(path)


def why_untested(names: Sequence[str]) -> str:
    """A text that names the files among these that were edited since their tests passed, or whose
    tests have no record of passing; "" if none."""
    record, tests = read_record(), "the tests" if "published" in names else "test_all.py"
    edited = [name for name in names
              if not RUNNING.get(name) or record.get(name) != RUNNING[name]]
    return f"{' and '.join(edited)} edited since {tests} passed" if edited else ""


if __name__ == "__main__":
    renew_record(["published"])
