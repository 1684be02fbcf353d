"""Schedules of a pipeline: which microbatch each stage works on in each tick.

    gpipe, interleaved   one scan of ticks; autodiff turns it around for the backward pass
    1f1b                 a backward pass of its own, of each microbatch as soon as it can be

With k layers a chunk, chunk c of stage s of S begins at layer (c S + s) k. x [b, T, D] is one
microbatch's residual stream. What is sent between stages is passed in (`Loss`, from shard.py's pipe
section); this file decides when.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import add_to, ambient, cast, mark_varying, vary_like, varying, zeros_of
from zigzag.parallel.remat import POLICIES


class Loss(NamedTuple):
    """A loss with layers in the middle: embed, then every layer, then head."""
    embed: Callable         # params, batch -> x
    layers: Callable        # weights, x, indices, batch -> x, aux (None or a pair with a sum)
    head: Callable          # params, x, batch -> sum, count, of this stage's part of the time: x is
                            # what the last stage has, and zeros on the others
    send: Callable          # a tree, 1 -> that of the stage before (the first: of the last);
                            # a tree, -1 -> that of the next stage
    batch: Any              # a tree of [B, ...]
    indices: Array          # of all layers [L]
    stages: int
    microbatches: int


# -------------------------------------------------------------------------------------------
# The timetable

def ticks(stages: int, microbatches: int, schedule: str, chunks: int) -> tuple[int, int]:
    """How many ticks a pipeline takes, and how many chunks of layers a stage really has."""
    if schedule == "1f1b":
        return microbatches + 2 * stages - 1, 1
    V = chunks if schedule == "interleaved" else 1
    return _last_tick(microbatches - 1, stages, V) + 1, V


def passes(stages: int, microbatches: int, schedule: str, chunks: int, skips_idle: bool = True
           ) -> int:
    """The time that a pipeline takes, in forward passes of a stage's chunk over a microbatch, and
    as many backward passes. 1F1B's first S ticks have forward passes only and its last S backward
    passes only, so where idle passes are skipped there are S fewer of each than ticks."""
    count, _ = ticks(stages, microbatches, schedule, chunks)
    return count - stages if schedule == "1f1b" and skips_idle else count


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


def timeline(stages: int, microbatches: int, schedule: str = "gpipe", chunks: int = 1,
             skips_idle: bool = True) -> str:
    """Which microbatch each stage has in each tick, for a person, and how much of the time a stage
    is idle. With several chunks 3b is microbatch 3 in the stage's second chunk. `skips_idle`: a
    stage without work in a tick computes nothing."""
    S, M, (count, V) = stages, microbatches, ticks(stages, microbatches, schedule, chunks)

    def cell(stage, t):
        if schedule == "1f1b":
            forward, back = work_1f1b(t, stage, S)
            return " ".join([_cell(forward, M), _cell(back, M, "'")])
        microbatch, chunk = work_at(t, stage, S, V)
        return _cell(microbatch, M, _letters(chunk) if V > 1 else "")

    rows = [[cell(s, t) for t in range(count)] for s in range(S)]
    width = max(len(c) for row in rows for c in row)
    shown = max(1, 84 // (width + 1))
    more = "..." if count > shown else ""
    lines = [f"stage {s:<2} |" + "|".join(c.center(width) for c in row[:shown]) + "|" + more
             for s, row in enumerate(rows)]
    return "\n".join([*lines, _summary(S, M, V, schedule, skips_idle)])


def _cell(microbatch, M, mark=""):
    return f"{microbatch}{mark}" if 0 <= microbatch < M else "."


def _letters(chunk):
    """a to z, then aa, bb and so on."""
    return chr(ord("a") + chunk % 26) * (chunk // 26 + 1)


def _summary(S, M, V, schedule, skips_idle):
    """How long a schedule takes, and how much of that is idle."""
    count = passes(S, M, schedule, V, skips_idle)
    batches, idle = f"{M} microbatch{'es' if M > 1 else ''}", f"{1 - M * V / count:.0%}"
    if schedule == "1f1b":
        return (f"1f1b: {batches} take the time of {count} forward and {count} backward passes, "
                f"{idle} of it idle; 0' is the backward pass of 0")
    to = " and " if V == 2 else " to "
    of_chunks = f" of {V} chunks a stage (a{to}{_letters(V - 1)})" if V > 1 else ""
    return (f"{schedule}: {count} ticks for {batches}{of_chunks}, {idle} of them idle; the same "
            f"backward")


def check_stages(stages: int, layers: int, chunks: int, specs: Any) -> int:
    """How many stages there are; they must have equally many layers."""
    if specs is None or not all("pipe" in s for s in jax.tree.leaves(specs)):
        raise ConfigError(f"mesh axis pipe={stages}: shard.pipelined_loss needs the specs of its "
                          f"layers, and {stages} must divide their number")
    if layers % (stages * chunks):
        raise ConfigError(f"mesh axis pipe={stages} x --chunks {chunks}: {layers} layers do not "
                          f"divide into {stages * chunks}")
    return stages


# -------------------------------------------------------------------------------------------
# Small tools

def split_rows(tree: Any, count: int) -> Any:
    """Each [B, ...] as [count, B / count, ...]."""
    return jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), tree)


def pick(tree: Any, index: Any) -> Any:
    """The entry of each array with this index, or the nearest that it has."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(
        a, jnp.clip(index, 0, a.shape[0] - 1), keepdims=False), tree)


