"""The data that a run learns from, and its first weights.

    kind_of         return the kind of data that its network learns from: text, pairs or arrays
    needs           list the facts that a run must have recorded to resume
    first_weights   read a published model's or another run's weights, and its tokenizer
"""

import dataclasses
import functools
from typing import Any, Callable

from zigzag.core.errors import ConfigError
from zigzag.core.parts import here, part, place
from zigzag.disk.checkpoint import run_record, run_steps
from zigzag.disk.lines import is_arrays
from zigzag.disk.tokenizers import Tokenizer, tokenizer_of
from zigzag.parallel.network import network_of
from zigzag.parallel.saved import read_run_weights
from zigzag.run.continuing import is_run


def kind_of(config: Any) -> str:
    """Return the kind of data that the config's network learns from: running text (text), or the
    name of a file in tasks/ (pairs, arrays)."""
    network = network_of(config)
    shape = network.source_shape(config.network)
    if network.gives(config.network) != "text":
        return "arrays"
    reads_arrays = shape is not None and len(shape) > 1     # --data may hold arrays instead
    return "text" if shape is None else "arrays" if reads_arrays and all(
        map(is_arrays, here(config.data))) else "pairs"


def needs(config: Any) -> tuple[str, ...]:
    """List the facts that a run must have recorded in order to resume with this config."""
    return () if kind_of(config) == "arrays" else ("tokenizer",)


def first_weights(config: Any) -> tuple[Callable | None, Tokenizer | None, dict[str, int]]:
    """For a model that already has weights, return (a function that reads them for train.fit, the
    tokenizer if it reads text, facts for config.json). Otherwise return (None, None, {})."""
    network, reads_text = network_of(config), kind_of(config) != "arrays"
    source = config.init_from
    if not source:
        return None, None, {}
    if source == config.model:
        whole = dataclasses.replace(config.network, lora_rank=0)
        folders = part("published.folders", f"--model {source}")
        folders.check_hf(network, source, whole, config.edited)
        tokenizer = part("published.hub_names", "").tokenizer_of(
            source, config.network.vocab_size) if reads_text else None
        return functools.partial(folders.read_hf, network, source, whole), tokenizer, {}
    record = run_record(source, "--init_from")
    if "tokenizer" not in record and reads_text:
        raise ConfigError(f"--init_from {source}: a run of a different task, without a tokenizer "
                          f"for text")
    # The other run may have resumed since this one began.
    begun = run_record(config.out, "--out") if is_run(config.out) else {}
    step = begun.get("base_step")
    if step is None:
        step = run_steps(source, "--init_from")[0]
    return (functools.partial(read_run_weights, network, source, step=step, flag="--init_from"),
            tokenizer_of(place(source), record) if reads_text else None, {"base_step": step})
