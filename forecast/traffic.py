"""Formulas for how many bytes an update should send, with one function per mesh axis.

    n  devices on the axis            G  a device's gradients, in float32
    X  a microbatch's residual        W  the weights that a device gathers over fsdp
       stream [B, T, D]               K  a microbatch's keys [B, T, K, N]

X, W and K are bytes per device in the compute dtype. hlo.add_up computes what fraction of its bytes
a collective sends, so each function below yields only the collectives, as rows. A row has the kind,
the axes joined by +, how often it runs, the bytes of its result per device (for a reduce-scatter,
of its operand), and, if the array has the compute dtype, the length of its rows: --send_dtype
(precision/) sends 8 bits per number if they are long enough.
"""

import collections
import math
from typing import Any, Iterator

import jax
import jax.numpy as jnp

from zigzag.core.mesh import (
    WITHOUT_TENSOR,
    devices_over,
    entry_axes,
    full_spec,
    platform,
    row_groups,
    slices_of,
    spec_axes,
    without_axis,
)
from zigzag.core.parts import part
from zigzag.parallel import experts as dispatch
from zigzag.parallel import layer_strips as strips
from zigzag.parallel.collectives import scattering
from zigzag.parallel.hlo import Collective, add_up
from zigzag.parallel.pipeline import ticks
from zigzag.parallel.products import loss_chunks
from zigzag.parallel.remat import POLICIES
from zigzag.run import muon


def expected_traffic(plan: Any) -> list[Collective]:
    """Return the collectives that an update of a plan.Plan should run, like `hlo.collectives`. They
    cover the weights and, for our own decoders' losses, the activations (between blocks and stages,
    around the ring, to experts). Return [] if the update sends anything else."""
    sizes, slices = plan.mesh.shape, slices_of(plan.mesh.devices.flat)
    rows, found = [], () if _sends_more(plan) else _rows(plan)
    if asked := getattr(plan.config, "send_dtype", ""):
        itemsize = _Run(plan.config, plan.mesh).itemsize
        found = part("precision.send", asked).rows_in_8_bits(found, sizes, itemsize)
    for kind, axes, count, size, *_ in found:
        names = [a for a in axes.split("+") if sizes.get(a, 1) > 1]
        if slices > 1 and "data" in names:      # sum within a slice, then with the other slices
            rows.append(("send between slices", "data", 1, count, size))
            names.remove("data")
        if names and count * size:
            rows.append((kind, "+".join(names), devices_over(names, sizes), count, size))
    return add_up(rows)


def is_complete(plan: Any) -> bool:
    """Return whether expected_traffic covers everything that an update sends."""
    knows = _blocks(plan) is not None if plan.network else plan.sizes["tensor"] == 1
    return knows and not _sends_more(plan)


def _sends_more(plan):
    """Return whether an update sends anything that these formulas don't cover. They don't cover a
    loss that compares rows, adapters, weights stored differently from how they're used, --remat of
    part of a layer or of some layers, 1F1B with one stack entry per chunk, more than two TPU slices
    or anything else that crosses between two, or a float32 step on a TPU (its matmuls round to
    bfloat16, and it may round before it gathers)."""
    config, c = plan.config, plan.config.network
    # With more than two slices, data is larger than 2, because it's a multiple of the slices.
    return (slices_of(plan.mesh.devices.flat) > 1 and (
            plan.sizes["data"] > 2 or config.zero or config.optimizer == "muon")
            or c.lora_rank > 0 or "all_rows" in plan.names
            or c.remat not in POLICIES
            or c.schedule == "1f1b" and getattr(
                c, "expert_layers", getattr(c, "layers", 0)) == plan.sizes["pipe"] * c.chunks
            or any(d.spec != d.spec_in_loss and (
                d.stacked or without_axis(d.spec, "pipe") != d.spec_in_loss)
                for d in jax.tree.leaves(plan.decisions))
            or platform(plan.mesh) == "tpu" and jnp.dtype(c.dtype).itemsize == 4)


def _blocks(plan):
    """Return the Traffic of a network's blocks, or None if its activations have no formulas."""
    by_hand = plan.network and plan.config.collectives == "explicit"
    return plan.network.block_traffic(plan.config.network) if by_hand else None


def _rows(plan):
    config, run = plan.config, _Run(plan.config, plan.mesh)
    trees = plan.params, plan.decisions, plan.optimizer_specs
    weights = list(zip(*map(jax.tree.leaves, trees), strict=True))
    yield from _data(weights, run)
    yield from _gathered(weights, run, plan.takes_specs)
    if config.optimizer == "muon":
        yield from of_muon(plan)
    if blocks := _blocks(plan):
        yield from _tensor(run, blocks)
        yield from _vocabulary(run, len(plan.params["embed"]))
        yield from _pipe(run)
        yield from _seq(run, "segments" in plan.batch)
        if config.network.experts:
            yield from _experts(run)


