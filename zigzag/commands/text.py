"""Text for a decoder that learns to predict the next token: running text, conversations, or prompts
and completions. data.py and zigzag/disk turn it into rows."""

import contextlib
import math
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np

import data
import sample
from zigzag.core.errors import ConfigError
from zigzag.disk.corpus import Sources, opened_sources
from zigzag.disk.encoding import what_was_skipped
from zigzag.disk.mixture import mixed, spread
from zigzag.disk.packing import parts_of, question_in
from zigzag.disk.tokenizers import Tokenizer, tokenizer_record
from zigzag.generate.decoding import Sampling
from zigzag.generate.rows import context_of
from zigzag.parallel.network import flops_of_update, network_of
from zigzag.run import checks, schedules
from zigzag.run.evaluation import NEW_IDS, preview
from zigzag.run.task import OpenedData, Task, language


@contextlib.contextmanager
def opened(config: Any, tokenizer: Tokenizer | None, run: Path, ready: float = 0,
           fingerprint: str = "") -> Iterator[OpenedData]:
    """Open the corpora of --data and of --held_out. zigzag/disk/corpus.py explains `ready` and
    `fingerprint`."""
    with opened_sources(
            config.data, bool(config.mix), config.held_out, run, ready, tokenizer,
            fingerprint, "data" in config.change, config.network.vocab_size,
            config.weight_field, config.field) as sources:
        if tokenizer and not tokenizer_record(tokenizer).items() <= sources.record.items():
            raise ConfigError(f"--data {' '.join(config.data)}: its tokens are not from the "
                              f"tokenizer of {config.init_from or config.out}; give the text "
                              f"itself")
        config = check_corpus(config, sources)
        rows = training_rows(config, sources)
        config = schedules.with_steps(config, len(rows))
        record = {"fingerprint": sources.fingerprint, "tokenizer": sources.tokenizer.kind,
                  "tokenizer_sha256": sources.record.get("tokenizer_sha256", "")}
        yield OpenedData(config, lambda: task_of(config, sources, rows), record,
                      sources.described(config.network.seq_len),
                      sources.prompt_flags if config.data else '--prompt "def main("')


def check_corpus(config: Any, sources: Any) -> Any:
    """Set the config's vocabulary from the corpora. Reject corpora with too little to learn."""
    config = checks.check_vocabulary(config, sources.tokenizer.vocab_size)
    length = config.network.seq_len
    if any(corpus and corpus.record.get("form") == "preference"
           for corpus in (*sources.corpora, sources.held_out)):
        raise ConfigError("the data have preferences (chosen, rejected), which only python -m "
                          "recipes.dpo trains on; expected texts, messages, or prompts and "
                          "completions")
    for name, corpus in zip(sources.names, sources.corpora):
        what = f"the source {name}" if len(sources.corpora) > 1 else "the data"
        count, weights = len(corpus.train), corpus.weights["train"]
        if corpus.is_learned_in_part:
            documents = corpus.documents("train")
            if documents.unlearned(length) == len(documents):
                begins = int(np.argmax(documents.weights > 0))
                raise ConfigError(f"--seq_len {length}: no answer in {corpus.folder} starts within "
                                  f"this length, so there is nothing to learn; the first one "
                                  f"starts after {begins:,} tokens")
        elif count <= length:
            skipped = "".join(f"; {text}" for text in what_was_skipped(corpus.record) if text)
            raise ConfigError(f"--seq_len {length}: {what} has only {count} tokens to "
                              f"train on; give more data or a --seq_len below {count}{skipped}")
        elif weights is not None and weights.min() == weights.max() == 0:
            raise ConfigError(f"{what}: all weights are 0, so there is nothing to learn")
    return config


def pack_of(config: Any, sources: Sources) -> str:
    """Return how to make rows: --pack if given, otherwise the choice that fits the data."""
    if config.pack == "stream" and sources.is_learned_in_part:
        raise ConfigError("--pack stream: these data train on answers only, which needs --pack "
                          "documents")
    return config.pack or ("documents" if sources.is_learned_in_part else "stream")


def training_rows(config: Any, sources: Sources) -> Sequence:
    """Return the rows that the decoder learns from."""
    return mixed([data.rows_of(corpus, "train", config.network.seq_len, pack_of(config, sources),
                               config.seed) for corpus in sources.corpora], config.mix)


def task_of(config: Any, sources: Sources, rows: Sequence | None = None) -> Task:
    """Return the task of predicting the next token in `rows` (None: training_rows). Each evaluation
    also continues a held-out text."""
    T, tokenizer, pack = config.network.seq_len, sources.tokenizer, pack_of(config, sources)
    room = context_of(network_of(config), config.network)
    begin = min(32, -(-room // 4))          # a short prompt, so that the answer fits in the context
    # Every evaluation uses the same rows, spread over the whole held-out text.
    count = max(1, config.eval_tokens // T // len(sources.evaluated))
    held_out = {name: spread(mixed([data.rows_of(c, split, T, pack, config.seed)
                                    for c, split in parts]), count)
                for name, parts in sources.evaluated.items()}
    # Sum the held-out weights, and the bytes of text in each target times the target's weight.
    weight, size, lengths = 0.0, 0.0, tokenizer.lengths() * sources.bytes_per_spelled
    for part in (p for rows in held_out.values() for row in rows for p in parts_of(row)):
        weight += part.weights.sum(dtype=float)
        size += float(lengths[part.targets] @ part.weights)
    if config.eval_every and not weight and any(map(len, held_out.values())):
        raise ConfigError("all held-out weights within --seq_len are 0, so there is nothing to "
                          "evaluate; give different --held_out data, a longer --seq_len, or "
                          "--eval_every 0")

    def write(params, batch):
        more = min(NEW_IDS, room - batch["tokens"].shape[1] + 1)
        return sample.generate_ids(params, batch, config.network, more,
                                   Sampling(config.sample_temperature), config.seed)

    # An evaluation answers a held-out conversation's first question, or continues a few tokens.
    asked = (row for name, parts in sources.evaluated.items() for row in held_out[name]
             if pack == "documents" and parts[0][0].is_learned_in_part)
    predict, show = preview(tokenizer, write, begin,
                            question_in(asked, max(room // 2, room - NEW_IDS)))
    init, loss, _ = language(config)
    return Task(init=init, loss=loss, tokenizer=tokenizer,
                collate=lambda examples: data.collate(examples, T),
                predict=predict, examples=training_rows(config, sources) if rows is None else rows,
                held_out=mixed(list(held_out.values())),
                sources={name: len(part) for name, part in held_out.items()},
                show=show, predicted=1, flops=flops_of_update(config),
                bits_per_nat=weight / size / math.log(2) if size else None)
