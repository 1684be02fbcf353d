"""What a person sees while a run goes on. Process 0 prints; the others are silent.

    header       devices, mesh, sizes, options, and why each weight lies where it does
    collectives  what a compiled update sends, beside what was expected
    step         a live line on a terminal, plain lines elsewhere
    evaluation   the held-out loss beside the training loss, and what the model predicts
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


class Reporter:
    """Prints how a run of `steps` steps goes, and keeps what only that needs: times and losses."""

    def __init__(self, steps: int, verbose: bool = False):
        self.steps, self.verbose = steps, verbose
        self.is_terminal = sys.stdout.isatty()
        self.is_quiet = jax.process_index() > 0
        self.clock = time.perf_counter()            # when the last step's numbers came
        self.times = collections.deque(maxlen=50)   # seconds of recent steps
        self.first: Any = None                      # (the first step told, when)
        self.saving = 0.0                           # seconds that saves took since the last step
        self.losses: list[float] = []               # since the last evaluation
        self.file, self.early = None, []            # a file for the lines; those before it was open

    def start_clock(self) -> None:
        """Measure the next step from now on."""
        self.clock = time.perf_counter()

    def lap(self) -> tuple[float, float]:
        """Seconds since the numbers of the last step came, and how many of them saves took."""
        took, saving = time.perf_counter() - self.clock, self.saving
        self.clock, self.saving = self.clock + took, 0.0
        return took, saving

    def training_loss(self) -> float | None:
        """The mean of the losses since the last evaluation, without those that are not finite; None
        if there are none."""
        finite = list(filter(math.isfinite, self.losses))
        return statistics.fmean(finite) if finite else None

    def detail(self, text: str) -> None:
        """Write a line that only --verbose prints; the run's log has it in any case."""
        self.line(text, is_shown=self.verbose)

    def line(self, text: str, live: bool = False, is_shown: bool = True) -> None:
        """Print a line. On a terminal, a live one is replaced by the next."""
        live = live and self.is_terminal
        if live:
            text = text[:shutil.get_terminal_size().columns - 1]
        elif self.file:
            self.file.write(text + "\n")
        else:
            self.early.append(text)
        if is_shown and not self.is_quiet:
            print(("\r\x1b[K" if self.is_terminal else "") + text, end="" if live else "\n",
                  flush=True)

    def log_to(self, path: Path, goes_on: bool) -> None:
        """Write the lines to a file, too, with those so far. (Processes that print nothing have a
        file as well.) goes_on: keep what earlier starts wrote there."""
        self.file = open(path, "a" if goes_on else "w", buffering=1, encoding="utf-8",
                         errors="backslashreplace")        # (a path may have any bytes)
        if goes_on:
            self.file.write("\n")
        self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n" + "".join(
            text + "\n" for text in self.early))

    def header(self, config: Any, mesh: Any, host_names: Sequence[str]) -> None:
        """The devices, and how the mesh arranges them. `host_names` has the name of each process's
        host."""
        device, count = mesh.devices.flat[0], mesh.size
        what = f"{count} x {device.device_kind}"
        if device.platform == "cpu":
            what = f"{count} simulated CPU device{'s' * (count > 1)}, no accelerator was found"
        is_here = not getattr(config, "topology", "")      # (an option of forecast/)
        if not is_here:
            what += " that are not here: compiled, not run"
        self.line(f"=== zigzag on {what} | {config.network.dtype} | step by {config.step} ===")
        if is_here:
            for process, name in enumerate(host_names):
                own = sum(d.process_index == process for d in mesh.devices.flat)
                self.line(f"devices  process {process} on {name}: {own} x {device.device_kind}",
                          is_shown=self.verbose or len(host_names) > 1)
        if count > 1:
            self.line("mesh     " + " ".join(f"{a}={s}" for a, s in mesh.shape.items() if s > 1))

    def collectives(self, found: Sequence[Any], expected: Sequence[Any], is_complete: bool = True
                    ) -> None:
        """What an update really sends, beside what it was expected to send. If that is not
        complete, there are collectives for which there is no formula. Those that send next to
        nothing share a line, unless --verbose asks for each."""
        missing = {(c.kind, c.axis): f"{human_bytes(c.bytes)} in {c.count}" for c in expected}
        least, small = sum(c.bytes for c in found) / 100, []
        for c in found:
            wanted = missing.pop((c.kind, c.axis), "none")
            why = f"expected: {wanted}" + ("" if is_complete else ", and more without a formula")
            if wanted == "none" and not is_complete:
                why = "there is no formula for it"
            is_small = c.bytes < least
            small += [c] * is_small
            self.line(f"sends    {human_bytes(c.bytes):>7} per device per update in {c.count} "
                      f"{c.kind} over {c.axis} ({why})",
                      is_shown=self.verbose or not is_small)
        if small and not self.verbose:
            self.line(f"sends    {human_bytes(sum(c.bytes for c in small)):>7} more in "
                      f"{sum(c.count for c in small)} small collectives (--verbose lists them)")
        for (kind, axis), wanted in missing.items():
            self.line(f"sends    nothing in {kind} over {axis} (expected: {wanted}; the compiler "
                      f"found another way)")

    def step(self, row: dict, took: float, memory: int, computed: float = 0, what: str = "tokens",
             own: Mapping[str, Any] = {}) -> None:
        """`row` as in metrics.jsonl, the seconds it took, and the bytes of memory in use;
        `computed` is how many of `what` were computed, if that is not row["tokens"]. `own` are the
        row's numbers that the loss itself logs: the first two by name are printed."""
        total, at, now = self.steps, row["step"], time.perf_counter()
        if self.first is None:
            self.first = at, now
        else:                   # (the first step is slow)
            self.times.append(took)
        is_due = at % max(1, total // 20) == 0 or at in (1, total)
        if not (self.is_terminal or is_due):
            return
        # (With the evaluations and saves so far, there will be as many of them in a step.)
        steps, seconds = at - self.first[0], now - self.first[1]
        left = f"{(total - at) * seconds / steps:.0f} s left" if steps else "-"
        mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
        speed = (computed or row["tokens"]) / (statistics.median(self.times or [took]))
        names = sorted(name for name, x in own.items() if isinstance(x, float))[:2]
        numbers = "".join(f"  {name} {own[name]:.3g}" for name in names)
        rate = f"  lr {row['lr']:.2e}" if row["lr"] is not None else ""
        text = (f"step {at:>{len(str(total))}}/{total}  loss {row['loss']:.4f}{numbers}  "
                f"{speed:,.0f} {what}/s{mfu}  grad {row['grad_norm']:.2f}{rate}  "
                f"{human_bytes(memory)}  {left}")
        self.line(text, live=True)
        if self.file and self.is_terminal and is_due:
            self.file.write(text + "\n")

    def evaluation(self, row: dict, shown: str | Mapping[str, str] = {}) -> None:
        """`row` as in metrics.jsonl, and predictions: a text, or texts by their labels."""
        train_loss, usual = row["train_loss"], ("step", "eval_loss", "train_loss", "bits_per_byte")
        others = "".join(f"  {name} {x:.4f}" for name, x in row.items()
                         if name not in usual and isinstance(x, float))
        self.line(f"step {row['step']}  {held_out_text(row)}"
                  + (f"  training loss since the last evaluation {train_loss:.4f}"
                     if train_loss is not None else "") + others)
        parts = shown if isinstance(shown, Mapping) else {"": shown}
        width = max(map(len, parts), default=0)
        for label, part in parts.items():
            self.line(f"    {label:{width}} | " + printable(part).replace(
                "\n", f"\n    {'':{width}} | "))

    def end(self, at: int, out: str, row: dict) -> None:
        """A run has made all of its `at` steps and is saved in `out` ('': nowhere); `row` is its
        last evaluation, if there was one."""
        parts = [f"{at} step{'s' if at > 1 else ''}", out and f"saved in {out}",
                 row and held_out_text(row)]
        self.line("done     " + ", ".join(filter(None, parts)))


def held_out_text(row: dict) -> str:
    bits = row["bits_per_byte"]
    return f"held-out loss {row['eval_loss']:.4f}" + (
        f"  ({bits:.4f} bits per byte)" if bits is not None else "")


def options_text(config: Any) -> str:
    """The options that differ from their defaults, but for those that follow from others or hold
    for one command, in lines of at most 100 columns; '' if there are none."""
    words = [f"{name}={as_given(value) or '-'}"
             for name, value in recorded(flat(config), config).items()
             if name != "published" and not is_derived(config, name)]
    return "\n".join(textwrap.wrap("options  " + " ".join(words), 100, subsequent_indent=" " * 9,
                                   break_long_words=False, break_on_hyphens=False)
                     ) if words else ""
