"""Generation.

    prompts, any lengths -> padded on the left -> one pass fills the cache -> a scan, id by id

    . . t h e |        slots before a row's start are padding: never seen, no position
    o n c e   |
              ^ all rows choose their first new id at the same slot

On a mesh this is one shard_map, as a training step is: the model's functions are the same, and for
one token at a time, which has no time to split, `shard.row` is an all-reduce.

    python sample.py --run out --prompt "def main("
"""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import data
import families
import model
import shard
from zigzag import stems
from zigzag.checkpoint import read_run, run_config
from zigzag.errors import ConfigError, check_at_least, one_line
from zigzag.families import start_id, token_ids
from zigzag.flags import from_flags, run_main
from zigzag.mesh import (
    batch_spec,
    cast,
    mark_alike,
    mesh_of,
    row_groups,
    simulate_devices,
    spec_axes,
    varying,
    without_axis,
)
from zigzag.plan import resolve_dtype
from zigzag.tokenizers import published_tokenizer


def generate(params: Any, prompts: Sequence[Sequence[int]], config: model.Config,
             tokens: int = 128, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
             seed: int = 0, source: Any = None) -> list[list[int]]:
    """The `tokens` new ids of each prompt. Temperature 0 is greedy. top_k keeps that many of the
    likeliest ids (0: all), top_p the likeliest that together have that share. An encoder-decoder
    is given a source for each prompt, a list of ids or what a stem reads, and goes on from
    [[zigzag.families.start_id(config)]]."""
    padded, start = _pad(prompts, config)
    source = _encoder_batch(source, config, len(padded))
    with _mesh_of_weights(params):
        new = generate_ids(params, padded, start, config, tokens, temperature, top_k, top_p, seed,
                           source)
    return np.asarray(new).tolist()


def beam_search(params: Any, prompts: Sequence[Sequence[int]], config: model.Config,
                beams: int = 4, tokens: int = 128, eos: int | None = None, source: Any = None
                ) -> list[list[tuple[list[int], float]]]:
    """For each prompt the `beams` likeliest continuations found, as (ids, sum of log
    probabilities), best first. A continuation ends where its id is `eos`."""
    padded, start = _pad(prompts, config)
    source = _encoder_batch(source, config, len(padded))
    with _mesh_of_weights(params):
        ids, parents, scores = map(np.asarray, _beams(
            params, padded, start, config, beams, tokens, -1 if eos is None else eos, source))
    return [_follow(*beams_of_prompt, eos) for beams_of_prompt in zip(ids, parents, scores)]


def _follow(ids, parents, scores, eos):
    """The beams of one prompt, from ids and parents [tokens, beams]: each back to its start."""
    best = []
    for k in np.argsort(-scores, kind="stable"):
        path, at = [], k
        for new, parent in zip(ids[::-1], parents[::-1]):
            path.insert(0, int(new[at]))
            at = parent[at]
        best.append((until([eos], path), float(scores[k])))
    return best


