"""README's tables that follow from the code, written anew in place:

    python -m zigzag.tests.readme           the flags, and the losses on each mesh (minutes)
    python -m zigzag.tests.readme flags     the flags alone

Tests compare README with the same functions.
"""

import re
import sys
from pathlib import Path

import model
import train
from networks import transformer
from zigzag.core.flags import flag_rows

README = Path(__file__).parents[2] / "README.md"
FLAGS = re.compile(r"(?<=<!-- flags -->\n).*?(?=<!-- end of flags -->)", re.S)
LOSSES = re.compile(r"^\| (one device|`(--.*?)`) \| ([\d.]+) \| ([\d.]+) \|$", re.M)


def flags_table():
    """A row for each flag of train.py: its name, default and help. In a second table the options
    that the plain decoder lacks."""
    own = flag_rows((model.Config, train.Config))
    names = {name for name, *_ in own}
    more = [row for row in flag_rows(transformer.Config) if row[0] not in names]
    about = "Options of the general network (`--model transformer`, and published models):"
    return "\n".join([*_table(own), "", about, "", *_table(more), ""])


def _table(rows):
    return ["| flag | default | |", "|---|---|---|", *(
        f"| `--{name}` | {default and f'`{default}`'} | {text} |" for name, default, text in rows)]


def losses_table(text, run_layout):
    """README's text with the losses that each of its layouts has now."""
    def row(match):
        losses = run_layout(match[2] or "")[0].losses
        print(match[1], losses[0], losses[-1], flush=True)
        return f"| {match[1]} | {losses[0]:.6f} | {losses[-1]:.6f} |"

    return LOSSES.sub(row, text)


if __name__ == "__main__":
    text = FLAGS.sub(lambda _: flags_table(), README.read_text())
    if sys.argv[1:] != ["flags"]:
        from zigzag.tests.top.test_meshes import run_layout
        text = losses_table(text, run_layout)
    README.write_text(text)
