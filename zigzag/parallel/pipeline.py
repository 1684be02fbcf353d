"""Pipeline schedules: which stage does what in each tick, and the two schedules besides GPipe.

    gpipe          all microbatches go forward, then autodiff runs the same ticks in reverse; the
                   code is `gpipe` in the pipe section of shard.py: read that first
    interleaved    GPipe with V chunks of layers per stage: microbatches go around the ring of
                   stages V times, and the idle fraction shrinks by a factor of about V
    1f1b           a hand-written backward pass that starts each microbatch's backward as soon as
                   the last stage finishes it, so the number of activations in memory depends on
                   the number of stages S, not on the number of microbatches M; also with V chunks

All stages run the same program inside a shard_map; `lax.axis_index("pipe")` tells a device which
stage it is. A tick is one loop iteration: compute, then send the result to the neighbor. With k
stack entries (usually layers) per chunk, chunk c of stage s begins at entry (c S + s) k.
x [b, T, D] is the residual stream of a microbatch of b rows.

`pipelined_loss` splits a loss into these parts for each stage:

    embed(params, batch) -> x
    stack(weights, x, numbers, batch) -> x, aux     runs the layers `numbers`; aux is None or a
                                        pair: a term of the loss, and a dict of extra sums
    head(params, x, batch) -> sum, count[, dict of sums]    a collective: every stage calls it, with
                                        x on the last stage and zeros on all others, and gets the
                                        sums for its own part of the sequence
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from zigzag.core.errors import ConfigError, any_loss
from zigzag.core.mesh import (
    add_to,
    ambient,
    axis_size,
    cast,
    has_time,
    is_tensor_split,
    mark_varying,
    send,
    split_rows,
    trace_settings,
    unknown_time,
    vary_like,
    varying,
    zeros_of,
)
from zigzag.parallel.products import time_chunks
from zigzag.parallel.remat import policy_of


class Options(NamedTuple):
    """How to compute a layer stack. Functions that take Options accept any record with these
    fields, such as a network's config."""
    remat: str = "none"         # what to recompute in the backward pass: see remat.py
    microbatches: int = 1       # how many parts to cut a device's rows into
    schedule: str = "gpipe"
    chunks: int = 1             # chunks of layers per stage
    sum_dtype: str = ""         # the dtype in which fsdp sums gradients; '': the weights' dtype


def options_of(record: Any) -> Options:
    """Read the Options from a record with these fields."""
    return Options(*(getattr(record, name) for name in Options._fields))


# -------------------------------------------------------------------------------------------
# The timetable

def ticks(S: int, M: int, schedule: str, V: int) -> int:
    """Return the number of ticks for M microbatches on S stages of V chunks. Ticks are iterations
    of the loop, which only goes forward except in 1f1b."""
    return S + turn_of(M - 1, V - 1, S, V) + (S * V if schedule == "1f1b" else 0)


def passes(S: int, M: int, schedule: str, V: int, skips_idle: bool = True) -> int:
    """Return how long a pipeline takes, in forward passes of one chunk over one microbatch. It
    takes the same number of backward passes. In 1F1B, the first S V ticks have only forward passes,
    and the last S V only backward passes. If stages skip idle passes, neither count has both."""
    return ticks(S, M, "gpipe" if skips_idle else schedule, V)


def turn_of(microbatch: Any, lap: Any, S: int, V: int) -> Any:
    """Return the turn in which a stage takes a microbatch in this lap; stage s has turn u in tick
    u + s. A group of S microbatches goes around the ring V times, at S ticks per lap; then the next
    group follows. Microbatch j of a group runs j ticks behind the group's first."""
    return microbatch // S * S * V + lap * S + microbatch % S


def work_in(turn: Any, S: int, V: int) -> tuple[Any, Any]:
    """Return the microbatch and the lap of a stage's turn: the inverse of turn_of. Before the first
    turn, the microbatch is negative."""
    return turn // (S * V) * S + turn % S, turn % (S * V) // S


