"""fit(step=...): several networks and losses, and state beside the weights, are the same on a mesh
as on one device, continue to the same bits, and are refused where they would not be."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sample
import train
from tests.common import full, peer, refuses
from tests.helpers import (
    KeepRows,
    StopAt,
    assert_close,
    assert_same_bits,
    fit,
    learn,
    losses_of,
    make,
    mesh_of,
    without_times,
)
from tests.readme import block
from zigzag.core import report

RNG = np.random.default_rng(0)
EXAMPLES = [RNG.normal(size=16).astype(np.float32) for _ in range(64)]
MESHES = ["fsdp=2,tensor=2", full("data=2,fsdp=2,tensor=2"), full("data=4"), full("tensor=4"),
          full("expert=2,fsdp=2")]


def collate(examples):
    return {"x": np.stack(examples)}


def matrix(key, rows, columns):
    return jax.random.normal(key, (rows, columns)) * rows**-0.5


def mlp_of(key, rows, columns, hidden=64):
    up, down = jax.random.split(key)
    return {"up": matrix(up, rows, hidden), "down": matrix(down, hidden, columns)}


def mlp(w, x):
    return jax.nn.relu(x @ w["up"]) @ w["down"]


def noise(batch, size):
    return jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (size,)))(batch["seeds"])


def run(task, mesh="", out="", stop=None, given=None, steps=10, **flags):
    """What a task (init, step, loss) logs in ten steps, and what fit returns. given: what else fit
    is given."""
    rows, (init, step, loss) = [], task
    given = {"examples": EXAMPLES, "held_out": EXAMPLES[:10], **(given or {})}
    config = make(**{**dict(steps=steps, batch=16, lr=0.01, fsdp_min=1, out=out), **flags})
    result = fit(config, init=init, loss=loss, step=step, mesh=mesh_of(mesh), collate=collate,
                 say=StopAt(stop) if stop else KeepRows(rows, []), **given)
    return rows, result


def assert_same_rows(rows, others, *names, **bounds):
    """Assert that the metrics of ten updates and five evaluations have these numbers in common."""
    assert len(rows) == 15
    for a, b in zip(rows, others, strict=True):
        for key in {"loss", "eval_loss", *names} & a.keys():
            assert b[key] == pytest.approx(a[key], **bounds), (a["step"], key)


def assert_continues(go, folder):
    """go(folder, stop) gives what run does. Stopped after step 2, it goes on to the whole one's
    metrics and weights. What fit returned for the whole one."""
    whole = go(str(folder / "whole"), None)[1]
    assert go(str(folder / "stopped"), 2)[1].step < whole.step
    second = go(str(folder / "stopped"), None)[1]
    assert without_times(folder / "stopped/metrics.jsonl") == without_times(
        folder / "whole/metrics.jsonl")
    assert_same_bits(second.params, whole.params)
    return whole


# -------------------------------------------------------------------------------------------
# Algorithms, as their users write them

def gan():
    """docs/tasks.md's: two networks with losses of their own, and an average of one of them."""
    def critic_loss(trees, batch):
        fake = mlp(trees["generator"], noise(batch, 8))
        of_real, of_fake = mlp(trees["critic"], batch["x"]), mlp(trees["critic"], fake)
        loss = jax.nn.softplus(-of_real) + jax.nn.softplus(of_fake)
        return loss.sum(), len(loss), {"of_real": of_real.sum()}

    def generator_loss(trees, batch):
        fake = mlp(trees["generator"], noise(batch, 8))
        return jax.nn.softplus(-mlp(trees["critic"], fake)).sum(), len(fake)

    def held_out(trees, batch):
        return jax.nn.softplus(-mlp(trees["critic"], batch["x"])).sum(), len(batch["x"])

    names = dict(jax=jax, mlp=mlp_of, critic_loss=critic_loss, generator_loss=generator_loss)
    exec(block("docs/tasks.md", "generator_loss"), names)
    return names["init"], names["step"], held_out


