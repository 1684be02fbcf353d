# %% [markdown]
# # 9. Choosing a mesh: memory first, then bytes against arithmetic
# One idea: **an axis is chosen by what it divides and what it sends.** Memory says what must be
# split; the table of bytes says what that costs; the chip's rates say whether it hides behind the
# arithmetic.

# %%
import math
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
import train
from learn import lesson
from learn.lesson import check, compare, jax, jnp, np
from zigzag.commands import programs
from zigzag.core.chips import CHIPS

lesson.begin(8)

# %% [markdown]
# ## What each axis divides, and what it sends
# For one update, n devices on the axis, A parts of a batch, L layers, M microbatches that take
# `ticks` ticks. The other letters are bytes: G of a device's gradients in float32, W of the layers'
# weights after it has gathered them, X of the stream of one part before tensor cuts its time, K of
# one layer's keys of one part. Lessons 2 to 8 have derived these lines.
#
#     axis     divides                                sends
#     data     rows                                   2 (n-1)/n G
#     fsdp     rows, weights, gradients, optimizer    3 (n-1)/n W A
#     tensor   weights, and the stream's time         8 (n-1)/n X L A
#     seq      time                                   4 (n-1) K L A
#     expert   rows, experts                          4 (n-1) X L A
#     pipe     layers                                 2 X/t (ticks/M + (n-1)/n) A, and idle time
#
# Here t is the size of tensor: stages pass the stream on as tensor has cut it. One thing is new:
# each stage gets its part of the last X, for the loss, and sends its gradient back: (n-1)/n.
#
# The first line holds for every axis but tensor along which a weight is whole: seq sums all
# gradients, expert those outside the experts, pipe those of the embedding and the head. With
# activations recomputed (`--remat full`), whatever went into a layer's products goes once more:
# tensor's two gathers (10 in place of 8), seq's keys and values (6 in place of 4) and the tokens on
# the way to their experts (5 in place of 4). Reductions do not run again: what attention added is
# kept, and after the MLP's the next layer's input is, which is kept anyway.
#
# What is sent costs time only if nothing is computed meanwhile. fsdp's gather of the next layer can
# travel while this layer multiplies. tensor's feeds the very next product, and data's sum comes at
# the end: both add to the time.
#
# ## Inside a chip
# Before links there is memory. A product x [B, D] @ w [D, F] in bfloat16 takes 2 B D F operations
# and moves 2 (B D + D F + B F) bytes. The chip does both at once, so the slower one decides: that
# is its roofline. **Predict** which share of its rate a v5e reaches for 64 rows, D = 4,096 and F =
# 14,336. It does 197 teraflop/s, and its memory moves 819 GB/s.

# %%
share = ...

# %%
def product(B, D, F, chip):
    """(seconds of arithmetic, seconds of memory)"""
    return 2 * B * D * F / chip.flops, 2 * (B * D + D * F + B * F) / chip.bandwidth

arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 256), (256, 1024))]
counted = jax.jit(jnp.matmul).lower(*arrays).compile().cost_analysis()  # by the compiler
assert counted["flops"] == 2 * 8 * 256 * 1024
assert counted["bytes accessed"] == 4 * (8 * 256 + 256 * 1024 + 8 * 1024)      # in float32
for name in ("TPU v5 lite", "NVIDIA H100"):
    chip, rates = CHIPS[name], {}
    for rows in (1, 16, 64, 256, 1024):
        arithmetic, memory = product(rows, 4096, 14336, chip)
        rates[rows] = arithmetic / max(arithmetic, memory)
    print(f"{name}: flops / bandwidth = {chip.flops / chip.bandwidth:.0f};",
          ", ".join(f"{rows} rows {rate:.0%}" for rows, rate in rates.items()))
    compare(share if name.startswith("TPU") else ..., rates[64], "of the rate with 64 rows")

# %% [markdown]
# The weights dominate the bytes, 2 D F, so there are B operations for each byte of them. Below the
# *critical batch*, flops / bandwidth, a product waits for memory. A training step has thousands of
# tokens on a chip and is far above it; lesson 10 is about a loop that is far below.
#
# ## A model and a machine
# 8 billion weights on 64 chips of TPU v5e with 16 GB each. First, memory: with Adam in float32, 16
# bytes for each weight.

# %%
chips, memory, flops, link = 64, 16e9, 197e12, 90e9
weights, layers, width, rows = 8e9, 32, 4096, 64
print(f"weights, gradients and optimizer: {16 * weights / 1e9:.0f} GB; on each of {chips} chips "
      f"{16 * weights / chips / 1e9:.1f} GB")

