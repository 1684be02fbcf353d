"""Attention: in blocks, by kernels, around a ring; and heads that a compiler cannot divide."""

import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import sample
import shard
from tests.common import (
    assert_same_update,
    full,
    gradients_of,
    in_float64,
    mean_loss,
    net,
    slow,
    temporaries,
)
from tests.helpers import batch_of, make, mesh_of, needed, program_of
from zigzag.core.flags import change
from zigzag.parallel import attention, ring_kernel
from zigzag.parallel.attention import block_ends, kernel_name
from zigzag.run import loop

arithmetic = needed("forecast.arithmetic")

# -------------------------------------------------------------------------------------------
# In blocks

@pytest.mark.parametrize("time, scores, block", [
    full(64, 2**25, 16), (96, 2**10, 16), full(60, 2**9, 10**9),
    full(128, 2**12, 16), full(128, 2**25, 4)])
@in_float64()
def test_attention_in_blocks_is_attention(monkeypatch, time, scores, block):
    """A block with too few keys, or with document numbers of other tokens, in values or gradients;
    memory that grows with the square of the time."""
    config = make(seq_len=time, kv_heads=2)
    batch, params = batch_of(config), net.init(config, jax.random.key(0))
    batch["segments"] = np.sort(np.random.default_rng(0).integers(0, 3, (8, time)), 1)

    def both():
        return jax.jit(jax.value_and_grad(lambda p: net.loss(p, batch, config)[0]))(params)

    monkeypatch.setattr(attention, "BLOCK", 10**9)
    want = both()
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(attention, "SCORES", scores)
    assert block_ends(8 * 4 * time**2, time) != ([time], 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), both(), want)


PLAIN = attention.softmax_attention


def MASK(query, key):
    return (key["slot"][:, None, :] <= query["slot"][:, :, None])[:, None]


def test_blocks_save_arithmetic_and_memory(monkeypatch):
    """Blocks that compute all scores and mask them, or that are all in memory at once."""
    def measured(time, causal=True):
        shape = jax.ShapeDtypeStruct((1, time, 1, 16), jnp.float32)
        info = {"slot": jax.ShapeDtypeStruct((1, time), jnp.int32)}

        def loss(q, k, v, a, b):
            return jnp.sum(shard.attend(PLAIN, q, k, v, MASK, a, b,
                                        attention.AttendOptions(causal)))

        done = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, info, info).compile()
        return arithmetic.arithmetic(done), done.memory_analysis().temp_size_in_bytes

    # 39 of 64 eighths (the last quarter alone is halved), and 36.
    assert measured(1024)[0] <= 0.62 * measured(1024, False)[0]
    assert measured(4096)[0] <= 0.57 * measured(4096, False)[0]
    monkeypatch.setattr(attention, "SCORES", 2**16)
    assert measured(4096)[1] < 2.5 * measured(2048)[1] < 2.5 * 2048 * 2048


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", full("selective")])
def test_scores_are_not_kept_for_the_backward_pass(monkeypatch, remat):
    """A layer's --remat, which keeps what attention meant to compute again."""
    monkeypatch.setattr(attention, "SCORES", 2**16)

    few, many = (temporaries(make(layers=layers, seq_len=512, batch=4, heads=4, kernel="off",
                                  remat=remat, fsdp_min=1), "fsdp=4") for layers in (2, 6))
    scores = 4 * 512 * 512      # of a row and its heads, in one layer
    assert (many - few) / 4 < scores * 4 / 2


# -------------------------------------------------------------------------------------------
# By a kernel

def one_operation(fn):
    """fn as one opaque operation."""
    operation = jax.extend.core.Primitive(fn.__name__)
    operation.multiple_results = True
    operation.def_abstract_eval(lambda *args: jax.make_jaxpr(fn)(*args).out_avals)
    mlir.register_lowering(operation, mlir.lower_fun(fn, multiple_results=True))
    return operation.bind


