# %% [markdown]
# # 10. Inference: prefill is arithmetic, decode is memory
# One idea: **to generate one token, a chip reads all the weights.** A thousand-token prompt needs a
# single read; a thousand-token answer needs a thousand. So a decoding step waits for memory, and
# decoding more rows together is almost free.

# %%
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
import model
import sample
from learn import lesson
from learn.lesson import check, compare, jax, jnp, np, quote, shard
from zigzag.core.chips import CHIPS

lesson.begin(8)
c = model.Config(layers=2, d_model=64, heads=4, kv_heads=2, d_ff=128, vocab_size=96, seq_len=64)
params, prompt = model.init(c, jax.random.key(0)), list(range(1, 9))

# %% [markdown]
# ## Without a cache, then with one
# `generate_slowly` runs the whole text through the network for each new token. But attention is
# causal, so nothing before the new token changes. Each layer needs only the keys and values of the
# earlier tokens, so keep them. The first call of `extend` reads the prompt (**prefill**); each
# later call reads a single token (**decode**). Both ways give the same ids.

# %%
want = sample.generate_slowly(params, prompt, c, tokens=8, temperature=0)
assert sample.generate_simply(params, prompt, c, tokens=8, temperature=0) == want
quote(sample.generate_simply)

# %% [markdown]
# ## The cache
# **Predict** the cache's size in bytes for 3 rows of 64 tokens, with two layers and two key heads
# of width 16 (shared by the four query heads), in float32.

# %%
cache_bytes = ...

# %%
cache = sample.engine_of(c).empty_cache(3, 64, jnp.float32)
compare(cache_bytes, found := sum(a.nbytes for a in jax.tree.leaves(cache)))
assert found == 2 * c.layers * c.kv_heads * c.head_dim * 64 * 3 * 4

# %% [markdown]
# The cache holds keys and values for each layer, key head and token: per token, 2 L K N times the
# bytes per number. Grouped queries make it smaller: with 4 key heads, it would be twice as large.
#
# ## What a pass costs
# **Predict**: prefill reads 8 tokens, and decode reads one. By what factor do their operation
# counts differ? And by what factor do the bytes they move to and from memory?

# %%
guess = {"operations": ..., "bytes": ...}

# %%
weights = sample.for_decoding(params, c)

def cost(tokens, rows=1):
    """What the compiler counts for one pass: operations, and bytes from and to memory."""
    cache = sample.engine_of(c).empty_cache(rows, 32, jnp.float32)
    step = jax.jit(lambda w, cache, ids: model.extend(w, cache, ids, 0, jnp.zeros(rows, int), c))
    counted = step.lower(weights, cache, jnp.zeros((rows, tokens), int)).compile().cost_analysis()
    return counted["flops"], counted["bytes accessed"]

prefill, decode, together = cost(8), cost(1), cost(1, rows=8)
for at, name in enumerate(guess):
    compare(guess[name], prefill[at] / decode[at], f"times the {name}")
    print(f"    eight rows that decode together: {together[at] / decode[at]:.2f} times")
assert 7 < prefill[0] / decode[0] < 9 and prefill[1] / decode[1] < 3

# %% [markdown]
# Eight tokens need eight times the arithmetic, but not eight times the bytes, because they share
# the weights. They can be in one row or in eight; only the cache is separate for each row.
#
# ## Why batch matters
# Take 8 billion weights in bfloat16 on one H100, as in Llama 3: 32 layers, 8 key heads of width
# 128, and 8,192 tokens in each row's cache. By lesson 9's roofline, a step takes as long as the
# slower of two things: 2 x 8e9 x rows operations, or one read of all weights and caches.
# **Predict** the tokens per second for a single row.

# %%
speed = ...

