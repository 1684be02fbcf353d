"""python train.py --plot RUN ... [--save FILE]: plot runs' curves, using only their metrics.jsonl.

    curves_of       reads a run's curves, keyed by metric name
    text_chart      draws a panel per metric as text, for a terminal
    picture         draws the panels into a file with matplotlib

Nothing here imports jax, so a chart appears immediately, even while the run is training.
"""

import json
import math
import shutil
from typing import Sequence

import numpy as np

from zigzag.core.errors import ConfigError, optional_package
from zigzag.core.files import numbers_of
from zigzag.core.parts import place

# Numbers without a panel. All of a run's other numbers have one.
HIDDEN = {"train_loss", "tokens", "mfu", "skipped", "save_seconds"}
MARKS = "*o+x#@%&"      # a character per run, for text charts
ROWS, WIDTH = 9, 72     # size of a text chart's panel, in characters

Curves = dict[str, np.ndarray]      # {name: [[step, number], ...]}


def run(plot: Sequence[str], save: str = "") -> None:
    """Print charts of these runs, or write them to a file."""
    runs = {run: curves_of(run) for run in plot}
    if save:
        picture(runs, save)
        print(f"the curves of {', '.join(runs)} are in {save}")
    else:
        print(text_chart(runs, max(20, min(WIDTH, shutil.get_terminal_size().columns - 14))))


def curves_of(run: str) -> Curves:
    """Read a run's curves, skipping non-finite numbers."""
    path, found = place(run) / "metrics.jsonl", {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        raise ConfigError(f"--plot {run}: no run there (cannot read {path}); give the --out of a "
                          f"run that has started") from None
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:              # the run is still writing this line
            continue
        for name, x in numbers_of(row).items():
            if name not in HIDDEN and math.isfinite(x):
                found.setdefault(name, []).append((row["step"], x))
    if not found:
        raise ConfigError(f"--plot {run}: {path} has no steps yet")
    return {name: np.array(points, float) for name, points in found.items()}


def _names(runs):
    return list(dict.fromkeys(name for curves in runs.values() for name in curves))


def text_chart(runs: dict[str, Curves], width: int = WIDTH) -> str:
    """Draw a panel per metric, stacked vertically, with a different marker for each run."""
    marks = {run: MARKS[i % len(MARKS)] for i, run in enumerate(runs)}
    last = max(curve[-1, 0] for curves in runs.values() for curve in curves.values())
    lines = [f"{marks[run]} {run}: step {max(curve[-1, 0] for curve in curves.values()):,.0f}"
             for run, curves in runs.items()]
    for name in _names(runs):
        lines += ["", name, *_panel({marks[run]: _columns(curves[name], last, width)
                                     for run, curves in runs.items() if name in curves}, width),
                  f"{'':12}{'0':<{width - 12}}{last:>12,.0f}"]
    return "\n".join(lines)


def _columns(curve, last, width):
    """Return a curve's mean in each column, NaN where it has no points."""
    column = np.minimum(curve[:, 0] / max(last, 1) * width, width - 1).astype(int)
    count = np.bincount(column, minlength=width)
    with np.errstate(invalid="ignore"):
        return np.bincount(column, curve[:, 1], width) / count


def _panel(curves, width):
    """Return a panel's lines. `curves` is {marker: its column means}."""
    low, high = (which(list(curves.values())) for which in (np.nanmin, np.nanmax))
    grid = [[" "] * width for _ in range(ROWS)]
    for mark, columns in curves.items():
        for x in np.flatnonzero(np.isfinite(columns)):
            grid[round((ROWS - 1) * (high - columns[x]) / (high - low or 1))][x] = mark
    labels = [f"{high:.4g}", *[""] * (ROWS - 2), f"{low:.4g}"]
    return [*(f"{label:>10} |{''.join(row)}".rstrip() for label, row in zip(labels, grid)),
            f"{'':10} +{'-' * width}"]


def picture(runs: dict[str, Curves], path: str) -> None:
    """Draw the panels into a file, in the format its suffix names."""
    figures = optional_package("matplotlib.figure", f"--save {path}")
    names = _names(runs)
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = figures.Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    for panel, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, panel + 1, title=name, xlabel="step")
        for number, (run, curves) in enumerate(runs.items()):
            axes.plot(*curves.get(name, np.empty((0, 2))).T, color=f"C{number}", label=run)
        axes.grid(alpha=0.25)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:      # ValueError: a format matplotlib doesn't support
        raise ConfigError(f"--save {path}: {e}") from None
