"""The speed and the memory of a program, predicted before it runs.

    cost_model     an estimate from formulas, which takes microseconds for a mesh
    work_of        the collectives and the arithmetic of a compiled program
    bytes_moved    the bytes that it moves from and to memory
"""

import contextlib
import os
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from zigzag.core.chips import Chip
from zigzag.core.errors import one_line
from zigzag.core.mesh import by_path
from zigzag.parallel import low_rank
from zigzag.parallel.attention import SCORES
from zigzag.parallel.hlo import Collective, arithmetic, collectives
from zigzag.parallel.network import flops_of_update
from zigzag.parallel.pipeline import can_skip, passes
from zigzag.parallel.products import LOGITS
from zigzag.parallel.remat import remat_of
from zigzag.run.plan import Program

# -------------------------------------------------------------------------------------------
# The estimate

# The cost of --remat in arithmetic and sending, relative to none, measured on compiled programs;
# then a and b. For each token, a layer saves a d_model + b d_ff numbers for the backward pass.
REMAT = {"none": (1.0, 10, 4), "selective": (1.05, 6, 3), "full": (1.3, 2, 0),
         "offload": (1.3, 0, 0), "attention": (1.05, 10, 4), "mlp": (1.2, 10, 0),
         "attention,mlp": (1.25, 10, 0)}
# Bytes for each parameter: float32 weights, gradients and two moments, plus a copy in 16 bits.
STATE_BYTES = 18


class Cost(NamedTuple):
    """The cost of an update on one device."""
    arithmetic: float           # seconds
    links: float                # seconds of sending
    parts: dict[str, float]     # bytes of memory, by their content

    @property
    def memory(self) -> float:
        return sum(self.parts.values())


def cost_model(config: Any, params: Any, sizes: dict[str, int], chip: Chip, flops: float
               ) -> Cost:
    """Estimate the Cost of an update of `flops` for a transformer, roughly, by the formulas in
    README's table."""
    c = config.network
    d, f, p, s, e, t = (sizes[a] for a in ("data", "fsdp", "pipe", "seq", "expert", "tensor"))
    itemsize = jnp.dtype(c.dtype).itemsize
    # A device's parameters before the split over fsdp, and the trained ones among them; its layers,
    # its tokens, and README's X and K.
    own, trained = (
        sum(w.size / (p if path.startswith("layers") else 1) / (e if ".e_" in path else 1)
            for path, w in by_path(tree).items()) / t
        for tree in (params, low_rank.split(params)[0] if c.lora_rank else params))
    layers, tokens = c.layers / p, config.batch * c.seq_len / (d * f * e * s)
    X = tokens * c.d_model * itemsize
    K = tokens * c.kv_heads * c.head_dim * itemsize / t
    turns = 1       # passes of a stage for each microbatch, idle passes included
    if p > 1:
        count = passes(p, c.microbatches, c.schedule, c.chunks, can_skip(sizes, c.overlap))
        turns = count / c.chunks / c.microbatches
    how = remat_of(c.remat)
    others = REMAT[",".join(how.parts) or how.policy]
    cost, of_model, of_ff = (how.share * a + (1 - how.share) * b
                             for a, b in zip(REMAT["full"], others))
    work = flops / (d * f * p * s * e * t) * cost * turns
    sent = (2 * (1 - 1 / (d * e * s)) * 4 * trained / f
            + (1 - 1 / f) * (2 * own + trained) * itemsize * config.accumulate * turns
            + layers * cost * (
                8 * (1 - 1 / t) * X + 4 * (s - 1) * K + 4 * (e - 1) * X)
            + 4 * X * (p > 1))
    kept = tokens / config.accumulate / t * layers * (of_model * c.d_model + of_ff * c.d_ff)
    return Cost(work / chip.flops, sent / chip.links, {
        "weights, gradients, optimizer": (STATE_BYTES * trained + itemsize * (own - trained)) / f,
        "activations kept for the backward pass": kept * itemsize,
        "logits, softmax, their gradients": 3 * 4 * min(LOGITS, tokens * c.vocab_size),
        "two layers' gathered weights and gradients": 4 * own * itemsize / layers,
        "attention's scores, in blocks": 6 * 4 * min(
            SCORES / 4, tokens / config.accumulate * c.seq_len * c.heads / t)})


# -------------------------------------------------------------------------------------------
# A compiled program

def work_of(program: Program, step: jax.stages.Compiled, expected: Sequence[Collective]
            ) -> tuple[Sequence[Collective], float, str]:
    """Return (the collectives of a compiled step, its FLOPs on a device, ""). If the compiler
    cannot print the program, return `expected`, the usual count, and a text with the reason."""
    config, mesh = program.config, program.mesh
    c, devices = config.network, mesh.shape["expert"] if config.step == "shard_map" else 1
    # The rows for each token that fit on a device of experts; experts_per_token / devices are used.
    room = min(c.experts_per_token, max(1, c.experts // devices))
    try:
        with _without_stderr():
            return (collectives(step), arithmetic(step, c.experts_per_token / devices / room), "")
    except jax.errors.JaxRuntimeError as e:
        return expected, flops_of_update(config) / mesh.size, (
            f"the compiler cannot print this program ({one_line(e)}): its arithmetic and what it "
            f"sends are the expected ones")


def bytes_moved(step: jax.stages.Compiled) -> int:
    """The fewest bytes that a compiled step can move from and to memory: it reads its arguments
    once, writes its outputs once, and writes and reads its temporary memory once."""
    m = step.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + 2 * m.temp_size_in_bytes


@contextlib.contextmanager
def _without_stderr():
    """A context that hides a compiler's output to stderr."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
