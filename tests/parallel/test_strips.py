"""Layers that take their rows in strips, as on a TPU with a tensor axis."""

import pytest

from tests.common import assert_same_on, full, slow
from tests.helpers import make, program_of
from tests.measure.test_traffic import ONE_F_ONE_B
from zigzag.measure.hlo import collectives
from zigzag.measure.traffic import expected_traffic
from zigzag.parallel import strips
from zigzag.run.plan import compiled

CASES = [
    ("fsdp=2,tensor=2", dict(fsdp_min=64, remat="full")),
    slow("data=2,tensor=2", dict(experts=4, remat="selective")),
    slow("tensor=4", dict(accumulate=2, remat="full:0.5", layers=4)),
    full("tensor=2", dict(seq_len=19)), full("tensor=2", dict(remat="mlp")),
    full("pipe=2,tensor=2", dict(microbatches=2)),
    full("pipe=2,tensor=2", dict(microbatches=2, remat="full", **ONE_F_ONE_B)),
    full("fsdp=2,tensor=2", dict(parallel_block=True, biases="qkv,out,mlp", fsdp_min=64))]


@pytest.fixture(autouse=True)
def on_this_platform(monkeypatch):
    """Strips of eight tokens at least, on the simulated devices."""
    monkeypatch.setattr(strips, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(strips, "LEAST", 8)


@pytest.mark.parametrize("mesh, changes", CASES)
def test_strips_are_the_same(mesh, changes):
    """Rows in the place of others; what a layer adds to the loss, counted for one strip; dropout
    with the seeds of another strip."""
    assert_same_on(mesh, **{"batch": 16, "dropout": 0.1, **changes})


@pytest.mark.parametrize("mesh, changes", [*CASES, full("tensor=2", dict(lora_rank=2))])
def test_strips_send_what_is_expected(mesh, changes):
    """Weights that are gathered over fsdp for each strip; what is sent over tensor, counted for
    one. (Between CPU devices the gradients of whole weights are summed for each strip. A TPU's
    compiler sums them once: tests/measure/test_forecast.py.)"""
    program = program_of(make(**{"batch": 16, "vocab_size": 384, **changes}), mesh)
    sent, expected = ({(c.kind, c.axis): c for c in rows
                       if (c.kind, c.axis) != ("all-reduce", "tensor") and c.bytes > 1000}
                      for rows in (collectives(compiled(program)), expected_traffic(program.plan)))
    assert sent.keys() == expected.keys()
    for key, c in expected.items():
        assert sent[key].bytes == pytest.approx(c.bytes, rel=0.02), key
        assert sent[key].count == c.count or "tensor" not in key or "experts" in changes, key


@pytest.mark.parametrize("rows, time, sizes, where, wanted", [
    (8, 2048, dict(tensor=4), "tpu", 4), (32, 2048, dict(tensor=4), "tpu", 8),
    (8, 1024, dict(tensor=4), "tpu", 2), (6, 4096, dict(tensor=2), "tpu", 6),
    (1, 65_536, dict(tensor=2), "tpu", 1),
    (2, 2048, dict(tensor=2), "tpu", 1), (8, 2048, dict(tensor=4), "gpu", 1),
    (8, 2048, dict(tensor=1), "tpu", 1), (8, 2048, dict(tensor=2, seq=2), "tpu", 1)])
def test_the_number_of_strips(monkeypatch, rows, time, sizes, where, wanted):
    monkeypatch.undo()
    assert strips.count(rows, time, sizes, where) == wanted
