"""Choosing the next id, and the loops that go on from it.

    logits [B, V] -> repetition penalty -> temperature -> top_k -> top_p -> min_p -> one id

A loop is given next_logits(ids [B, 1], cache, slot) -> logits, cache, and carries a dict of arrays,
its state. Where rows are split over groups of devices, all groups go on until the last has ended:
they may have to gather weights together.
"""

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from zigzag.errors import ConfigError
from zigzag.mesh import mark_varying, varying


@dataclasses.dataclass(frozen=True)
class Choice:
    """How an id is chosen. (The parts of `generate` that a compiled loop depends on.)"""
    temperature: float = 1.0            # 0: the likeliest
    top_k: int = 0                      # among so many of the likeliest; 0: all
    top_p: float = 1.0                  # among the likeliest that have this share together
    min_p: float = 0.0                  # among those with this share of the likeliest's at least
    repetition_penalty: float = 1.0     # what a logit of an id already there is divided by

    def __post_init__(self) -> None:
        for name, value, accepted, is_right in (
                ("temperature", self.temperature, "0 or more", self.temperature >= 0),
                ("top_k", self.top_k, "0 or more", self.top_k >= 0),
                ("top_p", self.top_p, "above 0, at most 1", 0 < self.top_p <= 1),
                ("min_p", self.min_p, "from 0 to 1", 0 <= self.min_p <= 1),
                ("repetition_penalty", self.repetition_penalty, "above 0",
                 self.repetition_penalty > 0)):
            if not is_right:
                raise ConfigError(f"{name} {value}: must be {accepted}")


GREEDY = Choice(temperature=0)


