"""docs/compared.md: what the page says about the size of zigzag."""

import re

import pytest

from tests.parts import of_the_whole
from tests.sizes import COMPARISON, PAGE, TABLE, comparison, figures, sizes, table


@of_the_whole
def test_the_table_has_the_sizes_of_today():
    """Sizes in a page that were a sixth too low a day after they were written, and a new folder
    that the page leaves out. (python -m tests.sizes write renews them.)"""
    tables = TABLE.findall(PAGE.read_text())
    assert len(tables) == 1 and figures(table()) == sizes(), "the table is no longer read"
    page, code = figures(tables[0]), sizes()
    assert page.keys() == code.keys(), page.keys() ^ code.keys()
    wrong = {part: (n, code[part]) for part, n in page.items()
             if n != pytest.approx(code[part], rel=0.1)}
    assert not wrong, f"lines in the page, and in the code: {wrong}"


@of_the_whole
def test_the_comparison_has_the_sizes_of_today():
    """Our row beside those of others, which kept the size of an earlier day and so compared it with
    theirs. (python -m tests.sizes write renews it.)"""
    rows = COMPARISON.findall(PAGE.read_text())
    assert len(rows) == 1, rows
    page, code = ([int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", row)]
                  for row in (rows[0], comparison()))
    assert len(code) == 4 and page == pytest.approx(code, rel=0.1)