def replay():
    """A buffer of whole numbers and of rows, from which a second batch is drawn in each step."""
    def init(key):
        return {"model": mlp_of(key, 16, 16),
                "buffer": {"rows": jnp.zeros((64, 16)), "age": jnp.zeros(64, jnp.int32)}}

    def loss(trees, batch):
        return jnp.square(mlp(trees["model"], batch["x"]) - batch["x"]).sum(), batch["x"].size

    def step(state, batch, gradients, update):
        buffer, x = state["params"]["buffer"], batch["x"]
        places = (state["step"] * len(x) + jnp.arange(len(x))) % 64
        buffer = {"rows": buffer["rows"].at[places].set(x), "age": buffer["age"].at[places].add(1)}
        drawn = jax.random.choice(jax.random.key(state["step"]), 64, (8,))
        trees = {"model": state["params"]["model"]}
        grads, numbers = gradients(loss, trees, "model", {"x": buffer["rows"][drawn]})
        state = update(state, "model", grads)
        return {**state, "params": {**state["params"], "buffer": buffer}}, numbers

    return init, step, loss


TASKS = {f.__name__: f for f in (gan, replay)}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gan", full("replay")])
def test_a_step_of_ones_own_is_that_of_one_device(name, mesh):
    """A gradient that is summed twice, or over a device's rows alone; weights of one network that
    another loss places elsewhere; a state that is another on a mesh."""
    task = TASKS[name]()
    (rows, one), (others, other) = run(task), run(task, mesh)
    assert_same_rows(rows, others, "grad_norm", "of_real", rel=1e-5, abs=1e-6)
    assert_close(other.params, one.params, atol=2e-5)


def test_it_is_the_algorithm_that_one_would_write_by_hand():
    """A gradient of the sum, not of the mean; a second loss at the weights before the first update;
    a number of the step that is counted twice."""
    def init(key):
        a, b = jax.random.split(key)
        return {"student": mlp_of(a, 16, 16), "teacher": mlp_of(b, 16, 16)}

    def near(trees, batch):
        gap = mlp(trees["student"], batch["x"]) - mlp(trees["teacher"], batch["x"])
        return jnp.square(gap).sum(), len(gap), {"far": jnp.abs(gap).sum()}

    def step(state, batch, gradients, update):
        grads, numbers = gradients(near, state["params"], "student", batch)
        state = update(state, "student", grads)
        grads, others = gradients(near, state["params"], "teacher", batch)
        return update(state, "teacher", grads), {**numbers, "second": others["loss"],
                                                  "step_before": state["step"]}

    config = make(steps=4, batch=16, fsdp_min=1)
    task = train.Task(init, collate, near, examples=EXAMPLES)
    rows, found = learn(config, "fsdp=2,tensor=2", step=step, optimizer=optax.sgd(0.05),
                        **vars(task))
    trees = jax.jit(init)(jax.random.key(0))
    for at in range(4):
        batch = train.training_batch(config, mesh_of(""), task, None, at)
        for name, logged in (("student", "loss"), ("teacher", "second")):
            loss, grads = jax.value_and_grad(
                lambda tree: near({**trees, name: tree}, batch)[0] / 16)(trees[name])
            assert rows[at][logged] == pytest.approx(float(loss), rel=1e-5)
            if name == "student":
                for number, want in (("grad_norm", optax.tree.norm(grads)),
                                     ("far", near(trees, batch)[2]["far"] / 16)):
                    assert rows[at][number] == pytest.approx(float(want), rel=1e-5)
            trees[name] = jax.tree.map(lambda w, g: w - 0.05 * g, trees[name], grads)
        assert rows[at]["step_before"] == at and rows[at]["tokens"] == 16
    assert_close(found.params, trees, atol=1e-5)


@pytest.mark.parametrize("name", ["replay", "gan"])
@pytest.mark.full
def test_it_continues_to_the_same_bits(tmp_path, name):
    """A second optimizer, an average or a buffer that a checkpoint does not bring back."""
    assert_continues(lambda out, stop: run(
        TASKS[name](), "fsdp=2,tensor=2", out, stop, steps=6, save_every=5, eval_every=3), tmp_path)


@pytest.mark.parametrize("mesh, flags", [("data=2,tensor=2", dict(zero=1)),
                                         full("data=2", dict(dtype="bfloat16")),
                                         full("data=2", dict(accumulate=4)),
                                         full("fsdp=2", dict(override=("up$=-,fsdp",)))])
