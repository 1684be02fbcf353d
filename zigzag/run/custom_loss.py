"""Checks a custom loss before a run begins: compares its values on the mesh with its values on a
single device.

    on the mesh                    sums, gradient and a held-out batch's sums, compared with one
                                   device's for the same rows, in float32 if the loss allows it

The values differ if one batch is off by more than three times what rounding explains, or if two of
three batches are off by more than rounding explains. The run then computes the loss as on a single
device, without types, if that helps and no axis needs the loss to split its own work. Otherwise it
rejects the loss, printing what differs and by how much; docs/tasks.md, *What is refused*, has a
table of causes.

The check uses new weights, moved at random, because a head of zeros would hide differences. To
measure the tolerance, it moves the single device's weights by rounding errors.

On a single device there is nothing to compare, so the check only traces the loss, twice.

A network's own loss is checked only with --check, or if it was edited since its tests passed
(zigzag/core/edited.py): test_all.py compares it with one device on every axis.
"""

import dataclasses
import functools
import re
import time
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from zigzag.core import edited as tested
from zigzag.core.errors import ConfigError, any_loss, listed, one_line
from zigzag.core.hosts import process_allgather
from zigzag.core.mesh import axes_in_use, by_path, cast, shardings, untyped
from zigzag.parallel.experts import ROUNDS
from zigzag.parallel.jaxprs import computes_in_16_bits
from zigzag.parallel.storage import permute_layers
from zigzag.run.modes import BY_HAND, JIT
from zigzag.run.plan import Plan, Program, held_out, in_one

# To measure the effect of rounding, move weights by this fraction of their size: the first if the
# whole loss is float32, the second if some of it is in 16 bits.
ROUNDING_32, ROUNDING_16 = 2.0**-20, 2.0**-8
# Compare the losses at new weights, moved at random by this fraction of their size.
MOVED = 0.1
# The relative differences allowed in (sums, gradients), in these two cases.
SHARES_32, SHARES_16 = (3e-5, 2e-4), (6e-3, 2e-2)
# Compare all rows of a batch that has up to this many numbers.
SMALL = 2**14


class Value(NamedTuple):
    """A sum or a weight's gradient, on the mesh and on one device, as the norms of three arrays."""
    gap: Any        # the difference
    size: Any       # the single device's value
    noise: Any      # how much that value changes when its weights move by rounding errors


# -------------------------------------------------------------------------------------------
# The check

def must_compare(plan: Plan, say: Callable) -> bool:
    """Return whether to compare the loss with one device's. Do so for a custom loss, and for a
    network's own loss if --check is given or its tests haven't seen an edit. Print the edit."""
    why = _why_untested(plan) if plan.network else ""
    if why and not plan.config.check:
        say(f"check    {why}: comparing the loss and its gradients with one device's")
    return plan.network is None or plan.config.check or bool(why)


def _why_untested(plan):
    """Say why the tests don't vouch for a network's own loss on this mesh. Return "" if they do, or
    if only the compiler, or nothing, splits it. All processes get the same text."""
    if plan.mesh.size == 1 or plan.parts == 1 and not plan.typed:
        return ""
    why = tested.why_untested([tested.file_of(plan.network.loss), "shard.py", "train.py",
                               *tested.MACHINERY])
    return next(filter(None, process_allgather(why)), "")


def _small_plan(plan):
    """Return the plan for the comparison: `plan` with up to two parts, and in float32 if jax can
    trace the loss that way. A loop inside the loss may need the plan's own dtype."""
    # Allow strips of any size, because the run may cut its many rows into strips.
    small = dataclasses.replace(plan, accumulate=min(2, plan.accumulate), strip=min(1, plan.strip))
    try:
        jax.eval_shape(plan.loss, _as_computed(plan, "float32"), plan.batch)
    except (TypeError, ValueError):
        if plan.dtype == "float32":
            raise
        return small
    return dataclasses.replace(small, dtype="float32")


