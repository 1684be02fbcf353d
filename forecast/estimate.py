"""The speed and the memory of a program, predicted before it runs.

    cost_model     an estimate from formulas, which takes microseconds for a mesh
    auto_mesh      --mesh auto: the best mesh by that estimate that compiles and fits
    dry_run        --topology: the report on a program compiled for absent hardware
"""

import contextlib
import dataclasses
import os
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from zigzag.core.chips import CHIPS, USUAL_COUNT, Chip, chip_of, peak_memory
from zigzag.core.errors import ConfigError, human_bytes, one_line
from zigzag.core.mesh import abstract_mesh, all_meshes, by_path
from zigzag.core.report import Reporter
from zigzag.parallel import low_rank
from zigzag.parallel.attention import SCORES
from zigzag.parallel.hlo import Collective, arithmetic, collectives
from zigzag.parallel.pipeline import can_skip, passes
from zigzag.parallel.products import LOGITS
from zigzag.parallel.remat import remat_of

# -------------------------------------------------------------------------------------------
# The estimate

# The cost of --remat in arithmetic and sending, relative to none, measured on compiled programs;
# and the numbers that a layer saves for each token for the backward pass: a d_model + b d_ff.
REMAT = {"none": (1.0, 10, 4), "selective": (1.05, 6, 3), "full": (1.3, 2, 0),
         "offload": (1.3, 0, 0), "attention": (1.05, 10, 4), "mlp": (1.2, 10, 0),
         "attention,mlp": (1.25, 10, 0)}
# Bytes for each parameter: float32 weights, gradients and two moments, and a copy in 16 bits.
STATE_BYTES = 18
# The share of the memory that formulas may fill: a compiler needs some more than they say.
ROOM = 0.95
# The number of best meshes that are shown, and how many of them are compiled until one fits.
SHOWN, COMPILED = 5, 3


class Cost(NamedTuple):
    """The cost of an update on one device."""
    arithmetic: float           # seconds
    links: float                # seconds of sending
    parts: dict[str, float]     # bytes of memory, by what they hold

    @property
    def memory(self) -> float:
        return sum(self.parts.values())


def cost_model(config: Any, params: Any, sizes: dict[str, int], chip: Chip, *, flops: float
               ) -> Cost:
    """A rough estimate of the Cost of an update of `flops`, for a transformer, by the formulas in
    README's table."""
    c = config.network
    d, f, p, s, e, t = (sizes[a] for a in ("data", "fsdp", "pipe", "seq", "expert", "tensor"))
    itemsize = jnp.dtype(c.dtype).itemsize
    # The parameters of a device before the split over fsdp, and how many of these are trained; its
    # layers, its tokens, and README's X and K.
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
    cost, of_model, of_ff = _of_remat(c.remat)
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


def _of_remat(text):
    how = remat_of(text)
    others = REMAT[",".join(how.parts) or how.policy]
    return [how.share * a + (1 - how.share) * b for a, b in zip(REMAT["full"], others)]


def auto_mesh(config: Any, devices: Sequence[Any], params: Any, *, check: Callable,
              compile_program: Callable, flops: float, say: Callable) -> tuple[str, Any]:
    """(the text of --mesh, the result of compile_program) for the fastest mesh of these devices
    over which the model divides and that fits. The best few by the estimate are compiled.

    config                    with --dtype and --vocab_size resolved
    check(config, mesh)       raises ConfigError where the model or the batch does not divide
    compile_program(config)   a program and its compiled step"""
    known = chip_of(devices[0])
    chip, costs = known or CHIPS["TPU v5 lite"], []
    for sizes in all_meshes(len(devices)):
        # (The cost model assumes that tensor splits all heads and the MLP.)
        undivided = any(n % sizes["tensor"] for n in (config.network.heads, config.network.d_ff))
        if undivided or config.shards not in (0, sizes["tensor"]):
            continue
        mesh = ",".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "data=1"
        one = dataclasses.replace(config, mesh=mesh, shards=0)
        with contextlib.suppress(ConfigError):
            check(one, abstract_mesh(sizes))
            costs.append((one, cost_model(one, params, sizes, chip, flops=flops)))
    if not costs:
        raise ConfigError(f"--mesh auto: no mesh of {len(devices)} devices divides this model and "
                          f"--batch {config.batch}")
    # Meshes that do not fit come last; if none fits, the one that needs the least memory is first.
    costs.sort(key=lambda x: (max(1.0, x[1].memory / (ROOM * chip.memory)),
                              x[1].arithmetic + x[1].links))
    say(f"mesh     auto: {len(costs)} meshes of {len(devices)} devices, by the cost model" + (
        "" if known else " and the rates of a v5e, these devices' not being known"))
    if len(devices) == 1 and devices[0].platform == "cpu":
        say("         (XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates eight devices "
            "here)")
    for one, cost in costs[:SHOWN]:
        say(f"         {one.mesh:36} {_in_units(cost.arithmetic + cost.links, TIMES):>11}: "
            f"arithmetic {_in_units(cost.arithmetic, TIMES)}, links "
            f"{_in_units(cost.links, TIMES)}; about {_gib(cost.memory)} of "
            f"{chip.memory / 2**30:.0f} GiB")
    for one, _ in costs[:COMPILED]:
        try:
            ready = compile_program(one)
            peak = peak_memory(ready[1])
        except jax.errors.JaxRuntimeError as e:
            say(f"         {one.mesh} does not compile: {one_line(e)}")
            continue
        say(f"         {one.mesh} compiled: {_gib(peak)} a device")
        if peak < chip.memory:
            return one.mesh, ready
    raise ConfigError(f"--mesh auto: among {len(costs)} meshes of {len(devices)} devices, none of "
                      f"the {COMPILED} best has room for this; --remat full, more --accumulate or "
                      f"more devices would make room")


