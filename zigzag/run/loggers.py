"""Sends a run's numbers to fit's own `log` and to the --log loggers (tools/trackers.py), besides
metrics.jsonl. Only process 0 logs. If a logger fails, the run turns it off and continues.
"""

import contextlib
import json
import secrets
from typing import Any, Callable, Sequence

import jax

from zigzag.core.errors import one_line
from zigzag.core.files import numbers_of, write_json
from zigzag.core.options import Values
from zigzag.core.parts import part, place


def names_of(config: Any) -> Sequence[str]:
    """Return the loggers that --log names; the option comes from tools/."""
    return getattr(config, "log", ())


def check(config: Any) -> None:
    """Reject loggers in --log that can't be opened."""
    if names := names_of(config):
        part("tools.trackers", f"--log {' '.join(names)}").check(names, config.out)


class Loggers(contextlib.AbstractContextManager):
    """A run's open loggers, including fit's own `log`, if any. This is a context manager that
    closes them when it exits."""

    def __init__(self, names: Sequence[str], out: str, began: int, config: Values,
                 log: Callable | None, say: Callable):
        """`began` is the number of updates made so far; `say` prints a line."""
        self.say, self.opened, folder = say, {}, place(out)      # {name: (log, close)}

        def open_one():
            opener = part("tools.trackers", shown).LOGGERS[name]
            self.opened[shown] = opener(folder, _own_id(folder), began, config)

        if jax.process_index():
            return
        if log:
            self.opened["fit's log"] = log, lambda: None
        for name in sorted({*names} - {"none"}):
            shown = f"--log {name}"
            self._try(shown, open_one)

    def write(self, row: Values) -> None:
        """Log a line of metrics.jsonl."""
        for name, (log, _) in [*self.opened.items()]:
            self._try(name, lambda: log(row["step"], numbers_of(row)))

    def __exit__(self, *_: Any) -> None:
        """Close the loggers, and wait until they have written everything."""
        for name, (_, close) in [*self.opened.items()]:
            self._try(name, close)

    def _try(self, name, do):
        try:
            do()
        except (Exception, SystemExit) as e:
            self.opened.pop(name, None)
            self.say(f"warning  {name} failed and is off from here on: {type(e).__name__}: "
                     f"{one_line(e)}")


def _own_id(out):
    """Return the id by which the loggers know this run; its folder stores the id."""
    path = out / "log_id.json"
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(4)})
    return json.loads(path.read_text())["id"]
