"""Each form that a weight can take in a function, and the specs that it must get.

FORMS has for each its function, the shapes of its weights and of its arguments, the specs, and
the mesh if it is not tensor=4. At the end, what jaxprs.py answers about small functions.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.helpers import mesh_of
from zigzag.parallel import jaxprs
from zigzag.parallel.rule import groups, infer_specs

COLUMN, ROW = P(None, "tensor"), P("tensor")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


def split_heads(x, heads=8):
    return x.reshape(*x.shape[:-1], heads, -1)


def attend(q, k, v, bias=0.0, causal=False):
    """Attention of heads [B, T, H, N], merged again to [B, T, H N]."""
    s = jnp.einsum("bthn,bshn->bhts", q, k) / q.shape[-1]**0.5 + bias
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
    o = jnp.einsum("bhts,bshn->bthn", jax.nn.softmax(s), v)
    return o.reshape(*q.shape[:2], -1)


MLP = {"up": floats(64, 256), "down": floats(256, 64)}
MLP_SPECS = {"up": COLUMN, "down": ROW}
X, IMAGE = floats(4, 16, 64), floats(4, 16, 16, 3)
T = "tensor"


def feed(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def attention(p, x, q="btd,dhn->bthn", k="btd,dhn->bthn", o="bthn,hnd->btd"):
    q, k, v = jnp.einsum(q, x, p["q"]), *(jnp.einsum(k, x, p[n]) for n in "kv")
    if q.ndim == 5:
        s = jax.nn.softmax(jnp.einsum("btkgn,bskn->bkgts", q, k))
        return x + jnp.einsum(o, jnp.einsum("bkgts,bskn->btkgn", s, v), p["o"])
    s = jax.nn.softmax(jnp.einsum("bthn,bshn->bhts", q, k))
    return x + jnp.einsum(o, jnp.einsum("bhts,bshn->bthn", s, v), p["o"])


def latent_attention(p, x):
    """MLA: queries, and keys with values, through narrow latents; one key of positions for all."""
    latent, where = jnp.split(x @ p["kva"], [24], -1)
    q = split_heads(x @ p["qa"] @ p["qb"])
    k, v = jnp.split(split_heads(latent @ p["kvb"]), 2, -1)
    return x + attend(q * jax.nn.sigmoid(where[:, :, None]), k, v) @ p["o"]


def repeated(shapes, times):
    return jax.tree.map(lambda s: floats(times, *s.shape), shapes)


def one_by_one(p, x):
    return jax.lax.fori_loop(0, 4, lambda i, x: feed(jax.tree.map(lambda w: w[i], p), x), x)


def low_rank(p, x):
    def lin(p, x):
        return x @ p["w"] + x @ p["a"] @ p["b"]
    return x + lin(p["down"], jax.nn.gelu(lin(p["up"], x)))


LOW_RANK = {"up": dict(w=floats(64, 256), a=floats(64, 8), b=floats(8, 256)),
            "down": dict(w=floats(256, 64), a=floats(256, 8), b=floats(8, 64))}
LOW_RANK_SPECS = {"up": dict(w=COLUMN, a=P(), b=COLUMN), "down": dict(w=ROW, a=ROW, b=P())}
EXPERTS = {"router": floats(64, 8), "w1": floats(8, 64, 256), "w2": floats(8, 256, 64)}
EXPERTS_SPECS = {"router": P(), "w1": P("expert", None, T), "w2": P("expert", T)}


def every_expert(p, x):
    g, h = jax.nn.softmax(x @ p["router"]), jax.nn.gelu(jnp.einsum("btd,edf->ebtf", x, p["w1"]))
    return x + jnp.einsum("bte,ebtd->btd", g, jnp.einsum("ebtf,efd->ebtd", h, p["w2"]))


def ragged_experts(p, x):
    x = x.reshape(-1, 64)
    best = jnp.argmax(x @ p["router"], -1)
    order, count = jnp.argsort(best), jnp.bincount(best, length=8)
    h = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["w1"], count))
    return x.at[order].add(jax.lax.ragged_dot(h, p["w2"], count))


def dispatched_experts(p, x):
    g = jax.nn.softmax(x @ p["router"])
    mine = jnp.einsum("bte,btd->ebtd", jax.nn.one_hot(jnp.argmax(g, -1), 8), x)
    h = jax.nn.gelu(jnp.einsum("ebtd,edf->ebtf", mine, p["w1"]))
    return x + jnp.einsum("ebtd,bte->btd", jnp.einsum("ebtf,efd->ebtd", h, p["w2"]), g)


def conv2d(k, x, **more):
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME",
                                        dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)


def pyramid(p, x):
    for k in p["convs"]:
        x = jax.nn.relu(conv2d(k, x))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return jax.nn.relu(x.reshape(4, -1) @ p["f1"]) @ p["f2"]


def depthwise(p, x):
    u, z = jnp.split(x @ p["in"], 2, -1)
    u = jax.lax.conv_general_dilated(u, p["conv"], (1,), [(3, 0)], feature_group_count=128,
                                     dimension_numbers=("NWC", "WIO", "NWC"))
    return x + (jax.nn.silu(u) * jnp.exp(-p["a"]) * jax.nn.silu(z)) @ p["out"]


def guarded(p, x):
    return jax.lax.cond(x.sum() > 0, lambda x: feed(p, x), lambda x: x, x)


def until(p, x):
    return jax.lax.while_loop(lambda c: c[1].sum() > 0, lambda c: (c[0] + 1, feed(p, c[1])),
                              (0, x))[1]


def own_derivative(p, x):
    f = jax.custom_vjp(feed)
    f.defvjp(lambda p, x: (feed(p, x), (p, x)), lambda r, g: jax.vjp(feed, *r)[1](g))
    return f(p, x)


def mapped(p, x):
    return jax.shard_map(feed, mesh=mesh_of("data=2"), in_specs=(P(), P("data")),
                         out_specs=P("data"))(p, x)


def modulated(p, x, t):
    """DiT: 3 D of scales, shifts and gates from a condition, in one product; they meet the stream,
    which is not split."""
    scale, shift, gate = jnp.split(jax.nn.silu(t) @ p["ada"], 3, -1)
    return x + gate[:, None] * (feed(p["mlp"], x * (1 + scale[:, None]) + shift[:, None]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    up: object
    down: object
    act: object = dataclasses.field(metadata=dict(static=True), default=jax.nn.gelu)

    def __call__(self, x):
        return x + self.act(x @ self.up) @ self.down


def scanned(p, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (feed(w, x), None)), x, p)[0]


def learned_queries(p, x):
    return attention(p["att"], jnp.broadcast_to(p["ask"], (4, 12, 64))) + x[:, :12]


def matrices_by_index(p, x, i):
    h = jax.nn.gelu(jnp.einsum("bd,bdf->bf", x, p["up"][i]))
    return x + jnp.einsum("bf,bfd->bd", h, p["down"][i])


def a_lookup_of_one(p, i):
    def look(i):
        return jax.lax.dynamic_index_in_dim(p["table"], i, keepdims=False)

    return feed(p["mlp"], jax.vmap(look)(i))


def inner_gradient(p, x):
    grads = jax.grad(lambda p: feed(p, x).sum())(p)
    return feed(jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), x)


TABLE = {"table": floats(512, 64), "mlp": MLP}
TABLE_SPECS = {"table": ROW, "mlp": MLP_SPECS}
FORMS = {
    "a dataclass": (lambda p, x: p(x), Layer(MLP["up"], MLP["down"]), (X,), Layer(COLUMN, ROW)),
    "a leaf that is a function": (
        lambda p, x: x + p["act"](x @ p["up"]) @ p["down"],
        {**MLP, "act": jax.nn.relu}, (X,), {**MLP_SPECS, "act": P()}),
    "a scanned stack": (
        scanned,
        repeated(MLP, 4), (X,), {"up": P("pipe", "fsdp", T), "down": P("pipe", T, "fsdp")},
        "pipe=2,fsdp=2,tensor=2"),
    "a stack by index": (
        one_by_one,
        repeated(MLP, 4), (X,), {"up": P(None, None, T), "down": P(None, T)}),
    "cond": (guarded, MLP, (X,), MLP_SPECS),
    "while": (until, MLP, (X,), MLP_SPECS),
    "custom_vjp": (own_derivative, MLP, (X,), MLP_SPECS),
    "shard_map": (mapped, MLP, (X,), MLP_SPECS),
    "six heads": (
        attention,
        {**dict.fromkeys("qkv", floats(64, 6, 8)), "o": floats(6, 8, 64)}, (X,),
        dict.fromkeys("qkvo", P())),
    "groups of queries": (
        lambda p, x: attention(p, x, "btd,dkgn->btkgn", "btd,dkn->btkn", "btkgn,kgnd->btd"),
        {"q": floats(64, 2, 4, 8), **dict.fromkeys("kv", floats(64, 2, 8)),
         "o": floats(2, 4, 8, 64)}, (X,),
        {"q": P(None, None, T), "k": P(), "v": P(), "o": P(None, T)}),
    "low rank": (low_rank, LOW_RANK, (X,), LOW_RANK_SPECS),
    "every expert": (every_expert, EXPERTS, (X,), EXPERTS_SPECS, "expert=2,tensor=2"),
    "ragged experts": (ragged_experts, EXPERTS, (X,), EXPERTS_SPECS, "expert=2,tensor=2"),
    "dispatched experts": (dispatched_experts, EXPERTS, (X,), EXPERTS_SPECS, "expert=4,tensor=2"),
    "convolutions": (
        pyramid,
        {"convs": [floats(3, 3, 3, 64), floats(3, 3, 64, 64), floats(3, 3, 64, 64)],
         "f1": floats(256, 512), "f2": floats(512, 10)}, (IMAGE,),
        {"convs": [P(), P(None, None, None, T), P(None, None, T)], "f1": COLUMN, "f2": ROW}),
    "a depthwise convolution": (
        depthwise,
        {"in": floats(64, 256), "conv": floats(4, 1, 128), "a": floats(128),
         "out": floats(128, 64)}, (X,),
        {"in": COLUMN, "conv": P(None, None, T), "a": P(T), "out": ROW}),
    "patches by a product": (
        lambda p, x: feed(p["mlp"], x.reshape(4, 16, 48) @ p["patch"]),
        {"patch": floats(48, 64), "mlp": MLP}, (IMAGE,), {"patch": P(), "mlp": MLP_SPECS}),
    "modulation": (
        modulated,
        {"ada": floats(64, 192), "mlp": MLP}, (X, floats(4, 64)), {"ada": P(), "mlp": MLP_SPECS}),
    "data that are closed over": (
        lambda p: feed(p["mlp"], p["table"][np.arange(64).reshape(4, 16)]),
        TABLE, (), TABLE_SPECS),
    "latent attention": (
        latent_attention,
        {"qa": floats(64, 24), "qb": floats(24, 64), "kva": floats(64, 32),
         "kvb": floats(24, 128), "o": floats(64, 64)}, (X,),
        {"qa": P(), "qb": COLUMN, "kva": P(), "kvb": COLUMN, "o": ROW}),
    "learned queries": (
        learned_queries,
        {"ask": floats(12, 64),
         "att": {**dict.fromkeys("qkv", floats(64, 8, 8)), "o": floats(8, 8, 64)}}, (X,),
        {"ask": P(), "att": {**dict.fromkeys("qkv", P(None, T)), "o": P(T)}}),
    "matrices by index": (
        matrices_by_index,
        repeated(MLP, 8), (floats(4, 64), ints(4)), {"up": P(None, None, T), "down": P(None, T)}),
    "a lookup of one": (a_lookup_of_one, TABLE, (ints(16),), TABLE_SPECS),
    "two tables whose rows are added": (
        lambda p, i: feed(p["mlp"], p["table"][i] + p["positions"][i % 128]),
        {**TABLE, "positions": floats(128, 64)}, (ints(4, 16),),
        {**TABLE_SPECS, "positions": P()}),
    "one token": (lambda p, i: feed(p["mlp"], p["table"][i]), TABLE, (ints(),), TABLE_SPECS),
    "a chain": (
        lambda p, x: jax.nn.relu(jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[2]) @ p[3],
        [floats(784, 128), floats(128, 256), floats(256, 256), floats(256, 10)],
        (floats(4, 784),), [COLUMN, ROW, COLUMN, ROW]),
    "a lookup by product": (
        lambda p, i: feed(p["mlp"], jax.nn.one_hot(i, 512) @ p["table"]),
        TABLE, (ints(4, 16),), TABLE_SPECS),
    "an inner gradient": (inner_gradient, MLP, (X,), MLP_SPECS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_weight_is_split_as_it_should(form):
    """An operation that the walk misreads, so that a layer written that way is split badly or not
    at all, and nothing says so."""
    fn, params, args, want, *mesh = FORMS[form]
    assert infer_specs(fn, params, *args, mesh=mesh_of(*mesh or ["tensor=4"])) == want


def test_the_reductions_that_a_group_costs():
    """A reduction forgotten, or one that gate and up share counted twice: the prices by which the
    rule chooses."""
    def gated(p, i):
        x = p["table"][i]
        return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    def costs(fn, *given):
        """{the first weight of each group that is split: (reductions, bytes)}"""
        return {g.members[0][0]: (g.reductions, g.bytes) for g in groups(fn, *given, shards=4)
                if g.verdict == "split"}

    params = {"table": floats(512, 64), "gate": floats(64, 256), "up": floats(64, 256),
              "down": floats(256, 64)}
    size = 4 * 4 * 16 * 64      # bytes of the stream in float32
    # The lookup; and of the others, forward the sum of what down makes, and backward that of x's
    # gradient.
    assert costs(gated, params, ints(4, 16)) == {"table": (1, size), "down": (2, 2 * size)}
    assert costs(scanned, repeated(MLP, 3), X) == {"down": (6, 6 * size)}, "in each layer"


def test_a_window_at_any_place_costs_a_reshard():
    """A window of a split dimension, at a place that the data gives, that costs nothing."""
    def windows(p, x, at):
        made = jnp.tanh(x @ p["up"])
        few = jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, (i,), (64,)))(made, at)
        return few @ p["down"], made @ p["wide"]

    params = {"up": floats(64, 256), "down": floats(64, 64), "wide": floats(256, 64)}
    up, = [g for g in groups(windows, params, floats(64, 64), ints(64), shards=4)
           if g.members[0][:2] == ("up", 1)]
    # Backward, x's gradient; and the window, gathered from all devices.
    assert (up.reductions, up.bytes) == (2, 2 * 4 * 64 * 64) and "gathered again" in up.verdict


# -------------------------------------------------------------------------------------------
# Questions about a function (jaxprs.py)

GIVEN = floats(64, 64), floats(8, 64)       # a weight, and rows


def branching(p, x):
    return jax.lax.map(lambda row: jax.lax.cond(row[0] > 0, jnp.tanh, lambda y: y, row), x @ p)


def counting(p, x):
    return jax.lax.while_loop(lambda s: s[1] < x[0, 0], lambda s: (s[0] @ p, s[1] + 1), (x, 0.0))


def calling(p, x):
    jax.debug.print("{}", x[0, 0])
    return x @ p


def harmless(p, x):
    """A branch and a loop that depend only on the weights, and a scan over the data."""
    p = jax.lax.cond(p[0, 0] > 0, jnp.tanh, lambda p: p, p)
    p = jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] @ p, s[1] + 1), (p, 0))[0]
    return jax.lax.scan(lambda c, row: (c + row @ p, None), jnp.zeros(64), x)[0]


@pytest.mark.parametrize("fn, why", [
    (branching, "branches on its data"),
    (counting, "has a loop whose length depends on its data"),
    (calling, "calls Python"),
    (harmless, "")])
def test_what_no_compiler_may_split_is_found(fn, why):
    """A collective inside a branch or loop that depends on data, which waits for ever for devices
    that do not come. It is found under jit and in a ClosedJaxpr too."""
    assert jaxprs.why_not_split(fn, *GIVEN) == jaxprs.why_not_split(jax.jit(fn), *GIVEN) == why
    assert jaxprs.why_not_split(jax.make_jaxpr(fn)(*GIVEN), GIVEN[0]) == why


def test_a_gradient_through_a_mark_is_seen():
    """A gradient inside a loss, of which each device would have only a part. It is found under jit
    and vmap too; with a stop_gradient there is none."""
    def loss(p, x):
        return jnp.sum(jaxprs.named(x @ p, "attend") ** 2)

    def inside(p, x):
        return jnp.sum(jax.vmap(jax.grad(jax.jit(loss)), (None, 0))(p, x[:, None]))

    def stopped(p, x):
        return jax.grad(lambda y: loss(jax.lax.stop_gradient(p), x) * y)(1.0)

    assert jaxprs.names_in(loss, *GIVEN) == {"attend"}
    assert jaxprs.names_in(jax.make_jaxpr(loss)(*GIVEN)) == {"attend"}
    assert jaxprs.DIFFERENTIATED in jaxprs.names_in(inside, *GIVEN)
    assert jaxprs.names_in(stopped, *GIVEN) == {"attend"}


def test_16_bits_are_seen_wherever_they_are():
    """A loss that computes in bfloat16 inside itself, compared with the tolerance of float32."""
    def inside(p, x):
        return jax.jit(lambda p: (x.astype("bfloat16") @ p.astype("bfloat16")).sum())(p)

    assert jaxprs.computes_in_16_bits(inside, *GIVEN)
    assert jaxprs.computes_in_16_bits(jax.make_jaxpr(inside)(*GIVEN))
    assert not jaxprs.computes_in_16_bits(feed, MLP, X)
