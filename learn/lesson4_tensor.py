# %% [markdown]
# # 4. Columns and rows: two products for one reduction
# One idea: **split the first weight by columns and the second by rows.** Then a device computes its
# part of the hidden layer from start to finish, and only results have to be added up.

# %%
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson
from learn.lesson import P, check, compare, jax, lax, np, quote, sends, shard, show

lesson.begin(8)
mesh = lesson.mesh(tensor=4)
rng = np.random.default_rng(0)
B, T, D, F = 2, 64, 128, 512
up, down = ((rng.normal(size=s) * s[0]**-0.5).astype(np.float32) for s in ((D, F), (F, D)))
x = rng.normal(size=(B, T, D)).astype(np.float32)

def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down

# %% [markdown]
# ## Columns, rows
# Cut by columns, a weight gives each device some of the results. Cut by rows, it needs only some of
# the inputs, and gives each device a part of every sum. In the picture w' is w with its dimensions
# exchanged, as the backward pass uses it, and dy is the gradient for y.

# %%
lesson.picture("products")

# %% [markdown]
# ## Four cases
# Multiply by `up`, split by columns or by rows, then by `down`, split by columns or by rows.
# **Predict** what a device sends for the forward pass, in X, the bytes of the stream. The hidden
# layer has F/D = 4 X.

# %%
X, H = 4 * B * T * D, 4 * B * T * F         # bytes of the stream, and of the hidden layer
guess = {"column, row": ..., "column, column": ..., "row, row": ..., "row, column": ...}

# %%
def columns(x, w):                          # x whole, w [in, out/4] -> [B, T, out/4]
    return x @ w

def rows(x, w):                             # x [B, T, in/4], w [in/4, out] -> a partial sum
    return lax.psum(x @ w, "tensor")

def all_of(x):
    return lax.all_gather(x, "tensor", axis=2, tiled=True)

def my_part(x):
    size = x.shape[2] // 4
    return lax.dynamic_slice_in_dim(x, size * lax.axis_index("tensor"), size, 2)

C, R = P(None, "tensor"), P("tensor")
CASES = {
    "column, row": (C, R, lambda x, a, b: rows(jax.nn.relu(columns(x, a)), b), 2 * 3 / 4 * X),
    "column, column": (C, C, lambda x, a, b: columns(all_of(jax.nn.relu(columns(x, a))), b),
                       3 / 4 * H),
    "row, row": (R, R, lambda x, a, b: rows(my_part(jax.nn.relu(rows(my_part(x), a))), b),
                 2 * 3 / 4 * (H + X)),
    "row, column": (R, C, lambda x, a, b: columns(jax.nn.relu(rows(my_part(x), a)), b),
                    2 * 3 / 4 * H)}
want = mlp(x, up, down)
for name, (a, b, function, predicted) in CASES.items():
    out = P(None, None, "tensor") if b == C else P()
    program = jax.shard_map(function, in_specs=(P(), a, b), out_specs=out)
    error = abs(program(x, up, down) - want).max()
    print(f"{name}: wrong by {error:.1e}")
    compare(guess[name], (found := sum(sends(program, x, up, down).values())) / X, "X")
    assert abs(found / predicted - 1) < 0.02

# %% [markdown]
# All four are right. Column, row sends 2 (n-1)/n X; all others send H. With F = 4 D, as in most
# transformers, column then row sends the least, and leaves the result whole, ready for the next
# block.
#
# `relu` may stand between the two products because it works number by number. After a row product
# the sums must be added before it: relu(a) + relu(b) is not relu(a + b).
#
# ## With sequence parallelism
# The all-reduce is a reduce-scatter and an all-gather. Between them are the norms and the additions
# to the residual stream, x [B, T, D], which passes all blocks. There every token stands by itself.
# So leave the stream split by time, and gather it where the next block begins. That sends the same
# bytes, and leaves a quarter of the stream on each device:

