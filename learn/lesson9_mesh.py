# %% [markdown]
# # 9. Choosing a mesh: memory first, then bytes against arithmetic
# One idea: **choose an axis by what it divides and what it sends.** Memory determines what you must
# split, the table of bytes gives the cost, and the chip's rates determine whether the arithmetic
# hides that cost.

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
# The table covers one update, with n devices along the axis, A parts of a batch, L layers, and M
# microbatches that take `ticks` ticks. The remaining letters are bytes per device: G for the
# gradients in float32, W for the layers' weights after the gather, X for one part's stream before
# tensor splits the sequence, and K for one layer's keys in one part. Lessons 2 to 8 derived these
# lines.
#
#     axis     divides                                sends
#     data     rows                                   2 (n-1)/n G
#     fsdp     rows, weights, gradients, optimizer    3 (n-1)/n W A
#     tensor   weights, and the stream's sequence     8 (n-1)/n X L A
#     seq      the sequence                           4 (n-1) K L A
#     expert   rows, experts                          4 (n-1) r X L A
#     pipe     layers                                 2 X/t (ticks/M + (n-1)/n) A, and idle time
#
# Here t is the size of tensor: stages pass on the stream as tensor has split it. The (n-1)/n is
# new: each stage gets its part of the last X, for the loss, and sends the gradient back. r is the
# fraction of its tokens that a device has room for in a bucket (lesson 8).
#
# Except for tensor, the first line holds for every axis along which a weight is whole: seq sums all
# gradients, and expert sums all except the experts' gradients. Over pipe, the embedding and the
# head are gathered once and their gradients scattered, as over fsdp. If the backward pass
# recomputes activations (`--remat full`), the step resends the inputs of a layer's products:
# tensor's two gathers (10 instead of 8), seq's keys and values (6 instead of 4), and the tokens on
# the way to their experts (5 instead of 4). Reductions don't run again. A layer keeps attention's
# output, and the sum after the MLP is the next layer's input, which that layer keeps anyway.
#
# A send costs time only if no computation overlaps it. fsdp can gather the next layer while this
# layer multiplies. tensor's gather feeds the very next matmul, and data's sum comes at the end, so
# both add to the step time.
#
# ## Inside a chip
# A chip's memory can limit its speed before its links do. A product x [B, D] @ w [D, F] in bfloat16
# takes 2 B D F operations and moves 2 (B D + D F + B F) bytes. The chip does both at once, so the
# slower one decides: that's its roofline. **Predict** what fraction of its peak rate a v5e reaches
# for 64 rows, D = 4,096 and F = 14,336. It does 197 teraflop/s, and its memory moves 819 GB/s.

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
# The weights dominate the bytes, with 2 D F, so there are B operations per byte. Below the
# *critical batch*, flops / bandwidth, a matmul waits for memory. A training step has thousands of
# tokens per chip and is far above it; lesson 10 is about a loop far below it.
#
# ## A model and a machine
# Take 8 billion weights on 64 TPU v5e chips with 16 GB each. First, memory: Adam in float32 needs
# 16 bytes per weight.

# %%
chips, memory, flops, link = 64, 16e9, 197e12, 90e9
weights, layers, width, rows = 8e9, 32, 4096, 64
print(f"weights, gradients and optimizer: {16 * weights / 1e9:.0f} GB; on each of {chips} chips "
      f"{16 * weights / chips / 1e9:.1f} GB")

# %% [markdown]
# So data parallelism alone is impossible (128 GB). Counting in powers of two, at least 16 chips
# must share the state: on 8 it would take 16 GB each. Try every mesh of data, fsdp and tensor. Use
# 64 rows of 4,096 tokens, each chip's rows in a single part, recomputed activations (8 operations
# per weight and token), and bfloat16:

# %%
def seconds(data, fsdp, tensor, time=4096):
    """The seconds of an update's arithmetic, and the seconds that sending adds."""
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
# Here a mesh with fsdp alone hides its sends. Its 3 W doesn't depend on the tokens, so with shorter
# rows computing no longer hides the sends. tensor takes over, because its bytes shrink with the
# tokens. The diagram shows the roofline for links, and how far each axis is from it.

# %%
for time in (4096, 1024, 256):
    best = min((m for m in meshes if fits(*m, time)), key=lambda m: sum(seconds(*m, time)))
    total = sum(seconds(*best, time))
    print(f"    rows of {time}: data={best[0]} fsdp={best[1]} tensor={best[2]}, {total:.2f} s, "
          f"{6 * weights * rows * time / chips / flops / total:.0%} of the chip's rate")
