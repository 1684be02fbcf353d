"""train.make_gradients and make_step as a fork edits them: what is written there is what runs, in
every mode."""

import dataclasses
import inspect
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shard
import test_all
import train
from tests.common import full
from tests.helpers import assert_close, assert_same_bits, make, mesh_of, program_of
from zigzag.disk.batches import place_batch

SIZES = dict(layers=4, heads=4, kv_heads=2, microbatches=1)


def edited(*changes):
    """train.make_gradients with these (old, new) pieces of its source exchanged."""
    source = textwrap.dedent(inspect.getsource(train.make_gradients))
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = dict(vars(train))
    exec(source, names)
    return names["make_gradients"]


# -------------------------------------------------------------------------------------------
# The gradient

def init(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (8, 64)), "down": jax.random.normal(b, (64, 8)) / 8}


def untyped(params, batch):
    y = jax.nn.relu(batch["x"] @ params["up"]) @ params["down"]
    return jnp.sum((y - batch["x"]) ** 2), len(y)


def typed(params, batch, specs=None):
    """It takes specs, so that it runs with types; the compiler splits it over tensor."""
    return untyped(params, batch)


def by_hand(params, batch):
    h, = shard.columns(batch["x"][:, None], params["up"])
    y = shard.whole_time(shard.row((jax.nn.relu(h), params["down"])))[:, 0]
    return jnp.sum((y - batch["x"]) ** 2), len(y)


def branches(params, batch):
    """A branch on the data, so that no compiler may split it over tensor."""
    total, count = untyped(params, batch)
    return jax.lax.cond(batch["x"].sum() > 1e9, lambda: 0.0, lambda: total), count


MODES = {"by hand": (by_hand, "explicit"), "typed": (typed, "explicit"),
         "untyped": (untyped, "explicit"), "untyped, tensor whole": (branches, "explicit"),
         "jit": (untyped, "compiler")}


@pytest.mark.parametrize("mode", MODES)
def test_an_edit_of_the_gradient_is_seen_in_every_mode(mode):
    """A gradient that is computed elsewhere than in make_gradients, for some losses: a fork's edit
    of the step (noise, a mask, another estimator) is then silently left out of their training."""
    loss, collectives = MODES[mode]
    config = make(collectives=collectives, accumulate=2, fsdp_min=1)
    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    program = train.build(config, mesh_of("data=2,fsdp=2,tensor=2"), train.Task(init, dict, loss),
                          shapes)
    assert program.plan.mode == mode
    doubled = edited(("grads, = scatter(grads)",
                      "grads, = scatter(jax.tree.map(lambda g: 2 * g, grads))"))
    found = []
    with jax.set_mesh(program.mesh):
        params = program.start(jax.random.key(0))["params"]
        rows = place_batch(program.mesh, lambda a, b: {"x": batch["x"][a:b]}, 8)
        for make_gradients in (train.make_gradients, doubled):
            gradients = jax.jit(make_gradients(program.plan),
                                compiler_options=program.plan.compiler_options)
            found.append(jax.device_get(gradients(params, rows)))
    (grads, sums), (more, same) = found
    want = jax.grad(lambda p: untyped(p, batch)[0])(init(jax.random.key(0)))
    assert_close(grads, want, rtol=2e-5, atol=1e-5)
    assert_same_bits(more, jax.tree.map(lambda g: 2 * g, grads))
    assert float(sums[0]) == float(same[0]) and float(sums[1]) == 8


# -------------------------------------------------------------------------------------------
# The marks

MARK = "mark_varying(cast((trained, frozen), plan.dtype), also=axes.marked)"


@pytest.mark.parametrize("mark, says", [
    (None, None),
    full("cast((trained, frozen), plan.dtype)", "grad_norm"),   # of sums made twice
    (MARK.replace("axes.marked", "axes.marked - {'fsdp'}"), "varying|psum"),
    full(MARK.replace("axes.marked", "axes.marked | {'tensor'}"), "tensor")],
    ids=["as it is", "none", "not fsdp", "tensor"])
def test_test_all_sees_an_edit_of_the_mark(mark, says, monkeypatch):
    """Marks that a fork leaves out, or sets over another axis: sums over devices that are made in
    every part, twice, or not at all."""
    mesh, what, choices = "data=2,fsdp=2,tensor=2", test_all.DENSE, dict(accumulate=2)
    test_all.on_one_device(tuple(what.items()))     # (kept, and computed by the step as it is)
    if mark is None:
        return test_all.test_a_mesh_changes_nothing(mesh, what, choices)
    monkeypatch.setattr(train, "make_gradients", edited((MARK, mark)))
    with pytest.raises((AssertionError, TypeError, ValueError), match=says):
        test_all.test_a_mesh_changes_nothing(mesh, what, choices)


def test_the_step_stands_in_two_functions():
    """A step whose gradient, mapping or sums are made somewhere else, so that nobody who reads it
    sees what it does; one that is too long to be read."""
    source = inspect.getsource(train.make_gradients)
    source = source.partition('"""')[2].partition('"""')[2]         # without its docstring
    source += inspect.getsource(train.make_step)
    order = ["mark_varying(cast(", "jax.vjp(", "jax.value_and_grad(", "jax.lax.scan(",
             "shard.sum_gradients(", "modes.shard_map(", "1 / divisor", "optimizer.update("]
    places = [source.index(piece) for piece in order]
    assert places == sorted(places)
    assert len(inspect.getsource(train.make_gradients).splitlines()) <= 80
    # (The flag may be named.)
    assert not re.search(r"lora(?!_rank)|adapt|\bjoin\b|\bmerged\b", source.replace("--", ""))


def test_a_plan_may_change_its_parts_and_precision():
    """Parts or a dtype that a plan has bound early: the check of a custom loss, which replaces
    both, would compare something else than it says."""
    program = program_of(make(**SIZES), "data=2")
    plan = dataclasses.replace(program.plan, accumulate=2, dtype="bfloat16")
    with jax.set_mesh(program.mesh):
        text = str(jax.make_jaxpr(train.make_gradients(plan))(
            program.state["params"], program.batch))
    assert "bf16" in text and "length=2" in text
