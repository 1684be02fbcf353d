"""train.py's command line: flags of train.Config and of every network, in a single flat namespace.

    parse          build a new run's config: train.parse
    read_flags     read the flags by name, and handle --help
    groups_of      group the options for --help by the headings above them in the source
    make_config    build a config from values for its own fields and its network's
    asked_of_run   list the field values that flags require of the run they resume
    chosen         find the network that --model or --init_from names, and its fields
    check_unused   reject flags that have no effect on a command such as --bench
    check_used     reject flags that have no effect on this kind of training data
"""

import dataclasses
import sys
from typing import Any, Sequence

import train
from zigzag.core.errors import ConfigError, as_given
from zigzag.core.flags import Argv, check_shards, help_text, parse_flags, show_help
from zigzag.core.options import Groups, Values, comments, only, options, without
from zigzag.core.parts import Unused, commands, has_part, part, refuse, run_alone
from zigzag.parallel.network import (
    COMPUTED,
    NETWORKS,
    PRESETS,
    Network,
    config_of_run,
    network_of,
    resized,
)

IN_A_SCRIPT = ("This script takes every flag of train.py: python train.py --help lists them")
LAST = "python train.py --help all shows every flag" + (
    "; --model NAME --help adds the flags of NAME's network" if has_part("published") else "")


def parse(argv: Argv, script: str | None) -> Any:
    """Return a new run's config from command-line flags. `script` is the docstring of the script
    that calls train.parse."""
    given = read_flags(argv, script)
    check_unused(given, ["minutes"], "in a script, because it cannot time the script's steps; give "
                                     "--steps")
    return config_of_flags(given)


def config_of_flags(given: Values) -> Any:
    """Return a new run's config. --model, --init_from or --depth choose the network and fields;
    the other flags change them."""
    network, fields, source = chosen(given)
    return make_config(network, fields | given | source, given)


def chosen(given: Values) -> tuple[Network, Values, Values]:
    """Return (the network that the flags `given` choose, its fields according to --model,
    --init_from or --depth, the values of --model and --init_from that a run records)."""
    name, run = given.get("model", "tiny"), given.get("init_from", "").rstrip("/")
    if (depth := given.get("depth", 0)) > 0:
        fields = part("forecast.depth", f"--depth {depth}").chosen(given)
        return train.model.NETWORK, fields, {"model": name, "init_from": ""}
    if run and "model" in given:
        raise ConfigError(f"--model {name} --init_from {run}: both choose the model; give only one")
    if run:
        config, source = config_of_run(run, "--init_from"), {"model": "", "init_from": run}
    elif name in PRESETS:
        return train.model.NETWORK, resized(PRESETS[name], given), {"model": name, "init_from": ""}
    else:
        published = part("published", f"--model {name}")
        if not (folder := published.folder_of(name)):
            return *published.preset(name, given), {"model": name, "init_from": ""}
        config = published.hf_config(folder)
        source = {"model": folder, "init_from": folder}
    network = network_of(config)
    return network, fields_of_weights(given, network, config), source


# The groups of flags that have no effect on a command that doesn't train, such as --bench.
OF_TRAINING = ("saving", "evaluation", "while training")
# The longest rows for fine-tuning a published model, unless --seq_len is given.
FINE_TUNING_LENGTH = 512
# The flags that set a run's length. A command may have only one of them.
LENGTHS = ("steps", "epochs", "tokens", "minutes")


def fields_of_weights(given: Values, network: Network, config: Any) -> Values:
    """Return the fields of a model that already has weights, published or from a run. The flags
    `given` may change only how to train it. `config` is the model's own config."""
    source, base = given.get("init_from") or given["model"], dataclasses.asdict(config)
    shape = network.source_shape(config)
    source_len = ["source_len"] if shape and len(shape) == 1 else []
    if given.get("init_from"):
        base = without(base, "dtype", "lora_rank", *COMPUTED)
    else:
        base |= {name: min(base[name], FINE_TUNING_LENGTH) for name in ["seq_len", *source_len]}
    base["remat"] = "full"      # published models tend to fill memory
    may = [*network.trained, "dtype", "lora_rank", *COMPUTED]
    may = [name for name in may if name != "source_len" or source_len]
    for name, value in given.items():
        if name in base and name not in may and value != base[name]:
            raise ConfigError(f"--{name} {value}: the weights of {source} need {base[name]}; only "
                              f"training options may change (--{', --'.join(may)})")
    return base


def read_flags(argv: Argv, script: str | None = None) -> Values:
    """Return the given flags by name. With --help or --plot, print the help or the plot, and exit.
    `script` is the docstring of the script that calls train.parse. The script's --help shows that
    docstring and the given flags, which are the script's own defaults."""
    words = list(sys.argv[1:] if argv is None else argv)
    asks_help = next((word for word in words if word in ("-h", "--help")), None)
    is_all = False
    if asks_help:
        at = words.index(asks_help)
        is_all = words[at + 1:at + 2] == ["all"]
        del words[at:at + 1 + is_all]
    given, _ = parse_flags(tuple(classes_for(words, is_all)), words)
    check_shards(given)
    if asks_help:
        _show_help(given, is_all, script)
    for flag, command in commands().items():
        if given.get(flag):
            if command.alone:
                run_alone(flag, given)
                sys.exit(0)
            check_unused(given, Unused(OF_TRAINING, command.unused), f"with --{flag}")
    return given


