"""What config.json says of a run's configuration, and the configuration that it gives back. (`cls`
is the class of a run's configuration, train.Config.)"""

from typing import Any

from zigzag.core.flags import flat
from zigzag.core.options import changes, options
from zigzag.disk.checkpoint import FORMAT, OF_DATA, run_config, run_record
from zigzag.weights.network import config_of_run, facts_of_network, network_of


def record_of(config: Any) -> dict[str, Any]:
    """A configuration as config.json has it: all fields, flat, and the network's name."""
    known = options(type(config))
    return {"format": FORMAT, **{
        name: value for name, value in flat(config).items()
        if name not in known or known[name].recorded}, "network": network_of(config).name}


def facts_of(config: Any) -> dict[str, Any]:
    """The values that must be the same when a run continues."""
    record = record_of(config)
    same = [name for name, option in options(type(config)).items() if option.same]
    own = facts_of_network(type(config.network))
    return {name: record[name] for name in ("network", *own, *same)}


def may_change(cls: type) -> dict[str, str]:
    """{fact: the word of --change that allows another}."""
    return changes(cls) | OF_DATA


def old_config(cls: type, folder: str) -> Any:
    """The configuration of the run in a folder, to continue it."""
    return run_config(folder, cls, "--out", network=config_of_run(folder, "--out"))


def read_old(cls: type, folder: str) -> dict[str, Any]:
    """config.json of the run in a folder, with all fields of its configuration."""
    return {**run_record(folder, "--out"), **record_of(old_config(cls, folder))}


def hidden(cls: type) -> set[str]:
    """The options that the start of a run does not list: those of one command or process."""
    return {"published", *(name for name, option in options(cls).items() if not option.recorded)}