# %%
def block(x, up, down):                     # x [B, T/4, D] -> [B, T/4, D]
    x = lax.all_gather(x, "tensor", axis=1, tiled=True)
    return lax.psum_scatter(mlp(x, up, down), "tensor", scatter_dimension=1, tiled=True)

by_time = jax.shard_map(block, in_specs=(P(None, "tensor"), C, R), out_specs=P(None, "tensor"))
show(lesson.place(np.zeros((2, 8)), P(None, "tensor")))
print("wrong by", abs(by_time(x, up, down) - want).max())
assert abs(sum(sends(by_time, x, up, down).values()) / (2 * 3 / 4 * X) - 1) < 0.02

# %% [markdown]
# The backward pass is the transpose: of the all-gather a reduce-scatter, of the reduce-scatter an
# all-gather. So a block sends 4 (n-1)/n X forward and backward; a layer has two, attention and an
# MLP: 8 (n-1)/n X.

# %%
gradient = jax.grad(lambda x, up, down: (by_time(x, up, down)**2).sum(), (0, 1, 2))
assert abs(sum(sends(gradient, x, up, down).values()) / (4 * 3 / 4 * X) - 1) < 0.02

# %% [markdown]
# The block of model.py is two such pairs. Line by line, which part of each dimension a device has
# on data=4,tensor=2 (`python -m learn.walk` prints it for any mesh and network):

# %%
lesson.picture("block")

# %% [markdown]
# In this repository these are two functions, `columns` and `row`. They also take several weights at
# once, and weights that are whole; with `--overlap` they send in parts. `row` ends with
# `into_stream`, which adds up what the devices have.

# %%
quote(shard.columns)
quote(shard.row)
quote(shard.into_stream)

# %% [markdown]
# ## When it pays
# For a block a device does 2 x 2 x B T x D F / n operations and sends 2 (n-1)/n X: in bfloat16 and
# forward, F / (n - 1) operations for each byte. A v5e does 2,200 in the time of a byte. So with
# F = 8,192, tensor=4 adds about 80% of the computing time, tensor=2 27%: the product waits for what
# is gathered, unless the time goes in parts (`--overlap`). It is the axis for models whose weights
# do not fit, and for batches too small for fsdp.
#
# ## Bugs

# %%
BUGS = {
    "no reduction": lambda x, a, b: jax.nn.relu(x @ a) @ b,
    "a mean for a sum": lambda x, a, b: lax.pmean(jax.nn.relu(x @ a) @ b, "tensor"),
    "the activation after a partial sum": lambda x, a, b: lax.psum(jax.nn.relu(
        jax.nn.relu(x @ a) @ b), "tensor")}
for name, function in BUGS.items():
    lesson.report(name, function, (P(), C, R), P(), want, x, up, down)

# %% [markdown]
# The type finds a reduction that is missing, even on one device. It does not know which one was
# meant: the mean is right on one device alone. The third is wrong everywhere.
#
# ## Exercises
# - 4.1 A layer (attention and an MLP) has B T = 8,192 tokens on the devices of tensor=8, D = 4,096,
# bfloat16. How many bytes does a device send for it, forward and backward?
# - 4.2 Attention has query, key and value weights [D, H N] and an output weight [H N, D]. Which of
# column and row is the output weight?
# - 4.3 How many values does each device hold of a norm's scale [D] on tensor=4, if D is 128?
# - 4.4 Code: write `row`, without looking up. The stream comes in split by time and goes out so.

# %%
check("4.1", ...)
check("4.2", ...)
check("4.3", ...)

def row(h, w):                              # h [B, T, F/4], w [F/4, D] -> [B, T/4, D]
    return ...

def whole_block(x, up, down):
    x = lax.all_gather(x, "tensor", axis=1, tiled=True)
    return row(jax.nn.relu(x @ up), down)

check("4.4", lesson.tried(row, jax.shard_map(
    whole_block, in_specs=(P(None, "tensor"), C, R), out_specs=P(None, "tensor")), want, x, up,
    down, most=1.02 * 2 * 3 / 4 * X))
