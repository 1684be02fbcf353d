"""Layers that take their rows in strips, as on a TPU with a tensor axis."""

import dataclasses

import pytest

import model
import train
from tests.common import assert_same_on, full, slow
from tests.forecast.test_traffic import ONE_F_ONE_B, sent_and_expected
from tests.helpers import learn, make, mesh_of, program_of
from zigzag.core.errors import ConfigError
from zigzag.parallel import layer_strips as strips
from zigzag.run.task import without_data

CASES = [
    ("fsdp=2,tensor=2", dict(fsdp_min=64, remat="full")),
    slow("data=2,tensor=2", dict(remat="selective")),
    slow("tensor=4", dict(accumulate=2, remat="full", layers=4)),
    full("tensor=2", dict(seq_len=19)), full("tensor=2", dict(remat="mlp")),
    full("pipe=2,tensor=2", dict(microbatches=2)),
    full("pipe=2,tensor=2", dict(microbatches=2, remat="full", layers=4, **ONE_F_ONE_B)),
    # (Without a bias in `out`: in a parallel block its gradient is that of the MLP's last bias, and
    # the compiler sends one for both.)
    full("fsdp=2,tensor=2", dict(parallel_block=True, biases="qkv,mlp", fsdp_min=64))]


@pytest.fixture
def counts(monkeypatch):
    """Strips of eight tokens at least, on the simulated devices; their numbers, as they are asked
    for."""
    found, count = [], strips.count
    monkeypatch.setattr(strips, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(strips, "LEAST", 8)
    monkeypatch.setattr(strips, "count", lambda *given: found.append(count(*given)) or found[-1])
    return found


@pytest.mark.parametrize("mesh, changes", CASES)
def test_strips_are_the_same(counts, mesh, changes):
    """Rows in the place of others; what a layer adds to the loss, counted for one strip; dropout
    with the seeds of another strip."""
    assert_same_on(mesh, **{"batch": 16, "dropout": 0.1, **changes})
    assert max(counts) > 1


@pytest.mark.parametrize("mesh, changes", CASES)
def test_strips_send_what_is_expected(counts, mesh, changes):
    """Weights that are gathered over fsdp for each strip; what is sent over tensor, counted for
    one. (Between CPU devices the gradients of whole weights are summed for each strip. A TPU's
    compiler sums them once: tests/forecast/test_forecast.py.)"""
    program = program_of(make(**{"batch": 16, "vocab_size": 384, **changes}), mesh)
    sent, expected = ({key: c for key, c in found.items()
                       if key != ("all-reduce", "tensor") and c.bytes > 1000}
                      for found in sent_and_expected(program))
    assert max(counts) > 1 and sent.keys() == expected.keys()
    for key, c in expected.items():
        # (No formula has the scalars of the gradient's norm, one for each weight.)
        assert sent[key].bytes == pytest.approx(c.bytes, rel=0.02, abs=100), key
        assert sent[key].count == c.count or "tensor" not in key, key


@pytest.mark.parametrize("rows, time, sizes, where, wanted", [
    (8, 2048, dict(tensor=4), "tpu", 4), (32, 2048, dict(tensor=4), "tpu", 8),
    (6, 4096, dict(tensor=2), "tpu", 6),
    (2, 2048, dict(tensor=2), "tpu", 1), (8, 2048, dict(tensor=4), "gpu", 1),
    (8, 2048, dict(tensor=1), "tpu", 1), (8, 2048, dict(tensor=2, seq=2), "tpu", 1)])
def test_the_number_of_strips(rows, time, sizes, where, wanted):
    assert strips.count(rows, time, sizes, where, strips.LEAST) == wanted


def test_only_our_own_networks_are_cut(counts):
    """A custom loss that compares rows within a layer; experts with a few tokens each."""
    def cut(config, **given):
        task, shapes = without_data(config)
        task = dataclasses.replace(task, **given)
        return train.build(config, mesh_of("tensor=2"), task, shapes).plan.strip

    assert cut(make()) == 8 and cut(make(experts=4)) == 0
    assert cut(make(), loss=lambda *given: model.loss(*given, config=make().network)) == 0


@pytest.mark.full
def test_an_edit_that_compares_rows_is_found(monkeypatch):
    """A few rows, which are compared with one device, and which no strip would have cut."""
    block = model.block
    monkeypatch.setattr(strips, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(model, "block", lambda w, x, *others: block(w, x - x.mean(0), *others))
    with pytest.raises(ConfigError, match="this loss|on this mesh"):
        learn(make(check=True, batch=8), "tensor=2")
    monkeypatch.setattr(strips, "PLATFORMS", ())
    learn(make(check=True, batch=8), "tensor=2")
