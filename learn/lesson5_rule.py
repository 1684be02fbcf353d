# %% [markdown]
# # 5. The alternating rule: how to split a function that nobody annotated
#
# One idea: **dimensions that meet in a product can only be split together, and a split has a
# price.** From that follows column, row, column, row, for any function.

# %%
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path += [".", ".."]      # (the repository, from here or from learn/)

import shard
from learn import lesson, prices
from learn.lesson import check

lesson.begin(8)
mesh = lesson.mesh(tensor=4)


def zeros(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


# %% [markdown]
# ## Two matrices
#
# In x @ up the dimension D of x meets dimension 0 of `up`: if one is split, the other must be, or
# the product has nothing to multiply. Dimension 1 of `up` goes on into the hidden layer, through
# relu, and meets dimension 0 of `down`. So there are two groups: D and F.
#
# A group that is split makes devices send: wherever a product sums over it (it is *contracted*
# there; elsewhere it stays *free*), the partial sums must be added. The price is for each number of
# the weights that are split, since splitting more of them saves more:
#
#     (bytes of the arrays that are summed + 256 KiB x reductions) / elements of the weights
#
# The 256 KiB stand for the time that one more collective takes to start. (What must be sent because
# it is split along another dimension next counts in the same way.)


# %%
def two_matrices(w, x):
    return ((x + jax.nn.relu(x @ w["up"]) @ w["down"])**2).sum()


x = jax.ShapeDtypeStruct((64, 64), np.float32)
print(prices.table(two_matrices, zeros(up=(64, 256), down=(256, 64)), x, shards=4))

# %% [markdown]
# By hand: F is summed over once forward, in y = h @ down, which is [64, 64] float32, 16,384 bytes.
# (Backward, the sum for x's gradient is not needed: x is data.) So the price is
# (16,384 + 262,144) / 32,768 = 8.5.
#
# D is refused whatever its price: no weight makes D before one reads it. (A device could slice x,
# but then the sums would be of h, which is wider.)
#
# The cheapest group is taken first, and a weight is split along one dimension only: a group that
# shares a weight with one already taken stays whole (unless it splits a quarter more numbers at
# about the same price: then it takes the other's place), and so does one whose length the axis does
# not divide. So `up` becomes a column and `down` a row: that is the alternation.

# %%
assert (16384 + 2**18) / (2 * 64 * 256) == 8.5

# %% [markdown]
# ## Attention
#
# Queries, keys and values [D, H, N] and an output [H, N, D]. Heads H leave the first three as
# columns and enter the last as a row. N meets N within a head, in the scores; a split there would
# send the scores.


# %%
def attention(w, x):
    q, k, v = (jnp.einsum("btd,dhn->bthn", x, w[name]) for name in ("q", "k", "v"))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return ((x + jnp.einsum("bthn,hnd->btd", y, w["o"]))**2).sum()


x = jax.ShapeDtypeStruct((2, 32, 64), np.float32)
weights = zeros(q=(64, 8, 8), k=(64, 8, 8), v=(64, 8, 8), o=(8, 8, 64))
print(prices.table(attention, weights, x, shards=4))
print(shard.infer_specs(attention, weights, x, mesh=mesh))

# %% [markdown]
# ## What breaks it
#
# **Square weights.** Shapes say nothing: in [256, 256] which dimension is hidden? The rule never
# looks at shapes. It follows the trace, so this is split as the first example was:

# %%
x = jax.ShapeDtypeStruct((64, 256), np.float32)
print(shard.infer_specs(two_matrices, zeros(up=(256, 256), down=(256, 256)), x, mesh=mesh))

# %% [markdown]
# **A residual connection.** x + y puts the result's D into the group of x's D. Without it, three
# matrices in a row could be split column, row, column; with it, D is one group for the whole stack
# of blocks, and stays whole.
#
# **Tied tables.** A table that is looked up by rows and used again as the head is one weight with
# two uses: its rows are split for both.


# %%
def tied(w, ids):
    x = w["table"][ids]
    x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
    return jax.nn.logsumexp(x @ w["table"].T, -1).sum()


ids = jax.ShapeDtypeStruct((8, 32), np.int32)
weights = zeros(table=(1024, 64), up=(64, 256), down=(256, 64))
print(shard.infer_specs(tied, weights, ids, mesh=mesh))

# %% [markdown]
# So a dimension has other roles than *free* and *contracted*. In a lookup, the table's rows are
# *indexed*: each device looks up the ids whose rows it has, puts zeros for the others, and one
# reduction adds these up. The table's other dimension is an *entry*, copied as it is. Batches of
# products (experts) and what a scan counts (layers) have axes of their own. A group is only split
# if a weight *makes* it (free, indexed, or in a batch) before one reads it, or if what is sent from
# such a group is split along it. An entry makes nothing, so this D stays whole. A reshape of
# [D, H N] to [D, H, N] hands the split to the first of the new dimensions, H, if the axis divides
# it: a device then has whole heads. Attention refuses a split inside the heads, and the price of H
# N has one send of the result in any case.
#
# **Fused weights.** One product makes q, k and v side by side, [D, 3 H N], and slices them. Cut in
# four, the first device has three quarters of q and nothing of k; the second the rest of q and half
# of k. These are whole heads, but not the same heads of q, k and v. The rule splits the weight, and
# adds to its price what it costs to send the slices where their heads are.


# %%
def fused(w, x):
    B, T, D = x.shape
    q, k, v = (a.reshape(B, T, 8, 8) for a in jnp.split(x @ w["qkv"], 3, -1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, 64)
    return ((x + y @ w["o"])**2).sum()


x = jax.ShapeDtypeStruct((2, 32, 64), np.float32)
print(prices.table(fused, zeros(qkv=(64, 192), o=(64, 64)), x, shards=4))

# %% [markdown]
# ## When it pays
#
# A group is worth its price if its weights are large beside the activations that are summed. Some
# are not worth any price: groups that are four times narrower than what they read (the rank of an
# adapter, a few labels) are refused before prices are compared.
#
# ## Bugs
#
# A split by hand, with overrides. The first names an axis that this mesh does not have, so it cuts
# nothing; the third is kept ("u" is a pattern, which matches `up`). What cannot be meant is
# refused:

# %%
P = jax.P
x = jax.ShapeDtypeStruct((64, 64), np.float32)
weights = zeros(up=(64, 256), down=(256, 64))
for overrides in ([("up", P(None, "data"))], [("up", P("tensor", "tensor"))], [("u", P("tensor"))],
                  [("upp", P("tensor"))]):
    said = lesson.error_of(lambda overrides=overrides: shard.infer_specs(
        two_matrices, weights, x, mesh=mesh, overrides=overrides))
    print(f"{overrides[0]}: {said}")

# %% [markdown]
# ## Exercises
#
# 5.1 In `two_matrices` with 128 rows of x instead of 64, what is the price of F?

# %%
check("5.1", ...)

# %% [markdown]
# 5.2 A stack of two blocks, each with its own up and down, is in one function. How many reductions
# over tensor does the forward pass have?

# %%
check("5.2", ...)

# %% [markdown]
# 5.3 With 6 heads and tensor=4, are attention's heads split?

# %%
check("5.3", ...)
