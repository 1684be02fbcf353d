# %% [markdown]
# # 3. Fully sharded data parallelism: a weight is whole only while it is used
#
# One idea: **an all-gather and a reduce-scatter are each other's transposes.** Devices keep a part
# of every weight. Before a layer runs, its weights are gathered; autodiff turns that gather into
# the sum of the gradients, of which each device gets its part.

# %%
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path += [".", ".."]      # (the repository, from here or from learn/)

import shard
from learn import lesson
from learn.lesson import check, quote, sends, show

lesson.begin(8)
mesh = lesson.mesh(fsdp=4)
rng = np.random.default_rng(0)
L, D, F, ROWS = 6, 256, 512, 32
w = {"up": (rng.normal(size=(L, D, F)) * D**-0.5).astype(np.float32),
     "down": (rng.normal(size=(L, F, D)) * F**-0.5 / L).astype(np.float32)}
x = rng.normal(size=(ROWS, D)).astype(np.float32)
SPECS = {"up": P(None, "fsdp"), "down": P(None, None, "fsdp")}

# %% [markdown]
# ## Who holds what
#
# Data parallelism keeps everything on every device: a weight, its gradient, and two numbers of
# Adam, 16 bytes for each weight in float32. Here a device has a part. Dimension 0 is the layers, so
# specs begin with None. A small array:

# %%
show(jax.device_put(np.zeros((4, 8)), NamedSharding(mesh, P("fsdp"))))

# %% [markdown]
# And one layer's weight on its way through a step, a colour for each part. A gradient with a number
# is for that device's rows.

# %%
lesson.picture("fsdp")

# %% [markdown]
# ## A step
#
# Six layers, each x + relu(x @ up) @ down. On a device: [D/4, F] of `up`, and 8 of 32 rows. Each
# layer's weights are gathered inside the loop, so only one layer is whole at a time.


# %%
def layer(x, w):
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


def gathered(w):
    return {"up": lax.all_gather(w["up"], "fsdp", axis=0, tiled=True),
            "down": lax.all_gather(w["down"], "fsdp", axis=1, tiled=True)}


def loss(w, x, recompute):
    def body(x, w):
        return layer(x, gathered(w)), None

    body = jax.checkpoint(body) if recompute else body
    return jnp.sum(lax.scan(body, x, w)[0]**2)


def gradients(recompute):
    return jax.shard_map(lambda w, x: jax.grad(loss)(w, x, recompute),
                         in_specs=(SPECS, P("fsdp")), out_specs=SPECS)


def on_one_device(w, x):
    return jax.grad(lambda w: jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]**2))(w)


got, want = gradients(True)(w, x), on_one_device(w, x)
print("the largest difference:", max(abs(got[n] - want[n]).max() for n in w),
      "of", max(abs(want[n]).max() for n in w))

# %% [markdown]
# No line above sums gradients. The transpose of `all_gather` did: in the backward pass each device
# has the gradient of the whole weight, for its rows; the reduce-scatter adds these up and gives
# each device its part. A weight that is cut varies already, so it needs no mark. (Small weights,
# such as norms, stay whole, and are summed as in lesson 2.)
#
# ## What is sent
#
# W is the bytes of all layers' weights. A gather sends (n-1)/n W, the scatter as much. With
# recomputation (`jax.checkpoint`) weights are gathered again in the backward pass: 3 (n-1)/n W in
# all. Without it, every layer's gathered weights are kept until then: nothing is gathered twice,
# but after the forward pass each device has all weights. Only gradients and optimizer are still
# cut.

# %%
W = 4 * 2 * L * D * F
for recompute, times in ((True, 3), (False, 2)):
    program = gradients(recompute)
    print(f"recompute={recompute}: predicted {times * 3 / 4 * W:,.0f} bytes")
    assert abs(sum(sends(program, w, x).values()) / (times * 3 / 4 * W) - 1) < 0.02
    placed = jax.device_put((w, x), ({n: NamedSharding(mesh, s) for n, s in SPECS.items()},
                                     NamedSharding(mesh, P("fsdp"))))
    memory = jax.jit(program).lower(*placed).compile().memory_analysis()
    print(f"    memory for what is computed: {memory.temp_size_in_bytes:,} bytes, "
          f"{memory.temp_size_in_bytes / W:.2f} W")

# %% [markdown]
# This is why `shard.layers` never keeps a gathered weight, whatever `--remat` says. Its code, and
# that of the gather:

# %%
quote(shard.layers)
quote(shard.gather)

# %% [markdown]
# ## ZeRO-1
#
# Half of the memory above is the optimizer's. `--zero 1` splits only that, over data: gradients are
# reduce-scattered instead of all-reduced, each device updates its part, and an all-gather brings
# the new weights back. (n-1)/n for each: the same bytes as data parallelism alone.
#
# ## When it pays
#
# A layer of W bytes in bfloat16 has W / 2 weights and takes 8 operations for each weight and token
# with recomputation: 2 forward and 6 backward. Forward its gather sends W, backward a gather and a
# scatter send 2 W. So with t tokens of a part on a device there are t operations for each byte
# forward and 1.5 t backward. On a v5e, with 2,200 in the time of a byte, sending can hide behind
# computing from 2,200 tokens on, backward from 1,470: the next layer's gather travels while this
# layer multiplies. The bytes do not depend on the number of tokens, which is why fsdp likes large
# batches.
#
# ## Bugs

# %%
BUGS = {"a weight that is not gathered": lambda up: up,
        "gathered along the wrong dimension": lambda up: lax.all_gather(up, "fsdp", axis=1,
                                                                        tiled=True)}
for name, gather_up in BUGS.items():
    def first_layer(w, x, gather_up=gather_up):
        w = jax.tree.map(lambda stacked: stacked[0], w)
        return layer(x, {**gathered(w), "up": gather_up(w["up"])})

    want = layer(x, jax.tree.map(lambda stacked: stacked[0], w))
    lesson.report(name, first_layer, (SPECS, P("fsdp")), P("fsdp"), want, w, x)

square = rng.normal(size=(D, D)).astype(np.float32)


def not_gathered(w, x):             # w [D/4, D] of a square weight, used as if it were whole
    return lax.pmean(jnp.mean((x[:, :len(w)] @ w)**2), "fsdp")


lesson.report("a part that fits by chance", not_gathered, (P("fsdp"), P("fsdp")), P(),
              jnp.mean((x @ square)**2), square, x)

# %% [markdown]
# Shapes find the first two. The third has right shapes and right types, and is wrong. On one
# device, which holds whole weights, all three are right.
#
# ## Exercises
#
# 3.1 A model of 1e9 weights trains with Adam in float32 on fsdp=8. How many bytes of weights,
# gradients and optimizer does a device hold?

# %%
check("3.1", ...)

# %% [markdown]
# 3.2 Its layers, nearly all of it, are gathered in bfloat16, with --accumulate 2. How many bytes
# does a device send in an update?

# %%
check("3.2", ...)

# %% [markdown]
# 3.3 Which collective is the transpose of the all-gather?

# %%
check("3.3", ...)
