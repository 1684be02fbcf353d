"""The parts: folders next to zigzag/ that a fork may delete, and the only way to load them.

    part("published", "--model gpt2")      load the module, or fail with a one-line message
    has_part("forecast")                   return whether this copy has the part
    added("OfTraining")                    list what this copy's parts declare under this name
    here(["hf://datasets/org/name"])       return where this data is on this machine
    place("gs://bucket/run")               return where this run is on this machine (ask stores/)

Neither zigzag/ nor any of the five files imports a part. They load its modules here, by name. A
part's adds.py declares what it adds to the command lines:

    OfTraining      a dataclass: flags for train.py, and for scripts that call train.parse
    OfSampling      a dataclass: flags for sample.py
    COMMANDS        {flag: Command}: what train.py does instead of training
    SAMPLING        {flag: module}: what sample.py does instead of answering prompts
    NOT_USED        {sample.py flag: Unused}; NEEDS, {sample.py flag: flags that it needs}
    STEPS           {flag: module}: the module's `check(program)` may refuse the run, and its
                    `watched(loop)` returns the step to run instead
    PROGRAMS        {flag: module}: `rewritten(step, plan)` returns the step to compile instead
"""

import collections
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Sequence

from zigzag.core.errors import ConfigError, as_given
from zigzag.core.options import PARTS, ROOT, Values, without
from zigzag.core.options import has_part as has_part


class Unused(NamedTuple):
    """The option groups, and individual options, that have no effect if a certain flag is given."""
    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Command(NamedTuple):
    """The command that a part's flag runs instead of training or answering prompts."""
    module: str                     # the module that defines its `run`
    unused: tuple[str, ...] = ()    # other commands that can't be given with this one
    alone: bool = False             # it needs no jax, and only the flags `beside` affect it
    beside: tuple[str, ...] = ()


def part(module: str, asked: str) -> ModuleType:
    """Load a part's module, such as `tools.beams`. If it's missing, say that `asked` needs it."""
    name = module.partition(".")[0]
    if not has_part(name):
        raise ConfigError(f"{asked}: needs {name}/, which this copy does not have")
    package = importlib.import_module(name)
    if Path(package.__file__ or "").resolve().parent != ROOT / name:    # a user's own folder
        raise ConfigError(f"{asked or name}: {package.__file__} hides {ROOT / name}, which has the "
                          f"same name; rename one")
    return importlib.import_module(module)


def added(name: str) -> list[Any]:
    """List what this copy's parts declare under this name in their adds.py."""
    found = [part(f"{one}.adds", f"the flags of {one}/") for one in PARTS
             if (ROOT / one / "adds.py").exists()]
    return [getattr(module, name) for module in found if hasattr(module, name)]


def commands() -> dict[str, Command]:
    """Return {flag: Command} for all of this copy's parts."""
    return {**collections.ChainMap(*added("COMMANDS"))}


def refuse(given: Values, where: str) -> None:
    """Reject the flags `given`, if any. `where` says where they have no effect."""
    if given:
        flags = " and ".join(f"--{name} {as_given(value)}" for name, value in given.items())
        raise ConfigError(f"{flags}: no effect {where}; leave out")


def run_alone(flag: str, given: Values) -> None:
    """Run the command of a flag such as --plot, which needs no jax and no flags of training."""
    command = commands()[flag]
    refuse(without(given, flag, *command.beside), f"with --{flag}")
    part(command.module, f"--{flag}").run(**given)


# {a folder that stores/ keeps for an address: the stores.mirror.Mirror that fills it}
mirrors: dict[Path, Any] = {}


def place(path: str | Path) -> Path:
    """Return where a run is on this machine. For an address, stores/ keeps a folder here."""
    is_address = isinstance(path, str) and "://" in path
    return part("stores", path).run_folder(path.rstrip("/")) if is_address else Path(path)


# {how an address begins: the module whose `files` returns a local path for it}
ADDRESSES = {"hf": "published.hub_names"}


def here(paths: Sequence[str]) -> list[str]:
    """Return where the paths in --data are on this machine. If a path is an address, the part
    that reads such addresses downloads what isn't here yet."""
    found = []
    for path in paths:
        scheme, is_address, _ = str(path).partition("://")
        if is_address:
            path = part(ADDRESSES.get(scheme, "stores"), f"--data {path}").files(path)
        found.append(path)
    return found
