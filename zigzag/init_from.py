"""Weights that a run begins with, of a published model or of another run.

    fields_with_weights   the configuration that follows from such a model
    first_weights         how its weights are read, and its tokenizer
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Callable

from zigzag.checkpoint import read_run, run_config, run_steps
from zigzag.errors import ConfigError
from zigzag.tokenizers import Tokenizer, published_tokenizer

# How a model is computed, and what else may change of one that has its weights already.
COMPUTED = ("remat", "kernel", "sequence_parallel", "microbatches", "schedule", "chunks",
            "sum_dtype")
TRAINED = ("seq_len", "source_len", "dropout", "dtype", "balance", "router_z", "lora_rank",
           *COMPUTED)
# Rows of a published model that is fine-tuned, where nothing is said: it may know far longer ones.
FINE_TUNING_LENGTH = 512


def fields_with_weights(given: dict[str, Any], model_config: type, hf_config: Callable
                        ) -> dict[str, Any]:
    """The fields of a model that has its weights already, a published one or a run's, of which
    flags (`given`) may only say how it is trained."""
    source = given.get("init_from") or given["model"]
    if given.get("init_from"):
        if "model" in given:
            raise ConfigError(f"--model {given['model']} --init_from {source}: both say which "
                              f"model; give one of them")
        config = run_config(source, model_config, "--init_from")
        base = {k: v for k, v in dataclasses.asdict(config).items()
                if k not in ("dtype", "lora_rank", *COMPUTED)} | {"model": ""}
    else:
        base = dataclasses.asdict(hf_config(source))
        lengths = ("seq_len", "source_len") if base["stem"] == "tokens" else ("seq_len",)
        base |= {name: min(base[name], FINE_TUNING_LENGTH) for name in lengths}
    base["remat"] = "full"      # (trained models tend to be as large as a memory allows)
    for name, value in given.items():
        may = name in TRAINED and (name != "source_len" or base["stem"] == "tokens")
        if name in base and not may and value != base[name]:
            raise ConfigError(f"--{name} {value}: the model of {source} has {base[name]}, and its "
                              f"weights are made for that; what may change is how it is trained "
                              f"(--{', --'.join(TRAINED)})")
    return {**base, "init_from": source}


def first_weights(config: Any, model_config: type, network: Any, tokenizer_of: Callable | None
                  ) -> tuple[Callable | None, Tokenizer | None, dict[str, int]]:
    """How fit reads the weights that the model has already, if it has, its tokenizer, and what a
    run notes of them. `tokenizer_of` is data.py's, None where the model reads no text."""
    source, own = config.init_from, Path(config.out)
    if not source:
        return None, None, {}
    if source == config.model:
        whole = dataclasses.replace(config, lora_rank=0)
        network.read_hf(source, whole)      # is everything there?
        return (functools.partial(network.read_hf, source, whole), published_tokenizer(
            source, config.vocab_size) if tokenizer_of else None, {})
    record = read_run(source, model_config, "--init_from")
    if "tokenizer" not in record and tokenizer_of:
        raise ConfigError(f"--init_from {source}: a run of another task, with no tokenizer to read "
                          f"text with")
    # The other run may have gone on since this one began.
    begun = read_run(own, type(config), "--out") if (own / "config.json").exists() else {}
    step = begun.get("base_step")
    if step is None:
        step = run_steps(source, "--init_from")[0]
    return (functools.partial(network.read_run_weights, source, step=step, flag="--init_from"),
            tokenizer_of(Path(source), record) if tokenizer_of else None, {"base_step": step})
