"""Generation.

    prompts, any lengths -> padded on the left -> read, chunk by chunk, into a cache
                         -> one compiled loop: logits, an id for each row, its keys and values

    . . t h e |        places before a row's start are padding: never seen, no position
    o n c e   |
              ^ all rows choose their first new id at the same place

The network is model.py's, token after token with a cache (model.extend). zigzag/cache.py has what
is kept, zigzag/decoding.py chooses and searches. On a mesh a pass is one shard_map, as a training
step is: for one token at a time, which has no time to split, `shard.row` is an all-reduce.

    python sample.py --run out --prompt "def main("
"""

import functools
import math
from pathlib import Path
from typing import Any, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import data
import families
import model
import shard
from zigzag import passes, terminal
from zigzag.asked import (
    Asked,
    Config,
    given_lines,
    prompt_texts,
    prompts_of,
    step_of,
    whole_context,
)
from zigzag.cache import CHUNK
from zigzag.checkpoint import read_run, run_config
from zigzag.decoding import NONE, Choice, add_choice, choose_on, ids_seen, search_on
from zigzag.errors import ConfigError
from zigzag.flags import parse_flags, run_main
from zigzag.mesh import keep_compiled, mesh_sizes, simulate_devices
from zigzag.plan import resolve_dtype
from zigzag.positions import decoding_length
from zigzag.products import LOGITS
from zigzag.rows import (
    on_host,
    overlapping,
    room,
    rows_of,
    seeds_of,
    until,
    whole_groups,
)
from zigzag.sample_bench import bench
from zigzag.tokenizers import published_tokenizer
from zigzag.writer import Writer


def generate(params: Any, prompts: Sequence[Sequence[int]], config: model.Config,
             tokens: int = 128, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
             seed: int | Sequence[int] = 0, source: Any = None, min_p: float = 0.0,
             repetition_penalty: float = 1.0, stop: Sequence[int | str] = (),
             logprobs: bool = False, tokenizer: Any = None) -> list:
    """The new ids of each prompt: `tokens`, or fewer where an id is in `stop`, which is not given
    out, or where they spell a text in `stop` (give the tokenizer). With logprobs, pairs of the ids
    and the model's log-probability of each.

    Temperature 0 is greedy. top_k keeps so many of the likeliest ids (0: all), top_p the likeliest
    that together have that share, min_p those with that share of the likeliest's;
    repetition_penalty makes ids less likely that were there already. What is chosen follows from
    the prompt and its seed: one for all, or one for each. An encoder-decoder is given a source for
    each prompt, a list of ids or what a stem reads, and goes on from
    [[zigzag.families.start_id(config)]]."""
    texts = [text for text in stop if isinstance(text, str)]
    if texts and tokenizer is None:
        raise ConfigError(f"stop {texts[0]!r}: to find a text, generate needs the tokenizer")
    answers = [terminal.Answer(tokenizer.decode, Asked("", p), tokens, texts)
               for p in prompts if texts]
    found = [([], []) for _ in prompts]
    for part in stream(params, prompts, config, tokens, temperature, top_k, top_p, seed, source,
                       min_p, repetition_penalty, [i for i in stop if i not in texts],
                       16 if texts else tokens, logprobs=True):
        for row, new in zip(found, part):
            row[0].extend(new[0])
            row[1].extend(new[1])
        for answer, (ids, _) in zip(answers, part):
            answer.add(ids)
        if answers and all(answer.reason for answer in answers):
            break
    if texts:
        found = [(ids[:len(a.ids)], logs[:len(a.ids)]) for a, (ids, logs) in zip(answers, found)]
    return found if logprobs else [ids for ids, _ in found]


def stream(params: Any, prompts: Sequence[Sequence[int]], config: model.Config, tokens: int = 128,
           temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
           seed: int | Sequence[int] = 0, source: Any = None, min_p: float = 0.0,
           repetition_penalty: float = 1.0, stop: Sequence[int] = (), piece: int = 8,
           logprobs: bool = False) -> Iterator[list]:
    """What generate gives, as it comes: of each prompt the next ids, first one, then at most
    `piece`, and none once it has ended."""
    choice = Choice(temperature, top_k, top_p, min_p, repetition_penalty)
    with passes.mesh_of_weights(params):
        rows, params = rows_of(prompts, config, tokens, source), for_decoding(params, config)
        seeds = seeds_of(rows, seed, count=len(prompts))
        state, length = _begin(params, rows, config, tokens, choice, seeds, stop)
    at, is_open = 0, np.ones(len(prompts), bool)
    while True:
        upto = min(int(on_host(state["at"])), tokens)
        new = [on_host(state[name])[:len(prompts), at:upto] for name in ("ids", "logprobs")]
        counts = [len(until(stop, ids.tolist())) * here for ids, here in zip(new[0], is_open)]
        part = [tuple(x[row, :n].tolist() for x in new) for row, n in enumerate(counts)]
        yield part if logprobs else [ids for ids, _ in part]
        is_open &= np.array(counts) == upto - at
        at = upto
        if at >= tokens or not is_open.any():
            return
        with passes.mesh_of_weights(params):
            state = _go_on(params, state, np.int32(min(at + piece, tokens)), config, length, choice)