def until(ends: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """The ids before the first end."""
    return ids[:next((at for at, i in enumerate(ids) if i in ends), len(ids))]


def _pad(prompts, config, what="prompt"):
    """Prompts as [B, P], padded on the left, and where each begins. (Sources on the right.)"""
    if not len(prompts) or not all(map(len, prompts)):
        raise ConfigError(f"a {what} is empty: generation needs at least one id to begin with")
    longest = max(map(len, prompts))
    padded = np.zeros((len(prompts), longest), np.int32)
    for row, p in enumerate(prompts):
        if wrong := [i for i in p if not 0 <= i < config.vocab_size]:
            raise ConfigError(f"{what} {row} has the id {wrong[0]}; the model knows 0 to "
                              f"{config.vocab_size - 1}")
        begin = longest - len(p) if what == "prompt" else 0
        padded[row, begin:begin + len(p)] = p
    return padded, np.array([longest - len(p) for p in prompts], np.int32)


def _encoder_batch(source, config, rows):
    """What an encoder is given of these sources; nothing, where there is no encoder."""
    if (source is None) == (config.encoder_layers > 0):
        raise ConfigError("this model has an encoder: give it a source" if source is None else
                          "this model has no encoder to give a source to")
    if source is None:
        return {}
    if len(source) != rows:
        raise ConfigError(f"{rows} prompts and {len(source)} sources: expected one for each")
    if config.stem == "tokens":
        padded, missing = _pad(source, config, "source")
        mask = np.arange(padded.shape[1]) < padded.shape[1] - missing[:, None]
        return {"source": padded, "source_mask": mask.astype(np.float32)}
    shape, array = stems.source_shape(config, rows), np.asarray(source, np.float32)
    if array.shape != shape:
        raise ConfigError(f"sources have the shape {list(array.shape)}; expected {list(shape)}")
    return {"source": array}


def _mesh_of_weights(params):
    """The mesh that the weights lie on, as jax's ambient one."""
    mesh = mesh_of(params)
    return jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()


# -------------------------------------------------------------------------------------------
# On a mesh

@functools.cache
def _decoding_specs(config, mesh):
    """How decoding splits the weights: as training does, but each device has all layers."""
    return without_axis(families.network_of(config).weight_specs(config, mesh), "pipe")


def _on_mesh(decode, params, config, *rows):
    """decode(params, specs, *rows) on the ambient mesh, if there is one: rows [B, ...] and results
    are split over groups of devices where B divides, else every group has them all."""
    mesh = jax.sharding.get_abstract_mesh()
    params = cast(params, config.dtype)
    if mesh.empty:
        return decode(params, None, *rows)
    specs = _decoding_specs(config, mesh)
    split = batch_spec(mesh) if len(rows[0]) % row_groups(mesh) == 0 else P()

    def local(params, *rows):
        rows = mark_alike(rows, rows, params)
        params = _gather_all_but_layers(params, specs)

        def same(x):        # equal copies, as the one value that they are
            axes = tuple(sorted(varying(x) - spec_axes(split)))
            return lax.pmax(x, axes) if axes else x

        return jax.tree.map(same, decode(params, specs, *rows))

    return jax.shard_map(local, in_specs=(specs, *[split] * len(rows)), out_specs=split)(
        params, *rows)


def _gather_all_but_layers(params, specs):
    """Whole weights over fsdp, but for those of layers, which are gathered one after the other."""
    return {name: w if name.endswith("layers") else _gather_all_but_layers(w, specs[name])
            if isinstance(w, dict) else shard.gather(w, specs[name]) for name, w in params.items()}


def _prefill(params, specs, padded, start, config, tokens, source):
    """The logits after the prompts [B, P], and the cache with room for so many more tokens."""
    slots = padded.shape[1] + tokens
    cache = model.new_cache(params, config, len(padded), slots, specs, source)
    return model.extend(params, cache, padded, 0, start, config, specs)


@jax.jit(static_argnames=("config", "tokens", "temperature", "top_k", "top_p"))
def generate_ids(params: Any, padded: Array, start: Array, config: model.Config,
                 tokens: int, temperature: float, top_k: int, top_p: float, seed: int,
                 source: dict[str, Array] = {}) -> Array:
    """Prompts [B, P] as arrays, with what their encoder is given -> new ids [B, tokens]."""
    def decode(params, specs, padded, start, row, source):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), row)

        def turn(carry, t):
            logits, cache = carry
            now = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
            ids = _draw(logits, now, temperature, top_k, top_p)
            return model.extend(params, cache, ids[:, None], padded.shape[1] + t, start, config,
                                specs), ids

        # The last turn's logits go unused: one pass too many, and no special case.
        first = _prefill(params, specs, padded, start, config, tokens, source)
        return lax.scan(turn, first, jnp.arange(tokens))[1].T

    return _on_mesh(decode, params, config, padded, start, jnp.arange(padded.shape[0]), source)


