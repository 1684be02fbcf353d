"""Mixtures of experts: grouped products, the router, and the way of tokens to experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shard
from published import transformer
from tests.common import (
    assert_same_on,
    check_network,
    full,
    gradients_of,
    net,
    temporaries,
)
from tests.helpers import batch_of, learn, make, mesh_of, program_of
from zigzag.core import mesh as mesh_tools
from zigzag.core.errors import ConfigError
from zigzag.parallel import experts
from zigzag.parallel.experts import Room, _by_blocks, in_rounds, room_of, rounds_of
from zigzag.parallel.hlo import collectives
from zigzag.run.plan import compiled

# -------------------------------------------------------------------------------------------
# Grouped products

@pytest.mark.parametrize("R, E", [(100, 4), (7, 4), *(full(*each) for each in (
    (600, 3), (64, 1)))])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_grouped_product_by_blocks(R, E, share):
    """Rows multiplied by another group's weights, where groups of any length (0 too) meet in a
    block; rows in no group, which must give zero whatever they hold."""
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32)
                for shape in ((R, 8), (E, 8, 24), (R, 24)))
    for many in (np.eye(1, E, E - 1)[0], np.ones(E) / E, rng.dirichlet(np.ones(E) / 2)):
        counts = jnp.asarray(np.floor(many * share * R), jnp.int32)
        own = (jnp.arange(R) < counts.sum())[:, None]

        def plain(x, w):
            return jnp.where(own, jax.lax.ragged_dot(x, w, counts), 0)

        def with_gradients(product):
            y, vjp = jax.vjp(product, jnp.where(own, x, 1e9), w)
            return y, *vjp(dy)

        for a, b in zip(with_gradients(lambda x, w: _by_blocks(x, w, counts, R)),
                        with_gradients(plain)):
            np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.full
def test_rows_in_no_group_of_a_grouped_product_may_hold_anything(monkeypatch):
    """NaNs in every weight, because a TPU's kernel leaves memory as it was in rows of no group.
    Forward and backward, simulated on CPU devices."""
    real = jax.lax.ragged_dot

    def dirty(y, counts):
        return jnp.where((jnp.arange(len(y)) < counts.sum())[:, None], y, jnp.nan)

    @jax.custom_vjp
    def anything(x, w, counts):
        return dirty(real(x, w, counts), counts)

    def forward(x, w, counts):
        return anything(x, w, counts), (x, w, counts)

    def backward(saved, cotangent):
        x, w, counts = saved
        cotangent = jnp.where(jnp.isnan(cotangent), 0, cotangent)
        dx, dw = jax.vjp(lambda x, w: real(x, w, counts), x, w)[1](cotangent)
        return dirty(dx, counts), dw, None

    anything.defvjp(forward, backward)
    config = make(experts=4, steps=3)
    want = [r["loss"] for r in learn(config)[0]]
    as_on_a_tpu(monkeypatch)
    monkeypatch.setattr(experts, "_by_blocks", None)
    monkeypatch.setattr(jax.lax, "ragged_dot", anything)
    for mesh in ("expert=2", "expert=4", "expert=2,tensor=2"):
        assert [r["loss"] for r in learn(config, mesh)[0]] == pytest.approx(want, rel=5e-5)


def as_on_a_tpu(monkeypatch):
    """Compute experts as on a TPU, and leave everything else (the mesh, compiler options) alone."""
    monkeypatch.setattr(experts, "platform",
                        lambda *mesh: mesh_tools.platform(*mesh) if mesh else "tpu")


# -------------------------------------------------------------------------------------------
# The mixture

def one_by_one_through_all(w, h, c, tokens):
    """The definition: every expert on every token, weighted by its share."""
    def mlp(gate, up, down):
        return (jax.nn.silu(h @ gate) * (h @ up)) @ down

    K = c.experts_per_token
    probs = jax.nn.softmax(h @ w["router"])
    chosen = jax.lax.stop_gradient((probs >= jnp.sort(probs, -1)[..., -K, None]) * 1.0)
    shares = probs * chosen / (probs * chosen).sum(-1, keepdims=True)
    out = sum(shares[..., i, None] * mlp(w["e_gate"][i], w["e_up"][i], w["e_down"][i])
              for i in range(c.experts))
    added = 0
    for row, p, z in zip(range(len(h)), probs, jax.nn.logsumexp(h @ w["router"], -1)):
        n = tokens[row].sum()
        load = (chosen[row] * tokens[row][:, None]).sum(0) / (K * max(n, 1))
        share = (p * tokens[row][:, None]).sum(0) / max(n, 1)
        added += c.balance * c.experts * n * (load * share).sum()
        added += c.router_z * (z ** 2 * tokens[row]).sum()
    return out + mlp(w["w_gate"], w["w_up"], w["w_down"]), added


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_experts_that_are_equally_busy_cost_the_same_with_each_router(router):
    """A balance loss of half the number of experts, with a gradient many times the tokens', from
    scores that do not sum to 1."""
    c = transformer.Config(experts=8, experts_per_token=8, router=router, balance=1.0, router_z=0.0,
                           layers=2, d_model=32, heads=4, vocab_size=61)
    w = jax.tree.map(lambda x: x[0], net.init(c, jax.random.key(0))["layers"])
    w["router"] = jnp.zeros_like(w["router"])
    weights = jnp.ones((2, 4))
    _, (added, _) = transformer._experts(w, jnp.ones((2, 4, 32)), c, 0, {
        "seeds": 1, "weights": weights}, [])
    assert added == pytest.approx(weights.sum())


@pytest.mark.parametrize("mesh, changes", [
    ("fsdp=2,expert=2,tensor=2", dict(expert_every=2)),
    full("pipe=2,expert=2", dict(expert_every=2, microbatches=2, schedule="1f1b")),
    full("pipe=2,tensor=2", dict(expert_every=2, layers=8, microbatches=2, chunks=2,
                                 schedule="interleaved")),
    full("data=2,seq=2,tensor=2", dict(expert_every=3, dense_layers=1, dropout=0.1)),
    full("fsdp=2,tensor=2", dict(expert_every=2, dense_layers=2, remat="full")),
    full("fsdp=2,tensor=2", dict(expert_every=2, dense_layers=2, relative="buckets",
                                 relative_shared=True)),
    full("expert=4,tensor=2", dict(expert_every=4, norm_place="out"))])
def test_experts_in_every_nth_layer_on_a_mesh(mesh, changes):
    """Layers between those with experts that a mesh gathers wrongly, or whose dropout depends on
    it; loads of experts in another layer's row."""
    changes = {"layers": 4, **changes, "experts": 4}
    check_network(make(**changes), mesh_of(mesh))
    assert_same_on(mesh, **changes)


