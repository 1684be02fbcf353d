"""Helpers for test_all.py: small configurations, batches, training in this process, and updates on
a mesh to compare with the same updates on one device.

Importing this file fixes how this process compiles: on 8 CPU devices, with few optimizations. So
the import must come before a test touches a device. tests/conftest.py does it for all tests.
"""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import data
import model
import train
from zigzag.core import edited as tested
from zigzag.core import report
from zigzag.core.mesh import by_path, make_mesh, mesh_sizes
from zigzag.core.parts import has_part, part
from zigzag.disk.batches import place_batch
from zigzag.parallel import experts
from zigzag.run.task import without_data

ROOT = Path(__file__).parents[1]

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
# Compiling with optimizations off halves the time of the tests (jax 0.10). Programs send the same
# data. Commands that tests start compile with the usual optimizations.
jax.config.update("jax_disable_most_optimizations", True)
with pytest.MonkeyPatch.context() as patch:
    if jax.__version_info__ < (0, 11):      # later versions removed this flag, and stop at it
        more = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
        patch.setenv("XLA_FLAGS", more)
    jax.devices()       # now, before a test asks for a different number
# After an edit, a run first compares its mesh with one device, until test_all.py passes. Tests skip
# this comparison.
tested.why_untested = lambda names: ""



class needed:
    """A module of a part, imported on first use. In a copy without that part (README),
    tests/conftest.py then skips only the tests that use it."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        return getattr(part(self.module, "this test"), name)


# -------------------------------------------------------------------------------------------
# Training in this process

TINY = dict(layers=2, d_model=32, heads=4, vocab_size=61, seq_len=16, out="", steps=20, batch=8,
            dtype="float32", warmup=3, d_ff=64)


def config_of(**fields):
    """The configuration of the network with these options: the plain decoder, if it has them."""
    plain = {f.name for f in dataclasses.fields(model.Config)}
    if fields.keys() <= plain and not has_part("published"):
        return model.Config(**fields)
    return part("published", "options of a general network").config_of(fields)


def own(config):
    """The configuration of a network, from itself or from the configuration of a run."""
    return getattr(config, "network", config)


def run_of(config=None, **changes):
    """The configuration of a run with the network of `config`, or with a network that has these
    options."""
    run = {f.name for f in dataclasses.fields(train.Config)}
    inner = {name: value for name, value in changes.items() if name not in run}
    config = config_of(**inner) if config is None else dataclasses.replace(config, **inner)
    return train.Config(network=config,
                        **{name: value for name, value in changes.items() if name in run})


def make(**changes):
    """The configuration of a run, and of its network, that trains in a second or two."""
    return run_of(**{**TINY, **changes})


def mesh_of(text):
    """A mesh of the first devices, from text like "data=2,tensor=2". data is 1 by default."""
    sizes = {"data": 1, **mesh_sizes(text)}
    return make_mesh(devices=jax.devices()[:int(np.prod(list(sizes.values())))], **sizes)


def tokens_of(config, count=64, seed=0):
    """Examples that a model can learn: each id is the previous id plus a step."""
    rng = np.random.default_rng(seed)
    start, step = rng.integers(0, 50, (count, 1)), rng.integers(1, 4, (count, 1))
    ids = (start + step * np.arange(own(config).seq_len + 1)) % own(config).vocab_size
    return [row.astype(np.int32) for row in ids]


class KeepRows(report.Reporter):
    """Prints nothing; keeps the rows of metrics and the lines of text."""

    def __init__(self, rows, lines):
        super().__init__(steps=1)
        self.rows, self.lines = rows, lines

    def line(self, text, **_):
        self.lines.append(text)

    def header(self, *_, **__):
        pass

    def step(self, row, *_):
        self.rows.append(row)

    def evaluation(self, row, texts):
        self.rows.append(row)

    def end(self, *_):
        pass


class StopAt(KeepRows):
    """Asks the run to stop after a step, as a user or a scheduler would."""

    def __init__(self, step):
        super().__init__([], [])
        self.at = step

    def step(self, row, *_):
        if row["step"] == self.at:
            signal.raise_signal(signal.SIGTERM)


def learn(config, mesh="", lines=None, **given):
    """Train in this process. Returns the rows of its metrics, and the result of fit. Adds the lines
    that a run would print to `lines`."""
    rows, lines, T = [], [] if lines is None else lines, config.network.seq_len
    init, loss, _ = train.language(config)
    result = fit(config, **{**dict(
        init=init, collate=lambda examples: data.collate(examples, T), loss=loss,
        examples=tokens_of(config), mesh=mesh_of(mesh), say=KeepRows(rows, lines)), **given})
    return rows, result


def fit(config, **given):
    """train.fit, with the fields of a Task next to its own arguments."""
    own = {name: given.pop(name) for name in ("step", "optimizer", "schedule", "mesh", "log", "say")
           if name in given}
    return train.fit(config, train.Task(**given), **own)


def program_of(config, mesh):
    """The whole program for the transformer of this configuration on a mesh."""
    return train.build(config, mesh_of(mesh), *without_data(config))


def build(config, mesh, init, loss, shapes, **fields):
    """The program of a task with this init and loss, on batches with these shapes."""
    return train.build(config, mesh, train.Task(init, dict, loss, **fields), shapes)


def batch_of(config, seed=1, weights=None):
    """A batch as numpy arrays."""
    rows = data.collate(tokens_of(config, config.batch, seed), config.network.seq_len)
    rows["seeds"] = np.arange(config.batch, dtype=np.uint32)
    if weights is not None:
        rows["weights"] = weights.astype(np.float32)
    return rows


def placed(mesh, batch):
    """A batch of numpy arrays, placed on the devices of a mesh."""
    return place_batch(mesh, lambda a, b: {k: v[a:b] for k, v in batch.items()},
                       len(next(iter(batch.values()))))


def rows_in(path):
    """The rows of a metrics.jsonl, or of any file of JSON lines."""
    return [json.loads(line) for line in open(path)]


def rows_of(run):
    """The rows of a run's metrics.jsonl."""
    return rows_in(Path(run) / "metrics.jsonl")