def draw(logits: Array, keys: Array, choice: Choice) -> Array:
    """One id for each row of logits [B, V], with each row's own key."""
    if choice.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / choice.temperature
    if 0 < choice.top_k < logits.shape[-1]:
        least = lax.top_k(logits, choice.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if choice.top_p < 1:
        ranked = jnp.sort(logits, descending=True)
        share = jax.nn.softmax(ranked, -1)
        # An id stays if those before it have less than top_p: the likeliest always stays.
        stay = jnp.cumsum(share, -1) - share < choice.top_p
        least = jnp.min(jnp.where(stay, ranked, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if choice.min_p > 0:
        least = logits.max(-1, keepdims=True) + jnp.log(choice.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def penalised(logits: Array, seen: Array, penalty: float) -> Array:
    """Logits [B, V] with those of ids that are `seen` [B, V] already made less likely."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def ids_seen(tokens: Array, start: Array, vocab_size: int) -> Array:
    """Which ids [B, V] stand in rows [B, P] from their start on."""
    real = jnp.arange(tokens.shape[1]) >= start[:, None]
    rows = jnp.arange(len(tokens))[:, None]
    return jnp.zeros((len(tokens), vocab_size), bool).at[rows, tokens].max(real)


def add_choice(state: dict[str, Any], logits: Array, choice: Choice) -> dict[str, Any]:
    """The state with one more id for each row, chosen by these logits. Ids of rows that have ended
    are what they are: nobody reads them."""
    at, scores = state["at"], logits
    if "seen" in state:
        scores = penalised(scores, state["seen"], choice.repetition_penalty)
    keys = jax.vmap(lambda seed: functools.reduce(
        jax.random.fold_in, (seed[1], seed[2], at), jax.random.key(seed[0])))(state["seeds"])
    ids = draw(scores, keys, choice)
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1)
    new = {"ids": lax.dynamic_update_slice_in_dim(state["ids"], ids[:, None], at, 1),
           "logprobs": lax.dynamic_update_slice_in_dim(state["logprobs"], found, at, 1),
           "at": at + 1, "ended": state["ended"] | (ids[:, None] == state["ends"]).any(-1)}
    if "seen" in state:
        new["seen"] = state["seen"] | (jnp.arange(logits.shape[1]) == ids[:, None])
    return state | new


def of_all(x: Array) -> Array:
    """Whether any device has a True."""
    x, axes = x.any(), tuple(sorted(varying(x)))
    return lax.pmax(x.astype(jnp.int32), axes) > 0 if axes else x


def choose_on(next_logits: Callable, state: dict[str, Any], limit: Array, choice: Choice
              ) -> dict[str, Any]:
    """The state after so many ids in all, or when all rows have ended."""
    def turn(carry):
        state, _ = carry
        last = lax.dynamic_slice_in_dim(state["ids"], state["at"] - 1, 1, 1)
        logits, cache = next_logits(last, state["cache"], state["slot"] + state["at"] - 1)
        state = add_choice(state | {"cache": cache}, logits, choice)
        return state, of_all(~state["ended"])

    return lax.while_loop(lambda carry: carry[1] & (carry[0]["at"] < limit), turn,
                          (state, of_all(~state["ended"])))[0]


# -------------------------------------------------------------------------------------------
# Beams: the likeliest that go on, and apart from them the best that have ended

NONE = -1e9         # the score of a beam that is not there


def _begin_beams(logits, beams, tokens):
    """The beams of each prompt before their first ids. All are equal, so only one counts."""
    B = len(logits)
    ids, none = jnp.zeros((B, beams, tokens), jnp.int32), jnp.full((B, beams), NONE)
    state = {"ids": ids, "scores": none.at[:, 0].set(0.0), "found": ids, "found_scores": none,
             "lengths": ids[:, :, 0], "full": none > 0, "improves": ids[:, 0, 0] == 0}
    return {**mark_varying(state, logits), "at": jnp.int32(0)}


def search_on(next_logits: Callable, cache: Any, logits: Array, slot: Array, ends: Array,
              beams: int, tokens: int, limit: Array, length_penalty: float,
              early_stop: bool | str) -> dict[str, Any]:
    """Beam search from the cache and the logits [B, V] after each prompt, of at most `limit` ids. A
    beam's score is the sum of its log-probabilities over its length to the power of
    length_penalty. early_stop: True ends when there are as many as asked for, False when by their
    present length those that go on cannot become better, "never" when by no length they can."""
    def pick(tree, which):          # of arrays [B, K, ...] those that `which` [B, k] names
        return jax.tree.map(lambda a: jnp.take_along_axis(
            a, which.reshape(*which.shape, *(1,) * (a.ndim - 2)), 1), tree)

    def turn(carry):
        state, cache, logits, _ = carry
        (B, K), V, at = state["scores"].shape, logits.shape[-1], state["at"]
        each = jax.nn.log_softmax(logits).reshape(B, -1, V) + state["scores"][..., None]
        count = min(max(2, 1 + len(ends)) * K, K * V)
        scores, best = lax.top_k(each.reshape(B, -1), count)
        parent, new = best // V, (best % V).astype(jnp.int32)
        ids = lax.dynamic_update_slice_in_dim(pick(state["ids"], parent), new[..., None], at, 2)
        ends_here = (new[..., None] == ends).any(-1)
        stops = ends_here | (at + 1 >= limit)
        # Those that go on.
        scores_on, on = lax.top_k(scores + jnp.where(stops, NONE, 0.0), K)
        parent, going = pick(parent, on), pick(ids, on)
        # Those that have ended: the best of these and of those before.
        may = stops & (jnp.arange(count) < K) & state["improves"][:, None]
        if early_stop is True:
            may &= ~state["full"].all(-1, keepdims=True)
        ended = jnp.where(may, scores / (at + 1.0) ** length_penalty, NONE)
        found_scores, which = lax.top_k(jnp.concatenate([state["found_scores"], ended], 1), K)
        found, lengths, full = pick(tuple(
            jnp.concatenate(pair, 1) for pair in (
                (state["found"], ids),
                (state["lengths"], jnp.where(ends_here, at, at + 1)),
                (state["full"], stops & (jnp.arange(count) < K)))), which)
        longest = limit if early_stop == "never" and length_penalty > 0 else at + 1
        possible = scores_on[:, 0] / (longest * 1.0) ** length_penalty
        worst = jnp.where(full.all(-1), found_scores.min(-1), NONE)
        improves = state["improves"] & (possible > worst)
        state = {"ids": going, "scores": scores_on, "found": found, "found_scores": found_scores,
                 "lengths": lengths, "full": full, "improves": improves, "at": at + 1}
        rows = (jnp.arange(B)[:, None] * K + parent).reshape(-1)
        cache = [{name: a if name.startswith("cross") else a[rows] for name, a in layer.items()}
                 for layer in cache]
        logits, cache = next_logits(going[:, :, at].reshape(-1, 1), cache, slot + at)
        goes_on = improves & ~(full.all(-1) & (early_stop is True))
        return state, cache, logits, of_all(goes_on) & (at + 1 < limit)

    state = _begin_beams(logits, beams, tokens)
    cache = jax.tree.map(lambda a: jnp.repeat(a, beams, 0), cache)
    return lax.while_loop(lambda carry: carry[3], turn, (
        state, cache, jnp.repeat(logits, beams, 0), of_all(state["improves"])))[0]
