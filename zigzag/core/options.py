"""Options: the fields of a config, each declared in a single place.

    # data                                  a heading: --help groups the fields below it. Only
                                            --help all shows a group such as `# data (rare)`
    batch: int = 8  # examples in an update
    steps: int = flag(900, least=1)     # `flag` sets more than the default (see below), and the
                                        # help continues in comments that are indented further

`name: type = default  # help` is a complete declaration. The annotation is the type; an option of
type `float | None` is None unless given.
"""

import ast
import dataclasses
import functools
import inspect
import io
import math
import re
import textwrap
import tokenize
import types
import typing
from pathlib import Path
from typing import Any, Callable, Collection, Mapping, NamedTuple, Sequence

from zigzag.core.errors import ConfigError, did_you_mean

# {name: value}: the flags given, a config's fields, facts about a run, or the numbers in a line of
# its metrics.jsonl.
Values = dict[str, Any]
# {heading in --help: names of options}
Groups = dict[str, Sequence[str]]

ROOT = Path(__file__).resolve().parents[2]
# The parts that may add flags (parts.py). stores/ adds none; recipes/ and learn/ sit above us.
PARTS = "published", "forecast", "tools", "tasks", "accounts", "precision"


def has_part(name: str) -> bool:
    """Return whether this copy has a part: a folder next to zigzag/ that a fork may delete."""
    return (ROOT / name / "__init__.py").exists()


def only(values: Mapping[str, Any], *names: str) -> Values:
    """Return the values that have one of these names."""
    return {name: value for name, value in values.items() if name in names}


def without(values: Mapping[str, Any], *names: str) -> Values:
    """Return the values that have none of these names."""
    return {name: value for name, value in values.items() if name not in names}


def flag(default: Any, **said: Any) -> Any:
    """Declare a config field with more than a default. `said` may set any of Option's fields that
    have a default."""
    return dataclasses.field(default=default, metadata=said)


class Option(NamedTuple):
    """The declaration of a single option."""
    kind: type              # int, float, str, bool or tuple
    is_optional: bool       # whether it may be None, which means not given
    default: Any
    least: float = 0        # the smallest value allowed for a number
    below: float = 2.0**63  # an upper bound that a number must stay below
    one_of: Collection[Any] = ()    # the only values allowed
    check: Callable | None = None   # a function that raises a ConfigError for bad values
    same: bool = False      # it affects results, so it must stay the same when the run resumes; so
                            # must all fields of a network except ComputeOptions's
    change: str = ""        # the word for --change that allows a new value anyway
    of: Sequence[str] = ()  # the kinds of data (files in tasks/) that use it; (): all
    recorded: bool = True   # whether config.json records it; False: it applies only to a single
                            # command or process
    beside: str = ""        # another option: if either of the two is given when a run resumes, the
                            # run's value of the other is dropped
    part: str = ""          # the part (parts.py) that this copy needs in order to list it in --help


@functools.cache
def options(cls: type) -> dict[str, Option]:
    """Return {name: Option} for a dataclass: its own options first, then its base classes'. A field
    that is itself a config isn't an option."""
    kinds, found = typing.get_type_hints(cls), {}
    names = [name for owner in cls.__mro__ for name in inspect.get_annotations(owner)]
    for f in sorted(dataclasses.fields(cls), key=lambda f: names.index(f.name)):
        if not dataclasses.is_dataclass(f.default):
            # tuple[str, ...] counts as tuple, and float | None as float. Any and Literal["a", "b"]
            # aren't in KINDS, so their default decides.
            is_union = typing.get_origin(kinds[f.name]) in (typing.Union, types.UnionType)
            said = [typing.get_origin(kind) or kind for kind in (
                typing.get_args(kinds[f.name]) if is_union else [kinds[f.name]])]
            kind = next((kind for kind in said if kind in KINDS), type(f.default))
            is_negative = kind in (int, float) and f.default is not None and f.default < 0
            found[f.name] = Option(kind, type(None) in said, f.default, **{
                "least": -math.inf if is_negative else 0, **f.metadata})
    return found


KINDS = (int, float, str, bool, tuple)


# A heading above options: one to three lowercase words. --help ignores other comments there.
HEADING = re.compile(r"[a-z]+( [a-z]+){0,2}( \(rare\))?")


class Comment(NamedTuple):
    """An option's help and group, from the comments next to and above it."""
    help: str = ""
    group: str = ""
    is_rare: bool = False


@functools.cache
def comments(cls: type) -> dict[str, Comment]:
    """Return {name: Comment} for a dataclass's options."""
    found = {}
    for owner in reversed(cls.__mro__[:-1]):        # the last is object
        found |= _comments_of(owner)
    return {name: found.get(name, Comment()) for name in options(cls)}


def _comments_of(cls):
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):        # a class typed at a prompt has no source
        return {}
    fields = [one for one in ast.parse(source).body[0].body if isinstance(one, ast.AnnAssign)]
    owners = {line: f for f in fields for line in range(f.lineno, f.end_lineno + 1)}
    texts, headings = {f: [] for f in fields}, {}       # headings by the number of the next line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, indent), text = token.start, token.string.lstrip("#").strip()
            above, is_alone = owners.get(line - 1), token.line[:indent].isspace()
            if above and is_alone and indent > above.col_offset:        # the help continues
                owners[line] = above
            if line in owners:
                texts[owners[line]].append(text)
            elif is_alone and HEADING.fullmatch(text):
                headings[line + 1] = text
    found, heading = {}, ""
    for f in fields:
        heading = headings.get(f.lineno, heading)
        found[f.target.id] = Comment(" ".join(texts[f]), heading.removesuffix(" (rare)"),
                                     heading.endswith(" (rare)"))
    return found


def check_values(config: Any) -> None:
    """Reject values that a config's options don't allow."""
    for name, option in options(type(config)).items():
        value = getattr(config, name)
        if value is None and option.is_optional:
            continue
        if option.one_of and value not in option.one_of:
            known = [str(one) for one in option.one_of if one != ""]
            raise ConfigError(f"--{name} {value}: expected {' or '.join(known)}"
                              + did_you_mean(str(value), known))
        if option.check:
            option.check(value)
        is_number = option.kind in (int, float)
        if is_number and not (option.least <= value < option.below and math.isfinite(value)):
            raise ConfigError(f"--{name} {value}: must be a number of at least {option.least:g}"
                              + f" and below {option.below:g}" * (value >= option.least))


def fits(option: Option, value: Any) -> bool:
    """Return whether a value from JSON has the option's type."""
    if value is None:
        return option.is_optional
    kinds = {float: (int, float), tuple: list}.get(option.kind, option.kind)
    return isinstance(value, kinds) and (option.kind is bool or not isinstance(value, bool))


def changes(cls: type) -> dict[str, str]:
    """Return {option: the word for --change that allows a new value}."""
    return {name: option.change for name, option in options(cls).items() if option.change}
