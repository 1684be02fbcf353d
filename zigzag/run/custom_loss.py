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
passed (zigzag/core/tested.py), which compares it with one device on every axis.
"""

import dataclasses
import functools
import math
import re
import time
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from zigzag.core import tested
from zigzag.core.compiler import LOOP_BESIDE_GATHERS
from zigzag.core.errors import ConfigError, any_loss, one_line
from zigzag.core.hosts import process_allgather
from zigzag.core.mesh import BATCH_AXES, by_path, cast, platform, row_groups, shardings, untyped
from zigzag.parallel.storage import permute_layers
from zigzag.rule.jaxprs import computes_in_16_bits
from zigzag.run.modes import BY_HAND, JIT
from zigzag.run.plan import Plan, Program, in_one

# To measure the effect of rounding on a loss, weights are moved by this share of their size, if all
# is computed in float32, or if some of it is in 16 bits.
ROUNDING_32, ROUNDING_16 = 2.0**-20, 2.0**-8
# The relative differences that are allowed in (sums, gradients), in these two cases.
SHARES_32, SHARES_16 = (3e-5, 2e-4), (6e-3, 2e-2)
# All rows of a batch are compared if it has at most this many numbers.
SMALL = 2**14


class Comparison(NamedTuple):
    """Two results for the same rows. There is a norm for each weight."""
    sums: Any               # (sum, count, other sums) on the mesh, or of a batch in parts
    wanted: Any             # (sum, count, other sums) on one device
    sums_noise: Any         # the change of `wanted` when weights are moved by rounding errors
    gaps: Any               # norms of the differences of the gradients
    norms: Any              # norms of one device's gradient
    gaps_noise: Any         # norms of the change of that gradient by rounding errors
    held: Any = ()          # the sums of a held-out batch, on the mesh
    held_wanted: Any = ()   # and on one device
    differ: Any = ()        # text: the values that differ by more than rounding explains


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


def small_plan(plan: Plan) -> Plan:
    """The plan of what is compared: `plan` with at most two parts, and in float32 if the loss can
    be traced in it (a loop inside may need the plan's own dtype)."""
    if not _is_compared(plan):
        return plan
    # (Strips of any size: the run may cut its many rows where these few would not be cut.)
    small = dataclasses.replace(plan, accumulate=min(2, plan.accumulate), strip=min(1, plan.strip))
    try:
        jax.eval_shape(plan.loss, _as_computed(plan, "float32"), plan.batch)
    except (TypeError, ValueError):
        if plan.dtype == "float32":
            raise
        return small
    return dataclasses.replace(small, dtype="float32")


def _is_compared(plan):
    """Whether there is more than one device, or part of a batch, to compare with one device."""
    if plan.parts == 1 and not plan.typed:
        return False
    return plan.config.check or plan.parts > 1 or plan.mesh.size > 1


def check_loss(plan: Plan, small: Plan, gradients: Callable, evaluate: Callable | None,
               make_batch: Callable, say: Callable) -> bool:
    """Refuse a loss that has other values on this mesh, or in --accumulate parts, than on one
    device. Returns False if that can be avoided by gathering all weights, so that each device
    computes the loss as a single device does; else True.

    small                   small_plan(plan)
    gradients, evaluate     train.py's functions for it, not compiled yet; evaluate is None if there
                            are no held-out examples
    make_batch(update, rows)    the first rows of an update's batch"""
    begin, notes = time.perf_counter(), []
    if evaluate:
        _check_held_out(plan)
    if plan.parts == 1 and not plan.typed:
        if plan.config.check:
            say("check    on this mesh only the compiler splits the loss: nothing is compared")
        return True
    compute = functools.partial(_on_mesh, small, gradients, evaluate)
    rows, found = _rows_to_compare(small), None
    try:
        if _is_compared(plan):
            given = [(make_batch(at, rows), jax.random.key(plan.config.seed + at))
                     for at in range(3)]
            found = _find_difference(small, given, notes.append, compute)
        else:
            jax.eval_shape(compute, _as_computed(plan), plan.batch)
    except ConfigError:
        raise
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            say("this loss is not checked on this mesh: the check does not fit into memory")
            return True
        what, refusal = f"it ends in: {one_line(e)}", _not_traceable(plan, e)
    else:
        # (A network's own loss is no such function; and nothing else finds one on one device.)
        if (found or not _is_compared(plan)) and _differs_when_traced_again(plan, bool(evaluate)):
            raise _not_a_function()
        if found is None:
            if plan.trusted and not notes:
                notes.append("check    on this mesh the loss and its gradients are those of one "
                             f"device ({time.perf_counter() - begin:.1f} s)")
            for note in notes:
                say(note)
            return True
        what, refusal = f"these would differ: {found.differ}", _differs(plan, found, rows)
    if plan.typed and not plan.needs:
        say(f"this loss is computed as on one device, with all weights gathered at once: on this "
            f"mesh {what}")
        return False
    raise refusal


def _check_held_out(plan):
    """Refuse a loss that needs batch["seeds"], which only training batches have."""
    try:
        jax.eval_shape(plan.loss, _as_computed(plan), _held_out(plan.batch))
    except KeyError as e:
        if e.args != ("seeds",):
            raise
        raise ConfigError("this loss reads batch['seeds'], which a held-out batch does not have: "
                          "make no noise where \"seeds\" is not in the batch") from None


def _differs_when_traced_again(plan, evaluates):
    """Whether two traces of the loss differ: it takes a number from outside jax, which becomes a
    constant of the trace."""
    def trace(batch):
        closed = jax.make_jaxpr(lambda p, b: plan.loss(p, b))(_as_computed(plan), batch)
        return re.sub(" at 0x[0-9a-f]+", "", str(closed.jaxpr)), closed.consts

    for given in (plan.batch, _held_out(plan.batch)) if evaluates else (plan.batch,):
        (text, constants), (other, others) = trace(given), trace(given)
        if text != other or not all(map(_is_same, constants, others)):
            return True
    return False


def _is_same(a, b):
    """Whether two constants, arrays or random keys, have the same bits (NaN has them, too)."""
    a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in (a, b))
    return a is b or a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _as_computed(plan, dtype=None):
    """The shapes of the weights, in this precision, or that in which the step computes the loss."""
    return jax.eval_shape(lambda p: cast(p, dtype or plan.dtype), plan.params)


