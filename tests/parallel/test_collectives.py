"""A TPU's form of a reduce-scatter, on CPU devices."""

import pytest

from tests.common import assert_same_on, full, slow
from tests.helpers import make, program_of
from zigzag.parallel import collectives
from zigzag.parallel.hlo import collectives as collectives_of
from zigzag.run.plan import compiled


@pytest.mark.parametrize("mesh, changes", [
    ("fsdp=8", {}), full("data=4,tensor=2", dict(zero=1)),
    full("fsdp=6", {}), slow("data=2,fsdp=2,tensor=2", dict(zero=2, accumulate=2)),
    slow("fsdp=4,tensor=2", dict(remat="full")),
    slow("data=2,fsdp=2,pipe=2", dict(schedule="1f1b")), slow("pipe=2,fsdp=2", dict(
        remat="full", microbatches=2))])
def test_exchanges_add_up_what_a_reduce_scatter_does(mesh, changes, monkeypatch):
    """Parts that are sent to the wrong device in one of the stages; a reduce-scatter that a TPU's
    compiler would turn into an all-reduce."""
    monkeypatch.setattr(collectives, "platform", lambda mesh=None: "tpu")
    changes = dict(d_model=48, d_ff=192, heads=4, batch=24, fsdp_min=64, **changes)
    assert_same_on(mesh, **changes)
    sent = {(c.kind, c.axis) for c in collectives_of(compiled(program_of(make(**changes), mesh)))}
    axis = "data" if "zero" in changes and "fsdp" not in mesh else "fsdp"
    assert ("all-to-all", axis) in sent and ("reduce-scatter", axis) not in sent
