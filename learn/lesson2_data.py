# %% [markdown]
# # 2. Data parallelism: one sum, at the end
# One idea: **the gradient of a sum is the sum of gradients.** Each device has different rows of a
# batch and computes the gradient for those rows. A single all-reduce adds up the gradients. The
# rest of this lesson is about sending them only once.

# %%
import sys

import optax

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson, tiny
from learn.lesson import P, check, compare, jax, jnp, lax, np, quote, sends, shard

lesson.begin(8)
mesh = lesson.mesh(data=4)
rng = np.random.default_rng(0)
w = rng.normal(size=(256, 256)).astype(np.float32)
x, y = (rng.normal(size=(32, 256)).astype(np.float32) for _ in range(2))

# %% [markdown]
# ## A sum and a count
# Here a loss returns a sum over rows and the number to divide it by. Why not a mean? With 3 rows on
# one device and 1 on another, the mean of the two means isn't the mean of the four rows. Sums add
# up, so we divide once, at the end. The diagram after the code has a color for each part of the
# rows, and gray for whatever is the same on all devices.

# %%
def loss(w, x, y):
    return jnp.sum((x @ w - y)**2), len(x)

def mean_gradient(w, x, y):         # on a device: 8 of 32 rows
    w = lax.pcast(w, "data", to="varying")      # (what this does is explained below)
    (value, count), grads = jax.value_and_grad(loss, has_aux=True)(w, x, y)
    grads, count = lax.psum((grads, count), "data")
    return grads / count

on_mesh = jax.shard_map(mean_gradient, in_specs=(P(), P("data"), P("data")), out_specs=P())
want = jax.grad(lambda w: loss(w, x, y)[0] / 32)(w)
print("the largest difference:", abs(on_mesh(w, x, y) - want).max())
lesson.picture("data")

# %% [markdown]
# **Predict.** Each of the four devices sends the gradients, G = 256 x 256 x 4 bytes, in a single
# all-reduce. How many bytes does a device send? And how many if it computes its rows in four parts,
# to save memory (`--accumulate 4`)? One version below marks (casts) `w` before the loop over parts;
# the other leaves that to jax.

# %%
G = 4 * 256 * 256
guess = {"marked": ..., "left to jax": ...}

# %% [markdown]
# ## Marks
# `w` is the same on all devices: its type doesn't vary. `x` varies over data. For `x @ w`, jax
# first marks `w`: it casts `w` to varying, which sends nothing. Autodiff transposes each operation,
# and the transpose of "the same value on each device" is a sum over the devices. So without the
# `pcast` line, jax has already summed the gradient:

# %%
def unmarked(w, x, y):
    grads = jax.grad(lambda w: loss(w, x, y)[0])(w)
    print("the gradient varies over", sorted(shard.varying(grads)) or "no axis")
    return grads

same = jax.shard_map(unmarked, in_specs=(P(), P("data"), P("data")), out_specs=P())
print("the largest difference:", abs(same(w, x, y) / 32 - want).max())

# %% [markdown]
# This is right, and for a single batch it costs the same. But with several parts, jax puts the cast
# and its transpose inside the loop, so `unmarked` would send the gradients in every part.

# %%
def in_parts(mark, axes=("data",)):
    def gradient(w, x, y):
        w = mark(w)

        def add_part(total, part):
            return total + jax.grad(lambda w: loss(w, *part)[0])(w), None

        parts = [a.reshape(4, -1, *a.shape[1:]) for a in (x, y)]
        total, _ = lax.scan(add_part, 0 * w, parts)
        left = tuple(sorted(shard.varying(total)))
        return lax.psum(total, left) if left else total

    return jax.shard_map(gradient, in_specs=(P(), P(*axes), P(*axes)), out_specs=P())

def marked(w):
    return lax.pcast(w, "data", to="varying")

for name, mark, times in (("marked", marked, 1), ("left to jax", lambda w: w, 4)):
    print(f"{name}: 2 (n-1)/n G, {times} times")
    compare(guess[name], found := sum(sends(in_parts(mark), w, x, y).values()))
    assert abs(found / (times * 2 * 3 / 4 * G) - 1) < 0.02

# %% [markdown]
# So `train.make_gradients` casts the weights outside the function it differentiates, and sums at
# the end. It doesn't cast them over tensor: only norms and other small weights are whole over
# tensor, so jax has only small sums to make in every part. Here is the sum from this repository:

