"""Starting a run from the weights of a published model or of another run: a function that reads
them, and the tokenizer."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Callable

from zigzag.core.errors import ConfigError
from zigzag.disk.checkpoint import read_run, run_record, run_steps
from zigzag.disk.corpus import tokenizer_of
from zigzag.disk.tokenizers import Tokenizer, published_tokenizer
from zigzag.hub.folders import check_hf, read_hf, read_run_weights
from zigzag.weights.network import Network


def first_weights(config: Any, network: Network, reads_text: bool
                  ) -> tuple[Callable | None, Tokenizer | None, dict[str, int]]:
    """(a function that reads the model's weights for train.fit, or None; its tokenizer, or None;
    facts about them for config.json). A model that `reads_text` needs a tokenizer."""
    source, own = config.init_from, Path(config.out)
    if not source:
        return None, None, {}
    if source == config.model:
        whole = dataclasses.replace(config.network, lora_rank=0)
        check_hf(network, source, whole, config.edited)
        return (functools.partial(read_hf, network, source, whole), published_tokenizer(
            source, config.network.vocab_size) if reads_text else None, {})
    record = read_run(source, network.config, "--init_from")
    if "tokenizer" not in record and reads_text:
        raise ConfigError(f"--init_from {source}: a run of another task, without a tokenizer for "
                          f"text")
    # The other run may have continued since this one began.
    begun = run_record(own, "--out") if (own / "config.json").exists() else {}
    step = begun.get("base_step")
    if step is None:
        step = run_steps(source, "--init_from")[0]
    return (functools.partial(read_run_weights, network, source, step=step, flag="--init_from"),
            tokenizer_of(Path(source), record) if reads_text else None, {"base_step": step})
