"""Where a run's hours go: every second of a process has one cause.

    start       what comes before the first step, apart from the next two
    restore     reading a checkpoint
    compile     compiling the step
    step        the steps, and whatever else happens while the devices work on one
    data        making a batch while no device works
    evaluation  evaluations, and the comparisons of --accept and --find_nan
    save        what the loop waits for: copying the state and, at the end, the last writes

A process notes these in log-N.hours.jsonl in the run's folder, from which accounts/spent.py makes
the report of a run with all its starts. No clock runs inside a step.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Iterator

CAUSES = "start", "restore", "compile", "step", "data", "evaluation", "save"
# A note is due after this many seconds, or after this fraction of the time so far.
INTERVAL, SHARE = 1.0, 1e-3


class Hours:
    """The seconds of each cause since `began`, a time of time.perf_counter."""

    def __init__(self, began: float):
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.lapped = dict(self.seconds)        # at the last lap
        self.cause, self.since, self.began = "start", began, began
        self.batch = 0.0                        # the seconds that the newest batch took
        self.file, self.due = None, 0.0

    def begin(self, cause: str) -> str:
        """Let the time from now on have this cause. Return the cause of the time until now."""
        before, now = self.cause, time.perf_counter()
        self.seconds[before] += now - self.since
        if before == "data":
            self.batch = now - self.since
        self.cause, self.since = cause, now
        return before

    @contextlib.contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Let the time inside have this cause."""
        before = self.begin(cause)
        try:
            yield
        finally:
            self.begin(before)

    def lap(self, was_busy: bool) -> tuple[float, float]:
        """Return the seconds of a step (with its data) and of saves since the last lap. If the
        devices `was_busy` while the newest batch was made, nothing waited for it."""
        self.begin(self.cause)
        step, data, save = (self.seconds[name] - self.lapped[name]
                            for name in ("step", "data", "save"))
        if was_busy:
            self.seconds["data"] -= self.batch
            self.seconds["step"] += self.batch
        self.lapped = dict(self.seconds)
        return step + data, save

    def summary(self) -> str:
        """Say how long this process has taken, and what took most of it."""
        passed = sum(self.seconds.values())
        most = sorted(self.seconds, key=self.seconds.get, reverse=True)[:4]
        return f"{passed:.0f} s: " + ", ".join(
            f"{name} {self.seconds[name] / passed:.0%}" for name in most)

    def note_in(self, path: Path) -> None:
        """Append the notes to this file from now on."""
        self.file = open(path, "a", buffering=1)
        self.file.write("\n")       # a killed process may have left half a line

    def note(self, at: int, is_last: bool = False) -> None:
        """If a note is due, write how much time each cause took, with the number of updates so far
        (`at`), the time at which this began and the time now."""
        self.begin(self.cause)
        passed = self.since - self.began
        if self.file and (passed >= self.due or is_last):
            numbers = {"from": time.time() - passed, "now": time.time(), **self.seconds}
            self.file.write(json.dumps({"at": at, "is_first": self.due == 0, **{
                name: round(x, 3) for name, x in numbers.items()}}) + "\n")
            self.due = passed + max(INTERVAL, SHARE * passed)
