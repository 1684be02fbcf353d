"""--dtype float16: the loss scale, and the updates that it skips."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precision import loss_scale
from tests.common import full, refuses
from tests.helpers import StopAt, batch_of, learn, losses_of, make, placed, program_of, rows_of
from zigzag.core.errors import RunError
from zigzag.core.mesh import by_path
from zigzag.core.options import has_part

HALF = dict(dtype="float16", batch=8, steps=12, save_every=0, eval_every=0)
MESHES = ["fsdp=2,tensor=2", full("data=2"), full("pipe=2"), full("data=4"), full("seq=2,data=2"),
          full("fsdp=2,pipe=2")]


def half(**changes):
    return make(**{**HALF, **changes})


@functools.cache
def half_on(mesh):
    return program_of(half(), mesh)


def updates(program, scale, spoiled=(), count=8):
    """Losses, scales and skips of some updates, and the last state. In a spoiled update, targets
    weigh so much that the gradient is beyond float16's range."""
    found, config = [], program.config
    with jax.set_mesh(program.mesh):
        state = program.permute(program.start(jax.random.key(0)))
        state["scale"] = jax.device_put(np.float32(scale), state["scale"].sharding)
        for at in range(count):
            weights = np.full((config.batch, config.network.seq_len), 1e7 if at in spoiled else 1)
            state, metrics = program.step(
                state, placed(program.mesh, batch_of(config, at, weights)))
            found.append([float(metrics[name]) for name in ("loss", "loss_scale", "skipped")])
        return np.array(found), jax.device_get(program.permute(state, back=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_skips_the_same_updates(mesh):
    """A device that looks at its own part of the sum; a skipped update that changes a moment."""
    for scale, spoiled in ((2.0 ** 8, {3}), (2.0 ** 19, ())):
        found, state = updates(half_on(mesh), scale, spoiled)
        want, alone = updates(half_on(""), scale, spoiled)
        skipped = np.flatnonzero(want[:, 2]).tolist()
        assert skipped == [*spoiled] or not spoiled and len(skipped) > 3
        np.testing.assert_array_equal(found[:, 1:], want[:, 1:])
        np.testing.assert_allclose(found[:, 0], want[:, 0], rtol=2e-3)  # float16 has 11 bits
        assert (state["scale"], state["good"]) == (alone["scale"], alone["good"])
        for path, w in by_path(state["params"]).items():
            # (Adam turns rounding into whole updates where a gradient is almost zero.)
            assert np.abs(w - by_path(alone["params"])[path]).mean() < 2e-4, path


def test_the_scale_divides_out():
    """A gradient that is not divided by its scale hides behind Adam, but not behind clipping and
    the logged norm; one that is not multiplied loses what is below 6e-8."""
    norms = [learn(half(initial_scale=scale, steps=2))[0][0]["grad_norm"]
             for scale in (2.0 ** 6, 2.0 ** 12)]
    exact = learn(half(dtype="float32", steps=2))[0][0]["grad_norm"]
    assert norms == pytest.approx([exact] * 2, rel=2e-3)
    assert norms[0] != exact


def test_a_sum_beyond_the_range_is_an_overflow():
    """Parts of a sum that are within float16's range on each device, while one device's are not."""
    def gradients(params, batch, frozen, scale):
        return {"w": jnp.array([66000.0, -66000.0, 65000.0])}, ()

    grads, _ = loss_scale.unscaled(gradients)({}, {}, {}, 2.0)
    assert grads["w"].tolist() == [np.inf, np.inf, 32500.0]


def test_the_scale_follows_the_gradients(monkeypatch):
    """A scale that never grows, or grows in an update after one that overflows."""
    monkeypatch.setattr("precision.loss_scale.GOOD", 3)
    program = program_of(half(), "")
    found, _ = updates(program, 2.0 ** 3, spoiled={4})
    assert found[:, 1].tolist() == [2.0 ** n for n in (10, 10, 10, 11, 11, 10, 10, 10)]
    assert found[:, 2].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_a_falling_scale_does_not_end_a_run_and_no_scale_at_all_does(tmp_path):
    """Ten overflows from a scale that was too large, taken for a broken run; a broken run that
    halves its scale for good."""
    lines = []
    rows, _ = learn(half(initial_scale=2.0 ** 36, steps=30, max_skipped=3), lines=lines)
    skipped = [row for row in rows if row["skipped"]]
    assert len(skipped) > 5 and not rows[-1]["skipped"]
    assert any("too large for float16 with a loss scale of 68,719,476,736" in line
               for line in lines)

    def broken(params, batch):
        return 1e30 * sum((w ** 2).sum() for w in jax.tree.leaves(params)), np.float32(8)

    with pytest.raises(RunError, match="3 times in a row"):
        learn(half(initial_scale=8.0, steps=30, max_skipped=3), loss=broken)


def test_a_run_continues_with_its_scale(tmp_path):
    """A scale that starts again, and its overflows with it."""
    config = half(initial_scale=2.0 ** 28, steps=20, out=str(tmp_path / "whole"))
    learn(config)
    stopped = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    learn(stopped, say=StopAt(9))
    learn(stopped)
    whole, parts = (rows_of(tmp_path / name) for name in ("whole", "stopped"))
    assert [r["loss_scale"] for r in parts if "loss_scale" in r] == [
        r["loss_scale"] for r in whole if "loss_scale" in r]
    assert losses_of(parts) == losses_of(whole)


def test_what_float16_refuses():
    with refuses("--dtype float16: --schedule 1f1b computes the gradient of the loss without"):
        program_of(half(schedule="1f1b", microbatches=2), "pipe=2")
    program_of(half(schedule="gpipe", microbatches=2), "pipe=2")

    def custom(state, batch, gradients):
        return state, {}

    if has_part("tasks"):
        with refuses("--dtype float16: a custom step has no loss scale"):
            learn(half(), step=custom)
