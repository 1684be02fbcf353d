"""The mesh, and the types that say over which axes values differ."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shard
from tests.helpers import mesh_of
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import AXES, drop_trivial_axes, keep_on_first, make_mesh, varying

# -------------------------------------------------------------------------------------------
# Meshes

@pytest.mark.parametrize("sizes, shape", [
    ({}, (8, 1, 1, 1, 1, 1)), ({"tensor": 4}, (2, 1, 1, 1, 1, 4)),
    ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 1, 1, 2))])
def test_data_takes_the_devices_that_are_left(sizes, shape):
    """A mesh in which tensor is not innermost, where neighbours are the closest devices."""
    mesh = make_mesh(**sizes)
    assert mesh.devices.shape == shape and mesh.axis_names == AXES
    assert [d.id for d in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize("sizes, words", [
    ({"tensor": 3}, ("tensor=3", "8", "1, 2, 4, 8")), ({"tensor": 16}, ("16", "8")),
    ({"tensr": 2}, ("tensr", "'tensor'"))])
def test_an_impossible_mesh_names_the_numbers(sizes, words):
    """An error from inside jax, or one that does not say what would be accepted."""
    with pytest.raises(ConfigError) as e:
        make_mesh(**sizes)
    assert all(w in str(e.value) for w in words), e.value


def test_axes_of_one_device_are_in_no_spec():
    """Axes of size 1 in specs: the compiler fails on them, or emits collectives of whole gradients
    within groups of one device."""
    mesh = mesh_of("fsdp=2,tensor=2")
    assert drop_trivial_axes(P(("data", "fsdp", "expert"), "seq", "tensor"), mesh) == P(
        "fsdp", None, "tensor")
    assert drop_trivial_axes(P("data", ("pipe", "seq")), mesh) == P()


# -------------------------------------------------------------------------------------------
# Varying types

def test_a_value_that_is_equal_on_all_devices_is_counted_once():
    """A sum over an axis of equal values, which is too large by the number of devices."""
    def local(rows, whole):
        sums = keep_on_first((rows.sum(), whole.sum()), {"data", "seq"})
        assert [varying(x) for x in sums] == [{"data", "seq"}] * 2
        return shard.sum_gradients(sums, {"data", "seq"})

    with jax.set_mesh(mesh_of("data=2,seq=2")):
        rows, whole = jax.jit(jax.shard_map(local, in_specs=(P("data"), P()), out_specs=P()))(
            jnp.ones((2, 8)), jnp.ones(8))
    assert (rows, whole) == (16, 8)
