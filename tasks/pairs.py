"""Pairs of texts, from which an encoder-decoder learns the target, given the source.

    *.jsonl --zigzag/disk/examples.py: Pairs--> (source ids, target ids) --collate--> batch
"""

import contextlib
import functools
from pathlib import Path
from typing import Any, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

import networks
import sample
from zigzag.core.errors import ConfigError
from zigzag.disk import examples
from zigzag.disk.corpus import kept_tokenizer, tokenizer_record
from zigzag.disk.tokenizers import Bytes, Tokenizer
from zigzag.generate.decoding import GREEDY
from zigzag.generate.rows import cut_at_end
from zigzag.hub.llama import special_ids
from zigzag.run import checks, metrics, schedules
from zigzag.run.evaluation import answers
from zigzag.run.loop import Learned, Task


@contextlib.contextmanager
def opened(config: Any, tokenizer: Tokenizer | None, run: Path, ready: float = 0,
           fingerprint: str = "") -> Iterator[Learned]:
    """The lines of JSON of --data, and of --held_out."""
    tokenizer = tokenizer or Bytes()
    read = functools.partial(examples.Pairs, tokenizer=tokenizer, fields=config.fields)
    own = read(config.data, whole=bool(config.held_out))
    other = read(config.held_out, whole=True) if config.held_out else None
    held_out, description, digest = examples.beside(own, other)
    config = checks.check_vocabulary(config, tokenizer.vocab_size)
    config = schedules.with_steps(config, len(own.train))
    record = {"fingerprint": digest, "tokenizer_sha256": "", **tokenizer_record(tokenizer)}
    with kept_tokenizer(tokenizer, run, ready):
        yield Learned(config, lambda: task_of(config, tokenizer, own.train, held_out), record,
                      description, '--prompt "..."')


def task_of(config: Any, tokenizer: Tokenizer, pairs: Sequence, held_out: Sequence) -> Task:
    """Learning the targets; at each evaluation, answers to held-out sources."""
    if config.metric not in ("", *metrics.TEXT_METRICS):
        raise ConfigError(f"--metric {config.metric}: is for classes; expected one of "
                          f"{', '.join(metrics.TEXT_METRICS)} for pairs of texts")
    width, = networks.network_of(config).source_shape(config.network)
    start, end, pad = special_ids(config, tokenizer)
    to_batch = functools.partial(collate, source_len=width, target_len=config.seq_len, start=start,
                                 end=end, pad=pad)

    def predict(params, batch):
        rows = {"tokens": jnp.full((len(batch["source"]), 1), start),
                **{name: batch[name] for name in ("source", "source_mask")}}
        new = sample.generate_ids(params, rows, config.network, config.seq_len - 1, GREEDY, 0,
                                  (end,), config.beams)
        return batch["source"], batch["source_mask"], new

    def text(ids):
        return tokenizer.decode(cut_at_end([end], ids.tolist()))

    def show(outputs):
        source, mask, new = (x[0] for x in outputs)
        return {"source": tokenizer.decode(source[mask > 0]), "answer": text(new)}

    def metric(outputs, examples):
        return metrics.TEXT_METRICS[config.metric](
            list(map(text, outputs[2])), [tokenizer.decode(target) for _, target in examples])

    samples = answers(config.sample_prompts, lambda sources: to_batch(
        [(tokenizer.with_ends(s), [end]) for s in sources]), predict, lambda out: text(out[2]))
    return Task(collate=to_batch, predict=predict, examples=pairs, held_out=held_out, show=show,
                metric=metric if config.metric else None, predicted=None if config.metric else 1,
                samples=samples, flops=networks.flops_of_update(config))


def collate(examples: Sequence[tuple[np.ndarray, np.ndarray]], source_len: int, target_len: int,
            start: int, end: int | None = None, pad: int = 0) -> dict[str, np.ndarray]:
    """A batch for an encoder and a decoder, from pairs (source ids, target ids): source and
    source_mask [B, S]; tokens, targets and weights [B, T], where a weight is 0 if there is no
    target. The decoder reads its targets shifted by one, after the id `start`, which is added
    unless the target begins with it:

        start            ids of the target    tokens             targets
        T5: <pad>        a b </s>             <pad> a b          a b </s>
        BART: </s>       <s> a b </s>         </s> <s> a b       <s> a b </s>
        (others): <s>    <s> a b </s>         <s> a b            a b </s>

    Sources and targets that are too long are cut, and still end with `end` if they did."""
    def cut(ids, length):
        short = ids[:length].copy()
        if end is not None and len(ids) > length and ids[-1] == end:
            short[-1] = end
        return short

    B = len(examples)
    source, source_mask = np.zeros((2, B, source_len), np.int32)
    source += pad
    tokens, targets = np.full((2, B, target_len), pad, np.int32)
    weights = np.zeros((B, target_len), np.float32)
    for row, (ids, target) in enumerate(examples):
        ids = cut(ids, source_len)
        source[row, :len(ids)], source_mask[row, :len(ids)] = ids, 1
        # (Where one id is both start and end, a target of that id alone is an empty text.)
        if len(target) > 1 and target[0] == start:
            target = target[1:]
        target = cut(target, target_len)
        n = len(target)
        tokens[row, :n], targets[row, :n] = [start, *target[:-1]][:n], target
        weights[row, :n] = 1
    return {"source": source, "source_mask": source_mask, "tokens": tokens, "targets": targets,
            "weights": weights}
