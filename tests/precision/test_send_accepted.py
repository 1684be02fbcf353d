"""--accept compares what --send_dtype float8 sends, not only what the loss computes."""

import jax.numpy as jnp
import pytest

from accounts.accept import UPDATES
from precision import send
from tests.helpers import learn, make
from zigzag.core.errors import RunError

RUN = dict(accept=0.01, save_every=0, eval_every=0, dtype="bfloat16", steps=UPDATES // 4,
           d_model=64, d_ff=128, seq_len=32, layers=4, fsdp_min=64, batch=16)


def gaps(mesh, **changes):
    """Train, and return the largest gaps of loss and gradient that --accept prints, in percent."""
    lines = []
    learn(make(**{**RUN, **changes}), mesh, lines)
    line, = [line for line in lines if line.startswith("accept")]
    return [float(line.split(before)[1].split("%")[0]) for before in ("up to ", "the gradient by ")]


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "fsdp=2,pipe=2"])
def test_the_gap_is_that_of_8_bits(mesh):
    """A comparison of gradients sent in 16 bits, where the run sends 8: its gap would be that of
    a run without the flag."""
    (loss, gradient), (loss_of_8, gradient_of_8) = gaps(mesh), gaps(mesh, send_dtype="float8")
    assert 0 < loss < 1 and 0 < loss_of_8 < 1
    assert 4 * gradient < gradient_of_8 < 20


def test_what_arrives_wrong_ends_the_run(monkeypatch):
    """A factor that is lost on the way, which the formula in float32 doesn't have."""
    packed = send.packed
    monkeypatch.setattr(send, "packed", lambda x, dim: packed(jnp.where(x > 0, 1.5 * x, x), dim))
    with pytest.raises(RunError, match="step 1: the loss is .*: rejected by --accept 0.01"):
        gaps("fsdp=2,tensor=2", send_dtype="float8")
