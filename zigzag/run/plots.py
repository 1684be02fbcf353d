"""python train.py --plot RUN ... [--save FILE]: how runs went, from their metrics.jsonl alone.

    series          the curves of a run: {title of a panel: [curve, ...]}
    choose_unit     the held-out loss or, where tokenizers differ, bits per byte
    text_chart      panels as text, for a terminal
    picture         panels by matplotlib, into a file

Nothing here imports jax, so a chart appears at once, also while the run goes on.
"""

import dataclasses
import json
import math
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from zigzag.core import start
from zigzag.core.errors import ConfigError, optional_package
from zigzag.core.flags import parse_flags, run_main

MEDIAN = 25     # steps whose median is the speed at one of them: single steps are noise
SPEED = f"tokens/s (running median of {MEDIAN} steps)"
# The two units of held-out numbers, of which a chart has one.
PER_TOKEN, PER_BYTE = "held-out loss", "held-out bits per byte"
# {title: the name of its number in a line of metrics.jsonl}
PANELS = {"loss": "loss", PER_TOKEN: "eval_loss", PER_BYTE: "bits_per_byte", "learning rate": "lr",
          "gradient norm": "grad_norm", SPEED: "tokens_per_second",
          "expert load: smallest and largest share": "expert_load"}
# What is not drawn. Every other number of a run, such as its metric, has a panel of its own name.
HIDDEN = {"step", "train_loss", "tokens", "mfu", "skipped", "save_seconds"}
MARKS = "*o+x#@%&"      # of the runs, in text
ROWS, WIDTH = 9, 72     # characters of a panel in text


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags that go with --plot."""
    plot: tuple[str, ...] = ()
    save: str = ""


def draw_or_begin() -> None:
    """What train.py does before it imports jax: with --plot, draw, and end; else begin."""
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    if "--plot" in words and {"-h", "--help"}.isdisjoint(words):
        run_main(lambda: draw(**parse_flags(Options, None)[0]))
        sys.exit(0)
    start.begin()


def draw(plot: Sequence[str], save: str = "") -> None:
    """Print the charts of these runs, or write them to a file."""
    runs = {run: series(run) for run in dict.fromkeys(plot)}
    note = choose_unit(runs)
    if save:
        picture(runs, save, note)
        print(f"the curves of {', '.join(runs)} are in {save}" + (note and f"\n{note}"))
    else:
        print(text_chart(runs, min(WIDTH, shutil.get_terminal_size().columns - 14), note))


# -------------------------------------------------------------------------------------------
# The numbers

def series(run: str) -> dict[str, list[np.ndarray]]:
    """{title of a panel: curves [[step, number], ...]} of a run. Most panels have one curve; that
    of the experts has two. Panels without numbers are left out."""
    rows, found = _rows(run), {}
    known = HIDDEN.union(PANELS.values())
    others = {name: name for row in rows for name in row if name not in known}
    for title, name in {**PANELS, **others}.items():
        points = [(row["step"], row[name]) for row in rows if _is_number(row.get(name))]
        curves = [points]
        if name == "expert_load":
            loads = [(row["step"], np.asarray(row[name], float).ravel()) for row in rows
                     if row.get(name)]
            loads = [(step, load) for step, load in loads if np.isfinite(load).all()]
            curves = [[(step, which(load)) for step, load in loads] for which in (np.min, np.max)]
        if name == "tokens_per_second" and points:
            steps, speeds = zip(*points)
            near = np.lib.stride_tricks.sliding_window_view(
                np.pad(np.array(speeds, float), MEDIAN // 2, constant_values=np.nan), MEDIAN)
            curves = [list(zip(steps, np.nanmedian(near, 1)))]
        if curves[0]:
            found[title] = [np.array(curve, float) for curve in curves]
    if not found:
        raise ConfigError(f"--plot {run}: none of its numbers is finite")
    return found


def _rows(run):
    path = Path(run) / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        raise ConfigError(f"--plot {run}: no run there ({path} cannot be read); give the --out of "
                          f"a train.py that has begun") from None
    rows = list(filter(None, map(_row, lines)))
    if not rows:
        raise ConfigError(f"--plot {run}: {path} has no steps yet")
    return rows


def _row(line):
    """The object in a line; None for a line that is being written."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def choose_unit(runs: dict[str, dict[str, list[np.ndarray]]]) -> str:
    """Leave one held-out panel in these curves: the loss or, if the runs have different tokenizers,
    bits per byte. Returns why, or ''."""
    known = {run: found for run in runs if (found := _tokenizer_of(run))}
    differ = len(set(known.values())) > 1
    without = [run for run, curves in runs.items()
               if PER_TOKEN in curves and PER_BYTE not in curves]
    for curves in runs.values():
        curves.pop(PER_TOKEN if differ else PER_BYTE, None)
    if not differ:
        return ""
    which = "; ".join(f"{run}: {kind}, {size:,} ids" for run, (kind, _, size) in known.items())
    note = (f"The tokenizers differ ({which}), so losses per token, as in training, cannot be "
            f"compared: held-out curves are in bits per byte.")
    if without:
        note += f" Without them: {', '.join(without)}."
    if not any(runs.values()):
        raise ConfigError(f"--plot {' '.join(runs)}: nothing to draw. {note}")
    return note


def _wrapped(note, width):
    """The lines of a note, in which no path is broken."""
    return textwrap.wrap(note, width, break_long_words=False, break_on_hyphens=False)


