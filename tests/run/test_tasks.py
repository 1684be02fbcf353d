"""Custom tasks: the functions given to train.fit, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import data
import train
from tests.common import full, net, refuses
from tests.helpers import learn, losses_of, make, mesh_of, tokens_of

ONE = dict(init=lambda key: {"w": jnp.ones(4)}, examples=[np.zeros(1)] * 8,
           collate=lambda e: {"x": np.stack(e)})


def test_small_numbers_of_an_array_are_logged_with_their_digits():
    """A load of 3e-6 that is logged as 0.0."""
    def loss(p, b):
        n = len(b["x"])
        small = jnp.array([[3.1234567e-6, 0.0], [12345.678, -1]])
        return jnp.sum(p["w"]) * n, n, {"small": small * n}

    rows, _ = learn(make(steps=1, eval_every=1), loss=loss, held_out=ONE["examples"], **ONE)
    want = [[3.12346e-6, 0], [12345.7, -1]]
    assert rows[0]["small"] == want and rows[1]["eval_small"] == want


def test_counts_may_be_fractions_and_integers_are_no_weights():
    """A division by max(count, 1), with which a batch of small weights trains too slowly."""
    def loss(p, b):
        return jnp.sum(p["w"]) * 0.25, jnp.float32(1 / 32) * len(b["x"])

    assert learn(make(steps=1), loss=loss, **ONE)[0][0]["loss"] == pytest.approx(4)
    with refuses("n is int32"):
        learn(make(), loss=loss, **{**ONE, "init": lambda key: {"n": jnp.zeros((), "int32")}})


def test_every_row_of_every_update_has_a_seed_of_its_own():
    """The same dropout in each row, or again in each update; another row's where they are cut."""
    def seeds(at, mesh=""):
        batch = train.training_batch(make(batch=8), mesh_of(mesh), train.Task(loss=None, **ONE),
                                     None, at)
        return np.asarray(batch["seeds"])

    found = [seeds(at) for at in range(3)]
    assert len(np.unique(found)) == 24
    assert (seeds(2, "data=4") == found[2]).all()


