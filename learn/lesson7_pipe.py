# %% [markdown]
# # 7. A pipeline: stages that work on different microbatches
#
# One idea: **stage 0 starts microbatch 1 while stage 1 works on microbatch 0.** A device has some
# of the layers: it is a stage. Rows are cut into microbatches. All devices run the same program, in
# ticks; in each tick a stage works on one microbatch, and sends the result on.

# %%
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

sys.path += [".", ".."]      # (the repository, from here or from learn/)

import shard
from learn import lesson
from learn.lesson import check, quote, sends

lesson.begin(8)
S = 4                                               # stages
mesh = lesson.mesh(pipe=S)
rng = np.random.default_rng(0)
L, D, ROWS = 8, 128, 32
w = (rng.normal(size=(L, D, D)) * D**-0.5).astype(np.float32)
x = rng.normal(size=(ROWS, D)).astype(np.float32)

# %% [markdown]
# ## The timetable
#
# M microbatches take M + S - 1 ticks. A stage is idle in S - 1 of them: the share
# (S - 1) / (M + S - 1) of the time is lost.


# %%
def timetable(M):
    for stage in range(S):
        print(f"    stage {stage} |", *(f"{t - stage}" if 0 <= t - stage < M else "."
                                       for t in range(M + S - 1)))
    print(f"    idle: {(S - 1) / (M + S - 1):.0%}")


timetable(4)
timetable(8)

# %% [markdown]
# ## The pipeline
#
# A device has 2 of 8 layers. The loop carries one microbatch; `lax.ppermute` moves it to the next
# stage after each tick. Stage 0 takes a new one instead, so what the last stage sends it is not
# used. A stage without work computes something that nobody reads.


# %%
def layers(w, x):
    return lax.scan(lambda x, w: (x + jax.nn.relu(x @ w), None), x, w)[0]


def pipeline(w, x, M):                              # w [L/4, D, D]; x [ROWS, D] on every device
    me, S = lax.axis_index("pipe"), lax.axis_size("pipe")
    xs = x.reshape(M, -1, D)

    def tick(carried, t):
        x = jnp.where(me == 0, xs[jnp.clip(t, 0, M - 1)], carried)
        y = layers(w, x)
        return lax.ppermute(y, "pipe", [(s, (s + 1) % S) for s in range(S)]), y

    start = lax.pcast(jnp.zeros_like(xs[0]), "pipe", to="varying")
    _, out = lax.scan(tick, start, jnp.arange(M + S - 1))
    # The last stage's results, from tick S - 1 on, are those of the pipeline.
    return lax.psum(jnp.where(me == S - 1, out[S - 1:], 0), "pipe").reshape(ROWS, D)


def on_mesh(M):
    return jax.shard_map(lambda w, x: pipeline(w, x, M), in_specs=(P("pipe"), P()), out_specs=P())


want = layers(w, x)
print("wrong by", abs(on_mesh(4)(w, x) - want).max())

# %% [markdown]
# Each tick sends one microbatch of ROWS / M rows; then the all-reduce of the results.

# %%
for M in (4, 8):
    predicted = 4 * D * (ROWS / M * (M + S - 1) + 2 * (S - 1) / S * ROWS)
    print(f"{M} microbatches: predicted {predicted:,.0f}")
    assert abs(sum(sends(on_mesh(M), w, x).values()) / predicted - 1) < 0.02

# %% [markdown]
# ## The backward pass
#
# Autodiff makes it: the ticks in reverse, each `ppermute` transposed into one the other way. So all
# forward ticks come before all backward ticks, and a stage keeps what it needs of all M
# microbatches. (`jax.checkpoint` around a tick keeps only its input.)

# %%
def gradients(M):
    return jax.grad(lambda w, x: (on_mesh(M)(w, x)**2).sum())


wanted = jax.grad(lambda w, x: (layers(w, x)**2).sum())(w, x)
print("wrong by", abs(gradients(4)(w, x) - wanted).max(), "of", abs(wanted).max())
quote(shard.gpipe)

# %% [markdown]
# ## 1F1B
#
# Stage s starts with S - s forward passes, then alternates: one forward, one backward. Its first
# microbatch meets S - 1 - s stages on the way to the loss, and as many on the way back; until it
# returns, S - s microbatches wait, however many there are. That saves memory, not time: the idle
# share is GPipe's. Autodiff cannot do this, since the backward pass of the first microbatch begins
# before the forward pass of the last one has ended: the loss must be computed inside the loop, and
# the backward pass written out. (In zigzag/parallel/pipeline.py a tick has a forward and a backward
# pass. Stage s takes microbatch m forward in tick m + s, and backward in tick m + 2 S - 1 - s. So
# up to 2 (S - s) inputs wait there; the rest is recomputed.) The largest number of microbatches
# that wait for their backward pass, if a stage alternates without waiting for a tick:

# %%
for M in (4, 8, 32):
    print(f"    {M} microbatches: GPipe {[M] * S}, 1F1B {[min(M, S - s) for s in range(S)]}")

# %% [markdown]
# ## Interleaved
#
# Give each stage two chunks of layers that are not neighbours: with 8 layers A to H on 4 stages,
# stage 0 has A and E, stage 1 has B and F. A microbatch goes around twice, in ticks half as long,
# so the idle time is half: (S - 1) / (2 M + S - 1) of the time, if S divides M. It sends twice as
# often. The three, as this repository's loops run them, with a backward pass that takes twice as
# long as a forward pass:

# %%
lesson.picture("timetables")

# %% [markdown]
# ## When it pays
#
# In a tick, t tokens of a microbatch meet a stage's part of all N weights: 2 t N / S operations for
# 2 t D bytes in bfloat16, N / (S D) for each byte. For N = 8e9, S = 4 and D = 4,096 that is
# 490,000, some 220 times what a v5e needs. So a pipeline is for models that do not fit
# otherwise, and for slow connections. Its price is the idle time, so it needs many microbatches.
#
# ## Bugs

# %%
BUGS = {"results from the first tick on": ("out[S - 1:]", "out[:M]"),
        "the results of all stages": ("jnp.where(me == S - 1, out[S - 1:], 0)", "out[S - 1:]"),
        "no sum over stages": ('lax.psum(jnp.where(me == S - 1, out[S - 1:], 0), "pipe")',
                               "jnp.where(me == S - 1, out[S - 1:], 0)")}
for name, (right, wrong) in BUGS.items():
    buggy = lesson.planted(pipeline, right, wrong)
    lesson.report(name, lambda w, x, buggy=buggy: buggy(w, x, 4), (P("pipe"), P()), P(),
                  want, w, x)

# %% [markdown]
# The type finds the last: stages have different values. On one stage the others change nothing:
# S - 1 is 0, and every stage is the last. Always compare on more.
#
# ## Exercises
#
# 7.1 With 8 stages and 8 microbatches, which share of the time is lost?

# %%
check("7.1", ...)

# %% [markdown]
# 7.2 How many microbatches bring that below 10%?

# %%
check("7.2", ...)

# %% [markdown]
# 7.3 With two chunks a stage, 8 layers A to H and 4 stages: which layers has stage 2?

# %%
check("7.3", ...)
