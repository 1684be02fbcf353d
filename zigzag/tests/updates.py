"""A few updates on a mesh, to compare with the same updates on one device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train
from zigzag.core.mesh import by_path
from zigzag.disk.batches import place_batch
from zigzag.tests.common import batch_of, program_of


class Updates(NamedTuple):
    losses: list[float]
    loads: list             # the tokens of each expert, in each update
    gradient: Any           # of the first update, before clipping
    params: Any             # after the last one
    others: dict            # the loss's other sums in the first update, each divided by the count


def kept_gradient():
    """Part of an optimizer: changes nothing, and keeps the gradient in its state."""
    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(gradient, kept, params=None):
        # (Tied to what was kept before, so that it is placed as the gradient is.)
        return gradient, jax.tree.map(lambda k, g: 0 * k + g, kept, gradient)

    return optax.GradientTransformation(init, update)


def run_updates(config, mesh, count, times=1):
    """`count` updates by the whole step, from the start; `times` times with the same program. The
    rows of a batch have very different masks, so that a mean of means is not the mean."""
    weights = np.random.default_rng(0).random((config.batch, config.seq_len)) < np.linspace(
        0.1, 1, config.batch)[:, None]
    optimizer, runs = train.optimizer, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "optimizer", lambda *given: optax.chain(
            kept_gradient(), optimizer(*given)))
        program = program_of(config, mesh)
    with jax.set_mesh(program.mesh):
        for _ in range(times):
            state, losses, loads = program.permute(program.start(jax.random.key(0))), [], []
            others = {}
            for i in range(count):
                batch = batch_of(config, i, weights)
                state, metrics = program.step(state, place_batch(
                    program.mesh, lambda a, b: {k: v[a:b] for k, v in batch.items()},
                    config.batch))
                losses.append(float(metrics["loss"]))
                loads.append((np.asarray(metrics.get("expert_load", 0))
                              * float(metrics["tokens"])).tolist())
                if i == 0:
                    gradient = jax.device_get(program.permute(state, back=True)["opt"][0])
                    others = {name: np.asarray(metrics[name]) for name in program.plan.sums[2]}
            runs.append(Updates(losses, loads, gradient, program.weights(state), others))
    return runs


def assert_same_gradient(got, want):
    """Assert that gradients are equal up to rounding, leaf by leaf."""
    total, want = float(optax.tree.norm(want)), by_path(want)
    assert by_path(got).keys() == want.keys()
    for path, a in by_path(got).items():
        b = np.asarray(want[path])
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7 * total, path


def assert_same_others(got, want):
    """Assert that the other sums of a loss, which are logged, are equal up to rounding."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-6 * np.abs(x).max(initial=0),
                                   err_msg=f"the logged sum {name!r}")


def assert_same_copies(params):
    """Assert that devices with the same part of a weight have the same bits."""
    for path, leaf in by_path(params).items():
        copies = {}
        for piece in leaf.addressable_shards:
            copies.setdefault(str(piece.index), []).append(np.asarray(piece.data))
        assert all((c == same[0]).all() for same in copies.values() for c in same), path
