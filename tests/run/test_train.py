"""The step and the loop: the update is optax's, whatever the mesh, and a gradient that is not
finite changes nothing."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import data
import train
from tests.common import full, in_float64, net, order, refuses, slow
from tests.helpers import (
    ROOT,
    assert_close,
    assert_same_bits,
    build,
    learn,
    losses_of,
    make,
    mesh_of,
    program_of,
    tokens_of,
)
from zigzag.core.errors import RunError
from zigzag.core.mesh import by_path, mesh_sizes
from zigzag.disk.batches import batch_shapes, place_batch
from zigzag.disk.checkpoint import run_steps
from zigzag.parallel.jaxprs import equations_below
from zigzag.parallel.saved import load_run
from zigzag.run.task import without_data

INTERLEAVED = dict(schedule="interleaved", chunks=2, microbatches=2)


# -------------------------------------------------------------------------------------------
# The update

@in_float64()
def test_adamw_schedule_and_clipping_equal_optax():
    """An update that differs from optax's, or a rate in the metrics that was not applied. (In
    float64: Adam divides by the size of a gradient, and makes a full step of a rounding error.)"""
    config = make(clip=0.5, steps=12, warmup=4, beta1=0.8, beta2=0.97)
    assert (make().beta1, make().beta2) == (0.9, 0.95)
    rows, result = learn(config)
    rate = optax.warmup_cosine_decay_schedule(config.lr / 4, config.lr, 3, 11, config.lr / 50)

    def matrices(p):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "norm" not in jax.tree_util.keystr(path), p)

    rule = optax.chain(optax.clip_by_global_norm(0.5),
                       optax.adamw(rate, b1=0.8, b2=0.97, weight_decay=0.1, mask=matrices))
    params = net.init(config, jax.random.key(0))
    state, examples = rule.init(params), tokens_of(config)

    @jax.jit
    def update(params, state, batch):
        def mean(p):
            s, n = net.loss(p, batch, config)
            return s / n

        updates, state = rule.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    for at in range(12):
        chosen = order(64, 0, at * 8, 8)
        params, state = update(params, state, data.collate([examples[i] for i in chosen], 16))
        assert rows[at]["lr"] == pytest.approx(float(rate(at)), rel=1e-6)
    assert {a.dtype for a in jax.tree.leaves((params, result.params))} == {np.dtype("float64")}
    assert_close(params, result.params, rtol=1e-9, atol=1e-11)
    assert rows[-1]["lr"] == pytest.approx(config.lr / 50)
    assert max(r["lr"] for r in rows) == pytest.approx(config.lr)


def test_an_optimizer_of_a_new_name_is_the_one_that_trains(monkeypatch):
    """A name that was added for --optimizer, trains with Adam and is recorded as itself. The entry
    is that of docs/changes.md."""
    page = (ROOT / "docs/changes.md").read_text()
    entry = re.search(r'^\+ +("lion": lambda .*)}$', page, re.M)[1]
    monkeypatch.setitem(train.OPTIMIZERS, "lion", eval(f"{{{entry}}}", {"optax": optax})["lion"])
    config = make(steps=1, warmup=1, weight_decay=0.0, optimizer="lion")
    before = by_path(train.language(config)[0](jax.random.key(0)))
    for path, w in by_path(learn(config)[1].params).items():
        moved = (np.asarray(before[path]) - np.asarray(w)) / config.lr      # (signs, of Lion)
        used = moved[np.abs(moved) > 1e-3]
        assert len(used) and np.allclose(np.abs(used), 1, atol=1e-3), path


@pytest.mark.parametrize("mesh", ["", full("data=2,tensor=4"), full("fsdp=2,expert=2,tensor=2")])
@pytest.mark.full
def test_muon_makes_every_matrix_of_the_layers_orthogonal(mesh):
    """Muon on other matrices than the ones that act on activations, separately for each layer and
    expert (a mesh with repeated key heads once had others); for the rest, Nesterov's Adam."""
    config = make(optimizer="muon", steps=1, warmup=1, weight_decay=0.0, experts=4,
                  shared_experts=1, kv_heads=2)
    before = by_path(train.language(config)[0](jax.random.key(0)))
    after = by_path(learn(config, mesh)[1].params)
    contracted = {"wo": 2}      # dimensions that are, of each matrix: one if nothing is said
    for path, a in before.items():
        change, name = (np.asarray(a) - np.asarray(after[path])) / config.lr, path.split(".")[-1]
        if not path.startswith("layers") or "norm" in path:
            # A first step of Adam's is a sign; Nesterov looks ahead by another
            # b1 (1 - b1) / (1 - b1^2).
            assert np.abs(change).max() == pytest.approx(1 + 0.09 / 0.19, abs=0.01), path
            continue
        lead = 1 + name.startswith("e_")
        inside = math.prod(a.shape[lead:lead + contracted.get(name, 1)])
        for one in change.reshape(-1, inside, math.prod(a.shape[lead:]) // inside):
            size = np.linalg.svd(one / (0.2 * max(one.shape) ** 0.5), compute_uv=False)
            # (Five steps lift no nought.)
            assert np.quantile(size, 0.1) > 0.6 and size.max() < 1.3, (path, size)


def test_the_optimizers_state_is_split_over_data():
    """ZeRO 1 that saves no memory: each of two devices has half the moments. (What it sends is
    compared in tests/forecast/test_traffic.py.)"""
    program = program_of(make(zero=1), "data=2,tensor=2")
    moments, params = program.state["opt"][1].mu, program.state["params"]
    for m, p in zip(jax.tree.leaves(moments), jax.tree.leaves(params)):
        if p.size >= program.config.fsdp_min:
            halves = np.prod(m.sharding.shard_shape(m.shape)) * 2
            assert halves == np.prod(p.sharding.shard_shape(p.shape))


def test_the_accumulated_gradients_are_split_over_data():
    """ZeRO 2 that saves no memory: each of two devices accumulates half of each gradient."""
    def accumulated(zero):
        plan = program_of(make(zero=zero, accumulate=4, fsdp_min=1), "data=2,tensor=2").plan
        jaxpr = jax.make_jaxpr(train.make_gradients(plan))(plan.params, plan.batch)
        loop, = (e for e, _ in equations_below(jaxpr.jaxpr) if e.primitive.name == "scan"
                 and e.params["length"] == 4)
        return sum(v.aval.size for v in loop.outvars)

    assert accumulated(2) == pytest.approx(accumulated(1) / 2, rel=0.01)


def test_the_smallest_weight_that_fsdp_splits_may_be_chosen(alone):
    """--fsdp_min read in one place and not in another: a gather of a weight that is not split."""
    config = make(fsdp_min=16, zero=1)
    program = program_of(config, "fsdp=2,data=2")
    assert all(("fsdp" in d.spec) == d.is_matrix for d in jax.tree.leaves(program.plan.decisions))
    rows, _ = learn(config, "fsdp=2,data=2")
    assert losses_of(rows) == pytest.approx(losses_of(alone[0]), rel=5e-5)


@pytest.mark.parametrize("dtype, kind", [("", "bf16"), ("float32", "f32")])
def test_the_precision_of_sums_over_fsdp_is_the_one_that_is_said(dtype, kind):
    """Gradients summed in bfloat16 although the text says float32. (Read from the jaxpr: a CPU's
    compiler sums 16 bits in 32.)"""
    program = program_of(make(dtype="bfloat16", sum_dtype=dtype, d_ff=128), "fsdp=4")
    with jax.set_mesh(program.mesh):
        text = program.step.lower(program.state, program.batch).as_text()
    kinds = re.findall(r'"stablehlo.reduce_scatter".*?\}\) : \(tensor<[\dx]*(\w+)>\)', text, re.S)
    assert set(kinds) == {kind}


def test_the_speed_counts_the_tokens_that_are_computed():
    """A speed that does not count padding, so that padded rows look slow; no speed for a task
    without tokens."""
    def collate(examples):
        batch = data.collate(examples, 16)
        batch["weights"][:, 4:] = 0
        return batch

    rows, _ = learn(make(steps=3), collate=collate)
    whole, _ = learn(make(steps=3))
    assert [r["tokens"] for r in rows] == [32] * 3 and [r["tokens"] for r in whole] == [128] * 3
    assert all(r["tokens_per_second"] > 0 for r in rows)


# -------------------------------------------------------------------------------------------
# Losses and gradients that are not finite

# Updates whose gradient is not finite.
POISON = {3, 4, 10, 11, 12, 13}


def collate_with_poison(e):
    batch = data.collate(e, 16)
    return {**batch, "weights": batch["weights"] * np.float32(np.nan if e[0][0] == -1 else 1)}


def poisoned(config):
    rows = tokens_of(config, 160)
    for at in POISON:
        for i in order(160, 0, (at - 1) * 8, 8):
            rows[i] = np.full_like(rows[i], -1)
    return rows


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["", full("data=2,pipe=2"), full("fsdp=2,tensor=2")])
def test_a_gradient_that_is_not_finite_changes_nothing(mesh, tmp_path):
    """A NaN in one gradient that clipping spreads to every weight. (The run continues, and ends if
    this happens again and again.)"""
    run = tmp_path / "run"
    config = make(layers=4, max_skipped=4, out=str(run), save_every=2)
    given = dict(examples=poisoned(config), collate=collate_with_poison)
    with pytest.raises(RunError, match="step 13: the gradient was not finite, 4 times in a row"):
        learn(config, mesh, **given)
    rows = [json.loads(line, parse_constant=lambda s: pytest.fail(s))
            for line in open(run / "metrics.jsonl")]
    assert [r["step"] for r in rows] == list(range(1, 14))
    assert {r["step"] for r in rows if r["skipped"]} == POISON
    assert [r["skipped"] for r in rows[9:]] == [1, 2, 3, 4]
    assert rows[2]["loss"] is None and rows[2]["grad_norm"] is None
    saved = {p.name: load_run(run, step=int(p.name))[0]
             for p in (run / "checkpoints").iterdir()}
    assert set(saved) == {"8", "10", "12"}
    assert all(np.isfinite(w).all() for tree in saved.values() for w in jax.tree.leaves(tree))
    assert_same_bits(saved["10"], saved["12"])
    # Three of them are remembered.
    with pytest.raises(RunError, match="step 13: the gradient was not finite, 4 times in a row"):
        learn(config, mesh, **given)


