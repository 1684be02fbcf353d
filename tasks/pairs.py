"""Pairs of texts, from which an encoder-decoder learns the target, given the source.
zigzag/disk/examples.py reads them."""

import contextlib
import functools
from pathlib import Path
from typing import Any, Iterator, Sequence

import jax.numpy as jnp

import data
import networks
import sample
from zigzag.disk import examples
from zigzag.disk.corpus import kept_tokenizer
from zigzag.generate.decoding import GREEDY
from zigzag.generate.rows import cut_at_end
from zigzag.hub.llama import special_ids
from zigzag.run import checks, metrics, schedules
from zigzag.run.evaluation import answers
from zigzag.run.loop import Learned, Task


@contextlib.contextmanager
def opened(config: Any, tokenizer: data.Tokenizer | None, run: Path, ready: float = 0,
           fingerprint: str = "") -> Iterator[Learned]:
    """The lines of JSON of --data, and of --held_out."""
    tokenizer = tokenizer or data.Bytes()
    read = functools.partial(examples.Pairs, tokenizer=tokenizer, fields=config.fields)
    own = read(config.data, whole=bool(config.held_out))
    other = read(config.held_out, whole=True) if config.held_out else None
    held_out, description, digest = examples.beside(own, other)
    config = checks.check_vocabulary(config, tokenizer.vocab_size)
    config = schedules.with_steps(config, len(own.train))
    record = {"fingerprint": digest, "tokenizer_sha256": "", **data.tokenizer_record(tokenizer)}
    with kept_tokenizer(tokenizer, run, ready):
        yield Learned(config, lambda: task_of(config, tokenizer, own.train, held_out), record,
                      description, '--prompt "..."')


def task_of(config: Any, tokenizer: data.Tokenizer, pairs: Sequence, held_out: Sequence) -> Task:
    """Learning the targets; at each evaluation, answers to held-out sources."""
    width, = networks.network_of(config).source_shape(config.network)
    start, end, pad = special_ids(config, tokenizer)
    collate = functools.partial(data.collate_pairs, source_len=width, target_len=config.seq_len,
                                start=start, end=end, pad=pad)

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

    samples = answers(config.sample_prompts, lambda sources: collate(
        [(tokenizer.with_ends(s), [end]) for s in sources]), predict, lambda out: text(out[2]))
    return Task(collate=collate, predict=predict, examples=pairs, held_out=held_out, show=show,
                metric=metric if config.metric else None, predicted=None if config.metric else 1,
                samples=samples, flops=networks.flops_of_update(config))
