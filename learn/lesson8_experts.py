# %% [markdown]
# # 8. Experts: tokens travel to the weights that they chose
# One idea: **instead of gathering weights, send the tokens.** Each device has some of the experts
# and some of the rows. A router chooses experts for each token; an all-to-all takes the tokens to
# them, and another one brings the results back.

# %%
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson
from learn.lesson import P, check, compare, jax, jnp, lax, np, quote, sends, shard

lesson.begin(8)
n = 4
mesh = lesson.mesh(expert=n)
rng = np.random.default_rng(0)
E, BEST, TOKENS, D, F = 8, 2, 64, 32, 64
router = rng.normal(size=(D, E)).astype(np.float32)
up, down = (rng.normal(size=s).astype(np.float32) * s[1]**-0.5 for s in ((E, D, F), (E, F, D)))
x = rng.normal(size=(TOKENS, D)).astype(np.float32)

# %% [markdown]
# ## The choice
# For each token the router gives every expert a probability. The best two are visited; their
# outputs are added up, weighted by their shares.

# %%
def choose(x):
    shares, chosen = lax.top_k(jax.nn.softmax(x @ router), BEST)
    return shares / shares.sum(-1, keepdims=True), chosen

def one_device(x):
    shares, chosen = choose(x)
    every = jnp.einsum("tef,efd->ted", jax.nn.relu(jnp.einsum("td,edf->tef", x, up)), down)
    return (jnp.take_along_axis(every, chosen[..., None], 1) * shares[..., None]).sum(1)

want = one_device(x)
print("the first token visits", choose(x)[1][0], "with the shares", choose(x)[0][0])

# %% [markdown]
# Three tokens' ways. Devices have experts 0-1, 2-3, 4-5 and 6-7, and 16 tokens each:

# %%
print({f"token {token}": choose(x)[1][token].tolist() for token in (8, 24, 40)})
lesson.picture("visits")

# %% [markdown]
# ## There and back
# How many tokens go to which device is known only as the program runs, but its shapes must be known
# before. Some trainers give each expert room for a number of tokens, and drop those that come too
# many. Here none is dropped: each device sends every other an array as large as all its tokens,
# with zeros for those that chose no expert there.

# %%
def experts(x, up, down):                       # x [16, D]; up [2, D, F], down [2, F, D]
    me, n, own = lax.axis_index("expert"), lax.axis_size("expert"), len(up)
    shares, chosen = choose(x)
    goes = (chosen // own == jnp.arange(n)[:, None, None]).any(-1)              # [n, 16]
    sent = jnp.where(goes[..., None], x, 0)                                     # [n, 16, D]
    got = lax.all_to_all(sent, "expert", 0, 0).reshape(-1, D)                   # [n 16, D]
    chosen, shares = (lax.all_gather(a, "expert", tiled=True) for a in (chosen, shares))
    out = 0
    for e in range(own):                        # (as sums with zeros; really, tokens are sorted)
        share = jnp.where(chosen == me * own + e, shares, 0).sum(-1, keepdims=True)
        out += share * (jax.nn.relu(got @ up[e]) @ down[e])
    back = lax.all_to_all(out.reshape(n, -1, D), "expert", 0, 0)                # [n, 16, D]
    return back.sum(0)

ROWS = P("expert")
on_mesh = jax.jit(jax.shard_map(experts, in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS))
print("wrong by", abs(on_mesh(x, up, down) - want).max())

# %% [markdown]
# **Predict.** X is the bytes of a device's tokens. How many bytes do the two all-to-alls send? One
# array of n stays at home. The choices and shares are small.

# %%
X = 4 * TOKENS // n * D
guess = ...

# %%
found = sends(on_mesh, x, up, down)
compare(guess, found["all-to-all over expert"])
predicted = 2 * (n - 1) * X + (n - 1) * (TOKENS // n) * BEST * 8
assert abs(sum(found.values()) / predicted - 1) < 0.02

# %% [markdown]
# Each sends n - 1 arrays: 2 (n-1) X forward, and as much backward. In this repository:

# %%
quote(shard.experts)

# %% [markdown]
# ## Balance
# If all tokens choose the same experts, one device works and the others wait. So the loss has one
# more term, E x sum(visits(e) x probability(e)). It is 1 if experts are equally busy, and larger if
# the busy ones are also the likely ones. The visits have no gradient; the probabilities have. The
# router also learns through the shares. `model.py` takes it of each row, so that it is a sum.

# %%
def balance(logits):
    probabilities = jax.nn.softmax(logits)
    chosen = lax.top_k(probabilities, BEST)[1]
    visits = jax.nn.one_hot(chosen, E).sum((0, 1)) / (BEST * len(logits))
    return E * (visits * probabilities.mean(0)).sum()

print("this router:", balance(x @ router), "  one that always chooses the same two:",
      balance(jnp.tile(jnp.array([9.0, 9, 0, 0, 0, 0, 0, 0]), (TOKENS, 1))))

# %% [markdown]
# ## When it pays
# A layer of E experts has E times the weights of one MLP, and needs as much arithmetic as `BEST` of
# them. The loop above multiplies zeros, too; sorted tokens, as in `shard.experts`, avoid that.
# fsdp would gather all E: 3 (n-1)/n W with W = E times an MLP's bytes, however few tokens there
# are. Experts send 4 (n-1) X, however large the weights are. For 64 experts of 4,096 x 1,024 x 3
# weights in bfloat16, 1.6 GB, fsdp=8 sends 4.2 GB a layer; expert=8 with 4,096 tokens of width
# 4,096 on a device, X = 33.6 MB, sends 0.94 GB: 10 ms on a v5e beside 3 ms of arithmetic (forward
# and backward, two visited), where fsdp takes 47 ms. Without zeros 0.94 GB would be a quarter.
#
# ## Bugs

# %%
BUGS = {"an expert's number that counts from 0 on each device": ("me * own + e", "e"),
        "results in the wrong order": ("back.sum(0)", "back[::-1].sum(0)[::-1]"),
        "shares of this device's tokens alone": (
            "(lax.all_gather(a, \"expert\", tiled=True) for a in (chosen, shares))",
            "(jnp.tile(a, (n, 1)) for a in (chosen, shares))")}
for name, (right, wrong) in BUGS.items():
    lesson.report(name, lesson.planted(experts, right, wrong), ROWS, ROWS, want, x, up, down)

# %% [markdown]
# All have right shapes and types, and two are right on one device. A comparison finds all.
#
# ## Exercises
# - 8.1 expert=8, 2,048 tokens of width 4,096 on a device, bfloat16. How many bytes does a device
# send in a layer, forward and backward?
# - 8.2 With 16 experts and two visited, which share of the experts' weights does a token use?
# - 8.3 What is the balance term if all tokens choose the same two of eight experts with probability
# one half each?
# - 8.4 Code: find the wrong line. The cell prints `experts` with one change. Give a part of the
# line that is wrong, and what belongs there.

# %%
check("8.1", ...)
check("8.2", ...)
check("8.3", ...)
lesson.broken("8.4", experts)
wrong, right = ..., ...
check("8.4", lesson.repaired("8.4", experts, wrong, right, lambda f: jax.shard_map(
    f, in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS), want, x, up, down))
