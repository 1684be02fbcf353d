"""--sample_prompts: what a model writes for the prompts of a file, at each evaluation."""

from typing import Any, Callable

import jax
import numpy as np

from zigzag.errors import ConfigError
from zigzag.hosts import process_allgather
from zigzag.loop import Samples
from zigzag.prompts import file_prompts
from zigzag.rows import cut_at_end


def read_prompts(path: str) -> list[str]:
    """The prompts of a file, which only process 0 reads."""
    return process_allgather(_read_file(path) if jax.process_index() == 0 else None)[0]


def _read_file(path):
    prompts = file_prompts(path, "--sample_prompts")
    if "" in prompts:
        raise ConfigError(f"--sample_prompts {path}: a prompt is empty; expected a text")
    return prompts


def answers(path: str, collate: Callable, predict: Callable, text: Callable) -> Samples | None:
    """Samples of an encoder-decoder: its answers to the prompts of a file. collate(sources) and
    predict are the task's; text(outputs) is the text for one source. None without a file."""
    if not path:
        return None
    return Samples(read_prompts(path), collate, predict, lambda prompt, outputs: text(outputs))


def continuations(path: str, tokenizer: Any, max_positions: int, write: Callable) -> Samples | None:
    """Samples of a decoder, which continues the prompts of a file. write(params, batch) returns new
    ids for `tokens` [B, P], padded on the left, whose rows begin at `start` [B]. None without a
    file."""
    if not path:
        return None
    prompts = read_prompts(path)
    ids = {prompt: list(tokenizer.prompt(prompt)) for prompt in prompts}
    longest = max(map(len, ids.values()))
    if longest >= max_positions:
        raise ConfigError(f"--sample_prompts {path}: a prompt has {longest} tokens; expected fewer "
                          f"than the {max_positions} for which this model has positions")

    def collate(some):
        start = np.array([longest - len(ids[prompt]) for prompt in some], np.int32)
        tokens = [[0] * begin + ids[prompt] for begin, prompt in zip(start, some)]
        return {"tokens": np.array(tokens, np.int32), "start": start}

    def text(prompt, new):
        before, new = ids[prompt], cut_at_end(tokenizer.ends, new.tolist())
        return tokenizer.decode([*before, *new])[len(tokenizer.decode(before)):]

    return Samples(prompts, collate, write, text)