def test_a_stage_has_whole_entries_of_the_stack():
    """A traceback where the stages divide the layers, but not the layers with experts."""
    c = make(experts=4, expert_every=2, layers=4)
    check_network(c, mesh_of("pipe=2"))
    with pytest.raises(ConfigError, match="--layers 4 does not divide into 8; .* --layers 8"):
        check_network(c, mesh_of("pipe=4"))
    check_network(make(experts=4, expert_every=3, layers=7, dense_layers=1), mesh_of("data=1"))
    check_network(make(experts=4, dense_layers=1, layers=4, schedule="interleaved", chunks=2),
                  mesh_of("data=1"))        # one stage: nothing to divide
    with pytest.raises(ConfigError, match=r"--expert_every 3: .*must divide .* \(5 - 1\)"):
        make(experts=4, expert_every=3, layers=5, dense_layers=1)
    with pytest.raises(ConfigError, match="--expert_every 2: needs --experts"):
        make(expert_every=2, layers=4)


@pytest.mark.parametrize("changes", [dict(expert_every=2), dict(dense_layers=1, expert_every=3),
                                     dict(dense_layers=3)], ids=str)
def test_what_is_logged_has_a_row_for_each_layer_with_experts(changes):
    """A load in another layer's row; rows of layers without experts; a mean over all layers."""
    c = make(layers=4, experts=4, **changes).network
    _, count, others = transformer.loss(net.init(c, jax.random.key(0)), batch_of(make()), c)
    assert others["expert_load"].shape == (c.expert_layers, 4)
    np.testing.assert_allclose(others["expert_load"].sum(1) / count, 1, rtol=1e-5)
    assert others["expert_rounds"] / count == pytest.approx(1)


BIASED = dict(experts=4, experts_per_token=1, router="sigmoid", balance=0.0, router_z=0.0)


@pytest.mark.parametrize("mesh", ["", "data=2,tensor=2", full("expert=2,fsdp=2"),
                                  full("pipe=2,seq=2")])
