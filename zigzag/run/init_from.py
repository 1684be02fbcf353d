"""Weights that a run begins with, of a published model or of another run.

    fields_with_weights   the configuration that follows from such a model
    first_weights         how its weights are read, and its tokenizer
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Callable

from zigzag.core.errors import ConfigError
from zigzag.disk.checkpoint import read_run, run_record, run_steps
from zigzag.disk.tokenizers import Tokenizer, published_tokenizer
from zigzag.hub.folders import read_hf, read_run_weights
from zigzag.weights.network import COMPUTED, Network

# Rows of a published model that is fine-tuned, where nothing is said: it may know far longer ones.
FINE_TUNING_LENGTH = 512


def fields_with_weights(given: dict[str, Any], network: Network, config: Any) -> dict[str, Any]:
    """The fields of a model that has its weights already, a published one or a run's, of which
    flags (`given`) may only say how it is trained. `config` is the network's, as the model has
    it."""
    source, base = given.get("init_from") or given["model"], dataclasses.asdict(config)
    shape = network.source_shape(config)
    source_len = ["source_len"] if shape and len(shape) == 1 else []
    if given.get("init_from"):
        base = {k: v for k, v in base.items() if k not in ("dtype", "lora_rank", *COMPUTED)}
    else:
        base |= {name: min(base[name], FINE_TUNING_LENGTH) for name in ["seq_len", *source_len]}
    base["remat"] = "full"      # (trained models tend to be as large as a memory allows)
    may = [*network.trained, "dtype", "lora_rank", *COMPUTED]
    may = [name for name in may if name != "source_len" or source_len]
    for name, value in given.items():
        if name in base and name not in may and value != base[name]:
            raise ConfigError(f"--{name} {value}: the model of {source} has {base[name]}, and its "
                              f"weights are made for that; what may change is how it is trained "
                              f"(--{', --'.join(may)})")
    return base


def first_weights(config: Any, network: Network, tokenizer_of: Callable | None
                  ) -> tuple[Callable | None, Tokenizer | None, dict[str, int]]:
    """How fit reads the weights that the model has already, if it has, its tokenizer, and what a
    run notes of them. `tokenizer_of` is data.py's, None where the model reads no text."""
    source, own = config.init_from, Path(config.out)
    if not source:
        return None, None, {}
    if source == config.model:
        whole = dataclasses.replace(config.network, lora_rank=0)
        read_hf(network, source, whole)     # is everything there?
        return (functools.partial(read_hf, network, source, whole), published_tokenizer(
            source, config.vocab_size) if tokenizer_of else None, {})
    record = read_run(source, network.config, "--init_from")
    if "tokenizer" not in record and tokenizer_of:
        raise ConfigError(f"--init_from {source}: a run of another task, with no tokenizer to read "
                          f"text with")
    # The other run may have gone on since this one began.
    begun = run_record(own, "--out") if (own / "config.json").exists() else {}
    step = begun.get("base_step")
    if step is None:
        step = run_steps(source, "--init_from")[0]
    return (functools.partial(read_run_weights, network, source, step=step, flag="--init_from"),
            tokenizer_of(Path(source), record) if tokenizer_of else None, {"base_step": step})
