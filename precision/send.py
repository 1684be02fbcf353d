"""--send_dtype float8: what fsdp, tensor and pipe send takes 8 bits per number.

We trace the step (its forward and backward passes are both in it by then) and replace each
collective over one of these axes whose operand is a 16-bit float array with long rows:

    all-gather, permute, all-to-all     round, send 8 bits, restore
    reduce-scatter                      round, all-to-all in 8 bits, restore, add in float32
    all-reduce                          that, then an all-gather in 8 bits of the result

Whatever isn't replaced is sent as before: float32 arrays (the softmax's statistics, gradients
summed in float32), vectors, integers, and everything over data, seq and expert. The state and the
products keep their dtypes, and so do the types of varying axes.

A row becomes float8 (e4m3: 3 bits of mantissa) divided by a power of two, whose exponent travels
in the same array. So a number of the row's magnitude is off by at most 1/16 of itself, and nothing
overflows:

    x      bfloat16 [.., N]        sent    uint8 [.., N + 4]    N numbers, and 4 times the exponent

The array is uint8, because some compilers widen float8 before they send it, and all of them send
bytes as bytes. (We pad the exponent to 4 bytes to keep rows aligned.)
"""

import functools
from typing import Any, Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from zigzag.core.errors import ConfigError
from zigzag.parallel.jaxprs import equations_below
from zigzag.run.modes import JIT

AXES = {"fsdp", "tensor", "pipe"}
# The shortest row to send in 8 bits, and the bytes of its exponent.
ROW, PAD = 32, 4
# {a collective: the parameters that name the dimensions it cuts or joins}
DIMS = {"all_gather": ["all_gather_dimension"], "all_gather_invariant": ["all_gather_dimension"],
        "all_to_all": ["split_axis", "concat_axis"], "ppermute": [],
        "reduce_scatter": ["scatter_dimension"], "psum": [], "psum_invariant": []}
# {a collective that adds: the collectives that take its place}
SENT = {"reduce-scatter": ["all-to-all"], "all-reduce": ["all-to-all", "all-gather"]}


def rewritten(step: Callable, plan: Any) -> Callable:
    """Return the step that sends 8 bits, or say why there is none."""
    asked = "--send_dtype float8"
    if jnp.dtype(plan.dtype).itemsize != 2:
        raise ConfigError(f"{asked}: rounds what would otherwise be sent in 16 bits, and this run "
                          f"computes in {plan.dtype}; give --dtype bfloat16")
    if getattr(plan.config, "accept", 0):
        raise ConfigError(f"{asked}: --accept compares gradients that are sent without it; leave "
                          f"one of the two out")
    if plan.mode == JIT:
        raise ConfigError(f"{asked}: needs --collectives explicit")

    def sends_less(*args):
        traced, made = jax.make_jaxpr(step, return_shape=True)(*args)
        step_in_8_bits = jaxpr_as_fun(in_8_bits(traced))
        return jax.tree.unflatten(jax.tree.structure(made), step_in_8_bits(*jax.tree.leaves(args)))

    return sends_less


# -------------------------------------------------------------------------------------------
# The program

def in_8_bits(jaxpr: Any) -> Any:
    """Return a Jaxpr or a ClosedJaxpr whose collectives send 8 bits where they can. One without
    such collectives stays the same object, so that jax still knows it."""
    if isinstance(jaxpr, ClosedJaxpr):
        inner = in_8_bits(jaxpr.jaxpr)
        return jaxpr if inner is jaxpr.jaxpr else ClosedJaxpr(inner, jaxpr.consts)
    if not any(sender(eqn) for eqn, _ in equations_below(jaxpr)):
        return jaxpr
    return jaxpr.replace(eqns=[*map(_equation, jaxpr.eqns)])


def _equation(eqn):
    """Return an equation, or the call to put in its place, with the same operands and results."""
    p = eqn.params
    if send := sender(eqn):
        return _calling(send, eqn)
    if eqn.primitive.name == "shard_map":       # only inside does jax know the mesh axes
        def on_device(*xs):
            return (*jaxpr_as_fun(ClosedJaxpr(in_8_bits(p["jaxpr"]), ()))(*xs),)

        return _calling(jax.shard_map(
            on_device, mesh=p["mesh"], axis_names=set(p["newly_manual_axes"]),
            in_specs=tuple(p["in_specs"]), out_specs=tuple(p["out_specs"]),
            check_vma=p["check_vma"]), eqn)
    return eqn.replace(params={name: _parameter(value) for name, value in p.items()})


def _parameter(value):
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return in_8_bits(value)
    return tuple(map(_parameter, value)) if type(value) is tuple else value


def _calling(fn, eqn):
    """Return an equation that calls fn instead."""
    call, = jax.make_jaxpr(jax.jit(fn))(*[v.aval for v in eqn.invars]).eqns
    assert [v.aval for v in call.outvars] == [v.aval for v in eqn.outvars], (call, eqn)
    return eqn.replace(primitive=call.primitive, params=call.params, effects=call.effects)


