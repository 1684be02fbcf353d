# %% [markdown]
# # 3. Fully sharded data parallelism: a weight is whole only while it is used
# One idea: **an all-gather and a reduce-scatter are each other's transposes.** Each device keeps a
# part of every weight. Before a layer runs, the devices gather its weights. Autodiff turns that
# gather into a sum of the gradients, and each device gets its part of the sum.

# %%
import collections
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson, tiny
from learn.lesson import P, check, compare, jax, jnp, lax, np, quote, sends, shard, show

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
# Data parallelism keeps everything on every device: each weight, its gradient, and two numbers for
# Adam, 16 bytes per weight in float32. Here each device has only a part. Dimension 0 counts the
# layers, so specs start with None. The diagram shows one layer's weight during a step: each part
# has a color, and each gradient shows which device's rows it comes from.

# %%
show(lesson.place(np.zeros((4, 8)), P("fsdp")))
lesson.picture("fsdp")

# %% [markdown]
# ## A step
# There are six layers, each x + relu(x @ up) @ down. A device holds [D/4, F] of `up`, and 8 of the
# 32 rows. The loop gathers each layer's weights inside its body, so only one layer is whole at a
# time.

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
print("the largest difference:", max(abs(got[n] - want[n]).max() for n in w))

# %% [markdown]
# None of the lines above sums gradients. The transpose of `all_gather` does that: it adds up the
# devices' gradients for the whole weight, and gives each device its part. A split weight already
# varies, so it needs no `pcast`. Small weights, such as norms, stay whole, and the step sums their
# gradients as in lesson 2.
#
# ## What a device sends
# **Predict.** W is the size of all layers' weights in bytes. How many bytes does a device send per
# step if autodiff keeps each gathered weight for the backward pass? And how many if
# `jax.checkpoint` recomputes the layer, including the gather? Which version needs more memory?

# %%
W = 4 * 2 * L * D * F
guess = {"kept": ..., "again": ...}

# %%
for name, times in (("kept", 2), ("again", 3)):
    program = gradients(name == "again")
    compare(guess[name], found := sum(sends(program, w, x).values()))
    assert abs(found / (times * 3 / 4 * W) - 1) < 0.02
    placed = {n: lesson.place(a, SPECS[n]) for n, a in w.items()}, lesson.place(x, P("fsdp"))
    memory = jax.jit(program).lower(*placed).compile().memory_analysis()
    print(f"    {name}: temporary memory {memory.temp_size_in_bytes / W:.2f} W")

# %% [markdown]
# A gather sends (n-1)/n W, and so does the scatter. Recomputation adds a second gather, for a total
# of 3 (n-1)/n W. Without recomputation it's 2 (n-1)/n W, but after the forward pass each device has
# all the weights, and only the gradients and the optimizer are still split.
#
# This is why `shard.layers` never keeps a gathered weight, no matter what `--remat` says:

# %%
quote(shard.layers)
quote(shard.gather)

# %% [markdown]
# ## ZeRO 1, 2 and 3, side by side
# Data parallelism keeps 16 bytes per weight on every device: 4 for the weight, 4 for its gradient,
# and 8 for Adam. ZeRO-1 splits the Adam state. ZeRO-2 splits the gradients too, and ZeRO-3 splits
# everything, which makes it fsdp. The code below runs an update with two parts of a batch in each
# of the four ways. G is the size of the gradients in bytes. **Predict** how many times G a device
# sends with ZeRO-1.

# %%
zero1 = ...

# %%
def update(stage, A=2):
    def body(x, up):
        up = lax.all_gather(up, "fsdp", tiled=True) if stage == 3 else up
        return jnp.tanh(x @ up)[:, :D], None

    def loss(up, x):
        return jnp.sum(lax.scan(jax.checkpoint(body), x, up)[0]**2)

    def scatter(grads):
        return lax.psum_scatter(grads, "fsdp", scatter_dimension=1, tiled=True)

    def on_device(up, x):                           # up [L, D, F]: whole, or for ZeRO-3 a quarter
        marked = up if stage == 3 else lax.pcast(up, "fsdp", to="varying")
        own = marked if stage == 3 else lax.dynamic_slice_in_dim(
            marked, D // 4 * lax.axis_index("fsdp"), D // 4, 1)

        def add_part(total, x):
            grads = jax.grad(loss)(marked, x)
            return total + (scatter(grads) if stage == 2 else grads), None

        grads, _ = lax.scan(add_part, 0 * (own if stage == 2 else marked), x.reshape(A, -1, D))
        if stage == 0:
            return up - 1e-3 * lax.psum(grads, "fsdp")
        new = own - 1e-3 * (scatter(grads) if stage == 1 else grads)        # (in place of Adam)
        return new if stage == 3 else lax.all_gather(       # (its type says: equal on all devices)
            new, "fsdp", axis=1, tiled=True, to="invarying")

    spec = SPECS["up"] if stage == 3 else P()
    return jax.shard_map(on_device, in_specs=(spec, P("fsdp")), out_specs=spec)

up, G, m = w["up"], 4 * L * D * F, 64
for stage, times, held in ((0, 2, 16), (1, 2, 8 + 8 / m), (2, 3, 4 + 12 / m), (3, 6, 16 / m)):
    found = sum(sends(update(stage), up, x).values())
    assert abs(found / (times * 3 / 4 * G) - 1) < 0.02
    assert abs(update(stage)(up, x) - update(0)(up, x)).max() < 1e-4
    compare(zero1 if stage == 1 else ..., found / G, f"G with ZeRO-{stage}; of 8e9 weights on {m} "
            f"devices, each holds {8 * held:.1f} GB")

# %% [markdown]
# ZeRO-1 scatters the summed gradients and gathers the new weights. These two halves of an
# all-reduce send nothing extra. With A parts of a batch, ZeRO-2 scatters in each part, for a total
# of (A + 1) (n-1)/n G. ZeRO-3 gathers twice and scatters once in each part, 3 A (n-1)/n G. zigzag
# has the two extremes: `--zero 1` over data, and fsdp.
#
# ## Activation memory, term by term
# A device also keeps what the backward pass needs from each layer. `jax.vjp` returns the backward
# pass as a function; the arrays in that function are the ones the layer keeps. Here is the layer:

# %%
B, T, H, N = 2, 64, 4, 64
SHAPES = {"norm1": (D,), "q": (D, H, N), "k": (D, H, N), "v": (D, H, N), "o": (H, N, D),
          "norm2": (D,), "gate": (D, F), "up": (D, F), "down": (F, D)}

# %%
def attention(q, k, v):
    scores = jnp.einsum("bthn,bshn->bhts", q, k) / N**0.5
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -1e30)
    return jnp.einsum("bhts,bshn->bthn", jax.nn.softmax(scores), v)

