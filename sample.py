"""Generating text from a trained model.

    generate_slowly   the reference: run the whole text through the network for every new id
    generate_simply   the same ids with a KV cache: a single row, a single device, a loop
    generate          the same ids again, compiled: batches of prompts, any mesh

    generate -> stream -> prefill -> network.extend             reads prompts into a cache
                       -> decode -> network.extend, draw        loops over new ids, compiled

The network is the same as in training; its pass with a cache is called `extend`. On a mesh, each
pass (zigzag/generate/passes.py) is a single shard_map. One token can't be split along the sequence,
so for it `shard.row` is an all-reduce. The caches are [B, K, S, N]: tensor splits the heads K or,
if it doesn't split their weights, the slots S; data, fsdp and expert split the B rows, which are
padded on the left. Waiting prompts take the rows of finished answers (zigzag/generate/batching.py).

    python sample.py --run out --prompt "def main("
"""

if __name__ == "__main__":
    from zigzag.core.start import begin

    begin()

import functools
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import model as model  # registers its network
from zigzag.core.errors import ConfigError
from zigzag.core.flags import run_main
from zigzag.core.parts import has_part, part
from zigzag.disk.checkpoint import is_published, tokenizer_of_run
from zigzag.disk.tokenizers import Tokenizer, published_tokenizer
from zigzag.generate import batching, decoding, passes
from zigzag.generate.answers import Answer
from zigzag.generate.decoding import Sampling
from zigzag.generate.engine import Engine, mesh_of_weights
from zigzag.generate.rows import seeds_of
from zigzag.parallel.network import network_of
from zigzag.parallel.saved import load_run


def generate_slowly(params: Any, prompt: Sequence[int], config: Any, tokens: int = 128,
                    temperature: float = 1.0, seed: int = 0) -> list[int]:
    """Return the ids that `generate` adds, computed without a cache; they must fit the context."""
    forward = jax.jit(functools.partial(network_of(config).forward, config=config))
    sampling = Sampling(temperature)
    seeds = seeds_of({"tokens": np.array([prompt]), "start": np.zeros(1, int)}, seed)
    row = np.zeros((1, len(prompt) + tokens), np.int32)
    row[0, :len(prompt)] = prompt
    for count, at in enumerate(range(len(prompt), row.size)):
        logits = forward(params, row)[:, at - 1]    # later tokens don't affect these
        row[:, at] = draw(logits, decoding.keys_of(seeds, count), sampling)
    return row[0, len(prompt):].tolist()


def generate_simply(params: Any, prompt: Sequence[int], config: Any, tokens: int = 128,
                    temperature: float = 1.0, seed: int = 0) -> list[int]:
    """Return the ids that `generate` adds to this prompt, computed in a loop with a cache: the
    network reads the prompt, then each new id. This is for a decoder on a single device."""
    network, sampling = network_of(config), Sampling(temperature)
    params, start = for_decoding(params, config), np.zeros(1, int)
    seeds = seeds_of({"tokens": np.array([prompt]), "start": start}, seed)
    cache = engine_of(config).empty_cache(1, len(prompt) + tokens, params["embed"].dtype)
    extend = jax.jit(functools.partial(network.extend, config=config))
    x, cache = extend(params, cache, np.array([prompt]), 0, start)
    ids = []
    for count in range(tokens):
        logits = network.head_logits(params, x[:, -1:], config)[:, 0]
        new = draw(logits, decoding.keys_of(seeds, count), sampling)
        ids.append(int(new[0]))
        x, cache = extend(params, cache, new[:, None], len(prompt) + count, start)
    return ids


def draw(logits: Array, keys: Array, sampling: Sampling) -> Array:
    """Draw an id for each row of logits [B, V] (after any repetition_penalty), with a random key
    per row: temperature -> top_k -> top_p -> min_p -> an id."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    # The largest logit becomes 0, so even a temperature of 1e-30 gives no inf and no 0 / 0.
    logits = (logits - logits.max(-1, keepdims=True)) / max(sampling.temperature, 1e-30)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ranked = jnp.sort(logits, descending=True)
        share = jax.nn.softmax(ranked, -1)
        # Keep an id if the probabilities before it sum to less than top_p. Always keep the first.
        stay = (jnp.cumsum(share, -1) - share < sampling.top_p).at[:, 0].set(True)
        least = jnp.min(jnp.where(stay, ranked, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.min_p > 0:
        least = logits.max(-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def engine_of(config: Any) -> Engine:
    """Return the model in the form that the passes take."""
    return Engine(network_of(config), config)


def generate(params: Any, prompts: Sequence[Sequence[int]], config: Any, tokens: int = 128,
             sampling: Sampling | float = Sampling(), *, stop: Sequence[int | str] = (),
             tokenizer: Any = None, logprobs: bool = False, exact: bool = False, **options: Any
             ) -> list:
    """Return the new ids for each prompt: `tokens` of them, or fewer if an id or a text in `stop`
    comes first (texts need the tokenizer). With logprobs, return pairs (ids, their
    log-probabilities); with exact, the training pass computes these. The other options
    are the same as `stream`'s, except piece and ended."""
    if exact:
        return part("accounts.exact", "exact=True").generate(
            params, prompts, config, tokens, sampling, stop=stop, tokenizer=tokenizer, **options)
    stop = [stop] if np.ndim(stop) == 0 else stop
    texts = [one for one in stop if isinstance(one, str)]
    if texts and tokenizer is None:
        raise ConfigError(f"stop {texts[0]!r}: generate needs the tokenizer to find text")
    answers = [Answer(tokenizer.decode if texts else None, prompt, texts) for prompt in prompts]
    for new in stream(params, prompts, config, tokens, sampling, logprobs=True,
                      stop=[one for one in stop if one not in texts],
                      piece=16 if texts else tokens, ended=lambda n: answers[n].reason, **options):
        for answer, pair in zip(answers, new):
            answer.add(pair)
    return [(answer.ids, answer.logprobs) if logprobs else answer.ids for answer in answers]