# %% [markdown]
# So data parallelism alone is out (128 GB), and at least 16 chips (of powers of two) must share the
# state: on 8 it would be 16 GB each. Try every mesh of data, fsdp and tensor, with 64 rows of 4,096
# tokens, each chip's rows in one part, activations recomputed (8 operations for each weight and
# token), bfloat16:

# %%
def seconds(data, fsdp, tensor, time=4096):
    """The time of an update: of its arithmetic, and that which sending adds to it."""
    tokens = rows * time / (data * fsdp)
    arithmetic = 8 * weights * tokens / tensor / flops
    G, W, X = 4 * weights / (fsdp * tensor), 2 * weights / tensor, 2 * tokens * width
    beside = 3 * (fsdp - 1) / fsdp * W / link
    added = (2 * (data - 1) / data * G + 10 * (tensor - 1) / tensor * X * layers) / link
    return arithmetic, added + max(0, beside - arithmetic)

def fits(data, fsdp, tensor, time=4096):
    """Whether the state and the kept activations fit: a stream for each layer, two with tensor."""
    kept = (1 + (tensor > 1)) * 2 * rows * time / (data * fsdp) * width * layers / tensor
    return 16 * weights / (fsdp * tensor) + kept < 0.8 * memory

meshes = [(data, chips // data // tensor, tensor) for data in (1, 2, 4, 8, 16, 32, 64)
          for tensor in (1, 2, 4, 8) if data * tensor <= chips]
for mesh in sorted((m for m in meshes if fits(*m)), key=lambda m: sum(seconds(*m)))[:6]:
    arithmetic, added = seconds(*mesh)
    print("    data={} fsdp={} tensor={}:".format(*mesh),
          f"{arithmetic:.2f} s, and {added:.2f} s of sending")

# %% [markdown]
# fsdp alone hides its sending here. Its 3 W do not depend on the tokens: with shorter rows they no
# longer hide, and tensor, whose bytes shrink with the tokens, takes over. The picture has the roof
# of links, and how far each axis is from it.

# %%
for time in (4096, 1024, 256):
    best = min((m for m in meshes if fits(*m, time)), key=lambda m: sum(seconds(*m, time)))
    total = sum(seconds(*best, time))
    print(f"    rows of {time}: data={best[0]} fsdp={best[1]} tensor={best[2]}, {total:.2f} s, "
          f"{6 * weights * rows * time / chips / flops / total:.0%} of the chip's rate")
lesson.picture("roofline")

# %% [markdown]
# With fewer rows than chips, tensor or seq take the rest. The rate counts 6 operations for each
# weight and token: what is recomputed is no progress.
#
# ## The same by the program
# `--mesh auto` does this with all six axes, more cautiously: it adds the times of arithmetic and
# sending, and compiles up to three meshes until one fits. `--topology` compiles for chips that are
# not here (README has a line to try).
#
# Here, on simulated devices, a deep and narrow model in float32: the table as a function, and what
# the program sends. With pipe, L is of a stage, whose idle ticks send too, and a head sends for its
# part of the time. The embedding and the head are gathered once, and send 4 (n-1)/n X over tensor.
#
# **Predict**: data=8 sends 2 (n-1)/n G. In units of G, the float32 bytes of all gradients, what
# does fsdp=8 send, if nearly all weights are in layers and there is one part?

# %%
guess = {"data=8": ..., "fsdp=8": ...}

# %%
def predicted(run, n, weights):
    """Bytes of an update. run: the options; n: {axis: devices}; weights: [(shape, spec)]."""
    c, parts = run.network, run.accumulate
    tokens = run.batch * c.seq_len / parts / (n["data"] * n["fsdp"] * n["expert"] * n["seq"])
    X, K = 4 * tokens * c.d_model, 4 * tokens * c.kv_heads * c.head_dim / n["tensor"]
    M, S = c.microbatches if n["pipe"] > 1 else 1, n["pipe"]
    passes, layers = (M + S - 1) / M, c.layers / S      # (idle ticks send, too)
    again = c.remat == "full"
    sent = {"tensor": ((8 + 2 * again) * layers * passes + 2 + 2 / S) * (1 - 1 / n["tensor"])
            * X * parts,
            "seq": (4 + 2 * again) * (n["seq"] - 1) * K * layers * passes * parts,
            "expert": (4 + again) * (n["expert"] - 1) * X * layers * passes * parts,
            "pipe": (S > 1) * 2 * X / n["tensor"] * (passes + 1 - 1 / S) * parts,
            "fsdp": 0, "sums": 0}
    for shape, spec in weights:
        split = [axis for axis in n if f"'{axis}'" in str(spec)]
        bytes_here = 4 * math.prod(shape) / math.prod(n[axis] for axis in split)
        others = math.prod(n[axis] for axis in n if axis not in (*split, "tensor"))
        sent["sums"] += 2 * (1 - 1 / others) * bytes_here
        if "fsdp" in split:     # a tick gathers a stage's layers; embedding and head, the update
            times = 3 * M * passes * parts if len(shape) > 2 else 1 + parts
            sent["fsdp"] += times * (n["fsdp"] - 1) * bytes_here
    return sent

def by_program(*flags):
    program = programs.program_of(train.parse([
        "--layers", "32", "--d_model", "128", "--heads", "8", "--seq_len", "64", "--batch", "32",
        "--vocab_size", "257", *flags]))
    compiled = program.step.lower(program.state, program.batch).compile()
    found = sum(one.bytes for one in train.shard.collectives(compiled))
    weights = [(w.shape, w.sharding.spec) for w in jax.tree.leaves(program.state["params"])]
    by_hand = predicted(program.config, program.mesh.shape, weights)
    print(f"    {' '.join(flags)}: by hand {sum(by_hand.values()) / 1e6:.1f} MB, by the program "
          f"{found / 1e6:.1f}:", {name: round(x / 1e6, 1) for name, x in by_hand.items() if x})
    assert abs(sum(by_hand.values()) / found - 1) < 0.02
    return found / sum(4 * math.prod(shape) for shape, _ in weights)

for flags in ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=2,seq=4 --remat full"):
    times = by_program("--mesh", *flags.split())
    compare(guess.get(flags, ...), times, "G")

# %% [markdown]
# ## Rules of thumb
# 1. Rows first: data and fsdp, as far as the batch has rows.
# 2. fsdp where the state does not fit, which is nearly always; data as well where links are slow,
#    since it sends once. zigzag runs on one TPU slice: `make_mesh` refuses several.
# 3. tensor in a fast machine, if tokens are few or a layer does not fit; as far as heads divide.
# 4. seq for rows so long that one does not fit; expert for experts, before fsdp gathers them all.
# 5. pipe last: between machines, with many microbatches.
#
# ## When it pays
# Every figure above is an estimate by two rates. Before a long run, compile for the real machine,
# and then measure (`--bench`).
#
# ## Bugs
# Meshes that cannot be: 3 does not divide eight devices, four stages do not divide six layers,
# sixteen devices are more than eight, and a name is misspelt. train.py says so before it compiles.

# %%
def program_on(mesh):
    flags = ["--mesh", mesh, "--layers", "6", "--vocab_size", "257"]
    return programs.program_of(train.parse(flags))

for mesh in ("tensor=3", "pipe=4,data=2", "fsdp=8,tensor=2", "tensr=2"):
    print(f"{mesh}: {lesson.error_of(program_on, mesh)}")

# %% [markdown]
# ## Exercises
# - 9.1 How many chips of 16 GB does the state of a 70-billion model need, with Adam in float32 and
# nothing else in memory?
# - 9.2 fsdp=64, layers of 8e9 weights in bfloat16, 90 GB/s. How many seconds of sending has an
# update with one part?
# - 9.3 Which axis sends bytes that do not depend on the number of tokens, in every part of a batch?
# - 9.4 Code: the number of rows from which a product x [B, D] @ w [D, F], with weights in 8 bits
# and the rest in bfloat16, no longer waits for memory. `flops` and `bandwidth` are the chip's.

# %%
check("9.1", ...)
check("9.2", ...)
check("9.3", ...)

def critical_batch(D, F, flops, bandwidth):
    return ...

def at_that_batch():
    """Seconds of memory for one of arithmetic."""
    D, F, found = 4096, 14336, []
    for chip in CHIPS.values():
        B = critical_batch(D, F, chip.flops, chip.bandwidth)
        memory = (2 * B * D + D * F + 2 * B * F) / chip.bandwidth
        found.append(memory / (2 * B * D * F / chip.flops))
    return np.array(found)

check("9.4", lesson.tried(critical_batch, at_that_batch, np.ones(len(CHIPS))))