def _held_out(batch):
    """A batch as a held-out one: without seeds."""
    return {k: v for k, v in batch.items() if k != "seeds"}


def _rows_to_compare(plan):
    """The number of rows to compare: all rows of a batch if they are small, so that any coupling of
    rows is as in an update; else a few for each device."""
    config, cut = plan.config, plan.accumulate * row_groups(plan.mesh)
    numbers = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(plan.batch))
    each = config.batch // cut
    few = math.gcd(config.microbatches, each) * (2 if each > config.microbatches else 1)
    return cut * (each if config.batch * numbers <= SMALL else few)


def _find_difference(plan, given, note, compute):
    """A Comparison of compute(params, batch) with one device, if they differ: in one batch by more
    than three times what rounding explains, or by more than that in two of three batches. Else
    None. Computed at weights moved at random, or, if nothing is finite there, at new weights.
    note(text) is called if there is nothing to compare."""
    is_narrow = plan.dtype != "float32" or computes_in_16_bits(
        plan.loss, _as_computed(plan), given[0][0])
    options = plan.compiler_options
    if plan.sizes["pipe"] > 1:
        options |= LOOP_BESIDE_GATHERS.get(platform(plan.mesh), {})
    compiled = jax.jit(
        functools.partial(_beside_one_device, plan, compute, is_narrow),
        out_shardings=jax.NamedSharding(plan.mesh, P()),
        compiler_options=options).lower(*given[0], jnp.float32(0)).compile()
    process_allgather("compiled")               # all compile before any device waits for another
    is_checked, apart = False, 0
    for size in (0.1, 0.0):
        for args in given:
            found = jax.device_get(compiled(*args, jnp.float32(size)))
            norms = jax.tree.leaves(found.norms)
            if norms and not np.any(norms) or not np.isfinite([*found.wanted[:2], *norms]).all():
                continue
            times = process_allgather(_times_allowed(found, is_narrow))
            times = {name: max(t[name] for t in times) for name in times[0]}
            what = [name for name, t in times.items() if t > 1]
            is_checked, apart = True, apart + bool(what)
            if what and (max(times.values()) > 3 or apart == 2):
                return found._replace(differ=_by_how_much(found, what))
        if is_checked:
            return None
    note("this loss is not checked on this mesh: for each of the first three batches its gradient "
         "is zero, or it or its gradient is not finite")
    return None


