"""README and the pages of docs/: their code blocks, and the tables that follow from the code.

    python -m tests.readme           write the tables of flags and of losses (minutes)
    python -m tests.readme flags     write the table of flags alone

Tests compare the pages with the same functions.
"""

import functools
import re
import sys
from pathlib import Path

import model
import train
from zigzag.core.flags import flag_rows
from zigzag.core.parts import part

ROOT = Path(__file__).parents[1]
README, AGENTS, FLAGS_PAGE = (ROOT / page for page in ("README.md", "AGENTS.md", "docs/flags.md"))
LOSS_PAGES = ROOT / "docs/parallelism.md", README       # README has some rows of the first
PAGES = [README, AGENTS, *sorted((ROOT / "docs").glob("*.md"))]

FLAGS = re.compile(r"(?<=<!-- flags -->\n).*?(?=<!-- end of flags -->)", re.S)
LOSSES = re.compile(r"^\| (one device|`(--.*?)`) \| ([\d.]+) \| ([\d.]+) \|$", re.M)


def blocks(page, kind="python"):
    """The code blocks of one kind in a page."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.S)


def block(page, text, kind="python"):
    """The only code block of a page that contains this text."""
    found, = (code for code in blocks(page, kind) if text in code)
    return found


def flags_table():
    """Markdown tables with the name, default and help of each flag of train.py: of the plain
    decoder and the run, then of the options that only the general network has."""
    own = flag_rows((model.Config, train.Config))
    names = {name for name, *_ in own}
    transformer = part("published.transformer", "the page of flags")
    more = [row for row in flag_rows(transformer.Config) if row[0] not in names]
    about = "## Options of the general network"
    use = "For `--model transformer` and published models that need them:"
    return "\n".join([*_table(own), "", about, "", use, "", *_table(more), ""])


def _table(rows):
    return ["| flag | default | |", "|---|---|---|", *(
        f"| `--{name}` | {default and f'`{default}`'} | {text} |" for name, default, text in rows)]


def write_flags():
    """Write the tables of flags into their page."""
    FLAGS_PAGE.write_text(FLAGS.sub(lambda _: flags_table(), FLAGS_PAGE.read_text()))


def write_losses(losses_of):
    """Write losses_of(flags), the losses of a run, into each row of the tables of losses."""
    losses_of = functools.cache(losses_of)

    def row(match):
        losses = losses_of(match[2] or "")
        print(match[1], losses[0], losses[-1], flush=True)
        return f"| {match[1]} | {losses[0]:.6f} | {losses[-1]:.6f} |"

    for page in LOSS_PAGES:
        page.write_text(LOSSES.sub(row, page.read_text()))


if __name__ == "__main__":
    write_flags()
    if sys.argv[1:] != ["flags"]:
        from tests.top.test_meshes import run_layout
        write_losses(lambda flags: run_layout(flags)[0].losses)
