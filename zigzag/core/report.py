"""The run's output. Process 0 prints; the others are silent.

    header       the devices and the mesh
    collectives  the bytes that a compiled update sends, next to what we expect
    step         a live line on a terminal, plain lines elsewhere
    evaluation   the held-out loss next to the training loss, and the model's predictions
    end          where the run is saved, and its held-out loss
"""

import collections
import math
import shutil
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Mapping, Sequence

import jax

from zigzag.core.errors import as_given, human_bytes, printable
from zigzag.core.flags import flat, is_derived, recorded
from zigzag.core.hours import Hours
from zigzag.core.mesh import axes_in_use
from zigzag.core.options import has_part


class Reporter:
    """Prints the progress of a run of `steps` steps, and keeps the times and losses it needs."""

    def __init__(self, steps: int, verbose: bool = False, began: float | None = None):
        self.steps, self.verbose = steps, verbose
        self.is_terminal = sys.stdout.isatty()
        self.is_quiet = jax.process_index() > 0
        self.hours = Hours(began or time.perf_counter())    # where the time goes
        self.times = collections.deque(maxlen=50)   # seconds of recent steps
        self.first: Any = None                      # (the first step reported, its time)
        self.losses: list[float] = []               # since the last evaluation
        self.file, self.early = None, ""            # the log file; lines from before it was open

    def training_loss(self) -> float | None:
        """Return the mean of the finite losses since the last evaluation, or None."""
        finite = list(filter(math.isfinite, self.losses))
        return statistics.fmean(finite) if finite else None

    def detail(self, text: str) -> None:
        """Write a line to the run's log; with --verbose, also print it."""
        self.line(text, is_shown=self.verbose)

    def line(self, text: str, live: bool = False, is_shown: bool = True) -> None:
        """Print a line. On a terminal, the next line replaces a live line."""
        live = live and self.is_terminal
        if live:
            text = text[:shutil.get_terminal_size().columns - 1]
        elif self.file:
            self.file.write(text + "\n")
        else:
            self.early += text + "\n"
        if is_shown and not self.is_quiet:
            print(("\r\x1b[K" if self.is_terminal else "") + text, end="" if live else "\n",
                  flush=True)

    def log_to(self, path: Path, goes_on: bool) -> None:
        """Also write the lines so far, and all later lines, to a file, even in a process that
        prints nothing. goes_on: keep what earlier starts wrote there."""
        self.file = open(path, "a" if goes_on else "w", buffering=1, encoding="utf-8",
                         errors="backslashreplace")        # a path may have any bytes
        if goes_on:
            self.file.write("\n")
        self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{self.early}")
        self.hours.note_in(path.with_suffix(".hours.jsonl"))

    def header(self, config: Any, mesh: Any, host_names: Sequence[str]) -> None:
        """Print the devices and how the mesh arranges them. `host_names` has the host name of each
        process."""
        device, count = mesh.devices.flat[0], mesh.size
        what = f"{count} x {device.device_kind}"
        if device.platform == "cpu":
            what = f"{count} simulated CPU device{'s' * (count > 1)}, no accelerator was found"
        is_here = not getattr(config, "topology", "")      # an option of forecast/
        if not is_here:
            what += " that are not here: compiled, not run"
        self.line(f"=== zigzag on {what} | {config.network.dtype} | {config.collectives} "
                  f"collectives ===")
        if is_here:
            for process, name in enumerate(host_names):
                own = sum(d.process_index == process for d in mesh.devices.flat)
                self.line(f"devices  process {process} on {name}: {own} x {device.device_kind}",
                          is_shown=self.verbose or len(host_names) > 1)
        if count > 1:
            self.line("mesh     " + " ".join(axes_in_use(mesh.shape)))

    def collectives(self, found: Sequence[Any], expected: Sequence[Any], is_complete: bool = True
                    ) -> None:
        """Print what an update sends, next to what we expect. If `expected` isn't complete, some
        collectives have no formula. Collectives that send very little share a line, unless
        --verbose lists them."""
        missing = {(c.kind, c.axis): f"{human_bytes(c.bytes)} in {c.count}" for c in expected}
        least = sum(c.bytes for c in found) / 100
        small = [c for c in found if c.bytes < least]
        for c in found:
            wanted = missing.pop((c.kind, c.axis), "none")
            why = f"expected: {wanted}" + ("" if is_complete else ", and more without a formula")
            if wanted == "none" and not is_complete:
                why = ("there is no formula for it" if has_part("forecast") else
                       "this copy has no forecast/, which would say what to expect")
            self.line(f"sends    {human_bytes(c.bytes):>7} per device per update in {c.count} "
                      f"{c.kind} over {c.axis} ({why})", is_shown=self.verbose or c not in small)
        if small and not self.verbose:
            self.line(f"sends    {human_bytes(sum(c.bytes for c in small)):>7} more in "
                      f"{sum(c.count for c in small)} small collectives (--verbose lists them)")
        for (kind, axis), wanted in missing.items():
            self.line(f"sends    nothing in {kind} over {axis} (expected: {wanted}; the compiler "
                      f"found another way)")

    def step(self, row: dict, took: float, memory: int, computed: float = 0, what: str = "tokens",
             own: Mapping[str, Any] = {}) -> None:
        """Print a step: its `row` in metrics.jsonl, the seconds it took, the bytes of memory in
        use. `computed` is the number of `what` computed, if it differs from row["tokens"]. `own`
        has the numbers that the loss itself logs; print the first two in alphabetical order."""
        total, at, now = self.steps, row["step"], time.perf_counter()
        if self.first is None:
            self.first = at, now
        else:                   # the first step is slow
            self.times.append(took)
        is_due = at % max(1, total // 20) == 0 or at in (1, total)
        if not (self.is_terminal or is_due):
            return
        # The time so far includes evaluations and saves, which the remaining steps will have too.
        steps, seconds = at - self.first[0], now - self.first[1]
        left = f"{(total - at) * seconds / steps:.0f} s left" if steps else "-"
        mfu = _if_known("  mfu {:.1%}", row["mfu"])
        speed = (computed or row["tokens"]) / (statistics.median(self.times or [took]))
        names = sorted(name for name, x in own.items() if isinstance(x, float))[:2]
        numbers = "".join(f"  {name} {own[name]:.3g}" for name in names)
        rate = _if_known("  lr {:.2e}", row["lr"])
        text = (f"step {at:>{len(str(total))}}/{total}  loss {row['loss']:.4f}{numbers}  "
                f"{speed:,.0f} {what}/s{mfu}  grad {row['grad_norm']:.2f}{rate}  "
                f"{human_bytes(memory)}  {left}")
        self.line(text, live=True)
        if self.file and self.is_terminal and is_due:
            self.file.write(text + "\n")

    def evaluation(self, row: dict, shown: str | Mapping[str, str] = {}) -> None:
        """Print an evaluation: its `row` in metrics.jsonl, and predictions as {label: text}."""
        usual = "step", "eval_loss", "train_loss", "bits_per_byte"
        others = "".join(f"  {name} {x:.4f}" for name, x in row.items()
                         if name not in usual and isinstance(x, float))
        trained = _if_known("  training loss since the last evaluation {:.4f}", row["train_loss"])
        self.line(f"step {row['step']}  {held_out_text(row)}{trained}{others}")
        parts = shown if isinstance(shown, Mapping) else {"": shown}
        width = max(map(len, parts), default=0)
        for label, part in parts.items():
            self.line(f"    {label:{width}} | " + printable(part).replace(
                "\n", f"\n    {'':{width}} | "))

    def end(self, at: int, out: str, row: dict) -> None:
        """Print that a run has made all of its `at` steps and is saved in `out` ('': nowhere).
        `row` is the last evaluation, if any."""
        parts = [f"{at} step{'s' if at > 1 else ''}", out and f"saved in {out}",
                 row and held_out_text(row)]
        self.line("done     " + ", ".join(filter(None, parts)))


def held_out_text(row: dict) -> str:
    bits = _if_known("  ({:.4f} bits per byte)", row["bits_per_byte"])
    return f"held-out loss {row['eval_loss']:.4f}{bits}"


def _if_known(text, value):
    """Put a number into the text, or return "" if the number is None."""
    return "" if value is None else text.format(value)


def options_text(config: Any) -> str:
    """List the options that differ from their defaults, in lines of up to 100 columns; '' if none.
    Leave out options derived from others, and options that apply only to a single command."""
    words = [f"{name}={as_given(value) or '-'}"
             for name, value in recorded(flat(config), config).items()
             if name != "published" and not is_derived(config, name)]
    return "\n".join(textwrap.wrap("options  " + " ".join(words), 100, subsequent_indent=" " * 9,
                                   break_long_words=False, break_on_hyphens=False)
                     ) if words else ""