def work_1f1b(t: Any, stage: Any, S: int, V: int = 1) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return what a 1F1B stage takes forward and backward in tick t, as (microbatch, chunk).

    The last stage finishes the first microbatch in tick S V - 1. It takes it backward one tick
    later, and each earlier stage one tick after the next stage; laps begin with the last chunk."""
    microbatch, lap = work_in(t - (S * V + S - 1 - stage), S, V)
    return work_in(t - stage, S, V), (microbatch, V - 1 - lap)


def timeline(S: int, M: int, schedule: str = "gpipe", V: int = 1, skips_idle: bool = True) -> str:
    """Return a description of how long a schedule takes, with its idle fraction. `skips_idle`: a
    stage without work in a tick computes nothing (`skip_idle`)."""
    count, of_chunks = passes(S, M, schedule, V, skips_idle), f" of {V} chunks a stage" * (V > 1)
    idle = f"{1 - M * V / count:.0%}"
    if schedule == "1f1b":
        return (f"1f1b: {M} microbatches{of_chunks} take the time of {count} forward and {count} "
                f"backward passes, {idle} of it idle")
    return (f"{schedule}: {count} ticks for {M} microbatches{of_chunks}, {idle} idle; "
            f"backward: the same")


def check_stages(layers: int, chunks: int, specs: Any) -> None:
    """Reject a layer count that isn't divisible by the stages times their chunks."""
    stages = axis_size("pipe")
    if specs is None or not all("pipe" in s for s in jax.tree.leaves(specs)):
        raise ConfigError(f"mesh axis pipe={stages}: shard.pipelined_loss needs `specs`, the specs "
                          f"of its layers, and {stages} must divide the number of layers")
    if layers % (stages * chunks):
        raise ConfigError(f"mesh axis pipe={stages} x --chunks {chunks}: {layers} layers do not "
                          f"divide into {stages * chunks}")


# -------------------------------------------------------------------------------------------
# Small tools

