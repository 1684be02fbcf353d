# %% [markdown]
# # 6. Long rows: keys and values go around a ring
# One idea: **softmax attention can be computed in parts.** Each device keeps its part of the time.
# Its queries stay; keys and values go from device to device, and after one round every query has
# seen every key.

# %%
import sys

sys.path += [".", ".."]      # (the repository, from here or from learn/)
from learn import lesson
from learn.lesson import P, check, compare, jax, jnp, lax, np, quote, sends, shard, show

lesson.begin(8)
n = 4
mesh = lesson.mesh(seq=n)
rng = np.random.default_rng(0)
B, T, H, N = 2, 64, 4, 16
q, k, v = (rng.normal(size=(B, T, H, N)).astype(np.float32) for _ in range(3))

# %% [markdown]
# ## Who holds what
# All arrays with a time are cut along it. A device has [B, T/4, H, N].

# %%
show(lesson.place(np.zeros((2, 8)), P(None, "seq")))

# %% [markdown]
# ## Attention in parts
# For one query, with scores s over some of the keys, keep two things: the average of those keys'
# values, weighted by exp(s), and L = log(sum(exp(s))). Two such pairs join into that of all keys:
# the weights are exp(L1) and exp(L2). No number grows, since only differences of L are used.

# %%
def part(q, k, v, mask):                        # -> values [B, T, H, N] and L [B, T, H]
    scores = jnp.einsum("bthn,bshn->bths", q, k) / N**0.5
    scores = jnp.where(mask[:, None, :], scores, -1e30)
    return jnp.einsum("bths,bshn->bthn", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, -1)

def join(a, b):
    (va, la), (vb, lb) = a, b
    both = jnp.logaddexp(la, lb)
    return va * jnp.exp(la - both)[..., None] + vb * jnp.exp(lb - both)[..., None], both

causal = np.tril(np.ones((T, T), bool))
want, _ = part(q, k, v, causal)
halves = [part(q, k[:, s], v[:, s], causal[:, s]) for s in (slice(0, 32), slice(32, 64))]
print("in two parts, wrong by", abs(join(*halves)[0] - want).max())

# %% [markdown]
# ## The ring
# In turn t a device has the keys of the device t places before it. `lax.ppermute` sends them on. In
# some turns all keys are masked. Their scores are -1e30, not -infinity, so L is near -1e30 too, and
# the part gets a weight of zero when it is joined to another. (-infinity would make it NaN.)
#
# **Predict** the bytes that a device sends. K is the bytes of its own keys, and n = 4.

# %%
K = 4 * B * T * H * N / n
guess = ...

# %%
def places(me, size):                           # where the tokens of device `me` are in the row
    return me * size + jnp.arange(size)

def ring(q, k, v, places=places):               # [B, T/4, H, N] each
    me, n, size = lax.axis_index("seq"), lax.axis_size("seq"), q.shape[1]
    mine, total = places(me, size), None
    for turn in range(n):
        theirs = places((me - turn) % n, size)
        found = part(q, k, v, mine[:, None] >= theirs)
        total = found if total is None else join(total, found)
        if turn < n - 1:
            k, v = lax.ppermute((k, v), "seq", [(d, (d + 1) % n) for d in range(n)])
    return total[0]

TIME = P(None, "seq")
on_ring = jax.jit(jax.shard_map(ring, in_specs=(TIME, TIME, TIME), out_specs=TIME))
print("wrong by", abs(on_ring(q, k, v) - want).max())
compare(guess, found := sum(sends(on_ring, q, k, v).values()))
assert abs(found / (2 * (n - 1) * K) - 1) < 0.02

# %% [markdown]
# Keys and values, n-1 times: 2 (n-1) K.
#
# ## The balance of a causal ring
# The ring above computes all pairs of tokens, and masks nearly half. Skipping these would help
# little while time is in order: in every turn but the first some device has full work, and the
# others wait for it. So this repository cuts the time into 2 n parts, and gives device d the parts
# d and 2 n - 1 - d: an early and a late one.
#
# **Predict**: each device has two parts, so a turn has up to four pairs (query part, key part) with
# work; the slowest device decides. How many pairs is that in all four turns, for both orders?

# %%
guess = {"in order": ..., "early and late": ...}

# %%
for name, parts in (("in order", [(2 * d, 2 * d + 1) for d in range(n)]),
                    ("early and late", [(d, 2 * n - 1 - d) for d in range(n)])):
    work = [[sum(a >= b for a in parts[d] for b in parts[(d - t) % n]) for t in range(n)]
            for d in range(n)]
    print(f"{name}: the work of each device in each turn: {work}")
    compare(guess[name], sum(map(max, zip(*work))), "pairs of the slowest devices")
lesson.picture("ring")

# %% [markdown]
# Backward, the transpose of each send is a send the other way: the gradients of keys and values
# come home, 2 (n-1) K more. So a layer sends 4 (n-1) K, because the keys of each turn are kept: n K
# for keys, and as much for values, in each layer whose activations are kept. Sending them around
# again, as `--remat full` does, makes it 6 (n-1) K.

# %%
gradient = jax.grad(lambda q, k, v: (on_ring(q, k, v)**2).sum(), (0, 1, 2))
assert abs(sum(sends(gradient, q, k, v).values()) / (4 * (n - 1) * K) - 1) < 0.02

print("\nThe causal ring of this repository (`look` is `part`):")
quote(shard.causal_ring)

# %% [markdown]
# ## When it pays
# In each turn a device does 2 B (T/n)^2 H N operations (half of the pairs are skipped) and sends
# 2 B (T/n) N numbers for each head of keys, often fewer than the H heads of queries. In bfloat16,
# with eight query heads to a key head, that is 4 T/n operations for each byte: with T/n = 1,024,
# 4,096, against 2,200 of a v5e. Long rows hide their ring.
#
# ## Bugs

# %%
BUGS = {"the mask by local places": ("places((me - turn) % n, size)", "jnp.arange(size)"),
        "the keys of the device after": ("(me - turn)", "(me + turn)"),
        "no mask": ("mine[:, None] >= theirs", "mine[:, None] >= 0 * theirs")}
for name, (right, wrong) in BUGS.items():
    lesson.report(name, lesson.planted(ring, right, wrong), TIME, TIME, want, q, k, v)

# %% [markdown]
# No type and no shape finds any of these, and the first two are right on one device. That is why in
# `shard.attend` masks and scores are functions of a token's place in the whole row, its slot.
#
# ## Exercises
# - 6.1 seq=8, rows of 32,768 tokens, one row on the devices of the ring, 8 key heads of width 128,
# bfloat16. How many bytes of keys and values does a device send forward, in one layer?
# - 6.2 L of two parts is 1 and 1. By what is each part's average multiplied?
# - 6.3 On seq=4, which parts of eight does device 1 have: 1 and which other?
# - 6.4 Code: the places of a device's tokens with an early and a late part. `size` is the number of
# tokens on a device. The ring above should then be right on rows in that order.

# %%
check("6.1", ...)
check("6.2", ...)
check("6.3", ...)

def zigzag_places(me, size):
    return ...

order = shard.zigzag_order(T, n)                # which token of the row is at each place here
check("6.4", lesson.tried(zigzag_places, jax.shard_map(
    lambda q, k, v: ring(q, k, v, zigzag_places), in_specs=(TIME, TIME, TIME), out_specs=TIME),
    want[:, order], q[:, order], k[:, order], v[:, order]))
