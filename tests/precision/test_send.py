"""--send_dtype float8: what is rounded, by how much, and what isn't."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from precision import send
from tests.common import full, refuses
from tests.helpers import TINY, learn, losses_of, make, mesh_of, program_of, run_updates
from zigzag.core.mesh import by_path
from zigzag.parallel.jaxprs import equations_below

N = 4       # devices on the axis of the collectives below
# {name: (a collective, the spec of its result)}. x is [32, 3, 64] on each device.
COLLECTIVES = {
    "gather rows": (lambda x: lax.all_gather(x, "fsdp", axis=0, tiled=True), P("fsdp")),
    "gather columns": (lambda x: lax.all_gather(x[:, 0], "fsdp", axis=1, tiled=True), P("fsdp")),
    "scatter": (lambda x: lax.psum_scatter(
        x, "fsdp", scatter_dimension=0, tiled=True), P("fsdp")),
    "scatter columns": (lambda x: lax.psum_scatter(
        x[:, 0], "fsdp", scatter_dimension=1, tiled=True), P("fsdp")),
    "sum": (lambda x: lax.psum(x, "fsdp"), P()),
    "sum of five rows": (lambda x: lax.psum(x[:5, 0], "fsdp"), P()),
    "permute": (lambda x: lax.ppermute(x, "fsdp", [(i, (i + 1) % N) for i in range(N)]), P("fsdp")),
    "exchange": (lambda x: lax.all_to_all(x, "fsdp", 0, 0, tiled=True), P("fsdp"))}


def numbers(shape, seed=0):
    """Rows of very different magnitudes, with zeros among them, in bfloat16."""
    rng = np.random.default_rng(seed)
    rows = 10.0 ** rng.integers(-6, 6, (*shape[:-1], 1)) * (rng.random((*shape[:-1], 1)) < 0.9)
    return jnp.asarray(rng.normal(size=shape) * rows, jnp.bfloat16)


def both_ways(collective, spec, x):
    """A collective's result, on N devices, as it is and in 8 bits."""
    def on_mesh(x):
        return jax.shard_map(collective, mesh=mesh, in_specs=P("fsdp"), out_specs=spec)(x)

    mesh = mesh_of(f"fsdp={N}")
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(on_mesh)(x)
        rounded = send.in_8_bits(jaxpr)
        types = [[v.aval for v in j.jaxpr.outvars] for j in (jaxpr, rounded)]
        assert types[0] == types[1]
        in_8_bits, = jax.jit(jax.extend.core.jaxpr_as_fun(rounded))(x)
        return np.float32(jax.jit(on_mesh)(x)), np.float32(in_8_bits)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_differs_by_its_rounding(name):
    """A row with another row's exponent, a part from another device, a sum that is rounded twice
    as often, a result whose type still varies."""
    collective, spec = COLLECTIVES[name]
    x = numbers((N * 32, 3, 64))
    want, got = both_ways(collective, spec, x)
    assert got.shape == want.shape and (got != want).any()
    size = np.abs(np.float32(x))        # a row's largest number is rounded to 1/16 of itself
    size, _ = both_ways(collective, spec, jnp.asarray(size, jnp.bfloat16))
    # A number is off by at most 1/16 of itself, or by 2^-17 of its row's largest. A sum is off by
    # as much of its terms' magnitudes; an all-reduce rounds the sum once more. (bfloat16 rounds
    # sums, too: 1/15.)
    times = 2 if name.startswith("sum") else 1
    peak = (size.reshape(N, 32, -1).max(1, keepdims=True).repeat(32, 1).reshape(size.shape)
            if name.endswith("columns") else size.max(-1, keepdims=True))
    assert (np.abs(got - want) <= times * (size / 15 + peak / 2**17)).all()


def test_a_row_is_restored():
    """A row of zeros that becomes NaN, a largest number that overflows, a NaN that a step no
    longer sees, rounding that isn't to the nearest."""
    for scale in (1e-15, 1.0, 447.0, 449.0, 3e15):
        x = numbers((64, 128)) * jnp.bfloat16(scale)
        y = np.asarray(send.unpacked(send.packed(x, 1), 1))
        a = np.float32(x)
        assert (np.abs(y - a) <= np.abs(a) / 16 + np.abs(a).max(1, keepdims=True) / 2**17).all()
        assert (y[~a.any(1)] == 0).all()
    exact = jnp.asarray([[1.0] * 31 + [448.0], [0.0] * 32, [-1.75] * 32], jnp.bfloat16)
    assert (send.unpacked(send.packed(exact, 1), 1) == exact).all()
    for bad in jnp.inf, -jnp.inf, jnp.nan:
        y = send.unpacked(send.packed(exact.at[0, 3].set(bad), 1), 1)
        assert not jnp.isfinite(y[0]).any() and jnp.isfinite(y[1:]).all()
    assert send.packed(exact, 1).shape == (3, 32 + send.PAD)