@np.errstate(all="ignore")
def _times_allowed(found, is_narrow):
    """{name: difference / allowed difference} of each value and gradient. Allowed is a share of the
    value plus four times its change when weights are moved by rounding errors."""
    of_sums, of_gradients = SHARES_16 if is_narrow else SHARES_32
    return {x.name: _ratio(x.gap, (of_gradients if x.is_gradient else of_sums) * x.size
                           + 4 * x.noise) for x in _gaps(found)}


class Gap(NamedTuple):
    """The difference of a value, or of a weight's gradient, between the mesh and one device."""
    name: str
    gap: Any
    size: Any               # of one device's
    noise: Any              # its change when weights are moved by rounding errors
    is_gradient: bool = False


@np.errstate(all="ignore")
def _gaps(found):
    names = ["the sum", "the count", *(f"its other sum {k!r}" for k in sorted(found.wanted[2])),
             "the held-out sum", "the held-out count"]
    held_noise = ()
    if found.held:
        names += [f"its other sum {k!r}, of held-out rows" for k in sorted(found.held[2])]
        held_noise = (*found.sums_noise[:2],
                      {k: found.sums_noise[2].get(k, 0.0) for k in found.held[2]})
    gaps = []
    for name, a, b, noise in zip(names, *map(jax.tree.leaves, (
            (found.sums, found.held), (found.wanted, found.held_wanted),
            (found.sums_noise, held_noise)))):
        gap = np.where((a == b) | np.isnan(a) & np.isnan(b), 0, np.abs(a - b))
        gaps.append(Gap(name, gap, np.abs(b), np.nan_to_num(noise)))
    norms, noise = by_path(found.norms), by_path(found.gaps_noise)
    # (The smallest gradients are nothing but rounding errors: say of a bias that shifts all scores
    # equally.)
    least = 1e-9 * float(np.linalg.norm(list(norms.values())))
    return gaps + [Gap(f"the gradient of {path}", np.maximum(gap - least, 0), norms[path],
                       noise[path], True) for path, gap in by_path(found.gaps).items()]


@np.errstate(all="ignore")
def _by_how_much(found, names):
    """Text: the first of these values and gradients, and their relative differences."""
    shares = {x.name: _ratio(x.gap, x.size) for x in _gaps(found)}
    texts = [name + (f" (by {shares[name]:.1%})" if math.isfinite(shares[name]) else "")
             for name in names[:3]]
    return ", ".join(texts) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ratio(gap, allowed):
    """The largest gap / allowed; infinite if that is NaN."""
    ratio = np.where(gap == 0, 0, gap / allowed)
    return float(np.nan_to_num(np.max(ratio, initial=0), nan=np.inf, posinf=np.inf))


# -------------------------------------------------------------------------------------------
# What is compared: sums, gradient, and the sums of the batch as a held-out one

def _on_mesh(plan, gradients, evaluate, params, batch):
    places = shardings(plan.stored, plan.mesh)
    chunks = 1 if plan.mode == JIT else plan.config.chunks
    staged = permute_layers(params, places, chunks)
    trained, frozen = plan.in_two(staged)
    grad, sums = gradients(trained, batch, frozen)
    return (sums, permute_layers(grad, plan.in_two(places)[0], chunks, back=True),
            evaluate(trained, _held_out(batch), frozen) if evaluate else ())


def sums_and_gradient(loss: Callable, trained: Any, frozen: Any, batch: Any) -> tuple[Any, Any]:
    """What the loss returns, and the gradient of its sum with respect to the trained weights, on
    one device: what the step is compared with."""
    def with_sums(trained):
        sums = loss(in_one(trained, frozen), batch)
        return sums[0], sums

    (_, sums), gradient = jax.value_and_grad(with_sums, has_aux=True)(trained)
    return sums, gradient


