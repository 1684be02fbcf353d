"""--overlap: products in parts of the time, beside what sends them."""

import re

import pytest

import model
import train
from published.llama import OF_TRAINING
from tests.common import assert_same_on, full, peer
from tests.forecast.test_traffic import ONE_F_ONE_B, sent_and_expected
from tests.helpers import make, program_of
from zigzag.core.options import options
from zigzag.parallel.network import ComputeOptions

CASES = [
    ("tensor=4", dict(remat="full")),
    full("tensor=3", dict(seq_len=24, heads=12, d_model=48, d_ff=96)),
    full("tensor=4", dict(remat="selective")),
    full("fsdp=2,tensor=4", dict(biases="mlp", fsdp_min=64)),
    full("tensor=2", dict(parallel_block=True, biases="qkv,out,mlp")),
    full("tensor=4", dict(heads=12, kv_heads=3, head_dim=8)),
    full("tensor=4", dict(heads=9, kv_heads=3, head_dim=8)),
    full("tensor=4", dict(seq_len=18)), full("seq=2,tensor=2", dict(kv_heads=2)),
    full("pipe=2,tensor=2", dict(microbatches=2, remat="full", layers=4, **ONE_F_ONE_B)),
    full("fsdp=2,pipe=2,tensor=2", dict(microbatches=2)),
    full("expert=2,tensor=2", dict(experts=4, shared_experts=1)),
    full("tensor=2", dict(experts=4, parallel_block=True, shared_experts=1))]


@pytest.mark.parametrize("mesh, changes", CASES)
def test_products_in_parts_are_the_same(mesh, changes):
    """A part in the place of another device's; a gradient of all parts but one."""
    assert_same_on(mesh, overlap=True, **changes)


@pytest.mark.parametrize("mesh, changes", CASES)
def test_parts_travel_in_place_of_a_gather(mesh, changes):
    """Gathers and scatters that are still there; parts that are sent more often than needed."""
    program = program_of(make(overlap=True, vocab_size=384, accumulate=2, **changes), mesh)
    sent, expected = ({kind: c.count for (kind, axis), c in found.items() if axis == "tensor"
                       and kind != "all-reduce"} for found in sent_and_expected(program))
    assert sent == expected
    assert ("collective-permute" in sent) == (changes.get("seq_len") != 18)


def test_options_of_computing_ask_for_no_other_network():
    """--overlap that trains the general network in place of model.py."""
    assert options(ComputeOptions).keys() <= OF_TRAINING
    assert type(make(overlap=True).network) is model.Config


def beside_sends(step, kind):
    """{an asynchronous send of this kind in a program: the products between its start and its end},
    and the number of other sends of this kind."""
    travelling, beside = {}, {}
    for line in step.as_text().splitlines():
        if started := re.search(rf"%(\S+) = .*{kind}-start\(", line):
            travelling[started[1]] = 0
        elif ended := re.search(rf"{kind}-done\(%([^),]+)", line):
            beside[ended[1]] = travelling.pop(ended[1])
        elif re.search(r"= .*(convolution|fusion)\(.*(dot_general|convolution)", line):
            travelling = {name: count + 1 for name, count in travelling.items()}
    return beside, len(re.findall(rf" {kind}\(", step.as_text()))


def compiled_for_v5e(*words):
    peer("libtpu")
    return train.compile_step(train.parse([
        "--topology", "v5e:2x2", "--layers", "2", "--d_model", "256", "--heads", "4",
        "--seq_len", "512", "--vocab_size", "512", "--out", "", *words]))


@pytest.mark.full
def test_a_tpu_multiplies_while_parts_travel():
    """Parts that are sent only after, or only before, all products."""
    beside, others = beside_sends(compiled_for_v5e(
        "--mesh", "tensor=4", "--overlap", "true", "--batch", "2"), "collective-permute")
    # Four ways into and out of a block, each of three parts.
    assert sum(map(bool, beside.values())) >= 16 and not others


@pytest.mark.full
def test_a_tpu_multiplies_while_gradients_travel():
    """Exchanges of gradients over fsdp for which all products wait, as without the option."""
    beside, others = beside_sends(compiled_for_v5e("--mesh", "fsdp=4", "--batch", "8"),
                                  "all-to-all")
    # (One of the embedding has nothing beside it.)
    assert sum(map(bool, beside.values())) >= 5 and others <= 2, (beside, others)
