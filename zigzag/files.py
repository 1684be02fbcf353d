"""Two things about files that data and runs share."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Callable


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write the whole file or nothing."""
    part = path.with_name(path.name + ".part")
    with open(part, "w") as f:
        f.write(json.dumps(record, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def appears(is_there: Callable[[], bool], folder: Path, seconds: float) -> bool:
    """Whether something in the folder is there, or comes. What another machine wrote may take a
    while to be seen, and listing the folder helps."""
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