def _astype(tree, like):
    return jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)


def _skip_idle(busy, work, x, idle=None):
    """work(x) in the ticks in which a stage has work, else idle(x), or zeros. Skipped, but for seq:
    its ring is one collective-permute of all devices, idle ones too."""
    idle = idle or functools.partial(zeros_of, work)
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

        stage 0 | 0a 1a 0b 1b 2a 3a 2b 3b .  |     2 stages of 2 chunks, 4 microbatches: 0b is
        stage 1 | .  0a 1a 0b 1b 2a 3a 2b 3b |     microbatch 0 in the stage's second chunk

    One chunk is GPipe; more of them make the idle share smaller. Idle ticks are skipped. What
    comes after the layers is shared by all stages, each with its part of the time."""
    out, aux = forward(loss, loss.embed(params, loss.batch), weights, chunks, remat)
    sums = mark_varying(tuple(loss.head(params, out, loss.batch)), also={"pipe"})
    return with_aux(sums, jax.tree.map(lambda a: a.sum(0), aux))


def forward(loss: Loss, x: Array, weights: Any, chunks: int, remat: str) -> tuple[Array, Any]:
    """x [B, T, D] through all layers: what the last stage has of it then (the others have zeros),
    and what the layers of this stage add to the loss, in each tick."""
    M, S, V = loss.microbatches, loss.stages, chunks
    me = lax.axis_index("pipe")
    # (Marked here: the sum of its gradients over stages is no part of a tick, which some skip.)
    xs, batch = split_rows(x, M), mark_varying(split_rows(loss.batch, M), me)
    # In float32, in which autodiff then adds up their gradients in the loop.
    wide = split_rows(cast(weights, "float32"), V)
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
                return loss.layers(_astype(pick(wide, chunk), weights), x,
                                   pick(pick(indices, chunk), me), pick(batch, microbatch))

            return _skip_idle(busy, work, x)

        x, aux = turn(x)
        return loss.send(x, 1), (x, aux)

    start = vary_like(jnp.zeros_like(xs[0]), xs, batch, weights, me)
    finished = np.array([_last_tick(m, S, V) for m in range(M)])
    _, (out, aux) = lax.scan(tick, start, jnp.arange(finished[-1] + 1))
    return jnp.where(me == S - 1, out[finished], 0).reshape(x.shape), aux


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
    S, M, stage = loss.stages, loss.microbatches, _Stage(loss, params, weights)
    x = stage.zeros
    grads = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), (params, weights))
    state = _State(x, x, x, jnp.stack([x] * 2 * S), mark_varying(grads, stage.me),
                   zeros_of(stage.head, params, x, 0), zeros_of(stage.layers, weights, x, 0)[1])
    state = lax.fori_loop(0, ticks(S, M, "1f1b", 1)[0], lambda t, s: stage.tick(s, t), state)
    return with_aux(state.sums, state.aux), _astype(state.grads, (params, weights))


class _Stage:
    """What one stage does in a tick of 1F1B."""

    def __init__(self, loss, params, weights):
        self.loss, self.params, self.weights = loss, params, weights
        self.me = lax.axis_index("pipe")
        self.batch = split_rows(loss.batch, loss.microbatches)
        self.indices = pick(loss.indices.reshape(loss.stages, -1), self.me)
        self.zeros = self._alike(zeros_of(loss.embed, params, pick(self.batch, 0)))

    def _alike(self, tree):
        return vary_like(tree, self.params, self.batch, self.weights, self.me)

    def embed(self, params, m):
        return self._alike(self.loss.embed(params, pick(self.batch, m)))

    def layers(self, weights, x, m):
        return self._alike(self.loss.layers(weights, x, self.indices, pick(self.batch, m)))

    def head(self, params, y, m):
        return mark_varying(tuple(self.loss.head(params, y, pick(self.batch, m))), also={"pipe"})

    def tick(self, s, t):
        S, M, send = self.loss.stages, self.loss.microbatches, self.loss.send
        (forward, backward), finished = work_1f1b(t, self.me, S), t - (S - 1)
        first, last = self.me == 0, self.me == S - 1

        busy = (forward >= 0) & (forward < M)
        x = _skip_idle(busy & first, lambda x: self.embed(self.params, forward), s.x, lambda x: x)
        inputs = jnp.where(busy, lax.dynamic_update_index_in_dim(
            s.inputs, x, forward % (2 * S), 0), s.inputs)
        y, aux = _skip_idle(busy, lambda x: self.layers(self.weights, x, forward), x)

        # The loss of what the last stage has just finished, by all stages, each of its time.
        valid = (finished >= 0) & (finished < M)
        sums, dhead, dlast = self._head_gradients(jnp.where(last, y, 0), finished)
        sums, dhead = jax.tree.map(lambda a: jnp.where(valid, a, 0), (sums, dhead))

        # Backward, of a microbatch that the next stage has sent back.
        dx = jnp.where(last, s.dlast, s.dx)
        turn = (backward >= 0) & (backward < M)
        dweights, dx = _skip_idle(turn, lambda dx: self._layer_gradients(
            pick(inputs, backward % (2 * S)), dx, backward), dx)
        dembed = _skip_idle(turn & first, lambda dx: self._embed_gradients(dx, backward), dx)

        dparams, total = s.grads
        return _State(send(y, 1), send(dx, -1), dlast, inputs,
                      (add_to(add_to(dparams, dhead), dembed), add_to(total, dweights)),
                      add_to(s.sums, sums), add_to(s.aux, aux))

    def _head_gradients(self, y, m):
        """The loss's sums, the gradient of params, and the cotangent of y."""
        sums, vjp = jax.vjp(lambda params, y: self.head(params, y, m), self.params, y)
        return sums, *vjp(_one_and_zeros(sums))

    def _layer_gradients(self, x, dy, m):
        (_, aux), vjp = jax.vjp(lambda w, x: self.layers(w, x, m), self.weights, x)
        return vjp((dy, None if aux is None else _one_and_zeros(aux)))

    def _embed_gradients(self, dx, m):
        return jax.vjp(lambda params: self.embed(params, m), self.params)[1](dx)[0]


def _one_and_zeros(sums):
    """The cotangent of sums of which the first is the loss's."""
    total, *others = sums
    return jnp.ones_like(total), *jax.tree.map(jnp.zeros_like, others)
