"""Generation.

    generate_slowly   the whole text through the network for every new id: the reference
    generate_simply   the same ids with a cache of keys and values: one row, one device, a loop
    generate          the same ids again, compiled: batches of prompts, any mesh

    generate -> stream -> begin -> prefill -> network.extend    prompts, chunk by chunk into a cache
                                -> draw                         the first new id of each
                       -> decode -> network.extend, draw        one compiled loop: an id, and an id

    . . t h e |        prompts are padded on the left. Slots before a row's start are masked, and
    o n c e   |        have no position
              ^ all rows choose their first new id in the same slot

The network is the one that was trained; its pass with a cache is called `extend`. On a mesh each
pass (zigzag/generate/passes.py) is one shard_map, as a training step is. A single token has no time
to split, so its `shard.row` is an all-reduce. The passes hand on a dict of arrays, the state of B
rows. Over data, fsdp and expert each device has its own rows of it; [] is the same on all devices.

    cache      for each layer k, v [B, K, S, N]: tensor splits the heads K, or else the slots S
    start      [B]          the slot where a row begins
    slot       []           the slot of the next token to be read
    ids        [B, tokens]  the new ids so far: `count` [] of them
    logprobs   [B, tokens]  their log-probabilities
    ended      [B]          whether one of the ids `ends` [8], which all rows share, has come
    seeds      [B, 3]       from which, and from `count`, a row's random numbers follow
    seen       [B, V]       the ids in the row, for a repetition_penalty

    python sample.py --run out --prompt "def main("
"""

if __name__ == "__main__":
    from zigzag.core import start

    start.begin()

import functools
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import networks
import shard
from zigzag.core.flags import run_main
from zigzag.core.mesh import mesh_of_flags
from zigzag.disk.checkpoint import tokenizer_of_run
from zigzag.disk.tokenizers import Tokenizer, published_tokenizer, read_record
from zigzag.generate import decoding, passes, scores, search
from zigzag.generate.decoding import Sampling, mesh_of_weights
from zigzag.generate.prompts import Flags, needed_tokenizer, step_of, whole_context
from zigzag.generate.rows import Contexts, check_writes, on_host, padded_length, seeds_of
from zigzag.generate.terminal import collected, ends_quietly, stops_of
from zigzag.generate.writer import Writer, parse


def generate_slowly(params: Any, prompt: Sequence[int], config: Any, tokens: int = 128,
                    temperature: float = 1.0, seed: int = 0) -> list[int]:
    """The ids that `generate` adds to this prompt, found without a cache. (The text must fit into
    the context, config.seq_len.)"""
    forward = jax.jit(functools.partial(networks.network_of(config).forward, config=config))
    sampling = Sampling(temperature)
    seeds = seeds_of({"tokens": np.array([prompt]), "start": np.zeros(1, int)}, seed)
    row = np.zeros((1, len(prompt) + tokens), np.int32)
    row[0, :len(prompt)] = prompt
    for count in range(tokens):     # (what follows a token does not change its logits)
        at = len(prompt) + count
        logits = forward(params, row)[:, at - 1]
        row[:, at] = draw(logits, decoding.keys_of(seeds, count), sampling)
    return row[0, len(prompt):].tolist()


