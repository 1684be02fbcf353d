"""Continuing a run: its folder has the values that the command line does not give.

    left_out       the values that a command takes from the run that it continues
    check_change   refuse a --change that changes nothing
    check_steps    refuse fewer steps than the run has made
    hold           a warmup or decay that has ended stays ended when a run gets more steps
    first_lines    the first lines to print: which run continues from which step, and its schedule
    changes_text   the changes made by --change, as text
"""

import dataclasses
from pathlib import Path
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp

from zigzag.core.errors import ConfigError
from zigzag.core.hosts import process_allgather
from zigzag.disk.checkpoint import CHANGEABLE, newest_step
from zigzag.run import schedules

# Flags that belong together: if one is given, the run's value of the other is dropped.
TOGETHER = (("mesh", "shards"), ("schedule", "chunks"))
# The fields on which the learning rate of a step depends.
SCHEDULE = ("steps", "warmup", "lr", "decay", "decay_steps", "cooldown", "first_share",
            "final_share")


def left_out(given: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The fields of the run (`old`) that the flags (`given`) do not change."""
    dropped = {name for names in TOGETHER if given.keys() & set(names) for name in names}
    if "decay" in given.get("change", ()):      # (of the old decay: where it ended, and its shape)
        is_other = given.get("decay", old["decay"]) != old["decay"]
        dropped |= {"decay_steps", *(("cooldown", "final_share") if is_other else ())}
    return {name: value for name, value in old.items() if name not in dropped | given.keys()}


def check_change(given: dict[str, Any], out: str, is_run: bool) -> None:
    """Refuse a --change that changes nothing."""
    change = given.get("change", ())
    if change and not is_run:
        raise ConfigError(f"--change {' '.join(change)}: --out {out} holds no run to change; leave "
                          f"it out to begin one")
    for name in change:
        # (--data may be the same path with other text.)
        if name in CHANGEABLE and name != "data" and given.keys().isdisjoint(
                (*CHANGEABLE[name], "epochs")):
            other = " or --steps" if name == "decay" else ""
            raise ConfigError(f"--change {name}: give --{name}{other} too, with its new value")


def check_steps(given: dict[str, Any], out: str) -> None:
    """Refuse --steps that the run has already passed: nothing would be trained."""
    at = newest_step(out)
    if given.get("steps", at) < at:
        raise ConfigError(f"--steps {given['steps']}: --out {out} is at step {at:,} already; give "
                          f"more than that, or leave --steps out")


def hold(config: Any, read: Callable) -> Any:
    """The configuration of a run in config.out, with the ends of its warmup and of its decay, if
    the run has passed them and now gets more steps: its rate stays where it is. --change decay
    spreads the decay over all steps instead. read(out) is the configuration of the run so far."""
    ends = config.warmup, config.decay_steps
    if config.out and jax.process_index() == 0 and (Path(config.out) / "config.json").exists():
        old, at = read(config.out), newest_step(config.out)
        warmup = old.warmup if at >= old.warmup else config.warmup
        ends = warmup, _end_of_decay(config, old, at)
    # (From process 0, which will change the file that they would read.)
    ends = tuple(process_allgather(ends)[0])
    if ends == (config.warmup, config.decay_steps):
        return config
    return dataclasses.replace(config, warmup=ends[0], decay_steps=ends[1])


def _end_of_decay(config, old, at):
    if config.decay_steps or "decay" in config.change or config.decay == "constant":
        return config.decay_steps
    if not old.decay_steps and config.steps > old.steps and at >= schedules.fixed_from(old):
        return old.steps
    return old.decay_steps


def first_lines(config: Any, read: Callable, learning_rate: Callable) -> Iterator[str]:
    """Yield the lines to print when `config` continues the run in config.out, whose configuration
    so far is read(out). learning_rate(config, step) is train.py's."""
    if not (Path(config.out) / "config.json").exists():
        return
    old, at = read(config.out), newest_step(config.out)
    if at > config.steps:
        raise ConfigError(f"--epochs: {config.steps:,} steps, and --out {config.out} is at step "
                          f"{at:,} already; give more epochs, or leave --epochs out")
    yield f"continuing {config.out} at step {at:,} of {config.steps:,}" + (
        "" if at else ", from its beginning")
    changed = [f"{name} {_shown(getattr(old, name))} -> {_shown(getattr(config, name))}"
               for name in SCHEDULE if getattr(old, name) != getattr(config, name)]
    if changed and 0 < at < config.steps:
        before, after = (float(learning_rate(c, jnp.int32(step)))
                         for c, step in ((old, at - 1), (config, at)))
        yield (f"schedule {', '.join(changed)}: the learning rate was {before:.1e} at step {at:,} "
               f"and will be {after:.1e} at step {at + 1:,}; " + _what_else(config, old, at))


def _shown(value):
    return value if isinstance(value, str) else f"{value:,}"


def _what_else(config, old, at):
    """What the rate does from step `at` on, and the flag that gives it another."""
    peak = "" if "lr" in config.change else ", --lr X --change lr gives it another peak"
    end = config.decay_steps or config.steps
    if config.decay == "constant":
        return f"it stays there{peak.replace(',', ':', 1)}"
    if end <= at:
        return (f"it stays there, because the decay has ended: --change decay spreads it over all "
                f"{config.steps:,} steps{peak}")
    if config.steps > old.steps and not config.decay_steps and "decay" not in config.change:
        peak = f", --decay_steps {old.steps} keeps the end that it had{peak}"
    if end < config.steps:
        peak = f", --change decay moves its end to step {config.steps:,}{peak}"
    return f"the decay ends at step {end:,}" + peak.replace(",", ":", 1)


def changes_text(changed: dict[str, list[Any]]) -> str:
    """Text with the values before and after of each changed flag. (Facts that are not flags are
    fingerprints, and left out.)"""
    def text(value):
        return " ".join(value) or "(none)" if isinstance(value, list) else str(value)

    return "; ".join(f"--{name} {text(old)} -> {text(new)}"
                     for name, (old, new) in changed.items() if name != "fingerprint") or "--data"
