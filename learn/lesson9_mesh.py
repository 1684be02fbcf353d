# %% [markdown]
# # 9. Choosing a mesh: memory first, then bytes against arithmetic
#
# One idea: **an axis is chosen by what it divides and what it sends.** Memory says what must be
# split; the table of bytes says what that costs; the chip's rates say whether it hides behind the
# arithmetic.

# %%
import math
import sys

import jax

sys.path += [".", ".."]      # (the repository, from here or from learn/)

import train
from learn import lesson
from learn.lesson import check
from zigzag.commands import programs

lesson.begin(8)

# %% [markdown]
# ## What each axis divides, and what it sends
#
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
# (t is the size of tensor: stages pass the stream on as tensor has cut it.)
#
# One thing is new: at the end of a pipeline each stage gets its part of the last stage's X, for the
# loss (lesson 7 gave all of it to all stages), and sends its gradient back: the (n-1)/n.
#
# The first line holds for every axis but tensor along which a weight is whole: seq sums all
# gradients, expert those outside the experts, pipe those of the embedding and the head. With
# activations recomputed (`--remat full`), a layer's two gathers run once more, but not its
# reductions: what attention added is kept, and after the MLP's the next layer's input is, which is
# kept anyway. So tensor sends 10 in place of 8. Tokens go to their experts once more, but not back:
# 5 in place of 4.
#
# What is sent costs time only if nothing is computed meanwhile. fsdp's gather of the next layer can
# travel while this layer multiplies. tensor's gather feeds the very next product, and data's sum
# comes after the backward pass: both add to the time.
#
# ## A model and a machine
#
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
# How far is each axis from its roof? The operations that a chip does in the whole update for each
# byte that this axis, on 64 chips or on four, makes it send; with rows of 4,096 tokens and of 256:

# %%
for time in (4096, 256):
    work = 8 * weights * rows * time / chips
    print(f"    data=64, rows of {time}: {work / (2 * 63 / 64 * 4 * weights):,.0f}")
    print(f"    fsdp=64, rows of {time}: {work / (3 * 63 / 64 * 2 * weights):,.0f}")
print(f"    tensor=4, any rows: {8 * weights / (10 * 3 / 4 * 2 * 4 * width * layers):,.0f}; "
      f"the roof is at {flops / link:,.0f}")
lesson.picture("roofline")

# %% [markdown]
# fsdp alone hides its sending here. Its 3 W do not depend on the tokens: with shorter rows they no
# longer hide, and tensor, whose bytes shrink with the tokens, takes over:

# %%
for time in (4096, 1024, 256):
    best = min((m for m in meshes if fits(*m, time)), key=lambda m: sum(seconds(*m, time)))
    total = sum(seconds(*best, time))
    print(f"    rows of {time}: data={best[0]} fsdp={best[1]} tensor={best[2]}, {total:.2f} s, "
          f"{6 * weights * rows * time / chips / flops / total:.0%} of the chip's rate")

# %% [markdown]
# With fewer rows than chips, fsdp cannot take all chips either; then tensor or seq take the rest.
# (The rate counts 6 operations for each weight and token: what is recomputed is no progress.)

# %% [markdown]
# ## The same by the program
#
# `--mesh auto` does this with all six axes, more cautiously: it adds the times of arithmetic and
# sending, puts meshes that do not fit last, and compiles up to three until one fits. And
# `--topology` compiles the step of any mesh for chips that are not here, and prints its memory,
# arithmetic and bytes: python train.py --topology v5e:4x4 --mesh fsdp=16 --model 1.2b --batch 32
# --remat full. (It needs the package libtpu.)
#
# Here, on simulated devices, a deep and narrow model in float32: the table as a function, and what
# the program sends. (All axes together: L is of a stage, whose idle ticks send, too. The embedding
# and the head are gathered once in an update. With tensor, each of them sends the stream, and its
# gradient back: 4 (n-1)/n X more; under pipe, the head a stage's part of the time.)


# %%
def predicted(run, n, weights):
    """Bytes of an update. run: the options; n: {axis: devices}; weights: [(shape, spec)]."""
    c, parts = run.network, run.accumulate
    tokens = run.batch * c.seq_len / parts / (n["data"] * n["fsdp"] * n["expert"] * n["seq"])
    X, K = 4 * tokens * c.d_model, 4 * tokens * c.kv_heads * c.head_dim / n["tensor"]
    M, S = c.microbatches if n["pipe"] > 1 else 1, n["pipe"]
    passes, layers = (M + S - 1) / M, c.layers / S      # (idle ticks send, too)
    sent = {"tensor": (8 * layers * passes + 2 + 2 / S) * (1 - 1 / n["tensor"]) * X * parts,
            "seq": 4 * (n["seq"] - 1) * K * layers * passes * parts,
            "expert": 4 * (n["expert"] - 1) * X * layers * passes * parts,
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


def compare(*flags):
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


for flags in ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"):
    compare("--mesh", flags)

# %% [markdown]
# ## Rules of thumb
#
# 1. Rows first: data and fsdp, as far as the batch has rows.
# 2. fsdp where the state does not fit, which is nearly always; data beside it where links are slow
#    (between slices), since it sends once in an update.
# 3. tensor within a machine whose links are fast, when tokens on a chip are few or a layer does not
#    fit; no further than the heads divide.
# 4. seq for rows so long that one does not fit on a chip.
# 5. expert for experts, before fsdp gathers them all.
# 6. pipe last: between machines, with many microbatches.
#
# ## When it pays
#
# Every figure above is an estimate by two rates. Before a long run, compile for the real machine,
# and then measure (`--bench`).
#
# ## Bugs
#
# Meshes that cannot be. What does train.py say?

# %%
def program_on(mesh):
    flags = ["--mesh", mesh, "--layers", "6", "--vocab_size", "257"]
    return programs.program_of(train.parse(flags))


for mesh in ("tensor=3", "pipe=4,data=2", "fsdp=8,tensor=2", "tensr=2"):
    print(f"{mesh}: {lesson.error_of(program_on, mesh)}")

# %% [markdown]
# Eight devices do not divide by three; six layers do not divide over four stages; sixteen devices
# are more than eight; and a name is misspelt. All are said before anything is compiled.

# %% [markdown]
# ## Exercises
#
# 9.1 How many chips of 16 GB does the state of a 70-billion model need, with Adam in float32 and
# nothing else in memory?

# %%
check("9.1", ...)

# %% [markdown]
# 9.2 fsdp=64, layers of 8e9 weights in bfloat16, 90 GB/s. How many seconds of sending has an update
# with one part?

# %%
check("9.2", ...)

# %% [markdown]
# 9.3 Which axis sends bytes that do not depend on the number of tokens, in every part of a batch?

# %%
check("9.3", ...)
