"""The product of activations and weights, and the loss in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.common import assert_same_update, gradients_of
from tests.helpers import batch_of, make, program_of
from zigzag.parallel import products
from zigzag.parallel.products import chunked_sums, matmul
from zigzag.parallel.table import padded
from zigzag.run.plan import compiled


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("x, w, contract, einsum", [
    ((2, 3, 4), (4, 5), 1, "btd,df->btf"), ((2, 3, 4), (4, 5, 6), 1, "btd,dhn->bthn"),
    ((2, 3, 5, 6), (5, 6, 4), 2, "bthn,hnd->btd")])
def test_a_product_and_its_gradients(platform, x, w, contract, einsum, monkeypatch):
    """A gradient of the weights with dimensions in another order, whose shape fits if they are
    equal."""
    monkeypatch.setattr(products, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (x, w))
    plain = functools.partial(jnp.einsum, einsum)
    y, vjp = jax.vjp(lambda x, w: matmul(x, w, contract), x, w)
    want, want_vjp = jax.vjp(plain, x, w)
    cotangent = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
    for a, b in zip((y, *vjp(cotangent)), (want, *want_vjp(cotangent)), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_products_gradients_have_its_operands_precision(platform, monkeypatch):
    """A float32 gradient of bfloat16 weights with float32 logits, twice as large as needed; logits
    that are rounded to bfloat16 first."""
    monkeypatch.setattr(products, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((1, 64, 64), (64, 32)))
    y, vjp = jax.vjp(lambda x, w: matmul(x, w, 1, jnp.float32), x, w)
    want, want_vjp = jax.vjp(lambda *given: jnp.matmul(*(a.astype(y.dtype) for a in given)), x, w)
    assert [a.dtype for a in (y, *vjp(y))] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-5)
    # The gradient of the logits is rounded as their operands are, and nothing else is.
    g = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
    rounded = g.astype(jnp.bfloat16).astype(jnp.float32)
    for found, near, other in zip(vjp(g), want_vjp(rounded), want_vjp(g), strict=True):
        assert np.mean(found == near) > 0.99 > 0.95 > np.mean(found == other)
    y, vjp = jax.vjp(lambda x, w: matmul(x, w), x, w.astype(jnp.float32))     # a float32 weight
    assert [a.dtype for a in (y, *vjp(y))] == [jnp.float32, jnp.bfloat16, jnp.float32]


def test_a_sum_over_chunks_and_its_gradients():
    """A chunk's gradient that is scaled twice or overwrites another's; a gradient of integers."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 5), (3, 4, 8)))
    ids = jnp.asarray(rng.integers(0, 5, (3, 4)))

    def one(w, x, ids):
        return jnp.sum(jnp.take_along_axis(jnp.tanh(x @ w), ids[:, None], 1) ** 2)

    def in_chunks(w, x):
        return 3 * chunked_sums(lambda *given: (one(*given),), w, [x, ids])[0]

    def plain(w, x):
        return 3 * sum(one(w, a, b) for a, b in zip(x, ids))

    for a, b in zip(jax.tree.leaves(jax.value_and_grad(in_chunks, (0, 1))(w, x)),
                    jax.tree.leaves(jax.value_and_grad(plain, (0, 1))(w, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_loss_in_chunks_is_the_loss(monkeypatch):
    """A chunk's mean in place of its sum; an array with all logits at once (8 rows of 16 tokens and
    128 ids)."""
    config, batch = make(), batch_of(make())
    want, value = gradients_of(config, "", batch)
    monkeypatch.setattr(products, "LOGITS", 8 * 16 * 128 // 4)
    got, again = gradients_of(config, "data=2,tensor=2", batch)
    assert again == pytest.approx(value, rel=1e-6)
    assert_same_update(got, want)
    text = compiled(program_of(config, "")).as_text()
    assert "f32[8,4,128]" in text and "f32[8,16,128]" not in text


@pytest.mark.parametrize("time, size, chunks", [
    (16, 1000, 16), (15, 8 * 128 * 4, 5), (17, 8 * 128 * 4, 17)])
def test_chunks_divide_the_time(time, size, chunks, monkeypatch):
    """A shorter last chunk, or a chunk with too many logits."""
    monkeypatch.setattr(products, "LOGITS", size)
    assert products.loss_chunks(8, time, padded(make().network.vocab_size)) == chunks
