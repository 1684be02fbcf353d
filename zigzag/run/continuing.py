"""Continuing a run: its folder has the values that the command line does not give.

    left_out       the values that a command takes from the run that it continues
    check_change   refuse a --change that changes nothing
    check_steps    refuse fewer steps than the run has made
    first_lines    the first lines to print: which run continues from which step, and its schedule
    changes_text   the changes made by --change, as text
"""

from typing import Any, Callable, Iterator

import jax.numpy as jnp

from zigzag.core.errors import ConfigError
from zigzag.disk.checkpoint import CHANGEABLE, newest_step

# Flags that belong together: if one is given, the run's value of the other is dropped.
TOGETHER = (("mesh", "shards"), ("schedule", "chunks"))
# The fields on which the learning rate of a step depends.
SCHEDULE = ("steps", "warmup", "lr")


def left_out(given: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The fields of the run (`old`) that the flags (`given`) do not change."""
    dropped = {name for names in TOGETHER if given.keys() & set(names) for name in names}
    return {name: value for name, value in old.items() if name not in dropped | given.keys()}


def check_change(given: dict[str, Any], out: str, is_run: bool) -> None:
    """Refuse a --change that changes nothing."""
    change = given.get("change", ())
    if change and not is_run:
        raise ConfigError(f"--change {' '.join(change)}: --out {out} holds no run to change; leave "
                          f"it out to begin one")
    for name in change:
        # (--data may be the same path with other text.)
        if name in CHANGEABLE and name not in given and name != "data":
            raise ConfigError(f"--change {name}: give --{name} too, with its new value")


def check_steps(given: dict[str, Any], out: str) -> None:
    """Refuse --steps that the run has already passed: nothing would be trained."""
    at = newest_step(out)
    if given.get("steps", at) < at:
        raise ConfigError(f"--steps {given['steps']}: --out {out} is at step {at:,} already; give "
                          f"more than that, or leave --steps out")


def first_lines(config: Any, old: Any, learning_rate: Callable) -> Iterator[str]:
    """Yield the lines to print when `config` continues a run whose configuration was `old`.
    learning_rate(config, step) is train.py's."""
    at = newest_step(config.out)
    yield f"continuing {config.out} at step {at:,} of {config.steps:,}" + (
        "" if at else ": it has no checkpoint yet")
    changed = [f"{name} {getattr(old, name):,} -> {getattr(config, name):,}" for name in SCHEDULE
               if getattr(old, name) != getattr(config, name)]
    another = "" if "lr" in config.change else "; --lr X --change lr gives it another peak"
    if changed and 0 < at < config.steps:
        before, after = (float(learning_rate(c, jnp.int32(step)))
                         for c, step in ((old, at - 1), (config, at)))
        yield (f"schedule {', '.join(changed)}: the learning rate was {before:.1e} at step {at:,} "
               f"and will be {after:.1e} at step {at + 1:,}{another}")


def changes_text(changed: dict[str, list[Any]]) -> str:
    """Text with the values before and after of each changed flag. (Facts that are not flags are
    fingerprints, and left out.)"""
    def text(value):
        return " ".join(value) or "(none)" if isinstance(value, list) else str(value)

    return "; ".join(f"--{name} {text(old)} -> {text(new)}"
                     for name, (old, new) in changed.items() if name in CHANGEABLE) or "--data"
