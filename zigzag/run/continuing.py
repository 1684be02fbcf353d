"""A run's config.json, and what must match it when the run resumes. `cls` is the class of a run's
config, train.Config.

    record_of      convert a config to the form that config.json has
    old_config     read the config of the run in a folder

    check_folder   reject a folder whose run doesn't match these facts
    check_steps    reject fewer steps than the run has made
    hold           keep a finished warmup or decay finished when a run gets more steps
    rates          compute some of a run's learning rates, for config.json
    check_rates    reject a schedule that was edited since the run began
    first_lines    the first lines to print: which run resumes from which step, and its schedule
    changed_facts  list the changes made by --change
    changes_text   describe them
"""

import dataclasses
import math
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from zigzag.core.errors import ConfigError
from zigzag.core.files import anyway, check_can_make, check_others
from zigzag.core.flags import flat, recorded
from zigzag.core.hosts import process_allgather
from zigzag.core.options import Values, changes, only, options
from zigzag.core.parts import place
from zigzag.disk.checkpoint import (
    FORMAT,
    as_saved,
    differing_weights,
    newest_step,
    run_config,
    run_record,
)
from zigzag.parallel.network import config_of_run, facts_of_network, network_of
from zigzag.run import schedules


def record_of(config: Any) -> Values:
    """Convert a config to config.json's form: its recorded fields, flat, and the network's name."""
    return {"format": FORMAT, "network": network_of(config).name, **recorded(flat(config), config)}


def facts_of(config: Any) -> Values:
    """Return the values that must stay the same when a run resumes."""
    same = [name for name, option in options(type(config)).items() if option.same]
    return only(record_of(config), "network", *facts_of_network(type(config.network)), *same)


# Facts derived from a published folder by the code that reads it. `check_folder` compares the
# folder's name instead.
FOLLOWS = ("published", "pad_id")
# {a fact that isn't an option: the word for --change that allows a new value}
OF_DATA = dict.fromkeys(("fingerprint", "first_example"), "data")
# {regex for files that a run interrupted at its start may leave: condition on the path}
OF_BEGINNING = {
    r"data\d*|held_out": lambda path: (path / "data.json").exists(),
    r"(data\d*|held_out)\.(part|before)": anyway,
    "checkpoints": lambda path: not any(path.iterdir()),
    r"lock|config\.json\.part": anyway}


def check_folder(cls: type, out: str, now: Values, needs: Sequence[str] = (),
                 change: Sequence[str] = (), params: Any = None) -> Values:
    """Refuse to resume the run in `out` if its facts differ from `now`, or if it lacks any of the
    facts in `needs`. Return the run's facts, or {} if there is no run. Call this before writing
    anything. `change` lists the words given to --change. If the weights differ (the fact `shapes`),
    the message lists how the saved shapes differ from `params`."""
    check_can_make(str(place(out)))
    if not is_run(out):
        check_others(place(out), "--out", "train.py", OF_BEGINNING)
        return {}
    old = as_saved({**run_record(out, "--out"), **record_of(old_config(cls, out))})
    now, may = as_saved(now), may_change(cls)
    if lacking := [name for name in needs if name not in old]:
        raise ConfigError(f"--out {out} holds a run of a different task (it has no {lacking[0]}); "
                          f"give another --out")
    differs = {name: f"{name} {_shown(old[name])}, not {_shown(value)}"
               for name, value in now.items()
               if name in old and old[name] != value and name not in FOLLOWS
               and may.get(name) not in change
               and (value or name not in ("vocab_size", "dtype"))}  # if empty, derived later
    if "shapes" in differs:
        differs.pop("base_weights", None)       # a fingerprint of some of the weights
        differs["shapes"] = f"different weights ({differing_weights(out, params)})"
    if differs:
        words = " ".join(dict.fromkeys(may[name] for name in differs if name in may))
        raise ConfigError(f"--out {out} holds a run with {'; '.join(differs.values())}: continue "
                          f"it with its own values, or give another --out"
                          + (f"; --change {words} allows the change" if words else ""))
    return old


def _shown(value):
    return " ".join(map(str, value)) if isinstance(value, list) and value else repr(value)


def changed_facts(config: Any, record: Values, old: Values) -> dict[str, list[Any]]:
    """Return {fact: [old, new]} for what --change changes between a run's facts and `record`."""
    now = as_saved(record)
    return {name: [old[name], now[name]] for name, word in may_change(type(config)).items()
            if word in config.change and name in old and name in now and old[name] != now[name]}


def may_change(cls: type) -> dict[str, str]:
    """Return {fact: the word for --change that allows a new value}."""
    return changes(cls) | OF_DATA


def is_run(folder: str) -> bool:
    """Return whether a folder ('': no folder) holds a run."""
    return bool(folder) and (place(folder) / "config.json").exists()


