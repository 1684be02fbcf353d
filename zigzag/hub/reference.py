"""The formulas of LLaMA and Mixtral as in transformers, in numpy, for a few tokens.

If model.py is edited without a change of its options or weights (another activation, say), an
export would be a LLaMA that computes something else, and a published LLaMA that is read would
become another model. So both compare first: which attention the code asks for, at the whole
context, and the logits of a few tokens. Before an export these are the model's own; before reading,
those of a small model with the same options, which takes a second at most.
"""

import dataclasses
import functools
from typing import Any, Callable

import jax
import numpy as np

from zigzag.core.errors import one_line
from zigzag.core.mesh import flatten
from zigzag.hub.published import published_arrays, whole
from zigzag.parallel.attention import Calls
from zigzag.weights.positions import rotary_rates

einsum = functools.partial(np.einsum, optimize=True)
TOKENS, LAYERS = 64, 4      # an edit that is not in attention, and matters only beyond these, is
                            # not found


def llama_difference(forward: Callable, params: Any, c: Any) -> str:
    """How a model differs from a LLaMA, or with experts a Mixtral, of the same weights and options;
    '' if it computes the same."""
    c = dataclasses.replace(c, dtype="float32")
    return (_other_shapes(params["layers"], c) or _other_attention(forward, params, c)
            or _other_logits(forward, params, c))


def code_difference(network: Any, kind: str, c: Any) -> str:
    """How the code of a network differs from LLaMA's (or from that of another model_type `kind`
    that is compared); '' if it computes the same. `c` is a configuration of the network."""
    return _of_code(network, kind, _small(c)) if network.families[kind].differs else ""


def _small(c):
    """The configuration of a small model with the same options."""
    kv_heads, head_dim = min(c.kv_heads, 2), min(c.head_dim, 16)
    heads = kv_heads * c.heads // c.kv_heads
    width = heads * head_dim if c.d_model == c.heads * c.head_dim else 64
    return dataclasses.replace(
        c, layers=min(c.layers, 2), d_model=width, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, d_ff=96, vocab_size=128, dtype="float32", remat="none", lora_rank=0,
        published="")


@functools.cache        # (a session may read many folders)
def _of_code(network, kind, c):
    family, table, rng = network.families[kind], network.table(c), np.random.default_rng(0)
    placed = {part.path for parts in published_arrays(family, c, table).values() for part in parts}

    def random(path, w):
        if path not in placed:          # (as it is read)
            return np.zeros(w.shape, np.float32)
        is_scale = w.scale is None      # (of a norm: all ones would hide that it is not used)
        x = rng.uniform(0.5, 1.5, w.shape) if is_scale else w.scale * rng.normal(size=w.shape)
        return x.astype(np.float32)

    paths, rows, structure = flatten(table)
    params = structure.unflatten(map(random, paths, rows))
    try:
        differs = family.differs(network.forward, params, c)
    except (TypeError, ValueError) as e:
        return f"it cannot be computed for a few tokens and small sizes ({one_line(e)})"
    lost = [path for path in paths if path not in placed]
    return differs + (f"; no array of the folder fills its {', '.join(lost)} (zeros)"
                      if differs and lost else "")


def _other_shapes(layers, c):
    """Which weight of the layers has not the shape that follows from the options; '' if all have.
    """
    D, H, K, N, F, E = c.d_model, c.heads, c.kv_heads, c.head_dim, c.d_ff, c.experts
    shapes = dict(attn_norm=(D,), wq=(D, H, N), wk=(D, K, N), wv=(D, K, N), wo=(H, N, D),
                  mlp_norm=(D,), w_gate=(D, F), w_up=(D, F), w_down=(F, D), router=(D, E),
                  e_gate=(E, D, F), e_up=(E, D, F), e_down=(E, F, D))
    for name, w in layers.items():
        if name in shapes and w.shape != (want := (c.layers, *shapes[name])):
            return f"layers.{name} has the shape {list(w.shape)}, there {list(want)}"
    return ""


