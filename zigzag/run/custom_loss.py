"""The check of a custom loss: its values on the mesh are compared with those on one device, before
a run begins.

    on the mesh                    sums, gradient and the sums of a held-out batch, compared with
                                   one device's for the same rows, in float32 if the loss can be

They differ if a batch is off by more than three times what rounding explains, or two of three
batches by more than that. Then the loss runs as on one device, without types, if that avoids the
difference and no axis needs more; else it is refused, and more computations on one device look for
the cause:

    the rows in parts              differs if the loss is not a sum over rows
    the rows in another order      differs if the index of a row in the batch matters
    some rows exchanged            tells whether only the index matters, or also the other rows

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


def check_loss(plan: Plan, make_gradients: Callable, make_evaluate: Callable,
               make_batch: Callable, evaluates: bool, say: Callable) -> bool:
    """Refuse a loss that has other values on this mesh, or in --accumulate parts, than on one
    device. Returns False if that can be avoided by gathering all weights, so that each device
    computes the loss as a single device does; else True.

    make_gradients(plan), make_evaluate(plan)   return the functions to compare, not compiled yet
    make_batch(update, rows)                    the first rows of an update's batch
    evaluates                                   whether there are held-out examples"""
    begin, notes = time.perf_counter(), []
    if evaluates:
        _check_held_out(plan)
    if plan.parts == 1 and not plan.typed:
        if plan.config.check:
            say("check    on this mesh only the compiler splits the loss: nothing is compared")
        return True
    # (Strips of any size: the run may cut its many rows where these few would not be cut.)
    small = dataclasses.replace(plan, accumulate=min(2, plan.accumulate), strip=min(1, plan.strip))
    rows = _rows_to_compare(small)
    if plan.parts == plan.mesh.size == 1 and not plan.config.check:
        batch, find = plan.batch, functools.partial(_only_trace, plan, evaluates)
    else:
        given = [(make_batch(at, rows), jax.random.key(plan.config.seed + at)) for at in range(3)]
        batch = given[0][0]
        dtype, is_narrow = _widest_dtype(plan, batch)
        small = dataclasses.replace(small, dtype=dtype)
        find = functools.partial(_find_difference, small, given, is_narrow, notes.append)
    try:
        found = find(functools.partial(_on_mesh, small, make_gradients(small),
                                       make_evaluate(small) if evaluates else None))
    except ConfigError:
        raise
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            say("this loss is not checked on this mesh: the check does not fit into memory")
            return True
        what, refusal = f"it ends in: {one_line(e)}", _not_traceable(plan, e)
    else:
        if found is None:
            if plan.trusted and not notes:
                notes.append("check    on this mesh the loss and its gradients are those of one "
                             f"device ({time.perf_counter() - begin:.1f} s)")
            for note in notes:
                say(note)
            return True
        if refusal := _cause_on_one_device(small, find, evaluates, batch, rows):
            raise refusal
        what, refusal = f"these would differ: {found.differ}", _not_this_mesh(plan, found, rows)
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


def _is_another_when_traced_again(plan, evaluates, batch):
    """Whether two traces of the loss differ: it takes a number from outside jax, which becomes a
    constant of the trace."""
    def trace(batch):
        closed = jax.make_jaxpr(lambda p, b: plan.loss(p, b))(_as_computed(plan), batch)
        return re.sub(" at 0x[0-9a-f]+", "", str(closed.jaxpr)), closed.consts

    for given in (batch, _held_out(batch)) if evaluates else (batch,):
        (text, constants), (other, others) = trace(given), trace(given)
        if text != other or not all(map(_is_same, constants, others)):
            return True
    return False


def _is_same(a, b):
    """Whether two constants, arrays or random keys, have the same bits (NaN has them, too)."""
    a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in (a, b))
    return a is b or a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _as_computed(plan):
    """The shapes of the weights, in the precision in which the step computes the loss."""
    return jax.eval_shape(lambda p: cast(p, plan.dtype), plan.params)


def _cause_on_one_device(plan, find, evaluates, batch, rows):
    """The refusal (a ConfigError) of a loss that differs on the mesh for a reason that shows on one
    device too; None if no such reason is found."""
    def alone(*terms):
        return find(functools.partial(_alone, plan, evaluates, terms))

    usual = np.arange(rows)
    if _is_another_when_traced_again(plan, evaluates, batch):
        return _not_a_function()
    in_pipeline = plan.config.microbatches if plan.sizes["pipe"] > 1 else 1
    parts = plan.parts * in_pipeline
    in_parts = parts > 1 and find(functools.partial(
        _in_parts, plan, parts, parts // plan.accumulate if evaluates else 0))
    if not in_parts:
        return None
    spread = usual * 0.618 % 1
    other = np.argsort(-spread)
    if in_order := alone((1, other)):
        # If the loss is a sum over (row, index), exchanging some rows, and then the other rows,
        # changes it in total by as much as exchanging all.
        some = spread < 0.5
        if not alone((1, np.where(some, other, usual)), (1, np.where(some, usual, other)),
                     (-1, other)):
            return _numbers_matter(plan, in_order, rows)
    return _not_a_sum(plan, in_parts, rows, rows // parts)


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


def _widest_dtype(plan, batch):
    """(dtype, whether anything is computed in 16 bits). The dtype is float32 if the loss can be
    traced in it; a loop inside may need the plan's own dtype."""
    params = jax.eval_shape(lambda p: cast(p, "float32"), plan.params)
    try:
        return "float32", computes_in_16_bits(plan.loss, params, batch)
    except (TypeError, ValueError):
        if plan.dtype == "float32":
            raise
        return plan.dtype, True


