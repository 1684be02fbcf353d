"""--find_nan: faults planted at many places, each of which a run must name, on each mesh."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accounts import find_nan
from tests.common import full, order
from tests.helpers import (
    KeepRows,
    batch_of,
    fit,
    losses_of,
    make,
    mesh_of,
    placed,
    program_of,
    tokens_of,
)
from zigzag.run.task import Task

# -------------------------------------------------------------------------------------------
# The decoder: one replay for each mesh, with one bad weight after another


def put(path, value, *index):
    """Put a number at an index of a weight."""
    def edit(params):
        *outer, name = path.split(".")
        for one in outer:
            params = params[one]
        params[name][index] = value

    return edit


def grow(*names, layer, by=1e25):
    """Multiply a layer's weights: finite, but their products overflow."""
    def edit(params):
        for name in names:
            params["layers"][name][layer] *= by

    return edit


def lines_of(config, mesh, edits):
    """What a run with each of these edits of its first weights would print."""
    program, batch = program_of(config, mesh), batch_of(config)
    replay = find_nan.Replay(program.plan)
    task, found = Task(None, dict, None, examples=tokens_of(config)), []
    with jax.set_mesh(program.mesh):
        first = program.permute(program.start(jax.random.key(0)), back=True)
        batch = placed(program.mesh, batch)
        for edit in edits:
            state = jax.tree.map(np.array, jax.device_get(first))
            edit(state["params"])
            state = program.permute(jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), state, program.state))
            times = replay.times(state["params"], batch, state["frozen"])
            found.append(find_nan.lines(replay, times, program, task, state, batch, 0))
    return found


ATTENTION = "forward pass of layer {}, attend_to (shard.py"
# {mesh: (options, [(edit, what the first line must say)])}
PLACES = {
    "one device": ({}, [
        (put("layers.w_up", np.nan, 1, 3, 4), "NaN is in the weight layers.w_up of layer 1, at [1"),
        (grow("wq", "wk", layer=1), ATTENTION.format(1)),
        (put("head", 3e38, slice(None)), "forward pass, columns (shard.py"),
        (lambda params: None, "the loss and each gradient are finite")]),
    "data=2": (dict(norm_eps=0.0, collectives="compiler"), [
        (put("embed", 0.0, slice(None)), "forward pass of layer 0, norm (model.py"),
        (put("embed", np.nan, 5, 6), "NaN is in the weight embed, at [5, 6]"),
        (grow("wv", "wo", layer=0), "row (shard.py")]),
    "fsdp=2,tensor=2": (dict(fsdp_min=1), [
        (put("layers.wk", np.inf, 1, 30, 2, 1), "infinity is in the weight layers.wk of layer 1"),
        (grow("w_gate", "w_up", layer=1), "made by mul in the forward pass of layer 1, swiglu (mod")
        ]),
    "pipe=2": (dict(layers=4, microbatches=2), [
        (grow("wq", "wk", layer=2), ATTENTION.format(2)),
        (grow("wv", "wo", layer=1), "forward pass of layer 1, row (shard.py")]),
    "pipe=2 1f1b": (dict(layers=4, microbatches=2, schedule="1f1b"), [
        (grow("w_gate", "w_up", layer=3), "forward pass of layer 3, swiglu (model.py"),
        (grow("wq", "wk", layer=1), ATTENTION.format(1)),
        (put("norm", np.nan, 3), "NaN is in the weight norm, at [3]")]),
    "pipe=2 1f1b chunks": (dict(layers=4, microbatches=2, schedule="1f1b", chunks=2), [
        (grow("wq", "wk", layer=1), ATTENTION.format(1)),
        (put("layers.w_up", np.nan, 2, 3, 4), "layers.w_up of layer 2, at [2, 3, 4]")]),
    "seq=2": ({}, [
        (grow("wq", "wk", layer=1), ATTENTION.format(1)),
        (put("layers.mlp_norm", np.nan, 0, 7), "layers.mlp_norm of layer 0, at [0, 7]")]),
    "expert=2": (dict(experts=4), [
        (put("layers.e_up", np.nan, 1, 3, 2, 2), "layers.e_up of layer 1, at [1, 3, 2, 2]"),
        (grow("e_gate", "e_up", layer=1), "forward pass of layer 1, swiglu (model.py")]),
    # An entry that is two layers.
    "tensor=2": (dict(experts=4, expert_every=2, layers=4), [
        (put("layers.e_up", np.nan, 1, 3, 2, 2), "layers.e_up of stack entry 1, at [1, 3, 2, 2]"),
        (grow("e_gate", "e_up", layer=1), "forward pass of stack entry 1, ")])}