def pick(tree: Any, index: Any) -> Any:
    """Return entry `index` of each array, clipped to the valid range for the sake of idle ticks."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(
        a, jnp.clip(index, 0, a.shape[0] - 1), keepdims=False), tree)


def astype(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)


def can_skip(sizes: dict[str, int], overlap: bool) -> bool:
    """Return whether a stage may skip a tick in which it has no work. It may not if there's a ring
    over seq or, with --overlap, over tensor: see `skip_idle`."""
    return sizes["seq"] == 1 and not (overlap and sizes["tensor"] > 1)


def skip_idle(busy: Array, work: Callable, x: Any, idle: Callable | None = None,
              alike: bool = False) -> Any:
    """Return work(x) on `busy` stages and idle(x) on all others (default: zeros of work's shapes).

    A branch (lax.cond) saves the time of idle work. It is safe even if `work` contains collectives,
    because `busy` depends only on the tick and the stage. All devices in a stage take the same
    branch, and each group of a collective over data, fsdp, expert or tensor lies within a single
    stage. So either all members of a group reach the collective, or none do. A ring is different:
    every device in the mesh takes part in a collective-permute, no matter which pairs it lists, so
    a branch would deadlock. With a ring over seq, or over tensor (--overlap), every stage therefore
    computes both sides and selects one with `where`, unless all stages are busy `alike`.

    Both branches must have the same type, so we mark both results as varying over every axis that
    either result or `busy` varies over."""
    idle = idle or functools.partial(zeros_of, work)
    types = jax.tree.map(lambda a, b: varying(a, b, busy), jax.eval_shape(work, x),
                         jax.eval_shape(idle, x))

    def typed(fn):
        return lambda x: jax.tree.map(lambda a, axes: mark_varying(a, also=axes), fn(x), types)

    sizes = {"seq": ambient()[0]["seq"], "tensor": axis_size("tensor")}
    if not (alike or can_skip(sizes, trace_settings().overlap)):
        return jax.tree.map(lambda a, b: jnp.where(busy, a, b), typed(work)(x), typed(idle)(x))
    return lax.cond(busy, typed(work), typed(idle), x)


def needs_all_time(function: str) -> None:
    """Reject a shard.py function in the head of a pipelined loss if each stage has only part of the
    sequence."""
    if trace_settings().part_of_time:
        raise ConfigError(f"mesh axis pipe={axis_size('pipe')}: the head of this loss calls "
                          f"shard.{function}, but each stage has part of the sequence; give "
                          f"pipelined_loss all_time=True; {any_loss()}")


def time_of_stage(tree: Any, x: Array) -> Any:
    """Cut a batch's arrays [B, T, ...] along T to the tokens of x, this stage's part from
    shard.share_time. Arrays without T (a source, a seed per row) stay as they are."""
    stages, n = axis_size("pipe"), axis_size("tensor") if is_tensor_split(x) else 1

    def part(path, a):
        name = getattr(path[0], "key", "") if path else ""
        is_timed = has_time(name, dict(trace_settings().timed))
        if a.ndim < 2 or a.shape[1] != x.shape[1] * stages * n or is_timed is False:
            return a
        if is_timed is None:
            raise unknown_time(name, a.shape[1], "pipe", stages)
        pieces = time_chunks(a, stages, n)
        return lax.dynamic_index_in_dim(pieces, lax.axis_index("pipe"), 0, False)

    return jax.tree.map_with_path(part, tree)


def with_aux(sums: tuple, aux: Any) -> tuple:
    """Add the layers' `aux` to the head's `sums`, (sum, count) or (sum, count, dict of extra sums):
    aux[0] goes to the sum, and the entries of aux[1] go into the dict."""
    if aux is None:
        return tuple(sums)
    total, count, *others = sums
    return total + aux[0], count, {**(others[0] if others else {}), **aux[1]}


# -------------------------------------------------------------------------------------------
# Interleaved

def interleaved(stack: Callable, weights: Any, x: Array, batch: Any, options: Options
                ) -> tuple[Array, Any]:
    """Run shard.gpipe with V chunks of layers per stage:

        stage 0 | 0a 1a 0b 1b 2a 3a 2b 3b .  |     2 stages of 2 chunks, 4 microbatches: 0b is
        stage 1 | .  0a 1a 0b 1b 2a 3a 2b 3b |     microbatch 0 in the stage's second chunk

    In a tick, stage 0 takes a new microbatch if it is about to run chunk 0; otherwise it takes the
    one that the last stage sent around. A stage is idle if its microbatch isn't in 0 ... M - 1.
    In training, layers are stored in stage order (layer_order in storage.py), because a stage's V
    chunks aren't adjacent in the model."""
    M, S, V, me = options.microbatches, axis_size("pipe"), options.chunks, lax.axis_index("pipe")
    xs, batch = split_rows(x, M), mark_varying(split_rows(batch, M), me)    # as in gpipe
    wide = split_rows(cast(weights, "float32"), V)
    numbers = jnp.arange(S * len(jax.tree.leaves(weights)[0])).reshape(V, S, -1)

    def tick(x, t):
        microbatch, chunk = work_in(t - me, S, V)
        busy = (microbatch >= 0) & (microbatch < M)
        x = jnp.where((me == 0) & (chunk == 0), pick(xs, microbatch), x)

        # With a checkpoint, the backward pass picks the chunk's weights again. Without one, every
        # tick would save a copy.
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=policy_of(options.remat))
        def work(x):
            return skip_idle(busy, lambda x: stack(
                astype(pick(wide, chunk), weights), x, pick(pick(numbers, chunk), me),
                pick(batch, microbatch)), x)

        x, aux = work(x)
        return send(x, "pipe", 1), (x, aux)

    start = vary_like(jnp.zeros_like(xs[0]), xs, batch, weights, me)
    finished = S - 1 + turn_of(np.arange(M), V - 1, S, V)
    _, (out, aux) = lax.scan(tick, start, jnp.arange(finished[-1] + 1))
    return jnp.where(me == S - 1, out[finished], 0).reshape(x.shape), aux