def _only_trace(plan, evaluates, compute):
    """In place of _find_difference, on one device, where there is nothing to compare with: only
    trace what would be compared. Refuse a loss of which two traces differ."""
    jax.eval_shape(compute, _as_computed(plan), plan.batch)
    if _is_another_when_traced_again(plan, evaluates, plan.batch):
        raise _not_a_function()


def _find_difference(plan, given, is_narrow, note, compute):
    """A Comparison of compute(params, batch) with one device, if they differ: in one batch by more
    than three times what rounding explains, or by more than that in two of three batches. Else
    None. Computed at weights moved at random, or, if nothing is finite there, at new weights.
    note(text) is called if there is nothing to compare."""
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
                return found._replace(differ=", ".join(what[:3]) + (
                    f" and {len(what) - 3} more" if len(what) > 3 else ""))
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
    names = ["the sum", "the count", *(f"its other sum {k!r}" for k in sorted(found.wanted[2])),
             "the held-out sum", "the held-out count"]
    held_noise = ()
    if found.held:
        names += [f"its other sum {k!r}, of held-out rows" for k in sorted(found.held[2])]
        held_noise = (*found.sums_noise[:2],
                      {k: found.sums_noise[2].get(k, 0.0) for k in found.held[2]})
    sums, wanted, noise = map(jax.tree.leaves, (
        (found.sums, found.held), (found.wanted, found.held_wanted),
        (found.sums_noise, held_noise)))
    times = {}
    for name, a, b, slack in zip(names, sums, wanted, noise):
        gap = np.where((a == b) | np.isnan(a) & np.isnan(b), 0, np.abs(a - b))
        times[name] = _ratio(gap, of_sums * np.abs(b) + 4 * np.nan_to_num(slack))
    gaps, norms, noise = map(by_path, (found.gaps, found.norms, found.gaps_noise))
    # (The smallest gradients are nothing but rounding errors: say of a bias that shifts all scores
    # equally.)
    least = 1e-9 * float(np.linalg.norm(list(norms.values())))
    for path, gap in gaps.items():
        times[f"the gradient of {path}"] = _ratio(
            np.maximum(gap - least, 0), of_gradients * norms[path] + 4 * noise[path])
    return times


def _ratio(gap, allowed):
    """The largest gap / allowed; infinite if that is NaN."""
    ratio = np.where(gap == 0, 0, gap / allowed)
    return float(np.nan_to_num(np.max(ratio, initial=0), nan=np.inf, posinf=np.inf))


# -------------------------------------------------------------------------------------------
# The functions that are compared: each returns sums, gradient, and the sums of the batch as a
# held-out one

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


def _in_parts(plan, parts, held_parts, params, batch):
    """On one device, with the rows in `parts` parts, and in `held_parts` for the held-out sums (0:
    there are none)."""
    def split(batch, parts):
        return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)

    def added(fn, batch, parts):
        return jax.tree.map(lambda x: x.sum(0), jax.lax.map(fn, split(batch, parts)))

    def compute(params, batch):
        learned = functools.partial(sums_and_gradient, plan.loss, *plan.in_two(params))
        held = added(functools.partial(plan.loss, params), _held_out(batch), held_parts) if (
            held_parts) else ()
        return *added(learned, batch, parts), held

    return untyped(compute)(_whole(params), _whole(batch))


