"""Generation.

    generate_slowly   the whole text through the network for every new id: the reference
    generate_simply   the same ids with a cache of keys and values: one row, one device, a loop
    generate          the same ids again, compiled: batches of prompts, any mesh

    prompts of any lengths -> padded on the left -> prefill: chunk by chunk into a cache
                           -> decode: one compiled loop that appends an id to each row

    . . t h e |        slots before a row's start are padding: masked, and without a position
    o n c e   |
              ^ all rows choose their first new id in the same slot

    generate -> stream -> _prefill -> _forward_chunk -> network.extend      for each chunk
                       -> _decode -> network.extend                         for each new id

The network is the one that was trained; its pass with a cache is called `extend`. On a mesh each
pass is one shard_map, as a training step is. A single token has no time to split, so its
`shard.row` is an all-reduce.

In zigzag/generate/, rows.py pads prompts and says what fits into the context, cache.py keeps keys
and values, decoding.py has the loops and splits weights, rows and cache over a mesh, and reading.py
keeps the cache of a conversation.

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

import data
import networks
import shard
from zigzag.core.errors import ConfigError
from zigzag.core.flags import check_shards, parse_flags, run_main
from zigzag.core.mesh import keep_compiled, mesh_of_flags
from zigzag.disk.checkpoint import run_record
from zigzag.disk.tokenizers import KINDS, published_tokenizer, read_record
from zigzag.generate import decoding, terminal
from zigzag.generate.bench import bench
from zigzag.generate.cache import CHUNK
from zigzag.generate.prompts import (
    GROUPS,
    Config,
    Prompt,
    check_used,
    given_text,
    prompt_texts,
    step_of,
    whole_context,
)
from zigzag.generate.reading import Passes
from zigzag.generate.rows import (
    Windows,
    on_host,
    overlapping_windows,
    pad_rows,
    padded_length,
    prompt_arrays,
    scored_arrays,
    seeds_of,
)
from zigzag.generate.terminal import Answer
from zigzag.generate.writer import Writer
from zigzag.hub import folders
from zigzag.parallel.products import LOGITS
from zigzag.run.plan import resolve_dtype


def generate_slowly(params: Any, prompt: Sequence[int], config: Any, tokens: int = 128,
                    temperature: float = 1.0, seed: int = 0) -> list[int]:
    """The ids that `generate` adds to this prompt, found without a cache. (The text must fit into
    the context, config.seq_len.)"""
    forward = jax.jit(functools.partial(networks.network_of(config).forward, config=config))
    sampling = decoding.Sampling(temperature)
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
    network, sampling = networks.network_of(config), decoding.Sampling(temperature)
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


def draw(logits: Array, keys: Array, sampling: decoding.Sampling) -> Array:
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


def generate(params: Any, prompts: Sequence[Sequence[int]], config: Any,
             tokens: int = 128, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
             seed: int | Sequence[int] = 0, source: Any = None, min_p: float = 0.0,
             repetition_penalty: float = 1.0, stop: Sequence[int | str] = (),
             logprobs: bool = False, tokenizer: Any = None, stop_at_context: bool = False,
             say: Callable[[str], Any] = warnings.warn) -> list:
    """The new ids of each prompt: `tokens` of them, or fewer if an id or a text in `stop` comes
    first (texts need the tokenizer). With logprobs, pairs (ids, their log-probabilities).

        temperature                 0: greedy
        top_k                       keep the k likeliest ids; 0: all
        top_p                       keep the likeliest ids whose probabilities add up to top_p
        min_p                       keep ids with at least min_p times the largest probability
        repetition_penalty          above 1: ids that the row has already become less likely
        seed                        one number, or one for each prompt
        source                      for an encoder-decoder: ids, or what its stem reads, for each
                                    prompt; its prompts are [[zigzag.hub.llama.start_id(config)]]

    An answer depends on its prompt and its seed, and not on the rest of the batch. The context is
    config.seq_len tokens. When a row has filled it, the row goes on from its last half, read again
    at positions from 0; with stop_at_context it ends. A prompt that is longer keeps its end. `say`
    is called with a line about either."""
    stop = [stop] if np.ndim(stop) == 0 else stop
    texts = [text for text in stop if isinstance(text, str)]
    if texts and tokenizer is None:
        raise ConfigError(f"stop {texts[0]!r}: to find a text, generate needs the tokenizer")
    answers = [Answer(tokenizer.decode, Prompt("", p), tokens, texts) for p in prompts if texts]
    results = [([], []) for _ in prompts]
    piece = 16 if texts else tokens         # (a stop text is looked for after each piece)
    for new in stream(params, prompts, config, tokens, temperature, top_k, top_p, seed, source,
                      min_p, repetition_penalty, [i for i in stop if i not in texts], piece,
                      True, stop_at_context, say):
        for (ids, logs), (new_ids, new_logs) in zip(results, new):
            ids.extend(new_ids)
            logs.extend(new_logs)
        for answer, (new_ids, _) in zip(answers, new):
            answer.add(new_ids)
        if answers and all(answer.reason for answer in answers):
            break
    if texts:       # an answer has the ids up to its stop text
        results = [(i[:len(a.ids)], p[:len(a.ids)]) for a, (i, p) in zip(answers, results)]
    return results if logprobs else [ids for ids, _ in results]


def stream(params: Any, prompts: Sequence[Sequence[int]], config: Any, tokens: int = 128,
           temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
           seed: int | Sequence[int] = 0, source: Any = None, min_p: float = 0.0,
           repetition_penalty: float = 1.0, stop: Sequence[int] = (), piece: int = 8,
           logprobs: bool = False, stop_at_context: bool = False,
           say: Callable[[str], Any] = warnings.warn) -> Iterator[list]:
    """What generate returns, in pieces: lists with the next ids of each prompt, which are empty for
    prompts that have ended. The first piece has one id for each prompt, others up to `piece`."""
    sampling = decoding.Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    stop = decoding.end_ids(stop, config.vocab_size)
    text = Windows(_check_writes(config, "sample"), prompts, config, tokens, stop_at_context, say)
    sent = full = 0         # new ids yielded so far, and how many of them fit into the context
    state = None
    while state is None or sent < tokens and text.unfinished.any():
        with decoding.mesh_of_weights(params):
            if sent == full:            # read the prompts; later, the last half of full rows
                if sent:
                    text.keep_last_half()
                full = sent + text.room()
                room = text.room() if sent else min(tokens, full)
                rows = _prompt_arrays(text.rows, config, room, source)
                if not sent:
                    params = for_decoding(params, config)
                    state = decoding.empty_ids(rows, padded_length(tokens), seeds_of(
                        rows, seed, count=len(prompts)), stop, sampling, config.vocab_size)
                read, length = _prefill(params, rows, config, room)
                logits = read.pop("logits")
                state = _choose_ids(state | read, logits, config, sampling)
            else:
                limit = np.int32(min(sent + piece, tokens, full))
                state = _decode(params, state, limit, config, length, sampling)
        count = min(int(on_host(state["count"])), tokens)
        ids, logs = (on_host(state[name])[:len(prompts), sent:count].tolist()
                     for name in ("ids", "logprobs"))
        lengths = text.add(ids, stop)
        new = [(i[:n], p[:n]) for i, p, n in zip(ids, logs, lengths)]
        yield new if logprobs else [ids for ids, _ in new]
        sent = count


def beam_search(params: Any, prompts: Sequence[Sequence[int]], config: Any,
                beams: int = 4, tokens: int = 128, eos: int | Sequence[int] | None = None,
                source: Any = None, length_penalty: float = 1.0, early_stop: bool | str = False
                ) -> list[list[tuple[list[int], float]]]:
    """For each prompt, the `beams` best continuations that the search finds: pairs (ids, score),
    best first. The score is the sum of log-probabilities, divided by length ** length_penalty. An
    id in `eos` ends a continuation; it counts in the score and is not returned. early_stop says
    when the search ends. False: when no running beam, at its present length, can beat a finished
    one. "never": when none can at any length. True: as soon as `beams` beams have finished."""
    decoding.check_beams(beams, tokens, length_penalty, early_stop, config.vocab_size)
    ends = np.array(decoding.end_ids(eos, config.vocab_size) or [-1], np.int32)
    with decoding.mesh_of_weights(params):
        rows, params = _prompt_arrays(prompts, config, tokens, source), for_decoding(params, config)
        state, length = _prefill(params, rows, config, tokens)
        state |= {"ends": ends, "limit": np.int32(tokens)}
        best = _beam_search(params, state, config, length, beams, padded_length(tokens),
                            float(length_penalty), early_stop)
        ids, scores, lengths = (on_host(best[name]) for name in decoding.FINISHED)
    return [[(ids[row, k, :lengths[row, k]].tolist(), float(scores[row, k])) for k in range(beams)
             if scores[row, k] > decoding.LOWEST] for row in range(len(prompts))]


def score(params: Any, rows: Sequence[Sequence[int]], config: Any, sources: Any = None,
          batch: int = 8, given: Sequence[int] | None = None, likeliest: bool = False) -> list:
    """For each row of ids, the sum of their log-probabilities and how many there are: every id has
    one except the first, or the first given[row] ids. With likeliest, also how many of these ids
    are the likeliest in their place. A row longer than the context is read in windows that overlap
    by half; given ids that do not fit into one window with the others are left out."""
    windows = list(overlapping_windows(rows, config.seq_len, given))
    totals = np.zeros((len(rows), 3))
    with decoding.mesh_of_weights(params):
        params = for_decoding(params, config)
        for first in range(0, len(windows), batch):
            numbers, arrays, weights = scored_arrays(
                networks.network_of(config), windows[first:first + batch], sources, config)
            sums = _sum_logprobs(params, arrays, pad_rows(weights), config)[:len(weights)]
            np.add.at(totals, numbers, np.insert(sums, 1, weights.sum(1), 1))
    return [(float(total), int(count), int(best))[:3 if likeliest else 2]
            for total, count, best in totals]


# -------------------------------------------------------------------------------------------
# Passes over the network

def _prompt_arrays(prompts, config, tokens, source):
    return prompt_arrays(_check_writes(config, "sample"), prompts, config, tokens, source)


@functools.cache
def _specs_on(mesh, config):
    network = networks.network_of(config)
    specs = network.weight_specs(config, mesh) if mesh.size > 1 else None
    return specs and decoding.decoding_specs(specs, network.table(config))


def _specs(config):
    """The specs of the weights for decoding on the ambient mesh; None if there is no mesh."""
    return _specs_on(jax.sharding.get_abstract_mesh(), config)


def for_decoding(params: Any, config: Any) -> Any:
    """The weights as decoding uses them: cast, split, and with a list of layers. `generate` calls
    it; call it yourself once if you generate often."""
    with decoding.mesh_of_weights(params):
        return decoding.for_decoding(params, config.dtype, _specs(config))


def _on_mesh(fn, params, state, config, outputs):
    """fn(params, specs, state) in one shard_map over the ambient mesh, or plainly without a mesh.
    fn returns a dict with the names `outputs`."""
    specs = _specs(config)

    def run(params, state):
        return fn(decoding.gather_all_but_layers(params, specs, shard.gather), specs, state)

    layers = networks.network_of(config).cache_layers(config)
    return decoding.on_mesh(run, params, state, layers, specs, outputs)


@jax.jit(static_argnames=("config", "slots"))
def _new_cache(params, rows, config, slots):
    """An empty cache for these rows. With an encoder, it holds the keys and values of the
    sources."""
    network = networks.network_of(config)
    cache = decoding.empty_cache(network.cache_layers(config), len(rows["start"]), slots,
                                 params["embed"].dtype, _specs(config))
    source = {name: rows[name] for name in ("source", "source_mask") if name in rows}
    if source:
        def encode(params, specs, source):
            return {"cross": network.encode_source(params, source, config, specs)}

        cross = _on_mesh(encode, params, source, config, ["cross"])["cross"]
        cache = [layer | of_source for layer, of_source in zip(cache, cross)]
    return cache


@jax.jit(static_argnames=("config", "length"), donate_argnames="cache")
def _forward_chunk(params, cache, rows, config, length):
    """Run the rows' tokens [B, T] through the network. Returns the cache with these tokens, and the
    logits [B, V] after the last of them, or after number rows["last"]. If rows have targets, it
    returns sums [B, 2] instead of logits: the weighted sum of their log-probabilities, and of the
    targets that are likeliest."""
    network = networks.network_of(config)

    def forward(params, specs, state):
        x, cache = network.extend(params, state["cache"], state["tokens"], state["slot"],
                                  state["start"], config, length, specs)
        if "targets" not in state:
            last = x[:, -1:]
            if "last" in state:
                last = jax.lax.dynamic_slice_in_dim(x, state["last"], 1, 1)
            return {"cache": cache, "logits": network.head_logits(params, last, config)[:, 0]}
        logs = jax.nn.log_softmax(network.head_logits(params, x, config))
        of_targets = jnp.take_along_axis(logs, state["targets"][..., None], 2)
        found = jnp.concatenate([of_targets, of_targets == logs.max(-1, keepdims=True)], 2)
        return {"cache": cache, "sums": jnp.sum(found * state["weights"][..., None], 1)}

    return _on_mesh(forward, params, {**rows, "cache": cache}, config,
                    ("cache", "sums" if "targets" in rows else "logits"))


def _prefill(params, rows, config, tokens, chunk=CHUNK):
    """Read rows chunk by chunk, into a new cache with room for `tokens` more ids. Returns the state
    after them, with the logits of the last chunk (or, if rows have targets, the sums over all
    chunks); and the length that scales positions (Network.decoding_length)."""
    P, has_time = rows["tokens"].shape[1], ("tokens", "targets", "weights")
    slots = P + (padded_length(tokens) if tokens else 0)
    length = networks.network_of(config).decoding_length(config, P + tokens, slots)
    state = {"cache": _new_cache(params, rows, config, slots)}
    for begin in range(0, P, chunk):
        inputs = {name: x[:, begin:begin + chunk] if name in has_time else x
                  for name, x in rows.items() if not name.startswith("source")}
        before = state.get("sums", 0)
        state = _forward_chunk(params, state["cache"], {**inputs, "slot": np.int32(begin)}, config,
                               length)
        if "sums" in state:
            state["sums"] += before
    return {**state, "start": rows["start"], "slot": np.int32(P)}, length


def _sum_logprobs(params, rows, weights, config):
    """The sums [B, 2] of _forward_chunk for each row's tokens, weighted by weights [B, P]."""
    chunk, B = CHUNK, len(rows["tokens"])
    while chunk > 16 and B * chunk * config.vocab_size > LOGITS:    # logits must fit in memory
        chunk //= 2
    # (Rolling makes the first token the last target. Its weight is 0.)
    rows = rows | {"targets": np.roll(rows["tokens"], -1, 1), "weights": np.roll(weights, -1, 1)}
    return on_host(_prefill(params, rows, config, 0, chunk)[0]["sums"])