def attention_by_hand(q, k, v, seen):
    """Attention with the residuals of a GPU's kernel. seen [B, T, T] says which keys a query
    sees."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgn,bskn->bkgts", grouped, k) * q.shape[-1] ** -0.5
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    sums = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("bkgts,bskn->btkgn", jnp.exp(scores - sums[..., None]), v).reshape(q.shape)
    return out, sums.reshape(q.shape[0], q.shape[2], -1)


def backward_by_hand(q, k, v, seen, out, sums, cotangent):
    """The backward pass of a GPU's kernel from these residuals."""
    def grouped(x):
        return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])

    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("btkgn,bskn->bkgts", grouped(q), k) * scale
    probs = jnp.exp(scores - sums.reshape(scores.shape[:-1])[..., None])
    probs = jnp.where(seen[:, None, None], probs, 0)
    less = jnp.einsum("btkgn,btkgn->bkgt", grouped(cotangent), grouped(out))[..., None]
    dprobs = jnp.einsum("btkgn,bskn->bkgts", grouped(cotangent), v)
    dscores = probs * (dprobs - less) * scale
    return (jnp.einsum("bkgts,bskn->btkgn", dscores, k).reshape(q.shape),
            jnp.einsum("bkgts,btkgn->bskn", dscores, grouped(q)),
            jnp.einsum("bkgts,btkgn->bskn", probs, grouped(cotangent)))


FORWARD, BACKWARD = one_operation(attention_by_hand), one_operation(backward_by_hand)


@jax.custom_vjp
def one_operation_each_way(q, k, v, seen):
    return FORWARD(q, k, v, seen)[0]


def _forward(q, k, v, seen):
    out, sums = FORWARD(q, k, v, seen)
    return out, (q, k, v, seen, out, sums, jnp.zeros(0, q.dtype))       # (one array is empty)


def _backward(saved, cotangent):
    return *BACKWARD(*saved[:6], cotangent), None


one_operation_each_way.defvjp(_forward, _backward)


def one_kernel(q, k, v, pattern):
    """A device's kernel, as two opaque operations. (With a softcap by its formula.)"""
    slots = np.arange(q.shape[1])
    apart = slots[:, None] - slots
    allowed = apart >= 0 if pattern.causal else apart == apart
    allowed &= apart < (pattern.window or 10**9)
    documents = jnp.zeros(q.shape[:2], int) if pattern.documents is None else pattern.documents
    allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    if pattern.softcap:
        return PLAIN(q, k, v, allowed[:, None],
                     lambda s: pattern.softcap * jnp.tanh(s / pattern.softcap))[0]
    return one_operation_each_way(q, k, v, allowed)


def with_documents(config):
    rng, T = np.random.default_rng(0), config.network.seq_len
    batch = batch_of(config)
    batch["segments"] = np.sort(rng.integers(0, 3, (config.batch, T)), 1).astype(np.int32)
    starts = [np.searchsorted(row, row) for row in batch["segments"]]
    batch["positions"] = (np.arange(T) - starts).astype(np.int32)
    return batch


def give_kernel(monkeypatch, name="splash", block=1, kernel=None):
    """Every mesh has a kernel of this name, for a time in whole blocks: this one, or its own."""
    def kernel_name(dtype, time, width, mesh=None, softcap=False, numbers=0):
        mesh = mesh or jax.sharding.get_abstract_mesh()
        return name if mesh.shape and time % block == 0 else ""

    monkeypatch.setattr(attention, "kernel_name", kernel_name)
    if kernel:
        monkeypatch.setattr(attention, "_splash", kernel)


@pytest.mark.parametrize("mesh, changes", [
    full("", {}), full("data=2,tensor=4", dict(kv_heads=2, remat="full", accumulate=2)),
    full("data=2,tensor=4", dict(kv_heads=1)),
    slow("tensor=4", dict(heads=6, kv_heads=3, head_dim=8)),
    slow("pipe=2,tensor=2", dict(microbatches=2, kv_heads=2, remat="selective")),
    slow("pipe=2,tensor=2", dict(microbatches=2, kv_heads=2, schedule="1f1b")),
    slow("expert=2,tensor=2", dict(experts=4)), ("data=2,tensor=2", dict(pack="documents")),
    slow("pipe=2,fsdp=2", dict(pack="documents", microbatches=2)),
    full("tensor=2", dict(window=5, local_layers="lg", layers=4, remat="selective")),
    full("fsdp=2,seq=2", dict(window=5, local_layers="lg")),
    slow("pipe=2,tensor=2", dict(window=5, local_layers="lg", schedule="1f1b", microbatches=2)),
    full("fsdp=2,tensor=2", dict(window=5, pack="documents", kv_heads=2))])