def _other_attention(forward, params, c):
    """How the attention that the code asks for differs from plain causal attention to all tokens of
    the context; '' if it does not. (Traced, not computed: a window may be longer than TOKENS.)"""
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, np.float32), params)
    time = c.seq_len - (c.seq_len > 1 and c.seq_len % 2 == 0)   # (odd: one block, traced quickly)
    ids = jax.ShapeDtypeStruct((1, time), np.int32)
    calls = Calls()
    with calls.noted():
        jax.eval_shape(lambda params, ids: forward(params, ids, c), shapes, ids)
    if not calls.found:
        return "its attention does not call attend, which would say what it sees"
    for a in calls:
        if a.beyond:
            return f"its attention has {a.beyond}"
        if (a.queries, a.keys) != (time, time):
            return f"its attention is of {a.queries:,} tokens to {a.keys:,}, in a row of {time:,}"
    return ""


def _other_logits(forward, params, c):
    """By how much the logits differ, of a few tokens and through the first layers; '' if they do
    not."""
    c = dataclasses.replace(c, layers=min(c.layers, LAYERS))
    first = {**params, "layers": {name: w[:c.layers] for name, w in params["layers"].items()}}
    paths, weights, structure = flatten(first)
    first = structure.unflatten([whole(w) for w in weights])
    ids = np.random.default_rng(0).integers(0, c.vocab_size, min(TOKENS, c.seq_len))
    want, certain = llama_logits(first, c, ids)
    with jax.default_matmul_precision("highest"):       # (else a GPU or a TPU rounds to 1e-3)
        got = np.asarray(jax.jit(lambda params: forward(params, ids[None], c))(first))[0]
    if not np.isfinite(want).all():
        return ""               # (the weights are not finite either)
    errors = np.abs(got - want).max(-1) / max(np.abs(want).max(), np.finfo(np.float32).tiny)
    error = errors[:certain].max() if certain else np.median(errors)
    # (Rounding gives 1e-6; computing half of a model in bfloat16 1e-2.)
    return "" if error < 1e-3 else f"its logits differ by {error:.1%} of the largest"


@np.errstate(over="ignore")
def llama_logits(params: Any, c: Any, ids: np.ndarray) -> tuple[np.ndarray, int]:
    """(logits [T, V] of the next tokens, how many of them do not depend on rounding: those before
    the first token for which two experts have nearly equal shares)."""
    T, w = len(ids), params["layers"]
    angle = np.arange(T)[:, None, None] * rotary_rates(c.head_dim, c.rope_theta, c.rope_scaling)[0]
    sin, cos = np.sin(angle), np.cos(angle)
    sees = np.tri(T, dtype=bool)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * scale

    def rotate(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    certain = T
    x = params["embed"][ids] * (c.embed_scale or 1.0)
    for i in range(c.layers):
        h = norm(x, w["attn_norm"][i])
        q, k, v = (einsum("td,dhn->thn", h, w[name][i]) for name in ("wq", "wk", "wv"))
        k, v = (np.repeat(a, c.heads // c.kv_heads, 1) for a in (rotate(k), v))
        scores = einsum("thn,shn->hts", rotate(q), k) * c.head_dim**-0.5
        shares = _softmax(np.where(sees, scores, -np.inf))
        x = x + einsum("hts,shn,hnd->td", shares, v, w["wo"][i])
        h = norm(x, w["mlp_norm"][i])
        layer = {name: weight[i] for name, weight in w.items()}
        if c.experts:
            y, gap = _experts(layer, h, c)
            certain = min(certain, *np.flatnonzero((0 < gap) & (gap < 1e-4)), T)
        else:
            y = _swiglu(h, layer["w_gate"], layer["w_up"], layer["w_down"])
        x = x + y
    head = params["embed"].T if c.tied else params["head"]
    return (norm(x, params["norm"]) @ head)[:, :c.vocab_size], int(certain)


def _softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def _swiglu(h, gate, up, down):
    gate = h @ gate
    return (gate / (1 + np.exp(-gate)) * (h @ up)) @ down


def _experts(w, h, c):
    """The output of each token's best experts, weighted by shares that sum to 1; and the margin of
    the last chosen expert over the next."""
    shares, K = _softmax(h @ w["router"]), c.experts_per_token
    order = np.argsort(-shares, -1, kind="stable")
    best, others = np.take_along_axis(shares, order, -1), order[:, K:]
    gap = best[:, K - 1] - best[:, K] if K < c.experts else np.ones(len(h))
    np.put_along_axis(shares, others, 0, -1)
    shares /= shares.sum(-1, keepdims=True)
    return sum(shares[:, e, None] * _swiglu(h, w["e_gate"][e], w["e_up"][e], w["e_down"][e])
               for e in range(c.experts)), gap