# A task on examples of one number. Where it is above 1 the loss is not finite, but its gradient is.
def spoiled(number):
    def loss(p, b):
        return jnp.sum(p["w"] * b["x"]) + jnp.sum(jnp.where(b["x"] > 1, number, 0)), len(b["x"])

    return dict(init=lambda key: {"w": jnp.ones(4)}, collate=lambda e: {"x": np.stack(e)},
                loss=loss, examples=[np.full(1, x, np.float32) for x in np.linspace(0.1, 1, 16)])


@pytest.mark.parametrize("mesh", ["", slow("data=2")])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(mesh, number, tmp_path):
    """A run that trains on rows whose loss is NaN, or goes on for days without a loss, and ends
    with status 0."""
    given, lines = spoiled(number), []
    for at in (3, 5, 6):
        given["examples"][order(16, 0, 2 * (at - 1), 2)[1]] = np.full(1, 7, np.float32)
    config = make(batch=2, steps=8, save_every=1, keep=9, max_skipped=2,
                  out=str(tmp_path / "run"))
    with pytest.raises(RunError, match="step 6: the loss was not finite, 2 times in a row"):
        learn(config, mesh, lines=lines, **given)
    said = [line for line in lines if "not finite, so nothing" in line]
    assert [line.partition(":")[0] for line in said] == ["step 3", "step 5", "step 6"]
    assert said[0].startswith("step 3: the loss is not finite, so nothing was learned; its batch "
                              "has examples ")
    weights = {}
    with ocp.StandardCheckpointer() as reader:
        for path in (tmp_path / "run/checkpoints").iterdir():
            weights[int(path.name)] = reader.restore(path / "params")["w"]
    assert (weights[2] == weights[3]).all() and (weights[4] == weights[5]).all()
    assert (weights[4] < weights[3]).all()


