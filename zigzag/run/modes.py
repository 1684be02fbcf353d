"""The ways to run a loss on a mesh. The step is the same function in all of them, from
train.make_gradients, wrapped by `shard_map` and `as_one_device`.

    by hand       the loss calls columns or row: a single shard_map over all six axes, with types
    typed         it calls other functions of shard.py, or takes specs: a shard_map with types over
                  all axes except tensor; the compiler splits it over tensor
    untyped       it calls no function of shard.py, or differentiates internally. Each device
                  computes its rows with single-device code, without varying types; the compiler
                  splits that code over tensor
    tensor whole  like untyped, but the compiler must not split it, or tensor has size 1: the mesh
                  may store weights split over tensor, but the loss uses them whole
    jit           --collectives compiler: no shard_map. The step's function runs once, on whole
                  arrays, and the compiler inserts every sum over devices
"""

from typing import Any, Callable

import jax

from zigzag.core.mesh import AXES, WITHOUT_TENSOR, untyped, within, without_axis
from zigzag.core.parts import part
from zigzag.parallel.jaxprs import DIFFERENTIATED

BY_HAND, TYPED, UNTYPED, TENSOR_WHOLE, JIT = (
    "by hand", "typed", "untyped", "untyped, tensor whole", "jit")

# The manual axes, over which our code communicates. The compiler handles the rest.
MANUAL = {BY_HAND: AXES, TYPED: WITHOUT_TENSOR, UNTYPED: WITHOUT_TENSOR, TENSOR_WHOLE: AXES,
          JIT: ()}


def mode_of(collectives: str, names: set[str], takes_specs: bool, splits_tensor: bool, why: str
            ) -> str:
    """Return the mode of a loss that calls the functions `names` from shard.py. `why` says why the
    compiler must not split the loss over tensor; '' if it may."""
    if collectives == "compiler":
        return JIT
    if DIFFERENTIATED not in names and not (why and splits_tensor):
        if names & {"columns", "row"}:
            return BY_HAND
        if names or takes_specs:
            return TYPED
    return TENSOR_WHOLE if why or not splits_tensor else UNTYPED


def shard_map(fn: Callable, plan: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Wrap fn to run on every device with that device's pieces of the arguments. This is
    jax.shard_map over this mode's manual axes, with --overlap and the plan's other settings. With
    --collectives compiler, return fn itself."""
    if plan.mode == JIT:
        return fn
    if "tensor" not in plan.manual:
        in_specs, out_specs = without_axis((in_specs, out_specs), "tensor")

    def on_device(*args):
        with within(overlap=plan.config.network.overlap, strip=plan.strip, timed=plan.timed,
                    expert_room=plan.config.network.expert_room):
            return fn(*args)

    return jax.shard_map(on_device, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs,
                         axis_names=set(plan.manual), check_vma=plan.typed)


def as_one_device(fn: Callable, plan: Any) -> Callable:
    """Wrap fn (the loss, or its value_and_grad) for a call inside the shard_map. For a loss without
    types, jax traces it without the mesh, so that no function in shard.py sends anything."""
    return untyped(fn) if plan.mode in (UNTYPED, TENSOR_WHOLE) else fn


def unscaled(gradients: Callable, plan: Any) -> Callable:
    """Wrap train.py's gradients to divide by the scale that they are given, with float16."""
    if plan.dtype != "float16":
        return gradients
    return part("precision.loss_scale", "--dtype float16").unscaled(gradients)
