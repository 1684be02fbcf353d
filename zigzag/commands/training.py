"""The command `python train.py`, from the flags to `train.fit`.

    main        run the command
    opened      open --data as a task, after every check that needs no data
"""

import contextlib
import dataclasses
import functools
import shlex
from typing import Any, Callable, Iterator

import jax

import train
from zigzag.commands import command_line, programs, text
from zigzag.commands.continued import continued
from zigzag.core import hosts
from zigzag.core.errors import ConfigError
from zigzag.core.flags import Argv
from zigzag.core.parts import commands, mirrors, part, place
from zigzag.core.report import Reporter
from zigzag.core.start import BEGAN
from zigzag.disk.checkpoint import newest_step
from zigzag.disk.tokenizers import tokenizer_of
from zigzag.run import continuing, loggers, source
from zigzag.run.task import Task


def main(argv: Argv = None) -> None:
    """Train, or run the command that a part's flag selects."""
    with hosts.exit_together():
        given = command_line.read_flags(argv)
        config = continued(given)
        command_line.check_used(given, config, source.kind_of(config))
        for flag, command in commands().items():
            if getattr(config, flag):
                return part(command.module, f"--{flag}").run(config)
        if given.get("minutes") or given.get("depth"):
            config = part("forecast.bench", "--minutes or --depth").timed(given, config)
        config, mesh = programs.on_machine(config)
        with opened(config) as (config, task, say):
            train.fit(config, task, mesh=mesh, say=say)


def opener(kind: str) -> Callable:
    """Return the context manager that opens --data of this kind: text, or a file in tasks/."""
    return text.opened if kind == "text" else part(f"tasks.{kind}", f"--data of {kind}").opened


@contextlib.contextmanager
def opened(config: Any, is_quiet: bool = False) -> Iterator[tuple[Any, Task, Reporter]]:
    """For the run in config.out, yield the config for --data, the task, and a Reporter that has
    printed the first lines. Every check that needs no data runs before this opens --data. Process 0
    opens --data before the others do, because they read the files that process 0 writes."""
    run, is_process_0 = place(config.out), jax.process_index() == 0
    if not config.out:
        raise ConfigError("--out '': expected a folder for the run")
    weights, tokenizer, noted = source.first_weights(config)
    loggers.check(config)
    check = functools.partial(continuing.check_folder, train.Config, config.out,
                              change=config.change)
    old = check(continuing.facts_of(config), source.needs(config))
    fingerprint = str(old.get("fingerprint", ""))       # of the data, if this resumes a run
    if old and "data" in config.change and source.needs(config):
        tokenizer = tokenizer_of(run, old)
    if not is_process_0:
        fingerprint = hosts.process_allgather("")[0]
    seconds, mirror = 0 if is_process_0 else min(60, config.patience), mirrors.get(run)
    if mirror and (old or not is_process_0):
        mirror.fetch_data()
    with opener(source.kind_of(config))(
            config, tokenizer, run, seconds, fingerprint) as learned:
        record = learned.record | noted
        check(record)
        if is_process_0:
            if mirror and jax.process_count() > 1:
                mirror.send_data()
            hosts.process_allgather(record["fingerprint"])
        config = learned.config
        say = Reporter(config.steps, config.verbose, BEGAN)
        say.is_quiet |= is_quiet
        if config.init_from:
            say.line(f"model    {config.init_from}, fine-tuned on rows of "
                     f"{config.network.seq_len:,} tokens (--seq_len) with a learning rate of up to "
                     f"{config.lr:.3g} (--lr)")
        say.line(f"data     {learned.description}")
        yield config, dataclasses.replace(learned.make_task(), record=record,
                                          first_weights=weights), say
        if learned.prompt_flags and newest_step(config.out) >= config.steps:
            say.line(f"sample   python sample.py --run {shlex.quote(config.out)} "
                     f"{learned.prompt_flags}")