def old_config(cls: type, folder: str, flag: str = "--out") -> Any:
    """Read the config of the run that `flag` names."""
    return run_config(folder, cls, flag, network=config_of_run(folder, flag))


def check_steps(given: Values, out: str) -> None:
    """Reject a --steps that the run has already passed: there would be nothing to train."""
    at = newest_step(out)
    if given.get("steps", at) < at:
        raise ConfigError(f"--steps {given['steps']}: --out {out} is at step {at:,} already; give "
                          f"more than that, or leave --steps out")


def hold(config: Any) -> Any:
    """Return the config for resuming the run in config.out. If the run has passed the end of its
    warmup or decay and now gets more steps, that end doesn't move, so the rate stays where it is.
    --change decay spreads the decay over all steps instead."""
    warmup, end = config.warmup, config.decay_steps
    if jax.process_index() == 0 and is_run(config.out):
        old, at = old_config(type(config), config.out), newest_step(config.out)
        warmup = old.warmup if at >= old.warmup else warmup
        if end is None and "decay" not in config.change and config.decay != "constant":
            end = old.decay_steps
            if end is None and config.steps > old.steps and at >= schedules.fixed_from(old):
                end = old.steps
    # Process 0 tells the others, because it will modify the file that they would read.
    warmup, end = process_allgather((warmup, end))[0]
    return dataclasses.replace(config, warmup=warmup, decay_steps=end)


def rates(config: Any, schedule: Callable) -> dict[str, float]:
    """Return {update number: its rate, schedule(step)} for a few of a run's updates, for
    config.json."""
    at = {0, config.warmup // 2, schedules.at_peak(config), config.steps // 2, config.steps - 1}
    return {str(step): float(schedule(jnp.int32(step))) for step in sorted(at)}


def check_rates(config: Any, schedule_of: Callable) -> None:
    """Refuse to resume the run in config.out if its schedule was edited, unless --change lr or
    decay allows it. The check compares the recorded rates with schedule_of(the run's config)."""
    if not config.out or {"lr", "decay"} & set(config.change) or jax.process_index() or not (
            newest_step(config.out)):
        return
    recorded = run_record(config.out, "--out").get("rates", {})
    schedule = schedule_of(old_config(type(config), config.out))
    for step, rate in recorded.items():
        now = float(schedule(jnp.int32(int(step))))
        if not math.isclose(now, rate, rel_tol=1e-4, abs_tol=1e-6 * config.lr):
            raise ConfigError(
                f"--out {config.out}: its learning rate at step {int(step) + 1} was {rate:.3e} and "
                f"is now {now:.3e}: the schedule was edited, or fit got a different one; --lr "
                f"{config.lr!r} --change lr continues with this one (in Python: change=('lr',))")


def first_lines(config: Any, learning_rate: Callable | None) -> Iterator[str]:
    """Yield the lines to print when `config` resumes the run in config.out. Reject extra steps
    whose rate would be 0, because they would change nothing. `learning_rate` is train.py's function
    of (config, step), or None if fit has a schedule."""
    if not is_run(config.out):
        return
    old, at = old_config(type(config), config.out), newest_step(config.out)
    check_steps({"steps": config.steps}, config.out)
    is_more = config.lr and 0 < at < config.steps > old.steps
    if learning_rate and is_more and not any(
            float(learning_rate(config, jnp.int32(step))) > 0
            for step in (at, (at + config.steps) // 2)):
        ended = config.decay_steps or old.steps
        raise ConfigError(f"--steps {config.steps}: the decay of --out {config.out} ended at step "
                          f"{ended} with a rate of 0 (--final_share), so further updates would "
                          f"change nothing; --change decay spreads the decay over all "
                          f"{config.steps} steps (--lr X --change lr decay also sets a new peak)")
    yield f"continuing {config.out} at step {at:,} of {config.steps:,}"
    names = [name for name, word in changes(type(config)).items() if word in ("lr", "decay")]
    changed = [f"{name} {getattr(old, name)} -> {getattr(config, name)}"
               for name in dict.fromkeys(["steps", "warmup", *names])
               if getattr(old, name) != getattr(config, name)]
    if changed and learning_rate and 0 < at < config.steps:
        before, after = (float(learning_rate(c, jnp.int32(step)))
                         for c, step in ((old, at - 1), (config, at)))
        yield (f"schedule {', '.join(changed)}: the learning rate was {before:.1e} at step {at:,} "
               f"and will be {after:.1e} at step {at + 1:,} (--change decay spreads the decay over "
               f"all steps, --lr X --change lr sets a new peak)")


def changes_text(changed: dict[str, list[Any]]) -> str:
    """Describe each changed flag by its old and new value. Skip facts that aren't flags: those are
    fingerprints."""
    return "; ".join(f"--{name} {old} -> {new}" for name, (old, new) in changed.items()
                     if name not in OF_DATA) or "--data"
