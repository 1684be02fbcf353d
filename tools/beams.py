"""Beam search: each prompt keeps K running beams and the K best finished beams.

    best_beams      the best beams for each prompt
    ids_of_rows     the best beam for each row; a compiled function may call it
    write           sample.py --beams
    next_beams      a step: K times V candidates -> the K best running and K best finished beams
"""

import itertools
import math
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import sample
from zigzag.commands.sampling import Model, show
from zigzag.core.errors import ConfigError, note
from zigzag.core.mesh import mark_varying
from zigzag.generate.decoding import any_device, end_ids
from zigzag.generate.engine import Engine, mesh_of_weights
from zigzag.generate.passes import of_padded, prefill, room_for
from zigzag.generate.prompts import Prompt
from zigzag.generate.rows import cut_at_end, on_host, padded_length, prompt_arrays

NEG_INF = -1e9          # the log-probability sum of a nonexistent beam
LOWEST = -3e38          # a nonexistent beam's score, below all real ones (which may be below -1e9)
FINISHED = ("finished", "finished_scores")      # the state's entries for the best finished beams


def best_beams(engine: Engine, params: Any, prompts: Sequence[Sequence[int]], beams: int,
               tokens: int, eos: Any, source: Any, length_penalty: float, early_stop: bool | str
               ) -> list[list[tuple[list[int], float]]]:
    """Return the `beams` best continuations found for each prompt: (ids, score), best first. The
    score is the sum of log-probabilities divided by length ** length_penalty. An id in `eos` ends a
    continuation; it counts in the score but isn't returned. early_stop sets when the search ends.
    False: when no running beam, at its current length, can beat a finished one. "never": when none
    can at any length. True: as soon as `beams` beams have finished."""
    vocab_size = engine.config.vocab_size
    if not (1 <= beams <= vocab_size and tokens >= 1 and math.isfinite(length_penalty)
            and early_stop in (True, False, "never")):
        raise ConfigError(f"beams {beams}, tokens {tokens}, length_penalty {length_penalty}, "
                          f"early_stop {early_stop!r}: expected 1 to {vocab_size} beams, tokens of "
                          f"at least 1, a finite length_penalty, and True, False or 'never'")
    ends = end_ids(eos, vocab_size)
    with mesh_of_weights(params):
        rows = prompt_arrays(engine.network, prompts, engine.config, tokens, source)
        params = engine.for_decoding(params)
        best = _search(engine, params, rows, ends, beams, tokens, padded_length(tokens),
                       float(length_penalty), early_stop)
        ids, scores = (on_host(best[name])[:len(prompts)].tolist() for name in FINISHED)
    return [[(cut_at_end(ends, beam[:tokens]), score) for beam, score in zip(*of_prompt)
             if score > LOWEST / 2] for of_prompt in zip(ids, scores)]


def ids_of_rows(engine: Engine, params: Any, rows: dict[str, Array], tokens: int,
                ends: Sequence[int], beams: int) -> Array:
    """Return the best beam [B, tokens] for these rows. A compiled function may call this."""
    return of_padded(engine, params, rows, lambda params, rows: _search(
        engine, params, rows, ends, beams, tokens, tokens)["finished"][:, 0])


def write(model: Model, prompts: Sequence[Prompt]) -> None:
    """Run sample.py --beams: print each prompt's best beams with their scores."""
    flags = model.flags

    def room(prompt):
        return min(flags.tokens, model.room(prompt))

    # Search in groups with equal room, so a long prompt doesn't shorten other prompts' answers.
    for most, group in itertools.groupby(prompts, room):
        while some := list(itertools.islice(group, flags.batch)):
            if most < flags.tokens:
                note(f"--tokens {flags.tokens}: beam search stops at the end of the context, after "
                     f"{most}")
            best = sample.beam_search(
                model.params, [prompt.ids for prompt in some], model.c, flags.beams, most,
                model.ends, model.sources(some), flags.length_penalty)
            for prompt, of_prompt in zip(some, best):
                for ids, score in of_prompt:
                    beam = prompt._replace(begin=f"{score:9.3f}  {prompt.begin}", score=score)
                    show([[(ids, ids)]], [beam], [model.answer(prompt, most)], flags)


def _search(engine, params, rows, ends, beams, limit, size, length_penalty=1.0, early_stop=False):
    """Find these rows' best beams, each with at most `limit` ids, counting the end id. Return
    `finished` [B, beams, size] and finished_scores."""
    slots, length = room_for(engine, rows, limit)
    state = prefill(engine, params, rows, slots, length)
    state |= {"ends": np.array(ends or [-1], np.int32), "limit": np.int32(limit)}
    return _search_after(engine, params, state, length, beams, size, length_penalty, early_stop)