@in_float64()
def test_a_kernel_is_given_each_devices_rows_and_heads(monkeypatch, mesh, changes):
    """A kernel whose varying types are lost, so that gradients are summed twice or not at all; a
    kernel that gets rows, documents or heads of several devices, or of other rows."""
    config, calls = make(**changes), []
    batch = with_documents(config) if config.pack else batch_of(config)
    want = gradients_of(config, "", batch)

    def kernel(q, k, v, pattern):
        n = dict(mesh_of(mesh).shape)["tensor"]
        if config.network.heads % n:        # then every device has all of them
            n = 1
        assert q.shape[2] == config.network.heads // n
        assert k.shape[2] == v.shape[2] == math.lcm(config.network.kv_heads, n) // n
        assert pattern.documents is None or pattern.documents.shape == q.shape[:2]
        calls.append(q.shape)
        return one_kernel(q, k, v, pattern)

    give_kernel(monkeypatch, kernel=kernel)
    got = gradients_of(config, mesh, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), got, want)
    assert bool(calls) == ("seq" not in mesh)
    assert bool(calls) == ("kernel" in loop.describe_attention(program_of(config, mesh).plan))


@pytest.mark.parametrize("run, times", [
    (lambda p, batch, c: net.loss(p, batch, c), 1),
    (lambda p, batch, c: net.loss(p, {**batch, "segments": batch["tokens"]}, c), 1),
    (lambda p, batch, c: net.loss(p, {**batch, "segments": batch["tokens"][:1]}, c), 1),
    (lambda p, batch, c: net.loss(p, batch, change(c, kernel=False)), 0),
    (lambda p, batch, c: sample.generate_ids(p, {"tokens": batch["tokens"]}, c.network, 4), 0)])
def test_a_kernel_is_not_used_where_it_knows_too_little(monkeypatch, run, times):
    """Padding of a cache that is seen, because a kernel knows no cache; --kernel false that does
    not reach the loss; documents that are given once for all rows, which a kernel needs for
    each."""
    calls, config = [], make()

    def kernel(q, k, v, pattern):
        assert pattern.documents is None or pattern.documents.shape == q.shape[:2]
        calls.append(q.shape)
        return one_kernel(q, k, v, pattern)

    give_kernel(monkeypatch, kernel=kernel)
    with jax.set_mesh(mesh_of("")):
        jax.eval_shape(lambda p: run(p, batch_of(config), config),
                       net.init(config, jax.random.key(0)))
    assert len(calls) == times


@pytest.mark.parametrize("mesh, changes", [
    ("fsdp=2,tensor=2", dict(window=100, kv_heads=2, layers=1, remat="selective")),
    slow("data=2,tensor=4", dict(kv_heads=2, remat="full", accumulate=2)),
    slow("pipe=2,tensor=2", dict(kv_heads=2, microbatches=2, remat="selective")),
    slow("pipe=2,fsdp=2", dict(schedule="1f1b", microbatches=2)),
    full("", dict(window=200)),
    slow("fsdp=2,tensor=2", dict(pack="documents", window=100, kv_heads=2, remat="full")),
    slow("tensor=2", dict(attn_softcap=0.5, pack="documents")),
    slow("data=2", dict(window=100, local_layers="lg", pack="documents")),
    slow("data=2", dict(causal=False, head="masked", biases="head")),
    ("seq=2,tensor=2", dict(seq_len=512, batch=2, layers=1, kv_heads=2, pack="documents")),
    slow("fsdp=2,seq=2", dict(seq_len=512, kv_heads=2, remat="selective")),
    slow("seq=4", dict(seq_len=1024, batch=2, attn_softcap=0.5, remat="full")),
    slow("seq=2,tensor=2", dict(seq_len=256, causal=False, head="masked", biases="head"))])
