"""What a run learns from: a file for each kind of data that --data may hold.

    text    running text, conversations, completions: the next token           decoders
    pairs   sources (texts, pictures, sound) and target texts                  encoder-decoders
    arrays  a row in each array for each example: pictures, sound, classes     the others

Each has `opened`, a context manager that opens --data and yields a `Learned` (zigzag/run/loop.py):
the configuration with what follows from the data, what train.fit is given, what config.json notes,
and what is printed. What it puts into the run's folder is taken back if the run is refused. The
options that one kind alone uses are declared so (`of=` in zigzag/run/more_options.py), and refused
elsewhere.

To learn from something else, give train.fit functions of your own (docs/tasks.md). These files
import any other but train.py.
"""

import contextlib
import functools
import shlex
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp

import networks
from tasks import arrays, pairs, text
from zigzag.core import hosts
from zigzag.core.errors import ConfigError
from zigzag.core.report import Reporter
from zigzag.disk import examples
from zigzag.disk.checkpoint import check_run_folder, newest_step
from zigzag.disk.corpus import tokenizer_of
from zigzag.disk.tokenizers import Tokenizer
from zigzag.run import continuing, init_from, loggers
from zigzag.run.loop import Learned
from zigzag.run.trainer import Trainer

KINDS = {"text": text, "pairs": pairs, "arrays": arrays}


def kind_of(config: Any) -> str:
    """The kind of data that a configuration's network learns from, a name in KINDS."""
    network = networks.network_of(config)
    shape = network.source_shape(config.network)
    if network.gives(config.network) != "text":
        return "arrays"
    reads_arrays = shape is not None and len(shape) > 1     # (a batch may be given as arrays, too)
    return "text" if shape is None else "arrays" if reads_arrays and all(
        map(examples.is_arrays, config.data)) else "pairs"


def needs(config: Any) -> tuple[str, ...]:
    """The facts that a run must have recorded, to continue with this configuration."""
    return () if kind_of(config) == "arrays" else ("tokenizer",)


def language(config: Any) -> tuple[Callable, Callable, Any]:
    """The configuration's own network, for train.fit: init, loss, and a batch's shapes."""
    network = networks.network_of(config)
    batch = {**network.batch_shapes(config.network, config.batch),
             "seeds": jax.ShapeDtypeStruct((config.batch,), jnp.uint32)}
    if config.pack == "documents":      # (chats are packed, too; but nothing here knows the data)
        batch |= dict.fromkeys(("segments", "positions"), batch["tokens"])
    return (functools.partial(network.init, config.network),
            functools.partial(network.loss, config=config.network), batch)


def first_weights(config: Any) -> tuple[Callable | None, Tokenizer | None, dict[str, int]]:
    """For a model that has weights already: how fit reads them, its tokenizer, and what config.json
    notes about them. Else None, None and {}."""
    return init_from.first_weights(config, networks.network_of(config),
                                   kind_of(config) != "arrays")


@contextlib.contextmanager
def opened(config: Any, trainer: Trainer) -> Iterator[Learned]:
    """--data, for the run in config.out. With --bench, for a folder that is removed again."""
    if config.bench:
        _, tokenizer, _ = first_weights(config)
        with tempfile.TemporaryDirectory() as folder, KINDS[kind_of(config)].opened(
                config, tokenizer, Path(folder) / "run") as learned:
            yield learned
        return
    with _opened_in_turn(config, trainer) as learned:
        config = continuing.hold(learned.config, trainer.old_config)
        say = Reporter(config.steps)
        for line in continuing.first_lines(config, trainer.old_config, trainer.learning_rate):
            say.line(line)
        if config.init_from:
            say.line(f"model    {config.init_from}, fine-tuned on rows of {config.seq_len:,} "
                     f"tokens (--seq_len) with a learning rate of up to {config.lr:.3g} (--lr)")
        say.line(f"data     {learned.description}")
        yield learned._replace(config=config, say=say)
        if learned.prompt_flags and newest_step(config.out) >= config.steps:
            say.line(f"sample   python sample.py --run {shlex.quote(config.out)} "
                     f"{learned.prompt_flags}")


@contextlib.contextmanager
def _opened_in_turn(config, trainer):
    """--data, after all that can be refused without it. Process 0 opens it first: what it writes,
    the others read."""
    run, is_process_0 = Path(config.out), jax.process_index() == 0
    if not config.out:
        raise ConfigError("--out '': expected a folder for the run")
    check = functools.partial(check_run_folder, config.out, read_old=trainer.read_old,
                              may=trainer.may_change(), change=config.change)
    weights, tokenizer, noted = first_weights(config)
    loggers.check(config.log, config.out)
    check(trainer.facts_of(config), needs=needs(config))
    fingerprint = ""            # of the run's data, if it continues
    if (run / "config.json").exists():
        record = trainer.read_old(config.out)
        fingerprint = str(record.get("fingerprint", ""))
        if "data" in config.change and needs(config):
            tokenizer = tokenizer_of(run, record)
    if not is_process_0:
        fingerprint = hosts.process_allgather("")[0]
    seconds = 0 if is_process_0 else min(60, config.patience)
    with KINDS[kind_of(config)].opened(config, tokenizer, run, seconds, fingerprint) as learned:
        record = learned.record | noted
        check(record)
        if is_process_0:
            hosts.process_allgather(record["fingerprint"])
        yield learned._replace(record=record, weights=weights)
