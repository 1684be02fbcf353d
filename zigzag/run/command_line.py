"""train.py's command line: flags of train.Config and of every network, in one flat namespace.

    read_flags     the flags that were given, by name; --help
    make_config    the configuration with given values of its fields and its network's
    asked_of_run   what flags ask of a run that they continue

`run` is the class train.Config, and `networks` the module of that name.
"""

import dataclasses
import sys
from typing import Any, Sequence

from zigzag.core.errors import ConfigError
from zigzag.core.flags import check_shards, help_text, parse_flags, show_help
from zigzag.run import help, plots
from zigzag.weights.network import Network


def names_of(cls: type) -> set[str]:
    """The names of the flags of a configuration's class."""
    return {f.name for f in dataclasses.fields(cls)} - {"network"}


def read_flags(argv: Sequence[str] | None, run: type, networks: Any) -> dict[str, Any]:
    """The flags that were given, by name. With --help or --plot, print that and exit."""
    words = list(sys.argv[1:] if argv is None else argv)
    asks_help = next((i for i, word in enumerate(words) if word in ("-h", "--help")), None)
    is_all = asks_help is not None and words[asks_help + 1:asks_help + 2] == ["all"]
    if asks_help is not None:
        words[asks_help:asks_help + 1 + is_all] = []
    classes = *dict.fromkeys(network.config for network in networks.NETWORKS.values()), run
    given, _ = parse_flags(classes, words, renamed={"parallel": "parallel_block"}, once=("best",))
    check_shards(given)
    if given.get("plot") and asks_help is None:
        plots.draw(given["plot"], given.get("save", ""))
        sys.exit(0)
    if asks_help is not None:
        network, fields, source = networks.chosen(given)
        of_run = {name: value for name, value in given.items() if name in names_of(run)}
        values = dataclasses.asdict(network.config(**fields)) | of_run | source if of_run else {}
        others = networks.NETWORKS.values() if is_all else [network]
        show_help(help_text((*(network.config for network in others), run), help.groups_of(
            classes[0], run, others, is_all), help.LAST, values | {"published": ""}))
    return given


def make_config(run: type, networks: Any, network: Network, values: dict[str, Any],
                given: dict[str, Any]) -> Any:
    """The configuration of a run with these values of its own fields and of its network's. Flags
    that were given and that neither of them has are refused."""
    of_run, own = names_of(run), names_of(network.config)
    if {"steps", "epochs"} <= given.keys():
        raise ConfigError(f"--epochs {given['epochs']:g} and --steps {given['steps']}: give one of "
                          f"them; the other follows")
    for name in given:
        if name not in own | of_run:
            has = [n.name for n in networks.NETWORKS.values() if name in names_of(n.config)]
            raise ConfigError(f"--{name} {given[name]}: the network {network.name} has no such "
                              f"option; --model {has[0]} has it, or add it to the Config that you "
                              f"train")
    return run(network=network.config(**{n: v for n, v in values.items() if n in own}),
               **{n: v for n, v in values.items() if n in of_run})


def asked_of_run(given: dict[str, Any], old: Any, networks: Any) -> dict[str, Any]:
    """The fields that flags ask of the run with the configuration `old`: the flags themselves, and
    all fields of the model of --model or --init_from, if the run began with another. (If it began
    with this model, other flags may have changed the fields since.)"""
    if given.keys().isdisjoint(("model", "init_from")):
        return dict(given)
    network, fields, source = networks.chosen(given)
    if source == {"model": old.model, "init_from": old.init_from}:
        return given | source
    return {"network": network.name} | fields | given | source