def sender(eqn: Any) -> Callable | None:
    """Return the function that sends an equation's operand in 8 bits; None to send it as before."""
    name, p = eqn.primitive.name, eqn.params
    if name not in DIMS or len(eqn.invars) != 1:
        return None
    axes, x = p.get("axis_name", p.get("axes")), eqn.invars[0].aval
    axis, *others = axes if isinstance(axes, tuple) else (axes,)
    along = max({*range(x.ndim)} - {p[dim] for dim in DIMS[name]}, default=0)   # a row's dimension
    if (others or axis not in AXES or not p.get("tiled", True)
            or x.dtype not in (jnp.bfloat16, jnp.float16) or x.ndim < 2 or x.shape[along] < ROW):
        return None
    n, has_groups = eqn.ctx.cur_abstract_mesh.shape[axis], p.get("axis_index_groups") is not None
    if n == 1 or has_groups and name != "all_to_all":
        return None
    if name == "reduce_scatter":
        return functools.partial(reduce_scatter, axis=axis, n=n, dim=p["scatter_dimension"],
                                 along=along)
    if name.startswith("psum"):
        rows = x.size // x.shape[-1]
        return functools.partial(psum, axis=axis, n=n, to=name) if rows >= n else None
    return lambda x: unpacked(eqn.primitive.bind(packed(x, along), **p), along).astype(x.dtype)


def rows_in_8_bits(rows: Iterable[tuple], sizes: Any, itemsize: int) -> Iterator[tuple]:
    """Yield what is sent in place of the rows of forecast/traffic.py: (kind, axes, count, bytes),
    and, if each number takes `itemsize` bytes there, the length of the array's rows."""
    for kind, axes, count, size, *length in rows:
        names = [axis for axis in axes.split("+") if sizes.get(axis, 1) > 1]
        if len(names) == 1 and names[0] in AXES and length and length[0] >= ROW:
            for sent in SENT.get(kind, [kind]):
                yield sent, axes, count, size / itemsize * (1 + PAD / length[0])
        else:
            yield kind, axes, count, size


# -------------------------------------------------------------------------------------------
# Collectives

def reduce_scatter(x: jax.Array, axis: str, n: int, dim: int, along: int) -> jax.Array:
    """Sum x over an axis's n devices, each of which keeps its part along `dim`."""
    parts = unpacked(lax.all_to_all(packed(x, along), axis, dim, dim, tiled=True), along)
    parts = parts.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1:])
    return parts.sum(dim).astype(x.dtype)


def psum(x: jax.Array, axis: str, n: int, to: str) -> jax.Array:
    """Sum x over an axis's n devices, as the primitive `to` does. Each adds an n-th of the rows."""
    rows = x.reshape(-1, x.shape[-1])
    rows = jnp.pad(rows, ((0, -len(rows) % n), (0, 0)))
    part = packed(reduce_scatter(rows, axis, n, 0, 1), 1)
    whole = lax.all_gather(part, axis, axis=0, tiled=True,
                           to="invarying" if to == "psum_invariant" else "varying")
    return unpacked(whole, 1).astype(x.dtype)[:x.size // x.shape[-1]].reshape(x.shape)


# -------------------------------------------------------------------------------------------
# Bytes

def packed(x: jax.Array, along: int) -> jax.Array:
    """Return x as bytes: along `along`, each number's float8 and then the exponent, PAD times."""
    # The barrier keeps XLA from multiplying by our factor inside the expression that makes x, whose
    # parts may then overflow (on a CPU, it made NaN of a row of zeros).
    x = lax.optimization_barrier(x).astype(jnp.float32)
    peak = jnp.abs(x).max(along, keepdims=True)
    # Float8 ends at 448, 7/8 of a power of two. A row that isn't finite gets 255, which restores
    # NaN or infinity. The least exponent keeps the factor moderate; such a row is 0 in effect.
    exponent = lax.bitcast_convert_type(peak * (8 / 7), jnp.uint32) >> 23
    exponent = jnp.where(exponent == 255, 255, jnp.maximum(exponent, 40) - 8)
    numbers = (x * _power_of_two(254 - jnp.minimum(exponent, 254))).astype(jnp.float8_e4m3fn)
    return jnp.concatenate([lax.bitcast_convert_type(numbers, jnp.uint8),
                            jnp.repeat(exponent.astype(jnp.uint8), PAD, along)], along)


def unpacked(x: jax.Array, along: int) -> jax.Array:
    """Return the numbers in float32 that `packed` rounded."""
    size = x.shape[along] - PAD
    numbers = lax.slice_in_dim(x, 0, size, axis=along)
    exponent = lax.slice_in_dim(x, size, size + 1, axis=along)
    return (lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn).astype(jnp.float32)
            * _power_of_two(exponent.astype(jnp.uint32)))


def _power_of_two(exponent):
    """Return 2 to the power exponent - 127, in float32 (0 for 0, infinity for 255)."""
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