# -------------------------------------------------------------------------------------------
# One forward, one backward

class Parts(NamedTuple):
    """The parts of a pipelined loss, and its options."""
    embed: Callable
    stack: Callable
    options: Options
    head: Callable
    batch: Any              # arrays [B, ...]
    forward: Callable       # (params, weights) -> the loss, which runs if no gradient is needed


def one_forward_one_backward(parts: Parts) -> Callable:
    """Make (params, weights) -> the loss (sum, count, ...), whose gradient runs each backward pass
    as early as possible:

        stage 0  |0 . |1 . |2 . |. 0'|. 1'|. 2'|       0' is the backward pass of microbatch 0; a
        stage 1  |. . |0 . |1 0'|2 1'|. 2'|. . |       tick has a forward and a backward pass

    In tick t (`tick` in `_with_gradients`), stage s

      1. takes microbatch t - s forward and saves its input (on stage 0, embed computes it first);
      2. computes its share of the head for the microbatch that the last stage just finished,
         t - (S - 1). All stages share the head, which contains collectives, and all skip it if
         there's no such microbatch. The head's backward pass yields its gradients and, on the last
         stage, `dlast`: the cotangent with which that stage takes the same microbatch backward in
         tick t + 1;
      3. takes microbatch t - (2 S - 1 - s) backward: it recomputes the layers from the saved input
         and applies their vjp to the cotangent (`dlast` on the last stage, otherwise the `dx` that
         the next stage sent); stage 0 then takes the result through embed's vjp;
      4. sends its output to the next stage and its input's cotangent to the previous one.

    With V chunks, `work_1f1b` says which chunk of which microbatch it takes. What the last stage
    sends goes to stage 0's next chunk, and embed and the head run at the first and last chunks.

    Stage s holds the input of microbatch m from tick m + s to tick m + 2 S - 1 - s, which makes
    2 (S - s) inputs at a time. All stages run the same program, so all reserve room for stage 0's
    2 S (2 S V with chunks). This doesn't grow with the number of microbatches.

    The forward pass computes the gradient of only the sum, including the layers' term from aux, and
    the backward pass multiplies it by the sum's cotangent. The count and the extra sums have no
    gradient. This is correct because the loss is the sum over microbatches."""
    total = jax.custom_vjp(parts.forward)

    def scaled(grads, cotangents):
        return jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), grads)

    total.defvjp(functools.partial(_with_gradients, parts), scaled)
    return total


