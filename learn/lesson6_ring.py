# %% [markdown]
# # 6. Long rows: keys and values go around a ring
# One idea: **you can compute softmax attention in parts.** Each device keeps its part of the
# sequence. Its queries stay; keys and values go from device to device, and after one round every
# query has seen every key.

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
# Every array with a sequence dimension is split along it. A device has [B, T/4, H, N].

# %%
show(lesson.place(np.zeros((2, 8)), P(None, "seq")))

# %% [markdown]
# ## Attention in parts
# For one query with scores s over some of the keys, keep two things: the average of those keys'
# values, weighted by exp(s), and L = log(sum(exp(s))). From two such pairs, you can compute the
# pair for all their keys, with weights exp(L1) and exp(L2). Nothing overflows, because the code
# uses only differences of L.

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
# In turn t, a device has the keys of the device t positions before it. `lax.ppermute` sends them
# on. In some turns, the mask covers all keys. Their scores are -1e30, so L is near -1e30 too, and
# the part gets a weight of zero when you join it to a different part. With scores of -infinity, the
# result would be NaN.
#
# **Predict** how many bytes a device sends. K is the size of its own keys in bytes, and n = 4.

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
# A device sends keys and values n-1 times: 2 (n-1) K.
#
# ## The balance of a causal ring
# The ring above computes all pairs of tokens, and masks nearly half of them. Skipping those
# wouldn't help much with the sequence in order: in every turn except the first, some device has a
# full load, and the rest wait for it. So this repository cuts the sequence into 2 n parts and gives
# device d the parts d and 2 n - 1 - d: an early and a late one.
#
# **Predict**: each device has two parts, so in each turn it has work for up to four pairs (query
# part, key part). A pair counts as one even if half of it is masked. The slowest device sets the
# pace. How many pairs does that add up to over all four turns, for each order?

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
# In the backward pass, the transpose of each send is a send in the opposite direction: the
# gradients of keys and values return to their own devices, for 2 (n-1) K more. So a layer sends 4
# (n-1) K if it keeps every turn's keys. That takes n K each for keys and values, in every layer
# that keeps its activations. `--remat full` sends them around again instead, 6 (n-1) K in total.

# %%
gradient = jax.grad(lambda q, k, v: (on_ring(q, k, v)**2).sum(), (0, 1, 2))
assert abs(sum(sends(gradient, q, k, v).values()) / (4 * (n - 1) * K) - 1) < 0.02

print("\nThe causal ring of this repository (`look` is `part`):")
quote(shard.causal_ring, docstring=True)

# %% [markdown]
# ## When it pays
# In each turn, a device does 2 B (T/n)^2 H N operations (it skips half of the pairs). It sends 2 B
# (T/n) N numbers per key head, and there are often fewer key heads than the H query heads. In
# bfloat16, with eight query heads per key head, that's 4 T/n operations per byte. Lesson 1's 2,200
# counts both directions of an axis. This ring sends in only one, so a v5e needs twice that, 4,400.
# With T/n = 2,048, it has 8,192. So with long rows, there is enough arithmetic to hide the sends.
#
# ## Bugs

# %%
BUGS = {"the mask by local places": ("places((me - turn) % n, size)", "jnp.arange(size)"),
        "the mask of the device after": ("(me - turn)", "(me + turn)"),
        "no mask": ("mine[:, None] >= theirs", "mine[:, None] >= 0 * theirs")}
for name, (right, wrong) in BUGS.items():
    lesson.report(name, lesson.planted(ring, right, wrong), TIME, TIME, want, q, k, v)

# %% [markdown]
# Neither types nor shapes catch any of these, and the first two are right on one device. That's
# why, in `shard.attend`, masks and scores are functions of a token's position in the whole row, its
# slot.
#
# ## Exercises
# - 6.1 With seq=8, a ring works on one row of 32,768 tokens, with 8 key heads of width 128 in
# bfloat16. How many bytes of keys and values does a device send in one layer's forward pass?
# - 6.2 Two parts have L = 1 and L = 1. What do you multiply each part's average by?
# - 6.3 On seq=4, device 1 has two of the eight parts: part 1 and which one?
# - 6.4 Code: return the positions of a device's tokens if it has an early and a late part. `size`
# is the number of tokens per device. The ring above should then be right for rows in that order.

# %%
check("6.1", ...)
check("6.2", ...)
check("6.3", ...)

def zigzag_places(me, size):
    return ...

order = shard.zigzag_order(T, n)                # which token of the row is at each position
check("6.4", lesson.tried(zigzag_places, jax.shard_map(
    lambda q, k, v: ring(q, k, v, zigzag_places), in_specs=(TIME, TIME, TIME), out_specs=TIME),
    want[:, order], q[:, order], k[:, order], v[:, order]))