def beam_search(params: Any, prompts: Sequence[Sequence[int]], config: model.Config,
                beams: int = 4, tokens: int = 128, eos: int | Sequence[int] | None = None,
                source: Any = None, length_penalty: float = 1.0, early_stop: bool | str = False
                ) -> list[list[tuple[list[int], float]]]:
    """For each prompt the `beams` likeliest continuations found, as (ids, score), best first. The
    score is the sum of log-probabilities over the length to the power of length_penalty. One ends
    with an id `eos`, which counts and is not given out. The search ends when none that goes on can
    become better at its present length; with early_stop True as soon as there are as many as asked
    for, with "never" when none can at any length."""
    if not 1 <= beams <= config.vocab_size:
        raise ConfigError(f"beams {beams}: expected 1 to {config.vocab_size}, the vocabulary")
    ends = np.array([-1] if eos is None else eos, np.int32).reshape(-1)
    with passes.mesh_of_weights(params):
        rows, params = rows_of(prompts, config, tokens, source), for_decoding(params, config)
        state, length = _read_prompts(params, rows, config, tokens)
        found = _search(params, state | {"ends": ends, "limit": np.int32(tokens)}, config, length,
                        beams, room(tokens), float(length_penalty), early_stop)
        ids, scores, lengths = (on_host(found[n]) for n in ("found", "found_scores", "lengths"))
    return [[(ids[row, k, :lengths[row, k]].tolist(), float(scores[row, k]))
             for k in range(beams) if scores[row, k] > NONE / 2] for row in range(len(prompts))]


def score(params: Any, rows: Sequence[Sequence[int]], config: model.Config, sources: Any = None,
          batch: int = 8) -> list[tuple[float, int]]:
    """Of each row of ids the sum of log-probabilities, and of how many: the first id is given. A
    row longer than the context is read in windows that overlap by half."""
    found, windows = np.zeros((len(rows), 2)), list(overlapping(rows, config.seq_len))
    with passes.mesh_of_weights(params):
        params = for_decoding(params, config)
        for first in range(0, len(windows), batch):
            numbers, texts, given = zip(*windows[first:first + batch])
            part = rows_of(texts, config, 0,
                         None if sources is None else [sources[row] for row in numbers])
            known = part["tokens"].shape[1] - np.array([len(t) - g for t, g in zip(texts, given)])
            weights = np.arange(part["tokens"].shape[1]) >= known[:, None]
            sums = on_host(_sums(params, part, whole_groups(weights), config))
            np.add.at(found, list(numbers), np.stack([sums[:len(texts)], weights.sum(1)], 1))
    return [(float(total), int(count)) for total, count in found]


# -------------------------------------------------------------------------------------------
# Passes over the network

@functools.cache
def _specs_on(mesh, config):
    weight_specs = families.network_of(config).weight_specs
    return None if mesh.size <= 1 else passes.decoding_specs(weight_specs(config, mesh), config)


def _specs(config):
    """How the ambient mesh splits the weights of decoding; None where there is none."""
    return _specs_on(jax.sharding.get_abstract_mesh(), config)


def for_decoding(params: Any, config: model.Config) -> Any:
    """The weights as generating has them. (Who generates often with the same does it once.)"""
    with passes.mesh_of_weights(params):
        return passes.for_decoding(params, config, _specs(config))


def _on_mesh(fn, params, state, config, gives):
    """fn(params, specs, state) on the ambient mesh: a state with the names `gives`."""
    specs = _specs(config)
    return passes.on_mesh(lambda params, state: fn(_gather_all_but_layers(params, specs), specs,
                                                   state), params, state, config, specs, gives)


def _gather_all_but_layers(params, specs):
    """Whole weights over fsdp, but for those of layers, which are gathered one after the other."""
    return params if specs is None else {
        name: w if name == "layers" else _gather_all_but_layers(w, specs[name])
        if isinstance(w, dict) else shard.gather(w, specs[name]) for name, w in params.items()}


