"""A program's speed and memory, predicted before it runs.

    cost_model     an estimate from formulas, which takes microseconds per mesh
    work_of        the collectives and FLOPs of a compiled program
    peak_memory    the most memory it takes
"""

import contextlib
import math
import os
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from forecast.arithmetic import arithmetic
from forecast.traffic import rows_in_use
from zigzag.core.chips import Chip
from zigzag.core.errors import one_line
from zigzag.core.mesh import by_path
from zigzag.parallel import low_rank
from zigzag.parallel.attention import SCORES
from zigzag.parallel.experts import visits
from zigzag.parallel.hlo import Collective, collectives
from zigzag.parallel.network import flops_of_update
from zigzag.parallel.pipeline import can_skip, passes
from zigzag.parallel.products import LOGITS
from zigzag.parallel.remat import remat_of
from zigzag.run.plan import Program

# The usual way to count an update's FLOPs.
USUAL_COUNT = "6 per weight per token, and attention to every key"

# -------------------------------------------------------------------------------------------
# The estimate

# {--remat: (its cost in FLOPs and sending, relative to none, measured on compiled programs; a; b)}.
# Per token, a layer saves a d_model + b d_ff numbers for the backward pass.
REMAT = {"none": (1.0, 10, 4), "selective": (1.05, 6, 3), "full": (1.3, 2, 0),
         "offload": (1.3, 0, 0), "attention": (1.05, 10, 4), "mlp": (1.2, 10, 0),
         "attention,mlp": (1.25, 10, 0)}
# Bytes per parameter: float32 weights, gradients and two moments, plus a 16-bit copy.
STATE_BYTES = 18


class Cost(NamedTuple):
    """The cost of an update per device."""
    arithmetic: float           # seconds
    links: float                # seconds spent sending
    parts: dict[str, float]     # bytes of memory, by content

    @property
    def memory(self) -> float:
        return sum(self.parts.values())


def cost_model(config: Any, params: Any, sizes: dict[str, int], chip: Chip, flops: float
               ) -> Cost:
    """Roughly estimate the Cost of a transformer's update of `flops`, using the formulas in the
    README's table."""
    c = config.network
    d, f, p, s, e, t = (sizes[a] for a in ("data", "fsdp", "pipe", "seq", "expert", "tensor"))
    itemsize = jnp.dtype(c.dtype).itemsize
    less = 1 / itemsize if getattr(config, "send_dtype", "") else 1     # over fsdp, tensor and pipe
    # Per device: parameters before the split over fsdp, and how many of those are trained; layers,
    # entries of their stack (each has experts, if any), tokens, and the README's X and K.
    own, trained = (
        sum(w.size / (p if path.startswith("layers") or c.chunks == 1 else 1)
            / (e if ".e_" in path else 1) for path, w in by_path(tree).items()) / t
        for tree in (params, low_rank.split(params)[0] if c.lora_rank else params))
    layers, entries = c.layers / p, getattr(c, "expert_layers", c.layers) / p
    tokens = config.batch * c.seq_len / (d * f * e * s)
    X = tokens * c.d_model * itemsize
    K = tokens * c.kv_heads * c.head_dim * itemsize / t
    turns = 1       # a stage's passes per microbatch, including idle ones
    if p > 1:
        count = passes(p, c.microbatches, c.schedule, c.chunks, can_skip(sizes, c.overlap))
        turns = count / c.chunks / c.microbatches
    how = remat_of(c.remat)
    others = REMAT[",".join(how.parts) or how.policy]
    cost, of_model, of_ff = (how.share * a + (1 - how.share) * b
                             for a, b in zip(REMAT["full"], others))
    work = flops / math.prod(sizes.values()) * cost * turns
    room = c.experts and min(1, c.expert_room * visits(c.experts_per_token, c.experts // e, e))
    sent = (2 * (1 - 1 / (d * e * s)) * 4 * trained / f
            + less * ((1 - 1 / f) * (2 * own + trained) * itemsize * config.accumulate * turns
                      + layers * cost * 8 * (1 - 1 / t) * X + 4 * X * (p > 1))
            + 4 * cost * (layers * (s - 1) * K + entries * (e - 1) * room * X))
    kept = tokens / config.accumulate / t * layers * (of_model * c.d_model + of_ff * c.d_ff)
    return Cost(work / chip.flops, sent / chip.links, {
        "weights, gradients, optimizer": (STATE_BYTES * trained + itemsize * (own - trained)) / f,
        "activations kept for the backward pass": kept * itemsize,
        "logits, softmax, their gradients": 3 * 4 * min(LOGITS, tokens * c.vocab_size),
        "two layers' gathered weights and gradients": 4 * own * itemsize / entries,
        "attention's scores, in blocks": 6 * 4 * min(
            SCORES / 4, tokens / config.accumulate * c.seq_len * c.heads / t)})


# -------------------------------------------------------------------------------------------
# A compiled program

def work_of(program: Program, step: jax.stages.Compiled, expected: Sequence[Collective]
            ) -> tuple[Sequence[Collective], float, str]:
    """Return (a compiled step's collectives, its FLOPs per device, ""). If the compiler can't print
    the program, return `expected`, the usual FLOP count, and a string with the reason."""
    config, mesh = program.config, program.mesh
    try:
        with _without_stderr():
            return collectives(step), arithmetic(step, rows_in_use(config, mesh)), ""
    except jax.errors.JaxRuntimeError as e:
        return expected, flops_of_update(config) / mesh.size, (
            f"the compiler cannot print this program ({one_line(e)}), so its arithmetic and bytes "
            f"sent are the expected ones")


def peak_memory(compiled: jax.stages.Compiled) -> int:
    """Return a compiled program's peak memory per device, in bytes."""
    m = compiled.memory_analysis()
    at_most = (m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes
               - m.alias_size_in_bytes)
    # XLA's peak is useless in two cases: with --remat offload it includes host memory, and on a CPU
    # it omits temporaries.
    if m.host_temp_size_in_bytes or m.peak_memory_in_bytes < m.temp_size_in_bytes:
        return at_most
    return m.peak_memory_in_bytes or at_most


def least_times(compiled: Any, flops: float, sent: float, chip: Chip) -> dict[str, float]:
    """Return the seconds that a program takes at least. It reads its arguments, writes its outputs,
    and writes and reads its temporary memory."""
    m = compiled.memory_analysis()
    moved = m.argument_size_in_bytes + m.output_size_in_bytes + 2 * m.temp_size_in_bytes
    return dict(arithmetic=flops / chip.flops, memory=moved / chip.bandwidth, links=sent/chip.links)


@contextlib.contextmanager
def _without_stderr():
    """Hide whatever the compiler prints to stderr."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
