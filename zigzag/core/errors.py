"""The exceptions that end a command with a message, and helpers for writing messages.

ConfigError and RunError end a command with a single line, `error: ...`, and exit status 2 or 1 (see
flags.run_main). Every other exception is a bug and prints a traceback.
"""

import contextlib
import difflib
import importlib
import re
import sys
from typing import Any, Callable, Iterable, Iterator, Sequence

# Control characters except tab and newline. Text must not move the cursor or rename the window.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ConfigError(ValueError):
    """A rejected value. The message names the value given and the values accepted."""


def any_loss(*axes: str) -> str:
    """Return the end of a message that rejects these axes (tensor, or tensor=2). It says which axes
    do work."""
    others = [axis for axis in ("data", "fsdp", "tensor")
              if axis not in {text.partition("=")[0] for text in axes}]
    where = " and ".join(filter(None, [", ".join(others[:-1]), *others[-1:]])) or "one device"
    return f"any loss that is a sum over rows trains on {where}"


def count_of_other_time(seq: int) -> ConfigError:
    """Return the error for a loss whose sum covers part of the sequence but whose count doesn't."""
    return ConfigError(
        f"mesh axis seq={seq}: this loss's sum covers a device's part of the sequence, but its "
        f"count does not: it is a constant, the number of rows, or a sum over the whole sequence; "
        f"pool the result of shard.whole_time, or count the sum of the batch's weights [B, T] and "
        f"multiply each row's loss by the sum of its weights; {any_loss()}")


class RunError(RuntimeError):
    """A failure at run time, with a one-line message."""


class CorruptCheckpoint(Exception):
    """An unusable checkpoint; the message says why."""


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what` in front of the message of any ConfigError raised in this context."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{what}: {e}") from e.__cause__


def optional_package(name: str, what: str) -> Any:
    """Import a package, or a module from one. If it's missing, raise a ConfigError that says that
    `what` needs it, and how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        name = name.split(".")[0]
        raise ConfigError(f"{what} needs the package {name}: pip install {name}") from None


def fill_in(config: Any, **sizes: int | float) -> None:
    """In a frozen config, set each of these sizes that is still zero, which means "derive it"."""
    for name, value in sizes.items():
        if not getattr(config, name):
            object.__setattr__(config, name, value)


def derive(config: Any, **values: Any) -> None:
    """In a frozen config, set each of these options that is still None, which means "not given"."""
    for name, value in values.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


def did_you_mean(word: str, known: Iterable[str], spell: Callable = repr, near: float = 0.7
                 ) -> str:
    """Return '; did you mean X?' for the known name closest to `word`, or '' if none reaches a
    similarity of `near` (1: identical)."""
    close = difflib.get_close_matches(word, known, 1, near)
    return f"; did you mean {spell(close[0])}?" if close else ""


def divisors(value: int) -> list[int]:
    """Return all divisors of `value`, smallest first."""
    return [n for n in range(1, value + 1) if value % n == 0]


def nearest_divisor(value: int, near: int) -> int:
    """Return the divisor of `value` closest to `near`."""
    return min(divisors(value), key=lambda n: abs(n - near))


def nearest_multiple(of: int, near: int) -> int:
    """Return the positive multiple of `of` closest to `near`."""
    return max(1, round(near / of)) * of


def one_line(error: BaseException) -> str:
    """Return the important part of an exception's text, on a single line."""
    text = " ".join(str(error).split()) or type(error).__name__
    for part in ("No space left", "File too large", "DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND"):
        if part in text:
            return part.lower().replace("_", " ")
    return text.split(" See full TensorStore")[0][:120]


def listed(items: Sequence[str], most: int) -> str:
    """List the first `most` items as text, and say how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def as_given(value: Any) -> str:
    """Return an option's value as written on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def printable(text: str) -> str:
    """Replace the text's control characters, which a terminal would obey."""
    return CONTROL.sub("\ufffd", text)


def human_bytes(size: float) -> str:
    """Format a size, for example 1.5 kB or 120 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            break
        size /= 1000
    else:
        unit = "TB"
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def check_length(axis: str, name: str, value: int, parts: int, why: str = "") -> None:
    """Reject an option --name whose value doesn't divide into the `parts` that a mesh axis needs.
    `axis` is written axis=size."""
    if value % parts:
        raise ConfigError(f"mesh axis {axis}: --{name} {value} does not divide into {parts}{why}; "
                          f"the nearest that does is --{name} {nearest_multiple(parts, value)}")


def note(text: str) -> None:
    """Print a note to the user, on stderr."""
    print(f"note: {text}", file=sys.stderr, flush=True)