def _alone(plan, evaluates, terms, params, batch):
    """On one device, the sum over `terms` (factor, indices of rows) of factor times the results for
    these rows."""
    def compute(params, batch):
        results = []
        for factor, numbers in terms:
            rows = jax.tree.map(lambda x, numbers=numbers: x[numbers], batch)
            found = (*sums_and_gradient(plan.loss, *plan.in_two(params), rows),
                     plan.loss(params, _held_out(rows)) if evaluates else ())
            results.append(jax.tree.map(lambda x, factor=factor: factor * x, found))
        return jax.tree.map(lambda *x: sum(x), *results)

    return untyped(compute)(_whole(params), _whole(batch))


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


SEEDS = ("make noise by jax.random from batch['seeds'], which belong to the examples; a held-out "
         "batch has no seeds: there make no noise, or noise that depends only on the row's content")


def _not_a_function():
    return ConfigError(
        f"this loss is not a function of its weights and its batch: two traces of it differ; a "
        f"number drawn or counted outside jax (np.random, a counter, the time) is another constant "
        f"in each compiled program: {SEEDS}")


def _splits(plan):
    """("FLAG and FLAG split the batch", the flags to use instead)."""
    sizes, config = plan.sizes, plan.config
    splits, instead = [], "--accumulate 1"
    if plan.parts > plan.accumulate:
        axes = ",".join(f"{a}={sizes[a]}" for a in BATCH_AXES if sizes[a] > 1)
        splits, instead = [f"--mesh {axes}"], "--step jit --accumulate 1"
        if sizes["pipe"] * sizes["seq"] > 1:
            instead += " and no pipe or seq in --mesh"
    if config.accumulate > 1:
        splits.append(f"--accumulate {config.accumulate}")
    if sizes["pipe"] > 1 and config.microbatches > 1:
        splits.append(f"--microbatches {config.microbatches}")
        instead += " --microbatches 1" if "no pipe" not in instead else ""
    return f"{' and '.join(splits)} {'splits' if len(splits) == 1 else 'split'} the batch", instead


def _numbers_matter(plan, found, rows):
    (got, wanted, what), (splits, instead) = _both(found), _splits(plan)
    return ConfigError(
        f"in this loss the number of a row in the batch matters: {rows} {what} give {wanted} (sum "
        f"/ count), the same rows in another order {got}; these differ: {found.differ}; {splits}, "
        f"and each part numbers its rows from 0. If it makes noise from arange(rows), or of the "
        f"shape of the batch: {SEEDS}. If it looks up rows of a table by their number, put them "
        f"into the batch, in collate. Or use {instead}")


def _not_a_sum(plan, found, rows, rows_of_part):
    (got, wanted, what), (splits, instead) = _both(found), _splits(plan)
    return ConfigError(
        f"this loss is not a sum over the rows of a batch: {rows} {what} together give {wanted} "
        f"(sum / count), in parts (of {rows_of_part} training rows) {got} in total; these differ: "
        f"{found.differ}; {splits}: return sums over rows (where rows are compared, get them by "
        f"shard.all_rows, with --accumulate 1), with noise from batch['seeds'] alone, or use "
        f"{instead}")


def _not_this_mesh(plan, found, rows):
    got, wanted, what = _both(found)
    axes = plan.needs or [f"{a}={n}" for a, n in plan.sizes.items() if n > 1]
    return ConfigError(
        f"mesh axis {' and '.join(axes)}: on this mesh the loss of {rows} {what} is {got} (sum / "
        f"count), on one device {wanted}; these differ: {found.differ}; {_partly_seen(plan)}: "
        f"{any_loss(*axes)}")


def _partly_seen(plan):
    """The likely causes, for the axes over which the loss splits itself: code that sees only a part
    of the time, the layers or the experts."""
    needs = {need.split("=")[0] for need in plan.needs}
    causes = [text for axes, text in (
        ({"pipe", "seq", "tensor"}, "code that picks, pools or numbers positions of the time "
                                    "without shard.whole_time"),
        ({"pipe"}, "code that adds up layers' weights outside shard.pipelined_loss"),
        ({"expert"}, "code that adds up experts' weights outside shard.experts")) if needs & axes]
    if not causes:
        return ("the split of its rows does not explain that: a loss must depend only on its "
                "weights and its batch, and must not amplify rounding errors")
    sees = "sees only a part of them there" + (
        ", and shard.pipelined_loss must be told --chunks" if plan.config.chunks > 1 else "")
    return f"{', or '.join(causes)}, {sees}{_by_hand(plan)}"


def _by_hand(plan):
    if plan.mode != BY_HAND or plan.sizes["tensor"] == 1:
        return ""
    return ("; where shard.columns or shard.row is called, every product with a weight that tensor "
            "splits must go through them")