@jax.jit(static_argnames=("config", "sampling"), donate_argnames="state")
def _choose_ids(state, logits, config, sampling):
    """The state with one more id in each row, chosen by these logits [B, V]. Before, `slot` is the
    one after the last id read; from here on, new id number n has the slot `slot` + n."""
    def choose(_, state):
        logits, slot = state.pop("logits"), state["slot"] - state["count"]
        return decoding.append_ids(state | {"slot": slot}, logits, draw, sampling)

    layers = networks.network_of(config).cache_layers(config)
    return decoding.on_mesh(choose, {}, state | {"logits": logits}, layers, _specs(config), state)


@jax.jit(static_argnames=("config", "length", "sampling"), donate_argnames="state")
def _decode(params, state, limit, config, length, sampling):
    """The state with `limit` new ids in each row, or fewer if all rows end before."""
    network = networks.network_of(config)

    def decode(params, specs, state):
        limit = state.pop("limit")

        def write_one(carry):
            state, _ = carry
            last = jax.lax.dynamic_slice_in_dim(state["ids"], state["count"] - 1, 1, 1)
            x, cache = network.extend(params, state["cache"], last, state["slot"] +
                                      state["count"] - 1, state["start"], config, length, specs)
            logits = network.head_logits(params, x, config)[:, 0]
            state = decoding.append_ids(state | {"cache": cache}, logits, draw, sampling)
            return state, decoding.any_device(~state["ended"])

        def goes_on(carry):
            state, any_is_unfinished = carry
            return any_is_unfinished & (state["count"] < limit)

        begin = state, decoding.any_device(~state["ended"])
        return jax.lax.while_loop(goes_on, write_one, begin)[0]

    return _on_mesh(decode, params, state | {"limit": limit}, config, state)