@pytest.mark.parametrize("number", [math.nan, full(math.inf)])
def test_a_run_whose_held_out_loss_is_not_finite_has_failed(number, tmp_path):
    """`done ... held-out loss nan` and status 0, which a script takes for a success; or an
    exception that loses the weights."""
    out, lines = tmp_path / "run", []
    given = dict(spoiled(number), held_out=[np.full(1, 7, np.float32)] * 3)
    for _ in range(2):          # asked for again, it is no success either
        with pytest.raises(RunError, match=f"step 4: the held-out loss is {number}; this run "
                                           f"failed, with all of it saved in {out}"):
            learn(make(steps=4, out=str(out)), **given)
    assert run_steps(out)[0] == 4
    result = learn(make(steps=4), lines=lines, **given)[1]
    assert result.step == 4 and f"warning  step 4: the held-out loss is {number}" in lines


def test_a_gradient_that_is_too_large_to_be_measured_changes_nothing():
    """A gradient with finite numbers whose squares are not: clipping by that norm would learn
    nothing, and leave a moment of 1e30."""
    examples = [np.full(1, 1 + 1e30 * (i == 2), np.float32) for i in range(6)]
    rows, result = learn(make(steps=6, batch=1), init=lambda key: {"w": jnp.ones(4)},
                         examples=examples, collate=lambda e: {"x": np.stack(e)},
                         loss=lambda p, b: (jnp.sum(p["w"]) * jnp.sum(b["x"]), 1))
    assert sorted(row["skipped"] for row in rows if "skipped" in row) == [0, 0, 0, 0, 0, 1]
    assert np.isfinite(result.params["w"]).all() and (result.params["w"] < 1).all()


