"""RedCoast's own package beside zigzag, on one model: the comparison of docs/measurements.md."""

import json

import pytest

from tests.common import peer, succeeds


@pytest.mark.full
def test_a_step_sends_less_than_redcoasts():
    """More bytes than the source's own package for the same model on the same devices, more memory
    with the default --remat, or another loss: then the two steps do not compute the same."""
    peer("redco")
    done = succeeds(file="-m tests.forecast.redcoast")
    of = json.loads(done.stdout.splitlines()[-1])
    theirs, ours, default = (of[name] for name in (
        "RedCoast", "zigzag", "zigzag, its default remat"))
    assert theirs["collectives"] > 20 and theirs["sent"] > 1e7      # (their program was read)
    assert ours["sent"] < 0.4 * theirs["sent"] and default["sent"] < 0.5 * theirs["sent"]
    assert ours["temporaries"] < 1.2 * theirs["temporaries"]
    assert default["temporaries"] < 0.5 * theirs["temporaries"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
