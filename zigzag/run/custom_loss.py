"""The check of a custom loss: its values on the mesh are compared with those on one device, before
a run begins.

    on the mesh                    sums, gradient and the sums of a held-out batch, compared with
                                   one device's for the same rows, in float32 if the loss can be

They differ if a batch is off by more than three times what rounding explains, or two of three
batches by more than that. Then the loss runs as on one device, without types, if that avoids the
difference and no axis needs more; else it is refused, with what differs and by how much. (Why it
differs, the table in docs/tasks.md, *What is refused*, helps to find.)

All of this is computed at new weights that are moved at random, because with a head of zeros no
difference would show. How much the values may differ is measured too, by moving one device's
weights by rounding errors.

One device has nothing to be compared with: there the loss is only traced, twice.

A network's own loss is compared with --check, and where its code has changed since test_all.py
passed (zigzag/core/edited.py), which compares it with one device on every axis.
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
from zigzag.core.errors import ConfigError, any_loss, one_line
from zigzag.core.hosts import process_allgather
from zigzag.core.mesh import by_path, cast, shardings, untyped
from zigzag.parallel.jaxprs import computes_in_16_bits
from zigzag.parallel.storage import permute_layers
from zigzag.run.modes import BY_HAND, JIT
from zigzag.run.plan import Plan, Program, held_out, in_one

# To measure the effect of rounding on a loss, weights are moved by this share of their size, if all
# is computed in float32, or if some of it is in 16 bits.
ROUNDING_32, ROUNDING_16 = 2.0**-20, 2.0**-8
# The weights that are compared are new ones, moved at random by this share of their size.
MOVED = 0.1
# The relative differences that are allowed in (sums, gradients), in these two cases.
SHARES_32, SHARES_16 = (3e-5, 2e-4), (6e-3, 2e-2)
# All rows of a batch are compared if it has at most this many numbers.
SMALL = 2**14


class Value(NamedTuple):
    """A sum, or a weight's gradient, on the mesh and on one device: norms of three arrays."""
    gap: Any        # the difference
    size: Any       # one device's value
    noise: Any      # the change of that when weights are moved by rounding errors


# -------------------------------------------------------------------------------------------
# The check

def must_compare(plan: Plan, say: Callable) -> bool:
    """Whether the loss is to be compared with one device: a custom one, or a network's own with
    --check, or after an edit that test_all.py has not seen, which is said."""
    why = _why_untested(plan) if plan.trusted else ""
    if why and not plan.config.check:
        say(f"check    {why}: comparing the loss and its gradients with one device's")
    return not plan.trusted or plan.config.check or bool(why)


def _why_untested(plan):
    """Text that says why the tests do not vouch for a network's own loss on this mesh; "" if they
    do, or if it is split by nothing or by the compiler alone. All processes get the same one."""
    if plan.mesh.size == 1 or plan.parts == 1 and not plan.typed:
        return ""
    why = tested.why_untested([tested.file_of(plan.network.loss), "shard.py", "train.py",
                               *tested.MACHINERY])
    return next(filter(None, process_allgather(why)), "")