def transformer(x, w, attention=attention):
    h = tiny.norm(x, w["norm1"])
    q, k, v = (jnp.einsum("btd,dhn->bthn", h, w[name]) for name in "qkv")
    x = x + jnp.einsum("bthn,hnd->btd", attention(q, k, v), w["o"])
    h = tiny.norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]

# %% [markdown]
# **Predict** how many [B, T, F] arrays it keeps, and how many of any size with `jax.checkpoint`,
# which keeps only the input. (silu(a) is a * sigmoid(a).)

# %%
guess = {"everything": ..., "full": ...}

# %%
TERMS = {(B, T, D): "[B, T, D]", (B, T, H, N): "[B, T, H, N]", (B, T, F): "[B, T, F]",
         (B, H, T, T): "[B, H, T, T]"}
weights = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
for name, kind in {
        "everything": transformer,
        "attention": lambda x, w: transformer(x, w, jax.checkpoint(attention)),
        "selective": jax.checkpoint(
            transformer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        "full": jax.checkpoint(transformer)}.items():
    pull = jax.eval_shape(lambda x, w: jax.vjp(kind, x, w)[1], jnp.zeros((B, T, D)), weights)
    kept = collections.Counter(TERMS[a.shape] for a in jax.tree.leaves(pull)
                               if a.shape in TERMS and a.dtype == jnp.float32)
    print(f"{name}:", ", ".join(f"{count} {term}" for term, count in kept.items()))
    if name in guess:
        compare(guess[name], kept["[B, T, F]"] or kept.total(), "arrays")

# %% [markdown]
# The six of [B, T, F] are a = h @ gate, s = sigmoid(a), s (1 - s), silu(a), h @ up, and their
# product. X is the size of a [B, T, D] array, and of q. So a layer keeps 12 X + 6 (F/D) X, plus
# three arrays of scores. The scores grow with T squared, so if rows are long, they fill most of the
# memory. `--remat attention` drops the scores, `selective` keeps the products with weights, and
# `full` keeps only X, at the cost of a second forward pass. seq divides all terms, tensor all
# except the inputs it gathers, and fsdp none. `python -m learn.explain` does this for a run.
#
# ## When it pays
# A layer with W bytes in bfloat16 has W / 2 weights. With recomputation it takes 8 operations per
# weight and token: 2 forward and 6 backward. Its collectives send W forward and 2 W backward. So if
# a device has t tokens in a part, it does t operations per byte forward and 1.5 t backward. A v5e
# does 2,200 operations in the time it takes to send a byte. So computing can hide the sends from
# 2,200 tokens on (1,470 backward), if the next layer's gather overlaps this layer's matmuls. The
# bytes don't depend on the number of tokens, so fsdp favors large batches.
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
# Shapes give the first two away. The third has the right shapes. On one device, all are right.
#
# ## Exercises
# - 3.1 A model with 1e9 weights trains with Adam in float32 on fsdp=8. How many bytes of weights,
# gradients and optimizer state does a device hold?
# - 3.2 Nearly all its weights are in layers. The devices gather them, and scatter their gradients,
# in bfloat16, with --accumulate 2. How many bytes does a device send per update?
# - 3.3 Which collective is the transpose of the all-gather?
# - 3.4 Code: write the backward pass for a single weight. Each device has the gradient of the whole
# `up`, for its own rows. What does it keep?

# %%
check("3.1", ...)
check("3.2", ...)
check("3.3", ...)

def scatter(grads):                             # [D, F] of these rows -> [D/4, F] of all rows
    return ...

def by_hand(up, x):
    whole = lax.all_gather(up, "fsdp", tiled=True)
    return scatter(x.T @ (2 * (x @ whole)))         # the gradient of sum((x @ whole)**2)

check("3.4", lesson.tried(scatter, jax.shard_map(
    by_hand, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp")), jax.grad(
        lambda up: ((x @ up)**2).sum())(up[0]), up[0], x, most=2 * 3 / 4 * 4 * D * F))
