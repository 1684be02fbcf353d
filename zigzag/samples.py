"""--sample_prompts: the prompts of a file, and what a model writes for them at each evaluation."""

from typing import Any, Callable

import jax
import numpy as np

from zigzag.asked import file_prompts
from zigzag.errors import ConfigError
from zigzag.hosts import process_allgather
from zigzag.loop import Samples
from zigzag.rows import until


def read_prompts(path: str) -> list[str]:
    """The prompts of a file that process 0 sees."""
    return process_allgather(_read(path) if jax.process_index() == 0 else None)[0]


def _read(path):
    prompts = file_prompts(path, "--sample_prompts")
    if "" in prompts:
        raise ConfigError(f"--sample_prompts {path}: a prompt is empty; expected a text")
    return prompts


def answers(path: str, collate: Callable, predict: Callable, text: Callable) -> Samples | None:
    """Samples of an encoder-decoder for the prompts of a file: collate(sources) and predict are a
    task's, and text(outputs) what it has written for one source. No file: none."""
    if not path:
        return None
    return Samples(read_prompts(path), collate, predict, lambda prompt, outputs: text(outputs))


def continuations(path: str, tokenizer: Any, room: int, write: Callable) -> Samples | None:
    """Samples that go on from the prompts of a file. write(params, batch) gives new ids for
    `tokens` [B, P], padded on the left, of which each row begins at `start`. The model has room for
    so many ids. No file: none."""
    if not path:
        return None
    prompts = read_prompts(path)
    ids = {prompt: list(tokenizer.prompt(prompt)) for prompt in prompts}
    longest = max(map(len, ids.values()))
    if longest >= room:
        raise ConfigError(f"--sample_prompts {path}: a prompt has {longest} tokens; expected fewer "
                          f"than the {room} for which this model has positions")

    def collate(some):
        start = np.array([longest - len(ids[prompt]) for prompt in some], np.int32)
        tokens = [[0] * begin + ids[prompt] for begin, prompt in zip(start, some)]
        return {"tokens": np.array(tokens, np.int32), "start": start}

    def text(prompt, new):
        before, new = ids[prompt], until(tokenizer.ends, new.tolist())
        return tokenizer.decode([*before, *new])[len(tokenizer.decode(before)):]

    return Samples(prompts, collate, write, text)