@jax.jit(static_argnames=("config", "slots"))
def _new_cache(params, rows, config, slots):
    """An empty cache for these rows, with what its layers keep of the rows' sources."""
    cache = passes.empty_cache(config, len(rows["start"]), slots, params["embed"].dtype,
                               _specs(config))
    source = {name: rows[name] for name in ("source", "source_mask") if name in rows}
    if source:
        cross = _on_mesh(lambda params, specs, source: {"cross": model.encode_source(
            params, source, config, specs)}, params, source, config, ["cross"])["cross"]
        cache = [layer | more for layer, more in zip(cache, cross)]
    return cache


@jax.jit(static_argnames=("config", "length"), donate_argnames="cache")
def _read(params, cache, rows, config, length):
    """The cache with the rows' tokens [B, T], and the logits [B, V] after them; or, where there are
    targets, the sum of their weighted log-probabilities [B]."""
    def read(params, specs, state):
        x, cache = model.extend(params, state["cache"], state["tokens"], state["slot"],
                                state["start"], config, length, specs)
        if "targets" not in state:
            return {"cache": cache, "logits": model.head_logits(params, x[:, -1:], config)[:, 0]}
        logs = jax.nn.log_softmax(model.head_logits(params, x, config))
        logs = jnp.take_along_axis(logs, state["targets"][..., None], 2)[..., 0]
        return {"cache": cache, "sums": jnp.sum(logs * state["weights"], 1)}

    return _on_mesh(read, params, {**rows, "cache": cache}, config,
                    ("cache", "sums" if "targets" in rows else "logits"))


def _read_rows(params, rows, config, tokens, chunk=CHUNK):
    """Rows read chunk by chunk, into a cache with room for so many tokens more: what _read gives
    for each chunk, and the length by which positions are scaled."""
    P, timed = rows["tokens"].shape[1], ("tokens", "targets", "weights")
    slots = P + (room(tokens) if tokens else 0)
    length = decoding_length(config, P + tokens, slots)
    cache = _new_cache(params, rows, config, slots)
    for begin in range(0, P, chunk):
        part = {name: x[:, begin:begin + chunk] if name in timed else x
                for name, x in rows.items() if not name.startswith("source")}
        out = _read(params, cache, {**part, "slot": np.int32(begin)}, config, length)
        cache = out["cache"]
        yield out, length


def _read_prompts(params, rows, config, tokens):
    """The state after the prompts."""
    *_, (out, length) = _read_rows(params, rows, config, tokens)
    return {**out, "start": rows["start"], "slot": np.int32(rows["tokens"].shape[1])}, length


def _sums(params, rows, weights, config):
    """Of each row the sum of weights times the log-probabilities of its tokens."""
    chunk, B = CHUNK, len(rows["tokens"])
    while chunk > 16 and B * chunk * config.vocab_size > LOGITS:
        chunk //= 2
    rows = rows | {"targets": np.roll(rows["tokens"], -1, 1), "weights": np.roll(weights, -1, 1)}
    return sum(on_host(out["sums"]) for out, _ in _read_rows(params, rows, config, 0, chunk))


def _begin(params, rows, config, tokens, choice, seeds, ends):
    """The state after the first new ids."""
    state, length = _read_prompts(params, rows, config, tokens)
    B, logits = len(rows["start"]), state.pop("logits")
    state |= {"ids": np.zeros((B, room(tokens)), np.int32), "at": np.int32(0), "seeds": seeds,
              "logprobs": np.zeros((B, room(tokens)), np.float32), "ended": np.zeros(B, bool),
              "ends": np.array([*ends, *[-1] * max(1, 8 - len(ends))], np.int32)}
    if choice.repetition_penalty != 1:
        state["seen"] = ids_seen(rows["tokens"], rows["start"], config.vocab_size)
    return _choose(state, logits, config, choice), length


@jax.jit(static_argnames=("config", "choice"), donate_argnames="state")
def _choose(state, logits, config, choice):
    """The state with one more id for each row, chosen by these logits."""
    return passes.on_mesh(lambda _, state: add_choice(
        {n: x for n, x in state.items() if n != "logits"}, state["logits"], choice), {},
        state | {"logits": logits}, config, _specs(config), state)


@jax.jit(static_argnames=("config", "length", "choice"), donate_argnames="state")
def _go_on(params, state, limit, config, length, choice):
    """The state with so many ids in all, or until all rows have ended."""
    def go_on(params, specs, state):
        limit = state.pop("limit")
        return choose_on(_next_logits(params, state["start"], config, length, specs), state, limit,
                         choice)

    return _on_mesh(go_on, params, state | {"limit": limit}, config, state)


def _next_logits(params, start, config, length, specs):
    """The next logits [B, V] as the loops of zigzag/decoding.py ask for them."""
    def next_logits(ids, cache, slot):
        x, cache = model.extend(params, cache, ids, slot, start, config, length, specs)
        return model.head_logits(params, x, config)[:, 0], cache

    return next_logits