def rows_in_use(config: Any, mesh: Any) -> float:
    """Return the fraction of the rows computed by a device's experts that are tokens, if all
    experts are equally busy. The other rows are spare room."""
    run = _Run(config, mesh)
    if run.sizes["expert"] == 1 or config.collectives == "compiler" or not run.room:
        return 1.0
    return run.tokens * run.model.experts_per_token / run.room.choices


class _Run:
    """The sizes and counts of a device's work per update."""

    def __init__(self, config, mesh):
        self.config, self.model, self.mesh = config, config.network, mesh
        c = config.network
        self.sizes = mesh.shape
        # Bytes per number. Between CPU devices, XLA sends 16-bit numbers as 32 bits.
        self.itemsize = 4 if platform(mesh) == "cpu" else jnp.dtype(c.dtype).itemsize
        self.of_gradients = 4 if c.sum_dtype else self.itemsize

        # The pipeline's microbatches, and its ticks for all parts of the batch.
        S, rows = self.sizes["pipe"], config.batch // row_groups(mesh) // config.accumulate
        M = c.microbatches if S > 1 else 1
        count = ticks(S, M, c.schedule, c.chunks) if S > 1 else 1
        self.ticks = config.accumulate * count
        self.passes = self.ticks / c.chunks if S > 1 else self.ticks
        self.is_1f1b = S > 1 and c.schedule == "1f1b"
        # A microbatch on a device. Between blocks, tensor splits the sequence if it divides it.
        self.rows, self.time = rows // M, c.seq_len // self.sizes["seq"]
        self.tokens = self.rows * self.time
        self.splits_time = self.time % self.sizes["tensor"] == 0
        self.reduce = "reduce-scatter" if self.splits_time else "all-reduce"
        self.D_bytes = c.d_model * self.itemsize        # of a token in the stream
        self.X = self.tokens * self.D_bytes
        # The room for these tokens on their way to experts.
        n, experts = self.sizes["expert"], getattr(c, "experts", 0)
        self.room = experts and dispatch.room_of(
            self.tokens, c.experts_per_token, experts // n, n, c.expert_room)
        # How many strips a layer cuts its rows into.
        self.strips = strips.count(self.rows, self.time, self.sizes, platform(mesh),
                                   strips.least(config))
        # Whether tensor also splits the head's tokens after the stages divide them.
        self.splits_head = self.splits_time and self.time // S % self.sizes["tensor"] == 0

        # How often layers run, and those with experts; forward passes each time (1F1B, --remat: +1)
        self.expert_layers = experts and getattr(c, "expert_layers", c.layers)
        self.layers, self.routed = (
            round(self.passes * count / S) for count in (c.layers, self.expert_layers))
        self.forwards = 1 + self.is_1f1b + (c.remat != "none")
        # How often the embedding and head run, and the bytes of their X: in 1F1B, of a microbatch,
        # and the embedding in every tick.
        self.embeds = self.ticks if self.is_1f1b else config.accumulate
        self.heads = config.accumulate * (M if self.is_1f1b else 1)
        self.X_ends = self.X if self.is_1f1b else self.X * M

    def scatter(self, axis, count, size, *length):
        """Return a row for a reduce-scatter, which is several all-to-alls on a TPU."""
        kind, stages = scattering(self.sizes[axis], self.mesh)
        return kind, axis, count * stages, size / stages, *length

    def in_parts(self, count, size):
        """Return a row for the permutes with which --overlap replaces a gather or a scatter."""
        n = self.sizes["tensor"]
        return "collective-permute", "tensor", count * (n - 1), size / n, self.model.d_model


# -------------------------------------------------------------------------------------------
# Weights of any function

def _data(weights, run):
    """2 (n-1)/n G: an update sums the gradients of a device's weights once, over all axes that
    don't split them. With --zero 1, it scatters them over data and gathers the new weights. With
    --zero 2, it scatters those of each part of the batch."""
    reduced = collections.Counter()
    for leaf, decision, of_optimizer in weights:
        split = spec_axes(decision.spec)
        axes = [a for a in WITHOUT_TENSOR if a not in split]
        G = 4 * leaf.size / devices_over(split, run.sizes)
        if "data" in spec_axes(of_optimizer) - split:       # --zero 1
            yield run.scatter("data", run.config.accumulate if run.config.zero == 2 else 1, G)
            yield "all-gather", "data", 1, G
            axes.remove("data")
            G /= run.sizes["data"]
        reduced["+".join(axes)] += G        # the compiler combines all weights' reductions
    for axes, G in reduced.items():
        yield "all-reduce", axes, 1, G


def _gathered(weights, run, gathers_by_layer):
    """3 (n-1)/n W over fsdp: a layer gathers its weights where it uses them, forward and backward,
    and scatters their gradients. It does so in each part of the batch and each pass through a
    stage's layers. An update gathers weights outside the layers once for all parts, over fsdp and
    pipe, and each part scatters their gradients: 2 (n-1)/n W."""
    for leaf, decision, _ in weights:
        used = spec_axes(decision.spec_in_loss)
        layers, passes, gathers = 1, run.config.accumulate, 1
        if decision.stacked and gathers_by_layer:
            layers = leaf.shape[0] // run.sizes["pipe"]
            passes = run.passes
            gathers = passes * (2 + run.is_1f1b)
        for axis in spec_axes(decision.spec) - (used - {"fsdp"}):
            W = leaf.size / devices_over(used - {axis}, run.sizes)
            row = _row_length(leaf, decision, axis, run.sizes)
            yield "all-gather", axis, gathers * layers, W * run.itemsize / layers, row
            yield run.scatter(axis, passes * layers, W * run.of_gradients / layers,
                              *[] if run.model.sum_dtype else [row])


def _row_length(leaf, decision, axis, sizes):
    """Return the length of a layer's or another weight's rows, in a collective over this axis: its
    last dimension that the axis doesn't split; 0 if there is none."""
    dims = [*zip(leaf.shape, full_spec(decision.spec, len(leaf.shape)))][decision.stacked:]
    whole = [size // devices_over(entry_axes(entry), sizes) for size, entry in dims
             if axis not in entry_axes(entry)]
    return whole[-1] if whole else 0


def of_muon(plan: Any) -> Iterator[tuple]:
    """2 (n-1)/n P + (q-1) P for each pool: devices send their parts P of matrices, in float32, to
    the matrices' homes and get back their parts of the results, which q devices then share."""
    for pool in muon.pools_of(plan):
        P = 4 * pool.each * math.prod(pool.matrix)
        axes = [axis for axis in plan.sizes if axis in dict(pool.splits)]
        yield "all-to-all", "+".join(axes), 2, P
        near, n = [], 1             # the axes along which the q devices lie
        for axis in reversed(pool.copies):
            if n < pool.shares:
                near, n = [axis, *near], n * plan.sizes[axis]
        if n > 1:
            yield "all-gather", "+".join(near), 1, (pool.shares - 1) * P * n / (n - 1)


# -------------------------------------------------------------------------------------------
# Activations of the transformer

def _tensor(run, traffic):
    """8 (n-1)/n X per layer (4 with a parallel block): a block gathers its tokens at its input and
    scatters them at its output, and the backward pass runs the transposes. If tensor doesn't divide
    the sequence, an all-reduce replaces both."""
    c, n, blocks = run.model, run.sizes["tensor"], traffic.pairs
    # If tensor doesn't divide the heads, every device computes all of attention: no reduction.
    is_whole = c.heads % n > 0
    out = blocks - (is_whole and blocks > 1)
    into = blocks if run.splits_time else out
    # Reductions out of a block forward, and into it backward. The reduced result is saved for the
    # backward pass, so recomputing doesn't reduce it again. Experts and the other branch share the
    # gather, except backward.
    beside = traffic.beside * run.routed / run.layers
    reductions = out * (1 + run.is_1f1b) + into + beside
    gathers = (blocks * run.forwards + out) * run.splits_time
    if c.overlap and run.splits_time:       # experts and unsplit blocks don't overlap
        inner = blocks - is_whole - run.routed / run.layers
        scatters, own = inner * (2 + run.is_1f1b), inner * (run.forwards + 1)
        gathers -= own
        reductions -= scatters + beside
        yield run.in_parts(run.layers * (scatters + own + beside * (1 + run.forwards)), run.X)
    times, X = run.layers * run.strips, run.X // run.strips
    yield run.reduce, "tensor", times * reductions, X, c.d_model
    yield "all-gather", "tensor", times * gathers, X, c.d_model
    if run.splits_time:
        # A norm's scale is whole, and each device has its gradient for only part of the sequence.
        yield "all-reduce", "tensor", run.layers * blocks, run.D_bytes
    if run.splits_time or not is_whole:
        # The gradients of wq and wo, and of wk and wv, if tensor doesn't divide their heads.
        for heads, row in ((c.heads, c.head_dim), (c.heads, c.d_model),
                           (c.kv_heads, c.head_dim), (c.kv_heads, c.head_dim)):
            if heads % n:
                yield "all-reduce", "tensor", run.layers, run.D_bytes * heads * c.head_dim, row
    if traffic.head_norms and not is_whole:     # two means per token, and their gradients
        yield "all-reduce", "tensor", run.layers * (run.forwards + 1), 2 * run.tokens * 4


def _vocabulary(run, rows):
    """4 (n-1)/n X for the embedding and the head over tensor, plus the loss's reductions over the
    parts of the logits."""
    S = run.sizes["pipe"]
    tokens = run.X_ends // run.D_bytes      # each stage's head gets a part of these
    chunks = loss_chunks(tokens // run.time, run.time // S // (
        run.sizes["tensor"] if run.splits_head else 1), rows)
    heads, X_head = run.heads * chunks, run.X_ends // S // chunks
    D = run.model.d_model
    yield run.reduce, "tensor", run.embeds, run.X_ends, D                       # the embedding
    yield "all-gather", "tensor", run.embeds * run.splits_time, run.X_ends, D   # its gradient
    if run.splits_head:
        if run.model.overlap:
            yield run.in_parts(2 * heads, X_head)
        else:
            yield "all-gather", "tensor", heads, X_head, D
            yield "reduce-scatter", "tensor", heads, X_head, D
        yield "all-reduce", "tensor", run.heads, run.D_bytes             # the last norm's scale
    else:       # gather the tokens before the stages divide them
        yield "all-gather", "tensor", run.heads * run.splits_time, run.X_ends, D
        yield "all-reduce", "tensor", heads, X_head, D
    # For each token's loss: the largest logit, the sum of exponentials, the target's logit.
    yield "all-reduce", "tensor", heads * 3, tokens // S // chunks * 4