@pytest.mark.parametrize("mesh", ["one device", *(full(m) for m in PLACES if m != "one device")])
def test_a_fault_of_the_decoder_is_named(mesh):
    """The wrong layer of a pipeline's stage, a NaN that is blamed on the device that received it,
    or a mask's -inf on which a NaN is blamed."""
    options, places = PLACES[mesh]
    edits, wanted = zip(*places)
    found = lines_of(make(**options), mesh.split()[0] if "=" in mesh else "", edits)
    for lines, want in zip(found, wanted):
        assert want in lines[0], (mesh, want, lines)


# -------------------------------------------------------------------------------------------
# A custom loss, in a whole run

def layer_output(params, batch):
    return jnp.tanh(batch["x"] @ params["w"])


def log_of_zero(params, batch):
    p = jax.nn.relu(layer_output(params, batch) - 2)
    return -jnp.log(p).sum(), len(p)        # here


def division_by_zero(params, batch):
    y = layer_output(params, batch)
    harmless = jax.lax.stop_gradient(jnp.where(y > 2, jnp.log(y * 0), 1.0))     # -inf, not chosen
    return (y * harmless / (batch["mark"] - 1)).sum(), len(y)       # here


def root_at_zero(params, batch):
    y = layer_output(params, batch)
    y = (y - jax.lax.stop_gradient(y)) ** 2
    return jnp.sqrt(y).sum(), len(y)        # here: only its gradient is infinite


def overflow_in_16_bits(params, batch):
    y = 1e6 * layer_output(params, batch)
    return y.astype(jnp.float16).astype(jnp.float32).sum(), len(y)      # here


def large_exponent(params, batch):
    y = layer_output(params, batch)
    return jnp.exp(100 + y).sum(), len(y)        # here


def masked_too_late(params, batch):
    y = layer_output(params, batch)
    return jnp.where(y < 2, y, y / (y - y)).sum(), len(y)       # here


def second_call(params, batch):
    """jax traces jnp.var once for both calls, so its operations know only the first."""
    y = layer_output(params, batch)
    fine = jnp.var(y, axis=0)
    large = jnp.var(1e30 * y, axis=0)       # here
    return (fine + large).sum(), len(y)


def all_masked(params, batch):
    y = jnp.where(batch["mark"] > 2, layer_output(params, batch), -jnp.inf)
    y = y - y.max(-1, keepdims=True)        # here: the mask's infinity isn't a fault, this is
    return y.sum(), len(y)


def harmless(params, batch):
    y = layer_output(params, batch)
    return y.sum(), len(y)


def here(loss):
    """The function and the line that a run must name: the line with the comment `here`."""
    source, first = inspect.getsourcelines(loss)
    line = first + next(i for i, text in enumerate(source) if "# here" in text)
    return f"{loss.__name__} (tests/accounts/test_find_nan.py:{line})"


def run(loss, mesh="", bad=None, steps=2, **changes):
    """Train on 8 points a step. Returns what --find_nan printed, and the losses."""
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    if bad is not None:
        x[bad] = np.nan
    rows, lines = [], []
    fit(make(steps=steps, find_nan=True, eval_every=0, **changes),
        init=lambda key: {"w": jax.random.normal(key, (4, 4))}, loss=loss,
        collate=lambda rows: {"x": np.stack(rows), "mark": np.ones((len(rows), 1), np.float32)},
        examples=list(x), mesh=mesh_of(mesh), say=KeepRows(rows, lines))
    return [line for line in lines if "the first NaN" in line
            or "the first infinity" in line], losses_of(rows)


@pytest.mark.parametrize("loss, what, mesh", [
    (log_of_zero, "step 1: the first infinity is made by log in the forward pass", ""),
    (division_by_zero, "step 1: the first infinity is made by div in the forward pass", "data=2"),
    (root_at_zero, "the first infinity is made by div for the gradient", ""),
    (overflow_in_16_bits, "made by convert_element_type in the forward pass", "data=2"),
    (all_masked, "the first NaN is made by sub in the forward pass", ""),
    (second_call, "the first infinity is made by", ""),
    full(large_exponent, "made by exp in the forward pass", "fsdp=2,tensor=2"),
    full(masked_too_late, "for the gradient, masked", "data=2")])
def test_a_fault_of_a_custom_loss_is_named(loss, what, mesh):
    """A line of jax's instead of the loss's; a harmless infinity before the fault; a fault that
    only the backward pass has; a replay after each of ten skipped updates."""
    lines, losses = run(loss, mesh)
    assert len(lines) == 1 and len(losses) == 2
    assert what in lines[0] and here(loss) in lines[0], lines


def test_a_bad_row_is_named_and_the_run_goes_on():
    """An example that nobody finds among a million."""
    first, second = order(24, 0, 0, 8), order(24, 0, 8, 8)
    lines, losses = run(harmless, "data=2", bad=second[5], steps=3)
    assert lines == [f"step 2: the first NaN is in the batch's x[5, 0]: row 5, example {second[5]}"]
    assert np.isfinite(losses).tolist() == [True, False, True] and second[5] not in first