def _small_plan(plan):
    """The plan of what is compared: `plan` with at most two parts, and in float32 if the loss can
    be traced in it (a loop inside may need the plan's own dtype)."""
    # (Strips of any size: the run may cut its many rows where these few would not be cut.)
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
    """Refuse a loss that has other values on this mesh, or in --accumulate parts, than on one
    device. Returns False if that can be avoided by gathering all weights, so that each device
    computes the loss as a single device does; else True.

    make_gradients, make_evaluate   train.py's; None for the second if nothing is held out
    make_batch(update, rows)        the first rows of an update's batch"""
    begin = time.perf_counter()
    if make_evaluate:
        try:
            jax.eval_shape(plan.loss, _as_computed(plan), held_out(plan.batch))
        except KeyError as e:
            if e.args != ("seeds",):
                raise
            raise ConfigError("this loss reads batch['seeds'], which a held-out batch does not "
                              "have: make no noise where \"seeds\" is not in the batch") from None
    if plan.parts == 1 and not plan.typed:
        if plan.config.check:
            say("check    on this mesh only the compiler splits the loss: nothing is compared")
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
            differ, refusal = f"it ends in: {one_line(e)}", _not_traceable(plan, e)
    else:
        # (A network's own loss is a function; and nothing else finds one on one device.)
        if (differ or not compares) and _trace(plan) != _trace(plan):
            raise ConfigError(
                "this loss is not a function of its weights and its batch: two traces of it "
                "differ; a number drawn or counted outside jax (np.random, a counter, the time) is "
                "another constant in each compiled program; make noise by jax.random, from "
                "batch['seeds']")
    if differ is None:
        say("this loss is not checked on this mesh: the check does not fit into memory, or the "
            "gradients of the first three batches are zero or not finite")
    elif differ and plan.typed and not plan.needs:
        say(f"this loss is computed as on one device, with all weights gathered at once (else on "
            f"this mesh: {differ})")
        return False
    elif differ:
        raise refusal or _differs(plan, differ)
    elif plan.trusted:
        say(f"check    on this mesh the loss and its gradients are those of one device "
            f"({time.perf_counter() - begin:.1f} s)")
    return True


def _trace(plan):
    """A trace of the loss as text, and the bits of its constants: a number that the loss takes from
    outside jax is one. (By numpy, a random key is not equal to itself, nor is NaN.)"""
    closed = jax.make_jaxpr(lambda p, b: plan.loss(p, b))(_as_computed(plan), plan.batch)
    constants = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
                 for x in closed.consts]
    return (re.sub(" at 0x[0-9a-f]+", "", str(closed.jaxpr)),
            [np.asarray(x).tobytes() for x in constants])


def _as_computed(plan, dtype=None):
    """The shapes of the weights, in this precision, or that in which the step computes the loss."""
    return jax.eval_shape(lambda p: cast(p, dtype or plan.dtype), plan.params)


def _find_difference(plan, make_batch, compute):
    """Text that says what differs between compute(params, batch) and one device: in one batch by
    more than three times what rounding explains, or by more than that in two of three batches. ""
    if nothing does; None if nothing could be compared."""
    # All rows of a batch if they are small, so that any coupling of rows is as in an update; else a
    # few for each device.
    config, cut = plan.config, plan.accumulate * plan.row_groups
    each = config.batch // cut
    if sum(x.size for x in jax.tree.leaves(plan.batch)) > SMALL:
        each = min(each, 2 * config.network.microbatches)
    given = [(make_batch(at, cut * each), jax.random.key(config.seed + at)) for at in range(3)]
    is_narrow = plan.dtype != "float32" or computes_in_16_bits(
        plan.loss, _as_computed(plan), given[0][0])
    # (Two programs. In one, the collectives of a pipeline's loop and the gathers for one device
    # had no order, so that some devices came to the one first, others to the other, and all waited
    # for ever.)
    compiled = functools.partial(jax.jit, compiler_options=plan.compiler_options)
    on_mesh = compiled(functools.partial(_at_new_weights, plan, compute)).lower(*given[0]).compile()
    beside = compiled(functools.partial(_beside_one_device, plan, is_narrow),
                      out_shardings=jax.NamedSharding(plan.mesh, P())).lower(
        on_mesh.out_info, *given[0]).compile()
    process_allgather("compiled")               # all compile before any device waits for another
    apart = []                                  # for each batch: whether something differs
    for args in given:
        found = jax.device_get(beside(jax.block_until_ready(on_mesh(*args)), *args))
        gradients = [value.size for name, value in found.items() if _is_gradient(name)]
        if gradients and not np.any(gradients) or not np.isfinite(
                [found["the sum"].size, found["the count"].size, *gradients]).all():
            continue
        times = process_allgather(_times_allowed(found, is_narrow))[0]
        what = sorted((name for name in found if times[name] > 1), key=_is_gradient)
        apart.append(bool(what))
        if what and (max(times.values()) > 3 or sum(apart) == 2):
            texts = [f"{name} by {_ratio(*found[name][:2]):.1%}" for name in what[:3]]
            return ", ".join(texts) + f" and {len(what) - 3} more" * (len(what) > 3)
    return "" if apart else None


