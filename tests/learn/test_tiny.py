"""learn/tiny.py, the trainer in one file: its losses are those of train.py."""

import functools
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import data
import shard
from learn import tiny
from tests.common import full, net, order
from tests.helpers import ROOT, learn, make, tokens_of


def tiny_mesh(*sizes):
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3,
                         devices=jax.devices()[:int(np.prod(sizes))])


@functools.cache
def of_train():
    """The first weights of a run of ten updates, its batches, and its losses."""
    config = make(layers=2, heads=4, kv_heads=4, steps=10, eval_every=0, tied=False)
    first = net.init(config, jax.random.key(config.seed))
    rows, _ = learn(config, optimizer=optax.adamw(0.01))
    examples = tokens_of(config)
    batches = [data.collate([examples[i] for i in order(len(examples), config.seed, 8 * at, 8)],
                            config.network.seq_len) for at in range(10)]
    # (Rows of the vocabulary that no token has are padding.)
    V = config.network.vocab_size
    first = {**first, "embed": first["embed"][:V], "head": first["head"][:, :V]}
    return jax.device_get(first), batches, [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("sizes, accumulate", [
    ((2, 2, 2), 2), full((1, 1, 1), 1), full((1, 4, 2), 1), full((4, 1, 2), 2),
    full((1, 2, 4), 4)])
def test_its_losses_are_those_of_train(sizes, accumulate):
    """A sum that is missing or made twice: the file that is read first would teach it."""
    params, batches, want = of_train()
    got = tiny.train(tiny.decoder, params, tiny.DECODER, batches, optax.adamw(0.01),
                     tiny_mesh(*sizes), accumulate)
    assert len(want) == 10 and want[-1] < want[0] - 0.1
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.full
def test_it_trains_as_its_first_lines_say():
    """An example that fails, learns nothing, or has other losses on a mesh than on one device."""
    done = subprocess.run([sys.executable, "learn/tiny.py"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    said = [line.strip() for line in tiny.__doc__.split("prints")[1].splitlines()[2:5]]
    numbers = re.compile(r"\d+\.\d+")
    for line, shown in zip(done.stdout.splitlines(), said, strict=True):
        assert numbers.split(line) == numbers.split(shown)
        assert [*map(float, numbers.findall(line))] == pytest.approx(
            [*map(float, numbers.findall(shown))], rel=0.05, abs=2e-3)


@pytest.mark.full
def test_no_device_has_two_layers_whole():
    """Weights that are gathered before the loop over layers: sharded storage, and not FSDP."""
    params, batches, _ = of_train()
    mesh = tiny_mesh(2, 2, 2)
    specs = tiny.DECODER, tiny.BATCH
    placed = jax.device_put((params, batches[0]), jax.tree.map(
        lambda spec: jax.NamedSharding(mesh, spec), specs))
    step = tiny.make_step(tiny.decoder, tiny.DECODER, optax.sgd(0.1), mesh)
    compiled = step.lower(placed[0], optax.sgd(0.1).init(placed[0]), placed[1]).compile()
    found = {one.kind: one.bytes for one in shard.collectives(compiled) if one.axis == "fsdp"}
    W = sum(4 * w.size / 2 for name, w in params["layers"].items() if "norm" not in name)
    rest = 4 * (params["embed"].size + params["head"].size)
    # Each layer is gathered twice, and its gradients are scattered; the rest is gathered once.
    assert found["all-gather"] == pytest.approx((2 * W + rest) / 2, rel=0.02)
    assert found["reduce-scatter"] == pytest.approx((W + rest) / 2, rel=0.02)