def _beside_one_device(plan, compute, is_narrow, batch, key, size):
    """A Comparison of compute(params, batch) with one device, at new weights moved at random by the
    share `size` of their size; its noise is measured by moving the weights twice by rounding
    errors."""
    params = jax.lax.with_sharding_constraint(plan.init(key), shardings(plan.stored, plan.mesh))
    params = cast(_moved(params, jax.random.fold_in(key, 1), size), plan.dtype)
    rounding = jnp.float32(ROUNDING_16 if is_narrow else ROUNDING_32)

    def three(params, batch, key):
        return jax.lax.map(lambda i: sums_and_gradient(plan.loss, *plan.in_two(_moved(
            params, jax.random.fold_in(key, i), jnp.where(i == 0, 0, rounding))), batch),
            jnp.arange(3))

    with jax.default_matmul_precision("highest"):
        sums, grad, held_sums = compute(params, batch)
        one_device = untyped(three)(_whole(params), _whole(batch), key)
        wanted, wanted_grad = jax.tree.map(lambda x: x[0], one_device)
        held_wanted = untyped(plan.loss)(
            _whole(params), _whole(_held_out(batch))) if held_sums else ()
    return Comparison(
        sums, wanted,
        jax.tree.map(lambda x: jnp.max(jnp.abs(x[1:] - x[0]), initial=0), one_device[0]),
        jax.tree.map(lambda a, b: _norm(a - b), grad, wanted_grad),
        jax.tree.map(_norm, wanted_grad),
        jax.tree.map(lambda x: jnp.maximum(_norm(x[1] - x[0]), _norm(x[2] - x[0])), one_device[1]),
        held_sums, held_wanted)


def _norm(x):
    return jnp.linalg.norm(x.astype(jnp.float32))


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
    if plan.needs:
        return ConfigError(f"mesh axis {' and '.join(plan.needs)}: this loss cannot be computed "
                           f"over it ({one_line(e)}){_by_hand(plan)}; "
                           f"{any_loss(*plan.needs)}")
    return ConfigError(f"this loss cannot be computed inside a shard_map ({one_line(e)}); what it "
                       f"closes over must not lie on a mesh (jax.device_get takes it off), nor may "
                       f"it say where arrays lie; or use --step jit")


def _both(found):
    """(the mean that was found, the mean it should be, "rows" or "held-out rows"), as texts. Those
    of the held-out batch if only these differ."""
    def mean(sums):
        total, count, _ = sums
        return f"{float(total):.6g} / {float(count):.6g}"

    is_held = found.differ.startswith("the held-out")
    pair = (found.held, found.held_wanted) if is_held else (found.sums, found.wanted)
    return *map(mean, pair), "held-out rows" if is_held else "rows"


def _not_a_function():
    return ConfigError(
        "this loss is not a function of its weights and its batch: two traces of it differ; a "
        "number drawn or counted outside jax (np.random, a counter, the time) is another constant "
        "in each compiled program; make noise by jax.random, from batch['seeds']")


def _splits(plan):
    """("FLAG and FLAG split the batch", the flags to use instead); ("", ...) if nothing does."""
    sizes, config = plan.sizes, plan.config
    splits, instead = [], "--accumulate 1"
    if plan.parts > plan.accumulate:
        axes = ",".join(f"{a}={sizes[a]}" for a in BATCH_AXES if sizes[a] > 1)
        splits, instead = [f"--mesh {axes}"], "--step jit --accumulate 1"
    if config.accumulate > 1:
        splits.append(f"--accumulate {config.accumulate}")
    if sizes["pipe"] > 1 and config.microbatches > 1:
        splits.append(f"--microbatches {config.microbatches}")
    verb = "splits" if len(splits) == 1 else "split"
    return f"{' and '.join(splits)} {verb} the batch" if splits else "", instead


def _differs(plan, found, rows):
    """The refusal of a loss that differs on the mesh: what differs, and what to use instead."""
    (got, wanted, what), (splits, instead) = _both(found), _splits(plan)
    axes = f"mesh axis {' and '.join(plan.needs)}" if plan.needs else ""
    instead = any_loss(*plan.needs) if plan.needs else f"or use {instead}"
    return ConfigError(
        f"{' and '.join(filter(None, (axes, splits)))}: on this mesh the loss of {rows} {what} is "
        f"{got} (sum / count), on one device {wanted}; these differ: {found.differ}; a loss must "
        f"be a sum over rows (where rows are compared, get them by shard.all_rows, with "
        f"--accumulate 1), with noise from batch['seeds'] alone, and what it computes of the time, "
        f"the layers or the experts must go through shard.py (docs/tasks.md, What is refused, has "
        f"a line for each cause){_by_hand(plan)}; {instead}")


def _by_hand(plan):
    if plan.mode != BY_HAND or plan.sizes["tensor"] == 1:
        return ""
    return ("; where shard.columns or shard.row is called, every product with a weight that tensor "
            "splits must go through them")