def test_a_bias_follows_its_experts_load(mesh):
    """A busy expert whose bias rises; loads that are averaged per device, so that the update
    depends on the mesh; a loss that the bias changes."""
    c = make(**BIASED, balance_bias=True)
    batch, params = batch_of(c), net.init(c.network, jax.random.key(0))
    _, count, others = transformer.loss(params, batch, c.network)
    load = others["expert_load"] / count
    grads, _ = gradients_of(c, mesh, batch, params)
    want = 1e-3 * (load - load.mean(-1, keepdims=True))
    np.testing.assert_allclose(grads["layers"]["router_bias"], want, rtol=1e-4, atol=1e-8)
    assert load.sum() == pytest.approx(c.network.layers) and float(abs(want).max()) > 1e-5
    assert float(others["router_loss"]) == 0


def test_what_chooses_experts_is_not_rounded():
    """A bias for the choice of experts in bfloat16: DeepSeek's differ little from a large offset,
    to which they would be rounded."""
    c = make(experts=4, router="sigmoid", dtype="bfloat16").network
    params = mesh_tools.cast(net.init(c, jax.random.key(0)), c.dtype)
    kinds = {path: w.dtype for path, w in mesh_tools.by_path(params).items()}
    assert kinds.pop("layers.router_bias") == jnp.float32
    assert set(kinds.values()) == {jnp.dtype("bfloat16")}


def test_experts_equal_a_loop_over_all_of_them():
    """An output weighted by the wrong expert's share; a router's loss that counts tokens of weight
    0 (one row has only these). With gradients."""
    c = make(experts=6, experts_per_token=3, shared_experts=2).network
    w = jax.tree.map(lambda x: 3 * x[0], net.init(c, jax.random.key(0))["layers"])
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(4, 16, 32)), jnp.float32)
    tokens = (rng.random((4, 16)) < [[0], [0.3], [0.7], [1]]).astype(np.float32)
    direction = jnp.asarray(rng.normal(size=h.shape), jnp.float32)

    def ours(w, h):
        gate, up = shard.columns(h, w["w_gate"], w["w_up"])
        out, (added, others) = transformer._experts(w, h, c, 0, {"seeds": 1, "weights": tokens},
                                              [(transformer.activate(c, gate, up), w["w_down"])])
        return jnp.sum(out * direction) + added, (out, added, others)

    def plain(w, h):
        out, added = one_by_one_through_all(w, h, c, tokens)
        return jnp.sum(out * direction) + added, (out, added, None)

    with jax.default_matmul_precision("highest"):
        (_, (out, added, others)), grads = jax.jit(
            jax.value_and_grad(ours, (0, 1), has_aux=True))(w, h)
        (_, (want, want_added, _)), want_grads = jax.jit(
            jax.value_and_grad(plain, (0, 1), has_aux=True))(w, h)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert float(added) == pytest.approx(float(want_added), rel=1e-5)
    assert float(others["router_loss"]) == float(added)
    assert others["expert_load"][0].sum() == pytest.approx(tokens.sum())
    assert not others["expert_load"][1].any()
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()) + 1e-6)


# -------------------------------------------------------------------------------------------
# Rounds

@pytest.mark.parametrize("mesh, changes", [
    ("expert=4", dict(experts=8, expert_room=0.4)),
    full("expert=2,tensor=2", dict(experts=4, experts_per_token=3, shared_experts=1)),
    full("fsdp=2,expert=2,tensor=2", dict(experts=4, expert_room=0.5, remat="full", accumulate=2)),
    full("fsdp=2,expert=2", dict(experts=8, expert_room=0.4, remat="mlp")),
    full("fsdp=2,expert=2", dict(experts=8, expert_room=0.4, remat="selective")),
    full("expert=2,tensor=2", dict(experts=4, expert_room=0.1, seq_len=15, d_ff=33)),
    full("pipe=2,expert=2", dict(experts=4, expert_room=0.3, schedule="1f1b", microbatches=2)),
    full("pipe=2,expert=2,tensor=2", dict(experts=4, expert_room=0.3, microbatches=2)),
    full("seq=2,expert=2,tensor=2", dict(experts=4, expert_room=0.2)),
    full("pipe=2,seq=2,expert=2", dict(experts=4, expert_room=0.3, microbatches=2))])
def test_tokens_that_do_not_fit_travel_in_further_rounds(mesh, changes):
    """A token that two rounds take, or none; a further round without a gradient; devices that
    disagree on the number of rounds and wait for each other."""
    rounds = assert_same_on(mesh, **changes)
    assert changes.get("expert_room", 1.25) == 1.25 or rounds > 1


