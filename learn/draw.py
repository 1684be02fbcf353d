"""Pictures for the lessons and for learn.explain, as SVG: no package is needed to make them.

    held        which devices hold which part of arrays
    steps       what each device has, from step to step
    lines       a function line by line, and which part of each array a device has
    products    columns and row: four cases of one product
    bars        lengths side by side: bytes, prices, seconds
    ring        which keys meet which queries, in which turn
    timetables  the three pipelines, and what waits on each stage
    visits      tokens on their way to their experts
    roofline    what a chip does for each byte that it moves
    curves      numbers over the steps of runs

Each returns a Picture: a notebook shows it, and `save` writes it. Colours say who: a device, or a
mesh axis. In dark surroundings only the text around the boxes changes its colour.
"""

import html
import math
from pathlib import Path
from typing import Any, Sequence

import jax
import numpy as np

from zigzag.parallel.pipeline import letters, ticks, work_1f1b, work_at

# Light enough for black text, and told apart by those who see few colours, too.
COLORS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#dddddd")
STYLE = """
.ink { fill: #222; font: 13px sans-serif } .line { stroke: #222; fill: none }
.inside { fill: #000; font: 12px sans-serif } .faint { opacity: .35 }
@media (prefers-color-scheme: dark) { .ink { fill: #eee } .line { stroke: #eee } }
"""


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


class Picture:
    """A drawing in SVG of one thing, which `title` says in words."""

    def __init__(self, title: str):
        self.title, self.parts = title, []
        self.width = self.height = 0.0

    def _reach(self, x, y):
        self.width, self.height = max(self.width, x), max(self.height, y)

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: Any = "",
            faint: bool = False) -> None:
        """A filled box with a text in its middle; fill "none" leaves only its border."""
        self._reach(x + width, y + height)
        name = "line faint" if faint else "line"
        # (A class's fill would win over the attribute; a style of its own wins over the class.)
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
                          f'class="{name}" stroke-width=".5" style="fill:{fill}"/>')
        if text != "":
            self.text(x + width / 2, y + height / 2 + 4, text, "middle",
                      "ink" if fill == "none" else "inside")

    def text(self, x: float, y: float, text: Any, anchor: str = "start", name: str = "ink") -> None:
        """A text whose start, middle or end is at x."""
        size = 7 * len(str(text))
        self._reach(x + {"start": size, "middle": size / 2, "end": 0}[anchor], y + 5)
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{name}">'
                          f'{html.escape(str(text))}</text>')

    def line(self, points: Sequence[tuple[float, float]], stroke: str = "", width: float = 1
             ) -> None:
        for x, y in points:
            self._reach(x, y)
        style = f' style="stroke:{stroke}"' if stroke else ""
        self.parts.append(f'<polyline class="line" stroke-width="{width:g}"{style} points="'
                          + " ".join(f"{x:.4g},{y:.4g}" for x, y in points) + '"/>')

    def svg(self, style: str = STYLE) -> str:
        width, height = self.width + 10, self.height + 10
        return (f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:g} '
                f'{height:g}" width="{width:g}" aria-label="{html.escape(self.title)}">'
                f"<title>{html.escape(self.title)}</title>"
                + (f"<style>{style}</style>" if style else "") + "\n" + "\n".join(self.parts)
                + "\n</svg>\n")

    def _repr_svg_(self):       # (what a notebook asks for)
        return self.svg()

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.svg())


# -------------------------------------------------------------------------------------------
# Who holds what

def held(title: str, arrays: dict[str, jax.Array]) -> Picture:
    """Each array of one or two dimensions as a grid; in each number's place are the devices that
    hold it. Places with the same devices have the same colour."""
    picture, left = Picture(title), 10
    for name, x in arrays.items():
        holders = holders_of(x)
        width = max(22, 8 * max(len(_numbers(holder)) for holder in holders.flat) + 6)
        picture.text(left, 20, name)
        for (row, column), holder in np.ndenumerate(holders):
            picture.box(left + column * width, 30 + row * 22, width, 22, color(min(holder)),
                        _numbers(holder))
        left += max(holders.shape[1] * width, 7 * len(name)) + 25
    return picture