def test_a_count_of_zero_changes_nothing():
    """An update without tokens that decays weights and moments."""
    def loss(p, b):
        return jnp.sum((b["x"] @ p["w"]).sum(-1) * b["mask"]), jnp.sum(b["mask"])

    def collate(e):
        return {"x": np.stack(e), "mask": np.zeros(len(e), np.float32)}

    examples = [np.ones(8, np.float32)] * 8
    program = build(make(), mesh_of("data=2"), lambda key: {"w": jnp.ones((8, 8))}, loss,
                    batch_shapes(8, collate(examples[:1])))
    with jax.set_mesh(program.mesh):
        state = program.start(jax.random.key(0))
        before = jax.device_get(state)
        batch = place_batch(program.mesh, lambda a, b: {
            **collate(examples[a:b]), "seeds": np.zeros(b - a, np.uint32)}, 8)
        after, metrics = program.step(state, batch)
    assert float(metrics["tokens"]) == 0 and not float(metrics["skipped"])
    assert int(after["step"]) == 1
    assert_same_bits((after["params"], after["opt"]), (before["params"], before["opt"]))


# -------------------------------------------------------------------------------------------
# The storage of weights

MESHES_FOR_OVERRIDES = [
    ("data=2,fsdp=2,tensor=2", {}), ("pipe=2,fsdp=2,data=2", dict(microbatches=2)),
    ("data=4,tensor=2", dict(zero=1)), ("pipe=2,tensor=2,fsdp=2", INTERLEAVED),
    ("seq=2,tensor=2,pipe=2", dict(schedule="1f1b", microbatches=2)),
    ("fsdp=4,seq=2", dict(remat="full")), ("expert=2,fsdp=2,tensor=2", dict(experts=4)),
    ("expert=2,pipe=2,data=2", dict(experts=4, zero=1))]


def drawn_overrides(count, seed=0):
    """Random meshes, models and overrides: for any leaf, one or two axes on any dimensions, some in
    a tuple."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        mesh, what = MESHES_FOR_OVERRIDES[rng.integers(len(MESHES_FOR_OVERRIDES))]
        config = make(layers=4, **what)
        leaves = list(by_path(net.weight_shapes(config)).items())
        (path, leaf), axes = leaves[rng.integers(len(leaves))], list(mesh_sizes(mesh))
        entries = [None] * leaf.ndim
        for axis in rng.permutation(axes)[:rng.integers(1, 3)]:
            entries[rng.integers(len(entries))] = str(axis)
        if rng.random() < 0.25:
            entries[rng.integers(len(entries))] = tuple(map(str, rng.permutation(axes)[:2]))
        found.append((mesh, what, path, leaf.shape, tuple(entries)))
    return found


@pytest.fixture(scope="module")
def without_overrides():
    """The losses by the number of experts."""
    return {experts: losses_of(learn(make(layers=4, experts=experts, steps=6, batch=16))[0])
            for experts in (0, 4)}


@pytest.mark.parametrize("mesh, what, path, shape, entries", [
    pytest.param(*d, id=f"{d[0]} {d[2]} {d[4]}", marks=[] if i == 2 else pytest.mark.full)
    for i, d in enumerate(drawn_overrides(16))])
@pytest.mark.full
def test_any_override_trains_to_the_same_loss_or_is_refused(mesh, what, path, shape, entries,
                                                            without_overrides):
    """Overrides that pass validation and end inside jax, as five of twelve did: `data`, tuples,
    `pipe` off the stack, `fsdp` on the layers. By hand, a weight with tensor on a dimension that
    the model's code does not split is stored that way, and gathered."""
    sizes = mesh_sizes(mesh)
    config = make(layers=4, steps=6, batch=16, accumulate=2, **what)
    flat = [a for e in entries for a in (e if isinstance(e, tuple) else (e,)) if a]
    if len(set(flat)) < len(flat) or any(isinstance(e, tuple) or e and n % sizes[e]
                                         for e, n in zip(entries, shape)):
        with refuses("give each dimension one axis|does not divide|twice"):
            task, shapes = without_data(config)
            train.build(config, mesh_of(mesh), dataclasses.replace(
                task, overrides=[(path, P(*entries))]), shapes)
        return
    flag = f"^{re.escape(path)}$=" + ",".join(e or "-" for e in entries)
    rows, _ = learn(make(**{**dict(layers=4, steps=6, batch=16, accumulate=2), **what,
                            "override": ("embed=-", flag)}), mesh)
    assert losses_of(rows) == pytest.approx(without_overrides[config.network.experts], rel=5e-5)
