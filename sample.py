"""Generation.

    prompts, any lengths -> padded on the left -> one pass fills the cache -> a scan, id by id

    . . t h e |        slots before a row's start are padding: never seen, no position
    o n c e   |
              ^ all rows say their first new id at the same slot

    python sample.py --run out --prompt "def main("
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import data
import model
import shard
from shard import Refused


def generate(params: Any, prompts: Sequence[Sequence[int]], config: model.Config,
             tokens: int = 128, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
             seed: int = 0, source: Any = None) -> list[list[int]]:
    """The `tokens` new ids of each prompt. Temperature 0 is greedy. top_k keeps that many of the
    likeliest ids (0: all), top_p the likeliest that together have that share."""
    padded, start = _pad(prompts, config, source)
    with _on(params):
        new = _generate(params, padded, start, config, tokens, temperature, top_k, top_p, seed)
    return np.asarray(new).tolist()


def beam_search(params: Any, prompts: Sequence[Sequence[int]], config: model.Config,
                beams: int = 4, tokens: int = 128, eos: int | None = None, source: Any = None
                ) -> list[list[tuple[list[int], float]]]:
    """For each prompt the `beams` likeliest continuations found, as (ids, sum of log
    probabilities), best first. A continuation that says `eos` ends there."""
    padded, start = _pad(prompts, config, source)
    with _on(params):
        ids, parents, scores = map(np.asarray, _beams(params, padded, start, config, beams,
                                                      tokens, -1 if eos is None else eos))
    found = []
    for b in range(len(prompts)):
        best = []
        for k in np.argsort(-scores[b], kind="stable"):
            said, at = [], k
            for t in reversed(range(tokens)):                # follow the beam back to its start
                said.append(int(ids[t, b, at]))
                at = parents[t, b, at]
            said.reverse()
            best.append((said[:said.index(eos)] if eos in said else said, float(scores[b, k])))
        found.append(best)
    return found


def _pad(prompts: Sequence[Sequence[int]], config: model.Config, source: Any
         ) -> tuple[np.ndarray, np.ndarray]:
    if source is not None:
        raise Refused("this model has no encoder to give a source to")
    if not len(prompts) or not all(len(p) for p in prompts):
        raise Refused("a prompt is empty: generation needs at least one id to begin with")
    longest = max(map(len, prompts))
    padded = np.zeros((len(prompts), longest), np.int32)
    for row, p in enumerate(prompts):
        if min(p) < 0 or max(p) >= config.vocab_size:
            raise Refused(f"prompt {row} has the id {min(p) if min(p) < 0 else max(p)}; the "
                          f"model knows 0 to {config.vocab_size - 1}")
        padded[row, longest - len(p):] = p
    return padded, np.array([longest - len(p) for p in prompts], np.int32)


def _on(params: Any) -> Any:
    """The mesh that the weights lie on, as jax's ambient one."""
    mesh = shard.mesh_of(params)
    return jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()


def _first(params, padded, start, config, tokens):
    """The weights in the compute precision, the prompt's last logits, and the filled cache."""
    params = shard.cast(params, config.dtype)
    B, P = padded.shape
    cache = model.new_cache(config, B, P + tokens, params["embed"].dtype)
    return (params, *model.extend(params, cache, padded, 0, start, config))


@functools.partial(jax.jit, static_argnames=("config", "tokens", "temperature", "top_k", "top_p"))
def _generate(params, padded, start, config, tokens, temperature, top_k, top_p, seed):
    """Prompts [B, P] as arrays -> new ids [B, tokens]."""
    params, logits, cache = _first(params, padded, start, config, tokens)
    B, P = padded.shape
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(B))

    def turn(carry, t):
        logits, cache = carry
        said = _draw(logits, jax.vmap(lambda k: jax.random.fold_in(k, t))(keys), temperature,
                     top_k, top_p)
        logits, cache = model.extend(params, cache, said[:, None], P + t, start, config)
        return (logits, cache), said

    # The last turn's logits go unused; that is one pass too many, and no special case.
    _, said = jax.lax.scan(turn, (logits, cache), jnp.arange(tokens))
    return said.T