def holders_of(x: jax.Array) -> np.ndarray:
    """An array [rows, columns] of lists: the devices that hold this number of x, which has one or
    two dimensions."""
    shape = x.shape if x.ndim == 2 else (1, *x.shape)
    holders = np.frompyfunc(lambda _: [], 1, 1)(np.zeros(shape))
    for piece in x.addressable_shards:
        for holder in holders[piece.index if x.ndim == 2 else (slice(None), *piece.index)].flat:
            holder.append(piece.device.id)
    return holders


def _numbers(holder):
    holder = sorted(holder)
    if len(holder) > 4:
        in_a_row = holder[-1] - holder[0] == len(holder) - 1
        return f"{holder[0]}-{holder[-1]}" if in_a_row else f"{holder[0]},{holder[1]}..{holder[-1]}"
    return ("," if holder[-1] > 9 else "").join(map(str, holder))


def steps(title: str, devices: Sequence[str], rows: dict[str, Sequence[Sequence[Any]]]) -> Picture:
    """A row for each step, a column for each device: what the device has then, as pieces side by
    side. A piece is (number of its colour, text), or None for a place that is empty."""
    picture = Picture(title)
    left, width = 20 + 7 * max(map(len, rows)), 112
    for column, device in enumerate(devices):
        picture.text(left + column * (width + 14) + width / 2, 20, device, "middle")
    for row, (name, cells) in enumerate(rows.items()):
        y = 32 + 34 * row
        picture.text(10, y + 17, name)
        for column, pieces in enumerate(cells):
            size = width / len(pieces)
            for place, piece in enumerate(pieces):
                x = left + column * (width + 14) + place * size
                picture.box(x, y, size, 24, *("none", "", True) if piece is None else
                            (color(piece[0]), piece[1]))
    return picture


def lines(title: str, statements: Sequence[tuple[str, Sequence[tuple], Sequence[str]]]) -> Picture:
    """Each statement with the arrays that it makes, and what it sends. An array is its name and a
    pair (a device's part, the whole) for each dimension; a box is as full as the part is large."""
    picture, y, width = Picture(title), 10, 96
    for code, arrays, sends in statements:
        picture.text(10, y + 12, code)
        for number, (name, dimensions) in enumerate(arrays):
            picture.text(62, y + 37, name, "end")
            for column, (part, whole) in enumerate(dimensions):
                x = 70 + column * (width + 6)
                picture.box(x, y + 20, width, 24, color(7))
                picture.box(x, y + 20, width * part / whole, 24, color(0))
                picture.text(x + width / 2, y + 37, whole if part == whole else
                             f"{part} of {whole}", "middle", "inside")
            for row, text in enumerate(sends if not number else ()):
                picture.text(70 + 4 * (width + 6) + 8, y + 37 + 18 * row, text)
            y += 28
        y += 30
    return picture


# -------------------------------------------------------------------------------------------
# Products

def products(n: int = 4) -> Picture:
    """columns and row as a table of four cases: x @ w forward, and the gradients backward. Stripes
    are the parts of the devices."""
    picture = Picture(f"columns and row on {n} devices, forward and backward: which operand is cut "
                      f"along which dimension, and what has to be added up")
    cases = [
        ("columns: x w, w cut along its columns", "forward",
         ["x", None, "w", "columns", "y", "columns"], "nothing to add up"),
        ("", "backward, for x", ["dy", "columns", "w'", "rows", "dx", None],
         "each device has a part of each sum: add up over tensor"),
        ("row: x w, w cut along its rows", "forward",
         ["x", "columns", "w", "rows", "y", None],
         "each device has a part of each sum: add up over tensor"),
        ("", "backward, for x", ["dy", None, "w'", "columns", "dx", "columns"],
         "nothing to add up")]
    y = 10
    for heading, way, parts, said in cases:
        if heading:
            picture.text(10, y + 14, heading)
            y += 26
        picture.text(25, y + 34, way)
        x = 145
        for place, (name, cut) in enumerate(zip(parts[::2], parts[1::2])):
            picture.text(x + 30, y + 9, name, "middle")
            _striped(picture, x, y + 14, 60, 40, cut, n)
            picture.text(x + 77, y + 38, "@= "[place], "middle")
            x += 95
        picture.text(x, y + 38, said)
        y += 70
    return picture


