"""Tensor parallelism by hand, shard.py's sections `tensor` and `vocabulary`: every case in which a
device's part is not simply one n-th. The step on the mesh equals the plain formula without a mesh
to twelve digits (common.assert_same_on)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shard
from tests.common import assert_same_on, full, in_float64, net, slow
from tests.helpers import batch_of, make, mesh_of, needed
from zigzag.core.mesh import by_path, shardings, spec_axes, varying
from zigzag.parallel import products

transformer = needed("published.transformer")

# -------------------------------------------------------------------------------------------
# The whole step

@pytest.mark.parametrize("override", [
    "w_up=-", full("wo=-"), full("w[qkv]=-,tensor"), full("embed=-"), full("head=-,data"),
    full("w_down=-"), full("w_(up|gate|down)=-"), full("w_up_bias=-")])
def test_a_weight_that_is_stored_otherwise_than_used(override):
    """A device's part of a weight that is stored whole, used without summing its gradient; the part
    of another dimension: shapes fit in both cases."""
    assert_same_on("data=2,tensor=2", override=(override,), biases="mlp")


@pytest.mark.full
def test_logits_of_a_whole_head_beside_a_split_stream():
    """Equal logits whose type varies over tensor: a sum made of them (an entropy to log) counts
    once for each device."""
    x, head = jax.random.normal(jax.random.key(0), (2, 4, 8)), jnp.eye(8, 16)
    mesh, spec = mesh_of("tensor=2"), P(None, "tensor")

    def entropy(x, head):
        logits = shard.vocab_logits(x, head, 16)
        return -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits))

    def on_mesh(x, head):       # (an output that varies would be refused)
        return jax.shard_map(entropy, mesh=mesh, in_specs=(spec, P()), out_specs=P())(x, head)

    for got, want in zip(jax.value_and_grad(on_mesh, (0, 1))(x, head),
                         jax.value_and_grad(entropy, (0, 1))(x, head)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("mesh, heads, kv_heads, changes", [
    ("tensor=4", 6, 2, {}),
    slow("tensor=4", 6, 3, dict(parallel_block=True)),
    slow("fsdp=2,tensor=4", 6, 3, dict(remat="selective", seq_len=18))])
def test_heads_that_tensor_does_not_divide(mesh, heads, kv_heads, changes):
    """Attention that every device computes for all heads, summed over devices as if they had parts;
    a head cut in two."""
    assert_same_on(mesh, heads=heads, kv_heads=kv_heads, head_dim=4, **changes)


@pytest.mark.parametrize("heads, kv_heads, changes", [
    (24, 6, {}), slow(12, 3, dict(parallel_block=True))])
def test_key_heads_are_repeated_until_tensor_divides_them(heads, kv_heads, changes):
    """Queries that meet another group's keys: 6 key heads of 24 heads make 12 on 4 devices, each
    with half of a head's queries beside all of another's."""
    assert_same_on("tensor=4", heads=heads, kv_heads=kv_heads, head_dim=4, **changes)


@pytest.mark.parametrize("mesh, heads, kv_heads, changes", [
    ("tensor=2", 6, 3, {}), full("tensor=2", 9, 3, {}),
    slow("tensor=4", 8, 2, {}), slow("tensor=4", 8, 4, dict(parallel_block=True)),
    slow("tensor=4", 12, 6, dict(override=("[qk]_norm=-",))),
    slow("pipe=2,tensor=2", 6, 3, dict(microbatches=2, schedule="1f1b")),
    slow("seq=2,fsdp=2,tensor=2", 6, 3, dict(remat="full"))])
def test_a_norm_of_all_heads(mesh, heads, kv_heads, changes):
    """The mean of only a device's own heads; a gradient of only its own heads; a wrong mean of 3
    key heads on 2 devices, which have copies."""
    assert_same_on(mesh, heads=heads, kv_heads=kv_heads, head_dim=4, qk_norm=True,
                   qk_norm_wide=True, **changes)


def test_a_norm_of_all_heads_is_one_reduction_and_one_back():
    """Separate reductions for the means of queries and of keys, or for their gradients."""
    def total(q, k, scales):
        return sum(jnp.sum(jnp.sin(a)) for a in transformer.norm_all_heads(q, k, scales, 4, 1e-6))

    B, T, H, K, N, mesh = 2, 8, 4, 2, 6, mesh_of("tensor=2")
    heads, scales = P(None, None, "tensor"), P(None, "tensor")
    specs = heads, heads, (scales, scales)
    args = jnp.ones((B, T, H, N)), jnp.ones((B, T, K, N)), (jnp.ones((1, H, N)),
                                                            jnp.ones((1, K, N)))
    step = jax.shard_map(jax.grad(total, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
    lowered = jax.jit(step).lower(*jax.device_put(args, shardings(specs, mesh)))
    assert lowered.as_text().count("all_reduce") == 2       # (a compiler may join several)
    assert shard.collectives(lowered.compile()) == [("all-reduce", "tensor", 2, 2 * 2 * B * T * 4)]


@pytest.mark.parametrize("mesh, changes", [
    ("tensor=2", dict(seq_len=33)), slow("pipe=2,tensor=4", dict(seq_len=36, microbatches=2)),
    slow("pipe=2,tensor=4", dict(seq_len=36, microbatches=2, schedule="1f1b")),
    slow("seq=2,tensor=4", dict(seq_len=20)),
    slow("pipe=2,tensor=4", dict(seq_len=18, microbatches=2)),
    slow("tensor=2", dict(seq_len=15, parallel_block=True))])
def test_time_that_tensor_does_not_divide(mesh, changes):
    """A stream that is not split between blocks, after an all-reduce in `row`: gradients that count
    every device's copy, or (36 tokens, which tensor divides but not the stages) that are of another
    device's time."""
    assert_same_on(mesh, **changes)