def losses_of(rows):
    """The losses of the updates in rows of metrics."""
    return [row["loss"] for row in rows if "loss" in row]


def all_losses(rows):
    """The losses of updates and of held-out examples in rows of metrics."""
    return [row.get("loss", row.get("eval_loss")) for row in rows]


def without_times(path):
    """The lines of a metrics.jsonl, without values that depend on the machine's speed."""
    times = ("tokens_per_second", "mfu", "save_seconds")
    return [json.dumps({k: v for k, v in row.items() if k not in times}) for row in rows_in(path)]


# -------------------------------------------------------------------------------------------
# Updates on a mesh

class Updates(NamedTuple):
    losses: list[float]
    loads: list             # the tokens of each expert, in each update
    gradient: Any           # of the first update, before clipping
    params: Any             # after the last one
    others: dict            # the loss's other sums in the first update, each divided by the count,
                            # and the gradient's norm


def kept_gradient():
    """A part of an optimizer that changes nothing and keeps the gradient in its state."""
    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(gradient, kept, params=None):
        # Depends on the old state, so that jax places it like the gradient.
        return gradient, jax.tree.map(lambda k, g: 0 * k + g, kept, gradient)

    return optax.GradientTransformation(init, update)


def run_updates(config, mesh, count, times=1):
    """Make `count` updates by the whole step from the start, `times` times with the same program.
    The rows of a batch have very different masks, so a mean of means differs from the mean."""
    weights = np.random.default_rng(0).random((config.batch, config.network.seq_len)) < np.linspace(
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
                state, metrics = program.step(state, placed(program.mesh, batch))
                losses.append(float(metrics["loss"]))
                loads.append((np.asarray(metrics.get("expert_load", 0))
                              * float(metrics["tokens"])).tolist())
                if i == 0:
                    gradient = jax.device_get(program.permute(state, back=True)["opt"][0])
                    others = {name: np.asarray(metrics[name]) for name in (
                        "grad_norm", *program.plan.sums[2])}
            runs.append(Updates(losses, loads, gradient, program.weights(state), others))
    return runs


def assert_same_gradient(got, want):
    """Assert that gradients are equal up to rounding, leaf by leaf."""
    total, want = float(optax.tree.norm(want)), by_path(want)
    assert by_path(got).keys() == want.keys()
    for path, a in by_path(got).items():
        b = np.asarray(want[path])
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7 * total, path


def assert_close(got, want, **bounds):
    """Assert that trees are equal within the bounds of numpy's assert_allclose, leaf by leaf."""
    got = by_path(got)
    for path, leaf in by_path(want).items():
        np.testing.assert_allclose(np.asarray(got[path]), np.asarray(leaf), err_msg=path, **bounds)


def assert_same_bits(got, want):
    """Assert that trees are equal to the last bit."""
    got = by_path(got)
    for path, leaf in by_path(want).items():
        assert (np.asarray(got[path]) == np.asarray(leaf)).all(), path


def assert_same_others(got, want):
    """Assert that the logged sums of a loss are equal up to rounding, except the rounds in which
    tokens travel to their experts."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        if name == experts.ROUNDS:
            continue
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-6 * np.abs(x).max(initial=0),
                                   err_msg=f"the logged sum {name!r}")


def assert_same_copies(params):
    """Assert that devices with the same part of a weight have the same bits."""
    for path, leaf in by_path(params).items():
        copies = {}
        for piece in leaf.addressable_shards:
            copies.setdefault(str(piece.index), []).append(np.asarray(piece.data))
        assert all((c == same[0]).all() for same in copies.values() for c in same), path
