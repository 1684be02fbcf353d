"""generate(exact=True): the log-probabilities of generated ids, computed by the training pass.

Generation adds numbers in another order than training does, which shows in 16 bits. So we run the
finished rows through the pass that evaluates the training loss (train.make_evaluate). That loss is
a sum over tokens of weight * -log-probability. Its derivative with respect to a token's weight is
that token's -log-probability, and needs no backward pass through the layers: none of them depends
on the tokens' weights. In 16 bits, a run with --collectives compiler may round differently.
"""

import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import numpy as np

import sample
import train
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import make_mesh, mesh_of, row_groups
from zigzag.disk.batches import place_batch
from zigzag.generate.rows import on_host
from zigzag.parallel.network import network_of
from zigzag.run.task import without_data

# Rows are padded to a multiple of this, so that few lengths have to compile.
LENGTH = 128


def generate(params: Any, prompts: Sequence[Sequence[int]], config: Any, *given: Any,
             **options: Any) -> list[tuple[list[int], list[float]]]:
    """Do the same as sample.generate, and return pairs (ids, their log-probabilities)."""
    if isinstance(params.get("layers"), list) or network_of(config).source_shape(config):
        raise ConfigError("exact=True: needs a decoder's weights as sample.load returns them, "
                          "not those of sample.for_decoding, and no source")
    answers = sample.generate(params, prompts, config, *given, **options)
    mesh = mesh_of(params) or make_mesh(jax.devices()[:1])
    rows = [[*prompt, *ids] for prompt, ids in zip(prompts, answers)]
    longest = max(map(len, rows), default=0) - 1
    if longest > config.seq_len:
        raise ConfigError(f"exact=True: a prompt and its answer have {longest + 1:,} tokens, more "
                          f"than training sees at once (seq_len {config.seq_len:,} and one more)")
    count = row_groups(mesh) * config.microbatches
    size = min(config.seq_len, -(-longest // LENGTH) * LENGTH)
    ids = np.zeros((-(-len(rows) // count) * count, size + 1), np.int32)
    for row, own in zip(ids, rows):
        row[:len(own)] = own
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:],
             "weights": np.ones((len(ids), size), np.float32)}
    with jax.set_mesh(mesh):
        placed = place_batch(mesh, lambda a, b: {k: v[a:b] for k, v in batch.items()}, len(ids))
        found = on_host(_training_pass(config, mesh)(params, placed))
    return [(new, of_row[len(prompt) - 1:len(prompt) - 1 + len(new)].tolist())
            for prompt, new, of_row in zip(prompts, answers, found)]


@functools.lru_cache(maxsize=8)
def _training_pass(config: Any, mesh: Any) -> Callable:
    """Return the compiled function (weights, batch) -> each target's log-probability [B, T]."""
    if config.schedule == "1f1b":       # its backward pass differentiates only the model's weights
        schedule = "interleaved" if config.chunks > 1 else "gpipe"
        config = dataclasses.replace(config, schedule=schedule)
    of_run = train.Config(network=config, batch=row_groups(mesh) * config.microbatches)
    program = train.build(of_run, mesh, *without_data(of_run))
    evaluate = train.make_evaluate(program.plan)

    def logprobs(params, batch):
        return jax.grad(lambda weights: -evaluate(params, {**batch, "weights": weights})[0])(
            batch["weights"])

    compiled = jax.jit(logprobs, compiler_options=program.plan.compiler_options)
    return lambda params, batch: compiled(program.permute(params), batch)
