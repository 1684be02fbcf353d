"""Whether the code of model.py still computes a LLaMA, a Mistral or a Mixtral.

An edit of model.py may change no option or weight: a different activation, for example. Then an
export would be a LLaMA that computes something else, and a published LLaMA would load as a
different model. So both first compare the code's weights, the attention that it asks for over the
whole context, and the logits of a few tokens from a small model with the same options. The
reference is the general network, configured by the config.json, with the plain attention formula in
place of shard.py's attention.
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from published.llama import PLAIN, families_of, fields_of
from published.record import as_config
from zigzag.core.errors import one_line
from zigzag.core.mesh import by_path, flatten, within
from zigzag.parallel.network import NETWORKS, model_type

TOKENS, LAYERS = 64, 2      # this misses an edit outside of attention that matters only beyond
                            # these


def code_difference(network: Any, c: Any) -> str:
    """How the code of a network differs from the published model that its configuration names; ''
    if it computes the same. This compares only the plain decoder, and returns '' for others."""
    kind = model_type(c.published)
    if families_of(network).get(kind) is not PLAIN.get(kind, network):
        return ""
    return _difference(network, dataclasses.replace(c, dtype="float32", remat="none"))


@functools.cache        # a session may read many folders
def _difference(network, c):
    general = NETWORKS["transformer"]
    fields = {**fields_of(json.loads(c.published)), "tied": c.tied, "seq_len": c.seq_len}
    same = as_config(general.config, "config.json", {**fields, "dtype": "float32"})
    there = by_path(general.table(same))
    for path, row in by_path(network.table(c)).items():
        if path in there and row.shape != (want := there.pop(path).shape):
            return f"{path} has the shape {list(row.shape)}, there {list(want)}"
    if there:
        return f"it lacks the weight {min(there)}"
    try:
        return _other_attention(network, c) or _other_logits(network, c, general, same)
    except (TypeError, ValueError) as e:
        return f"it cannot be computed for a few tokens and small sizes ({one_line(e)})"


def _other_attention(network, c):
    """How the attention that the code asks for differs from plain causal attention to all tokens of
    the context; '' if it does not. This only traces, as a window may be longer than TOKENS."""
    time = c.seq_len - (c.seq_len > 1 and c.seq_len % 2 == 0)   # odd: one block, traced quickly
    ids, calls = jax.ShapeDtypeStruct((1, time), np.int32), set()
    with within(calls=calls.add):
        jax.eval_shape(lambda params, ids: network.forward(params, ids, c),
                       network.weight_shapes(c), ids)
    if not calls:
        return "its attention does not call attend, which would say what it sees"
    for a in sorted(calls, key=lambda a: (a.queries, a.keys, a.beyond)):
        if a.beyond or (a.queries, a.keys) != (time, time):
            return (f"its attention has {a.beyond or 'parts'}, of {a.queries:,} tokens to "
                    f"{a.keys:,}, in a row of {time:,}")
    return ""


def _small(c):
    """The configuration of a small model with the same options."""
    kv_heads, head_dim = min(c.kv_heads, 2), min(c.head_dim, 16)
    heads = kv_heads * c.heads // c.kv_heads
    width = heads * head_dim if c.d_model == c.heads * c.head_dim else 64
    return dataclasses.replace(
        c, layers=min(c.layers, LAYERS), d_model=width, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, d_ff=96, vocab_size=128)


def _other_logits(network, c, general, same):
    """How much the logits differ for random weights; '' if they do not. Weights that no array of a
    folder fills are zeros, as when reading it."""
    c, same = _small(c), _small(same)
    keys, ids = iter(jax.random.split(jax.random.key(0), 99)), np.arange(TOKENS)[None] * 37 % 128
    ids = ids[:, :c.seq_len]

    def random(w):      # norms as well: all ones would hide an unused norm
        return jax.random.uniform(next(keys), w.shape) + 0.5 if w.scale is None else (
            w.scale * jax.random.normal(next(keys), w.shape))

    params = jax.tree.map(random, general.table(same))
    paths, rows, structure = flatten(network.table(c))
    placed = by_path(params)
    own = structure.unflatten([placed.get(path, jnp.zeros(row.shape))
                               for path, row in zip(paths, rows)])
    with jax.default_matmul_precision("highest"):       # else a GPU or a TPU rounds to 1e-3
        want = jax.jit(lambda w: general.forward(w, ids, same, attend=plain_attention))(params)
        got = jax.jit(lambda w: network.forward(w, ids, c))(own)
    error = float(jnp.abs(got - want).max() / jnp.abs(want).max())
    lost = [path for path in paths if path not in placed]
    zeros = f"; no array of the folder fills its {', '.join(lost)} (zeros)" if lost else ""
    # Rounding gives 1e-6; computing half of a model in bfloat16 gives 1e-2.
    return "" if error < 1e-3 else f"its logits differ by {error:.1%} of the largest{zeros}"


def plain_attention(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    """Causal softmax attention, as its formula: q [B, T, H, N], k and v [B, T, K, N]."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bthn,bshn->bhts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tri(q.shape[1], dtype=bool)
    return jnp.einsum("bhts,bshn->bthn", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