def test_the_room_of_a_round():
    """A bucket for more tokens than there are; a further round that may not fit, or that takes no
    token."""
    # By hand: a token misses all 8 experts of a device with a chance of 56/64 x 55/63.
    assert room_of(512, 2, 8, 8, 1.25) == Room(152, 8 * 160, 80)
    assert room_of(512, 2, 1, 8, 1.25) == Room(160, 8 * 160, 160)
    assert room_of(512, 2, 2, 2, 1.25) == Room(512, 2 * 640, 320)
    assert room_of(1, 2, 2, 2, 1.25) == Room(1, 2 * 2, 1)
    for tokens, best, own, n, factor in ((7, 3, 2, 2, 0.01), (100, 8, 32, 8, 1.25),
                                         (100, 1, 4, 2, 9.0), (30, 4, 2, 4, 0.7)):
        room, most = room_of(tokens, best, own, n, factor), min(best, own)
        assert 1 <= room.safe <= room.tokens <= tokens
        assert n * most * room.safe <= room.choices <= n * most * room.tokens
    for tokens, choices, expected in (
            (152, 1280, (152, 1)), (153, 1280, (152, 2)), (232, 1280, (152, 2)),
            (233, 1280, (152, 3)), (152, 1281, (80, 2)), (80, 1281, (80, 1)),
            (512, 8192, (80, 7))):
        assert rounds_of(Room(152, 1280, 80), tokens, choices) == expected


def test_a_sum_over_rounds_and_its_gradient():
    """A gradient that leaves out the further rounds, or one of an array that an activation closes
    over; a first round that runs twice."""
    w, scale, ids = jnp.arange(1.0, 5), jnp.float32(3), jnp.arange(4)

    def of_round(i, w, scale):
        return jnp.sin(w[ids] * scale) * (i + 1)

    def total(w, scale, rounds):
        return in_rounds(lambda w: of_round(0, w, scale), lambda i, w: of_round(i, w, scale),
                         rounds, w).sum()

    def plain(w, scale, rounds):
        return sum(of_round(i, w, scale) for i in range(rounds)).sum()

    for rounds in (1, 2, 5):
        got = jax.jit(jax.value_and_grad(total, (0, 1)))(w, scale, jnp.int32(rounds))
        want = jax.value_and_grad(plain, (0, 1))(w, scale, rounds)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("skewed", [False, True])
def test_rounds_of_a_custom_loss(skewed):
    """A token that two rounds take; an empty place that counts as a token; an array that an
    activation closes over and that gets no gradient. If all tokens choose the same two experts,
    the first round is smaller than its buckets."""
    rng = np.random.default_rng(0)
    x, up, down, shares = (jnp.asarray(rng.normal(size=s), jnp.float32)
                           for s in ((4, 8, 16), (4, 16, 8), (4, 8, 16), (4, 8, 2)))
    chosen = jnp.asarray(np.argsort(rng.random((4, 8, 4)))[..., :2] * (not skewed) + [0, skewed])

    def loss(x, up, down, slope, chosen, shares):
        with mesh_tools.within(expert_room=0.7):
            return jnp.sum(shard.experts(x, chosen, shares, (up,), lambda h: h * slope, down) ** 2)

    def on_mesh(*args):
        args = mesh_tools.mark_varying(args, also={"expert"})
        *grads, slope = jax.grad(loss, (0, 1, 2, 3))(*args)
        return *grads, jax.lax.psum(slope, "expert")

    split, whole = P("expert"), P()
    args = x, up, down, jnp.float32(2), chosen, shares
    got = jax.jit(jax.shard_map(on_mesh, mesh=mesh_of("expert=2"), out_specs=(*[split] * 3, whole),
                                in_specs=(*[split] * 3, whole, split, split)))(*args)
    for a, b in zip(got, jax.grad(loss, (0, 1, 2, 3))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_routed_tokens_alone_travel():
    """More than 0.35 of the bytes of an exchange with room for all tokens, 4 (n-1) X per layer, for
    2 of 64 experts on eight devices with 512 tokens each; further rounds that count as sent."""
    program = program_of(make(layers=2, d_model=64, d_ff=64, seq_len=128, batch=32, experts=64),
                         "expert=8")
    sent = sum(c.bytes for c in collectives(compiled(program))
               if c.axis.endswith("expert") and c.kind in ("all-to-all", "all-gather"))
    X = 512 * 64 * 4
    assert 0.29 < sent / (2 * 4 * 7 * X) < 0.35


@pytest.mark.full
def test_rounds_take_no_more_memory_than_one_that_has_room_for_all():
    """A backward pass that keeps the arrays of further rounds."""
    one, all_at_once = (temporaries(make(layers=2, seq_len=128, batch=32, experts=8, d_ff=128,
                                         expert_room=room), "expert=4") for room in (1.25, 8.0))
    assert one < 0.7 * all_at_once