@jax.jit(static_argnames=("config", "length", "beams", "tokens", "length_penalty", "early_stop"))
def _search(params, state, config, length, beams, tokens, length_penalty, early_stop):
    """The best beams of each prompt: found [B, beams, tokens], found_scores, lengths."""
    def search(params, specs, state):
        start = jnp.repeat(state["start"], beams, 0)
        found = search_on(_next_logits(params, start, config, length, specs), state["cache"],
                          state["logits"], state["slot"], state["ends"], beams, tokens,
                          state["limit"], length_penalty, early_stop)
        return {name: found[name] for name in ("found", "found_scores", "lengths")}

    return _on_mesh(search, params, state, config, ("found", "found_scores", "lengths"))


@jax.jit(static_argnames=("config", "tokens", "choice", "ends", "beams"))
def generate_ids(params: Any, rows: dict[str, Array], config: model.Config, tokens: int,
                 choice: Choice = Choice(), seed: int = 0, ends: tuple[int, ...] = (),
                 beams: int = 0) -> Array:
    """generate, or the best of so many beams, within a compiled function: rows of `tokens` [B, P],
    with `start` [B] where they are padded, and what their encoder is given -> new ids [B, tokens].
    After an end they mean nothing."""
    count = len(rows["tokens"])
    rows = {"start": jnp.zeros(count, jnp.int32), **rows}
    rows, params = {n: whole_groups(x, jnp) for n, x in rows.items()}, for_decoding(params, config)
    if beams:
        state, length = _read_prompts(params, rows, config, tokens)
        state |= {"ends": np.array(ends or [-1], np.int32), "limit": tokens}
        found = _search(params, state, config, length, beams, tokens, 1.0, False)
        return found["found"][:count, 0]
    state, length = _begin(params, rows, config, tokens, choice, seeds_of(rows, seed, jnp), ends)
    return _go_on(params, state, tokens, config, length, choice)["ids"][:count, :tokens]


# -------------------------------------------------------------------------------------------
# The command line

def load_model(config: Config) -> tuple[Any, model.Config, data.Tokenizer]:
    """The weights, on a mesh and as decoding has them, what they are, and their tokenizer."""
    if config.model:
        c, mesh = families.hf_config(config.model), _mesh(config)
        _check_writes(c, f"--model {config.model}")
        tokenizer = published_tokenizer(config.model, c.vocab_size)
        c = families.hf_config(config.model, dtype=resolve_dtype(c, mesh).dtype)
        model.read_hf(config.model, c)      # is everything there, before places are planned?
        places = passes.places(c, model.weight_shapes(c), _specs_on(mesh, c), mesh)
        return model.read_hf(config.model, c, places), c, tokenizer
    record = read_run(config.run, model.Config)
    _check_writes(run_config(config.run, model.Config), f"--run {config.run}")
    if "tokenizer" not in record:
        raise ConfigError(f"--run {config.run}: a run of another task, with no tokenizer to read "
                          f"or write text with")
    params, c = model.load_run(config.run, _mesh(config), step_of(config.run, config.step))
    c = whole_context(c)
    return for_decoding(params, c), c, data.tokenizer_of(Path(config.run), record)


def _check_writes(c, what):
    """Refuse a model that writes no text."""
    if families.network_of(c) is not model.TRANSFORMER or c.head != "tokens" or not c.causal:
        gives = {"classes": "classes", "none": "vectors"}.get(c.head, "numbers for each token")
        raise ConfigError(f"{what}: this model gives {gives}, and writes no text")


def _mesh(config):
    sizes = mesh_sizes(config.mesh, config.shards)
    simulate_devices(math.prod(sizes.values()))
    return shard.make_mesh(**sizes)


def main(argv: Sequence[str] | None = None) -> None:
    with terminal.ends_quietly():
        given, _ = parse_flags(Config, argv)
        config = Config(**given)
        keep_compiled(least=0)
        is_asked = "prompt" in given or bool(config.prompts or config.source or config.score
                                              or config.bench)
        talks = terminal.is_conversation() and not (is_asked or config.json or config.beams)
        if config.system and not talks:
            raise ConfigError("--system is for a conversation: on a terminal, with no prompt")
        lines = given_lines(config)     # (a file that is not there: before all else)
        params, c, tokenizer = load_model(config)
        writer = Writer(generate, stream, beam_search, score, config, params, c, tokenizer)
        if config.bench:
            bench(stream, writer.params, c, config.model)
        elif config.score:
            writer.score_texts(lines)
        elif talks:
            writer.converse()
        else:
            texts = prompt_texts(config, lines, is_asked)
            writer.write(prompts_of(c, tokenizer, texts, config.source))


if __name__ == "__main__":
    run_main(main)
