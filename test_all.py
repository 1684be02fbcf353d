"""What an edit must not break, in under two minutes on two cores:

    pytest test_all.py

Run it after each change to model.py, shard.py, train.py or sample.py. Every check is relative: your
model on a mesh against your model on one device, your loss against your forward pass, a stopped and
continued run against an uninterrupted one. No expected values are stored here. Each docstring names
the mistakes that its test catches. The tests for each part are in tests/.

If a mesh differs from one device, the leaves in the message point to the place. A wrong sum over
the loss makes every gradient wrong. A wrong sum over one weight makes only that weight's gradient
wrong.
"""

import functools
import itertools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import sample
from tests.helpers import (
    ROOT,
    StopAt,
    assert_same_copies,
    assert_same_gradient,
    assert_same_others,
    batch_of,
    learn,
    make,
    mesh_of,
    run_updates,
    tokens_of,
    without_times,
)
from tests.readme import block
from zigzag.core.mesh import AXES, by_path, mesh_sizes, shardings

# Together, two models cover what behaves differently on a mesh: key heads that serve two query
# heads each, experts, dropout.
DENSE = dict(layers=4, heads=4, kv_heads=2)
EXPERTS = dict(layers=2, heads=4, kv_heads=2, experts=4, dropout=0.1)

# Six meshes of three axes, which cover all fifteen pairs of axes; and the compiler's own step.
MESHES = [
    ("data=2,fsdp=2,pipe=2", DENSE, dict(microbatches=2)),
    ("data=2,fsdp=2,seq=2", DENSE, dict(zero=1)),
    ("pipe=2,seq=2,tensor=2", DENSE, dict(schedule="interleaved", chunks=2, microbatches=2)),
    ("data=2,expert=2,tensor=2", EXPERTS, {}),
    ("fsdp=2,expert=2,tensor=2", EXPERTS, dict(accumulate=2, remat="full")),
    ("pipe=2,seq=2,expert=2", EXPERTS, dict(schedule="1f1b", microbatches=2)),
    ("data=2,fsdp=2,tensor=2", DENSE, dict(collectives="compiler")),
]
PROMPTS = [[1, 2, 3, 4], [10, 12, 14], [5], list(range(20, 31))]


def config_of(what, **choices):
    return make(**{**dict(batch=16), **what, **choices})


@functools.cache
def on_one_device(what):
    """Run three updates on one device, with the same code."""
    return run_updates(config_of(dict(what)), "", 3)[0]


@pytest.mark.parametrize("mesh, what, choices", [
    pytest.param(*m, id=" ".join([m[0], *(f"{k}={v}" for k, v in m[2].items())])) for m in MESHES])
def test_a_mesh_changes_nothing(mesh, what, choices):
    """A collective that is missing, runs twice or is over the wrong axis; a gradient scaled by a
    mesh's size, which Adam hides from the loss; weights whose copies differ between devices;
    dropout or masks that depend on the device; a mean of means; a logged sum of one device's part.
    """
    want = on_one_device(tuple(what.items()))
    got, = run_updates(config_of(what, **choices), mesh, 3)
    assert got.losses[0] == pytest.approx(want.losses[0], rel=2e-6), (
        f"forward pass: the first loss on {mesh} is not that of one device")
    assert_same_others(got.others, want.others)
    assert_same_gradient(got.gradient, want.gradient)
    assert got.losses == pytest.approx(want.losses, rel=5e-5), (
        f"update: the losses of three steps on {mesh} are not those of one device")
    assert_same_copies(got.params)


def test_the_pairs_of_axes_are_all_there():
    """A new axis that no mesh here has, or a pair of axes that an edit of MESHES leaves untested.
    A mesh with --collectives compiler counts for no pair, since none of our collectives run."""
    tried = [{a for a, n in mesh_sizes(mesh).items() if n > 1}
             for mesh, _, choices in MESHES if choices.get("collectives") != "compiler"]
    missing = [f"{a} and {b}" for a, b in itertools.combinations(AXES, 2)
               if not any({a, b} <= axes for axes in tried)]
    assert not missing, f"no mesh of MESHES splits over both {', or over both '.join(missing)}"


# -------------------------------------------------------------------------------------------
# The loss and its gradient

def cross_entropy(params, batch, config):
    """Return the mean loss, using forward's logits but none of our other code. If you add a second
    head's term to `loss`, under `if "seeds" in batch`, add it here as well. Held-out batches have
    no seeds, so their loss and bits per byte leave that term out."""
    logits = model.forward(params, batch["tokens"], config).astype(jnp.float32)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -jnp.sum(log_probs[..., 0] * batch["weights"]) / jnp.sum(batch["weights"])


def masked_batch(run):
    """Return the first batch of `run_updates`."""
    weights = np.random.default_rng(0).random((16, run.network.seq_len)) < np.linspace(
        0.1, 1, 16)[:, None]
    return {k: jnp.asarray(v) for k, v in batch_of(run, 0, weights).items()}


