"""The learning rate: its schedules are optax's, and follow from the configuration alone."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train
from tests.common import opened, refused, refuses
from tests.helpers import learn, make, tokens_of
from zigzag.commands import continued
from zigzag.core import flags
from zigzag.disk.checkpoint import newest_step
from zigzag.run import continuing, schedules


def rates(config, count=0):
    """The rates of the first updates of a run, by default of all of them."""
    steps = np.arange(count or config.steps, dtype=np.int32)
    return np.asarray(jax.jit(jax.vmap(lambda step: train.learning_rate(config, step)))(steps))


def rates_of(rows):
    return [row["lr"] for row in rows if "lr" in row]


@pytest.mark.parametrize("lr, steps, warmup", [
    (0.0039, 900, None), (0.1, 20, 3), (3e-4, 100, 150), (0.02, 1, None)])
def test_without_flags_the_rates_are_those_of_earlier_versions(lr, steps, warmup):
    """Rates that differ in the last bit from those with which a run began: it would continue as
    another run."""
    c = make(lr=lr, steps=steps, warmup=warmup)
    before = optax.warmup_cosine_decay_schedule(
        c.lr / c.warmup, c.lr, c.warmup - 1, max(c.steps - 1, c.warmup), c.lr / 50)
    steps = np.arange(c.steps + 5, dtype=np.int32)
    assert np.array_equal(rates(c, len(steps)), jax.jit(jax.vmap(before))(steps))


# With 20 updates, of which 4 are the warmup: the schedule from the peak on, which update 3 has.
AFTER_WARMUP = {
    "cosine": optax.cosine_decay_schedule(0.01, 16, 0.1),
    "linear": optax.linear_schedule(0.01, 0.001, 16),
    "exponential": optax.exponential_decay(0.01, 16, 0.1),
    "wsd": optax.join_schedules([optax.constant_schedule(0.01),
                                 optax.linear_schedule(0.01, 0.001, 5)], [11]),
    "constant": optax.constant_schedule(0.01)}


def config_of_decay(decay, **changes):
    more = {"constant": {}, "wsd": dict(final_share=0.1, cooldown=0.25)}.get(
        decay, dict(final_share=0.1))
    return make(**dict(decay=decay, lr=0.01, steps=20, warmup=4, first_share=0.2, layers=1,
                       **more) | changes)


@pytest.mark.parametrize("decay", schedules.DECAYS)
def test_every_decay_is_optaxs_over_all_updates(decay):
    """A schedule that is an update late, or never reaches its last rate; one that goes on falling,
    or comes back, after its end."""
    config = config_of_decay(decay)
    wanted = optax.join_schedules([optax.linear_schedule(0.002, 0.01, 3), AFTER_WARMUP[decay]], [3])
    np.testing.assert_allclose(rates(config), [wanted(step) for step in range(20)], rtol=1e-6)
    last = 0.01 if decay == "constant" else 0.001
    np.testing.assert_allclose(rates(config, 30)[19:], last, rtol=1e-6)
    if decay == "constant":
        with refuses("--decay_steps 20: --decay constant does not use it"):
            flags.change(config, decay_steps=20)
        return
    held = rates(flags.change(config, steps=30, decay_steps=20))
    assert np.array_equal(held, rates(config, 30)), "the end of the decay is not the end of the run"


@pytest.mark.parametrize("decay", ["linear", "wsd"])
def test_a_schedule_counts_updates_and_not_micro_batches(decay):
    """With four parts to a batch, a rate that ends at 0.844 of the peak; a rate in the metrics that
    was not applied (Adam's first steps are the rate itself)."""
    config = config_of_decay(decay, accumulate=4, steps=5, warmup=1, first_share=None)
    rows, _ = learn(config)
    assert rates_of(rows) == pytest.approx(rates(config), rel=1e-6)
    assert rates_of(rows)[-1] == pytest.approx(0.001)


def test_shares_are_of_the_steps():
    """A share read as a number of updates; a cooldown that keeps the updates of fewer steps."""
    c = make(warmup=0.05, steps=900, decay="wsd")
    assert (c.warmup, c.cooldown) == (45, 0.2) and type(c.warmup) is int
    assert make(warmup=None, steps=50).warmup == 2 and make(warmup=0, steps=50).warmup == 0
    assert make(warmup=0.001, steps=50).warmup == 1
    longer = flags.change(c, steps=1800)
    assert longer.warmup == 45, "the warmup lies in the past"
    for config, peaks in ((c, 720), (longer, 1440), (flags.change(c, cooldown=90), 810)):
        found = np.flatnonzero(rates(config) == np.float32(config.lr))
        assert found[-1] + 1 == peaks == schedules.fixed_from(config) - 1


def test_values_that_make_no_schedule_are_refused():
    """A flag that is read and ignored; a division by zero in the middle of a run."""
    for changes, says in (
            (dict(decay="cosin"), "--decay cosin: .*did you mean 'cosine'"),
            (dict(warmup=2.5), "--warmup 2.5: expected an integer number of updates below"),
            (dict(warmup=3e9), "--warmup 3000000000.0: expected an integer number"),
            (dict(decay="exponential", final_share=0.0), "never reaches 0"),
            (dict(decay="constant", final_share=0.1), "--final_share 0.1: --decay constant does"),
            (dict(cooldown=0.1), "--cooldown 0.1: --decay cosine does not.*another --decay .wsd"),
            (dict(final_share=3.0), "a share of --lr"), (dict(beta2=1.0), "--beta2 1.0"),
            (dict(first_share=-1.0), "--first_share -1.0")):
        with refuses(says):
            make(**changes)


# -------------------------------------------------------------------------------------------
# Continuing

@pytest.mark.full
def test_a_wsd_run_goes_on_from_its_plateau_as_if_it_had_never_stopped(tmp_path):
    """A run with more steps that repeats its warmup, or has begun to cool down already."""
    out = tmp_path / "run"
    config = make(decay="wsd", steps=10, warmup=2, save_every=4, out=str(out), layers=1)
    learn(config)
    shutil.rmtree(out / "checkpoints/10")       # the newest is that of step 8, before the cooldown
    rows, result = learn(flags.change(config, steps=20))
    whole, wanted = learn(flags.change(config, steps=20, out=""))
    assert [r["loss"] for r in rows] == [r["loss"] for r in whole][8:]
    assert rates_of(rows) == rates_of(whole)[8:] and rates_of(rows)[7] == config.lr
    assert jax.tree.all(jax.tree.map(np.array_equal, result.params, wanted.params))
    # (After the cooldown, it ends as it has ended.)
    assert continuing.hold(flags.change(config, steps=30)).decay_steps == 20


@pytest.mark.full
def test_a_finished_run_with_more_steps_holds_its_last_rate(tmp_path, monkeypatch):
    """A rate that jumps up, at once or when the run is continued again; one that can no longer be
    raised."""
    out = tmp_path / "run"
    config = make(steps=4, warmup=1, save_every=2, out=str(out), layers=1)
    first = rates_of(learn(config)[0])
    rows, _ = learn(flags.change(config, steps=6))
    assert rates_of(rows) == [first[-1]] * 2
    assert json.loads((out / "config.json").read_text())["decay_steps"] == 4
    again = continuing.hold(flags.change(config, steps=7))
    assert again.decay_steps == 4
    longer = continuing.hold(flags.change(config, steps=100, warmup=0.1))
    assert (longer.warmup, longer.decay_steps) == (1, 4), "its warmup is over, too"
    asked = flags.change(config, steps=10, change=("decay",))
    rows, _ = learn(asked)
    assert rates_of(rows) == pytest.approx(rates(asked)[6:], rel=1e-6)
    change, = json.loads((out / "config.json").read_text())["changes"]
    assert change == {"step": 6, "steps": [6, 10], "decay_steps": [4, None]}
    # (A run in the middle of its decay, as before: the decay stretches.)
    monkeypatch.setattr(continuing, "newest_step", lambda out: 3)
    assert continuing.hold(flags.change(config, steps=6)).decay_steps is None
    assert newest_step(out) == 10


@pytest.mark.full
def test_no_update_has_a_rate_of_zero_or_less(tmp_path, monkeypatch):
    """50 more updates of a finished run, all with the rate 0 at which its decay had ended; a last
    rate of -7.5e-11, which climbs."""
    config = make(steps=4, warmup=1, final_share=0.0, decay="linear", out=str(tmp_path / "run"))
    with monkeypatch.context() as patch:        # (as rounding makes it, in optimized programs)
        patch.setattr(optax, "linear_schedule", lambda *_: lambda step: jnp.float32(-7.5e-11))
        assert rates(config).min() == 0 == rates(dataclasses.replace(config, decay="wsd")).min()
    learn(config)
    for more in ({}, dict(lr=0.3, change=("lr",))):
        with refuses("rate of 0 .* --change decay spreads"):
            learn(dataclasses.replace(config, steps=6, **more))
    rows, _ = learn(dataclasses.replace(config, steps=6, lr=0.3, change=("lr", "decay")))
    assert rates_of(rows)[0] > 0


def test_the_command_line_keeps_drops_and_changes_the_decay_of_a_run():
    """The cooldown of a run refused beside its new decay; another decay without --change."""
    old = dict(decay="wsd", cooldown=0.1, final_share=0.0, decay_steps=9, steps=9)

    def left_out(**given):
        return continued.left_out(given, old, train.Config)

    assert left_out(steps=12) == {name: x for name, x in old.items() if name != "steps"}
    assert left_out(change=("decay",), steps=12) == dict(decay="wsd", cooldown=0.1, final_share=0.0)
    assert left_out(change=("decay",), decay="linear") == dict(steps=9)
    with refuses("--change decay: give --decay or --steps too"):
        continued.check_change(dict(change=("decay",)), "out", True)
    continued.check_change(dict(change=("decay",), steps=12), "out", True)


# -------------------------------------------------------------------------------------------
# fit's schedule, and epochs

def test_fit_takes_a_schedule_of_its_own():
    """A schedule that is given and not applied; one that fails inside jax."""
    config = make(steps=3, layers=1)
    rows, ours = learn(config, schedule=lambda step: 0.01 / (1 + step))
    assert rates_of(rows) == pytest.approx([0.01, 0.005, 0.01 / 3])
    _, zero = learn(config, schedule=lambda step: 0.0)
    before = train.language(config)[0](jax.random.key(0))
    assert jax.tree.all(jax.tree.map(np.allclose, zero.params, before))
    assert not jax.tree.all(jax.tree.map(np.allclose, ours.params, before))
    for schedule, says in ((lambda step: jnp.ones(2), "return a number"),
                           (lambda step: 1.0 if step < 3 else 0.1, "jnp.where in place of if")):
        with refuses(says):
            learn(config, schedule=schedule)


def test_epochs_say_how_many_steps(capsys, tmp_path, text):
    """Steps of the default number; checkpoints, evaluations or a warmup at parts of another number
    than the run has; two numbers of steps."""
    config = make(epochs=1.25, warmup=0.1, steps=900, layers=1)
    rows, result = learn(config, examples=tokens_of(config, 64), held_out=tokens_of(config, 8, 1))
    assert result.step == 10        # 80 examples, 8 at a time
    assert [r["step"] for r in rows if "eval_loss" in r] == [2, 4, 6, 8, 10]
    assert rates_of(rows) == pytest.approx(rates(make(steps=10, warmup=1)), rel=1e-6)
    assert schedules.with_steps(make(epochs=1.1, batch=1), 50).steps == 55
    assert make(tokens=1001, batch=5, seq_len=20, steps=900).steps == 11      # (10 learn 1,000)
    assert "--steps 9 and --epochs 2: give only one" in refused(
        capsys, "--epochs", 2, "--steps", 9, "--out", tmp_path / "run")
    config = train.parse(["--epochs", "0.5", "--seq_len", "32", "--data", str(text)])
    with opened(config, tmp_path / "run") as learned:
        count, found = len(learned.make_task().examples), learned.config
    assert found.steps == -(-count // 16) and found.eval_tokens > 32 and found.epochs == 0