@pytest.mark.parametrize("x, axes", [
    (jnp.ones((8, 64), jnp.float32), "fsdp"), (jnp.ones((8, 64), jnp.int32), "fsdp"),
    (jnp.ones(64, jnp.bfloat16), "fsdp"), (jnp.ones((64, 8), jnp.bfloat16), "fsdp"),
    (jnp.ones((8, 64), jnp.bfloat16), "data"), (jnp.ones((8, 64), jnp.bfloat16), "expert"),
    (jnp.ones((8, 64), jnp.bfloat16), ("data", "fsdp"))], ids=str)
def test_the_rest_is_sent_as_before(x, axes):
    """The softmax's statistics, a gradient in float32 or over data, ids, or a vector in 8 bits."""
    mesh = mesh_of("data=2,fsdp=2,expert=2")
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.shard_map(
            lambda x: lax.psum(lax.pcast(x, axes, to="varying"), axes), mesh=mesh, in_specs=P(),
            out_specs=P()))(x)
        assert any(eqn.primitive.name == "psum_invariant" for eqn, _ in equations_below(jaxpr))
        assert send.in_8_bits(jaxpr) is jaxpr


WIDE = dict(d_model=64, d_ff=128, seq_len=32, batch=16, layers=4, fsdp_min=64, dtype="bfloat16")


@pytest.mark.parametrize("mesh, changes", [
    ("fsdp=2,tensor=2", {}),
    full("fsdp=8", dict(accumulate=2)), full("fsdp=2,pipe=2", dict(remat="full")),
    full("fsdp=2,pipe=2,tensor=2", dict(schedule="1f1b", microbatches=4)),
    full("tensor=4", dict(overlap=True)), full("tensor=4", dict(seq_len=30)),
    full("data=2,fsdp=2,tensor=2", dict(zero=1))])
def test_gradients_differ_by_their_rounding(mesh, changes):
    """A collective whose transpose isn't rounded like itself, or one in a loop, a branch or a
    recomputed layer that is wrong there. e4m3 rounds a number by 2.5% of itself (a mean square over
    magnitudes); a gradient here goes through about two roundings in each of four layers, which are
    independent: 2.5% of the square root of 8 is 7%. We allow twice that."""
    exact, rounded = (run_updates(make(**{**WIDE, **changes, "send_dtype": dtype}), mesh, 1)[0]
                      for dtype in ("", "float8"))
    assert exact.losses != rounded.losses
    assert rounded.losses == pytest.approx(exact.losses, rel=0.005)
    got = by_path(rounded.gradient)
    for path, want in by_path(exact.gradient).items():
        assert np.linalg.norm(got[path] - want) <= 0.14 * np.linalg.norm(want), path


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "fsdp=2,pipe=2", "fsdp=8"])
def test_a_run_learns_as_well(mesh):
    """Rounding that has a bias: gradients that are a little too small in each update."""
    config = {**TINY, **WIDE, "steps": 200, "eval_every": 0, "batch": 16}
    ends = []
    for changes in (dict(dtype="float32"), dict(dtype="bfloat16", send_dtype="float8")):
        rows, _ = learn(make(**{**config, **changes}), mesh)
        ends.append(np.mean(losses_of(rows)[-20:]))
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


def test_what_it_cannot_do_is_one_line():
    """A flag that is read and does nothing."""
    with refuses("--send_dtype float8: .* computes in float32; give --dtype bfloat16"):
        program_of(make(send_dtype="float8"), "fsdp=2")
    with refuses("--send_dtype float8: needs --collectives explicit"):
        program_of(make(send_dtype="float8", dtype="bfloat16", collectives="compiler"), "fsdp=2")
    with refuses("--send_dtype float8: --accept compares"):
        program_of(make(send_dtype="float8", dtype="bfloat16", accept=0.01), "fsdp=2")
    with refuses("--send_dtype float9: expected float8"):
        make(send_dtype="float9")
