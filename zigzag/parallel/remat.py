"""The checkpoint policies of --remat: what a layer saves for its backward pass. Everything else is
recomputed.

    none        save everything except gathered weights
    selective   save the products with weights, and the layer's input
    full        save the layer's input
"""

from typing import Any, Callable

import jax

from zigzag.core.mesh import may_unroll

# On a single CPU or GPU, up to this many layers are unrolled. Measured with 6, 12 and 16 layers on
# a CPU: a step is 5 to 10% faster than with a loop, and compiling takes 0.5 to 2 seconds longer;
# with 12 on an H200: 48.3 ms, and 56.4 ms for the fastest loop that was tried, which kept less.
UNROLLED = 16

# Cheap to recompute from the operand: never worth saving.
VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "name",
         "pvary", "sharding_constraint", "copy"}


def _gathers_weights(name, params):
    inside = getattr(params.get("jaxpr"), "eqns", ())
    return (name == "all_gather" and "fsdp" in params["axis_name"] or name == "dynamic_slice"
            or any(_gathers_weights(eqn.primitive.name, eqn.params) for eqn in inside))


def _all_but_weights(operation, *_, **params):
    """A policy: whether to save an operation's result. Gathered weights are not saved, because that
    would undo fsdp: so neither is a gather, a pick of a layer from a stack, nor a view of them."""
    return operation.name not in VIEWS and not _gathers_weights(operation.name, params)


# The checkpoint names: `stream` is the input of a layer, and the output of a block over a tensor
# axis (recomputing it would send it again); `product` is the product of activations and weights.
_policies = jax.checkpoint_policies
POLICIES = {
    "none": _all_but_weights,
    "selective": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names("product", "stream")),
    "full": _policies.save_only_these_names("stream"),
}


def recomputed(fn: Callable) -> Callable:
    """fn, with a backward pass for which its arguments are kept, and the rest is computed again:
    jax.checkpoint, except that the policy of another one around it does not reach inside. (There
    it would keep, by its own rule, the scores of attention that this was meant to drop.)"""
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


def unrolls(stacked: Any, remat: str) -> bool:
    """Whether a loop over layers is unrolled, if their weights and inputs are stacked like this. (A
    loop copies what it keeps for the backward pass into arrays of all layers.)"""
    return may_unroll() and remat == "none" and len(jax.tree.leaves(stacked)[0]) <= UNROLLED