@jax.jit(static_argnames=("config", "length", "beams", "tokens", "length_penalty", "early_stop"))
def _beam_search(params, state, config, length, beams, tokens, length_penalty, early_stop):
    """The best beams of each prompt: finished [B, beams, tokens], finished_scores and lengths."""
    network = networks.network_of(config)

    def search(params, specs, state):
        start = jnp.repeat(state["start"], beams, 0)

        def next_logits(ids, cache, slot):
            x, cache = network.extend(params, cache, ids, slot, start, config, length, specs)
            return network.head_logits(params, x, config)[:, 0], cache

        result = decoding.beam_loop(
            next_logits, state["cache"], state["logits"], state["slot"], state["ends"], beams,
            tokens, state["limit"], length_penalty, early_stop)
        return {name: result[name] for name in decoding.FINISHED}

    return _on_mesh(search, params, state, config, decoding.FINISHED)


@jax.jit(static_argnames=("config", "tokens", "sampling", "ends", "beams"))
def generate_ids(params: Any, rows: dict[str, Array], config: Any, tokens: int,
                 sampling: decoding.Sampling = decoding.Sampling(), seed: int = 0,
                 ends: tuple[int, ...] = (), beams: int = 0) -> Array:
    """New ids [B, tokens], for use inside a compiled function; with beams, the best beam's. rows
    are arrays: `tokens` [B, P], `start` [B] if rows are padded, and the inputs of an encoder. Ids
    after the first one in `ends` mean nothing."""
    count = len(rows["tokens"])
    rows = {"start": jnp.zeros(count, jnp.int32), **rows}
    rows, params = {n: pad_rows(x, jnp) for n, x in rows.items()}, for_decoding(params, config)
    if beams:
        state, length = _prefill(params, rows, config, tokens)
        state |= {"ends": np.array(ends or [-1], np.int32), "limit": tokens}
        best = _beam_search(params, state, config, length, beams, tokens, 1.0, False)
        return best["finished"][:count, 0]
    state = decoding.empty_ids(rows, padded_length(tokens), seeds_of(rows, seed, jnp), ends,
                               sampling, config.vocab_size)
    read, length = _prefill(params, rows, config, tokens)
    logits = read.pop("logits")
    state = _choose_ids(state | read, logits, config, sampling)
    return _decode(params, state, tokens, config, length, sampling)["ids"][:count, :tokens]


