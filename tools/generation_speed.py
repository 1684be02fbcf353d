"""python sample.py --bench: how fast a model generates here, compared with a lower bound on time.

To decode a token of a single row, a device must read all its weights once. So the lower bound is
the time that this read takes, measured on an array of the same size. `run` alternates the two
measurements and prints medians.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import sample
from zigzag.commands.sampling import Model
from zigzag.core.errors import human_bytes

PROMPT, TOKENS, TURNS = 128, 128, 3


def run(model: Model, file: None = None) -> None:
    """Print how many tokens per second sample.stream generates greedily with these weights, at
    batch sizes 1 and 8."""
    params, c = model.params, model.c
    weight_bytes = sum(w.addressable_shards[0].data.nbytes for w in jax.tree.leaves(params))
    array, total = jnp.ones(weight_bytes // 4, jnp.float32), jax.jit(jnp.sum)
    rng = np.random.default_rng(0)
    print(f"{human_bytes(weight_bytes)} of weights on a device; prompts of {PROMPT} tokens, "
          f"{TOKENS} new ones, greedy; medians of {TURNS}")
    for rows in (1, 8):
        prompts = rng.integers(0, c.vocab_size, (rows, PROMPT)).tolist()
        found = []
        for _ in range(1 + TURNS):      # the first turn compiles and doesn't count
            begin = time.perf_counter()
            pieces = sample.stream(params, prompts, c, TOKENS, temperature=0, piece=TOKENS // 2)
            next(pieces)
            middle = time.perf_counter()
            list(pieces)
            end = time.perf_counter()
            total(array).block_until_ready()
            found.append((end - begin, (end - middle) / (TOKENS // 2),
                          time.perf_counter() - end))
        whole, each, read = (statistics.median(times) for times in zip(*found[1:]))
        print(f"batch {rows}   {rows * TOKENS / whole:7.1f} tokens/s; a token in the second half "
              f"takes {each * 1e3:.1f} ms, {each / read:.2f} times as long as\n          reading "
              f"the weights ({read * 1e3:.1f} ms, {human_bytes(weight_bytes / read)}/s)")
