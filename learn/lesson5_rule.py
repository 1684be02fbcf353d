# %% [markdown]
# # 5. The alternating rule: how to split a function that nobody annotated
# One idea: **dimensions that meet in a product can only be split together, and a split has a
# price.** Column, row, column, row follows from that, for any function.

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
# In x @ up, dimension D of x meets dimension 0 of `up`. If you split one, you must split the other;
# otherwise the parts don't match. Dimension 1 of `up` continues into the hidden layer, through
# relu, and meets dimension 0 of `down`. So there are two groups: D and F.
#
# If you split a group, devices must send. Wherever a product sums over the group (it's *contracted*
# there; elsewhere it stays *free*), the devices have to add up partial sums. The price is per
# element of the split weights, because splitting more elements saves more:
#
#     (bytes of the arrays that are summed + 256 KiB x reductions) / elements of the weights
#
# The 256 KiB represents the startup cost of one more collective.
#
# **Predict** the price of F in the function below. x is a [64, 64] array of float32 data, so it
# needs no gradient.

# %%
price = ...

# %%
def two_matrices(w, x):
    return ((x + jax.nn.relu(x @ w["up"]) @ w["down"])**2).sum()

x = jax.ShapeDtypeStruct((64, 64), np.float32)
print(prices.table(two_matrices, zeros(up=(64, 256), down=(256, 64)), x, shards=4))

# %% [markdown]
# By hand: the forward pass sums over F once, in y = h @ down, a [64, 64] float32 array of 16,384
# bytes. The backward pass doesn't need the sum for x's gradient. So the price is (16,384 + 262,144)
# / 32,768 = 8.5.
#
# The rule rejects D regardless of its price: no weight produces D before a weight reads it. The
# table shows 28 for D, while the top of zigzag/parallel/rule.py gives 20. That 20 covers only the
# two matrices: a sum of h, and a sum of its gradient. This function has a third reduction over D,
# because it ends in a sum over all of y.
#
# The rule takes the cheapest group first, and splits each weight along only one dimension. A group
# stays whole if it shares a weight with a group already taken, unless it splits a quarter more
# elements at about the same price; then it replaces that group. A group also stays whole if the
# axis doesn't divide its length. So `up` becomes a column and `down` a row: that's the alternation.

# %%
of_F, of_D = rule.groups(two_matrices, zeros(up=(64, 256), down=(256, 64)), x, shards=4)
compare(price, of_F.price, "is the price of F")
just_y = rule.groups(lambda w, x: x + jax.nn.relu(x @ w["up"]) @ w["down"], zeros(
    up=(64, 256), down=(256, 64)), x, shards=4)[1]
print(of_D.price, of_D.reductions, "reductions; without the last sum", just_y.price)

# %% [markdown]
# ## Attention
# Attention has query, key and value weights [D, H, N] and an output weight [H, N, D]. The heads H
# are columns of the first three weights and rows of the last. N meets N within a head, in the
# scores; splitting N would mean sending the scores.

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
# **Square weights.** Shapes don't tell you anything: which dimension of [256, 256] is the hidden
# one? The rule never looks at shapes. It follows the trace, so it splits this function as it split
# the first example:

# %%
x = jax.ShapeDtypeStruct((64, 256), np.float32)
print(shard.infer_specs(two_matrices, zeros(up=(256, 256), down=(256, 256)), x, mesh=mesh))

# %% [markdown]
# **A residual connection.** x + y puts the result's D into the group of x's D. That makes a single
# group for the whole stack of blocks, and it stays whole. Without the residual connection, you
# could split three consecutive matrices as column, row, column.
#
# **Tied tables.** If a function looks up rows in a table and uses the table again as the head, the
# table is a single weight with two uses. The rule splits its rows for both.

# %%
def tied(w, ids):
    x = w["table"][ids]
    x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
    return jax.nn.logsumexp(x @ w["table"].T, -1).sum()

ids = jax.ShapeDtypeStruct((8, 32), np.int32)
weights = zeros(table=(1024, 64), up=(64, 256), down=(256, 64))
print(shard.infer_specs(tied, weights, ids, mesh=mesh))

# %% [markdown]
# In this lookup, the table's rows are *indexed*: each device looks up the ids whose rows it holds
# and uses zeros for the rest; a single reduction sums the results. The lookup copies the second
# dimension, an *entry*, unchanged. So no weight produces this D, and it stays whole. Other roles
# cover experts, reshapes, and fused q, k and v: see the top of zigzag/parallel/trace.py.
#
# ## When it pays
# A group is worth its price if its weights are large compared with the activations to be summed.
# Some groups aren't worth any price. The rule rejects groups four times narrower than their input
# (an adapter's rank, a few labels) before it compares prices.
#
# ## Bugs
# You can also set a split by hand, with overrides. The rule accepts the first one below; it names
# an axis that this mesh doesn't have, so it splits nothing. The rule also accepts the third ("u" is
# a pattern that matches `up`). It rejects the other two, which can't be intended:

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
# - 5.3 With 6 heads and tensor=4, does the rule split attention's heads?
# - 5.4 Code: write the price of F as a function, for an x [rows, D] that may need a gradient. The
# check compares it with the rule itself.

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