def _is_gradient(name):
    return name.startswith("the gradient")


@np.errstate(all="ignore")
def _times_allowed(found, is_narrow):
    """{name: difference / allowed difference} of each value. Allowed is a share of the value plus
    four times its change when weights are moved by rounding errors. (The smallest gradients are
    nothing but rounding errors: say of a bias that shifts all scores equally.)"""
    of_sums, of_gradients = SHARES_16 if is_narrow else SHARES_32
    least = 1e-9 * np.linalg.norm([x.size for name, x in found.items() if _is_gradient(name)])
    return {name: _ratio(np.maximum(x.gap - least, 0), of_gradients * x.size + 4 * x.noise)
            if _is_gradient(name) else _ratio(x.gap, of_sums * x.size + 4 * np.nan_to_num(x.noise))
            for name, x in found.items()}


@np.errstate(all="ignore")
def _ratio(gap, allowed):
    """gap / allowed; infinite if that is NaN."""
    ratio = np.float64(gap) / allowed if gap != 0 else 0.0
    return float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf))


# -------------------------------------------------------------------------------------------
# What is compared: sums, gradient, and the sums of the batch as a held-out one

def _named(sums, gradient, held):
    """{the name of each of them: its value}; `held` is () where nothing is evaluated."""
    found = {}
    for what, (total, count, others) in zip(("", "held-out "), filter(None, (sums, held))):
        found |= {f"the {what}sum": total, f"the {what}count": count}
        found |= {f"its {what}other sum {name!r}": x for name, x in others.items()}
    return found | {f"the gradient of {path}": g for path, g in by_path(gradient).items()}


def _on_mesh(plan, gradients, evaluate, params, batch):
    places = shardings(plan.stored, plan.mesh)
    chunks = 1 if plan.mode == JIT else plan.config.network.chunks
    staged = permute_layers(params, places, chunks)
    trained, frozen = plan.in_two(staged)
    grad, sums = gradients(trained, batch, frozen)
    return (sums, permute_layers(grad, plan.in_two(places)[0], chunks, back=True),
            evaluate(trained, held_out(batch), frozen) if evaluate else ())


def sums_and_gradient(loss: Callable, trained: Any, frozen: Any, batch: Any) -> tuple[Any, Any]:
    """What the loss returns, and the gradient of its sum with respect to the trained weights, on
    one device: what the step is compared with."""
    def with_sums(trained):
        sums = loss(in_one(trained, frozen), batch)
        return sums[0], sums

    (_, sums), gradient = jax.value_and_grad(with_sums, has_aux=True)(trained)
    return sums, gradient


def _new_weights(plan, key):
    """New weights, moved at random, as they are sharded."""
    params = jax.lax.with_sharding_constraint(plan.init(key), shardings(plan.stored, plan.mesh))
    return cast(_moved(params, jax.random.fold_in(key, 1), MOVED), plan.dtype)


def _at_new_weights(plan, compute, batch, key):
    """{name: value} of compute(params, batch)."""
    with jax.default_matmul_precision("highest"):
        return _named(*compute(_new_weights(plan, key), batch))