def stream(params: Any, prompts: Sequence[Sequence[int]], config: Any, tokens: int = 128,
           sampling: Sampling | float = Sampling(), *, seed: int | Sequence[int] = 0,
           source: Any = None, stop: Sequence[int] = (), piece: int = 8, logprobs: bool = False,
           stop_at_context: bool = False, say: Callable[[str], Any] = warnings.warn,
           batch: int = 64, ended: Callable = lambda n: False, **changes: Any) -> Iterator[list]:
    """Yield generate's output in pieces: lists of the next ids for each prompt, empty for prompts
    that have ended. Each piece has up to `piece` ids per prompt.

        sampling    a Sampling or a temperature (0: greedy). You can also pass its fields by name:
                    temperature, top_k, top_p, min_p, repetition_penalty
        seed        a single number, or one per prompt
        source      ids, an image or a sound per prompt, if the model reads them; prompts for an
                    encoder-decoder are [[published.start_id(config)]]
        ended       called with a prompt's index after each piece; True ends that prompt's answer
        batch       the maximum number of prompts at once; others wait, and get None in each piece

    An answer depends only on its prompt and its seed. The context is config.seq_len tokens. When a
    row fills it, the row continues from its second half (or ends, with stop_at_context). If a
    prompt is longer, the model reads only its last tokens. `say` reports both."""
    engine, sampling = engine_of(config), decoding.sampling_of(sampling, changes)
    ends = decoding.end_ids(stop, config.vocab_size)
    rows = batching.Rows(engine, params, prompts, tokens, sampling, ends, source, seed, batch,
                         piece, stop_at_context, say)
    for new in rows.written(draw, ended):
        yield new if logprobs else [pair and pair[0] for pair in new]


def generate_ids(params: Any, rows: dict[str, Array], config: Any, tokens: int,
                 sampling: Sampling | float = Sampling(), seed: int = 0,
                 ends: tuple[int, ...] = (), beams: int = 0) -> Array:
    """Return new ids [B, tokens]; with beams, the best beam's ids. A compiled function can call
    this. rows holds arrays: `tokens` [B, P], `start` [B] if rows are padded, and an encoder's
    inputs. Ignore ids after the first one in `ends`."""
    engine, sampling = engine_of(config), decoding.sampling_of(sampling, {})
    if beams:
        return part("tools.beams", "beams").ids_of_rows(engine, params, rows, tokens, ends, beams)
    return passes.ids_of_rows(engine, params, rows, tokens, sampling, seed, ends, draw)


def for_decoding(params: Any, config: Any) -> Any:
    """Prepare the weights for decoding. If you generate often, call this once yourself."""
    with mesh_of_weights(params):
        return engine_of(config).for_decoding(params)


def beam_search(params: Any, prompts: Sequence[Sequence[int]], config: Any, beams: int = 4,
                tokens: int = 128, eos: int | Sequence[int] | None = None, source: Any = None,
                length_penalty: float = 1.0, early_stop: bool | str = False
                ) -> list[list[tuple[list[int], float]]]:
    """Return each prompt's best continuations, best first, as pairs (ids, score). The score is the
    sum of log-probabilities / length ** length_penalty. tools/beams.py says when a search ends."""
    return part("tools.beams", "sample.beam_search").best_beams(
        engine_of(config), params, prompts, beams, tokens, eos, source, length_penalty, early_stop)


def score(params: Any, rows: Sequence[Sequence[int]], config: Any, sources: Any = None,
          batch: int = 8, given: Sequence[int] | None = None, likeliest: bool = False) -> list:
    """For each row, return the sum of its ids' log-probabilities and the number of ids in the sum.
    Skip the first id, or the first given[row] ids. With likeliest, also count the argmax ids."""
    found = part("tools.scores", "sample.score").logprobs_of(
        engine_of(config), params, rows, sources, batch, given)
    return [one[:3 if likeliest else 2] for one in found]


# -------------------------------------------------------------------------------------------
# Models on disk, and the command line

def load(folder: str | Path, mesh: Any = None, checkpoint: int | None = None,
         edited: bool = False, dtype: str = "float32") -> tuple[Any, Any, Tokenizer | None]:
    """Load (weights, network config, tokenizer or None) from a run (this checkpoint or the newest)
    or from a published model (with `edited`, even if its edited network may compute a different
    function). The weights have this dtype, and are split over the mesh if you pass one."""
    if is_published(folder):
        params, config = part("published", f"{folder}").load_hf(folder, mesh, edited, stored=dtype)
        return params, config, published_tokenizer(folder, config.vocab_size, needed=False)
    params, config = load_run(folder, mesh, checkpoint, dtype)
    if config.published and has_part("published"):      # use the model's context, not its rows'
        config = part("published.llama", "").whole_context(config)
    return params, config, tokenizer_of_run(folder)


def main(argv: Sequence[str] | None = None) -> None:
    from zigzag.commands import sampling
    sampling.main(argv)


if __name__ == "__main__":
    run_main(main, "try fewer --tokens, a smaller --batch or a larger --mesh")
