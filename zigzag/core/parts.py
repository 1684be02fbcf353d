"""The parts: folders next to zigzag/ that a fork may delete, and the only way to their modules.

    part("published", "--model gpt2")      the module, or a one-line refusal
    has_part("forecast")                   whether this copy has it
    added("OfTraining")                    what the parts of this copy add under this name

Neither zigzag/ nor any of the five files imports a part. They ask for a module of one here, by its
name. The file adds.py of a part declares what it adds to command lines:

    OfTraining      a dataclass: flags of train.py, and of scripts that call train.parse
    OfSampling      a dataclass: flags of sample.py
    COMMANDS        {flag: Command}: what train.py does instead of training
    SAMPLING        {flag: module}: what sample.py does instead of answering prompts
    NOT_USED        {flag of sample.py: Unused}; NEEDS, {flag of sample.py: flags that it needs}
"""

import collections
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from zigzag.core import start
from zigzag.core.errors import ConfigError
from zigzag.core.flags import parse_flags, run_main
from zigzag.core.options import PARTS, ROOT
from zigzag.core.options import has_part as has_part


class Unused(NamedTuple):
    """The groups of options, and the single options, that have no effect with a flag."""
    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Command(NamedTuple):
    """What a flag of a part does instead of training or answering prompts."""
    module: str                     # the module with its function `run`
    unused: Unused | None = None    # None: no other option has an effect on it
    beside: tuple[str, ...] = ()    # except these; with some, it runs before jax is imported


def part(module: str, asked: str) -> ModuleType:
    """A module of a part, for example `tools.beams`. The refusal says that `asked` needs it."""
    name = module.partition(".")[0]
    if not has_part(name):
        raise ConfigError(f"{asked}: needs {name}/, which this copy does not have")
    package = importlib.import_module(name)
    if Path(package.__file__ or "").resolve().parent != ROOT / name:    # a user's own folder
        raise ConfigError(f"{asked or name}: {package.__file__} hides {ROOT / name}, which has its "
                          f"name; give one of them another")
    return importlib.import_module(module)


def added(name: str) -> list[Any]:
    """What the parts of this copy declare under this name in their adds.py."""
    found = [part(f"{one}.adds", f"the flags of {one}/") for one in PARTS
             if (ROOT / one / "adds.py").exists()]
    return [getattr(module, name) for module in found if hasattr(module, name)]


def commands() -> dict[str, Command]:
    """{flag: Command} for all parts of this copy."""
    return {**collections.ChainMap(*added("COMMANDS"))}


def begin() -> None:
    """Start train.py, before it imports jax: run a part's command that does not need jax (--plot)
    and exit, or else call start.begin."""
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    for flag, command in commands().items():
        if command.beside and f"--{flag}" in words and {"-h", "--help"}.isdisjoint(words):
            run_main(lambda: _run_alone(flag, command))
            sys.exit(0)
    start.begin()


def _run_alone(flag, command):
    given, _ = parse_flags(tuple(added("OfTraining")), None)
    if other := given.keys() - {flag, *command.beside}:
        raise ConfigError(f"--{min(other)}: no effect with --{flag}; leave it out")
    part(command.module, f"--{flag}").run(**given)