@pytest.mark.parametrize("mesh, changes", [
    ("tensor=2", {}), full("tensor=3", dict(heads=6, head_dim=8, seq_len=18, d_ff=96)),
    slow("pipe=2,tensor=2", dict(microbatches=2)), slow("seq=2,tensor=2", {})])
def test_the_loss_in_chunks(mesh, changes, monkeypatch):
    """Targets of another device's time for the logits of a chunk; a head that is marked as varying
    for the loop over chunks and then taken for a split one."""
    monkeypatch.setattr(products, "LOGITS", 8 * 16 * 128 // 4)
    assert_same_on(mesh, **changes)


@pytest.mark.full
@pytest.mark.parametrize("mesh, changes", [
    slow("tensor=2", dict(seq_len=17)), slow("expert=2,tensor=2", dict(shared_experts=1)),
    slow("tensor=2", dict(seq_len=15, parallel_block=True, shared_experts=1)),
    slow("pipe=2,tensor=2", dict(microbatches=2, seq_len=18, schedule="1f1b")),
    slow("seq=2,tensor=2", dict(shared_experts=1, override=("e_up=-",)))])
def test_experts_beside_tensor(mesh, changes):
    """The router's losses counted once for each device, or for only a part of the time; devices
    that share an expert and have different tokens."""
    assert_same_on(mesh, experts=4, **changes)


@pytest.mark.parametrize("changes", [{}, slow(dict(parallel_block=True, tied=True, seq_len=17))])
def test_an_mlp_that_tensor_does_not_divide(changes):
    """Unsplit columns and rows, summed over devices as if they were parts."""
    assert_same_on("tensor=2", d_ff=63, **changes)


# -------------------------------------------------------------------------------------------
# Picking positions of a stream

ORDERED = np.arange(2 * 16 * 3).reshape(2, 16, 3).astype(np.float32)


def split_time(mesh, stream):
    """A stream [B, T, D] as the devices of a mesh have it, and its spec."""
    axes = tuple(a for a in ("seq", "tensor") if dict(mesh.shape)[a] > 1)
    n = dict(mesh.shape)["seq"]
    return stream[:, shard.zigzag_order(16, n)] if n > 1 else stream, P(None, axes)


@pytest.mark.parametrize("mesh", ["tensor=2", "seq=2", "seq=4", "seq=2,tensor=2", "tensor=8"])
def test_whole_time_is_in_order_and_its_gradient_is_each_devices_own(mesh):
    """Positions in zigzag order, in which the last is not the last token; a gradient that is summed
    over devices that all have the same one."""
    mesh = mesh_of(mesh)
    stream, spec = split_time(mesh, ORDERED)
    factor = np.random.default_rng(0).normal(size=ORDERED.shape).astype(np.float32)
    seen = []

    def local(x):
        whole = shard.whole_time(x)
        seen.append((varying(x), varying(whole)))
        loss, gradient = jax.value_and_grad(
            lambda x: jnp.sum(jnp.sin(shard.whole_time(x)) * factor))(x)
        return whole, loss, gradient

    with jax.set_mesh(mesh):
        whole, loss, gradient = jax.jit(jax.shard_map(
            local, in_specs=spec, out_specs=(P(), P(), spec)))(stream)
    np.testing.assert_array_equal(whole, ORDERED)
    assert float(loss) == pytest.approx(float((np.sin(ORDERED) * factor).sum()), rel=1e-4)
    np.testing.assert_allclose(gradient, split_time(mesh, np.cos(ORDERED) * factor)[0], rtol=1e-5,
                               atol=1e-6)
    assert seen[0] == (spec_axes(spec), set())


def test_whole_time_of_a_stream_that_is_whole_is_itself():
    """A gather of an unsplit stream: every position once for each device."""
    assert np.array_equal(shard.whole_time(ORDERED), ORDERED)

    def local(x):
        whole = shard.whole_time(x)     # (the same, with a name)
        assert varying(whole) == varying(x) and whole.shape == x.shape
        return whole

    with jax.set_mesh(mesh_of("data=2,tensor=2,seq=2")):
        jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data")))(ORDERED)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "data=2,seq=2,tensor=2", "tensor=4"])
def test_a_gradient_through_a_step(mesh):
    """Second derivatives through the collectives of columns, row, attend, the embedding and the
    loss, as MAML has them: a rule for a backward pass that cannot be differentiated itself. (Of
    experts there are none: jax has no second derivative of a grouped product.)"""
    def after_a_step(params, first, second):
        def total(params, batch):
            return net.loss(params, batch, config)[0]

        inner = jax.grad(total)(params, first)      # (of all rows: the weights do not vary)
        return total(jax.tree.map(lambda w, g: w - 1e-3 * g, params, inner), second)

    with in_float64():
        config = make()
        params, mesh = net.init(config, jax.random.key(0)), mesh_of(mesh)
        batches = [{k: v for k, v in batch_of(config, seed).items() if k != "seeds"}
                   for seed in (1, 2)]
        want = jax.jit(jax.grad(after_a_step))(params, *batches)
        specs, local = net.weight_specs(config, mesh), jax.grad(after_a_step)
        with jax.set_mesh(mesh):
            (first, times), (second, _) = (shard.shard_time(b, mesh) for b in batches)
            got = jax.jit(jax.shard_map(local, in_specs=(specs, times, times), out_specs=specs))(
                jax.device_put(params, shardings(specs, mesh)), first, second)
        got = jax.device_get(got)
        # In the gradient's direction, which sees all of its parts, by finite differences.
        size, step = float(optax.tree.norm(want)), 1e-5
        ahead, behind = (after_a_step(jax.tree.map(
            lambda w, g, sign=sign: w + sign * step / size * g, params, want), *batches)
            for sign in (1, -1))
        assert (ahead - behind) / (2 * step) == pytest.approx(size, rel=1e-6)
        for (path, a), b in zip(by_path(got).items(), jax.tree.leaves(want), strict=True):
            assert np.linalg.norm(a - b) < 1e-9 * size, path
