"""learn/tiny.py, the trainer in one file: its losses are those of train.py."""

import functools
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import data
import shard
from learn import tiny
from tests.common import full, net, order
from tests.helpers import ROOT, learn, make, mesh_of, tokens_of


def tiny_mesh(*sizes):
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3,
                         devices=jax.devices()[:int(np.prod(sizes))])


@functools.cache
def of_train():
    """The first weights of a run of ten updates, its batches, and its losses."""
    config = make(layers=2, heads=4, kv_heads=4, steps=10, eval_every=0, tied=False)
    first = net.init(config, jax.random.key(config.seed))
    rows, _ = learn(config, optimizer=optax.adamw(0.01))
    examples, batches = tokens_of(config), []
    for at in range(10):
        few = [examples[i] for i in order(len(examples), config.seed, 8 * at, 8)]
        batches.append(data.collate(few, config.seq_len))
    # (Rows of the vocabulary that no token has are padding.)
    V = config.vocab_size
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


def test_its_collectives_are_those_of_shard():
    """Short forms that do something else than the long ones."""
    mesh, rng = mesh_of("fsdp=2,tensor=2"), np.random.default_rng(0)
    x, w_up, w_down = (rng.normal(size=s).astype(np.float32) for s in ((2, 4, 8), (8, 12), (12, 8)))

    def block(gather, columns, row):
        def local(x, up, down):
            whole = gather({"up": up, "down": down}, {"up": P("fsdp", "tensor"),
                                                      "down": P("tensor", "fsdp")})
            return row(*columns(x, whole["up"]), whole["down"])

        return jax.shard_map(local, in_specs=(P("fsdp", "tensor"), P("fsdp", "tensor"),
                                              P("tensor", "fsdp")), out_specs=P("fsdp", "tensor"))

    ours = block(shard.gather, shard.columns, lambda h, w: shard.row((h, w)))
    short = block(lambda tree, specs: {k: tiny.gather(tree[k], specs[k]) for k in tree},
                  tiny.columns, tiny.row)
    with jax.set_mesh(mesh):
        for fn in (lambda f: f, lambda f: jax.grad(lambda *args: (f(*args)**2).sum(), (0, 1, 2))):
            a, b = (jax.jit(fn(f))(x, w_up, w_down) for f in (ours, short))
            # (On a CPU, `columns` computes a weight's gradient with the other factor on the left.)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-4), a, b)


@pytest.mark.full
def test_it_trains_as_its_first_lines_say():
    """An example that fails, or learns nothing."""
    done = subprocess.run([sys.executable, "learn/tiny.py"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    for line, name in ((first, "two matrices learn |x|"), (second, "a decoder learns to count")):
        before, after = map(float, line.removeprefix(name + ": ").split(" -> "))
        assert after < before / 5
