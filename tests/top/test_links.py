"""README and docs/: their links, and README's table of parts."""

import re

import pytest

from tests import parts
from tests.parts import PARTS, is_there
from tests.readme import AGENTS, PAGES, README, ROOT
from tests.sizes import PLAIN, lines

PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def without_code(page):
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def test_readme_is_short():
    """README that grows into a reference again, line by line, or a cell after the other."""
    for page, most in ((README, 200), (AGENTS, 60)):
        lines = page.read_text().splitlines()
        assert len(lines) <= most, f"{page.name}: {len(lines)} lines; move reference to docs/"
        rows = [line for line in lines if line.startswith("|")]
        assert all(len(cell) <= 120 for row in rows for cell in row.split("|")), page.name


def anchors(page):
    """The names by which GitHub links to a page's headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)", without_code(page), re.M)}


def part_of(page, before):
    """The part whose paragraph, or row of README's table, a link is in; `before` is the text before
    the link."""
    line = before.rpartition("\n")[2]
    if row := re.match(r"\| \[(\w+)/\]\(", line + "["):
        return row[1]
    marked = re.findall(r"<!-- (\w+)/ -->", before.rpartition("\n\n")[2])
    return marked[-1] if marked else next(
        (name for name, part in PARTS.items() if page.name in part.pages), "")


@PAGE
def test_links_lead_somewhere(page):
    """A file or a heading that was renamed; a link to a part, which may be deleted, outside of that
    part's own paragraphs."""
    text = without_code(page)
    for found in re.finditer(r"\]\(([^)]+)\)", text):
        link = found[1]
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        first = target.relative_to(ROOT).parts[0]
        if first in PARTS:
            own = part_of(page, text[:found.start()] + "](")
            assert own == first, f"{page.name}: {link}: not in a paragraph of {first}/"
            if not is_there(first):
                continue
        assert target.exists(), f"{page.name}: {link}: no such file"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: no such heading"


def test_readme_has_the_table_of_parts():
    """Lines, or what needs what, of an earlier commit."""
    table = README.read_text().split("<!-- parts -->\n")[1].split("<!-- end of parts -->")[0]
    assert table == parts.table() or not all(map(is_there, PARTS)), "python -m tests.parts"
    rest = parts.lines("zigzag") + lines(*(ROOT / name for name in PLAIN))
    assert f"remain: {rest:,} lines" in README.read_text()


def test_every_page_is_linked_from_readme():
    """A page that no reader finds."""
    for page in PAGES[2:]:
        assert f"](docs/{page.name})" in README.read_text(), page.name
