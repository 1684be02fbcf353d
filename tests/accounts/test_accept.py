"""--accept: a precision that computes another loss ends a run before it saves anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.common import full, order, refuses
from tests.helpers import KeepRows, fit, learn, make, mesh_of
from zigzag.core.errors import RunError

EXAMPLES = 320      # 32 updates of 8 rows see each at most once
RUN = dict(accept=0.01, save_every=0, eval_every=0, dtype="bfloat16", steps=34)


def points(seed=0, marked=()):
    """Examples: a point, its place in a long text, and whether it's one of `marked`."""
    x = np.random.default_rng(seed).normal(size=(EXAMPLES, 16)).astype(np.float32)
    return [{"x": row, "place": np.float32(1000 + i), "mark": np.float32(i in marked)}
            for i, row in enumerate(x)]


def collate(examples):
    return {name: np.stack([one[name] for one in examples]) for name in examples[0]}


def init(key):
    return {"w": jax.random.normal(key, (16, 16)) / 4}


def errors(params, batch):
    """The squared error of each row: predict the sine of each number."""
    x = batch["x"].astype(params["w"].dtype)
    return ((x @ params["w"] - jnp.sin(x)) ** 2).astype(jnp.float32).sum(-1)


def good(params, batch):
    return errors(params, batch).sum(), len(batch["x"])


def place_in_16_bits(params, batch):
    """A position that is rounded to a multiple of 8."""
    place = batch["place"].astype(params["w"].dtype).astype(jnp.float32)
    return (errors(params, batch) * (1.1 + jnp.sin(place))).sum(), len(batch["x"])


def summed_in_16_bits(params, batch):
    """A running sum, each addition of which is rounded."""
    parts = jnp.repeat(errors(params, batch), 400).astype(params["w"].dtype)
    total, _ = jax.lax.scan(lambda total, x: (total + x, None), 0 * parts[0], parts)
    return total.astype(jnp.float32) / 400, len(batch["x"])


def nan_in_16_bits(params, batch):
    big = jnp.where(batch["mark"] > 0, 3e38, 1.0).astype(params["w"].dtype)
    is_narrow = params["w"].dtype != jnp.float32
    ratio = (big * 4 / (big * 4)) if is_narrow else jnp.ones_like(big)      # inf / inf
    return (errors(params, batch) * ratio.astype(jnp.float32)).sum(), len(batch["x"])


def run(loss, out, mesh="", marked=(), **changes):
    """Train on the points. Returns the lines that the run prints."""
    lines = []
    config = make(**{**RUN, "out": str(out), **changes})
    fit(config, init=init, collate=collate, loss=loss, examples=points(0, marked),
        held_out=points(1)[:8], mesh=mesh_of(mesh), say=KeepRows([], lines))
    return lines


def saved(out):
    return [*out.glob("checkpoints/*")]


@pytest.mark.parametrize("loss, at, marked", [
    (place_in_16_bits, 1, ()), (summed_in_16_bits, 1, ()),
    (nan_in_16_bits, 30, order(EXAMPLES, 0, 29 * 8, 8)[:1])])
def test_a_wrong_loss_ends_the_run_and_saves_nothing(tmp_path, loss, at, marked):
    """A cast of a position, a sum in 16 bits, or an overflow in the 30th update, that a run trains
    with for a week."""
    with pytest.raises(RunError, match=f"step {at}: the loss is .* in bfloat16 .*--accept 0.01"):
        run(loss, tmp_path / "run", marked={*marked}, mesh="data=2" if at == 1 else "")
    assert not saved(tmp_path / "run")


@pytest.mark.parametrize("seed", [0, full(1), full(2)])
def test_a_good_loss_passes(tmp_path, seed):
    """A limit that rounding alone exceeds, or a comparison that changes the run."""
    lines = run(good, tmp_path / "run", seed=seed)
    line, = [line for line in lines if line.startswith("accept")]
    assert "32 updates in bfloat16 and float32" in line and saved(tmp_path / "run")
    gap, noise = (float(line.split(before)[1].split("%")[0]) for before in ("up to ", "batches: "))
    assert 0 < gap < 1 and noise > 2 * gap


@pytest.mark.parametrize("mesh, steps, seed", [
    ("", 2, 0), full("fsdp=2,tensor=2", 34, 1), full("pipe=2", 34, 2), full("", 34, 1),
    full("data=2", 34, 3)])
def test_a_good_decoder_passes(mesh, steps, seed):
    """The decoder's own loss, which casts to the dtype of its config: compared with itself, the
    gap would be 0."""
    lines = []
    learn(make(**{**RUN, "seed": seed, "steps": steps}), mesh, lines)
    line, = [line for line in lines if line.startswith("accept")]
    assert 0 < float(line.split("up to ")[1].split("%")[0]) < 1


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=2"])
def test_a_decoder_in_float16_passes(mesh):
    """A loss scale that is compared as part of the gradient, or one that is still falling taken
    for a wrong loss."""
    for scale in 2.0 ** 15, 2.0 ** 30:
        lines = []
        learn(make(**{**RUN, "dtype": "float16", "steps": 20, "initial_scale": scale}), mesh, lines)
        line, = [line for line in lines if line.startswith("accept")]
        gap, gradient = (float(line.split(before)[1].split("%")[0]) for before in (
            "up to ", "the gradient by "))
        assert 0 < gap < 0.1 and 0 < gradient < 1
        assert any("loss scale of" in line for line in lines) == (scale == 2.0 ** 30)


def test_what_accept_refuses(tmp_path):
    """A comparison with itself, and a save before the comparison ends."""
    with refuses("--accept 0.01: this run computes in float32, so there is nothing to compare"):
        run(good, tmp_path / "a", dtype="float32")
    with refuses("--accept 0.01: compares 32 updates before the run saves; give --save_every 32"):
        run(good, tmp_path / "b", save_every=20)
    assert not [*tmp_path.iterdir()]        # not even a config.json
    with refuses("give --eval_every 32 or more"):
        run(good, tmp_path / "c", eval_every=5, best=("smallest:eval_loss",))
    assert not saved(tmp_path / "b") and not saved(tmp_path / "c")