def _draw(logits, keys, temperature, top_k, top_p):
    """One id for each row of logits [B, V], with each row's own key."""
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / temperature
    if top_k and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p < 1:
        ranked = jnp.flip(jnp.sort(logits, -1), -1)
        share = jax.nn.softmax(ranked, -1)
        # An id stays if those before it have less than top_p: the likeliest always stays.
        stay = jnp.cumsum(share, -1) - share < top_p
        least = jnp.min(jnp.where(stay, ranked, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("config", "beams", "tokens"))
def _beams(params, padded, start, config, beams, tokens, eos):
    """ids and parents [tokens, B, beams], scores [B, beams]."""
    params, logits, cache = _first(params, padded, start, config, tokens)
    B, P = padded.shape
    cache = jax.tree.map(lambda c: jnp.repeat(c, beams, axis=1), cache)
    logits = jnp.repeat(logits, beams, axis=0)
    # All beams of a row begin equal, so all but the first begin with no chance.
    scores = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf) * jnp.ones((B, 1))

    def turn(carry, t):
        logits, cache, scores, ended = carry
        V = logits.shape[-1]
        each = jax.nn.log_softmax(logits).reshape(B, beams, V)
        # What has ended goes on saying eos, for nothing.
        each = jnp.where(ended[..., None], jnp.where(jnp.arange(V) == eos, 0.0, -jnp.inf), each)
        scores, best = jax.lax.top_k((scores[..., None] + each).reshape(B, -1), beams)
        parent, said = best // V, (best % V).astype(jnp.int32)
        ended = jnp.take_along_axis(ended, parent, 1) | (said == eos)
        rows = (jnp.arange(B)[:, None] * beams + parent).reshape(-1)
        cache = jax.tree.map(lambda c: c[:, rows], cache)
        logits, cache = model.extend(params, cache, said.reshape(-1, 1), P + t,
                                     jnp.repeat(start, beams), config)
        return (logits, cache, scores, ended), (said, parent)

    carry = (logits, cache, scores, jnp.zeros((B, beams), bool))
    (_, _, scores, _), (ids, parents) = jax.lax.scan(turn, carry, jnp.arange(tokens))
    return ids, parents, scores


# -------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config:
    """python sample.py --run DIR --prompt TEXT: let a trained model go on writing"""
    run: str = "out"            # the --out of a train.py
    model: str = ""             # or a folder with a published model
    prompt: str = ""            # text to go on from; empty: the beginning of a document
    tokens: int = 256           # how many new ids
    temperature: float = 0.8    # 0: always the likeliest
    top_k: int = 0              # choose among this many of the likeliest; 0: all
    top_p: float = 1.0          # choose among the likeliest that have this share together
    beams: int = 0              # show that many of the likeliest continuations instead
    seed: int = 0               # of the choices
    shards: int = 1             # devices to split the model over, whatever it was trained on

    def __post_init__(self) -> None:
        for name, ok, want in (("tokens", self.tokens >= 1, "at least 1"),
                               ("temperature", self.temperature >= 0, "0 or more"),
                               ("top_k", self.top_k >= 0, "0 or more"),
                               ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
                               ("beams", self.beams >= 0, "0 or more"),
                               ("shards", self.shards >= 1, "at least 1")):
            if not ok:
                raise Refused(f"--{name} {getattr(self, name)}: must be {want}")


def main(argv: Sequence[str] | None = None) -> None:
    import train
    config = train.flags(Config(), argv)
    if config.model:
        model.load_hf(config.model)
    record = model.read_run(config.run)
    if "tokenizer" not in record:
        raise Refused(f"--run {config.run}: a run of another task, with no tokenizer to read or "
                      f"write text with")
    mesh = train.machine({"tensor": config.shards})
    params, c = model.load_run(config.run, mesh)
    train.check_model(c, mesh)
    tokenizer = data.tokenizer_of(Path(config.run), record)
    try:
        prompt = [tokenizer.separator, *map(int, tokenizer.encode(config.prompt))]
    except UnicodeEncodeError as e:
        raise Refused(f"--prompt cannot be encoded: {e.reason} at character {e.start}; expected "
                      f"text in UTF-8") from None
    if config.beams:
        for ids, score in beam_search(params, [prompt], c, config.beams, config.tokens,
                                      tokenizer.separator)[0]:
            print(f"{score:9.3f}  {config.prompt}{tokenizer.decode(ids)}")
        return
    ids = generate(params, [prompt], c, config.tokens, config.temperature, config.top_k,
                   config.top_p, config.seed)[0]
    if tokenizer.separator in ids:                  # the document ended
        ids = ids[:ids.index(tokenizer.separator)]
    print(config.prompt + tokenizer.decode(ids))


if __name__ == "__main__":
    import sample
    import train
    train.run(sample.main)