def _tokenizer_of(run):
    """(kind, digest, vocabulary size) from a run's config.json; None if that does not say."""
    try:
        record = json.loads((Path(run) / "config.json").read_bytes())
        return record["tokenizer"], record.get("tokenizer_sha256", ""), int(record["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


def _titles(runs):
    found = {title: None for curves in runs.values() for title in curves}
    return [title for title in {**PANELS, **found} if title in found]


def _is_log(title, curves):
    """Whether a panel has a logarithmic axis: norms of gradients that differ by far."""
    numbers = np.concatenate([curve[:, 1] for curve in curves])
    return title == "gradient norm" and 0 < 20 * numbers.min() < numbers.max()


# -------------------------------------------------------------------------------------------
# As text

def text_chart(runs: dict[str, dict[str, list[np.ndarray]]], width: int = WIDTH, note: str = ""
               ) -> str:
    """A panel for each number, one below the other, each run with its own mark."""
    marks = {run: MARKS[i % len(MARKS)] for i, run in enumerate(runs)}
    last = max(curve[-1, 0] for curves in runs.values() for c in curves.values() for curve in c)
    lines = []
    for run, curves in runs.items():
        steps = int(max((curve[-1, 0] for c in curves.values() for curve in c), default=0))
        now = []
        for title in ("loss", PER_TOKEN, PER_BYTE):
            if title in curves:
                at, number = curves[title][0][-1]
                when = "" if at == steps else f" at step {int(at):,}"
                now.append(f"{title} {number:.4f}{when}")
        lines.append(f"{marks[run]} {run}: step {steps:,}" + "".join(f", {text}" for text in now))
    lines += _wrapped(note, max(width, 20) + 8)
    for title in _titles(runs):
        lines += ["", *_panel(title, {marks[run]: curves[title] for run, curves in runs.items()
                                      if title in curves}, last, max(width, 20))]
    return "\n".join(lines)


def _panel(title, curves, last, width):
    """The lines of one panel. `curves` are by their mark; `last` is the last step of all runs."""
    is_log = _is_log(title, [c for marked in curves.values() for c in marked])
    columns = [(mark, _columns(c, last, width)) for mark, marked in curves.items() for c in marked]
    numbers = np.concatenate([y[np.isfinite(y)] for _, y in columns])
    low, high = numbers.min(), numbers.max()
    scale = np.log if is_log else np.asarray
    size = scale(high) - scale(low) or 1
    grid = [[" "] * width for _ in range(ROWS)]
    for mark, y in columns:
        for x in np.flatnonzero(np.isfinite(y)):
            place = round((ROWS - 1) * float((scale(high) - scale(y[x])) / size))
            grid[place][x] = mark
    labels = [""] * ROWS
    labels[0], labels[-1] = _short(high), _short(low) if low < high else ""
    end = f"{int(last):,}"
    return [title + (" (logarithmic)" if is_log else ""),
            *(f"{label:>10} |{''.join(row)}".rstrip() for label, row in zip(labels, grid)),
            f"{'':10} +{'-' * width}", f"{'':12}{'0':<{width - len(end)}}{end}"]


def _columns(curve, last, width):
    """The mean of a curve in each column; NaN where it has no points."""
    column = np.minimum(curve[:, 0] / max(last, 1) * width, width - 1).astype(int)
    count = np.bincount(column, minlength=width)
    with np.errstate(invalid="ignore"):
        return np.bincount(column, curve[:, 1], width) / count


def _short(x):
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


# -------------------------------------------------------------------------------------------
# As a picture

def picture(runs: dict[str, dict[str, list[np.ndarray]]], path: str, note: str = "") -> None:
    """Draw the panels into a file, in the format that its name ends with."""
    if not Path(path).suffix:
        raise ConfigError(f"--save {path}: expected a name that ends with .png, .pdf or .svg")
    figures = optional_package("matplotlib.figure", f"--save {path}")
    titles = _titles(runs)
    columns = min(3, len(titles))
    count = -(-len(titles) // columns)
    figure = figures.Figure(figsize=(5 * columns, 3.6 * count), layout="constrained")
    for panel, title in enumerate(titles):
        axes = figure.add_subplot(count, columns, panel + 1)
        for number, (run, curves) in enumerate(runs.items()):
            _curves(axes, title, curves.get(title, []), f"C{number}", run)
        if _is_log(title, [c for curves in runs.values() for c in curves.get(title, [])]):
            axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    if len(runs) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center",
                      ncols=4, fontsize=9)
    else:
        figure.suptitle(*runs, fontsize=11)
    if note:
        figure.supxlabel("\n".join(_wrapped(note, 75 * columns)), fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:      # (a format that matplotlib does not know)
        raise ConfigError(f"--save {path}: {e}") from None


def _curves(axes, title, curves, color, run):
    """Draw the curves of a run in a panel. Noisy ones have their running mean in front of them."""
    if len(curves) == 2:
        (x, low), (_, high) = (curve.T for curve in curves)
        axes.fill_between(x, low, high, color=color, alpha=0.3, linewidth=0, label=run)
        return
    for x, y in (curve.T for curve in curves):
        if title in (PER_TOKEN, PER_BYTE):
            axes.plot(x, y, "o-", color=color, markersize=3, label=run)
        elif title == "learning rate" or len(y) < 50:
            axes.plot(x, y, color=color, label=run)
        else:
            size = len(y) // 25
            mean = np.convolve(y, np.ones(size), "valid") / size
            axes.plot(x, y, color=color, alpha=0.25, linewidth=0.6)
            axes.plot(x[size // 2:size // 2 + len(mean)], mean, color=color, label=run)
