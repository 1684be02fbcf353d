"""What a layer keeps for its backward pass, by --remat; the rest is computed again."""

import jax

# As good as its operand: never worth keeping.
VIEWS = {"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type", "name",
         "pvary", "sharding_constraint", "copy"}


def _gathers_weights(name, params):
    inside = getattr(params.get("jaxpr"), "eqns", ())
    return (name == "all_gather" and "fsdp" in params["axis_name"] or name == "dynamic_slice"
            or any(_gathers_weights(eqn.primitive.name, eqn.params) for eqn in inside))


def _all_but_weights(operation, *_, **params):
    """Everything but gathered weights: to keep those would undo fsdp. So nothing that gathers or
    picks them is kept, nor a view of them."""
    return operation.name not in VIEWS and not _gathers_weights(operation.name, params)


# Names: `stream` is what comes into a layer, and out of a block where its time is split (to make it
# again would send it again); `product` is what is made with weights.
_policies = jax.checkpoint_policies
POLICIES = {
    "none": _all_but_weights,
    "selective": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names("product", "stream")),
    "full": _policies.save_only_these_names("stream"),
}