# %%
quote(shard.sum_gradients)

# %% [markdown]
# ## When it pays
# A weight with D x F numbers takes 6 D F operations per token in a step (2 forward, 4 backward).
# A device sends about 8 D F bytes for its gradient in float32, once. With t tokens per device,
# that's 6 t operations per 8 bytes. A v5e chip does 2,200 operations in the time it takes to send a
# byte, so sending is faster than computing if a device has at least about 2,900 tokens, counting
# all parts. The sum comes after the backward pass, so it adds to the step time. PyTorch's DDP
# already sends parts of the sum during the backward pass.
#
# ## Bugs
# Here are three edits to `make_step` in the one-file trainer, learn/tiny.py: a missing sum, one sum
# too many (over fsdp, for a weight that fsdp splits), and a count that is a mean. Each edited
# trainer runs ten updates on data=2,fsdp=2,tensor=2. The type check catches the first. **Predict**:
# with each of the other two, by what percentage is the first of the ten losses wrong?

# %%
guess = {"one sum too many": ..., "a count that is a mean": ...}

# %%
ids = ((rng.integers(0, 64, (10, 16, 1)) + np.arange(33)) % 64).astype(np.int32)
batches = [{"tokens": i[:, :-1], "targets": i[:, 1:], "weights": np.ones((16, 32), np.float32)}
           for i in ids]

def losses(module, data, fsdp, tensor, accumulate=2):
    grid = lesson.mesh(data=data, fsdp=fsdp, tensor=tensor)
    params = module.make_decoder(np.random.default_rng(1))
    return np.array(module.train(module.decoder, params, module.DECODER, batches,
                                 optax.sgd(0.3), grid, accumulate))

right = losses(tiny, 1, 1, 1)
print("no bug:", abs(losses(tiny, 2, 2, 2) / right - 1).max())
WHERE = '"data" if "fsdp" in spec else ROWS)'
BUGS = {"a missing sum": (WHERE, '() if "fsdp" in spec else ROWS)'),
        "one sum too many": (WHERE, 'ROWS if "fsdp" in spec else ROWS)'),
        "a count that is a mean": ("return grads, *lax.psum((value, count), (*ROWS, \"tensor\"))",
                                   "return grads, *lax.pmean((value, count), (*ROWS, \"tensor\"))")}
for name, (good, bad) in BUGS.items():
    buggy, found = lesson.with_bug(tiny, good, bad), []
    for place, sizes in ((name, (2, 2, 2)), ("    on one device", (1, 1, 1))):
        got, error = lesson.attempt(losses, buggy, *sizes)
        found.append(got)
        print(f"{place}:", error or f"losses differ by {abs(got / right - 1).max():.1%}")
    if name in guess:
        compare(guess[name], round(100 * float(abs(found[0] / right - 1)[0]), 1), "% at first")

# %% [markdown]
# The type check catches the first: an unsummed gradient still varies over data, but its spec says
# it doesn't. The other two have the right types. In the second, the devices along fsdp hold the
# gradients of different pieces of a weight, and the sum adds them up. The first loss is right,
# because it comes before any update. In the third, the first loss is right too, because the sum and
# the count are both an eighth of what they should be. But the step divides gradients by that count,
# so updates are eight times too large. On one device both are right, because a sum over one device
# changes nothing. Only a comparison with one device catches these. test_all.py makes that
# comparison, and so does `train.fit` for a custom loss (docs/tasks.md explains how).
#
# ## Exercises
# - 2.1 A model with 10 million weights trains on data=8 with --accumulate 4. How many bytes does a
# device send per update?
# - 2.2 And how many if you don't cast the weights?
# - 2.3 Two devices have 30 and 10 tokens, and their loss sums are 60 and 40. What is the loss?
# - 2.4 Code: cast over the right axes. Here `seq` splits dimension 1 of the rows; `tensor` splits
# none. The step should send G once, over the axes along which devices have different data.

# %%
check("2.1", ...)
check("2.2", ...)
check("2.3", ...)

mesh = lesson.mesh(data=2, seq=2, tensor=2)
rows = [a.reshape(32, 2, 128) for a in (x, y)]
v = w[:128, :128]

def mark(w):
    return ...

check("2.4", lesson.tried(mark, in_parts(mark, ("data", "seq")), jax.grad(
    lambda v: loss(v, *rows)[0])(v), v, *rows, most=1.02 * 2 * 3 / 4 * 4 * 128 * 128))