def test_a_tpus_kernel_finds_what_the_formula_does(monkeypatch, mesh, changes):
    """Rows, documents and heads that are mixed up in the kernel's operands; a window that is one
    key too long. (Interpreted, in the whole step, with skipped blocks, inside a shard_map over
    every axis.)"""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    config, calls = make(**{"seq_len": 384, "batch": 4, **changes}), []
    make_one = splash.make_splash_mha_single_device
    batch = with_documents(config) if config.pack else batch_of(config)
    want = gradients_of(config, "", batch)

    def interpreted(*args, **options):
        calls.append(options)
        return make_one(*args, **options, interpret=True)

    monkeypatch.setattr(splash, "make_splash_mha_single_device", interpreted)
    give_kernel(monkeypatch)
    got = gradients_of(config, mesh, batch)
    assert calls and "splash" in loop.describe_attention(program_of(config, mesh).plan)
    # (Float32 sums of thousands of terms, in another order.)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max()),
                 got, want)


DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 16)), 1)


@pytest.mark.parametrize("pattern", [
    {}, dict(causal=False), dict(window=5), dict(documents=DOCUMENTS, causal=False),
    dict(window=5, local=np.array(False)),
    dict(documents=DOCUMENTS, window=5, local=np.array(True))])
def test_cudnn_is_told_what_the_formula_knows(monkeypatch, pattern):
    """A GPU on which documents see each other, or a window that is one key too long. (jax's own
    formula with the same arguments stands for cuDNN.)"""
    plain, rng = jax.nn.dot_product_attention, np.random.default_rng(0)

    def without_cudnn(*args, implementation, **given):
        assert implementation == "cudnn"
        return plain(*args, implementation="xla", **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    pattern = attention.Pattern(**pattern)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 16, heads, 8))) for heads in (4, 2, 2))
    slots = jnp.broadcast_to(jnp.arange(16), (2, 16))
    info = attention.Token(slots, slots, 0 * slots if pattern.documents is None else DOCUMENTS)
    want, _ = attention.self_attention(None, None, 4, pattern)(q, k, v, attention.both(info, info))
    np.testing.assert_allclose(attention._cudnn(q, k, v, pattern), want, rtol=1e-5, atol=1e-6)


def mesh_with(kind):
    device = SimpleNamespace(device_kind=kind)
    return SimpleNamespace(abstract_mesh=SimpleNamespace(abstract_device=device))


@pytest.mark.parametrize("name, dtype, time, width, kind", [
    ("cuDNN", "bfloat16", 1024, 128, "NVIDIA H100 80GB HBM3"),
    ("cuDNN", jnp.float16, 2, 8, "NVIDIA A100"),
    ("splash", "bfloat16", 1024, 256, "TPU v5 lite"), ("splash", "bfloat16", 384, 64, "TPU7x"),
    ("", "float32", 64, 64, "NVIDIA H100"), ("", "bfloat16", 63, 64, "NVIDIA H100"),
    ("", "bfloat16", 64, 20, "NVIDIA H100"), ("", "bfloat16", 64, 256, "NVIDIA H100"),
    ("", "bfloat16", 64, 64, "AMD Instinct MI300X"), ("", "bfloat16", 64, 64, "TPU v5 lite"),
    ("", "bfloat16", 128, 80, "TPU v4"), ("", "float32", 128, 64, "TPU v4"),
    ("", "bfloat16", 128, 64, "TPU v3"), ("", "bfloat16", 64, 64, None)])
def test_a_kernel_is_asked_for_what_it_can(name, dtype, time, width, kind):
    """A run that fails in the compiler on the first machine that has a kernel. (Outside a mesh
    nothing says what the device is.)"""
    assert kernel_name(dtype, time, width, kind and mesh_with(kind)) == name


@pytest.mark.parametrize("name, time, causal, window, kind", [
    ("splash", 256, True, False, "TPU v5 lite"), ("splash", 128, False, False, "TPU v4"),
    ("", 128, True, False, "TPU v4"), ("", 256, True, True, "TPU v4"),
    ("", 256, True, False, "NVIDIA H100")])
def test_a_ring_asks_for_what_its_kernel_can(name, time, causal, window, kind):
    """Half of a device's tokens that are no whole block; a window, which its parts do not know."""
    mesh = SimpleNamespace(shape={}, abstract_mesh=mesh_with(kind).abstract_mesh)
    call = attention.Call(causal, "", attention.Pattern(causal, window), "bfloat16", 1, 1, time,
                          time, 64, True)
    assert attention.kernel_for(call, True, mesh, ()) == name


