"""python train.py --report RUN: where the time of a run went, over all its starts and processes.

    accounts_of     reads a run's notes: a start's seconds by cause, for each process
    total           adds up a process's starts, with the time between them and what was made again
    text            the table

A process notes its seconds in log-N.hours.jsonl (zigzag/core/hours.py). Nothing here imports jax.
"""

import fnmatch
import json
from pathlib import Path
from typing import NamedTuple, Sequence

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.hours import CAUSES
from zigzag.core.parts import mirrors, place

# The order of a table's rows, and what they say besides the names of the causes.
ROWS = {"step": "steps that count", "again": "repeated after a crash",
        "data": "waiting for data", "evaluation": "evaluations", "save": "waiting for saves",
        "start": "starting", "restore": "reading checkpoints", "compile": "compiling",
        "stopped": "between a start's last note and the next start"}
WIDTH = 40      # characters of the bar

Notes = list[dict[str, float]]


class Total(NamedTuple):
    """A process's account of a run."""
    seconds: dict[str, float]       # for each of ROWS
    again: int                      # steps made again
    starts: int
    steps: int                      # the updates the run has made

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())


def run(report: Sequence[str]) -> None:
    """Print the report of each run."""
    for number, folder in enumerate(report):
        print("\n" * (number > 0) + text(folder, accounts_of(folder)))


def accounts_of(run: str) -> list[Total]:
    """Return the account of each process of a run."""
    folder, names = place(run), "log-*.hours.jsonl"
    mirror = mirrors.get(folder)
    if mirror and not list(folder.glob(names)):     # --report doesn't fetch a bucket's logs
        mirror.fetch(fnmatch.filter(mirror.there, names))
    paths = sorted(folder.glob(names), key=lambda path: (len(path.name), path.name))
    found = [total(starts) for path in paths if (starts := _starts(path))]
    if not found:
        raise ConfigError(f"--report {run}: no log-0.hours.jsonl there; give the --out of a run "
                          f"that has begun to train")
    return found


def _starts(path: Path) -> list[Notes]:
    """Return the notes of each start, in order."""
    starts: list[Notes] = []
    for line in path.read_bytes().splitlines():
        try:
            note = json.loads(line)
            numbers = {name: float(note[name]) for name in ("at", "from", "now", *CAUSES)}
        except (ValueError, TypeError, KeyError):       # a process was killed while writing it
            continue
        if note.get("is_first") or not starts:
            starts.append([])
        starts[-1].append(numbers)
    return starts


def total(starts: list[Notes]) -> Total:
    """Add up a process's starts. If a start goes on from an earlier step than those before it had
    reached, the steps between were made again, and the notes say how long they had taken."""
    seconds, again = dict.fromkeys(ROWS, 0.0), 0
    kept = [notes[-1]["at"] for notes in starts]        # the last step of each start that counts
    for number, notes in enumerate(starts):
        for name in CAUSES:
            seconds[name] += notes[-1][name]
        if number:
            # A second run in the same process counts the first one as its start.
            gap = notes[0]["from"] - starts[number - 1][-1]["now"]
            seconds["stopped" if gap > 0 else "start"] += gap
        goes_on = notes[0]["at"]
        for i in range(number):
            if kept[i] > goes_on:
                at, spent = ([note[name] for note in starts[i]] for name in ("at", "step"))
                begin, end = np.interp([goes_on, kept[i]], at, spent)
                seconds["step"] -= end - begin
                seconds["again"] += end - begin
                first = max(goes_on, at[0])
                again += int(kept[i] - first)
                kept[i] = first
    return Total(seconds, again, len(starts), int(starts[-1][-1]["at"]))


def text(run: str, found: Sequence[Total]) -> str:
    """Return the table: for each cause its seconds, averaged over processes, its share of the wall
    clock, and a bar. If processes differ by more than a hundredth, give their range as well."""
    first, count = found[0], len(found)
    wall = sum(one.wall for one in found) / count
    progress = sum(one.seconds["step"] for one in found) / count / wall
    lines = [f"{run}: {first.steps:,} steps in {_time(wall)}, {progress:.1%} of it "
             f"progress ({first.starts:,} start{'s' * (first.starts != 1)}, "
             f"{count:,} process{'es' * (count != 1)})"]
    for name, what in ROWS.items():
        shares = [one.seconds[name] / one.wall for one in found]
        mean = sum(shares) / count
        if not any(shares):
            continue
        varies = max(shares) - min(shares) > 0.01
        lines.append(f"  {name:10} {_time(mean * wall):>10} {mean:6.1%}  "
                     f"{'#' * round(mean * WIDTH):{WIDTH}}  {what}"
                     + f", {first.again:,} step{'s' * (first.again != 1)}" * (name == "again")
                     + f" ({min(shares):.0%} to {max(shares):.0%} in a process)" * varies)
    return "\n".join(lines)


def _time(seconds):
    """Write a time as 4.2 s, 3:07 min or 12:05 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    larger, unit = (seconds, "min") if seconds < 3600 else (seconds / 60, "h")
    return f"{int(larger // 60)}:{int(larger % 60):02} {unit}"