# -------------------------------------------------------------------------------------------
# Models on disk

def load(folder: str | Path, mesh: Any = None, checkpoint: int | None = None,
         edited: bool = False) -> tuple[Any, Any, data.Tokenizer | None]:
    """(weights, configuration, tokenizer) of a run, at this checkpoint or the newest, or of a
    published model (`edited`: also if the network's code computes something else). Weights are
    float32, split over the mesh if one is given; the configuration is the network's; the tokenizer
    is None if there is none."""
    if "model_type" in read_record(Path(folder) / "config.json"):
        params, config = networks.load_hf(folder, mesh, edited)
        has_one = any((Path(folder) / kind.file).exists() for kind in KINDS.values())
        return params, config, published_tokenizer(folder, config.vocab_size) if has_one else None
    params, config = networks.load_run(folder, mesh, checkpoint)
    return params, whole_context(config), _tokenizer_of_run(folder)


def _tokenizer_of_run(folder):
    record = run_record(folder)
    return data.tokenizer_of(Path(folder), record) if "tokenizer" in record else None


# -------------------------------------------------------------------------------------------
# The command line

def load_model(config: Config) -> tuple[Any, Any, data.Tokenizer]:
    """What the flags ask for: the weights as decoding uses them, the network's configuration, and
    the tokenizer."""
    mesh = mesh_of_flags(config.mesh, config.shards)
    if config.model:
        c = networks.hf_config(config.model)
        network = _check_writes(c, f"--model {config.model}")
        tokenizer = published_tokenizer(config.model, c.vocab_size)
        c = networks.hf_config(config.model, dtype=resolve_dtype(c, mesh).dtype)
        folders.check_hf(network, config.model, c, config.edited)
        shapes = decoding.decoding_shapes(c.dtype, network.weight_shapes(c), _specs_on(mesh, c),
                                          mesh)
        return networks.read_hf(config.model, c, shapes), c, tokenizer
    _check_writes(networks.config_of_run(config.run), f"--run {config.run}")
    if not (tokenizer := _tokenizer_of_run(config.run)):
        raise ConfigError(f"--run {config.run}: a run of another task, or one without a tokenizer "
                          f"to read and write text with (fit(tokenizer=...) keeps one; sample.load "
                          f"and sample.generate work with ids)")
    params, c, _ = load(config.run, mesh, step_of(config.run, config.checkpoint))
    return for_decoding(params, c), c, tokenizer