# %%
chip, numbers = CHIPS["NVIDIA H100"], 8e9
of_row = 2 * 32 * 8 * 128 * 8192 * 2            # bytes of its cache
print(f"weights {2 * numbers / 1e9:.0f} GB, and {of_row / 1e9:.2f} GB for each row's cache")
for rows in (1, 8, 32, 128, 512):
    arithmetic = 2 * numbers * rows / chip.flops
    memory = (2 * numbers + of_row * rows) / chip.bandwidth
    fits = 2 * numbers + of_row * rows < chip.memory
    print(f"    {rows} rows: {rows / max(arithmetic, memory):,.0f} tokens/s, "
          f"{arithmetic / max(arithmetic, memory):.1%} of the chip's rate"
          f"{'' if fits else ' (does not fit in its memory)'}")
    if rows == 1:
        compare(speed, 1 / max(arithmetic, memory), "tokens/s")

# %% [markdown]
# More rows share the read of the weights, until the chip mostly reads caches. After that, more rows
# don't help, and they fill the chip's memory. So servers batch requests, and models shrink the
# cache, with fewer key heads, a window, latent vectors or 8-bit numbers.
#
# ## On a mesh
# tensor splits the weights and the cache, so each of n chips reads 1/n of both: it's the axis for
# speed. You can't split a single token along the sequence, so `shard.row` ends in an all-reduce.
# **Predict** how many all-reduces a four-layer model needs per token. The vocabulary is split too.

# %%
reductions = ...

# %%
four = model.Config(layers=4, d_model=64, heads=4, d_ff=128, vocab_size=128, seq_len=64)
with jax.set_mesh(shard.make_mesh(jax.devices()[:4], tensor=4)) as mesh:
    specs = model.weight_specs(four, jax.sharding.get_abstract_mesh())
    split = jax.tree.map(lesson.place, model.init(four, jax.random.key(0)), specs)
    compiled = jax.jit(lambda w, ids: sample.generate_ids(w, {"tokens": ids}, four, 8, 0.0)).lower(
        split, jnp.zeros((8, 8), jnp.int32)).compile()
found = {one.kind: one for one in shard.collectives(compiled)}
compare(reductions, found["all-reduce"].count, "all-reduces in the loop over tokens")
assert found["all-reduce"].bytes == (2 * four.layers + 1) * 2 * 3 / 4 * (4 * 8 * four.d_model)

# %% [markdown]
# There are two per layer and one for the embedding, each of a [rows, D] array. They send few bytes,
# so their startup cost is what counts. The remaining collectives are for the prompt and the logits.
# fsdp would gather all weights for each token, so don't decode with it. data adds copies of the
# model, each with different rows.
#
# ## When it pays
# Below the critical batch, a step's time is the bytes it reads divided by the bandwidth. To answer
# one user faster, read fewer bytes per chip (tensor, or smaller numbers). For more users, add rows.
#
# ## Bugs

# %%
BUGS = {"a cache that is not kept": ("x, cache = extend(params, cache, new", "x, _ = extend("
                                     "params, cache, new"),
        "the logits after the prompt's first token": ("x[:, -1:]", "x[:, :1]"),
        "a first token that counts as padding": ("np.zeros(1, int)", "np.ones(1, int)")}
for name, (right, wrong) in BUGS.items():
    ids = lesson.planted(sample.generate_simply, right, wrong)(params, prompt, c, 8, 0)
    print(f"{name}: {sum(a != b for a, b in zip(ids, want))} of {len(want)} ids differ")

# %% [markdown]
# All of them run and generate plausible text. So keep a slow reference, and compare against it.
#
# ## Exercises
# - 10.1 How many bytes of cache does a token need in a model with 32 layers and 8 key heads of
# width 128, in bfloat16?
# - 10.2 A chip does 990 teraflop/s and moves 3.3 TB/s. How many rows must decode together before
# memory no longer limits a product with bfloat16 weights?
# - 10.3 On a chip with the same memory bandwidth and twice the arithmetic rate, which gets faster,
# prefill or decode?
# - 10.4 Code: find the wrong line in this copy of `generate_simply`. Give a piece of it and its
# replacement.

# %%
check("10.1", ...)
check("10.2", ...)
check("10.3", ...)
lesson.broken("10.4", sample.generate_simply)
wrong, right = ..., ...
check("10.4", lesson.repaired(
    "10.4", sample.generate_simply, wrong, right,
    lambda f: lambda: np.array(f(params, prompt, c, 8, 0)), np.array(want)))
