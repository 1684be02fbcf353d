"""The bytes that --send_dtype float8 sends, compared with the formulas and with 16 bits."""

import pytest

from tests.common import full
from tests.forecast.test_traffic import ONE_F_ONE_B, sent_and_expected
from tests.helpers import make, program_of


@pytest.mark.parametrize("mesh, changes", [
    ("fsdp=2,tensor=2", {}),
    full("fsdp=8", dict(remat="full", batch=16)), full("tensor=4", dict(overlap=True)),
    full("tensor=4", dict(seq_len=18)), full("tensor=4", dict(heads=9, kv_heads=3, head_dim=32)),
    full("fsdp=2,pipe=2", dict(sum_dtype="float32")),
    full("fsdp=2,pipe=2,tensor=2", dict(layers=8, microbatches=2, chunks=2, **ONE_F_ONE_B)),
    full("expert=2,fsdp=2,tensor=2", dict(experts=4, shared_experts=1)),
    full("data=2,fsdp=2,tensor=2", dict(zero=1))])
def test_what_is_sent_is_what_is_expected(mesh, changes):
    """A row that says 16 bits, or an all-reduce that is two collectives now."""
    program = program_of(make(**{**dict(
        layers=4, d_model=64, head_dim=32, d_ff=128, vocab_size=128, dtype="bfloat16",
        send_dtype="float8", accumulate=2), **changes}), mesh)
    sent, expected = sent_and_expected(program)
    for key in sent.keys() | expected.keys():
        if key not in expected:
            assert sent[key].bytes < 200, key
            continue
        assert sent[key].bytes == pytest.approx(expected[key].bytes, rel=0.02, abs=200), key
        if key[0] != "all-reduce":
            assert sent[key].count == expected[key].count, key