# -------------------------------------------------------------------------------------------
# A program for absent hardware

def dry_run(config: Any, mesh: Any, step: jax.stages.Compiled, reporter: Reporter, *, flops: float,
            expected: Sequence[Collective], complete: bool = True) -> None:
    """Report the memory, the arithmetic and the collectives of a compiled program, and the time
    that these take at the chip's published rates. `flops` are an update's, by the usual count."""
    chip, memory, flops = chip_of(mesh.devices.flat[0]), step.memory_analysis(), flops / mesh.size
    sends, done, error = work_of(config, mesh, step, flops=flops, expected=expected)
    if error:
        reporter.line(f"         {error}")
    else:
        reporter.collectives(sends, expected, complete)
    peak, sent = peak_memory(step), sum(c.bytes for c in sends)
    fits = "" if not chip else f", which has {_gib(chip.memory)}: " + (
        "it fits" if peak < chip.memory else "IT DOES NOT FIT")
    reporter.line(f"memory   {_gib(memory.argument_size_in_bytes)} of state and batch, "
                  f"{_gib(memory.temp_size_in_bytes)} of temporaries, peak {_gib(peak)} a device"
                  + fits)
    frozen = "; 4 per frozen weight" if config.network.lora_rank else ""
    reporter.line(f"compute  {_in_units(done, FLOPS, 2)} a device, {done / flops:.3f} times the "
                  f"usual count ({USUAL_COUNT}{frozen})")
    reporter.line(f"links    {_gib(sent)} sent by a device")
    if not chip:
        return
    takes = {"arithmetic": done / chip.flops, "memory": bytes_moved(step) / chip.bandwidth,
             "links": sent / chip.links}
    worst = max(takes, key=takes.get)
    least = takes[worst]
    speed = config.batch * config.network.seq_len / least
    speed = f"{speed:,.0f}" if speed < 1e6 else f"{speed / 1e6:,.1f} million"
    reporter.line(
        "bound    " + ", ".join(f"{k} {_in_units(v, TIMES)}" for k, v in takes.items())
        + f": a step takes at least {_in_units(least, TIMES)} ({worst}), "
        f"{speed} tokens/s, mfu at most "
        f"{flops / chip.flops / least:.1%}, if each runs at its published rate "
        f"({chip.flops / 1e12:.0f} Tflop/s, {chip.bandwidth / 1e9:.0f} GB/s, "
        f"{chip.links / 1e9:.0f} GB/s over all links) and all at once")


def work_of(config: Any, mesh: Any, step: jax.stages.Compiled, *, flops: float,
            expected: Sequence[Collective]) -> tuple[Sequence[Collective], float, str]:
    """(what a device sends in a compiled step, the operations that it does, ""). Where the compiler
    cannot print the program, they are `expected` and `flops`, and the text says so."""
    try:
        with _without_stderr():
            return collectives(step), arithmetic(step, _share_in_groups(config, mesh)), ""
    except jax.errors.JaxRuntimeError as e:
        return expected, flops, (f"the compiler cannot print this program ({one_line(e)}): its "
                                 f"arithmetic and what it sends are the expected ones")


def bytes_moved(step: jax.stages.Compiled) -> int:
    """The bytes that a compiled step moves from and to memory, if it reads what it is given once,
    and writes and reads its temporary memory once: the fewest."""
    m = step.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + 2 * m.temp_size_in_bytes


# Units from the largest to the smallest, with which a small model's numbers are not all 0.00.
FLOPS = {"Tflop": 1e12, "Gflop": 1e9, "Mflop": 1e6}
TIMES = {"ms": 1e-3, "us": 1e-6}


def _in_units(x, units, digits=1):
    """The number in the largest of these units of which it is at least a tenth."""
    name, unit = next((pair for pair in units.items() if 10 * x >= pair[1]), [*units.items()][-1])
    return f"{x / unit:,.{digits}f} {name}"


def _gib(size):
    return f"{size / 2**30:.2f} GiB" if 10 * size >= 2**30 else human_bytes(size)


def _share_in_groups(config, mesh):
    """The average share of tokens among the rows for which an expert's device has room."""
    devices = mesh.shape["expert"] if config.step == "shard_map" else 1
    room = min(config.network.experts_per_token, max(1, config.network.experts // devices))
    return config.network.experts_per_token / devices / room


@contextlib.contextmanager
def _without_stderr():
    """A context that hides what a compiler prints to stderr."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