def _check_writes(c, what):
    """The network of a model that generates text. Other models are refused."""
    network = networks.network_of(c)
    if (gives := network.gives(c)) != "text":
        raise ConfigError(f"{what}: this model gives {gives} and writes no text")
    return network


def main(argv: Sequence[str] | None = None) -> None:
    with terminal.ends_quietly():
        given, _ = parse_flags(Config, argv, renamed={"step": "checkpoint"}, groups=GROUPS)
        check_shards(given)
        config = Config(**given)
        check_used(given)
        keep_compiled(least=0)
        has_input = "prompt" in given or bool(config.prompts or config.source or config.score
                                              or config.choices or config.bench)
        is_chat = terminal.is_conversation() and not (has_input or config.json or config.beams)
        if config.system and not (is_chat or config.chat):
            raise ConfigError("--system is for a conversation: on a terminal with no prompt, or "
                              "with --chat")
        text = given_text(config)       # (first: an error here should not wait for the model)
        params, c, tokenizer = load_model(config)
        network = networks.network_of(c)
        passes = Passes(_new_cache, _forward_chunk, _choose_ids, _decode)
        writer = Writer(generate, stream, beam_search, score, passes, config, network, params, c,
                        tokenizer)
        if config.bench:
            bench(stream, writer.params, c, config.model)
        elif config.score:
            writer.score_texts(text)
        elif config.choices:
            writer.score_choices(text)
        elif is_chat:
            writer.converse()
        else:
            writer.write(prompt_texts(config, text, has_input))


if __name__ == "__main__":
    run_main(main, "fewer --tokens, a smaller --batch or a larger --mesh need less")