def _striped(picture, x, y, width, height, cut, n):
    """A matrix: in one colour if it is whole, else in the n colours of its parts."""
    if cut is None:
        return picture.box(x, y, width, height, COLORS[-1], "whole")
    for part in range(n):
        if cut == "columns":
            picture.box(x + part * width / n, y, width / n, height, color(part))
        else:
            picture.box(x, y + part * height / n, width, height / n, color(part))


def bars(title: str, rows: Sequence[tuple[str, float, str, int]], limit: tuple[str, float] = ("", 0)
         ) -> Picture:
    """A bar for each (name, length, text beside it, number of its colour), and a line at the
    limit (its name, its length)."""
    picture = Picture(title)
    left, most = 20 + 7 * max(len(name) for name, *_ in rows), max(
        [limit[1], *(length for _, length, *_ in rows)])
    top = 30 if limit[0] else 10
    for row, (name, length, text, number) in enumerate(rows):
        y = top + 26 * row
        picture.text(left - 8, y + 15, name, "end")
        picture.box(left, y, 420 * length / (most or 1), 20, color(number))
        picture.text(left + 420 * length / (most or 1) + 8, y + 15, text)
    if limit[0]:
        x = left + 420 * limit[1] / most
        picture.line([(x, 22), (x, top + 26 * len(rows))], width=2)
        picture.text(x, 16, limit[0], "end")
    return picture


# -------------------------------------------------------------------------------------------
# The ring