@pytest.mark.full
def test_options_of_a_run_hold_for_it(mesh, flags):
    """Moments that are not split as their gradients; weights stored elsewhere; parts of a batch of
    which each is divided by its own count."""
    (rows, _), (others, _) = run(gan()), run(gan(), mesh, **flags)
    close = 0.1 if "dtype" in flags else 2e-5
    assert losses_of(others) == pytest.approx(losses_of(rows), rel=close)
    with refuses("--chunks 2: a custom step"):
        run(gan(), "pipe=2", schedule="interleaved", chunks=2)


@pytest.mark.full
def test_an_evaluation_of_any_tree_is_compared():
    """A held-out loss of a tree that no gradient is asked for, that is a mean: another number on
    each mesh."""
    init, step, _ = gan()

    def of_average(trees, batch):
        return jnp.square(mlp(trees["average"], batch["x"][:, :8])).mean(), 1.0

    with refuses("the loss that fit evaluates: .*must be a sum over rows"):
        run((init, step, of_average), "data=2")


def test_a_gradient_that_is_not_finite_changes_nothing():
    """Weights that are spoilt for good, and a run that does not say so, when it is the second
    network's gradient."""
    init, step, held_out = gan()

    def broken(state, batch, gradients, update):
        def loss(trees, batch):
            bad = jnp.where(batch["seeds"] == batch["seeds"], jnp.nan, 0.0)
            return (mlp(trees["generator"], noise(batch, 8))[:, 0] * bad).sum(), len(bad)

        new, numbers = step(state, batch, gradients, update)
        grads, _ = gradients(loss, new["params"], "generator", batch)
        return update(new, "generator", grads), numbers

    (rows, one), (_, two) = run((init, broken, held_out), max_skipped=20), run(gan())
    assert [r["skipped"] for r in rows if "skipped" in r] == [*range(1, 11)]
    assert_close(one.params, two.params, atol=1e-6)


# -------------------------------------------------------------------------------------------
# What is refused

def step_with(loss, name="critic"):
    def step(state, batch, gradients, update):
        grads, numbers = gradients(loss, state["params"], name, batch)
        return update(state, name, grads), numbers

    return step


def score(trees, batch):
    return mlp(trees["critic"], batch["x"])[:, 0]


def a_mean(trees, batch):
    return score(trees, batch).mean(), 1.0


def all_pairs(trees, batch):
    s = score(trees, batch)
    return jax.nn.softplus(s[:, None] - s).sum(), len(s)


def noise_by_row(trees, batch):
    x = batch["x"] + jax.random.normal(jax.random.key(0), batch["x"].shape)
    return score(trees, {"x": x}).sum(), len(x)


def noise_beside_rows(trees, batch):
    """(The order of the rows changes nothing.)"""
    noise = jax.random.normal(jax.random.key(0), batch["x"].shape)
    return (score(trees, batch) + score(trees, {"x": noise}) ** 2).sum(), len(noise)


@pytest.mark.parametrize("loss, says", [
    full(a_mean, r"gradients\(a_mean, \.\.\., 'critic', \.\.\.\): .*must be a sum over rows"),
    (all_pairs, "compare rows with shard.all_rows"),
    full(noise_by_row, r"noise only from batch\['seeds'\]"),
    full(noise_beside_rows, r"noise only from batch\['seeds'\]")])
def test_a_wrong_second_loss_is_refused_before_the_first_update(loss, says):
    """Only the first loss is compared with one device; the critic's gradient is that of a mesh."""
    init, step, held_out = gan()

    def both(state, batch, gradients, update):
        state, numbers = step(state, batch, gradients, update)
        return step_with(loss)(state, batch, gradients, update)[0], numbers

    with refuses(says):
        run((init, both, held_out), "fsdp=2,tensor=2")
    run((init, both, held_out), steps=1)        # (one device computes it)


def counts_from_zero(state, batch, gradients, update):
    return state, {**gradients(score_sum, state["params"], "critic", batch)[1],
                   "step": state["step"]}