def check_loss(plan: Plan, make_gradients: Callable, make_evaluate: Callable | None,
               make_batch: Callable, say: Callable) -> bool:
    """Reject a loss whose values on this mesh, or in --accumulate parts, differ from one device's.
    Return False if gathering all weights can avoid that, so that each device computes the loss as a
    single device does. Otherwise return True.

    make_gradients, make_evaluate   train.py's; the second is None if nothing is held out
    make_batch(update, rows)        returns the first rows of an update's batch"""
    begin = time.perf_counter()
    if make_evaluate:
        try:
            jax.eval_shape(plan.loss, _as_computed(plan), held_out(plan.batch))
        except KeyError as e:
            if e.args != ("seeds",):
                raise
            raise ConfigError("this loss reads batch['seeds'], which a held-out batch does not "
                              "have: make noise only where \"seeds\" is in the batch") from None
    if plan.parts == 1 and not plan.typed:
        if plan.config.check:
            say("check    on this mesh only the compiler splits the loss, so there is nothing to "
                "compare")
        return True
    compares = plan.config.check or plan.parts > 1 or plan.mesh.size > 1
    small, differ, refusal = _small_plan(plan), "", None
    compute = functools.partial(_on_mesh, small, make_gradients(small),
                                make_evaluate and make_evaluate(small))
    try:
        if compares:
            differ = _find_difference(small, make_batch, compute)
        else:
            jax.eval_shape(compute, _as_computed(small), plan.batch)
    except ConfigError:
        raise
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            differ = None
        else:
            differ, refusal = f"it fails: {one_line(e)}", _not_traceable(plan, e)
    else:
        # On one device, no other check catches a loss that isn't a pure function.
        if (differ or not compares) and _trace(plan) != _trace(plan):
            raise ConfigError(
                "this loss is not a function of its weights and its batch: two traces of it "
                "differ; a number drawn or counted outside jax (np.random, a counter, the time) is "
                "a different constant in each compiled program; make noise with jax.random, from "
                "batch['seeds']")
    if differ is None:
        say("this loss is not checked on this mesh: the check does not fit into memory, or the "
            "gradients of the first three batches are zero or not finite")
    elif differ and plan.typed and not plan.needs:
        say(f"this loss runs as on one device, with all weights gathered at once (differences on "
            f"this mesh: {differ})")
        return False
    elif differ:
        raise refusal or _differs(plan, differ)
    elif plan.network:
        say(f"check    on this mesh the loss and its gradients match one device's "
            f"({time.perf_counter() - begin:.1f} s)")
    return True


def _trace(plan):
    """Return a trace of the loss as text, and the bits of its constants, such as numbers from
    outside jax. Compare bits, because in numpy neither NaN nor a random key equals itself."""
    closed = jax.make_jaxpr(lambda p, b: plan.loss(p, b))(_as_computed(plan), plan.batch)
    constants = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
                 for x in closed.consts]
    return (re.sub(" at 0x[0-9a-f]+", "", str(closed.jaxpr)),
            [np.asarray(x).tobytes() for x in constants])


def _as_computed(plan, dtype=None):
    """Return the weights' shapes in this dtype, by default the step's compute dtype."""
    return jax.eval_shape(lambda p: cast(p, dtype or plan.dtype), plan.params)


def _find_difference(plan, make_batch, compute):
    """Say what differs between compute(params, batch) and one device: in one batch by more than
    three times what rounding explains, or in two of three batches by more than rounding explains.
    Return "" if nothing does, or None if nothing could be compared."""
    # Take all rows of a small batch, so that rows are coupled as in an update; otherwise take a few
    # rows per device.
    config, cut = plan.config, plan.accumulate * plan.row_groups
    each = config.batch // cut
    if sum(x.size for x in jax.tree.leaves(plan.batch)) > SMALL:
        each = min(each, 2 * config.network.microbatches)
    given = [(make_batch(at, cut * each), jax.random.key(config.seed + at)) for at in range(3)]
    is_narrow = plan.dtype != "float32" or computes_in_16_bits(
        plan.loss, _as_computed(plan), given[0][0])
    # Use three programs, so that both sides get weights that are really rounded to their dtype. And
    # in one program, nothing would order a pipeline's collectives and the gathers for one device:
    # some devices would begin with the former, others with the latter, and all would hang.
    compiled = functools.partial(jax.jit, compiler_options=plan.compiler_options)
    batch, key = given[0]
    new_weights = compiled(functools.partial(_new_weights, plan), out_shardings=shardings(
        plan.specs_at_rest, plan.mesh)).lower(key).compile()
    on_mesh = compiled(compute).lower(new_weights.out_info, batch).compile()
    beside = compiled(functools.partial(_beside_one_device, plan, is_narrow),
                      out_shardings=jax.NamedSharding(plan.mesh, P())).lower(
        on_mesh.out_info, new_weights.out_info, batch, key).compile()
    process_allgather("compiled")               # every process compiles before any device waits
    apart = []                                  # for each batch, whether anything differs
    for batch, key in given:
        params = new_weights(key)
        found = jax.block_until_ready(on_mesh(params, batch))
        found = jax.device_get(beside(found, params, batch, key))
        gradients = [value.size for name, value in found.items() if _is_gradient(name)]
        if gradients and not np.any(gradients) or not np.isfinite(
                [found["the sum"].size, found["the count"].size, *gradients]).all():
            continue
        times = process_allgather(_times_allowed(found, is_narrow))[0]
        what = sorted((name for name in found if times[name] > 1), key=_is_gradient)
        apart.append(bool(what))
        if what and (max(times.values()) > 3 or sum(apart) == 2):
            return listed([f"{name} by {_ratio(*found[name][:2]):.1%}" for name in what], 3)
    return "" if apart else None


