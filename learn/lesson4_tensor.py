# %% [markdown]
# # 4. Columns and rows: two matmuls per reduction
# One idea: **split the first weight by columns and the second by rows.** Each device then computes
# its part of the hidden layer from start to finish, and you only need to add up the results.

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
# If you split a weight by columns, each device gets some of the results. If you split it by rows,
# each device needs only some of the inputs, and gets a part of every sum. In the diagram, w' is the
# transpose of w, which the backward pass uses, and dy is the gradient with respect to y.

# %%
lesson.picture("products")

# %% [markdown]
# ## Four cases
# Multiply by `up`, split by columns or by rows, then by `down`, split by columns or by rows.
# **Predict** what a device sends in the forward pass, in units of X, the size of the stream in
# bytes. The hidden layer's size is (F/D) X = 4 X.

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
# All four are right. Column then row sends 2 (n-1)/n X; all others send the hidden layer, of size
# H. With F = 4 D, as in most transformers, column then row sends the least. It also leaves the
# result whole, ready for the next block.
#
# You can put `relu` between the two products because it's elementwise. After a row product, you
# must add up the partial sums before `relu`: relu(a) + relu(b) isn't relu(a + b).
#
# ## With sequence parallelism
# The all-reduce is a reduce-scatter followed by an all-gather. Between them come the norms and the
# additions to the residual stream, x [B, T, D], which runs through all blocks. These steps treat
# every token separately. So leave the stream split along the sequence, and gather it where the next
# block starts. That sends the same bytes, and leaves a quarter of the stream on each device:

# %%
def block(x, up, down):                     # x [B, T/4, D] -> [B, T/4, D]
    x = lax.all_gather(x, "tensor", axis=1, tiled=True)
    return lax.psum_scatter(mlp(x, up, down), "tensor", scatter_dimension=1, tiled=True)

by_time = jax.shard_map(block, in_specs=(P(None, "tensor"), C, R), out_specs=P(None, "tensor"))
show(lesson.place(np.zeros((2, 8)), P(None, "tensor")))
print("wrong by", abs(by_time(x, up, down) - want).max())
assert abs(sum(sends(by_time, x, up, down).values()) / (2 * 3 / 4 * X) - 1) < 0.02

# %% [markdown]
# The backward pass is the transpose: the all-gather becomes a reduce-scatter, and the
# reduce-scatter becomes an all-gather. So a block sends 4 (n-1)/n X, counting forward and backward.
# A layer has two such blocks, attention and an MLP, so it sends 8 (n-1)/n X.

# %%
gradient = jax.grad(lambda x, up, down: (by_time(x, up, down)**2).sum(), (0, 1, 2))
assert abs(sum(sends(gradient, x, up, down).values()) / (4 * 3 / 4 * X) - 1) < 0.02

# %% [markdown]
# The block in model.py is two such pairs. The diagram shows, line by line, which part of each
# dimension a device has on data=4,tensor=2. `python -m learn.walk` prints this for any mesh and
# network:

# %%
lesson.picture("block")

# %% [markdown]
# In this repository, two functions do this: `columns` and `row`. They also accept several weights
# at once, and weights that aren't split; with `--overlap`, they send in parts. `row` ends with
# `into_stream`, which adds up the devices' partial sums.

# %%
quote(shard.columns)
quote(shard.row)
quote(shard.into_stream)

# %% [markdown]
# ## When it pays
# For each block, a device does 2 x 2 x B T x D F / n operations and sends 2 (n-1)/n X. In bfloat16,
# that's F / (n - 1) operations per byte in the forward pass. A v5e does 2,200 in the time it takes
# to send a byte. So with F = 8,192, tensor=4 adds about 80% to the computing time, and tensor=2
# adds 27%: the matmul waits for the gather, unless the sequence travels in parts (`--overlap`). Use
# this axis for models whose weights don't fit, and for batches too small for fsdp.
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
# The type check catches a missing reduction, even on one device. It can't tell which reduction you
# meant: the mean is right only on one device. The third bug is wrong everywhere.
#
# ## Exercises
# - 4.1 A layer (attention and an MLP) on tensor=8 has B T = 8,192 tokens across all devices, with D
# = 4,096 in bfloat16. How many bytes does a device send for it, forward and backward?
# - 4.2 Attention has query, key and value weights [D, H N] and an output weight [H N, D]. Is the
# output weight a column or a row?
# - 4.3 On tensor=4 with D = 128, how many values of a norm's scale [D] does each device hold?
# - 4.4 Code: write `row` without looking it up. The stream comes in split along the sequence and
# goes out the same way.

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
