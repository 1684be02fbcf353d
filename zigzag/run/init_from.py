"""Starting a run from the weights of a published model or of another run.

    fields_with_weights   the configuration of such a model
    first_weights         a function that reads its weights, and its tokenizer
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

# The default seq_len when a published model is fine-tuned, whose own may be far longer.
FINE_TUNING_LENGTH = 512


def fields_with_weights(given: dict[str, Any], network: Network, config: Any) -> dict[str, Any]:
    """The fields of a model that already has weights (a published one's, or a run's). The flags
    `given` may change only how it is trained. `config` is the model's own configuration."""
    source, base = given.get("init_from") or given["model"], dataclasses.asdict(config)
    shape = network.source_shape(config)
    source_len = ["source_len"] if shape and len(shape) == 1 else []
    if given.get("init_from"):
        base = {k: v for k, v in base.items() if k not in ("dtype", "lora_rank", *COMPUTED)}
    else:
        base |= {name: min(base[name], FINE_TUNING_LENGTH) for name in ["seq_len", *source_len]}
    base["remat"] = "full"      # (published models tend to fill the memory)
    may = [*network.trained, "dtype", "lora_rank", *COMPUTED]
    may = [name for name in may if name != "source_len" or source_len]
    for name, value in given.items():
        if name in base and name not in may and value != base[name]:
            raise ConfigError(f"--{name} {value}: the model of {source} has {base[name]}, and its "
                              f"weights need that; only options of training may change "
                              f"(--{', --'.join(may)})")
    return base


def first_weights(config: Any, network: Network, tokenizer_of: Callable | None
                  ) -> tuple[Callable | None, Tokenizer | None, dict[str, int]]:
    """(a function that reads the model's weights for train.fit, or None; its tokenizer, or None;
    facts about them for config.json). `tokenizer_of` is data.py's, or None if the model reads no
    text."""
    source, own = config.init_from, Path(config.out)
    if not source:
        return None, None, {}
    if source == config.model:
        whole = dataclasses.replace(config.network, lora_rank=0)
        read_hf(network, source, whole)     # checks that the folder is complete
        return (functools.partial(read_hf, network, source, whole), published_tokenizer(
            source, config.vocab_size) if tokenizer_of else None, {})
    record = read_run(source, network.config, "--init_from")
    if "tokenizer" not in record and tokenizer_of:
        raise ConfigError(f"--init_from {source}: a run of another task, without a tokenizer for "
                          f"text")
    # The other run may have continued since this one began.
    begun = run_record(own, "--out") if (own / "config.json").exists() else {}
    step = begun.get("base_step")
    if step is None:
        step = run_steps(source, "--init_from")[0]
    return (functools.partial(read_run_weights, network, source, step=step, flag="--init_from"),
            tokenizer_of(Path(source), record) if tokenizer_of else None, {"base_step": step})
