"""The collectives of compiled programs, compared with counts by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers import mesh_of
from zigzag.core.mesh import abstract_mesh
from zigzag.parallel import hlo


def test_collectives_are_counted_by_hand():
    """A loop's body that counts once; a joint reduction over two axes with the wrong size."""
    mesh = mesh_of("data=2,fsdp=2,tensor=2")

    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    def body(x, w):
        x = jax.lax.pcast(jax.lax.psum(x, "data"), ("data",), to="varying")
        x = x @ jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)
        x = jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
        x = jax.lax.psum_scatter(x, ("data", "fsdp"), scatter_dimension=0, tiled=True)
        return jax.lax.all_gather(x, ("data", "fsdp"), axis=0, tiled=True), None

    def loop(x, ws):
        x = jax.lax.pcast(x, ("data", "fsdp", "tensor"), to="varying")
        return jax.lax.scan(body, x, ws)[0][None]

    f = jax.shard_map(loop, mesh=mesh, in_specs=(P(), P(None, "fsdp")),
                      out_specs=P(("data", "fsdp", "tensor")))
    compiled = jax.jit(f, in_shardings=(place(), place(None, "fsdp"))).lower(
        jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))).compile()
    x = 4 * 8 * 16
    assert {(c.kind, c.axis): (c.count, c.bytes) for c in hlo.collectives(compiled)} == {
        ("all-reduce", "data"): (5, 5 * x),
        ("all-gather", "fsdp"): (5, 5 * 4 * 16 * 16 // 2),
        ("collective-permute", "tensor"): (5, 5 * x),
        ("reduce-scatter", "data+fsdp"): (5, 5 * x * 3 // 4),
        ("all-gather", "data+fsdp"): (5, 5 * x * 3 // 4)}


@pytest.mark.parametrize("groups, axis, n", [
    ("{{0,1},{2,3},{4,5},{6,7}}", "tensor", 2),
    ("{}", "data+fsdp+tensor", 8),
    ("[4,2]<=[8]", "tensor", 2),
    ("[4,2]<=[2,4]T(1,0)", "data", 2),
    ("[4,2]<=[2,2,2]T(0,2,1)", "fsdp", 2),
    ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}", "fsdp", 2),
    ("mesh['a'=1,'b'=2,'c'=2,'d'=2], device_ids=([2,2,2]T(2,1,0)) {'d','c'}", "data+fsdp", 4)])
def test_groups_of_devices_are_read_in_every_spelling(groups, axis, n):
    """A wrong axis, for a transposed iota or for a mesh with its devices in another order."""
    mesh = mesh_of("data=2,fsdp=2,tensor=2")
    found = hlo._groups(f"replica_groups={groups}, use_global_device_ids=true", mesh)
    assert (hlo._axes_within(found, mesh), len(found[0])) == (axis, n)


def of_text(text, **sizes):
    """A compiled program that prints as this text."""
    return SimpleNamespace(as_text=lambda: text,
                           input_shardings=[NamedSharding(abstract_mesh(sizes), P())])


CHAIN = """
%start.1 (p.1: bf16[1,88,512]) -> bf16[1,1408,512] {
  %all-gather.1 = bf16[1,1408,512]{2,1,0} all-gather(%p.1), replica_groups={{0,1,2,3,4,5,6,7,8,9,\
10,11,12,13,14,15}}, dimensions={1}, frontend_attributes={chain_id="5"}
  ROOT %custom-call.1 = (bf16[1,88,512]{2,1,0}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%step.1 (p.2: bf16[1,88,512]) -> bf16[1,1408,512] {
  %all-gather.2 = bf16[1,1408,512]{2,1,0} all-gather(%p.2), replica_groups={{0,1,2,3,4,5,6,7,8,9,\
10,11,12,13,14,15}}, dimensions={1}, frontend_attributes={chain_id="5"}
}

ENTRY %main.1_spmd (p.3: bf16[1,88,512]) -> bf16[1,1408,512] {
  %fusion.1 = bf16[1,1408,512]{2,1,0} fusion(%p.3), kind=kCustom, calls=%start.1
  %fusion.2 = bf16[1,1408,512]{2,1,0} fusion(%p.3), kind=kCustom, calls=%step.1
}
"""


def test_a_collective_that_a_tpu_overlaps_is_counted_once():
    """An overlapped gather counted three times, because it is in each computation of its chain."""
    size = 2 * 1408 * 512 * 15 // 16
    assert hlo.collectives(of_text(CHAIN, fsdp=16)) == [("all-gather", "fsdp", 1, size)]


PERMUTE = """
ENTRY %main.1_spmd (p.3: bf16[4,128,512]) -> bf16[4,128,512] {
  %permute.1 = (bf16[4,128,512]{2,1,0}, bf16[4,128,512]{2,1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%p.3), channel_id=1, source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},\
{6,2},{3,7},{7,3}}, metadata={op_name="jit(step)/ppermute"}
  %permute.2 = bf16[4,128,512]{2,1,0} collective-permute-done(%permute.1)
}
"""


def test_what_is_started_is_sent_once():
    """Bytes counted twice or more: the result of a start includes its operands, and there is a
    done."""
    assert hlo.collectives(of_text(PERMUTE, pipe=2, tensor=4)) == [
        ("collective-permute", "pipe", 1, 2 * 4 * 128 * 512)]