@pytest.mark.parametrize("causal", [False, True])
def test_a_rings_kernel_sees_what_the_ring_does_not_skip(monkeypatch, causal):
    """Attention that is causal by its mask, or by its kernel, alone: keys that are not skipped, and
    are seen."""
    monkeypatch.setattr(ring_kernel, "attend_to", None)
    give_kernel(monkeypatch)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 8)))
    slots = jnp.arange(8)[None]

    def attend(x, slots):
        return shard.attend(PLAIN, x, x, x, lambda query, key: (
            key[:, None, None, :] <= query[:, None, :, None]), slots, slots,
            attention.AttendOptions(causal, attention.Pattern(not causal)))

    want = PLAIN(x, x, x, (slots.T >= slots)[None, None])[0]
    order = shard.zigzag_order(8, 2)
    with jax.set_mesh(mesh_of("seq=2")):
        found = jax.jit(jax.shard_map(attend, in_specs=P(None, "seq"), out_specs=P(None, "seq")))(
            x[:, order], slots[:, order])
    np.testing.assert_allclose(found, want[:, order], rtol=1e-5, atol=1e-6)


def test_cudnn_knows_no_softcap_and_no_mask_of_any_size():
    """A cap that is dropped without a word; documents that need more memory than the formula."""
    mesh, tpu = mesh_with("NVIDIA H100"), mesh_with("TPU v4")
    for at, names in ((mesh, ("", "", "cuDNN")), (tpu, ("splash",) * 3)):
        assert names == tuple(kernel_name("bfloat16", 128, 64, at, **how) for how in (
            dict(softcap=True), dict(numbers=2**27 + 1), dict(numbers=2**27)))


# -------------------------------------------------------------------------------------------
# Around a ring

@pytest.mark.parametrize("mesh", ["seq=2", slow("seq=4,tensor=2"), slow("pipe=2,seq=2"),
                                  slow("tensor=4")])
def test_documents_stay_apart(mesh):
    """A mask or a position that uses a key's index on the device, which is not its slot in zigzag
    order, nor if tensor splits the time."""
    config = make(kv_heads=2, pack="documents")
    batch = with_documents(config)
    got, value = gradients_of(config, mesh, batch)
    plain = {k: jnp.asarray(v) for k, v in batch.items() if k != "seeds"}
    want_value, want = jax.jit(jax.value_and_grad(mean_loss(net.loss, config)))(
        net.init(config, jax.random.key(0)), plain)
    assert value == pytest.approx(float(want_value), rel=2e-6)
    assert_same_update(got, want)


# -------------------------------------------------------------------------------------------
# Refusals

@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (6, 1), (2, 2)])
def test_heads_that_a_compiler_cannot_divide(heads, kv_heads):
    """Heads that are padded or cut in two, in a model that is called without a shard_map."""
    config = make(heads=heads, kv_heads=kv_heads, head_dim=8)
    params, rows = net.init(config, jax.random.key(0)), batch_of(config)["tokens"]
    want = net.forward(params, rows, config)
    with jax.set_mesh(mesh_of("data=2,tensor=4")):
        got = jax.jit(lambda p: net.forward(p, rows, config))(params)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_attention_to_a_part_of_the_time_is_refused():
    """Queries of a part of the time with a Token of all of the time: a mask of other tokens, whose
    shape fits if it is broadcast."""
    q, k, info = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 8, 2, 8)), {"slot": jnp.zeros((1, 8), int)}
    with pytest.raises(ValueError, match="1 queries, but query_info has 8 tokens"):
        shard.attend(PLAIN, q, k, k, MASK, info, info)


def test_a_time_slice_is_of_all_of_the_time():
    """An array that already has a part of the time, sliced again: targets of other tokens, which
    have the right shape if another mistake is made too."""
    def local(x, a):
        return shard.my_time_slice(a, x)

    call = jax.shard_map(local, in_specs=(P(None, "tensor"), P()), out_specs=P(None, "tensor"))
    x, a = jnp.zeros((2, 8, 3)), jnp.zeros((2, 4))
    with jax.set_mesh(mesh_of("tensor=2")):
        with pytest.raises(ValueError, match="sequence length 4 next to a stream of length 4 on"):
            jax.jit(call)(x, a)
        right = jnp.arange(16).reshape(2, 8)
        np.testing.assert_array_equal(jax.jit(call)(x, right), right)


RING, ALL = "an early and a late part of the queries", "meet all keys in turn"
ENCODER = dict(causal=False, head="masked", biases="head")


