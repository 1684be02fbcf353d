"""`Trainer`: what the commands of train.py are given of the files above zigzag/, by name.

train.py makes the only one (train.TRAINER). So a fork that edits its Config, `optimizer`,
`learning_rate` or `make_step` changes every command.
"""

from typing import Any, Callable, NamedTuple, Sequence

from zigzag.core.flags import flat
from zigzag.core.options import changes, options
from zigzag.disk.checkpoint import FORMAT, OF_DATA, run_config, run_record
from zigzag.run import command_line
from zigzag.weights.network import facts_of_network


class Trainer(NamedTuple):
    """The class of a run's configuration, and the functions that train it."""
    config: type                # train.Config
    networks: Any               # networks/: which network a configuration has, and why
    learning_rate: Callable     # (config, update) -> the rate
    optimizer: Callable         # (config, decisions) -> an optax transformation
    language: Callable          # config -> its network's init, loss and batch shapes
    build: Callable             # (config, mesh, init, loss, batch shapes, ...) -> Program

    def parse(self, argv: Sequence[str] | None = None, script: str | None = None) -> Any:
        """The configuration of a new run with the flags of a command line; script: the docstring of
        the script that asks for it."""
        return self.config_of_flags(
            command_line.read_flags(argv, self.config, self.networks, script))

    def config_of_flags(self, given: dict[str, Any]) -> Any:
        """The configuration of a new run. --model and --init_from choose the network and its
        fields; the other flags change them."""
        network, fields, source = self.networks.chosen(given)
        return command_line.make_config(self.config, self.networks, network,
                                        fields | given | source, given)

    def network(self, config: Any) -> Any:
        return self.networks.network_of(config)

    # What a run's folder says

    def record_of(self, config: Any) -> dict[str, Any]:
        """A configuration as config.json has it: all fields, flat, and the network's name."""
        known = options(self.config)
        return {"format": FORMAT, **{
            name: value for name, value in flat(config).items()
            if name not in known or known[name].recorded}, "network": self.network(config).name}

    def facts_of(self, config: Any) -> dict[str, Any]:
        """The values that must be the same when a run continues."""
        record = self.record_of(config)
        same = [name for name, option in options(self.config).items() if option.same]
        own = facts_of_network(type(config.network))
        return {name: record[name] for name in ("network", *own, *same)}

    def may_change(self) -> dict[str, str]:
        """{fact: the word of --change that allows another}."""
        return changes(self.config) | OF_DATA

    def old_config(self, folder: str) -> Any:
        """The configuration of the run in a folder, to continue it."""
        own = self.networks.config_of_run(folder, "--out")
        return run_config(folder, self.config, "--out", network=own)

    def read_old(self, folder: str) -> dict[str, Any]:
        """config.json of the run in a folder, with all fields of its configuration."""
        return {**run_record(folder, "--out"), **self.record_of(self.old_config(folder))}

    def hidden(self) -> set[str]:
        """The options that the start of a run does not list: those of one command or process."""
        return {"published", *(n for n, option in options(self.config).items()
                               if not option.recorded)}
