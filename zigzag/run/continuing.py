"""Continuing a run: what its folder and the new command must agree on.

    check_steps    refuse fewer steps than the run has made
    hold           a warmup or decay that has ended stays ended when a run gets more steps
    rates          some rates of a run, which are recorded
    check_rates    refuse a learning rate that was edited since
    first_lines    the first lines to print: which run continues from which step, and its schedule
    changes_text   the changes made by --change, as text
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp

from zigzag.core.errors import ConfigError
from zigzag.core.hosts import process_allgather
from zigzag.core.options import changes
from zigzag.disk.checkpoint import OF_DATA, newest_step, run_record
from zigzag.run import schedules
from zigzag.run.record import old_config


def check_steps(given: dict[str, Any], out: str) -> None:
    """Refuse --steps that the run has already passed: nothing would be trained."""
    at = newest_step(out)
    if given.get("steps", at) < at:
        raise ConfigError(f"--steps {given['steps']}: --out {out} is at step {at:,} already; give "
                          f"more than that, or leave --steps out")


def hold(config: Any) -> Any:
    """The configuration of a run in config.out, with the ends of its warmup and of its decay, if
    the run has passed them and now gets more steps: its rate stays where it is. --change decay
    spreads the decay over all steps instead."""
    ends = config.warmup, config.decay_steps
    if config.out and jax.process_index() == 0 and (Path(config.out) / "config.json").exists():
        old, at = old_config(type(config), config.out), newest_step(config.out)
        warmup = old.warmup if at >= old.warmup else config.warmup
        ends = warmup, _end_of_decay(config, old, at)
    # (From process 0, which will change the file that they would read.)
    ends = tuple(process_allgather(ends)[0])
    if ends == (config.warmup, config.decay_steps):
        return config
    return dataclasses.replace(config, warmup=ends[0], decay_steps=ends[1])


def _end_of_decay(config, old, at):
    if config.decay_steps is not None or "decay" in config.change or config.decay == "constant":
        return config.decay_steps
    if old.decay_steps is None and config.steps > old.steps and at >= schedules.fixed_from(old):
        return old.steps
    return old.decay_steps


def rates(config: Any, schedule: Callable) -> dict[str, float]:
    """{number of an update: its rate by schedule(step)}, for a few updates of a run, which
    config.json records."""
    at = {0, config.warmup // 2, schedules.at_peak(config), config.steps // 2, config.steps - 1}
    return {str(step): float(schedule(jnp.int32(step))) for step in sorted(at)}


def check_rates(config: Any, schedule_of: Callable) -> None:
    """Refuse to continue the run in config.out with another schedule, unless --change lr or decay
    asks for one: what the run recorded is compared with schedule_of(its configuration)."""
    if not config.out or {"lr", "decay"} & set(config.change) or jax.process_index() or not (
            Path(config.out) / "config.json").exists():
        return
    if not newest_step(config.out):
        return
    recorded = run_record(config.out, "--out").get("rates")
    schedule = schedule_of(old_config(type(config), config.out))
    if not isinstance(recorded, dict) or not all(
            step.isdecimal() and isinstance(rate, (int, float))
            for step, rate in recorded.items()):
        raise ConfigError(f"{config.out}/config.json is damaged: rates is {recorded!r:.80}")
    for step, rate in recorded.items():
        now = float(schedule(jnp.int32(int(step))))
        if not math.isclose(now, rate, rel_tol=1e-4, abs_tol=1e-6 * config.lr):
            raise ConfigError(
                f"--out {config.out}: its learning rate at step {int(step) + 1} was {rate:.3e} and "
                f"is {now:.3e} now: the schedule was edited, or fit was given another (or one of "
                f"other --steps); --lr {config.lr!r} --change lr goes on with this one (in Python: "
                f"change=('lr',))")


def _check_learns(config, old, at, learning_rate):
    """Refuse more updates than the run `old`, now at step `at`, was to make, if their rate would be
    0: they would change nothing."""
    to_come = (at, (at + config.steps) // 2)
    if config.lr and 0 < at < config.steps > old.steps and not any(
            float(learning_rate(config, jnp.int32(step))) > 0 for step in to_come):
        ended = config.decay_steps or old.steps
        raise ConfigError(f"--steps {config.steps}: the decay of --out {config.out} ended at step "
                          f"{ended} with a rate of 0 (--final_share), so further updates would "
                          f"change nothing; --change decay spreads the decay over all "
                          f"{config.steps} steps (--lr X --change lr decay: with another peak)")


def first_lines(config: Any, learning_rate: Callable | None) -> Iterator[str]:
    """Yield the lines to print when `config` continues the run in config.out.
    learning_rate(config, step) is train.py's; None if fit has a schedule."""
    if not config.out or not (Path(config.out) / "config.json").exists():
        return
    old, at = old_config(type(config), config.out), newest_step(config.out)
    if at > config.steps:
        raise ConfigError(f"--epochs: {config.steps:,} steps, and --out {config.out} is at step "
                          f"{at:,} already; give more epochs, or leave --epochs out")
    if learning_rate:
        _check_learns(config, old, at, learning_rate)
    yield f"continuing {config.out} at step {at:,} of {config.steps:,}" + (
        "" if at else ", from its beginning")
    of_rate = [name for name, word in changes(type(config)).items() if word in ("lr", "decay")]
    changed = [f"{name} {_shown(getattr(old, name))} -> {_shown(getattr(config, name))}"
               for name in ["steps", "warmup", "lr", *of_rate]
               if getattr(old, name) != getattr(config, name)]
    if changed and learning_rate and 0 < at < config.steps:
        before, after = (float(learning_rate(c, jnp.int32(step)))
                         for c, step in ((old, at - 1), (config, at)))
        yield (f"schedule {', '.join(dict.fromkeys(changed))}: the learning rate was {before:.1e} "
               f"at step {at:,} and will be {after:.1e} at step {at + 1:,}; "
               + _what_else(config, old, at, after))


def _shown(value):
    return "none" if value is None else value if isinstance(value, str) else f"{value:,}"


def _what_else(config, old, at, after):
    """What the rate does from step `at` on, and the flag that gives it another."""
    end = config.steps if config.decay_steps is None else config.decay_steps
    # (Another peak does not begin the decay anew.)
    share = f", of which step {at + 1:,} has {after / config.lr:.1%}" if config.lr else ""
    peak = "" if "lr" in config.change else (
        f", --lr X --change lr gives it another peak{share if config.decay != 'constant' else ''}")
    if config.decay == "constant":
        return f"it stays there{peak.replace(',', ':', 1)}"
    where = f" ({after / config.lr:.1%} of the peak)" if config.lr and not peak else ""
    if end <= at:
        return (f"it stays there{where}, because the decay has ended: --change decay spreads it "
                f"over all {config.steps:,} steps{peak}")
    if config.steps > old.steps and config.decay_steps is None and "decay" not in config.change:
        peak = f", --decay_steps {old.steps} keeps the end that it had{peak}"
    if end < config.steps:
        peak = f", --change decay moves its end to step {config.steps:,}{peak}"
    return f"the decay goes on{where} and ends at step {end:,}" + peak.replace(",", ":", 1)


def changes_text(changed: dict[str, list[Any]]) -> str:
    """Text with the values before and after of each changed flag. (Facts that are not flags are
    fingerprints, and left out.)"""
    def text(value):
        return " ".join(value) or "(none)" if isinstance(value, list) else str(value)

    return "; ".join(f"--{name} {text(old)} -> {text(new)}"
                     for name, (old, new) in changed.items() if name not in OF_DATA) or "--data"