lesson.picture("roofline")

# %% [markdown]
# With fewer rows than chips, tensor or seq splits the work over the remaining chips. The rate
# counts 6 operations per weight and token, because recomputation isn't progress.
#
# ## The same from the program
# `--mesh auto` does this for all six axes, more cautiously: it adds up the times for arithmetic and
# sending, and compiles up to three meshes until one fits. `--topology` compiles for chips you don't
# have (the README has a command to try).
#
# The next cell uses simulated devices and a deep, narrow model in float32. It compares the table,
# written as a function, with what the program sends. With pipe, L counts one stage's layers. Idle
# ticks send too, and each stage's head sends for its part of the sequence. The step gathers the
# embedding and the head once, and they send 4 (n-1)/n X over tensor.
#
# **Predict**: data=8 sends 2 (n-1)/n G. In units of G, the float32 bytes of all gradients, what
# does fsdp=8 send if nearly all weights are in layers and there's a single part?

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
    elsewhere = c.experts - c.experts // n["expert"]    # the experts not on a given device
    r = c.experts and min(1, 1.25 * (1 - math.comb(elsewhere, c.experts_per_token)
                                     / math.comb(c.experts, c.experts_per_token)))
    sent = {"tensor": ((8 + 2 * again) * layers * passes + 2 + 2 / S) * (1 - 1 / n["tensor"])
            * X * parts,
            "seq": (4 + 2 * again) * (n["seq"] - 1) * K * layers * passes * parts,
            "expert": (4 + again) * (n["expert"] - 1) * r * X * layers * passes * parts,
            "pipe": (S > 1) * 2 * X / n["tensor"] * (passes + 1 - 1 / S) * parts,
            "fsdp": 0, "sums": 0}
    for shape, spec in weights:
        split = [axis for axis in n if f"'{axis}'" in str(spec)]
        bytes_here = 4 * math.prod(shape) / math.prod(n[axis] for axis in split)
        others = math.prod(n[axis] for axis in n if axis not in (*split, "tensor"))
        sent["sums"] += 2 * (1 - 1 / others) * bytes_here
        if "pipe" in split and len(shape) == 2:     # the embedding and the head
            sent["pipe"] += (1 + parts) * (S - 1) * bytes_here
            bytes_here *= S                         # that fsdp gathers
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
# 1. Start with rows: data and fsdp, as long as the batch has enough rows.
# 2. Use fsdp if the state doesn't fit, which is nearly always. Add data if links are slow, because
#    it sends only once. Between TPU slices, only data sends.
# 3. Use tensor between chips with fast links, if there are few tokens or a layer doesn't fit, as
#    long as it divides the heads.
# 4. Use seq if even one row is too long to fit. Use expert for experts; otherwise, fsdp gathers
#    them all.
# 5. Use pipe last: between machines, with many microbatches.
#
# ## When it pays
# Every figure above is an estimate from two rates. Before a long run, compile for the real machine,
# then measure (`--bench`).
#
# ## Bugs
# These meshes are invalid: 3 doesn't divide eight devices, four stages don't divide six layers,
# sixteen devices are more than eight, and a name is misspelled. train.py tells you before it
# compiles.

# %%
def program_on(mesh):
    flags = ["--mesh", mesh, "--layers", "6", "--vocab_size", "257"]
    return programs.program_of(train.parse(flags))

for mesh in ("tensor=3", "pipe=4,data=2", "fsdp=8,tensor=2", "tensr=2"):
    print(f"{mesh}: {lesson.error_of(program_on, mesh)}")

# %% [markdown]
# ## Exercises
# - 9.1 How many 16 GB chips does the state of a 70-billion-weight model need, with Adam in float32
# and nothing else in memory?
# - 9.2 With fsdp=64, the layers have 8e9 weights in bfloat16, and links carry 90 GB/s. How many
# seconds does an update with a single part spend sending?
# - 9.3 Which axis sends bytes that do not depend on the number of tokens, in every part of a batch?
# - 9.4 Code: return the smallest number of rows for which a product x [B, D] @ w [D, F], with 8-bit
# weights and the rest in bfloat16, no longer waits for memory. `flops` and `bandwidth` are the
# chip's.

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
