"""Reading a jaxpr: the list of operations that jax makes of a function by tracing it.

Small questions about somebody's function are answered here without running it: which of our
functions it calls (`names_in`), in what precision it computes (`computes_in_16_bits`), and what
in it no compiler may split (`why_not_split`). Each takes the function with its arguments, or what
jax.make_jaxpr has made of them, so that a caller with several questions traces only once.
The large question, how its weights should be split, is asked in trace.py and answered in rule.py.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr

from zigzag.mesh import ambient

DIFFERENTIATED = "differentiated"
REDUCTIONS = set("""reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or
reduce_xor argmax argmin""".split())


def traced(fn: Any, *args: Any) -> ClosedJaxpr:
    """The jaxpr of fn(*args), or `fn` itself where it is one already."""
    return fn if isinstance(fn, ClosedJaxpr) else jax.make_jaxpr(fn)(*args)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()),
                                     is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def inner_jaxpr(eqn: Any) -> tuple[Any, Any] | None:
    """The jaxpr and its constants, of an operation that calls one with the last of its operands:
    jit, remat, custom_vjp, shard_map, and what future versions of jax add. (A reduction carries
    the jaxpr of two scalars, which it does not call so.)"""
    if eqn.primitive.name in REDUCTIONS:
        return None
    for param in eqn.params.values():
        jaxpr = getattr(param, "jaxpr", param)
        if hasattr(jaxpr, "eqns") and _ranks(jaxpr.outvars) == _ranks(eqn.outvars):
            given = _ranks(eqn.invars)
            if _ranks(jaxpr.invars) == given[len(given) - len(jaxpr.invars):]:
                return jaxpr, getattr(param, "consts", ())
    return None


def _ranks(variables):
    return [len(v.aval.shape) for v in variables]


def scan_counts(eqn: Any) -> tuple[int, int, int]:
    """How many constants, carried values and scanned-over values a scan has, told by their shapes:
    what is carried has the same inside and out, what is scanned over has one dimension more
    outside. (Every version of jax has other names for these numbers.)"""
    body = eqn.params["jaxpr"].jaxpr
    carried = sum(o.aval.shape == i.aval.shape for o, i in zip(eqn.outvars, body.outvars))
    scanned = sum(len(o.aval.shape) > len(i.aval.shape) for o, i in zip(eqn.invars, body.invars))
    return len(eqn.invars) - carried - scanned, carried, scanned


# -------------------------------------------------------------------------------------------
# Names: by these a training step sees which of our functions a loss calls.

def named(x: jax.Array, name: str) -> jax.Array:
    """x with a name that `names_in` sees; with the name DIFFERENTIATED where a gradient is taken
    through it. Inside a shard_map nothing: a loss is looked at before it is put into one."""
    return x if ambient()[1] else _name(x, name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _name(x, name):
    return checkpoint_name(x, name)


@_name.defjvp
def _name_jvp(name, primals, tangents):
    return checkpoint_name(primals[0], DIFFERENTIATED), tangents[0]


def names_in(fn: Callable | ClosedJaxpr, *args: Any) -> set[str]:
    """The names that a function marks its values with. DIFFERENTIATED is among them if it takes a
    gradient, within itself, through a marked value."""
    return {eqn.params["name"] for eqn in equations(traced(fn, *args).jaxpr)
            if eqn.primitive.name == "name"}


def computes_in_16_bits(fn: Callable | ClosedJaxpr, *args: Any) -> bool:
    """Whether a function makes floats of fewer than 32 bits anywhere, whatever it is given."""
    dtypes = {v.aval.dtype for eqn in equations(traced(fn, *args).jaxpr) for v in eqn.outvars
              if hasattr(v.aval, "dtype")}
    return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)


# -------------------------------------------------------------------------------------------
# What no compiler may split

def why_not_split(fn: Callable | ClosedJaxpr, params: Any, batch: Any = None) -> str:
    """Why no compiler may split fn(params, batch) over `tensor`, as a verb phrase, or ''. Devices
    with other rows take other branches, and other numbers of turns of a loop: a collective in them
    waits for ever for the devices that do not come. Calls into Python are the other reason."""
    jaxpr, flow = traced(fn, params, batch).jaxpr, _BatchFlow()
    given = len(jax.tree.leaves(params))
    flow.run(jaxpr, [i >= given for i in range(len(jaxpr.invars))])
    return flow.why


class _BatchFlow:
    """Follows through a jaxpr which values depend on the batch: lists of bools, one for each
    value."""

    def __init__(self):
        self.why = ""

    def run(self, jaxpr, given):
        depends = dict(zip(jaxpr.invars, given))

        def read(variables):
            return [not hasattr(v, "val") and depends.get(v, False) for v in variables]

        for eqn in jaxpr.eqns:
            depends.update(zip(eqn.outvars, self.equation(eqn, read(eqn.invars))))
        return read(jaxpr.outvars)

    def equation(self, eqn, ins):
        name = eqn.primitive.name
        if name == "cond":
            if ins[0]:
                self.why = "branches on its data"
            branches = [self.run(b.jaxpr, ins[1:]) for b in eqn.params["branches"]]
            return [ins[0] or any(results) for results in zip(*branches)]
        if name == "while":
            return self.while_loop(eqn.params, ins)
        if name == "scan":
            n, carried, _ = scan_counts(eqn)
            return self.loop(eqn.params["jaxpr"].jaxpr, ins[:n], ins[n:n + carried],
                             ins[n + carried:])
        if inner := inner_jaxpr(eqn):
            return self.run(inner[0], ins[len(ins) - len(inner[0].invars):])
        if "callback" in name or name == "debug_print":
            self.why = "calls Python"
        return [any(ins)] * len(eqn.outvars)

    def while_loop(self, params, ins):
        n, m = params["cond_nconsts"], params["body_nconsts"]
        outs = self.loop(params["body_jaxpr"].jaxpr, ins[n:n + m], ins[n + m:])
        if self.run(params["cond_jaxpr"].jaxpr, ins[:n] + outs)[0]:
            self.why = "has a loop whose length depends on its data"
        return outs

    def loop(self, body, fixed, carry, scanned=()):
        """The body again and again, until no turn makes more of what is carried depend on it."""
        while True:
            outs = self.run(body, [*fixed, *carry, *scanned])
            new = [a or b for a, b in zip(carry, outs)]
            if new == carry:
                return carry + outs[len(carry):]
            carry = new