def _with_gradients(parts, params, weights):
    """Return the loss (sum, count, ...) and the gradients of (params, weights) in their dtypes. The
    loop carries these from tick to tick (x, dx and dlast are [b, T, D]):

        x           this stage's next input: the previous stage's output from the last tick
        dx          the cotangent of this stage's output, for the next microbatch it takes backward:
                    the next stage's input cotangent from the last tick
        dlast       replaces dx on the last stage: the cotangent of its output from the last tick,
                    from the head's backward pass
        inputs      [2 S V, b, T, D]: this stage's input of turn u at index u % (2 S V), saved until
                    the stage takes it backward, at most 2 S V - 1 ticks
        grads       gradients of (params, weights) so far, in float32
        sums, aux   the head's (sum, count, ...) and the layers' aux so far
    """
    S, me = axis_size("pipe"), lax.axis_index("pipe")
    M, V = parts.options.microbatches, parts.options.chunks
    count = ticks(S, M, "1f1b", V)
    batch, chunks = split_rows(parts.batch, M), split_rows(weights, V)
    numbers = jnp.arange(S * len(jax.tree.leaves(weights)[0])).reshape(V, S, -1)

    def marked(tree):
        """Give the tree the same varying type as the loop's carry, which must not change."""
        return vary_like(tree, params, batch, weights, me)

    def embed(params, m):
        return marked(parts.embed(params, pick(batch, m)))

    def layers(weights, x, m, chunk):
        return marked(parts.stack(weights, x, pick(pick(numbers, chunk), me), pick(batch, m)))

    def layer_gradients(x, dy, m, chunk):
        """Recompute the layers from x; return the gradient of weights and the cotangent of x."""
        (_, aux), vjp = jax.vjp(lambda w, x: layers(w, x, m, chunk), pick(chunks, chunk), x)
        return vjp((dy, None if aux is None else _one_and_zeros(aux)))

    def head(y, grads, m):
        """Return the head's sums, the cotangent of y, and grads with the gradient of params."""
        sums, vjp = jax.vjp(lambda params, y: parts.head(params, y, pick(batch, m)), params, y)
        more, dy = vjp(_one_and_zeros(sums))
        return sums, dy, add_to(grads, more)

    def tick(t, carry):
        x, dx, dlast, inputs, (dparams, total), so_far, aux_so_far = carry
        (forward, chunk), (backward, back) = work_1f1b(t, me, S, V)
        first, last = me == 0, me == S - 1

        busy = (forward >= 0) & (forward < M)
        x = skip_idle(busy & first & (chunk == 0), lambda x: embed(params, forward), x, lambda x: x)
        inputs = jnp.where(busy, lax.dynamic_update_index_in_dim(
            inputs, x, (t - me) % (2 * S * V), 0), inputs)
        y, aux = skip_idle(busy, lambda x: layers(pick(chunks, chunk), x, forward, chunk), x)

        # All stages run the head for what the last one just finished, or all skip it.
        finished, lap = work_in(t - (S - 1), S, V)
        with jax.named_scope(f"{M}_of_{count}"):        # for hlo.py
            sums, next_dlast, dparams = skip_idle(
                (finished >= 0) & (finished < M) & (lap == V - 1),
                lambda given: head(*given, finished), (jnp.where(last, y, 0), dparams),
                lambda given: (jax.tree.map(jnp.zeros_like, so_far), jnp.zeros_like(y), given[1]),
                alike=True)

        # Backward pass.
        dx = jnp.where(last & (back == V - 1), dlast, dx)
        turn = (backward >= 0) & (backward < M)
        dweights, dx = skip_idle(turn, lambda dx: layer_gradients(
            pick(inputs, turn_of(backward, back, S, V) % (2 * S * V)), dx, backward, back), dx)
        dembed, = skip_idle(turn & first & (back == 0), lambda dx: jax.vjp(
            lambda params: embed(params, backward), params)[1](dx), dx)
        total = _add_at(back, total, dweights)

        return (send(y, "pipe", 1), send(dx, "pipe", -1), next_dlast, inputs,
                (add_to(dparams, dembed), total), add_to(so_far, sums), add_to(aux_so_far, aux))

    x = marked(zeros_of(parts.embed, params, pick(batch, 0)))
    grads = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), (params, chunks))
    start = (x, x, x, jnp.stack([x] * 2 * S * V), mark_varying(grads, me),
             zeros_of(head, x, grads[0], 0)[0], zeros_of(layers, pick(chunks, 0), x, 0, 0)[1])
    *_, (dparams, total), sums, aux = lax.fori_loop(0, count, tick, start)
    total = jax.tree.map(lambda a, w: a.reshape(w.shape), total, weights)
    return with_aux(sums, aux), astype((dparams, total), (params, weights))


def _add_at(index, total, more):
    """Add a tree to entry `index` of each array of `total`."""
    return jax.tree.map(lambda t, new: lax.dynamic_update_index_in_dim(t, new, index, 0),
                        total, add_to(pick(total, index), more))


def _one_and_zeros(sums):
    """Return cotangents for (sum, ...): 1 for the sum, which is the loss, and 0 for the rest."""
    total, *others = sums
    return jnp.ones_like(total), *jax.tree.map(jnp.zeros_like, others)