def few_rows(state, batch, gradients, update):
    few = jax.tree.map(lambda x: x[:3], batch)
    return state, gradients(score_sum, state["params"], "critic", few)[1]


def uneven_rows(state, batch, gradients, update):
    uneven = {**batch, "y": batch["x"][:2]}
    return state, gradients(score_sum, state["params"], "critic", uneven)[1]


def in_a_scan(state, batch, gradients, update):
    def one(state, _):
        grads, numbers = gradients(score_sum, state["params"], "critic", batch)
        return state, numbers["loss"]

    state, losses = jax.lax.scan(one, state, None, 2)
    return state, {"loss": losses[0]}


def closes_over(state, batch, gradients, update):
    middle = batch["x"].mean(0)
    loss = step_with(lambda trees, batch: (score(trees, {"x": batch["x"] - middle}).sum(), 1.0))
    return loss(state, batch, gradients, update)


def score_sum(trees, batch):
    return score(trees, batch).sum(), len(batch["x"])


@pytest.mark.parametrize("step, says", [
    (counts_from_zero, "one of its metrics the name 'step'"),
    (few_rows, "--batch 3 does not divide among 2 groups"),
    (uneven_rows, "batch must be a dict of arrays with the same number of rows"),
    (in_a_scan, "inside a jax loop or function"),
    (closes_over, "closes over an array that the step computed"),
    (lambda state, batch, gradients, update: state, r"must return \(state, metrics\)"),
    (lambda state, batch, gradients, update: (state, {"loss": 0.0}), "asked for no gradients"),
    (step_with(score_sum, "critik"),
     "trees must be a dict .* that has this name"),
    (lambda state, batch, gradients, update: (update(state, "generator", gradients(
        score_sum, state["params"], "critic", batch)[0]), {"loss": 0.0}),
     r"has \[64, 1\] at down, where init returned \[64, 16\]"),
    (lambda state, batch, gradients, update: (
        {**state, "params": {}}, gradients(score_sum, state["params"], "critic", batch)[1]),
     "has nothing at average.down"),
    (lambda state, batch, gradients, update: (
        update(state, "critic", gradients(score_sum, state["params"], "critic", batch)[0]), {}),
     "metrics a dict of numbers with a \"loss\"")])
def test_a_step_that_makes_no_sense_is_a_clear_error(step, says):
    """A page of jax, or a run in which nothing learns."""
    init, _, held_out = gan()
    with refuses(says):
        run((init, step, held_out), "data=2")


# -------------------------------------------------------------------------------------------
# Optimizers

def test_any_optimizer_and_several_by_path():
    """An optimizer of optax's whose rate is applied twice, or with the wrong sign; a part that was
    to stay as it is; noise that is the same in each update."""
    def init(key):
        return mlp_of(key, 16, 16)

    def loss(w, batch):
        return jnp.square(mlp(w, batch["x"]) - 1).sum(), len(batch["x"])

    def by_hand(optimizer, w):
        state = optimizer.init(w)
        for at in range(10):
            rows = train.training_batch(make(batch=16), mesh_of(""), TASK, None, at)
            g = jax.grad(lambda w: loss(w, rows)[0] / 16)(w)
            updates, state = optimizer.update(g, state, w)
            w = optax.apply_updates(w, updates)
        return w

    TASK = train.Task(init, collate, loss, examples=EXAMPLES)
    first = init(jax.random.key(0))
    for optimizer, alone in [
            (optax.adam(1e-2), optax.adam(1e-2)),
            (optax.noisy_sgd(1e-2, key=3), optax.noisy_sgd(1e-2, key=3)),   # (a key in its state)
            ({"up": None, "*": optax.sgd(1e-2, momentum=0.9)}, optax.multi_transform(
                {"up": optax.set_to_zero(), "down": optax.sgd(1e-2, momentum=0.9)},
                {"up": "up", "down": "down"}))]:
        for mesh in ("", "fsdp=2,tensor=2"):
            _, found = learn(make(steps=10, batch=16, fsdp_min=1), mesh, optimizer=optimizer,
                             **vars(TASK))
            assert_close(found.params, by_hand(alone, first), atol=1e-5)
    assert (np.asarray(found.params["up"]) == np.asarray(first["up"])).all()
    for wrong, says in [({"up": optax.sgd(0.1)}, "nothing for down"), ("adam", "was given a str"),
                        ({"hed": None, "*": optax.sgd(0.1)}, "'hed' is not the first match of any"),
                        (optax.stateless(lambda grads, _: jax.tree.map(jnp.sum, grads)),
                         "updates and the gradients differ in shape")]:
        with refuses(says):
            learn(make(steps=1, batch=16), "data=8", optimizer=wrong, **vars(TASK))


