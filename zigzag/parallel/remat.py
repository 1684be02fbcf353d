"""--remat: what a layer saves for its backward pass, which recomputes everything else.

    none            save everything except gathered weights
    selective       save the outputs of matmuls with weights, and the layer's input
    full            save only the layer's input and, with tensor, attention's output to the stream
    full:0.5        save only the input for half of a device's layers (at least one), and everything
                    for the others
    offload         save the layer's input in host memory
    attention       save everything except attention's scores and what follows from them (the TPU
                    and GPU kernels never save scores)
    mlp             save only the input of each MLP, and everything in the rest of the layer
    attention,mlp   both
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zigzag.core.errors import ConfigError, did_you_mean
from zigzag.core.mesh import may_unroll, trace_settings, within

# On a single CPU or GPU, `scan_layers` unrolls up to this many layers. With 6, 12 and 16 layers on
# a CPU, steps were 5 to 10% faster than with a loop, and compiling took 0.5 to 2 seconds longer.
# With 12 layers on an H200, a step took 48.3 ms; the fastest loop we tried took 56.4 but kept less.
UNROLLED = 16

# Never worth saving, because recomputing them from the operand is cheap.
VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "name",
         "pvary", "sharding_constraint", "copy"}


def _gathers_weights(name, params):
    inside = getattr(params.get("jaxpr"), "eqns", ())
    return (name == "all_gather" and "fsdp" in params["axis_name"] or name == "dynamic_slice"
            or any(_gathers_weights(eqn.primitive.name, eqn.params) for eqn in inside))


def _all_but_weights(operation, *_, **params):
    """A checkpoint policy that saves everything but gathered weights, layers picked from a stack,
    and views of either, because saving those would undo fsdp."""
    return operation.name not in VIEWS and not _gathers_weights(operation.name, params)


# The checkpoint names: `stream` is a layer's input, or a block's output over a tensor axis
# (recomputing that would send it again); `product` is a matmul of activations with weights.
_policies = jax.checkpoint_policies
POLICIES = {
    "none": _all_but_weights,
    "selective": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names("product", "stream")),
    "full": _policies.save_only_these_names("stream"),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["stream"],
        offload_src="device", offload_dst="pinned_host"),
}
PARTS = ("attention", "mlp", "attention,mlp")       # the parts of a layer to recompute


class Remat(NamedTuple):
    """A parsed --remat value."""
    policy: str             # a name in POLICIES, for all layers
    share: float = 0.0      # the fraction of layers that save only their input
    parts: tuple = ()       # the parts of each layer that save only their input

    def count(self, layers: int) -> int:
        """Return how many layers to recompute, starting from the first: at least one if `share` is
        above 0."""
        return max(round(self.share * layers), self.share > 0)


def remat_of(text: str) -> Remat:
    """Parse a --remat value."""
    kind, _, share = text.partition(":")
    if text in POLICIES:
        return Remat(text)
    if text in PARTS:
        return Remat("none", parts=tuple(text.split(",")))
    known = [*POLICIES, *PARTS, "full:0.5"]
    try:
        if kind == "full" and 0 <= float(share) <= 1:
            return Remat("full" if float(share) == 1 else "none", float(share) % 1)
    except ValueError:
        pass
    raise ConfigError(f"--remat {text}: expected {', '.join(known[:-1])}, or full:0.5 for half of "
                      f"the layers" + did_you_mean(text, known))


def policy_of(text: str) -> Callable:
    """Return the checkpoint policy for a --remat value."""
    return POLICIES[remat_of(text).policy]


def recomputable(name: str) -> Callable:
    """Decorate fn(w, h, ...), a part of a layer: with --remat `name`, it keeps only w and h for its
    backward pass."""
    def decorate(fn):
        @functools.wraps(fn)
        def call(w, h, *others, **more):
            def run(w, h):
                return fn(w, h, *others, **more)

            return (recomputed(run) if name in trace_settings().recomputed else run)(w, h)

        return call

    return decorate


def scan_layers(body: Callable, x: Any, stack: Any, remat: str, gathers: bool) -> tuple[Any, Any]:
    """Run lax.scan(body, x, stack) over layers, each of which keeps what --remat asks for.
    `gathers` means that body gathers its weights over fsdp; we never keep gathered weights."""
    how = remat_of(remat)
    again = how.count(len(jax.tree.leaves(stack)[0]))       # 0 except for full:0.5 and the like

    def named(x):           # the name makes a pipeline keep each layer's input
        return jax.tree.map(lambda a: checkpoint_name(a, "stream"), x)

    def loop(body, x, stack):
        # A loop copies whatever it keeps for the backward pass into arrays that span all layers.
        unrolls = remat == "none" and may_unroll() and (
            len(jax.tree.leaves(stack)[0]) <= UNROLLED)
        with within(recomputed=how.parts):
            return lax.scan(lambda x, layer: body(named(x), layer), x, stack, unroll=unrolls)

    kept = body
    if how.policy == "offload":     # jax keeps arguments on the device, but not named values
        def kept(x, layer):
            return body(named(x), layer)
    if how.policy != "none" or gathers:
        kept = jax.checkpoint(kept, prevent_cse=False, policy=POLICIES[how.policy])
    if not again:
        return loop(kept, x, stack)
    x, first = loop(recomputed(body), x, jax.tree.map(lambda a: a[:again], stack))
    x, rest = loop(kept, x, jax.tree.map(lambda a: a[again:], stack))
    return x, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, rest)


def recomputed(fn: Callable) -> Callable:
    """Wrap fn so that it keeps only its arguments for the backward pass and recomputes the rest.
    This is like jax.checkpoint, except that an enclosing checkpoint's policy doesn't apply inside.
    That policy would keep attention's scores, which this function is meant to drop."""
    def call(*args):
        arrays, structure = jax.tree.flatten(args)
        traced, results = jax.make_jaxpr(lambda arrays: fn(*jax.tree.unflatten(structure, arrays)),
                                         return_shape=True)(arrays)

        def run(closed_over, arrays):
            return jax.core.eval_jaxpr(traced.jaxpr, closed_over, *arrays)

        def backward(kept, cotangents):
            return jax.vjp(run, *kept)[1](cotangents)

        again = jax.custom_vjp(run)
        again.defvjp(lambda *kept: (run(*kept), kept), backward)
        return jax.tree.unflatten(jax.tree.structure(results), again(traced.consts, arrays))

    return call
