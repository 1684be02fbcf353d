"""Pairs: an encoder-decoder learns a target text given its source, which is a text, an image or
sound.

    *.jsonl --tasks/examples.py: Pairs--> (source, target ids) --collate--> batch
"""

import contextlib
import functools
from pathlib import Path
from typing import Any, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

import sample
from tasks import examples, metrics
from zigzag.core.errors import ConfigError
from zigzag.core.options import only
from zigzag.core.parts import part
from zigzag.disk.tokenizers import Bytes, Tokenizer, tokenizer_record
from zigzag.generate.decoding import GREEDY
from zigzag.generate.prompts import special_ids
from zigzag.generate.rows import cut_at_end
from zigzag.parallel.network import flops_of_update, network_of
from zigzag.run import checks, schedules
from zigzag.run.task import OpenedData, Task, language


@contextlib.contextmanager
def opened(config: Any, tokenizer: Tokenizer | None, run: Path, ready: float = 0,
           fingerprint: str = "") -> Iterator[OpenedData]:
    """Open the JSON Lines files that --data and --held_out name."""
    tokenizer = tokenizer or Bytes()
    shape = network_of(config).source_shape(config.network)
    read = functools.partial(examples.Pairs, tokenizer=tokenizer, fields=config.fields,
                             shape=shape if len(shape) > 1 else ())
    own, held_out, description, digest = examples.opened(config, read)
    config = checks.check_vocabulary(config, tokenizer.vocab_size)
    config = schedules.with_steps(config, len(own.train))
    record = {"fingerprint": digest, "tokenizer_sha256": "", **tokenizer_record(tokenizer)}
    yield OpenedData(config, lambda: task_of(config, tokenizer, own.train, held_out), record,
                  description, '--prompt "..."' if len(shape) == 1 else "--source FILE.npy")


def task_of(config: Any, tokenizer: Tokenizer, pairs: Sequence, held_out: Sequence) -> Task:
    """Make the Task of learning the targets. Each evaluation answers held-out sources."""
    if config.metric not in ("", *metrics.TEXT_METRICS):
        raise ConfigError(f"--metric {config.metric}: needs classes; expected one of "
                          f"{', '.join(metrics.TEXT_METRICS)} for pairs of texts")
    if config.beams:
        part("tools.beams", f"--beams {config.beams}")
    network = network_of(config)
    width, *is_array = network.source_shape(config.network)
    length = config.network.seq_len
    if begin := network.source_ids(config.network):     # a decoder, with ids instead of the source
        begin, end, pad = [*begin, tokenizer.prompt("")[-1]], tokenizer.ends[0], 0
    else:
        *begin, end, pad = special_ids(config.network, tokenizer)
    to_batch = functools.partial(collate, source_len=0 if is_array else width, target_len=length,
                                 begin=begin, end=end, pad=pad)
    if length <= len(begin):
        raise ConfigError(f"--seq_len {length}: {len(begin)} tokens come before a target")

    def predict(params, batch):
        source = only(batch, "source", "source_mask")
        tokens = jnp.broadcast_to(jnp.array(begin), (len(batch["source"]), len(begin)))
        new = sample.generate_ids(params, source | {"tokens": tokens}, config.network,
                                  length - len(begin), GREEDY, 0, (end,), config.beams)
        return {} if is_array else source, new

    def text(ids):
        return tokenizer.decode(cut_at_end([end], ids.tolist()))

    def show(outputs):
        source, new = outputs
        answer = {"answer": text(new[0])}
        if is_array:
            return answer
        is_real = source["source_mask"][0] > 0
        return {"source": tokenizer.decode(source["source"][0][is_real])} | answer

    def metric(outputs, examples):
        return metrics.TEXT_METRICS[config.metric](
            list(map(text, outputs[1])), [tokenizer.decode(target) for _, target in examples])

    init, loss, _ = language(config)
    return Task(init, to_batch, loss, predict, pairs, held_out, tokenizer=tokenizer, show=show,
                metric=metric if config.metric else None,
                predicted=None if config.metric else 1, flops=flops_of_update(config))


def collate(examples: Sequence[tuple[np.ndarray, np.ndarray]], source_len: int, target_len: int,
            begin: Sequence[int], end: int | None = None, pad: int = 0) -> dict[str, np.ndarray]:
    """Make a batch for an encoder and a decoder from pairs (source ids, target ids): source and
    source_mask [B, S]; tokens, targets and weights [B, T], where weight 0 means no target. The
    decoder reads the ids `begin`, then its targets shifted by one position. If a target already
    begins with the last id of `begin`, that id isn't repeated:

        begin            target ids           tokens             targets
        T5: <pad>        a b </s>             <pad> a b          a b </s>
        BART: </s>       <s> a b </s>         </s> <s> a b       <s> a b </s>
        (others): <s>    <s> a b </s>         <s> a b            a b </s>

    Sources and targets that are too long are truncated, but keep their `end` if they had it. With a
    source_len of 0, sources are arrays, source [B, ...], and every target ends with `end`."""
    sources, rows = zip(*examples)
    if source_len:
        source, source_mask = np.zeros((2, len(rows), source_len), np.int32)
        source += pad
        for row, ids in enumerate(sources):
            ids = _cut(ids, source_len, end)
            source[row, :len(ids)], source_mask[row, :len(ids)] = ids, 1
        batch = {"source": source, "source_mask": source_mask}
    else:
        batch = {"source": np.stack(sources)}
        rows = [ids if ids[-1] == end else np.append(ids, end) for ids in rows]

    tokens, targets = np.full((2, len(rows), target_len), pad, np.int32)
    weights = np.zeros(tokens.shape, np.float32)
    first = len(begin) - 1      # the first target's index
    for row, ids in enumerate(rows):
        # If an id is both start and end, a target with only that id is an empty text.
        ids = ids[1:] if len(ids) > 1 and ids[0] == begin[-1] else ids
        ids = _cut(ids, target_len - first, end)
        last = first + len(ids)
        tokens[row, :last], targets[row, first:last] = [*begin, *ids[:-1]], ids
        weights[row, first:last] = 1
    return batch | {"tokens": tokens, "targets": targets, "weights": weights}


def _cut(ids, length, end):
    short = ids[:length].copy()
    if end is not None and len(ids) > length and ids[-1] == end:
        short[-1] = end
    return short