def generate_simply(params: Any, prompt: Sequence[int], config: Any, tokens: int = 128,
                    temperature: float = 1.0, seed: int = 0) -> list[int]:
    """The ids that `generate` adds to this prompt, found by a loop with a cache: the network reads
    the prompt, and then each new id. (For a decoder, on one device.)"""
    network, sampling = networks.network_of(config), Sampling(temperature)
    params, start = for_decoding(params, config), np.zeros(1, int)
    seeds = seeds_of({"tokens": np.array([prompt]), "start": start}, seed)
    cache = decoding.empty_cache(network.cache_layers(config), 1, len(prompt) + tokens,
                                 params["embed"].dtype, None)
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
    """One id for each row of logits [B, V], by each row's own random key:

        logits -> temperature -> top_k -> top_p -> min_p -> one id"""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    # (The largest logit becomes 0, and float32 does not round 1e-30 to 0, so nothing overflows.)
    logits = (logits - logits.max(-1, keepdims=True)) / max(sampling.temperature, 1e-30)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ranked = jnp.sort(logits, descending=True)
        share = jax.nn.softmax(ranked, -1)
        # An id stays if those before it have less than top_p. (A tiny top_p is 0 in float32.)
        stay = (jnp.cumsum(share, -1) - share < sampling.top_p).at[:, 0].set(True)
        least = jnp.min(jnp.where(stay, ranked, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.min_p > 0:
        least = logits.max(-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def engine_of(config: Any, what: str = "sample") -> passes.Engine:
    """What the compiled passes need. Refused if the model, called `what`, writes no text."""
    network = networks.network_of(config)
    check_writes(network, config, what)
    return passes.Engine(network, config, shard.gather, draw)


def generate(params: Any, prompts: Sequence[Sequence[int]], config: Any, tokens: int = 128,
             sampling: Sampling | float = Sampling(), *, stop: Sequence[int | str] = (),
             tokenizer: Any = None, logprobs: bool = False, **options: Any) -> list:
    """The new ids of each prompt: `tokens` of them, or fewer if an id or a text in `stop` comes
    first (texts need the tokenizer). With logprobs, pairs (ids, their log-probabilities). The other
    options are those of `stream`."""
    stop, answers = stops_of(stop, tokenizer, prompts, tokens)
    piece = 16 if answers else tokens       # (a stop text is looked for after each piece)
    results = collected(answers, stream(params, prompts, config, tokens, sampling, stop=stop,
                                        piece=piece, logprobs=True, **options))
    return results if logprobs else [ids for ids, _ in results]


def stream(params: Any, prompts: Sequence[Sequence[int]], config: Any, tokens: int = 128,
           sampling: Sampling | float = Sampling(), *, seed: int | Sequence[int] = 0,
           source: Any = None, stop: Sequence[int] = (), piece: int = 8, logprobs: bool = False,
           stop_at_context: bool = False, say: Callable[[str], Any] = warnings.warn,
           **changes: Any) -> Iterator[list]:
    """What generate returns, in pieces: lists with the next ids of each prompt, which are empty for
    prompts that have ended. The first piece has one id for each prompt, others up to `piece`.

        sampling    how an id is chosen; a number is a temperature. The fields of Sampling may also
                    be given by name: temperature, top_k, top_p, min_p, repetition_penalty
        seed        one number, or one for each prompt
        source      for an encoder-decoder: ids, or what its stem reads, for each prompt; its
                    prompts are [[zigzag.hub.llama.start_id(config)]]

    An answer depends on its prompt and its seed, and not on the rest of the batch. The context is
    config.seq_len tokens. When a row has filled it, the row goes on from its last half, read again
    at positions from 0; with stop_at_context it ends. A prompt that is longer keeps its end. `say`
    is called with a line about either."""
    engine, sampling = engine_of(config), decoding.sampling_of(sampling, changes)
    stop = decoding.end_ids(stop, config.vocab_size)
    text = Contexts(engine.network, prompts, config, tokens, stop_at_context, say)
    sent = full = 0         # new ids yielded so far, and how many of them fit into the context
    state = None
    while state is None or sent < tokens and text.unfinished.any():
        with mesh_of_weights(params):
            if sent == full:            # read the prompts; later, the last half of full rows
                if sent:
                    text.keep_last_half()
                full = sent + text.room()
                room = text.room() if sent else min(tokens, full)
                rows = engine.arrays(text.rows, room, source)
                if not sent:
                    params = engine.for_decoding(params)
                    state = decoding.empty_ids(rows, padded_length(tokens), seeds_of(
                        rows, seed, count=len(prompts)), stop, sampling, config.vocab_size)
                state, length = passes.begin(engine, params, state, rows, room, sampling)
            else:
                limit = np.int32(min(sent + piece, tokens, full))
                state = passes.decode(engine, params, state, limit, length, sampling)
        count = min(int(on_host(state["count"])), tokens)
        ids, logs = (on_host(state[name])[:len(prompts), sent:count].tolist()
                     for name in ("ids", "logprobs"))
        lengths = text.add(ids, stop)
        new = [(i[:n], p[:n]) for i, p, n in zip(ids, logs, lengths)]
        yield new if logprobs else [ids for ids, _ in new]
        sent = count


def generate_ids(params: Any, rows: dict[str, Array], config: Any, tokens: int,
                 sampling: Sampling = Sampling(), seed: int = 0, ends: tuple[int, ...] = (),
                 beams: int = 0) -> Array:
    """New ids [B, tokens], for use inside a compiled function; with beams, the best beam's. rows
    are arrays: `tokens` [B, P], `start` [B] if rows are padded, and the inputs of an encoder. Ids
    after the first one in `ends` mean nothing."""
    engine = engine_of(config)
    if beams:
        return search.best_ids(engine, params, rows, tokens, ends, beams)
    return passes.generate_ids(engine, params, rows, tokens, sampling, seed, ends)


def for_decoding(params: Any, config: Any) -> Any:
    """The weights as decoding uses them. (Call it yourself once if you generate often.)"""
    with mesh_of_weights(params):
        return engine_of(config).for_decoding(params)


def beam_search(params: Any, prompts: Sequence[Sequence[int]], config: Any, beams: int = 4,
                tokens: int = 128, eos: int | Sequence[int] | None = None, source: Any = None,
                length_penalty: float = 1.0, early_stop: bool | str = False
                ) -> list[list[tuple[list[int], float]]]:
    """The best continuations of each prompt, as pairs (ids, score): zigzag/generate/search.py."""
    return search.beam_search(engine_of(config), params, prompts, beams, tokens, eos, source,
                              length_penalty, early_stop)


def score(params: Any, rows: Sequence[Sequence[int]], config: Any, sources: Any = None,
          batch: int = 8, given: Sequence[int] | None = None, likeliest: bool = False) -> list:
    """(log-probability, number of ids[, likeliest]) of each row: zigzag/generate/scores.py."""
    found = scores.score(engine_of(config), params, rows, sources, batch, given)
    return [one[:3 if likeliest else 2] for one in found]


# -------------------------------------------------------------------------------------------
# Models on disk, and the command line

def load(folder: str | Path, mesh: Any = None, checkpoint: int | None = None,
         edited: bool = False) -> tuple[Any, Any, Tokenizer | None]:
    """(weights, the network's configuration, tokenizer or None) of a run, at this checkpoint or the
    newest, or of a published model (`edited`: also if the network's code computes something else).
    The weights are float32, split over the mesh if one is given."""
    if "model_type" in read_record(Path(folder) / "config.json"):
        params, config = networks.load_hf(folder, mesh, edited)
        return params, config, published_tokenizer(folder, config.vocab_size, needed=False)
    params, config = networks.load_run(folder, mesh, checkpoint)
    return params, whole_context(config), tokenizer_of_run(folder)


def load_model(flags: Flags) -> tuple[Any, Any, Tokenizer]:
    """As load, of what the flags name: the weights are as decoding uses them."""
    mesh = mesh_of_flags(flags.mesh, flags.shards)
    if flags.model:
        engine = engine_of(networks.hf_config(flags.model), f"--model {flags.model}")
        tokenizer = published_tokenizer(flags.model, engine.config.vocab_size)
        params, c = networks.load_for_decoding(flags.model, mesh, flags.edited)
        return params, c, tokenizer
    engine_of(networks.config_of_run(flags.run), f"--run {flags.run}")
    tokenizer = needed_tokenizer(flags.run)
    params, c, _ = load(flags.run, mesh, step_of(flags.run, flags.checkpoint))
    return for_decoding(params, c), c, tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    with ends_quietly():
        asked = parse(argv)
        params, c, tokenizer = load_model(asked.flags)
        Writer(generate, stream, engine_of(c), params, tokenizer, asked).run()


if __name__ == "__main__":
    run_main(main, "fewer --tokens, a smaller --batch or a larger --mesh need less")
