"""What is declared of an option: its type, its comment, its values, all in one place."""

import dataclasses
import math

from tests.common import refuses
from zigzag.core import flags
from zigzag.core.options import check_values, comments, fits, flag, options


@dataclasses.dataclass(frozen=True)
class Own:
    """a command of a fork"""
    # work
    size: int = 3 # one space before the sign
    rate: float | None = None   # how fast; not given: as size
                                # says
    kind: str = flag("a", one_of=("a", "b"))
                                # which one
    share: float = flag(0.5, least=-1) #no space after it
    many: tuple[str, ...] = flag((), of=("text",))

    # TODO: nobody's heading
    other: int = 0
    # rest (rare)
    last: bool = False  # at the end


def test_a_comment_is_the_help_however_it_is_spaced():
    """A help that is silently empty because of one space; the help of the next option at the end of
    this one's; a heading as help."""
    found = comments(Own)
    assert found["size"].help == "one space before the sign"
    assert found["rate"].help == "how fast; not given: as size says"
    assert (found["kind"].help, found["share"].help) == ("which one", "no space after it")
    assert found["other"].group == "work", "a comment that is no heading"
    assert found["many"] == ("", "work", False) and found["last"] == ("at the end", "rest", True)


def test_types_are_those_of_the_annotations():
    """A type taken from a default: None has none, and 0 would make a number whole."""
    kinds = {name: (option.kind, option.is_optional) for name, option in options(Own).items()}
    assert kinds == {"size": (int, False), "rate": (float, True), "kind": (str, False),
                     "share": (float, False), "many": (tuple, False), "other": (int, False),
                     "last": (bool, False)}
    given, _ = flags.parse_flags(Own, ["--rate", "0", "--share", "-1", "--last"])
    assert given == {"rate": 0.0, "share": -1.0, "last": True}
    assert [fits(options(Own)["rate"], x) for x in (None, 1, 0.5, "a", True)] == [
        True, True, True, False, False]
    assert not fits(options(Own)["size"], None) and not fits(options(Own)["size"], 0.5)


def test_values_that_are_not_declared_are_refused():
    """A value that is checked in a table elsewhere, which a new option is not in."""
    check_values(Own(rate=0.0, share=-1.0))
    for changes, says in ((dict(size=-1), "--size -1: must be a number of at least 0"),
                          (dict(rate=-1.0), "--rate -1.0: must be"),
                          (dict(share=-1.5), "--share -1.5: must be a number of at least -1"),
                          (dict(share=math.nan), "--share nan"),
                          (dict(size=2**70), "at least 0 and below 9.2"),
                          (dict(kind="c"), "--kind c: expected a or b")):
        with refuses(says):
            check_values(Own(**changes))
