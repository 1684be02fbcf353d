"""Reading a jaxpr: the list of operations that jax records when it traces a function.

These functions answer questions about a user's function without running it: which of our functions
it calls (`names_in`), whether it computes in 16 bits (`computes_in_16_bits`), and why the compiler
must not split it (`why_not_split`). Each takes the function and its arguments, or the ClosedJaxpr
from jax.make_jaxpr, so a caller with several questions can trace just once. How to split the
weights is a bigger question: see trace.py and rule.py.
"""

import functools
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from zigzag.core.mesh import ambient

DIFFERENTIATED = "differentiated"
OURS = "shard."         # the prefix of our names, because a user's checkpoint_name may be "row"
REDUCTIONS = set("""reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or
reduce_xor argmax argmin""".split())


def _traced(fn, *args):
    """Return the jaxpr of fn(*args), or of `fn` itself if it's already a ClosedJaxpr."""
    return (fn if isinstance(fn, ClosedJaxpr) else jax.make_jaxpr(fn)(*args)).jaxpr


def equations_below(jaxpr: Any, above: tuple = ()) -> Iterator[tuple[Any, tuple]]:
    """Yield every equation of a jaxpr and of the jaxprs nested in it, each with the equations that
    enclose it."""
    for eqn in jaxpr.eqns:
        yield eqn, above
        for inner in jaxprs_in_params(eqn.params):
            yield from equations_below(inner, (*above, eqn))


def interpret(jaxpr: Any, operands: list[Any], constant: Callable,
              operation: Callable) -> list[Any]:
    """Evaluate a jaxpr on abstract values and return its results. constant(v) returns the value of
    a constant or a literal; operation(eqn, operands) returns the list of an equation's results."""
    values = {v: constant(v) for v in jaxpr.constvars} | dict(zip(jaxpr.invars, operands))

    def read(variables):
        return [constant(v) if isinstance(v, Literal) else values[v] for v in variables]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, operation(eqn, read(eqn.invars))))
    return read(jaxpr.outvars)


def inner_call(eqn: Any, operands: list[Any]) -> tuple[Any, list[Any]] | None:
    """Return the jaxpr that an operation calls and the operands it passes on (the last ones), or
    None if it calls none. We match the ranks of operands and results, which works for jit, remat,
    custom_vjp, shard_map and any calls that future versions of jax add. A reduction also carries
    the jaxpr of its scalar operation, but that isn't a call."""
    if eqn.primitive.name in REDUCTIONS:
        return None
    for param in eqn.params.values():
        jaxpr = getattr(param, "jaxpr", param)
        if hasattr(jaxpr, "eqns") and _ranks(jaxpr.outvars) == _ranks(eqn.outvars):
            skipped = len(eqn.invars) - len(jaxpr.invars)
            if _ranks(jaxpr.invars) == _ranks(eqn.invars[skipped:]):
                return jaxpr, operands[skipped:]
    return None


def _ranks(variables):
    return [len(v.aval.shape) for v in variables]


def scan_operands(eqn: Any, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split a scan's operands into (constants, carry, scanned over) by rank: scanned or stacked
    arrays have one more dimension outside the body. We don't read the parameters with these
    counts, because every version of jax names them differently."""
    body = eqn.params["jaxpr"].jaxpr
    scanned = sum(_ranks(eqn.invars)) - sum(_ranks(body.invars))
    stacked = sum(_ranks(eqn.outvars)) - sum(_ranks(body.outvars))
    end = len(operands) - scanned
    start = end - len(eqn.outvars) + stacked
    return operands[:start], operands[start:end], operands[end:]


# -------------------------------------------------------------------------------------------
# Names that show which of our functions a loss calls

def named(x: jax.Array, name: str) -> jax.Array:
    """Give x a name that `names_in` can find, plus the name DIFFERENTIATED if a gradient is taken
    through it. Inside a shard_map, this returns x unchanged, because `names_in` inspects a loss
    before the loss enters a shard_map."""
    return x if ambient()[1] else _name(x, name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _name(x, name):
    return checkpoint_name(x, OURS + name)


@_name.defjvp
def _name_jvp(name, primals, tangents):
    return checkpoint_name(_name(primals[0], name), OURS + DIFFERENTIATED), tangents[0]


def labelled(fn: Callable) -> Callable:
    """Wrap fn so that its results carry its name (see `named`)."""
    @functools.wraps(fn)
    def call(*args, **more):
        return jax.tree.map(lambda x: named(x, fn.__name__), fn(*args, **more))

    return call


def names_in(fn: Callable | ClosedJaxpr, *args: Any) -> set[str]:
    """Return the names that `named` gave to values in a function. They include DIFFERENTIATED if
    the function itself takes a gradient through a named value."""
    names = {eqn.params["name"] for eqn, _ in equations_below(_traced(fn, *args))
             if eqn.primitive.name == "name"}
    return {name.removeprefix(OURS) for name in names if name.startswith(OURS)}


def computes_in_16_bits(fn: Callable | ClosedJaxpr, *args: Any) -> bool:
    """Return whether any operation in a function returns floats of fewer than 32 bits."""
    dtypes = {v.aval.dtype for eqn, _ in equations_below(_traced(fn, *args)) for v in eqn.outvars
              if hasattr(v.aval, "dtype")}
    return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)


# -------------------------------------------------------------------------------------------
# Functions that no compiler may split

def why_not_split(fn: Callable | ClosedJaxpr, params: Any, batch: Any = None) -> str:
    """Return the reason that the compiler must not split fn(params, batch) over `tensor`, as a
    phrase that begins with a verb; '' if it may. The compiler puts collectives inside branches and
    loops. If a branch or a loop's length depends on the batch, devices with different rows never
    meet there and wait forever. The other possible reason is a call into Python."""
    reasons = [""]

    def run(jaxpr, depends):
        """Return whether each result of a jaxpr depends on the batch, given whether each operand
        does."""
        return interpret(jaxpr, depends, lambda constant: False, equation)

    def equation(eqn, ins):
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            if ins[0]:
                reasons.append("branches on its data")
            branches = [run(b.jaxpr, ins[1:]) for b in params["branches"]]
            return [ins[0] or any(results) for results in zip(*branches)]
        if name == "while":
            n, m = params["cond_nconsts"], params["body_nconsts"]
            outs = loop(params["body_jaxpr"].jaxpr, ins[n:n + m], ins[n + m:])
            if run(params["cond_jaxpr"].jaxpr, ins[:n] + outs)[0]:
                reasons.append("has a loop whose length depends on its data")
            return outs
        if name == "scan":
            return loop(params["jaxpr"].jaxpr, *scan_operands(eqn, ins))
        if call := inner_call(eqn, ins):
            return run(*call)
        if "callback" in name or name == "debug_print":
            reasons.append("calls Python")
        return [any(ins)] * len(eqn.outvars)

    def loop(body, fixed, carry, scanned=()):
        """Return, for each result of a loop, whether it depends on the batch. Repeat the body until
        no further part of the carry does."""
        while True:
            outs = run(body, [*fixed, *carry, *scanned])
            new = [a or b for a, b in zip(carry, outs)]
            if new == carry:
                return carry + outs[len(carry):]
            carry = new

    jaxpr, given = _traced(fn, params, batch), len(jax.tree.leaves(params))
    run(jaxpr, [i >= given for i in range(len(jaxpr.invars))])
    return reasons[-1]