@pytest.mark.parametrize("mesh, changes, says", [
    ("data=2", {}, "splash kernel$"), ("data=2", dict(pack="documents"), "kernel, within doc"),
    ("data=2", dict(window=4, local_layers="lg"), "splash kernel"),
    ("data=2", dict(attn_softcap=5.0), "splash"), ("data=2", dict(positions="alibi"), "in blocks"),
    ("data=2", ENCODER, "splash kernel"),
    ("data=2", dict(kv_rank=16, q_rank=16, rotary_dim=4, v_head_dim=8, head_dim=12), "in blocks"),
    ("data=2,seq=2", dict(kernel=False), RING + ".*none of them sees$"),
    ("seq=2", dict(window=4), RING),
    ("seq=2", ENCODER, ALL + "; by the splash kernel$"), ("seq=2,tensor=2", {}, "splash kernel$"),
    ("seq=2", dict(pack="documents"), RING + ".*splash kernel, within documents"),
    ("pipe=2,tensor=2", dict(microbatches=2, kernel=False, seq_len=512), "in blocks"),
    ("data=2,tensor=2", dict(collectives="compiler", seq_len=256), "in blocks"),
    ("tensor=2", dict(encoder_layers=1, source_len=8),
     "all to all, 8 queries and 8 keys: by the splash kernel, within documents"),
])
def test_a_start_says_how_attention_is_computed(monkeypatch, mesh, changes, says):
    """A start that announces a kernel where the code forbids it (values of another width, say), a
    ring that does not exist, or only one of a network's attentions. The text is compared with what
    the traced step does."""
    give_kernel(monkeypatch, kernel=one_kernel)
    program, traced = program_of(make(**changes), mesh), set()

    def spy(name, note, module=attention):
        usual = getattr(module, name)

        def call(*args, **more):
            traced.add(note(*args, **more))
            return usual(*args, **more)

        monkeypatch.setattr(module, name, call)

    spy("by_kernel", lambda q, k, v, pattern: "by the splash kernel" + (
        "" if pattern.documents is None else ", within documents"))
    monkeypatch.setattr(ring_kernel, "attend_to", lambda pattern: lambda queries, keys, own: (
        attention.softmax_attention(queries[0], *keys[:2], jnp.array(True))))
    spy("attend_to", lambda pattern: "by the splash kernel" + (
        "" if pattern.documents is None else ", within documents"), ring_kernel)
    spy("causal_ring", lambda *_: RING, shard)
    spy("ring", lambda *_: ALL, shard)
    spy("in_blocks", lambda *_: "in blocks")
    with jax.set_mesh(program.mesh):
        program.step.trace(program.state, program.batch)
    said = loop.describe_attention(program.plan)
    assert said.startswith("attend   ") and re.search(says, said), said
    assert all(what in said for what in traced), (traced, said)
    for name in ("kernel", RING, ALL):
        assert (name in said) == any(name in what for what in traced)


@pytest.mark.parametrize("time, has_one", [(16, False), (32, True)])
def test_a_start_counts_the_tokens_of_a_device(monkeypatch, time, has_one):
    """A start that announces the kernel of a ring for the whole time, which a device's part of it
    does not fit."""
    give_kernel(monkeypatch, block=8)
    said = loop.describe_attention(program_of(make(seq_len=time), "seq=2").plan)
    assert ("kernel" in said) == has_one


def test_a_start_counts_the_rows_of_a_part():
    """Attention announced for more rows than a device has at a time."""
    plan = program_of(make(batch=16, accumulate=2), "data=4").plan
    assert {call.rows for call in plan.attends} == {2}


@pytest.mark.parametrize("edit", [
    dict(mask=lambda query, key: query.slot - key.slot < 4),
    dict(scores=lambda s, query, key, heads: 5 * jnp.tanh(s / 5))])
def test_an_edit_of_the_plain_decoder_changes_what_is_said(monkeypatch, edit):
    """A start that still announces the kernel after an edit of model.block with mask= or
    scores=."""
    give_kernel(monkeypatch)
    monkeypatch.setattr(shard, "self_attend", functools.partial(shard.self_attend, **edit))
    assert "in blocks" in loop.describe_attention(program_of(make(), "data=2").plan)
