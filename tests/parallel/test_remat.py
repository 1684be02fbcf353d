"""--remat: what is computed again, and what of it is kept or sent less or more."""

import pytest

import train
from forecast.estimate import peak_memory
from tests.common import assert_same_on, full, peer, refused, slow, temporaries
from tests.forecast.test_traffic import ONE_F_ONE_B
from tests.helpers import make
from zigzag.parallel.remat import remat_of

EXPERTS = dict(experts=4, shared_experts=1)
CASES = [
    ("tensor=2", "full:0.4", dict(layers=5)),
    ("fsdp=2,tensor=2", "attention,mlp", dict(fsdp_min=64)),
    slow("fsdp=2,tensor=2", "full:0.5", dict(fsdp_min=64, biases="mlp")),
    slow("pipe=2,tensor=2", "full:0.5", dict(microbatches=2)),
    slow("pipe=2,fsdp=2", "full:0.5", dict(layers=8, microbatches=2, **ONE_F_ONE_B)),
    full("pipe=2,tensor=2", "full:0.25", dict(
        layers=8, microbatches=2, schedule="interleaved", chunks=2)),
    full("tensor=4", "full:0.75", dict(overlap=True)),
    full("tensor=4", "full:0.5", dict(overlap=True, experts=4)),
    full("expert=2,tensor=2", "full:0.5", EXPERTS), slow("expert=2,tensor=2", "mlp", EXPERTS),
    full("pipe=2,tensor=2", "mlp", dict(microbatches=2)), full("tensor=4", "mlp", dict(
        overlap=True)),
    full("tensor=2", "attention", dict(parallel_block=True)),
    full("seq=2,tensor=2", "attention,mlp", {}),
    full("pipe=2,fsdp=2", "attention,mlp", dict(microbatches=2, **ONE_F_ONE_B)),
    slow("tensor=2", "offload", {}), full("pipe=2,fsdp=2", "offload", dict(microbatches=2))]


@pytest.mark.parametrize("mesh, remat, changes", CASES)
def test_what_is_computed_again_is_the_same(mesh, remat, changes):
    """Layers that are computed again in another order, or with another layer's weights, number or
    dropout; an MLP that reads what attention kept."""
    assert_same_on(mesh, remat=remat, dropout=0.1, **{"layers": 4, **changes})


def kept(remat, mesh="fsdp=2", **changes):
    return temporaries(make(**{"layers": 8, "d_model": 64, "d_ff": 512, "seq_len": 128,
                               "remat": remat, **changes}), mesh)


@pytest.mark.full
def test_less_is_kept_the_more_is_computed_again():
    """An option that changes nothing: the compiler merges what is computed again with what was, or
    an outer checkpoint keeps what an inner one dropped."""
    none, attention, mlp, both, half = map(kept, (
        "none", "attention", "mlp", "attention,mlp", "full:0.5"))
    assert max(attention, mlp, half) < 0.8 * none and both < 0.8 * min(attention, mlp)
    at = dict(mesh="seq=2", seq_len=512, d_ff=64)
    assert kept("attention", **at) < 0.8 * kept("none", **at)
    assert remat_of("full:0") == remat_of("none") and remat_of("full:1") == remat_of("full")


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["pipe=2", "tensor=2"])
def test_a_share_is_kept_on_any_mesh(mesh):
    """The checkpoint around a tick of the pipeline, which keeps everything of all layers."""
    none, half, full = (kept(remat, mesh, microbatches=2) for remat in ("none", "full:0.5", "full"))
    assert full < 0.9 * half < 0.81 * none


def test_a_share_is_of_whole_layers():
    assert [remat_of("full:0.5").count(layers) for layers in (1, 2, 3, 8)] == [1, 1, 2, 4]


def test_a_value_that_is_none_of_them(capsys):
    """A page of jax, or a run that recomputes nothing."""
    for value in ("some", "full:2", "full:x", "none:0.5", "mlp,attention"):
        assert f"--remat {value}: expected none" in refused(capsys, "--remat", value)


@pytest.mark.full
def test_inputs_of_layers_are_kept_in_the_hosts_memory():
    """--remat offload that keeps them on the device all the same."""
    peer("libtpu")
    peaks = [peak_memory(train.compile_step(train.parse([
        "--topology", "v5e:2x2", "--mesh", "fsdp=4", "--remat", remat, "--layers", "64",
        "--d_model", "256", "--heads", "4", "--seq_len", "1024", "--batch", "16",
        "--vocab_size", "512", "--out", ""]))) for remat in ("full", "offload")]
    inputs = 64 * 4 * 1024 * 256 * 2
    assert peaks[1] < peaks[0] - 0.5 * inputs