def test_a_collate_whose_shapes_change_is_refused(tmp_path):
    """A second batch of another shape, which ends inside jax after the run's folder was made."""
    def pad(e):
        longest = max(map(len, e))
        return {"x": np.stack([np.pad(x, (0, longest - len(x))) for x in e])}

    with refuses(r"x': 'float32\[\d+\]'} from .* dtypes, padded to the same"):
        learn(make(out=str(tmp_path / "run")), collate=pad,
              loss=lambda p, b: (jnp.sum(b["x"] * p["w"]), len(b["x"])),
              init=lambda key: {"w": jnp.ones(())},
              examples=[np.ones(n, "float32") for n in range(3, 20)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("collate, says", [
    (lambda e: None, r"returned None \(NoneType\): expected a dict {name: array of num"),
    (lambda e: {}, r"collate returned {} \(dict\): expected a dict"),
    (lambda e: {1: np.stack(e)}, r"made 1 of float32 \(ndarray\): expected a dict"),
    (lambda e: {"x": ["a"] * len(e)}, r"made 'x' of <U1 \(list\): expected a dict"),
    (lambda e: {"x": {"y": np.stack(e)}}, r"made 'x' of object \(dict\): expected a dict"),
    (lambda e: {"x": np.zeros(4)}, r"\(1, 4\) from 1 examples|\(4,\) from 1 examples"),
    (lambda e: {"x": [[1], [1, 2]]}, r"made 'x' a list that is not an array \(setting an array .*"
                                     r"inhomogeneous.*\): expected a dict"),
    (lambda e: {"x": np.stack(e).astype("int32" if len(e) > 1 else "float32")},
     r"made rows of {'x': 'int32\[1\]'} from some examples, but of {'x': 'float32\[1\]'} from the"),
    (lambda e: {"x": np.stack(e), **({"y": np.stack(e)} if len(e) > 1 else {})},
     r"made rows of {'x': .*, 'y': .*} from some examples, but of {'x': '.*'} from the first:")])
def test_a_collate_that_makes_no_batch_is_refused(collate, says, tmp_path):
    """A page of numpy's or jax's, from a line that has nothing to do with collate; rows that do not
    match the examples, and get seeds of other examples."""
    with refuses(says) as e:
        learn(make(out=str(tmp_path / "run")), collate=collate, loss=lambda p, b: (
            jnp.sum(p["w"]) + jnp.sum(b["x"]), len(b["x"])), init=ONE["init"],
            examples=[np.zeros(1, np.float32)] * 8)
    assert "\n" not in str(e.value)
    assert not list(tmp_path.iterdir())


def test_a_batch_of_any_numbers_trains():
    """A refusal of bfloat16, which numpy counts among the void types, of truth values, of lists of
    numbers, or of 64 bits, which a device makes 32."""
    def collate(e):
        return {"a": np.ones(len(e), jnp.bfloat16), "b": np.ones(len(e), bool), "c": [1] * len(e),
                "d": np.ones(len(e)), "e": jnp.ones(len(e)), "f": np.ones(len(e), np.uint16)}

    def loss(p, b):
        return jnp.sum(p["w"]) * sum(jnp.sum(x) for x in b.values()), len(b["a"])

    assert np.isfinite(learn(make(steps=2), **{**ONE, "collate": collate}, loss=loss)[0][1]["loss"])


def test_a_loss_that_expert_cannot_split_is_refused():
    """A device that takes its part of the experts for all of them. (tests/run/test_custom_loss.py
    has this for the layers of a stage, and for a part of the time.)"""
    def loss(params, batch, specs=None):
        x = params["embed"][batch["tokens"]]
        layer = jax.tree.map(lambda w: w[0], params["layers"])
        h = jnp.einsum("btd,edf->ebtf", x, layer["e_up"])
        x += jnp.einsum("ebtf,efd->ebtd", h, layer["e_down"]).sum(0)
        return jnp.sum(x ** 2), jnp.sum(batch["weights"])

    with refuses("shard.experts"):
        learn(make(steps=1, experts=4, shared_experts=1), "expert=2", loss=loss)


@pytest.mark.parametrize("name", ["loss", "skipped", 1])
def test_other_sums_under_a_name_that_is_logged_already_are_refused(name, tmp_path):
    """A number that takes the place of the loss in the metrics, in the charts and on the screen; a
    page of jax about names that cannot be sorted."""
    with refuses(f"other sums the name {name!r}: expected a name other than grad_norm, loss, "
                 f"loss_scale, lr, mfu, .*which a run already"):
        learn(make(out=str(tmp_path / "run")), **ONE,
              loss=lambda p, b: (jnp.sum(p["w"]), len(b["x"]), {name: jnp.ones(())}))
    assert not list(tmp_path.iterdir())


def test_other_sums_are_not_taken_for_the_loss_of_a_source(tmp_path):
    """The held-out loss of one source, replaced by a number of somebody's own."""
    def loss(p, b):
        return jnp.sum(p["w"]), len(b["x"]), {"loss_code": 1.0 * len(b["x"])}

    given = dict(**ONE, loss=loss, held_out=[np.zeros(1)] * 4)
    with refuses("'loss_code': expected a name other than loss_code,"):
        learn(make(out=str(tmp_path / "run")), **given, sources={"prose": 2, "code": 2})
    assert not list(tmp_path.iterdir())
    assert learn(make(steps=1), **given)[1].evaluation["eval_loss_code"] == 1


@pytest.mark.full
def test_a_loss_that_was_compiled_before_and_brings_a_mask_trains_on_a_ring():
    """Calls of shard.py that are found only if Python runs, and missed in a cached trace; an array
    of the batch with the tokens' time that is not split with it, because of its name."""
    config = make(steps=3)

    def collate(e):
        batch = data.collate(e, 16)
        return {**batch, "mask": (batch["tokens"] % 2 == 0).astype(np.float32)}

    @jax.jit
    def loss(p, b):
        return net.loss(p, {**b, "weights": b["weights"] * b["mask"]}, config)

    first, *rest = [learn(config, mesh, loss=loss, collate=collate)[0]
                    for mesh in ("", "seq=2", "seq=2")]
    for rows in rest:
        assert [r["tokens"] for r in rows] == [r["tokens"] for r in first]
        assert rows[0]["tokens"] < 128
        assert losses_of(rows) == pytest.approx(losses_of(first), rel=5e-5)


@pytest.mark.parametrize("mesh", ["", full("data=8"), full("fsdp=8"), "data=2,fsdp=2,tensor=2"])
def test_evaluation_is_exact_for_any_number_of_examples(mesh):
    """A held-out loss that depends on the number of devices: a dropped remainder, or a mean of
    batches' means."""
    config = make(steps=1, batch=8)
    held_out = [e[:5 + i] for i, e in enumerate(tokens_of(config, 13, 5))]      # 13, uneven
    held_out[-1] = tokens_of(config, 1, 6)[0]           # the odd one out weighs as the others do
    rows, result = learn(config, mesh, held_out=held_out)
    s, n = net.loss(jax.device_get(result.params), data.collate(held_out, 16), config)
    assert rows[-1]["eval_loss"] == pytest.approx(float(s / n), rel=2e-6)


@pytest.mark.full
def test_experts_are_evaluated_where_held_out_rows_do_not_divide():
    """A TypeError at the first evaluation, because the type of a gathered weight differs from that
    of a weight that was never split."""
    config = make(experts=4, layers=2, steps=1)
    held = tokens_of(config, 13, 5)
    one, other = (learn(config, mesh, held_out=held)[0][-1]["eval_loss"]
                  for mesh in ("", "fsdp=2,expert=2"))
    assert other == pytest.approx(one, rel=5e-6)