def ring(n: int = 4) -> Picture:
    """Queries by keys, in the order of time: the colour is the turn in which their device has these
    keys. What is masked is empty. Left, time in order; right, an early and a late part for each
    device."""
    picture = Picture(f"A causal ring of {n} devices: the turn in which each part of the queries "
                      f"meets each part of the keys, in time order and with early and late parts")
    for left, name, owner in ((10, "in order", lambda part: part // 2),
                              (70 + 26 * 2 * n, "early and late",
                               lambda part: min(part, 2 * n - 1 - part))):
        picture.text(left + 45, 16, f"{name}: keys of device")
        for part in range(2 * n):
            picture.text(left + 58 + 26 * part, 36, owner(part), "middle")
            picture.text(left + 36, 59 + 26 * part, owner(part), "end")
            for key in range(2 * n):
                turn, sees = (owner(part) - owner(key)) % n, key <= part
                picture.box(left + 45 + 26 * key, 42 + 26 * part, 26, 26,
                            color(turn) if sees else "none", turn if sees else "", not sees)
        slowest = sum(max(
            sum(key <= part for part in range(2 * n) if owner(part) == device
                for key in range(2 * n) if owner(key) == (device - turn) % n)
            for device in range(n)) for turn in range(n))
        picture.text(left + 45, 62 + 52 * n, f"slowest of each turn, added up: {slowest} boxes")
    picture.text(10, 88 + 52 * n, "Rows: queries of the device at the left. A number is the turn.")
    return picture


# -------------------------------------------------------------------------------------------
# The pipeline

def timetables(stages: int, microbatches: int, schedules: dict[str, tuple[str, int]],
               skips_idle: bool = True) -> Picture:
    """For each name of (schedule, chunks): a row of boxes for each stage, with the microbatch that
    it works on (' backward), and below them how many wait there for their backward pass. A box is
    as wide as it takes long: backward twice as long as forward. `skips_idle` is pipeline.can_skip:
    without it, every tick of 1F1B takes the time of a pass forward and one backward."""
    picture = Picture(f"Timetables of {stages} stages and {microbatches} microbatches: "
                      f"{', '.join(schedules)}; and the microbatches that wait on each stage")
    y = 10
    for name, (schedule, chunks) in schedules.items():
        rows = [_work(s, stages, microbatches, schedule, chunks, skips_idle)
                for s in range(stages)]
        end = max(at + width for row in rows for at, width, *_ in row)
        busy = sum(width for row in rows for _, width, *_ in row)
        picture.text(10, y + 12, f"{name}: idle {1 - busy / (stages * end):.0%}")
        y += 20
        unit = 800 / end
        for stage, row in enumerate(rows):
            picture.text(10, y + 16, f"stage {stage}")
            picture.box(70, y, 800, 22, "none", "", True)
            for at, width, microbatch, chunk, is_back in row:
                text = f"{microbatch}{letters(chunk) if chunks > 1 else ''}" + "'" * is_back
                number = 4 if is_back else 2 + 4 * chunk
                picture.box(70 + at * unit, y, width * unit, 22, color(number),
                            text if 7 * len(text) < unit * width else "")
            y += 24
        most = [max(_waiting(row)) for row in rows]
        picture.text(70, y + 14, f"waiting at most, by stage: {', '.join(map(str, most))}"
                     + (" (each of one chunk)" if chunks > 1 else ""))
        y += 34
    return picture


def _work(stage, S, M, schedule, chunks, skips_idle):
    """[(begin, width, microbatch, chunk, is backward)] of a stage; a forward pass of
    all its layers over a microbatch has width 1."""
    count, V = ticks(S, M, schedule, chunks)
    if schedule != "1f1b":
        found, total = [], 3 * count / V
        for t in range(count):
            m, chunk = work_at(t, stage, S, V)
            if 0 <= m < M:
                found += [(t / V, 1 / V, m, chunk, False),
                          (total - 2 * (t + 1) / V, 2 / V, m, chunk, True)]
        return sorted(found)
    found = []
    begin = 0
    for t in range(count):
        forward, back = work_1f1b(t, stage, S)
        # (Whether some stage does, in this tick.)
        goes_forward, goes_back = t < count - S or not skips_idle, t >= S or not skips_idle
        if 0 <= forward < M:
            found.append((begin, 1, forward, 0, False))
        if 0 <= back < M:
            found.append((begin + goes_forward, 2, back, 0, True))
        begin += goes_forward + 2 * goes_back
    return sorted(found)


def _waiting(row):
    """After each pass of a stage, how many passes forward have not come back."""
    count = 0
    for _, _, _, _, is_back in row:
        count += -1 if is_back else 1
        yield count


# -------------------------------------------------------------------------------------------
# Experts

def visits(chosen: np.ndarray, devices: int, experts: int, shown: Sequence[int]) -> Picture:
    """Lines from some tokens to the experts that they chose: chosen [tokens, best] are the experts'
    numbers; devices have equal parts of both, in their order."""
    picture = Picture("Tokens on their way to their experts: " + "; ".join(
        f"token {t} visits {', '.join(map(str, chosen[t]))}" for t in shown))
    own, height = experts // devices, 30 * experts
    for expert in range(experts):
        picture.box(330, 26 + 30 * expert, 120, 26, color(expert // own), f"expert {expert}")
    for device in range(devices):
        picture.text(460, 44 + 30 * own * device, f"device {device}")
        picture.box(120, 26 + 30 * own * device, 90, 30 * own - 4, color(device))
        picture.text(110, 44 + 30 * own * device, f"device {device}", "end")
    picture.text(165, 16, "tokens", "middle")
    picture.text(390, 16, "experts", "middle")
    for token in shown:
        y = 26 + (token + 0.5) * height / len(chosen)
        device = token * devices // len(chosen)
        picture.text(165, y + 4, f"token {token}", "middle", "inside")
        for expert in chosen[token]:
            picture.line([(210, y), (330, 39 + 30 * int(expert))], width=2)
            if int(expert) // own != device:
                picture.box(263, (y + 39 + 30 * int(expert)) / 2 - 5, 14, 10, color(device))
    picture.text(120, 44 + height, "A box on a line: this token is sent to another device.")
    return picture


# -------------------------------------------------------------------------------------------
# Rates

def roofline(title: str, flops: float, rates: dict[str, float], points: dict[str, tuple[str, float]]
             ) -> Picture:
    """Operations a second over operations for each byte, both logarithmic: a roof for each of the
    `rates` in bytes a second, under the chip's `flops`; and points, each {name: (rate, operations
    for each byte)}."""
    picture = Picture(f"{title}: " + "; ".join(
        f"{name} {x:,.0f} operations a byte of {rate}, where {flops / rates[rate]:,.0f} are needed"
        for name, (rate, x) in points.items()))
    where = [math.log10(max(x, 1e-9)) for _, x in points.values()]
    ridges = [math.log10(flops / rate) for rate in rates.values()]
    first, last = math.floor(min(where + ridges)) - 1, math.ceil(max(where + ridges)) + 1
    top = math.log10(flops)
    low = min(top - 3, *(min(top, x + math.log10(rates[rate])) - .5
                         for (rate, _), x in zip(points.values(), where)))

    def at(x, y):
        return 60 + 560 * (x - first) / (last - first), 30 + 260 * (top - y) / (top - low)

    picture.line([(60, 30), (60, 290), (620, 290)])
    for power in range(first, last + 1):
        picture.text(at(power, 0)[0], 308, f"1e{power}" if power > 5 else f"{10.0**power:,g}",
                     "middle")
    picture.text(340, 328, "operations for each byte", "middle")
    for power in range(math.ceil(low), math.floor(top) + 1):
        picture.text(55, at(0, power)[1] + 4, f"1e{power}", "end")
    picture.text(10, 18, f"operations a second; the chip: {flops:.3g}")
    for number, (name, rate) in enumerate(rates.items()):
        ridge, start = top - math.log10(rate), max(first, low - math.log10(rate))
        picture.line([at(start, start + math.log10(rate)), at(ridge, top), at(last, top)],
                     color(number), 3)
        picture.line([(70 + 280 * number, 350), (100 + 280 * number, 350)], color(number), 3)
        picture.text(108 + 280 * number, 354, f"{name}: {rate / 1e9:,.0f} GB/s")
    for number, ((name, (rate, _)), x) in enumerate(zip(points.items(), where)):
        px, py = at(x, min(top, x + math.log10(rates[rate])))
        for bx, by in ((px - 8, py - 8), (77, 366 + 22 * number)):
            picture.box(bx, by, 16, 16, color([*rates].index(rate)), number + 1)
        picture.text(108, 379 + 22 * number, name)
    return picture


def curves(title: str, runs: dict[str, Sequence[tuple[float, float]]]) -> Picture:
    """Lines through the points (x, y) of each run."""
    picture = Picture(title)
    xs, ys = zip(*(p for points in runs.values() for p in points))
    low, size, last = min(ys), (max(ys) - min(ys)) or 1, max(xs) or 1
    picture.line([(70, 10), (70, 230), (630, 230)])
    for y in (max(ys), low):
        picture.text(64, 214 - 200 * (y - low) / size, f"{y:.4g}", "end")
    picture.text(630, 248, f"{last:,g}", "end")
    for number, (name, points) in enumerate(runs.items()):
        picture.line([(70 + 560 * x / last, 210 - 200 * (y - low) / size) for x, y in points],
                     color(number), 2)
        picture.box(70 + 190 * (number % 3), 260 + 20 * (number // 3), 12, 12, color(number))
        picture.text(88 + 190 * (number % 3), 271 + 20 * (number // 3), name)
    return picture