def _is_gradient(name):
    return name.startswith("the gradient")


@np.errstate(all="ignore")
def _times_allowed(found, is_narrow):
    """Return {name: difference / tolerance} for each value. The tolerance is a fraction of the
    value plus four times its change when weights move by rounding errors. The smallest gradients,
    such as the gradient of a bias that shifts all scores equally, are pure rounding error."""
    of_sums, of_gradients = SHARES_16 if is_narrow else SHARES_32
    least = 1e-9 * np.linalg.norm([x.size for name, x in found.items() if _is_gradient(name)])
    return {name: _ratio(np.maximum(x.gap - least, 0), of_gradients * x.size + 4 * x.noise)
            if _is_gradient(name) else _ratio(x.gap, of_sums * x.size + 4 * np.nan_to_num(x.noise))
            for name, x in found.items()}


@np.errstate(all="ignore")
def _ratio(gap, allowed):
    """Return gap / allowed, or infinity if that's NaN."""
    ratio = np.float64(gap) / allowed if gap != 0 else 0.0
    return float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf))


# -------------------------------------------------------------------------------------------
# The values to compare: sums, gradient, and the sums of the batch treated as held-out

def _named(sums, gradient, held):
    """Return {name: value} for all of these; `held` is () without an evaluation."""
    found = {}
    for what, (total, count, others) in zip(("", "held-out "), filter(None, (sums, held))):
        found |= {f"the {what}sum": total, f"the {what}count": count}
        found |= {f"its {what}other sum {name!r}": x for name, x in others.items()
                  if name != ROUNDS}
    return found | {f"the gradient of {path}": g for path, g in by_path(gradient).items()}


def _on_mesh(plan, gradients, evaluate, params, batch):
    """Return {name: value} for the values on the mesh."""
    places = shardings(plan.specs_at_rest, plan.mesh)
    chunks = 1 if plan.mode == JIT else plan.config.network.chunks
    with jax.default_matmul_precision("highest"):
        trained, frozen = plan.in_two(permute_layers(params, places, chunks))
        grad, sums = gradients(trained, batch, frozen)
        held = evaluate(trained, held_out(batch), frozen) if evaluate else ()
    return _named(sums, permute_layers(grad, plan.in_two(places)[0], chunks, back=True), held)


def sums_and_gradient(loss: Callable, trained: Any, frozen: Any, batch: Any) -> tuple[Any, Any]:
    """Compute the step's reference: the loss's sums on one device, and the gradient of its sum with
    respect to the trained weights."""
    def with_sums(trained):
        sums = loss(in_one(trained, frozen), batch)
        return sums[0], sums

    (_, sums), gradient = jax.value_and_grad(with_sums, has_aux=True)(trained)
    return sums, gradient


def _new_weights(plan, key):
    """Return a randomly perturbed copy of the weights."""
    return cast(_moved(plan.init(key), jax.random.fold_in(key, 1), MOVED), plan.dtype)


