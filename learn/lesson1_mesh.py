# %% [markdown]
# # 1. A mesh, a spec, a shard_map
# One idea: **every device runs the same program, on its own piece of the arrays.** A mesh names the
# devices, a spec says which piece goes where, and `shard_map` runs the program.
#
# You don't need an accelerator: the first cell simulates eight devices on one CPU. `learn.lesson`
# re-exports jax, `jnp`, `np`, `lax`, `P` = jax.P, and this repository's shard.py.

# %%
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson
from learn.lesson import P, check, compare, jax, jnp, lax, sends, shard, show

lesson.begin(8)

# %% [markdown]
# ## A mesh
# This mesh puts eight devices in a two-by-four grid. The grid's dimensions have names; we call them
# axes. A device's position is its index along each axis. `lesson.mesh` also sets this mesh for
# every `shard_map` that follows.

# %%
mesh = lesson.mesh(data=2, tensor=4)
print(mesh.devices)

# %% [markdown]
# ## A spec
# `P("data", "tensor")` splits dimension 0 into as many parts as `data` has devices, and dimension 1
# into as many as `tensor` has. Along an axis that the spec doesn't name, devices hold copies. The
# next cell draws the array once per spec. In place of each number, it shows which devices (0 to 7)
# hold it. Draw the result for `P("tensor")` before you look.

# %%
x = jnp.arange(32.0).reshape(4, 8)
for spec in (P("data", "tensor"), P("tensor"), P(None, ("data", "tensor")), P()):
    show(lesson.place(x, spec))
lesson.picture("held")

# %% [markdown]
# ## A shard_map
# The function below runs on all eight devices. `in_specs` splits its arguments, and `out_specs`
# puts the results together. Inside the function, arrays have the shape of one piece, and
# `lax.axis_index` gives a device its index along an axis. Python runs the function only once, to
# trace it, which means to record its operations.

# %%
def on_device(x):
    print("traced with a piece of", x.shape)
    return x + 100 * lax.axis_index("data") + 10 * lax.axis_index("tensor")

y = jax.shard_map(on_device, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"))(x)
print(y - x)

# %% [markdown]
# ## A collective
# Devices exchange numbers through collectives, along axes you name. `lax.psum` adds up the devices'
# values along one or more axes, and gives every device the sum. Here each device has a part of a
# row, and a row's sum needs all the parts.

# %%
def row_sums(x):                                # [2, 2] on a device
    return lax.psum(x.sum(1), "tensor")         # [2]

sums = jax.shard_map(row_sums, in_specs=P("data", "tensor"), out_specs=P("data"))
print(sums(x), x.sum(1))

# %% [markdown]
# ## What varies
# Inside a `shard_map`, an array's type lists the axes along which devices may have different
# values: `shard.varying(x)` shows them. `x` varies over both axes. After the psum over tensor, the
# sums vary only over data, so a spec without tensor can describe them. If you forget the psum, jax
# tells you before anything runs. Here is the whole error ("replicated" means "doesn't vary"). Find
# the axis it names. The error suggests two fixes, a different spec or turning off the check (never
# do that), but you need a third: psum.

# %%
def forgotten(x):
    return x.sum(1)

print(lesson.error_of(jax.shard_map(forgotten, in_specs=P("data", "tensor"), out_specs=P("data")),
                      x, lines=40))

def types(x):
    print("x varies over", sorted(shard.varying(x)))
    y = lax.psum(x, "tensor")
    print("its psum over tensor varies over", sorted(shard.varying(y)))
    return y

_ = jax.shard_map(types, in_specs=P("data", "tensor"), out_specs=P("data"))(x)

# %% [markdown]
# ## What a device sends
# **Predict.** A device's piece has S bytes, and tensor has four devices. They form a ring: each can
# send to the next. How many bytes does each device send until all four devices have all four pieces
# (an all-gather)? And how many until all have the sum (an all-reduce), if they do it efficiently?

# %%
S = 128 * 256 * 4                               # a piece is [128, 256] float32: 131,072 bytes
guess = {"all-gather": ..., "all-reduce": ...}

# %%
def gathered(x):
    return lax.all_gather(x, "tensor", axis=1, tiled=True)

def reduced(x):
    return lax.psum(x, "tensor")

for name, function, formula, out in (
        ("all-gather", gathered, 3 * S, P("data", "tensor")),
        ("all-reduce", reduced, 2 * 3 / 4 * S, P("data"))):
    program = jax.shard_map(function, in_specs=P("data", "tensor"), out_specs=out)
    compare(guess[name], found := sum(sends(program, jnp.zeros((256, 1024))).values()))
    assert found == formula

# %% [markdown]
# In an **all-gather**, a device sends its own piece, then passes on each piece it receives, for a
# total of n-1 sends: (n-1) S. A **reduce-scatter** of S-byte arrays moves S/n in each of n-1 turns:
# (n-1)/n S. An **all-reduce** is a reduce-scatter followed by an all-gather of its results, S/n
# bytes each: 2 (n-1)/n S. The copies from an all-gather are equal, but their type still varies over
# tensor, so the result's spec names tensor.
#
# ## When it pays
# A TPU v5e chip does 197 teraflop/s in bfloat16. One axis of its network carries about 45 GB/s in
# each of two directions, 90 GB/s total. So in the time it takes to send a byte, the chip can do
# 197e12 / 90e9, about 2,200, operations. Every lesson from here on is about doing enough arithmetic
# per byte.
#
# ## Exercises
# Replace the dots. The first wrong answer gets a hint, the second an explanation.
# - 1.1 You place a float32 array [512, 512] with P("tensor") on the mesh above. How many bytes does
# one device hold?
# - 1.2 How many bytes does a device send in `lax.psum(x, "data")` if its piece has 1,000,000 bytes?
# - 1.3 How many different values does `lax.psum(lax.axis_index("tensor"), "data")` have on the
# eight devices?
# - 1.4 Code: compute the sum of each column. If you choose the wrong axis, the types will tell you.

# %%
check("1.1", ...)
check("1.2", ...)
check("1.3", ...)

def column_sums(x):                             # [2, 2] of [4, 8] -> [2] of [8]
    return ...

check("1.4", lesson.tried(column_sums, jax.shard_map(
    column_sums, in_specs=P("data", "tensor"), out_specs=P("tensor")), x.sum(0), x))
