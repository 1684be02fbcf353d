"""Schedules of a pipeline: which microbatch each stage works on in each tick.

    gpipe, interleaved   one scan of ticks; autodiff turns it around for the backward pass
    1f1b                 a backward pass of its own, of each microbatch as soon as it can be

With k layers a chunk, chunk c of stage s of S begins at layer (c S + s) k. x [b, T, D] is one
microbatch's residual stream. What is sent between stages is passed in (`Links`, from
shard.py's pipe section); this file decides when.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from zigzag.mesh import ambient, mark_alike, mark_varying, varying, zeros_of
from zigzag.remat import POLICIES


class Links(NamedTuple):
    """The collectives over pipe."""
    send_next: Callable         # a tree to the next stage; from the last to the first
    send_back: Callable         # a tree to the stage before
    scatter_time: Callable      # x that one stage has (others: zeros): to each its part of the time
    my_time: Callable           # of a tree of [B, T, ...] the time that this stage has of that


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss with layers in the middle: embed, then every layer, then head."""
    embed: Callable         # params, batch -> x
    layers: Callable        # weights, x, indices, batch -> x, aux (None or a pair with a sum)
    head: Callable          # params, x, batch -> sum, count
    batch: Any              # a tree of [B, ...]
    indices: Array          # of all layers [L]
    links: Links
    stages: int
    microbatches: int


# -------------------------------------------------------------------------------------------
# The timetable

def ticks(stages: int, microbatches: int, schedule: str, chunks: int) -> tuple[int, int]:
    """How many ticks a pipeline takes, and how many chunks of layers a stage really has."""
    S, M = stages, microbatches
    if schedule == "1f1b":
        return M + 2 * S - 1, 1
    V = chunks if schedule == "interleaved" else 1
    return _last_tick(M - 1, S, V) + 1, V


def _last_tick(microbatch, S, V):
    """When the last stage finishes a microbatch. They go in groups of S: each of a group's V laps
    takes S ticks, and the last lap of number j of the group begins j ticks after the first's."""
    group, j = divmod(microbatch, S)
    return (S - 1) + group * S * V + (V - 1) * S + j


def work_at(t: Any, stage: Any, S: int, V: int) -> tuple[Any, Any]:
    """The microbatch and the chunk that a stage works on in tick t (out of range: none)."""
    turn = t - stage
    lap = S * V
    return turn // lap * S + turn % S, turn % lap // S


def work_1f1b(t: Any, stage: Any, S: int) -> tuple[Any, Any]:
    """In 1F1B the microbatch on its way forward, and the one on its way back."""
    return t - stage, t - (2 * S - 1 - stage)


def timeline(stages: int, microbatches: int, schedule: str = "gpipe", chunks: int = 1) -> str:
    """Which microbatch each stage has in each tick, for a person, and how much of it is idle."""
    S, M, (count, V) = stages, microbatches, ticks(stages, microbatches, schedule, chunks)

    def cell(stage, t):
        if schedule == "1f1b":
            work = zip(("", "'"), work_1f1b(t, stage, S))
        else:
            work = [("", work_at(t, stage, S, V)[0])]
        return " ".join(f"{m}{mark}" if 0 <= m < M else "." for mark, m in work)

    rows = [[cell(s, t) for t in range(count)] for s in range(S)]
    width = max(len(c) for row in rows for c in row)
    shown = max(1, 84 // (width + 1))
    more = "..." if count > shown else ""
    lines = [f"stage {s:<2} |" + "|".join(c.center(width) for c in row[:shown]) + "|" + more
             for s, row in enumerate(rows)]
    note = ("; x' is the backward pass of x (here a tick is a forward and a backward; in the other "
            "schedules, one of the two)" if schedule == "1f1b" else "")
    batches, parts = "microbatches" if M > 1 else "microbatch", "chunks" if V > 1 else "chunk"
    return "\n".join([*lines, f"{schedule}: {count} ticks for {M} {batches} of {V} {parts} a "
                              f"stage, {1 - M * V / count:.0%} of them idle{note}"])


# -------------------------------------------------------------------------------------------
# Small tools

def split_rows(tree: Any, count: int) -> Any:
    """Each [B, ...] as [count, B / count, ...]."""
    return jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), tree)


