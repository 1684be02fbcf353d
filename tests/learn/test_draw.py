"""learn/draw.py: what the pictures say is what the code does."""

import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from learn import draw
from tests.helpers import mesh_of
from zigzag.parallel.pipeline import passes

SVG = "{http://www.w3.org/2000/svg}"


def read(picture):
    """The elements of a picture that is well-formed and has its title in words."""
    root = ElementTree.fromstring(picture.svg())
    assert root.get("role") == "img" and root.get("aria-label") == root.find(f"{SVG}title").text
    width, height = map(float, root.get("viewBox").split()[2:])
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x and x + w <= width and 0 <= y and y + h <= height
    return root


def texts(picture):
    return [text.text for text in read(picture).iter(f"{SVG}text")]


def test_who_holds_what():
    """A number's place with other devices than hold it, or two places with the same holders in
    different colours."""
    mesh = mesh_of("data=2,tensor=4")
    x = jax.device_put(np.zeros((2, 8)), NamedSharding(mesh, P("data", "tensor")))
    where = np.array([[[0, 1, 2, 3][c // 2] + 4 * r for c in range(8)] for r in range(2)])
    assert (np.vectorize(lambda holder: holder[0])(draw.holders_of(x)) == where).all()
    whole = jax.device_put(np.zeros(3), NamedSharding(mesh, P()))
    assert draw.holders_of(whole).tolist() == [[list(range(8))] * 3]
    picture = draw.held("<both>", {"x": x, "whole": whole})
    assert texts(picture) == ["x", *map(str, where.flat), "whole", *["0-7"] * 3]
    colors = [box.get("style") for box in read(picture).iter(f"{SVG}rect")]
    assert colors == [f"fill:{draw.color(n)}" for n in (*where.flat, 0, 0, 0)]


@pytest.mark.parametrize("holder, text", [
    ([3], "3"), ([1, 0], "01"), ([8, 9, 10], "8,9,10"), ([*range(8)], "0-7"),
    ([0, 2, 4, 6, 8], "0,2..8")])
def test_holders_in_a_box(holder, text):
    """Device 12 that reads as devices 1 and 2; a range with devices that hold nothing."""
    assert draw._numbers(holder) == text


@pytest.mark.parametrize("skips_idle", [True, False])
@pytest.mark.parametrize("S, M, schedule, V", [
    (4, 12, "gpipe", 1), (4, 8, "interleaved", 2), (2, 6, "interleaved", 3), (4, 12, "1f1b", 1),
    (3, 2, "1f1b", 1), (2, 1, "1f1b", 1), (3, 5, "gpipe", 1)])
def test_a_timetable_can_be_run(S, M, schedule, V, skips_idle):
    """A pass that is missing, that overlaps with another on its stage, or that begins before what
    it needs has ended; a total time that is not the schedule's."""
    rows = [draw._work(stage, S, M, schedule, V, skips_idle) for stage in range(S)]
    ends = {}
    for stage, row in enumerate(rows):
        assert all(a[0] + a[1] <= b[0] + 1e-9 for a, b in zip(row, row[1:]))
        for at, width, m, chunk, is_back in row:
            ends[m, chunk * S + stage, is_back] = at, at + width
    assert len(ends) == 2 * M * S * V == sum(map(len, rows))
    last = S * V - 1
    for (m, place, is_back), (begin, _) in ends.items():
        needed = (m, place - 1, False) if not is_back else (
            (m, place + 1, True) if place < last else (m, last, False))
        assert needed not in ends or ends[needed][1] <= begin + 1e-9
    end = max(end for _, end in ends.values())
    assert end == pytest.approx(3 * passes(S, M, schedule, V, skips_idle) / V)
    most = [max(draw._waiting(row)) for row in rows]
    assert most == ([M * V] * S if schedule != "1f1b" else [min(M, 2 * (S - s)) for s in range(S)])


def test_the_ring_meets_every_pair_once():
    """A pair of a query and a key in a wrong turn; a slowest turn that is not the slowest."""
    said = [text for text in texts(draw.ring(4)) if text.startswith("slowest")]
    assert [text.split()[-2] for text in said] == ["15", "9"]
    turns = [text for text in texts(draw.ring(2)) if text.isdigit() and len(text) == 1]
    # Headings of columns, then of rows, with the turns of what they see.
    assert turns[:4] == ["0", "0", "0", "0"]        # part 0: column, row, its turn; column ...
    assert len(read(draw.ring(2)).findall(f".//{SVG}rect")) == 2 * 16


def test_the_roofline_puts_points_on_their_roof():
    """A point above or below its line; one that waits for bytes on the flat part."""
    picture = draw.roofline("chip", 1e14, {"links": 1e11}, {
        "low": ("links", 10.0), "ridge": ("links", 1000.0), "high": ("links", 1e5)})
    assert "low 10 operations a byte of links, where 1,000 are needed" in picture.title
    line = read(picture).findall(f"{SVG}polyline")[1]
    (x0, y0), (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in line.get("points").split())
    boxes = [(float(b.get("x")) + 8, float(b.get("y")) + 8)
             for b in read(picture).iter(f"{SVG}rect")][::2]
    (lx, ly), (rx, ry), (hx, hy) = boxes
    assert abs((ly - y0) / (lx - x0) - (y1 - y0) / (x1 - x0)) < 0.01 and lx < x1
    assert abs(rx - x1) < 1 and abs(ry - y1) < 1 and hy == ry and x1 < hx < x2


def test_other_pictures():
    """A length that is not in proportion; a token that goes to another expert than it chose."""
    bars = read(draw.bars("t", [("a", 1, "1", 0), ("b", 3, "3", 1)], ("limit", 6)))
    a, b = (float(box.get("width")) for box in bars.iter(f"{SVG}rect"))
    assert b == pytest.approx(3 * a) and b == 210
    chosen = np.array([[0, 3], [2, 3], [1, 0], [3, 2]])
    visits = read(draw.visits(chosen, 2, 4, (0, 2)))
    ends = [float(line.get("points").split(",")[-1]) for line in visits.iter(f"{SVG}polyline")]
    assert ends == [39 + 30 * e for e in (0, 3, 1, 0)]
    cut = [box.get("style")[5:] for box in read(draw.products(2)).iter(f"{SVG}rect")]
    assert cut.count(draw.COLORS[-1]) == 4 and len(cut) == 4 + 8 * 2
    assert texts(draw.curves("t", {"a": [(0, 1.0), (9, 2.0)]})) == ["2", "1", "9", "a"]
    assert texts(draw.steps("t", ["d0"], {"row": [[(0, "x"), None]]})) == ["d0", "row", "x"]
