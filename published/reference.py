"""Check that the code in model.py still computes a LLaMA, a Mistral or a Mixtral.

You can edit model.py without changing any option or weight, for example by swapping the activation.
The edited code would then export a LLaMA that computes something else, and load a published LLaMA
as a different model. So before an export or a load, we compare three things: the weights, the
attention that the code requests over the whole context, and a small model's logits for a few
tokens. The small model has the same options. The reference is the general network, configured by
the config.json, with the plain attention formula instead of shard.py's attention.
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

TOKENS, LAYERS = 64, 2      # we miss an edit outside attention that only matters beyond these


def code_difference(network: Any, c: Any) -> str:
    """Describe how a network's code differs from the published model named in its config; '' if it
    doesn't. We only check the plain decoder, so other networks always get ''."""
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
            return f"{path} has the shape {list(row.shape)}, not {list(want)}"
    if there:
        return f"it lacks the weight {min(there)}"
    try:
        return _other_attention(network, c) or _other_logits(network, c, general, same)
    except (TypeError, ValueError) as e:
        return f"it does not run on a few tokens at small sizes ({one_line(e)})"


def _other_attention(network, c):
    """Describe how the requested attention differs from plain causal attention over the whole
    context; '' if it doesn't. We only trace the code, because a window may exceed TOKENS."""
    time = c.seq_len - (c.seq_len > 1 and c.seq_len % 2 == 0)   # odd: a single block traces fast
    ids, calls = jax.ShapeDtypeStruct((1, time), np.int32), set()
    with within(calls=calls.add):
        jax.eval_shape(lambda params, ids: network.forward(params, ids, c),
                       network.weight_shapes(c), ids)
    if not calls:
        return "its attention does not call attend"
    for a in sorted(calls, key=lambda a: (a.queries, a.keys, a.beyond)):
        if a.beyond or (a.queries, a.keys) != (time, time):
            return (f"its attention has {a.beyond or 'parts'}, from {a.queries:,} tokens to "
                    f"{a.keys:,}, in a row of {time:,}")
    return ""


def _small(c):
    """Return the config of a small model with the same options."""
    kv_heads, head_dim = min(c.kv_heads, 2), min(c.head_dim, 16)
    heads = kv_heads * c.heads // c.kv_heads
    width = heads * head_dim if c.d_model == c.heads * c.head_dim else 64
    return dataclasses.replace(
        c, layers=min(c.layers, LAYERS), d_model=width, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, d_ff=96, vocab_size=128)


def _other_logits(network, c, general, same):
    """Describe how much the logits differ for random weights; '' if they don't. A weight with no
    array in a folder is zeros, just as when we read the folder."""
    c, same = _small(c), _small(same)
    keys, ids = iter(jax.random.split(jax.random.key(0), 99)), np.arange(TOKENS)[None] * 37 % 128
    ids = ids[:, :c.seq_len]

    def random(w):      # randomize norms too: all ones would hide an unused norm
        return jax.random.uniform(next(keys), w.shape) + 0.5 if w.scale is None else (
            w.scale * jax.random.normal(next(keys), w.shape))

    params = jax.tree.map(random, general.table(same))
    paths, rows, structure = flatten(network.table(c))
    placed = by_path(params)
    own = structure.unflatten([placed.get(path, jnp.zeros(row.shape))
                               for path, row in zip(paths, rows)])
    with jax.default_matmul_precision("highest"):       # otherwise GPUs and TPUs round to 1e-3
        want = jax.jit(lambda w: general.forward(w, ids, same, attend=plain_attention))(params)
        got = jax.jit(lambda w: network.forward(w, ids, c))(own)
    error = float(jnp.abs(got - want).max() / jnp.abs(want).max())
    lost = [path for path in paths if path not in placed]
    zeros = f"; no array of the folder fills its {', '.join(lost)} (zeros)" if lost else ""
    # Rounding alone gives 1e-6; computing half of a model in bfloat16 gives 1e-2.
    return "" if error < 1e-3 else f"its logits differ by {error:.1%} of the largest{zeros}"


def plain_attention(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    """Compute causal softmax attention by its formula: q [B, T, H, N], k and v [B, T, K, N]."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bthn,bshn->bhts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tri(q.shape[1], dtype=bool)
    return jnp.einsum("bhts,bshn->bthn", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