def pick(tree: Any, index: Any) -> Any:
    """Of each array the entry with this index, or the nearest that it has."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(
        a, jnp.clip(index, 0, a.shape[0] - 1), keepdims=False), tree)


def _in_float32(weights):
    """Weights in float32 and the way back to their precision, for use inside a loop: autodiff then
    adds their gradients up in float32."""
    dtypes = jax.tree.map(lambda w: w.dtype, weights)

    def back(wide):
        return jax.tree.map(lambda w, dtype: w.astype(dtype), wide, dtypes)

    return jax.tree.map(lambda w: w.astype(jnp.float32), weights), back


def _skip_idle(busy, work, idle, x):
    """work(x) in the ticks in which a stage has work, else idle(x). Skipped, but for seq: its ring
    is one collective-permute of all devices, idle ones too."""
    types = jax.tree.map(lambda a, b: varying(a, b, busy), jax.eval_shape(work, x),
                         jax.eval_shape(idle, x))

    def typed(fn):
        return lambda x: jax.tree.map(lambda a, axes: mark_varying(a, also=axes), fn(x), types)

    if ambient()[0]["seq"] > 1:
        return jax.tree.map(lambda a, b: jnp.where(busy, a, b), typed(work)(x), typed(idle)(x))
    return lax.cond(busy, typed(work), typed(idle), x)


def with_aux(sums: tuple, aux: Any) -> tuple:
    """What head gives (a sum, a count, perhaps a dict of other sums) and what the layers add: to
    the sum, and other sums of theirs."""
    if aux is None:
        return tuple(sums)
    total, count, *others = sums
    return total + aux[0], count, {**(others[0] if others else {}), **aux[1]}


# -------------------------------------------------------------------------------------------
# GPipe and interleaved

def forward_then_backward(loss: Loss, params: Any, weights: Any, chunks: int, remat: str) -> tuple:
    """All microbatches forward; autodiff makes the backward pass, in the opposite order.

        stage 0 | 0 1 0 1 2 3 2 3 . |      2 stages of 2 chunks, 4 microbatches: a number is a
        stage 1 | . 0 1 0 1 2 3 2 3 |      microbatch, and stage 1's last chunk of it ends it

    One chunk is GPipe; more of them make the idle share smaller. Idle ticks are skipped. What
    comes after the layers is shared by all stages, each with its part of the time."""
    M, S, V, links = loss.microbatches, loss.stages, chunks, loss.links
    me = lax.axis_index("pipe")
    x = loss.embed(params, loss.batch)
    xs, batch = split_rows(x, M), split_rows(loss.batch, M)
    wide, narrow = _in_float32(weights)
    wide = split_rows(wide, V)
    indices = loss.indices.reshape(V, S, -1)

    def tick(x, t):
        microbatch, chunk = work_at(t, me, S, V)
        busy = (microbatch >= 0) & (microbatch < M)
        x = jnp.where((me == 0) & (chunk == 0), pick(xs, microbatch), x)

        # Weights are picked again in the backward pass, or every tick would keep them. (The outer
        # policy wins: it decides what is kept of the layers inside, too.)
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=POLICIES[remat])
        def turn(x):
            def work(x):
                return loss.layers(narrow(pick(wide, chunk)), x, pick(pick(indices, chunk), me),
                                   pick(batch, microbatch))

            return _skip_idle(busy, work, lambda x: (x, zeros_of(work, x)[1]), x)

        x, aux = turn(x)
        return links.send_next(x), (x, aux)

    start = mark_alike(jnp.zeros_like(xs[0]), xs, batch, weights, me)
    start = mark_varying(start, xs)
    count, _ = ticks(S, M, "interleaved", V)
    _, (out, aux) = lax.scan(tick, start, jnp.arange(count))
    finished = np.array([_last_tick(m, S, V) for m in range(M)])
    out = jnp.where(me == S - 1, out[finished], 0).reshape(-1, *x.shape[1:])
    x = links.scatter_time(out)
    sums = mark_alike(tuple(loss.head(params, x, links.my_time(loss.batch, x))), x)
    return with_aux(sums, jax.tree.map(lambda a: a.sum(0), aux))


# -------------------------------------------------------------------------------------------
# One forward, one backward

class _State(NamedTuple):
    """What 1F1B carries from tick to tick."""
    x: Array                # into this stage, from the stage before
    dx: Array               # the cotangent of what this stage made, from the next stage
    dlast: Array            # the same for the last stage: from the head, one tick ago
    inputs: Array           # [2 S, b, T, D]: what came in, until its backward pass
    grads: tuple            # of params and of weights, float32
    sums: tuple             # what the loss's head gives, so far
    aux: Any


def one_forward_one_backward(loss: Loss, params: Any, weights: Any) -> tuple:
    """Each microbatch's backward pass as soon as it can be:

        stage 0  |0 . |1 . |2 . |. 0'|. 1'|. 2'|       x' is the backward pass of x, in the
        stage 1  |. . |0 . |1 0'|2 1'|. 2'|. . |       same tick as another's forward

    so a stage keeps the inputs of 2 S microbatches, however many there are: stage s needs those of
    2 (S - s), and as all stages run one program all have room for stage 0's. In each tick a stage
    takes one microbatch forward and one back, from its input again. The gradient is made along
    with the loss, for a cotangent of 1; autodiff then only scales it."""
    @jax.custom_vjp
    def total(params, weights):      # when no gradient is asked for
        return forward_then_backward(loss, params, weights, 1, "none")

    def scaled(grads, cotangents):
        return jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), grads)

    total.defvjp(functools.partial(_with_gradients, loss), scaled)
    return total(params, weights)


def _with_gradients(loss, params, weights):
    """The loss, and the gradients of params and weights."""
    S, M, me = loss.stages, loss.microbatches, lax.axis_index("pipe")
    stage = _Stage(loss, params, weights)

    def zeros32(tree):
        return jax.tree.map(lambda w: mark_varying(jnp.zeros(w.shape, jnp.float32), w, me), tree)

    x = stage.zeros
    state = _State(x, x, x, jnp.stack([x] * 2 * S), (zeros32(params), zeros32(weights)),
                   zeros_of(stage.head, params, x, 0), stage.no_aux)
    state, _ = lax.scan(lambda state, t: (stage.tick(state, t), None), state,
                        jnp.arange(ticks(S, M, "1f1b", 1)[0]))
    grads = jax.tree.map(lambda g, w: g.astype(w.dtype), state.grads, (params, weights))
    return with_aux(state.sums, state.aux), grads


class _Stage:
    """What one stage does in a tick of 1F1B."""

    def __init__(self, loss, params, weights):
        self.loss, self.params, self.weights = loss, params, weights
        self.me = lax.axis_index("pipe")
        self.batch = split_rows(loss.batch, loss.microbatches)
        self.indices = pick(loss.indices.reshape(loss.stages, -1), self.me)
        x = zeros_of(loss.embed, params, pick(self.batch, 0))
        self.zeros = self._alike(x)
        self.no_aux = zeros_of(self.layers, weights, self.zeros, 0)[1]

    def _alike(self, tree):
        return mark_alike(tree, self.params, self.batch, self.weights, self.me)

    def embed(self, params, m):
        return self._alike(self.loss.embed(params, pick(self.batch, m)))

    def layers(self, weights, x, m):
        return self._alike(self.loss.layers(weights, x, self.indices, pick(self.batch, m)))

    def head(self, params, y, m):
        x = self.loss.links.scatter_time(y)
        batch = self.loss.links.my_time(pick(self.batch, m), x)
        return self._alike(tuple(self.loss.head(params, x, batch)))

    def tick(self, s, t):
        S, M, links = self.loss.stages, self.loss.microbatches, self.loss.links
        (forward, backward), finished = work_1f1b(t, self.me, S), t - (S - 1)
        first, last = self.me == 0, self.me == S - 1

        busy = (forward >= 0) & (forward < M)
        x = _skip_idle(busy & first, lambda x: self.embed(self.params, forward), lambda x: x, s.x)
        inputs = jnp.where(busy, lax.dynamic_update_index_in_dim(
            s.inputs, x, forward % (2 * S), 0), s.inputs)
        y, aux = _skip_idle(busy, lambda x: self.layers(self.weights, x, forward),
                            lambda x: (x, self.no_aux), x)

        # The loss of what the last stage has just finished, by all stages, each of its time.
        valid = (finished >= 0) & (finished < M)
        sums, dhead, dlast = self._head_gradients(jnp.where(last, y, 0), finished)

        # Backward, of a microbatch that the next stage has sent back.
        dx = jnp.where(last, s.dlast, s.dx)
        turn = (backward >= 0) & (backward < M)
        dweights, dx = _skip_idle(turn, lambda dx: self._layer_gradients(
            pick(inputs, backward % (2 * S)),
            dx, backward), lambda dx: (self._zeros(self.weights), jnp.zeros_like(dx)), dx)
        dembed = _skip_idle(turn & first, lambda dx: self._embed_gradients(dx, backward),
                            lambda dx: self._zeros(self.params), dx)

        dparams, total = s.grads
        dparams = _add(_add(dparams, _where(valid, dhead)), dembed)
        return _State(links.send_next(y), links.send_back(dx), dlast, inputs,
                      (dparams, _add(total, dweights)), _add(s.sums, _where(valid, sums)),
                      _add(s.aux, aux))

    def _zeros(self, tree):
        return jax.tree.map(jnp.zeros_like, tree)

    def _head_gradients(self, y, m):
        """The loss's sums, the gradient of params, and the cotangent of y."""
        sums, vjp = jax.vjp(lambda params, y: self.head(params, y, m), self.params, y)
        one, *zeros = jax.tree.map(lambda s: mark_varying(jnp.zeros_like(s), s), sums)
        return sums, *vjp((one + 1, *zeros))

    def _layer_gradients(self, x, dy, m):
        (_, aux), vjp = jax.vjp(lambda w, x: self.layers(w, x, m), self.weights, x)
        if aux is None:
            return vjp((dy, None))
        added, others = aux
        return vjp((dy, (mark_varying(jnp.ones_like(added), added), self._zeros(others))))

    def _embed_gradients(self, dx, m):
        return jax.vjp(lambda params: self.embed(params, m), self.params)[1](dx)[0]


def _add(total, more):
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, more)


def _where(condition, tree):
    return jax.tree.map(lambda a: jnp.where(condition, a, 0), tree)
