# %% [markdown]
# # 7. A pipeline: stages working on different microbatches
# One idea: **stage 0 starts microbatch 1 while stage 1 works on microbatch 0.** Each device has
# some of the layers; that makes it a stage. The pipeline cuts a batch into microbatches. All
# devices run the same program in ticks. In each tick, a stage works on one microbatch and sends the
# result on.

# %%
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson
from learn.lesson import P, check, compare, jax, jnp, lax, np, quote, sends, shard

lesson.begin(8)
S = 4                                               # stages
mesh = lesson.mesh(pipe=S)
rng = np.random.default_rng(0)
L, D, ROWS = 8, 128, 32
w = (rng.normal(size=(L, D, D)) * D**-0.5).astype(np.float32)
x = rng.normal(size=(ROWS, D)).astype(np.float32)

# %% [markdown]
# ## The timetable
# M microbatches take M + S - 1 ticks. A stage is idle in S - 1 of them, so it loses (S - 1) / (M +
# S - 1) of the time.

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
# Each device has 2 of the 8 layers. The loop carries one microbatch; `lax.ppermute` moves it to the
# next stage after each tick. Stage 0 takes a new microbatch instead, and ignores what the last
# stage sends it. A stage without work computes results that nobody reads.

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
    # The last stage's results, from tick S - 1 on, are the pipeline's results.
    return lax.psum(jnp.where(me == S - 1, out[S - 1:], 0), "pipe").reshape(ROWS, D)

def on_mesh(M):
    return jax.shard_map(lambda w, x: pipeline(w, x, M), in_specs=(P("pipe"), P()), out_specs=P())

want = layers(w, x)
print("wrong by", abs(on_mesh(4)(w, x) - want).max())

# %% [markdown]
# **Predict.** How many bytes does a device send with 4 microbatches, and how many with 8? A row has
# D float32 numbers. The all-reduce at the end adds 2 (n-1)/n times the size of all rows.

# %%
guess = {4: ..., 8: ...}

# %%
for M in (4, 8):
    compare(guess[M], found := sum(sends(on_mesh(M), w, x).values()))
    assert abs(found / (4 * D * (ROWS / M * (M + S - 1) + 2 * (S - 1) / S * ROWS)) - 1) < 0.02

# %% [markdown]
# Each of the M + S - 1 ticks sends one microbatch of ROWS / M rows.
#
# ## The backward pass
# Autodiff creates it: it reverses the ticks and transposes each `ppermute` into one in the opposite
# direction. So all forward ticks come before all backward ticks, and a stage keeps what it needs
# from all M microbatches. With `jax.checkpoint` around a tick, it keeps only the tick's input.

# %%
def gradients(M):
    return jax.grad(lambda w, x: (on_mesh(M)(w, x)**2).sum())

wanted = jax.grad(lambda w, x: (layers(w, x)**2).sum())(w, x)
print("wrong by", abs(gradients(4)(w, x) - wanted).max(), "of", abs(wanted).max())
quote(shard.gpipe)

# %% [markdown]
# ## 1F1B
# Stage s starts with S - s forward passes, then alternates between one forward and one backward.
# Its first microbatch passes S - 1 - s stages on the way to the loss, and as many on the way back.
# Until it returns, S - s microbatches wait, no matter how many there are in total. That saves
# memory but not time: 1F1B is idle as long as GPipe. Autodiff can't do this, because the first
# backward pass starts before the last forward pass ends. The loss must be inside the loop, and you
# have to write out the backward pass. In zigzag/parallel/pipeline.py, a tick has both: a stage runs
# one microbatch forward and one backward, which it recomputes from its input. Exercise 7.4 asks for
# that timetable. The next cell prints the largest number of waiting microbatches per stage:

# %%
for M in (4, 8, 32):
    print(f"    {M} microbatches: GPipe {[M] * S}, 1F1B {[min(M, S - s) for s in range(S)]}")

# %% [markdown]
# ## Interleaved
# Give each stage two non-adjacent chunks of layers. With 8 layers A to H on 4 stages, stage 0 has A
# and E, and stage 1 has B and F. A microbatch goes around twice, in ticks half as long, so the idle
# time halves: (S - 1) / (2 M + S - 1) of the total, if S divides M. The price is twice as many
# sends. `--schedule 1f1b --chunks 2` does both. The diagram shows the three schedules as this
# repository's loops run them, with a backward pass twice as long as a forward pass:

# %%
lesson.picture("timetables")

# %% [markdown]
# ## When it pays
# In each tick, a microbatch's t tokens go through the stage's part of all N weights. That's 2 t N /
# S operations for 2 t D bytes in bfloat16, or N / (S D) per byte. For N = 8e9, S = 4 and D = 4,096,
# that's 490,000, about 220 times what a v5e needs. So use a pipeline for models that don't fit
# otherwise, and for slow connections. The price is idle time, so it needs many microbatches.
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
# The type check catches the last one: stages have different values. With a single stage, the first
# two change nothing.
#
# ## Exercises
# - 7.1 With 8 stages and 8 microbatches, what fraction of the time is a stage idle?
# - 7.2 How many microbatches does it take to bring that below 10%?
# - 7.3 With two chunks per stage, 8 layers A to H and 4 stages, which layers does stage 2 have?
# - 7.4 Code: write the 1F1B timetable. In each tick, a stage runs at most one microbatch forward,
# then at most one backward, and sends both results on for the next tick. The last stage may turn a
# microbatch around in the same tick. Return both ticks of microbatch m on stage s. Make them as
# early as you can, because inputs wait in memory.

# %%
check("7.1", ...)
check("7.2", ...)
check("7.3", ...)

def ticks(s, m):                                # -> (the tick forward, the tick backward)
    return ...

def check_timetable(M=6):
    """Raises if a tick comes too early, or inputs wait too long; else returns 0."""
    for s in range(S):
        for m in range(M):
            (forward, backward), (first, last) = ticks(s, m), ticks(S - 1, m)
            assert s == 0 or forward > ticks(s - 1, m)[0], f"stage {s} has no input for {m} yet"
            assert last >= first and (s == S - 1 or backward > ticks(s + 1, m)[1]), (
                f"stage {s} has no gradient for microbatch {m} yet")
        for which in (0, 1):
            assert len({ticks(s, m)[which] for m in range(M)}) == M, "two microbatches in a tick"
        waits = max(sum(ticks(s, m)[0] <= t < ticks(s, m)[1] for m in range(M)) for t in range(99))
        assert waits <= 2 * (S - 1 - s) + 1, f"{waits} inputs wait on stage {s}"
    return 0

check("7.4", lesson.tried(ticks, check_timetable, 0))