@pytest.mark.parametrize("what", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_loss_is_the_cross_entropy_of_forward(what):
    """An edit of `loss` without the same edit of `forward`, or vice versa: generation then uses a
    different model than training. Padded rows of the vocabulary that get a probability."""
    run = config_of(what)
    config = run.network
    batch = {k: v for k, v in masked_batch(run).items() if k != "seeds"}    # not a training batch
    params = model.init(config, jax.random.key(0))
    total, count, *_ = jax.jit(lambda p: model.loss(p, batch, config))(params)
    want = jax.jit(lambda p: cross_entropy(p, batch, config))(params)
    assert count == batch["weights"].sum()
    assert float(total / count) == pytest.approx(float(want), rel=2e-6)


def test_the_gradient_is_that_of_the_cross_entropy():
    """A wrong custom derivative (of the chunked loss, of a kernel, of a collective); a gradient
    that flows through the count; a division in the wrong place."""
    run = config_of(DENSE)
    want = jax.jit(jax.grad(lambda p: cross_entropy(p, masked_batch(run), run.network)))(
        model.init(run.network, jax.random.key(0)))
    assert_same_gradient(on_one_device(tuple(DENSE.items())).gradient, want)


def test_no_token_sees_a_later_one():
    """A mask or a shift that lets the model read the answer: training looks wonderful."""
    run = config_of(DENSE)
    config, params = run.network, model.init(run.network, jax.random.key(0))
    tokens = jnp.asarray(batch_of(run)["tokens"][:1])
    forward = jax.jit(lambda tokens: model.forward(params, tokens, config))
    changed = forward(tokens.at[0, 9].add(1))
    np.testing.assert_allclose(changed[0, :9], forward(tokens)[0, :9], atol=1e-5)
    assert not np.allclose(changed[0, 9:], forward(tokens)[0, 9:], atol=1e-3)


# -------------------------------------------------------------------------------------------
# Runs

def test_a_run_that_is_stopped_and_continued_is_the_run(tmp_path):
    """A checkpoint that does not restore the optimizer state, dropout, the learning rate or the
    place in the data: the loss jumps where a job restarts, and nobody sees why."""
    def config_in(folder):
        return make(layers=2, dropout=0.1, steps=6, save_every=5, eval_every=4,
                    out=str(tmp_path / folder))

    config = config_in("whole")
    given = dict(mesh="fsdp=2", held_out=tokens_of(config, 16, seed=9))
    _, whole = learn(config, **given)
    config = config_in("stopped")
    _, first = learn(config, **given, say=StopAt(2))
    assert first.step < 6
    _, second = learn(config, **given)
    assert second.step == 6 and second.held_out == whole.held_out
    assert (without_times(tmp_path / "stopped/metrics.jsonl")
            == without_times(tmp_path / "whole/metrics.jsonl"))
    for path, a in by_path(jax.device_get(second.params)).items():
        assert (a == np.asarray(by_path(whole.params)[path])).all(), path


@pytest.mark.parametrize("mesh", ["", "data=2,tensor=2"])
def test_the_readmes_own_task_trains(tmp_path, mesh):
    """README's script for a custom task: a step that rejects a custom loss, or a mesh on which it
    does not learn."""
    (tmp_path / "mine.py").write_text(block("README.md", "train.fit"))
    done = subprocess.run(
        [sys.executable, "mine.py", *(["--mesh", mesh] if mesh else [])], cwd=tmp_path, text=True,
        capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
                                  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0], done.stdout


# -------------------------------------------------------------------------------------------
# Generation

def test_generation_is_that_of_the_slow_loop():
    """A cache read where it is about to be written, a position off by one, visible padding:
    generation is worse than the loss promises."""
    config = config_of(DENSE).network
    params = model.init(config, jax.random.key(0))
    for temperature in (0, 0.8):
        got = sample.generate(params, PROMPTS, config, tokens=4, temperature=temperature)
        for prompt, new in zip(PROMPTS, got, strict=True):
            assert new == sample.generate_slowly(params, prompt, config, 4, temperature), prompt


@pytest.mark.parametrize("what, temperature", [(DENSE, 0), (EXPERTS, 0.8)],
                         ids=["dense greedy", "experts drawn"])
def test_generation_is_the_same_on_two_devices(what, temperature):
    """Logits or a cache that only hold one device's part; random choices that differ between
    devices."""
    config = config_of(what).network
    params, mesh = model.init(config, jax.random.key(0)), mesh_of("tensor=2")
    split = jax.device_put(params, shardings(model.weight_specs(config, mesh), mesh))
    given = PROMPTS, config, 6, temperature
    assert sample.generate(split, *given) == sample.generate(params, *given)
