"""Builds command lines from dataclasses, and sets exit statuses.

    --key value   --key=value   --some-key or --some_key   --data one two   --tied

The dataclass's fields are the flags; zigzag/core/options.py explains how to declare them.

    exit status   0 done   1 something failed while running   2 refused   130 interrupted
"""

import dataclasses
import inspect
import math
import os
import sys
import textwrap
from typing import Any, Callable, Sequence

from zigzag.core import start
from zigzag.core.errors import ConfigError, RunError, did_you_mean
from zigzag.core.options import PARTS, Groups, Values, comments, options
from zigzag.core.parts import added, commands, has_part, part, run_alone

# The words of a command line; None: this process's command line.
Argv = Sequence[str] | None

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def change(config: Any, **fields: Any) -> Any:
    """Return the config with these fields replaced, whether they are its own or its `network`'s."""
    own = {f.name for f in dataclasses.fields(config)}
    if inner := {name: fields.pop(name) for name in fields.keys() - own}:
        fields["network"] = dataclasses.replace(fields.get("network", config.network), **inner)
    return dataclasses.replace(config, **fields)


def flat(config: Any) -> Values:
    """Return {name: value} for all of a config's options: its `network`'s, then its own."""
    network = getattr(config, "network", None)
    return {name: getattr(one, name) for one in (network, config) if one is not None
            for name in options(type(one))}


def is_derived(config: Any, name: str) -> bool:
    """Return whether a field has the value it would have if left unset: its default, or a value
    derived from other fields."""
    owner = config if name in options(type(config)) else config.network
    default = getattr(type(owner), name)
    if getattr(owner, name) == default:
        return True
    try:
        usual = dataclasses.replace(owner, **{name: default})
    except ConfigError:         # another option needs this value
        return False
    return getattr(usual, name) == getattr(owner, name)


def recorded(values: Values, config: Any) -> Values:
    """Return a config's values, except values that apply only to a single command or process."""
    known = options(type(config))
    return {name: x for name, x in values.items() if name not in known or known[name].recorded}


def check_shards(given: Values) -> None:
    """Reject --shards 0 on a command line. In the config, 0 means not given."""
    if given.get("shards") == 0:
        raise ConfigError("--shards 0: expected at least 1; without it, --mesh sets the size of "
                          "the tensor axis")


def from_flags(defaults: Any, argv: Argv, positional: str = "") -> Any:
    """Return the dataclass `defaults` with the fields that the command line sets. If the command
    takes positional words (`positional` names them in messages), return (words, dataclass)."""
    given, words = parse_flags(type(defaults), argv, positional)
    result = dataclasses.replace(defaults, **given)
    return (words, result) if positional else result


def parse_flags(cls: Any, argv: Argv, positional: str = "",
                groups: Groups | None = None) -> tuple[Values, list[str]]:
    """Return ({field: value} for a command line's flags, its positional words). `cls` is a
    dataclass or a tuple of dataclasses, whose fields are the flags. If a flag is repeated, the last
    value wins; a flag that takes several values keeps them all. --help prints the flags in `groups`
    ({heading: names})."""
    argv = list(sys.argv[1:] if argv is None else argv)
    types = {name: option.kind for one in _classes(cls) for name, option in options(one).items()}
    given, words = {}, []
    while argv:
        word = argv.pop(0)
        if word in ("-h", "--help"):
            show_help(help_text(cls, groups))
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name not in types:
                near = did_you_mean(name, types, "--{}".format) or "; --help lists the options"
                known = has_part("tools") and part("tools.synonyms", "").meaning(
                    name.lower(), {*types, positional})
                raise ConfigError(f"--{name} is not an option{f'; {known}' if known else near}"
                                  + _of_parts_that_are_gone())
            values = [value] if equals else []
            while argv and not argv[0].startswith("--") and (
                    not values or types[name] is tuple):
                values.append(argv.pop(0))
            given[name] = _value(name, types[name], values, given)
        elif positional:
            words.append(word)
        else:
            raise ConfigError(f"{word!r} has no flag in front: write options as --name value"
                              + did_you_mean(word.lstrip("-"), types, "--{}".format))
    return given, words


def _of_parts_that_are_gone():
    gone = [f"{part}/" for part in PARTS if not has_part(part)]
    return f"; it may belong to {' or '.join(gone)}, which this copy does not have" if gone else ""