@jax.jit(static_argnames=("engine", "length", "beams", "size", "length_penalty", "early_stop"))
def _search_after(engine, params, state, length, beams, size, length_penalty, early_stop):
    """Run _search after prefill. All prompts' beams are rows [B * beams] of the cache."""
    network, config = engine.network, engine.config

    def search(params, specs, state):
        start, slot, ends, limit = (state[name] for name in ("start", "slot", "ends", "limit"))
        start = jnp.repeat(start, beams, 0)

        def step(carry):
            found, cache, _ = carry
            x, cache = network.extend(params, cache, found["newest"].reshape(-1, 1),
                                      slot + found["count"], start, config, length, specs)
            logits = network.head_logits(params, x, config)[:, 0]
            found, parents, goes_on = next_beams(found, logits, ends, limit, length_penalty,
                                                 early_stop)
            rows = (jnp.arange(len(parents))[:, None] * beams + parents).reshape(-1)
            cache = [{name: a if name.startswith("cross") else a[rows]
                      for name, a in layer.items()} for layer in cache]
            return found, cache, any_device(goes_on) & (found["count"] < limit)

        # A prompt's beams are still all equal, so only the first counts.
        newest = jnp.repeat(state["newest"][:, None], beams, 1)
        none, ids = jnp.zeros(newest.shape), jnp.zeros((*newest.shape, size), jnp.int32)
        found = {"newest": newest, "running": ids, "finished": ids,
                 "running_scores": (none + NEG_INF).at[:, 0].set(0.0),
                 "finished_scores": none + LOWEST, "can_improve": none[:, 0] == 0}
        found = {**mark_varying(found, newest), "count": jnp.int32(0)}
        cache = jax.tree.map(lambda a: jnp.repeat(a, beams, 0), state["cache"])
        found, *_ = lax.while_loop(lambda carry: carry[2], step, (found, cache, jnp.bool_(True)))
        return {name: found[name] for name in FINISHED}

    return engine.on_mesh(search, params, state, FINISHED)


def _gather_beams(tree, beams):
    """Select the beams with indices `beams` [B, k] from arrays [B, K, ...]."""
    return jax.tree.map(lambda a: jnp.take_along_axis(
        a, beams.reshape(*beams.shape, *(1,) * (a.ndim - 2)), 1), tree)


def next_beams(state: dict[str, Any], logits: Array, ends: Array, limit: Array,
               length_penalty: float, early_stop: bool | str
               ) -> tuple[dict[str, Any], Array, Array]:
    """Extend each beam by an id, given all beams' next logits [B * K, V]. Return the new state; the
    beam [B, K] that each running beam continues; and whether each prompt's search goes on [B]. A
    beam has at most `limit` ids. The options are the same as in best_beams."""
    def score(sums, length):
        return sums / jnp.clip((length * 1.0) ** length_penalty, 1e-30, 1e30)

    (B, K), V, count = state["running_scores"].shape, logits.shape[-1], state["count"]
    # The best continuations over all beams, enough for K of them to keep running.
    scores = jax.nn.log_softmax(logits).reshape(B, -1, V) + state["running_scores"][..., None]
    candidates = min(max(2, 1 + len(ends)) * K, K * V)
    scores, best = lax.top_k(scores.reshape(B, -1), candidates)
    parents, new_ids = best // V, (best % V).astype(jnp.int32)
    ids = lax.dynamic_update_slice_in_dim(
        _gather_beams(state["running"], parents), new_ids[..., None], count, 2)
    stops = (new_ids[..., None] == ends).any(-1) | (count + 1 >= limit)

    # The K best that keep running.
    running_scores, chosen = lax.top_k(scores + jnp.where(stops, NEG_INF, 0.0), K)
    parents, running, newest = _gather_beams((parents, ids, new_ids), chosen)

    # The K best that have finished, now or earlier.
    may_finish = stops & (jnp.arange(candidates) < K) & (scores > NEG_INF / 2)
    may_finish &= state["can_improve"][:, None]
    if early_stop is True:
        may_finish &= (state["finished_scores"] == LOWEST).any(-1, keepdims=True)
    new_scores = jnp.where(may_finish, score(scores, count + 1), LOWEST)
    finished_scores, chosen = lax.top_k(
        jnp.concatenate([state["finished_scores"], new_scores], 1), K)
    finished = _gather_beams(jnp.concatenate([state["finished"], ids], 1), chosen)

    # Can a running beam still beat the worst finished one?
    longest = limit if early_stop == "never" and length_penalty > 0 else count + 1
    worst = finished_scores.min(-1)
    can_improve = state["can_improve"] & (score(running_scores[:, 0], longest) > worst)
    return {"newest": newest, "running": running, "running_scores": running_scores,
            "finished": finished, "finished_scores": finished_scores, "can_improve": can_improve,
            "count": count + 1}, parents, can_improve & ((worst == LOWEST) | (
                early_stop is not True))
