"""python sample.py --bench: how fast a model generates here, compared with a lower bound.

To decode one token of one row, a device must read all its weights once. So the time of that read,
measured on an array of the same size, is the lower bound. If transformers and torch are installed,
a published model is also run by them. The measurements alternate, and medians are printed.
"""

import importlib.util
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import networks
import sample
from zigzag.core.errors import ConfigError, human_bytes

PROMPT, TOKENS, TURNS = 128, 128, 3


def bench(params: Any, c: Any, folder: str = "") -> None:
    """Print how many tokens per second sample.stream generates with these weights, greedily, in
    batches of 1 and 8."""
    if networks.network_of(c).source_ids(c):
        raise ConfigError("--bench: is for models that read text")
    weight_bytes = sum(w.addressable_shards[0].data.nbytes for w in jax.tree.leaves(params))
    dtype = jax.tree.leaves(params)[0].dtype.name
    transformers_speed, rng = _transformers(folder, dtype), np.random.default_rng(0)
    print(f"{human_bytes(weight_bytes)} of weights on a device; prompts of {PROMPT} tokens, "
          f"{TOKENS} new ones, greedy; medians of {TURNS}")
    for rows in (1, 8):
        prompts = rng.integers(0, c.vocab_size, (rows, PROMPT)).tolist()
        ours, theirs, read = [], [], []
        _tokens_per_second(params, c, prompts)      # compiles
        for _ in range(TURNS):
            ours.append(_tokens_per_second(params, c, prompts))
            read.append(_read_seconds(weight_bytes))
            if transformers_speed:
                theirs.append(transformers_speed(prompts))
        whole, each = (statistics.median(x) for x in zip(*ours))
        least = statistics.median(read)
        print(f"batch {rows}   {whole:7.1f} tokens/s; a token after the first takes "
              f"{each * 1e3:.1f} ms, {each / least:.2f} times as long as\n          reading the "
              f"weights ({least * 1e3:.1f} ms, {human_bytes(weight_bytes / least)}/s)")
        if theirs:
            ratio = statistics.median(a / b for (a, _), b in zip(ours, theirs))
            print(f"          {statistics.median(theirs):7.1f} tokens/s by transformers; ours are "
                  f"{ratio:.2f} times as many")


def _tokens_per_second(params, c, prompts):
    """New tokens per second (prefill included), and the seconds of each token after the first."""
    begin = time.perf_counter()
    parts = sample.stream(params, prompts, c, TOKENS, temperature=0, piece=TOKENS)
    next(parts)
    first = time.perf_counter()
    for _ in parts:
        pass
    end = time.perf_counter()
    return len(prompts) * TOKENS / (end - begin), (end - first) / (TOKENS - 1)


def _read_seconds(size):
    """The seconds that a device takes to read `size` bytes of its memory."""
    array, total = jnp.ones(size // 4, jnp.float32), jax.jit(jnp.sum)
    total(array).block_until_ready()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times)


def _transformers(folder, dtype):
    """A function from prompts to transformers' tokens per second, on the same kind of device; None
    if it is not installed."""
    if not folder or not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return None
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    transformers.logging.set_verbosity_error()
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype)).eval().to(device)

    def run(prompts):
        ids, begin = torch.tensor(prompts, device=device), time.perf_counter()
        with torch.no_grad():
            theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS,
                            min_new_tokens=TOKENS, do_sample=False, pad_token_id=0).cpu()
        return len(prompts) * TOKENS / (time.perf_counter() - begin)

    run([[1] * PROMPT])
    return run