def test_an_optimizer_that_needs_more_than_gradients_is_one_line():
    """43 lines of optax about keyword-only arguments."""
    for wrong in (optax.lbfgs(), {"*": optax.contrib.reduce_on_plateau()}):
        with refuses("needs value.*train.fit gives it only gradients"):
            learn(make(steps=1), optimizer=wrong)


def test_flags_that_an_optimizer_of_fits_replaces_are_refused(capsys):
    """A run with sgd whose start says adamw, whose steps say lr 1.00, and whose config.json has the
    muon that was asked for and never ran."""
    for flags, says in ((dict(optimizer="muon"), "--optimizer muon: no effect"),
                        (dict(lr=0.5), "--lr 0.5: no effect"),
                        (dict(clip=2.0), "--clip 2.0: no effect"),
                        (dict(weight_decay=0.2, beta1=0.8), "--beta1 0.8 and --weight_decay 0.2")):
        with refuses(says):
            learn(make(steps=1, **flags), optimizer=optax.sgd(0.1))
    for schedule, rate in ((None, None), (lambda step: 0.5, 0.5)):
        rows, _ = learn(make(steps=2), optimizer=optax.sgd(0.1), schedule=schedule)
        assert [row["lr"] for row in rows if "lr" in row] == [rate] * 2
    learn(make(steps=1), optimizer=optax.sgd(0.1), say=report.Reporter(1))
    said = capsys.readouterr().out
    assert "custom optimizer, with its own rate" in said
    assert re.search("^step 1/1 .* grad", said, re.M) and not re.search("adamw|  lr ", said)


@pytest.mark.full
def test_each_network_has_its_own_optimizer():
    """The critic's rate for the generator."""
    init, step, loss = gan()
    optimizer = {"critic": optax.adam(1e-2), "generator.up": None, "*": optax.sgd(0.1)}
    _, result = learn(make(steps=3, batch=16, fsdp_min=1), "fsdp=2", init=init, collate=collate,
                      loss=loss, examples=EXAMPLES, step=step, optimizer=optimizer)
    found = result.params
    first = init(jax.random.key(0))
    # (1e-6: init is compiled in a run, and its product with 8**-0.5 rounded otherwise.)
    np.testing.assert_allclose(found["generator"]["up"], first["generator"]["up"], rtol=1e-6)
    assert np.abs(found["generator"]["down"] - first["generator"]["down"]).max() > 1e-4
    moved = np.abs(np.asarray(found["critic"]["up"]) - np.asarray(first["critic"]["up"]))
    assert 0 < moved.max() < 0.031      # three of Adam's updates


# -------------------------------------------------------------------------------------------
# An average of the weights, statistics of batches, examples that a run makes

def line_task():
    def init(key):
        return mlp_of(key, 16, 16)

    def loss(w, batch):
        x = batch["x"] + 0.1 * noise(batch, 16) if "seeds" in batch else batch["x"]
        return jnp.square(mlp(w, x) - 1).sum(), len(x)

    return init, None, loss


