"""What only a GPU shows; .ci/gpu runs these on one, and everywhere else they skip."""

import functools

import jax
import numpy as np
import pytest

from tests.common import gradients_of
from tests.helpers import batch_of, learn, make, program_of
from zigzag.core.mesh import by_path
from zigzag.parallel import remat
from zigzag.run import loop
from zigzag.run.plan import compiled

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here")
WIDE = functools.partial(make, d_model=256, seq_len=256, d_ff=512)


def error_of(found, exact):
    """The largest error of a weight's gradient, relative to its length."""
    found = by_path(found)
    return max(np.linalg.norm(found[path] - want) / np.linalg.norm(want)
               for path, want in by_path(exact).items())


@pytest.mark.parametrize("changes", [dict(heads=4), dict(heads=4, kv_heads=2), dict(heads=2)],
                         ids=["heads of 64", "groups", "heads of 128"])
def test_the_kernel_computes_what_the_formula_does(changes):
    """A kernel with another scale or another mask; a gradient that is not its own."""
    exact, plain, kernel = (WIDE(**changes, **more) for more in (
        dict(dtype="float32"), dict(dtype="bfloat16", kernel=False), dict(dtype="bfloat16")))
    assert "cuDNN" in loop.describe_attention(program_of(kernel, "").plan)
    assert "cuDNN" not in loop.describe_attention(program_of(plain, "").plan)
    batch = batch_of(exact)
    with jax.default_matmul_precision("highest"):
        want, loss = gradients_of(exact, "", batch)
    (plain, near), (kernel, value) = (gradients_of(c, "", batch) for c in (plain, kernel))
    assert abs(value - loss) < 2 * abs(near - loss) + 1e-3
    assert error_of(kernel, want) < 1.5 * error_of(plain, want) + 0.005


def test_the_gradient_of_an_embedding_is_added_up_in_float32():
    """bfloat16 sums over all tokens with an id."""
    ids = np.random.default_rng(0).zipf(1.5, (8, 257)) % 61
    ids = ids.astype(np.int32)
    batch = batch_of(WIDE()) | {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    with jax.default_matmul_precision("highest"):
        want, _ = gradients_of(WIDE(), "", batch)
    got, _ = gradients_of(WIDE(dtype="bfloat16"), "", batch)
    assert np.linalg.norm(got["embed"] - want["embed"]) < 0.03 * np.linalg.norm(want["embed"])


def test_layers_are_no_loop(monkeypatch):
    """A loop over few layers, which copies what it keeps; other losses without it."""
    config = WIDE(layers=4, dtype="bfloat16")
    few, rows = compiled(program_of(config, "")).as_text().count(" while("), learn(config)[0]
    monkeypatch.setattr(remat, "UNROLLED", 3)
    assert compiled(program_of(config, "")).as_text().count(" while(") > few
    for row, other in zip(rows, learn(config)[0], strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-2)
