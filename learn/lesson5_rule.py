# %% [markdown]
# # 5. The alternating rule: how to split a function that nobody annotated
# One idea: **dimensions that meet in a product can only be split together, and a split has a
# price.** From that follows column, row, column, row, for any function.

# %%
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson, prices
from learn.lesson import P, check, compare, jax, jnp, np, shard
from zigzag.parallel import rule

lesson.begin(8)
mesh = lesson.mesh(tensor=4)

def zeros(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}

# %% [markdown]
# ## Two matrices
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
# The 256 KiB stand for the time that one more collective takes to start.
#
# **Predict** the price of F in the function below. x is [64, 64] float32 and data, so it needs no
# gradient.

# %%
price = ...

# %%
def two_matrices(w, x):
    return ((x + jax.nn.relu(x @ w["up"]) @ w["down"])**2).sum()

x = jax.ShapeDtypeStruct((64, 64), np.float32)
print(prices.table(two_matrices, zeros(up=(64, 256), down=(256, 64)), x, shards=4))

# %% [markdown]
# By hand: F is summed over once forward, in y = h @ down, which is [64, 64] float32, 16,384 bytes.
# Backward, the sum for x's gradient is not needed. So the price is (16,384 + 262,144) / 32,768
# = 8.5.
#
# D is refused whatever its price: no weight makes D before one reads it. The table shows 28 for it,
# where the head of zigzag/parallel/rule.py has 20, for the two matrices alone: a sum of h, and one
# of its gradient. This function has a third reduction over D, since it ends in a sum over all of y.
#
# The rule takes the cheapest group first, and splits a weight along one dimension only. A group
# that shares a weight with one already taken stays whole (unless it splits a quarter more numbers
# at about the same price: then it takes the other's place), and so does one whose length the axis
# does not divide. So `up` becomes a column and `down` a row: that is the alternation.

# %%
of_F, of_D = rule.groups(two_matrices, zeros(up=(64, 256), down=(256, 64)), x, shards=4)
compare(price, of_F.price, "is the price of F")
just_y = rule.groups(lambda w, x: x + jax.nn.relu(x @ w["up"]) @ w["down"], zeros(
    up=(64, 256), down=(256, 64)), x, shards=4)[1]
print(of_D.price, of_D.reductions, "reductions; without the last sum", just_y.price)

# %% [markdown]
# ## Attention
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
# **Square weights.** Shapes say nothing: in [256, 256] which dimension is hidden? The rule never
# looks at shapes. It follows the trace, so this is split as the first example was:

# %%
x = jax.ShapeDtypeStruct((64, 256), np.float32)
print(shard.infer_specs(two_matrices, zeros(up=(256, 256), down=(256, 256)), x, mesh=mesh))

# %% [markdown]
# **A residual connection.** x + y puts the result's D into the group of x's D: one group for the
# whole stack of blocks, which stays whole. Without it, three matrices in a row could be split
# column, row, column.
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
# In this lookup the table's rows are *indexed*: each device looks up the ids whose rows it has, and
# zeros for the others; one reduction adds them up. The other dimension, an *entry*, is copied as it
# is, so no weight makes this D, and it stays whole. There are more roles, for experts, reshapes, or
# q, k and v in one weight: see the head of zigzag/parallel/trace.py.
#
# ## When it pays
# A group is worth its price if its weights are large beside the activations that are summed. Some
# are not worth any price: groups that are four times narrower than what they read (the rank of an
# adapter, a few labels) are refused before prices are compared.
#
# ## Bugs
# A split by hand, with overrides. The first names an axis that this mesh does not have, so it cuts
# nothing; the third is kept ("u" is a pattern, which matches `up`). What cannot be meant is
# refused:

# %%
x = jax.ShapeDtypeStruct((64, 64), np.float32)
weights = zeros(up=(64, 256), down=(256, 64))
for overrides in ([("up", P(None, "data"))], [("up", P("tensor", "tensor"))], [("u", P("tensor"))],
                  [("upp", P("tensor"))]):
    said = lesson.error_of(lambda overrides=overrides: shard.infer_specs(
        two_matrices, weights, x, mesh=mesh, overrides=overrides))
    print(f"{overrides[0]}: {said}")

# %% [markdown]
# ## Exercises
# - 5.1 In `two_matrices` with 128 rows of x instead of 64, what is the price of F?
# - 5.2 A function has two blocks, each with its own up and down. How many reductions over tensor
# does the forward pass have?
# - 5.3 With 6 heads and tensor=4, are attention's heads split?
# - 5.4 Code: the price of F as a function, for x [rows, D] that may need a gradient. The check asks
# the rule itself.

# %%
check("5.1", ...)
check("5.2", ...)
check("5.3", ...)

def price_of(rows, D, F, has_gradient):
    return ...

def by_the_rule(rows, D, F, has_gradient):
    w = zeros(up=(D, F), down=(F, D), first=(3, D))

    def fn(w, x):
        return two_matrices(w, x @ w["first"] if has_gradient else x)

    x = jax.ShapeDtypeStruct((rows, 3 if has_gradient else D), np.float32)
    found = rule.groups(fn, w, x, shards=4)
    return next(g.price for g in found if ("down", 0) in {m[:2] for m in g.members})

SIZES = [(64, 64, 256, False), (128, 64, 512, False), (64, 128, 256, True)]
check("5.4", lesson.tried(price_of, lambda: np.array([price_of(*s) for s in SIZES]),
                          [by_the_rule(*s) for s in SIZES]))