def _draw(logits, keys, temperature, top_k, top_p):
    """One id for each row of logits [B, V], with each row's own key."""
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / temperature
    if top_k and top_k < logits.shape[-1]:
        least = lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p < 1:
        ranked = jnp.sort(logits, descending=True)
        share = jax.nn.softmax(ranked, -1)
        # An id stays if those before it have less than top_p: the likeliest always stays.
        stay = jnp.cumsum(share, -1) - share < top_p
        least = jnp.min(jnp.where(stay, ranked, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


@jax.jit(static_argnames=("config", "beams", "tokens"))
def _beams(params, padded, start, config, beams, tokens, eos, source):
    """ids and parents [B, tokens, beams], scores [B, beams]."""
    def decode(params, specs, padded, start, source):
        B, length = padded.shape
        logits, cache = _prefill(params, specs, padded, start, config, tokens, source)
        cache = jax.tree.map(lambda c: jnp.repeat(c, beams, axis=1), cache)
        logits = jnp.repeat(logits, beams, axis=0)
        # All beams of a row begin equal, so all but the first begin with no chance.
        scores = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf) + 0 * logits[::beams, :1]

        def turn(carry, t):
            logits, cache, scores, ended = carry
            V = logits.shape[-1]
            each = jax.nn.log_softmax(logits).reshape(B, beams, V)
            # What has ended repeats eos, at no cost.
            each = jnp.where(ended[..., None], jnp.where(jnp.arange(V) == eos, 0.0, -jnp.inf), each)
            scores, best = lax.top_k((scores[..., None] + each).reshape(B, -1), beams)
            parent, ids = best // V, (best % V).astype(jnp.int32)
            ended = jnp.take_along_axis(ended, parent, 1) | (ids == eos)
            rows = (jnp.arange(B)[:, None] * beams + parent).reshape(-1)
            cache = jax.tree.map(lambda c: c[:, rows], cache)
            logits, cache = model.extend(params, cache, ids.reshape(-1, 1), length + t,
                                         jnp.repeat(start, beams), config, specs)
            return (logits, cache, scores, ended), (ids, parent)

        carry = (logits, cache, scores, jnp.isnan(scores))      # none has ended
        (_, _, scores, _), (ids, parents) = lax.scan(turn, carry, jnp.arange(tokens))
        return ids.swapaxes(0, 1), parents.swapaxes(0, 1), scores

    return _on_mesh(decode, params, config, padded, start, source)


# -------------------------------------------------------------------------------------------
# The command line

@dataclasses.dataclass(frozen=True)
class Config:
    """python sample.py --run DIR --prompt TEXT: let a trained model go on writing"""
    run: str = "out"            # the --out of a train.py
    model: str = ""             # or a Hugging Face folder with a published model
    prompt: str = ""            # text to go on from; empty: the beginning of a document. An
                                # encoder-decoder reads it
    source: str = ""            # or reads an array (sound) from this .npy file
    tokens: int = 256           # how many new ids
    temperature: float = 0.8    # 0: always the likeliest
    top_k: int = 0              # choose among this many of the likeliest; 0: all
    top_p: float = 1.0          # choose among the likeliest that have this share together
    beams: int = 0              # show that many of the likeliest continuations instead
    seed: int = 0               # of the choices
    shards: int = 1             # devices to split the model over, whatever it was trained on

    def __post_init__(self) -> None:
        check_at_least(self, tokens=1, temperature=0, top_k=0, beams=0, shards=1)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top_p {self.top_p}: must be above 0, at most 1")


def load_model(config: Config) -> tuple[Any, model.Config, data.Tokenizer]:
    """The weights, on a mesh, what they are, and their tokenizer."""
    if config.model:
        network, c = families.network_of_folder(config.model), families.hf_config(config.model)
        _check_writes(c, f"--model {config.model}")
        tokenizer, mesh = published_tokenizer(config.model, c.vocab_size), _mesh(config)
        dtype = resolve_dtype(c, mesh).dtype
        return *network.load_hf(config.model, mesh, dtype=dtype), tokenizer
    record = read_run(config.run, model.Config)
    _check_writes(run_config(config.run, model.Config), f"--run {config.run}")
    if "tokenizer" not in record:
        raise ConfigError(f"--run {config.run}: a run of another task, with no tokenizer to read "
                          f"or write text with")
    return *model.load_run(config.run, _mesh(config)), data.tokenizer_of(Path(config.run), record)


def _check_writes(c, what):
    """Refuse a model that writes no text."""
    if families.network_of(c) is not model.TRANSFORMER or c.head != "tokens" or not c.causal:
        gives = {"classes": "classes", "none": "vectors"}.get(c.head, "numbers for each token")
        raise ConfigError(f"{what}: this model gives {gives}, and writes no text")


def special_ids(c: model.Config, tokenizer: data.Tokenizer) -> tuple[int, int, int]:
    """The ids with which an encoder-decoder begins and ends what it writes, and of padding."""
    if not c.published:
        return tokenizer.ends[0], tokenizer.ends[0], 0
    ids = token_ids(c)
    end = ids.get("eos_token_id")
    return start_id(c), tokenizer.ends[0] if end is None else end, ids.get("pad_token_id") or 0


def _mesh(config):
    simulate_devices(config.shards)
    return shard.make_mesh(tensor=config.shards)


def main(argv: Sequence[str] | None = None) -> None:
    config = from_flags(Config(), argv)
    params, c, tokenizer = load_model(config)
    ends, begin, source = tokenizer.ends, config.prompt, None
    try:
        if c.encoder_layers:
            start, *ends, _ = special_ids(c, tokenizer)
            prompt, begin, source = [start], "", [_source_of(config, c, tokenizer)]
        else:
            prompt = tokenizer.prompt(config.prompt)
    except UnicodeEncodeError as e:
        raise ConfigError(f"--prompt cannot be encoded: {e.reason} at character {e.start}; "
                          f"expected text in UTF-8") from None

    def text(ids):      # (some tokenizers drop a space where a text begins)
        return begin + tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)):]

    if config.beams:
        for ids, score in beam_search(params, [prompt], c, config.beams, config.tokens,
                                      ends[0], source)[0]:
            print(f"{score:9.3f}  {text(ids)}")
        return
    ids = generate(params, [prompt], c, config.tokens, config.temperature, config.top_k,
                   config.top_p, config.seed, source)[0]
    print(text(until(ends, ids)))


def _source_of(config, c, tokenizer):
    """What an encoder is given: the prompt, or the numbers of a file."""
    if c.stem == "tokens":
        return tokenizer.with_ends(config.prompt)
    try:
        return np.asarray(np.load(config.source, allow_pickle=False), np.float32)
    except (OSError, ValueError, TypeError, EOFError) as e:
        raise ConfigError(f"--source {config.source!r}: expected a .npy file with an array of "
                          f"{list(stems.source_shape(c, 1)[1:])} ({one_line(e)})") from None


if __name__ == "__main__":
    run_main(main)
