"""train.py's command line: flags of train.Config and of every network, in one flat namespace.

    parse          the configuration of a new run: train.parse
    read_flags     the flags that were given, by name; --help
    make_config    the configuration with given values of its fields and its network's
    asked_of_run   what flags ask of a run that they continue
    check_command  refuse flags that have no effect on --bench or --topology
    check_used     refuse flags that have no effect on the kind of data that is learned
"""

import dataclasses
import sys
from typing import Any, Sequence

import networks
import train
from zigzag.commands import help
from zigzag.core.errors import ConfigError, as_given
from zigzag.core.flags import check_shards, help_text, parse_flags, show_help
from zigzag.core.options import comments, options
from zigzag.run import plots
from zigzag.weights.network import Network

# What these commands do not use: groups of options, and single ones. (Beside them may stand what
# says how to train, and --out: one asks how a training command would run.)
NOT_USED = {"bench": (("saving", "evaluation"), ("check", "profile")),
            "topology": (("saving", "evaluation"), ("check", "profile", "max_skipped"))}
# {kind of data (a file in tasks/): how a message calls it}
KINDS = {"text": "text", "pairs": "pairs of texts (a model with an encoder)",
         "arrays": "arrays (pictures, sound or classes)"}


def names_of(cls: type) -> set[str]:
    """The names of the flags of a configuration's class."""
    return set(options(cls))


def parse(argv: Sequence[str] | None, script: str | None) -> Any:
    """The configuration of a new run with the flags of a command line; script: the docstring of the
    script that asks for it."""
    return config_of_flags(read_flags(argv, script))


def config_of_flags(given: dict[str, Any]) -> Any:
    """The configuration of a new run. --model and --init_from choose the network and its fields;
    the other flags change them."""
    network, fields, source = networks.chosen(given)
    return make_config(network, fields | given | source, given)


def read_flags(argv: Sequence[str] | None, script: str | None = None) -> dict[str, Any]:
    """The flags that were given, by name. With --help or --plot, print that and exit. `script` is
    the docstring of the script that calls train.parse: its --help shows this and the flags that
    were given, which are the script's own defaults."""
    words = list(sys.argv[1:] if argv is None else argv)
    asks_help = next((i for i, word in enumerate(words) if word in ("-h", "--help")), None)
    is_all = asks_help is not None and words[asks_help + 1:asks_help + 2] == ["all"]
    if asks_help is not None:
        words[asks_help:asks_help + 1 + is_all] = []
    classes = *dict.fromkeys(network.config for network in networks.NETWORKS.values()), train.Config
    given, _ = parse_flags(classes, words)
    check_shards(given)
    if given.get("plot") and asks_help is None:
        _refuse([name for name in given if name not in ("plot", "save")], given, "with --plot")
        plots.draw(given["plot"], given.get("save", ""))
        sys.exit(0)
    if asks_help is not None:
        network, fields, source = networks.chosen(given)
        values = dataclasses.asdict(network.config(**fields)) | source if given else {}
        values |= {name: as_given(value) for name, value in given.items()}
        others = networks.NETWORKS.values() if is_all else [network]
        plain, classes = classes[0], (*(network.config for network in others), train.Config)
        groups, last = help.groups_of(plain, train.Config, others, is_all), help.LAST
        if script and not is_all:
            groups, last = {"its own defaults": list(given)}, help.IN_A_SCRIPT
        show_help(help_text(classes, groups, last, values | {"published": ""}, script))
    _check_commands(given)
    return given


def _check_commands(given):
    """Refuse flags that have no effect on --bench or --topology."""
    if given.get("bench") and given.get("topology"):
        raise ConfigError(f"--bench measures here, and --topology {given['topology']} compiles for "
                          f"hardware that is not here: give one of them")
    for command in NOT_USED:
        if given.get(command):
            check_command(given, command, f"with --{command}")


def check_command(given: dict[str, Any], command: str, where: str) -> None:
    """Refuse flags that a command, bench or topology, does not use; `where` names it."""
    groups, names = NOT_USED[command]
    _refuse([name for name in given if name in names
             or name != "out" and _group(name) in groups], given, where)


def _group(name):
    return comments(train.Config)[name].group if name in names_of(train.Config) else ""


def check_used(given: dict[str, Any], config: Any, kind: str) -> None:
    """Refuse flags that have no effect on this kind of data, or in a run without evaluations."""
    if config.eval_every == 0:      # (--held_out says that all of --data is learned)
        _refuse([name for name in given if given[name] and _group(name) == "evaluation"
                 and name != "held_out"], given, "with --eval_every 0")
    known = options(train.Config)
    names = [name for name in given if name in known and known[name].of
             and kind not in known[name].of]
    of = dict.fromkeys(KINDS[which] for name in names for which in known[name].of)
    _refuse(names, given, f"on {KINDS.get(kind, kind)}, which this model learns from: "
                          f"{_is(names)} for {' or '.join(of)}")


def _is(names):
    return "it is" if len(names) == 1 else "they are"


def _refuse(names, given, why):
    if names:
        flags = " and ".join(f"--{name} {as_given(given[name])}" for name in names)
        verb = "has" if len(names) == 1 else "have"
        raise ConfigError(f"{flags} {verb} no effect {why}; leave "
                          f"{'it' if len(names) == 1 else 'them'} out")


def make_config(network: Network, values: dict[str, Any], given: dict[str, Any]) -> Any:
    """The configuration of a run with these values of its own fields and of its network's. Flags
    that were given and that neither of them has are refused."""
    of_run, own = names_of(train.Config), names_of(network.config)
    if {"steps", "epochs"} <= given.keys():
        raise ConfigError(f"--epochs {given['epochs']:g} and --steps {given['steps']}: give one of "
                          f"them; the other follows")
    for name in given:
        if name not in own | of_run:
            has = [n.name for n in networks.NETWORKS.values() if name in names_of(n.config)]
            raise ConfigError(f"--{name} {given[name]}: the network {network.name} has no such "
                              f"option; --model {has[0]} has it, or add it to the Config that you "
                              f"train")
    return train.Config(network=network.config(**{n: v for n, v in values.items() if n in own}),
                        **{n: v for n, v in values.items() if n in of_run})


def asked_of_run(given: dict[str, Any], old: Any) -> dict[str, Any]:
    """The fields that flags ask of the run with the configuration `old`: the flags themselves, and
    all fields of the model of --model or --init_from, if the run began with another. (If it began
    with this model, other flags may have changed the fields since.)"""
    if given.keys().isdisjoint(("model", "init_from")):
        return dict(given)
    network, fields, source = networks.chosen(given)
    if source == {"model": old.model, "init_from": old.init_from}:
        return given | source
    return {"network": network.name} | fields | given | source
