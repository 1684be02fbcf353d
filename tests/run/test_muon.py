"""Each of Muon's matrices has one home. On any mesh: a device that computes more than its share, or
sends more than the formula says, and an update that is not optax's."""

import jax
import numpy as np
import optax
import pytest

from forecast import traffic
from tests.common import full
from tests.helpers import make, program_of
from zigzag.core.mesh import by_path, shardings
from zigzag.parallel import hlo
from zigzag.parallel.rule import matrices_of_layers
from zigzag.run import muon

# Matrices of several shapes, of which some are square; key heads that tensor=4 does not divide.
MODEL = dict(layers=4, experts=4, kv_heads=2)
MESHES = [full("data=8", {}), ("fsdp=2,tensor=2,data=2", {}), full("pipe=2,tensor=2,data=2", {}),
          ("fsdp=2,tensor=2,data=2", dict(zero=1)), full("fsdp=4,expert=2", {}),
          full("tensor=4,seq=2", {}), full("data=2,fsdp=4", dict(layers=3)),
          full("pipe=4,fsdp=2", {}), full("data=4,tensor=2", dict(collectives="compiler")),
          full("expert=4,tensor=2", dict(experts=8, shared_experts=1))]


def updates_of(mesh, transform=None, dtype="float64", **changes):
    """Muon's update of random gradients on a mesh: by path, its compiled program and its plan."""
    plan = program_of(make(optimizer="muon", **{**MODEL, **changes}), mesh).plan
    chosen = (transform or muon.muon)(plan.config, plan.trained)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    with jax.enable_x64(dtype == "float64"), jax.set_mesh(plan.mesh):
        grads = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape, dtype), plan.params)
        places = shardings(plan.optimizer_specs, plan.mesh)
        compiled = jax.jit(lambda g: chosen.update(g, chosen.init(g), g)[0],
                           out_shardings=places).lower(jax.device_put(grads, places)).compile()
        return by_path(compiled(jax.device_put(grads, places))), compiled, plan


def of_optax(config, decisions):
    dims = jax.tree.map(lambda _, dims: dims and optax.contrib.MuonDimensionNumbers(*dims),
                        decisions, matrices_of_layers(decisions))
    return optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dims,
                              adam_b1=config.beta1, adam_b2=config.beta2)


@pytest.mark.parametrize("mesh, changes", [("", {}), *MESHES])
def test_an_update_is_that_of_optax_on_one_device(mesh, changes):
    """A part that comes back to the wrong place; a matrix that nobody, or a wrong device, handles.
    In float64, because five iterations make a rounding error some 500 times as large."""
    ours, _, _ = updates_of(mesh, **changes)
    same = {name: value for name, value in changes.items() if name not in ("zero", "collectives")}
    optaxs, _, _ = updates_of("", of_optax, **same)
    for path, want in optaxs.items():
        np.testing.assert_allclose(ours[path], want, atol=1e-9, err_msg=path)


@pytest.mark.parametrize("mesh, changes", MESHES)
def test_a_device_computes_its_share(mesh, changes):
    """Work that devices repeat, which the compiler alone leaves to all of them. What a device does
    is ceil(count / n) of a pool's matrices, in which matmuls outweigh what is done to each element.
    """
    _, compiled, plan = updates_of(mesh, dtype="float32", d_model=64, **changes)
    same = {name: value for name, value in changes.items() if name not in ("zero", "collectives")}
    _, alone, _ = updates_of("", dtype="float32", d_model=64, **same)
    done = total = 0
    for pool in muon.pools_of(plan):
        flops = min(pool.matrix) ** 2 * (2 * max(pool.matrix) + min(pool.matrix))
        done += flops * -(-pool.count // plan.mesh.size)
        total += flops * pool.count
    share = compiled.cost_analysis()["flops"] / alone.cost_analysis()["flops"]
    assert share == pytest.approx(done / total, rel=0.05)
    assert 1 - muon.idle(plan) == pytest.approx(total / done / plan.mesh.size)


@pytest.mark.parametrize("mesh, changes", MESHES)
def test_an_update_sends_what_is_expected(mesh, changes):
    """A gather of whole matrices; empty room in what is sent, where homes are many."""
    _, compiled, plan = updates_of(mesh, dtype="float32", **changes)
    sent = {(row.kind, row.axis): row.bytes for row in hlo.collectives(compiled)}
    rows = [(kind, axes, int(np.prod([plan.mesh.shape[a] for a in axes.split("+")])), *sizes)
            for kind, axes, *sizes in traffic.of_muon(plan) if axes]
    want = {(row.kind, row.axis): row.bytes for row in hlo.add_up(rows)}
    assert sent == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("mesh, changes", MESHES[:4])
def test_the_momentum_is_split_as_the_weights_are(mesh, changes):
    """A momentum that is whole on every device (it once was, as the rule read a loop that never
    runs)."""
    program = program_of(make(optimizer="muon", **{**MODEL, **changes}), mesh)
    found = by_path(program.state["opt"])
    for path, spec in by_path(program.plan.optimizer_specs).items():
        moments = [x for at, x in found.items() if at.endswith(f"mu.{path}")]
        assert moments and all(x.sharding.spec == spec for x in moments), path