def _value(name, kind, values, given):
    """Parse the words after --name into a value of type `kind`."""
    if kind is tuple:
        if not values:
            raise ConfigError(f"--{name} needs at least one value")
        return given.get(name, ()) + tuple(values)
    if not values and kind is not bool:
        raise ConfigError(f"--{name} needs a value ({kind.__name__})")
    text = values[0] if values else "true"
    try:
        text.encode()       # fails for bytes that aren't UTF-8
        value = BOOLS[text.lower()] if kind is bool else (
            _integer(text) if kind is int else kind(text))
    except (ValueError, KeyError):
        expected = {int: "an integer", float: "a number", bool: "true or false",
                    str: "text in UTF-8"}[kind]
        raise ConfigError(f"--{name} {text}: expected {expected}") from None
    if kind in (int, float) and not abs(value) < (2**31 if kind is int else math.inf):
        raise ConfigError(f"--{name} {text}: expected a finite number"
                          + " below 2**31" * (kind is int))
    return value


def _integer(text):
    """Parse an integer written as 1000, 1_000 or 1e3."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


def flag_rows(cls: Any) -> list[tuple[str, str, str]]:
    """Return (name, default, help) for every option, with base classes' options last."""
    return [(name, "" if option.default in ("", (), None) else str(option.default),
             comments(one)[name].help) for one in _classes(cls)
            for name, option in options(one).items() if not option.part or has_part(option.part)]


def _classes(cls):
    return cls if isinstance(cls, tuple) else (cls,)


def help_text(cls: Any, groups: Groups | None = None, last: str = "",
              values: Values = {}, about: str | None = None) -> str:
    """Return the text of --help: the flags in these groups (by default all, without a heading) and
    a last line. `values` replace defaults; `about` replaces the last class's docstring."""
    rows = {name: _help_line(name, str(values.get(name, default)), text)    # the first class wins
            for name, default, text in reversed(flag_rows(cls))}
    lines = [about.strip() if about else inspect.cleandoc(_classes(cls)[-1].__doc__)]
    for group, names in (groups or {"": list(reversed(rows))}).items():
        found = [rows[name] for name in names if name in rows]
        lines += ["", *([f"{group}:"] if group else []), *found] if found else []
    return "\n".join(lines + (["", last] if last else []))


def show_help(text: str) -> None:
    """Print the text and exit with status 0, even if `| head` closes the pipe early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drop_output()
    sys.exit(0)


def _drop_output():
    """Discard all further output, including anything still in Python's buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help_line(name, default, text):
    return textwrap.fill(f"{text}  [{default}]" if default else text, 100,
                         initial_indent=f"  --{name:18} ", subsequent_indent=" " * 23,
                         break_long_words=False, break_on_hyphens=False)


IN_TRAINING = ("try a larger --mesh, --remat full or a larger --accumulate (python shard.py prints "
               "the memory of the weights)")


def exit_line(error: BaseException, saves_memory: str = IN_TRAINING) -> tuple[int, str]:
    """Return the exit status of a command that ended with this exception, and a line that says why.
    For a bug, which needs its traceback, the line is ''."""
    if isinstance(error, ConfigError):
        return 2, "error: " + " ".join(str(error).split())
    if isinstance(error, RunError):
        return 1, f"error: {error}"
    if isinstance(error, OSError) and error.errno:      # a full disk, a file that can't be written
        return 1, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, ("interrupted: run the same command to continue from the last checkpoint, if "
                     "any")
    # Match by name, because data.py runs without jax.
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return 1, f"error: out of memory: {str(error).splitlines()[0]}; {saves_memory}"
    return 1, ""


def run_main(main: Callable[[], Any], saves_memory: str = IN_TRAINING) -> None:
    """Run a command. If it fails, exit with the right status, after printing a single line, or a
    traceback for a bug. Escape characters that the output can't encode."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:          # closed, as by >&-
            setattr(sys, name, open(os.devnull, mode))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    start.has_begun()
    try:
        _run_to_the_end(main)
    except (Exception, KeyboardInterrupt) as e:
        status, line = exit_line(e, saves_memory)
        if not line:
            raise
        print(line, file=sys.stderr, flush=True)
        if isinstance(e, (RunError, OSError)):      # after a failed save, exit would print more
            sys.stdout.flush()
            os._exit(status)
        sys.exit(status)


def _run_to_the_end(main):
    """Run a command and flush its output. Fail if the reader, for example head, closes the pipe
    before the command is done."""
    try:
        main()
    except BrokenPipeError:
        _drop_output()
        raise RunError("the reader closed the output before this command finished") from None
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()


def begin() -> None:
    """Start train.py before it imports jax: if a part's command doesn't need jax (--plot), run it
    and exit; otherwise call start.begin."""
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    for flag, command in commands().items():
        if command.alone and f"--{flag}" in words and {"-h", "--help"}.isdisjoint(words):
            run_main(lambda: run_alone(flag, parse_flags(tuple(added("OfTraining")), None)[0]))
            sys.exit(0)
    start.begin()
