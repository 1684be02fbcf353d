# %% [markdown]
# # 8. Experts: tokens travel to the weights they chose
# One idea: **instead of gathering weights, send the tokens.** Each device has some of the experts
# and some of the rows. A router chooses experts for each token. One all-to-all takes the tokens to
# their experts, and a second one brings the results back.

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
# For each token, the router gives every expert a probability. The token visits the best two, and
# the layer adds up their outputs, weighted by their normalized probabilities (`shares`).

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
# The diagram shows the routes of three tokens. The devices have experts 0-1, 2-3, 4-5 and 6-7, and
# 16 tokens each:

# %%
print({f"token {token}": choose(x)[1][token].tolist() for token in (8, 24, 40)})
lesson.picture("visits")

# %% [markdown]
# ## There and back
# The number of tokens that go to each device isn't known until the program runs, but the shapes
# must be fixed beforehand. Some trainers give each expert room for a fixed number of tokens and
# drop the excess. Here no token is dropped: each device sends every other device an array big
# enough for all of its own tokens, with zeros for tokens that chose no expert there.

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
# **Predict.** X is the size of a device's tokens in bytes. How many bytes do the two all-to-alls
# send? One of the n arrays stays on its device. The choices and shares are small.

# %%
X = 4 * TOKENS // n * D
guess = ...

# %%
found = sends(on_mesh, x, up, down)
compare(guess, found["all-to-all over expert"])
predicted = 2 * (n - 1) * X + (n - 1) * (TOKENS // n) * BEST * 8
assert abs(sum(found.values()) / predicted - 1) < 0.02

# %% [markdown]
# Each all-to-all sends n - 1 arrays. That's 2 (n-1) X forward, and as much backward. Most of it is
# zeros. The code in this repository doesn't send most of the zeros: it sends a bucket of tokens to
# each device, with room for 1.25 times as many as usually go there. Tokens that don't fit travel in
# another round. So the devices first count the tokens, to agree on the number of rounds:

# %%
quote(shard.exchange)

# %% [markdown]
# ## Balance
# If all tokens choose the same experts, one device works and the rest wait. So the loss gets an
# added term, E x sum(visits(e) x probability(e)). It's 1 if all experts are equally busy, and
# larger if the busy experts are also the likely ones. The visits have no gradient, but the
# probabilities do. The router also learns through `shares`. `model.py` computes the term per row,
# to keep the loss a sum over rows.

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
# A layer with E experts has E times the weights of one MLP, but needs only as much arithmetic as
# `BEST` MLPs. The loop above also multiplies zeros; sorting the tokens, as in `shard.experts`,
# avoids that. fsdp would gather all E experts: 3 (n-1)/n W, with W = E times an MLP's bytes, no
# matter how few tokens there are. Experts send 4 (n-1) X, no matter how large the weights are. For
# example, 64 experts with 4,096 x 1,024 x 3 weights in bfloat16 take 1.6 GB, so fsdp=8 sends 4.2 GB
# per layer. With 4,096 tokens of width 4,096 per device, X = 33.6 MB, so expert=8 sends 0.94 GB. On
# a v5e, that takes 10 ms, compared with 47 ms for fsdp and 3 ms of arithmetic (forward and
# backward, two experts per token). With buckets, the 0.94 GB becomes 0.28 GB.
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
# All three have the right shapes and types, and two are right on one device. A comparison catches
# all of them.
#
# ## Exercises
# - 8.1 With expert=8, each device has 2,048 tokens of width 4,096 in bfloat16. How many bytes does
# a device send in one layer, forward and backward, zeros included?
# - 8.2 With 16 experts and two visits per token, what fraction of the experts' weights does a token
# use?
# - 8.3 What is the balance term if all tokens choose the same two of eight experts with probability
# one half each?
# - 8.4 Code: find the wrong line. The cell prints `experts` with one change. Give a piece of the
# wrong line and its replacement.

# %%
check("8.1", ...)
check("8.2", ...)
check("8.3", ...)
lesson.broken("8.4", experts)
wrong, right = ..., ...
check("8.4", lesson.repaired("8.4", experts, wrong, right, lambda f: jax.shard_map(
    f, in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS), want, x, up, down))