@pytest.mark.full
def test_ema_is_the_average_that_it_says_and_what_everything_uses(tmp_path, capsys):
    """An average that is evaluated and not saved, or saved and not continued; one of the wrong
    updates."""
    task, flat = line_task(), dict(decay="constant", warmup=0, mesh="fsdp=2,tensor=2")
    each = [jax.device_get(run(task, steps=n, **flat)[1].params) for n in range(1, 7)]
    average = jax.device_get(jax.jit(task[0])(jax.random.key(0)))
    for n, w in enumerate(each):
        share = max(1 - 0.8, 9 / (10 + n))
        average = jax.tree.map(lambda a, b: a + share * (b - a), average, w)
    out = str(tmp_path / "run")
    assert run(task, steps=6, out=out, stop=2, save_every=5, ema=0.8, **flat)[1].step < 6
    rows, found = run(task, steps=6, out=out, save_every=5, ema=0.8, **flat)
    assert_close(found.params, average, atol=2e-6)
    total, count = task[2](average, collate(EXAMPLES[:10]))
    assert rows[-1]["eval_loss"] == pytest.approx(float(total / count), rel=1e-5)
    saved, _, _ = sample.load(out)
    assert "these weights are averages over updates (--ema 0.8)" in capsys.readouterr().err
    assert_same_bits(saved, found.params)
    with refuses("--ema 1.*below 1"):
        make(ema=1.0)
    with refuses("keeps its own average"):
        run(gan(), ema=0.9)


@pytest.mark.full
def test_a_flax_model_with_batch_statistics_trains():
    """Statistics of a device's rows; a running mean that a step does not bring back."""
    nn = peer("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            # (The gradient of a bias before the norm is nothing but rounding, which Adam enlarges.)
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(64, use_bias=False)(x))
            return nn.Dense(16)(nn.relu(x))

    net = Net()

    def init(key):
        made = net.init(key, jnp.zeros((1, 16)), train=False)
        return {"params": made["params"], "stats": made["batch_stats"]}

    def loss(trees, batch):
        x, both = batch["x"], {"params": trees["params"], "batch_stats": trees["stats"]}
        if "seeds" not in batch:
            return jnp.square(net.apply(both, x, train=False) - x).sum(), len(x)
        y, new = net.apply(both, x, train=True, mutable="batch_stats")
        flat, _ = jax.flatten_util.ravel_pytree(new["batch_stats"])
        return jnp.square(y - x).sum(), len(x), {"stats": flat * len(x)}    # (divided by the count)

    def step(state, batch, gradients, update):
        trees = state["params"]
        grads, numbers = gradients(loss, trees, "params", batch)
        _, as_tree = jax.flatten_util.ravel_pytree(trees["stats"])
        state = update(state, "params", grads)
        stats = as_tree(numbers.pop("stats"))
        return {**state, "params": {**state["params"], "stats": stats}}, numbers

    task = init, step, loss
    rows, one = run(task, collectives="compiler")
    others, other = run(task, "data=2,fsdp=2,tensor=2", collectives="compiler")
    assert_same_rows(rows, others, rel=2e-5)
    mean = np.asarray(one.params["stats"]["BatchNorm_0"]["mean"])
    np.testing.assert_allclose(other.params["stats"]["BatchNorm_0"]["mean"], mean, atol=1e-5)
    assert np.abs(mean).max() > 0.01
    with refuses("must be a sum over rows"):
        run(task, "data=2")


@pytest.mark.full
def test_examples_are_made_from_the_weights_as_they_are(tmp_path):
    """Examples of the weights of an earlier update, or others after a continued run or on another
    mesh."""
    init, _, loss = line_task()
    made = {}

    def make_examples(seed, step, weights):
        scale = float(jnp.abs(weights["up"]).mean())
        made.setdefault(step, []).append(scale)
        rng = np.random.default_rng([seed, step])
        return [scale * rng.normal(size=16).astype(np.float32) for _ in range(16)]

    def learned(mesh="", out="", stop=None, examples=make_examples, held_out=EXAMPLES[:3]):
        return run((init, None, loss), mesh, out, stop, dict(examples=examples, held_out=held_out),
                   steps=6, save_every=5, eval_every=0)

    _, one = learned()
    assert list(made) == list(range(6)) and len(set(x[0] for x in made.values())) == 6
    whole = assert_continues(lambda out, stop: learned("fsdp=2,tensor=2", out, stop), tmp_path)
    for step, (first, mesh, *again) in made.items():
        assert mesh == pytest.approx(first, rel=1e-5) and set(again) == {mesh}, step
    assert_close(whole.params, one.params, atol=2e-5)
    with refuses("no held-out examples: give at least one"):
        learned(held_out=[])
    with refuses("made 3 for update 0; expected --batch 16"):
        learned(examples=lambda seed, step, weights: EXAMPLES[:3])
