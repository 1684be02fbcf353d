"""The config of a command whose --out may hold a run: omitted flags keep the run's values.

    continued      build the config for these flags
    of_run         build a run's config, to look at its step (learn.explain)
    left_out       list the values that a command takes from the run it resumes
"""

import functools
from typing import Any

import train
from zigzag.commands import command_line
from zigzag.core.errors import ConfigError, as_given
from zigzag.core.flags import flat
from zigzag.core.options import Values, changes, only, options, without
from zigzag.core.parts import commands
from zigzag.disk.checkpoint import newest_step, run_record
from zigzag.parallel.network import network_of
from zigzag.parallel.saved import is_custom
from zigzag.run import continuing, source


def continued(given: Values) -> Any:
    """Return the config for these flags when --out may hold a run. If it does, omitted flags keep
    the run's values; reject a flag that affects results but doesn't match the run's value.
    Commands from the parts, such as --bench, ignore the run."""
    if any(map(given.get, commands())):
        return command_line.config_of_flags(given)
    out = given.get("out", train.Config.out)
    is_run = continuing.is_run(out)
    check_change(given, out, is_run)
    if not is_run:
        return command_line.config_of_flags(given)
    continuing.check_steps(given, out)
    old = continuing.old_config(train.Config, out)
    network = network_of(old)
    asked = command_line.asked_of_run(given, old)
    values = {**left_out(asked, flat(old), type(old), type(old.network)), **asked, "out": out}

    check = functools.partial(continuing.check_folder, train.Config, out, needs=source.needs(old),
                              change=given.get("change", ()))
    try:
        config = command_line.make_config(network, values, given)
    except ConfigError:     # if a value differs from the run's, let `check` report that instead
        check(only(asked, *continuing.facts_of(old)))
        raise
    continuing.check_steps({"steps": config.steps} if "tokens" in given else {}, out)
    check({**continuing.facts_of(config), "network": asked.pop("network", network.name)})
    if "lr" in given.get("change", ()) and not config.epochs and (
            config.steps <= (at := newest_step(out))):
        raise ConfigError(f"--change lr: --out {out} has done its {at:,} steps, so this rate would "
                          f"have no effect; give --steps too")
    return config


def check_change(given: Values, out: str, is_run: bool) -> None:
    """Reject a --change that changes nothing."""
    change, of = given.get("change", ()), changes(train.Config)
    if change and not is_run:
        raise ConfigError(f"--change {' '.join(change)}: --out {out} holds no run to change; leave "
                          f"--change out to start one")
    for word in change:
        # --data may be the same path with different text in it.
        if word in of.values() and word != "data" and given.keys().isdisjoint(
                (*command_line.LENGTHS, *(name for name in of if of[name] == word))):
            other = " or --steps" if word == "decay" else ""
            raise ConfigError(f"--change {word}: give --{word}{other} too, with its new value")


def of_run(run: str, given: Values) -> Any:
    """Return a run's config with these flags applied, to look at its step. Reject flags that
    contradict values that affect the run's results."""
    if is_custom(run_record(run)):
        raise ConfigError(f"--run {run}: a run of a custom task; give a run of train.py first")
    old = continuing.old_config(train.Config, run, "--run")
    facts = continuing.facts_of(old) | {"model": old.model, "init_from": old.init_from}
    for name, value in given.items():
        if facts.get(name, value) != value:
            raise ConfigError(f"--{name} {as_given(value)}: --run {run} has {name} "
                              f"{as_given(facts[name]) or '(none)'}; leave one out")
    values = left_out(given, flat(old), type(old), type(old.network)) | given
    return command_line.make_config(network_of(old), values, given)


def left_out(given: Values, old: Values, *configs: type) -> Values:
    """Return the fields of the run (`old`) that the flags (`given`) leave unchanged. `configs` are
    the config classes that declare them."""
    pairs = [{name, option.beside} for config in configs
             for name, option in options(config).items() if option.beside]
    dropped = {name for pair in pairs if given.keys() & pair for name in pair}
    if "decay" in given.get("change", ()):      # drop the old decay's end, and perhaps its shape
        is_other = given.get("decay", old["decay"]) != old["decay"]
        dropped |= {"decay_steps", *(("cooldown", "final_share") if is_other else ())}
    return without(old, *dropped, *given)
