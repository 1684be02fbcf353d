"""generate(exact=True): the log-probabilities of generated ids, computed by the training pass.

Generation adds the same numbers in another order than training does, which shows in 16 bits. So we
run the finished rows once through the pass that evaluates the training loss (train.make_evaluate).
That loss is a sum over tokens of weight * -log-probability. Its derivative by the weights is each
token's -log-probability, and contains no backward pass: no layer depends on these weights. A run
with --collectives compiler may round otherwise in 16 bits.
"""

import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import numpy as np

import train
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import make_mesh, mesh_of, row_groups
from zigzag.disk.batches import place_batch
from zigzag.generate.rows import on_host
from zigzag.parallel.network import network_of
from zigzag.run.task import without_data

# Rows are padded to a multiple of this, or to the context, so that few lengths have to compile.
LENGTH = 128


def logprobs_of(params: Any, config: Any, prompts: Sequence[Sequence[int]],
                answers: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the log-probabilities of each answer's ids, as the training pass computes them."""
    mesh = mesh_of(params) or make_mesh(jax.devices()[:1])
    rows = [[*prompt, *ids] for prompt, ids in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows), default=0) - 1
    if longest > config.seq_len:
        raise ConfigError(f"exact=True: a prompt and its answer have {longest + 1:,} tokens, more "
                          f"than training sees at once (seq_len {config.seq_len:,} and one more)")
    if isinstance(params.get("layers"), list) or network_of(config).source_shape(config):
        raise ConfigError("exact=True: needs a decoder's weights as sample.load returns them, "
                          "not those of sample.for_decoding, and no source")
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
    return [found[i, len(prompt) - 1:len(own) - 1].tolist()
            for i, (prompt, own) in enumerate(zip(prompts, rows))]


@functools.lru_cache(maxsize=8)
def _training_pass(config: Any, mesh: Any) -> Callable:
    """Return the compiled function (weights, batch) -> each target's log-probability [B, T]."""
    if config.schedule == "1f1b":       # its backward pass knows derivatives by parameters only
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
