# %% [markdown]
# # 1. A mesh, a spec, a shard_map
#
# One idea: **a device runs the same program as all others, on its own piece of the arrays.** A mesh
# names the devices, a spec says which piece is whose, and `shard_map` runs the program.
#
# Nothing here needs hardware: the first cell makes eight devices of one CPU.

# %%
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path += [".", ".."]      # (the repository, from here or from learn/)

from learn import lesson
from learn.lesson import check, sends, show

lesson.begin(8)

# %% [markdown]
# ## A mesh
#
# Eight devices in a grid of two by four. Its dimensions have names, the axes. A device's place is
# its index along each axis. (`lesson.mesh` also makes it the mesh of every `shard_map` that
# follows.)

# %%
mesh = lesson.mesh(data=2, tensor=4)
print(mesh.devices)

# %% [markdown]
# ## A spec
#
# `P("data", "tensor")` says: dimension 0 is cut into as many parts as `data` has devices, dimension
# 1 into as many as `tensor` has. An axis that a spec does not name holds copies. In each picture
# below the digits are the devices that hold the number in this place.

# %%
x = jnp.arange(32.0).reshape(4, 8)
placed = {str(spec): jax.device_put(x, NamedSharding(mesh, spec)) for spec in (
    P("data", "tensor"), P("tensor"), P(None, ("data", "tensor")), P())}
for one in placed.values():
    show(one)
lesson.picture("held")

# %% [markdown]
# ## A shard_map
#
# The function below runs on all eight devices. `in_specs` cuts its arguments, `out_specs` puts the
# results together. Inside, shapes are those of a piece, and `lax.axis_index` tells a device where
# it is. Python runs the function once, to trace it: to write down its operations.


# %%
def on_device(x):
    print("traced with a piece of", x.shape)
    return x + 100 * lax.axis_index("data") + 10 * lax.axis_index("tensor")


y = jax.shard_map(on_device, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"))(x)
print(y - x)

# %% [markdown]
# ## A collective
#
# Devices exchange numbers by collectives, along axes that are named. `lax.psum` adds up what the
# devices of an axis (or of several) have; each of them gets the sum. Here each device has a part of
# a row, and the sum of a row needs all parts.


# %%
def row_sums(x):                                # [2, 2] on a device
    return lax.psum(x.sum(1), "tensor")         # [2]


sums = jax.shard_map(row_sums, in_specs=P("data", "tensor"), out_specs=P("data"))
print(sums(x), x.sum(1))

# %% [markdown]
# ## What varies
#
# The type of an array in a `shard_map` lists the axes over which devices may have different values.
# `x` varies over both. After the psum over tensor, the sums vary over data alone, so a spec without
# tensor is allowed for them. If the psum is forgotten, jax says so before anything runs:


# %%
def forgotten(x):
    return x.sum(1)


print(lesson.error_of(jax.shard_map(forgotten, in_specs=P("data", "tensor"), out_specs=P("data")),
                      x))


def types(x):
    print("x varies over", sorted(jax.typeof(x).mat.varying))
    y = lax.psum(x, "tensor")
    print("its psum over tensor varies over", sorted(jax.typeof(y).mat.varying))
    return y


_ = jax.shard_map(types, in_specs=P("data", "tensor"), out_specs=P("data"))(x)

# %% [markdown]
# ## What is sent
#
# On the shortest ring of n devices, each sends its piece, of S bytes, to the next. In an
# **all-gather** it then passes on what it got, n-1 times in all: (n-1) S. A **reduce-scatter** of
# arrays of S bytes moves S/n in each of n-1 turns: (n-1)/n S. An **all-reduce** of arrays of S
# bytes is a reduce-scatter, and then an all-gather of its results, of S/n bytes each: 2 (n-1)/n S.
#
# First the formula, then the compiled program. (The copies that an all-gather makes are equal, but
# in their type they still vary over tensor. So the spec of the result names tensor.)

# %%
big = jnp.zeros((256, 1024))                    # a piece is [128, 256] float32: 131,072 bytes
S = 128 * 256 * 4


def gathered(x):
    return lax.all_gather(x, "tensor", axis=1, tiled=True)


def reduced(x):
    return lax.psum(x, "tensor")


for name, function, formula, out in (
        ("all-gather", gathered, 3 * S, P("data", "tensor")),
        ("all-reduce", reduced, 2 * 3 / 4 * S, P("data"))):
    print(f"{name}: {formula:,.0f} bytes by the formula, by the program")
    program = jax.shard_map(function, in_specs=P("data", "tensor"), out_specs=out)
    assert sum(sends(program, big).values()) == formula

# %% [markdown]
# ## When it pays
#
# A chip of TPU v5e multiplies 197 teraflop/s in bfloat16 and sends about 45 GB/s along each
# direction of one axis. So in the time of one byte sent, it can do 197e12 / 90e9, about 2,200,
# operations on a ring that uses both directions. All that follows is about doing enough arithmetic
# for each byte.
#
# ## Exercises
#
# Replace the dots. `check` says whether the answer is right, and why.
#
# 1.1 An array [512, 512] of float32 is placed with P("tensor") on the mesh above. How many bytes
# does one device hold?

# %%
check("1.1", ...)

# %% [markdown]
# 1.2 How many bytes does a device send in `lax.psum(x, "data")` of a piece of 1,000,000 bytes?

# %%
check("1.2", ...)

# %% [markdown]
# 1.3 How many different values does `lax.psum(lax.axis_index("tensor"), "data")` have on the eight
# devices?

# %%
check("1.3", ...)