def _beside_one_device(plan, is_narrow, found, params, batch, key):
    """Return {name: Value} for the values `found` on the mesh at these weights. To measure the
    noise, compute one device's values twice more, with weights moved by rounding errors."""
    rounding = jnp.float32(ROUNDING_16 if is_narrow else ROUNDING_32)
    held = any(name.startswith("the held-out") for name in found)

    def three(params, batch, key):
        def one(i):
            moved = _moved(params, jax.random.fold_in(key, i), jnp.where(i == 0, 0, rounding))
            return _named(*sums_and_gradient(plan.loss, *plan.in_two(moved), batch),
                          plan.loss(moved, held_out(batch)) if held else ())

        return jax.lax.map(one, jnp.arange(3))

    with jax.default_matmul_precision("highest"):
        wanted = untyped(three)(_whole(params), _whole(batch), key)
    for name, x in wanted.items():
        if x.shape[1:] != found[name].shape:
            raise ConfigError(f"{name} has the shape {list(found[name].shape)} on this mesh, and "
                              f"{list(x.shape[1:])} on one device: return what adds up over rows")
    return {name: Value(_norm(found[name], x[0]), _norm(x[0]),
                        jnp.maximum(_norm(x[1], x[0]), _norm(x[2], x[0])))
            for name, x in wanted.items()}


def _norm(x, other=0.0):
    """Return the norm of x - other. Here NaN and infinity equal themselves."""
    equal = (x == other) | jnp.isnan(x) & jnp.isnan(other)
    return jnp.linalg.norm(jnp.where(equal, 0, x - other).astype(jnp.float32))


def _moved(params, key, size):
    def move(w, key):
        if not jnp.issubdtype(w.dtype, jnp.floating):       # a buffer of a custom step
            return w
        rms = jnp.sqrt(jnp.mean(w * w))
        scale = (size * jnp.where(rms > 0, rms, 0.2)).astype(w.dtype)
        return w + scale * jax.random.normal(key, w.shape, w.dtype)

    return jax.tree.map(move, params, optax.tree.split_key_like(key, params))


def _whole(tree):
    """Keep the tree whole on each device if it's small, so the compiler can't split it."""
    is_little = 4 * sum(x.size for x in jax.tree.leaves(tree)) < 2**30
    return jax.lax.with_sharding_constraint(tree, P()) if is_little else tree


# -------------------------------------------------------------------------------------------
# Messages

def check_traceable(program: Program) -> None:
    """Trace the step, and reject a loss that works on one device but fails inside jax on the mesh.
    jax caches the trace for compilation."""
    try:
        jax.eval_shape(program.step, program.state, program.batch)
    except (TypeError, ValueError, NotImplementedError) as e:
        if isinstance(e, ConfigError) or program.plan.mode == JIT:
            raise
        raise _not_traceable(program.plan, e) from None


def _not_traceable(plan, e):
    where = f"mesh axis {' and '.join(plan.needs)}" if plan.needs else "inside a shard_map"
    return ConfigError(
        f"{where}: this loss cannot run there ({one_line(e)}){_by_hand(plan)}; it must not close "
        f"over arrays on a mesh (jax.device_get copies them off it), or place arrays itself; "
        f"{any_loss(*plan.needs)}, and with --collectives compiler")


def _differs(plan, differ):
    """Return the error for a loss that differs on the mesh, with advice on what to use instead."""
    config, axes = plan.config, axes_in_use(plan.sizes)
    splits = [f"--mesh {','.join(axes)}"] if axes else []
    cut = {"accumulate": config.accumulate, "microbatches": config.network.microbatches}
    splits += [f"--{name} {n}" for name, n in cut.items() if n > 1]
    return ConfigError(
        f"{' '.join(splits)}: this loss differs from one device's: {differ}; a loss must be a sum "
        f"over rows (compare rows with shard.all_rows and --accumulate 1), take noise only from "
        f"batch['seeds'], and use shard.py for work along the sequence, the layers or the experts "
        f"(docs/tasks.md, What is refused, lists the causes){_by_hand(plan)}; "
        f"{any_loss(*plan.needs)}, and any other with --collectives compiler --accumulate 1")


def _by_hand(plan):
    if plan.mode != BY_HAND or plan.sizes["tensor"] == 1:
        return ""
    return ("; a loss that calls shard.columns or shard.row must use them for every product with a "
            "weight that tensor splits")