def _experts(run):
    """4 (n-1) r X per layer with experts: buckets with room for a fraction r of the tokens, on the
    way to the experts and back, forward and backward. The indices of each token's experts and its
    routing weights go along. We expect a single round. Over tensor, each device routes its own
    tokens and gathers all choices."""
    c, n = run.model, run.sizes["expert"]
    on_tpu = platform(run.mesh) == "tpu"
    exchanges, layers = 3 + run.forwards + run.is_1f1b, run.routed
    rows = n * run.room.tokens
    yield "all-to-all", "expert", layers * exchanges, rows * run.D_bytes
    choices, routings = run.tokens * c.experts_per_token, layers * run.forwards
    here = rows * min(c.experts_per_token, c.experts // n)
    # The indices of the experts, and their weights, which have a gradient.
    for times, itemsize in ((routings, 4), (routings + layers, run.itemsize)):
        yield "all-to-all", "expert", times, here * itemsize
        yield "all-gather", "tensor", routings * run.splits_time, choices * itemsize
    # How many choices each device gets, and the two largest counts.
    if n > 1:
        yield "all-reduce", "expert", routings, n * 4
        yield ("all-reduce", "data+fsdp+seq+expert" + "+tensor" * run.splits_time, routings, 2 * 4)
    # The gradients of the routing weights. There are too few of them to fill a TPU tile. If they
    # don't come from expert, the TPU compiler sums them everywhere and slices.
    scatters = not on_tpu or n > 1 or c.experts_per_token >= 8
    yield run.reduce if scatters else "all-reduce", "tensor", layers, choices * run.itemsize
    if run.splits_time:
        # The router is whole. The TPU compiler rounds its gradient before the sum.
        yield ("all-reduce", "tensor", layers,
               c.d_model * c.experts * (run.itemsize if on_tpu else 4))
        yield "all-reduce", "tensor", run.ticks, (run.expert_layers * c.experts + 2) * 4  # metrics
    # Sums over the whole sequence: each expert's load per row and, outside the layers, the row's
    # weight.
    axes = "seq+tensor" if run.splits_time else "seq"
    yield "all-reduce", axes, routings, run.rows * c.experts * 4
    yield "all-reduce", axes, run.ticks, run.rows * 4


def _pipe(run):
    """2 X per tick, to the next stage and, backward, to the previous one. 2 (n-1)/n X at the end,
    when each stage receives its part of the last stage's output tokens for the head."""
    n, D = run.sizes["tensor"], run.model.d_model
    yield "collective-permute", "pipe", 2 * run.ticks, run.X // (n if run.splits_time else 1), D
    for kind in ("reduce-scatter", "all-gather"):
        yield kind, "pipe", run.heads, run.X_ends // (n if run.splits_head else 1), D


def _seq(run, segments):
    """4 (n-1) K per layer: keys and values go once around the ring, and their gradients go back.
    The slots and documents that determine which keys a query sees go with them. No layer changes
    these, so most programs send them once for all layers."""
    c, n, hops = run.model, run.sizes["tensor"], run.sizes["seq"] - 1
    K = run.tokens * math.lcm(c.kv_heads, n) // n * c.head_dim * run.itemsize
    yield "collective-permute", "seq", 2 * hops * run.layers * (run.forwards + 1), K
    times = hops * (run.config.accumulate + run.ticks * segments)
    yield "collective-permute", "seq", times, run.tokens * 4
