"""The checkpoint policies of --remat: what a layer saves for its backward pass. Everything else is
recomputed.

    none        save everything except gathered weights, the scores of attention, and what is
                computed number by number
    selective   save the products with weights, and the layer's input
    full        save the layer's input
"""

import math
from typing import Any

import jax

from zigzag.core.mesh import may_unroll

# On a single CPU or GPU, up to this many layers are unrolled. Measured with 6, 12 and 16 layers on
# a CPU: a step is 5 to 10% faster than with a loop, and compiling takes 0.5 to 2 seconds longer;
# with 12 on an H200: 14% faster, in 48.3 ms for 56.4, and 0.3 to 3 seconds.
UNROLLED = 16

# Cheap to recompute: views of the operand, and what a compiler computes within the operation that
# reads it. Saving these on a GPU cost a tenth of a step, and half of its memory.
CHEAP = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "name",
         "pvary", "sharding_constraint", "copy", "slice", "split", "concatenate", "iota",
         "add", "add_any", "sub", "mul", "div", "neg", "abs", "sign", "max", "min", "select_n",
         "square", "integer_pow", "sqrt", "rsqrt", "exp", "exp2", "log", "log1p", "logistic",
         "tanh", "erf", "sin", "cos"}


def _gathers_weights(name, params):
    inside = getattr(params.get("jaxpr"), "eqns", ())
    return (name == "all_gather" and "fsdp" in params["axis_name"] or name == "dynamic_slice"
            or any(_gathers_weights(eqn.primitive.name, eqn.params) for eqn in inside))


def _are_scores(name, operands, params):
    """Whether these are products of each query with each key: more numbers than both operands have.
    (And attention that computes them again to save memory means it: a policy would undo that.)"""
    if name != "dot_general":
        return False
    (contracted, _), (shared, _) = params["dimension_numbers"]
    a, b = operands
    size = (a.size // math.prod(a.shape[i] for i in contracted)
            * (b.size // math.prod(a.shape[i] for i in (*contracted, *shared))))
    return bool(shared) and size > max(a.size, b.size)


def _all_but_weights(operation, *operands, **params):
    """A policy: whether to save an operation's result. Gathered weights are not saved, because that
    would undo fsdp: so neither is a gather, a pick of a layer from a stack, nor a view of them."""
    return (operation.name not in CHEAP and not _gathers_weights(operation.name, params)
            and not _are_scores(operation.name, operands, params))


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


def unrolls(stacked: Any, remat: str) -> bool:
    """Whether a loop over layers is unrolled, if their weights and inputs are stacked like this. (A
    loop copies what it keeps for the backward pass into arrays of all layers. And where layers are
    unrolled, a compiler merges what is recomputed with what it was: nothing is.)"""
    return may_unroll() and remat == "none" and len(jax.tree.leaves(stacked)[0]) <= UNROLLED