def classes_for(words: Sequence[str], is_all: bool) -> list[type]:
    """Return the config classes whose fields are flags: the plain decoder's and a run's. If the
    words include --model or an unknown flag, add the published networks' classes."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    known = options(train.model.Config) | options(train.Config)
    if has_part("published") and (is_all or "model" in names or names - known.keys()):
        part("published", "")
    return [*dict.fromkeys(network.config for network in NETWORKS.values()), train.Config]


def _show_help(given, is_all, script):
    """Print the help: all flags, with the values that follow from the `given` flags."""
    network, fields, source = chosen(given)
    own = only(fields, *options(network.config))
    values = fields | dataclasses.asdict(network.config(**own)) | source if given else {}
    values |= {name: as_given(value) for name, value in given.items()} | {"published": ""}
    plain, others = train.model.Config, [*NETWORKS.values()] if is_all else [network]
    groups, last = groups_of(plain, train.Config, others, is_all), LAST
    if script and not is_all:
        groups, last = {"its own defaults": list(given)}, IN_A_SCRIPT
    show_help(help_text((*(network.config for network in others), train.Config), groups, last,
                        values, script))


def groups_of(plain: type, run: type, networks: Sequence[Any] = (), everything: bool = False
              ) -> Groups:
    """Return {group: names of options} in the order of train.Config (`run`): its options and the
    plain decoder's (`plain`), then any extra options of `networks`. Rare options appear only with
    `everything`. --help shows a fork's new option under the heading above it in the source, so the
    option needs no line here."""
    groups: dict[str, list[str]] = {}
    for wanted in (False, True) if everything else (False,):
        for cls, usual in ((run, "training"), (plain, "model")):
            for name, (_, group, is_rare) in comments(cls).items():
                if is_rare == wanted:
                    groups.setdefault(group or usual, []).append(name)
    shown = {*comments(plain), *comments(run)}
    for network in networks:
        own = [name for name in comments(network.config) if name not in shown]
        groups[f"options of the network {network.name}"] = own
        shown.update(own)
    return groups


def check_unused(given: Values, unused: Unused | Sequence[str], where: str) -> None:
    """Reject flags in `unused` (names, or an Unused). `where` says where they have no effect."""
    if isinstance(unused, Unused):      # a group never covers --out, which a training command has
        unused = [*unused.names, *(name for name, (_, group, _) in comments(train.Config).items()
                                   if group in unused.groups and name != "out")]
    refuse(only(given, *unused), where)


def check_used(given: Values, config: Any, kind: str) -> None:
    """Reject flags that have no effect on this kind of data (text, or a file in tasks/), or in a
    run without evaluations."""
    if config.eval_every == 0:      # --held_out still matters: it keeps all of --data for training
        some = {name: value for name, value in given.items() if value and name != "held_out"}
        check_unused(some, Unused(("evaluation",)), "with --eval_every 0")
    check_unused(given, [name for name, option in options(train.Config).items()
                         if option.of and kind not in option.of],
                 f"on {kind}, which this run trains on")


def make_config(network: Network, values: Values, given: Values) -> Any:
    """Return a run's config with these values for its own fields and its network's. Reject flags
    that neither of them has."""
    of_run, own = options(train.Config), options(network.config)
    lengths = [f"--{name} {given[name]:g}" for name in LENGTHS if name in given]
    if len(lengths) > 1:
        raise ConfigError(f"{' and '.join(lengths)}: give only one, because it sets the other")
    for name in given:
        if name not in own | of_run:
            has = [n.name for n in NETWORKS.values() if name in options(n.config)]
            raise ConfigError(f"--{name} {given[name]}: the network {network.name} has no such "
                              f"option; --model {has[0]} has it, or add it to the Config that you "
                              f"train")
    return train.Config(network=network.config(**only(values, *own)), **only(values, *of_run))


def asked_of_run(given: Values, old: Any) -> Values:
    """Return the field values that flags require of the run with config `old`: the flags themselves
    and, if the run began with a different model, all fields of the model they name. If the run
    began with this model, leave those out: other flags may have changed them since."""
    if given.keys().isdisjoint(("model", "init_from")):
        return dict(given)
    if old.model.startswith(f"{given.get('model')}@"):      # on the hub; `old` has its commit
        given = given | {"model": old.model}
    network, fields, source = chosen(given)
    if source == {"model": old.model, "init_from": old.init_from}:
        return given | source
    return {"network": network.name} | fields | given | source