def _beside_one_device(plan, is_narrow, found, batch, key):
    """{name: Value} of what was `found` on the mesh. For the noise, one device's weights are moved
    twice more, by rounding errors."""
    rounding = jnp.float32(ROUNDING_16 if is_narrow else ROUNDING_32)
    held = any(name.startswith("the held-out") for name in found)

    def three(params, batch, key):
        def one(i):
            moved = _moved(params, jax.random.fold_in(key, i), jnp.where(i == 0, 0, rounding))
            return _named(*sums_and_gradient(plan.loss, *plan.in_two(moved), batch),
                          plan.loss(moved, held_out(batch)) if held else ())

        return jax.lax.map(one, jnp.arange(3))

    with jax.default_matmul_precision("highest"):
        wanted = untyped(three)(_whole(_new_weights(plan, key)), _whole(batch), key)
    for name, x in wanted.items():
        if x.shape[1:] != found[name].shape:
            raise ConfigError(f"{name} has the shape {list(found[name].shape)} on this mesh, and "
                              f"{list(x.shape[1:])} on one device: return what adds up over rows")
    return {name: Value(_norm(found[name], x[0]), _norm(x[0]),
                        jnp.maximum(_norm(x[1], x[0]), _norm(x[2], x[0])))
            for name, x in wanted.items()}


def _norm(x, other=0.0):
    """The norm of a difference, in which NaN and infinity are equal to themselves."""
    equal = (x == other) | jnp.isnan(x) & jnp.isnan(other)
    return jnp.linalg.norm(jnp.where(equal, 0, x - other).astype(jnp.float32))


def _moved(params, key, size):
    def move(w, key):
        if not jnp.issubdtype(w.dtype, jnp.floating):       # (a buffer of a step of one's own)
            return w
        rms = jnp.sqrt(jnp.mean(w * w))
        scale = (size * jnp.where(rms > 0, rms, 0.2)).astype(w.dtype)
        return w + scale * jax.random.normal(key, w.shape, w.dtype)

    return jax.tree.map(move, params, optax.tree.split_key_like(key, params))


def _whole(tree):
    """The tree, unsplit on each device if it is small, so that no compiler splits the reference."""
    is_little = 4 * sum(x.size for x in jax.tree.leaves(tree)) < 2**30
    return jax.lax.with_sharding_constraint(tree, P()) if is_little else tree


# -------------------------------------------------------------------------------------------
# Messages

def check_traceable(program: Program) -> None:
    """Trace the step (jax caches the trace for the compilation), and refuse a loss that one device
    can compute and that fails inside jax on the mesh."""
    try:
        jax.eval_shape(program.step, program.state, program.batch)
    except (TypeError, ValueError, NotImplementedError) as e:
        if isinstance(e, ConfigError) or program.plan.mode == JIT:
            raise
        raise _not_traceable(program.plan, e) from None


def _not_traceable(plan, e):
    where = f"mesh axis {' and '.join(plan.needs)}" if plan.needs else "inside a shard_map"
    return ConfigError(
        f"{where}: this loss cannot be computed there ({one_line(e)}){_by_hand(plan)}; what it "
        f"closes over must not lie on a mesh (jax.device_get takes it off), nor may it say where "
        f"arrays lie; {any_loss(*plan.needs)}, and with --step jit")


def _differs(plan, differ):
    """The refusal of a loss that differs on the mesh: what differs, and what to use instead."""
    config, axes = plan.config, [f"{a}={n}" for a, n in plan.sizes.items() if n > 1]
    splits = [f"--mesh {','.join(axes)}"] if axes else []
    cut = {"accumulate": config.accumulate, "microbatches": config.network.microbatches}
    splits += [f"--{name} {n}" for name, n in cut.items() if n > 1]
    return ConfigError(
        f"{' '.join(splits)}: this loss has other values than on one device: {differ}; a loss must "
        f"be a sum over rows (where rows are compared, get them by shard.all_rows, with "
        f"--accumulate 1), with noise from batch['seeds'] alone, and what it computes of the time, "
        f"the layers or the experts must go through shard.py (docs/tasks.md, What is refused, has "
        f"a line for each cause){_by_hand(plan)}; {any_loss(*plan.needs)}, and any other with "
        f"--step jit --accumulate 1")


def _by_hand(plan):
    if plan.mode != BY_HAND or plan.sizes["tensor"] == 1:
        return ""
    return ("; where shard.columns or shard.row is called, every product with a weight that tensor "
            "splits must go through them")
