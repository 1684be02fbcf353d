"""Evaluation on held-out examples.

    check_task      before training starts, reject flags that don't fit the task
    evaluate        compute predictions, a metric, and the loss on all held-out examples
    predict_all     predict for a whole data set, in order, on any mesh
    preview         continue a held-out text with a decoder, or answer a question

Results are the same on every mesh, up to rounding. Each example counts once; the last batch's
padding doesn't count.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, as_given, did_you_mean
from zigzag.core.hosts import process_allgather, watchdog
from zigzag.core.mesh import row_groups
from zigzag.core.parts import part
from zigzag.disk.batches import batch_arrays, place_batch
from zigzag.disk.checkpoint import best_of
from zigzag.generate.rows import cut_at_end
from zigzag.run import averages, loggers
from zigzag.run.loop import SHOWN, Loop, flush_metrics, plain
from zigzag.run.plan import LOGGED, Program, check_names, held_out
from zigzag.run.task import Task

# The number of new ids in the text that an evaluation prints.
NEW_IDS = 160


def check_task(config: Any, program: Program, task: Task) -> None:
    """Reject flags that don't fit this task, and a --best that names none of its numbers."""
    loggers.check(config)
    metric = getattr(config, "metric", "")      # an option of tasks/
    if not len(task.held_out):
        given = [f"--{flag} {as_given(value)}" for flag, value in (
            ("best", config.best), ("eval_first", config.eval_first), ("metric", metric)) if value]
        if given or task.metric:
            what = [*given, "fit's metric"][0]
            raise ConfigError(f"{what}: there are no held-out examples to evaluate")
    if task.metric and not task.predict:
        raise ConfigError("metric compares the outputs of predict: give fit a predict")
    if metric and not task.metric:
        raise ConfigError(f"--metric {metric}: the command line has metrics for pairs of texts (a "
                          f"model with an encoder) and for classes; give fit a custom metric")
    check_names(program.plan.sums[2], "the loss gave one of its other sums",
                {f"loss_{name}" for name in task.sources})
    # Load the metric now, because it may need a package that isn't installed.
    of_metric = part("tasks.metrics", f"--metric {metric}").names(metric) if metric else []
    # We learn which names a custom metric returns only after it has run.
    if config.best and (metric or not task.metric):
        plan = program.plan
        _, _, others = jax.eval_shape(plan.loss, plan.params, held_out(plan.batch))
        _check_best(config.best, [
            "eval_loss", *(["bits_per_byte"] if task.bits_per_nat else []),
            *(f"eval_{name}" for name, x in others.items() if not x.shape),
            *of_metric])


def _check_best(several, known):
    for best in several:
        name = best.partition(":")[2]
        if name not in known:
            raise ConfigError(f"--best {best}: an evaluation of this task reports "
                              f"{', '.join(known)}" + did_you_mean(name, known))


# -------------------------------------------------------------------------------------------
# An evaluation

# The maximum number of held-out tokens per evaluation without --eval_tokens.
MOST_TOKENS = 2**17
# Generating the text to print takes about as long as a forward pass over this many tokens.
SHOWN_TEXT = 8 * NEW_IDS


def tokens_to_evaluate(config: Any) -> int:
    """Return how many held-out tokens an evaluation reads. All of a run's evaluations may take a
    fifth of its time, but each reads at least a batch. A forward pass takes a third of a step."""
    c, batch = config, config.batch * config.network.seq_len
    count = -(-c.steps // (c.eval_every or c.steps)) + c.eval_first
    return min(MOST_TOKENS, max(batch, 3 * c.steps * batch // 4 // count - SHOWN_TEXT))


def evaluate(loop: Loop, is_new: bool = True) -> bool:
    """Evaluate, report the result, and return whether it's the best so far by any --best criterion.
    If the result isn't new, because an earlier run ended at this step, don't write it to disk, and
    don't count it as the best."""
    task, program = loop.task, loop.program
    if not len(task.held_out):
        return False
    flush_metrics(loop)
    before = loop.reporter.hours.begin("evaluation")
    watchdog.arm("an evaluation")
    loss, others = _held_out_means(program, task, loop.state)
    row = {"step": loop.at, "eval_loss": loss, "train_loss": loop.reporter.training_loss(),
           "bits_per_byte": None if task.bits_per_nat is None else loss * task.bits_per_nat,
           **others}
    shown = {}
    if task.predict:
        params = program.permute(program.weights(loop.state), back=True)
        count = min(len(task.held_out), task.predicted or len(task.held_out))
        loop.outputs = predict_all(program, task, params, count)
        row |= _apply_metric(task, loop.outputs, count, row)
        if task.show:
            shown = task.show(jax.tree.map(lambda x: x[:SHOWN], loop.outputs))
    loop.reporter.evaluation(row, shown)
    loop.evaluation = row
    _check_best(program.config.best, [name for name, x in row.items()
                                      if isinstance(x, float) and name != "train_loss"])
    is_best = is_new and _is_best(loop, row)
    if is_new:
        loop.write(row)
        loop.reporter.losses = []
    loop.reporter.hours.begin(before)
    watchdog.arm("a step")
    return is_best


def _is_best(loop, row):
    """Return whether this evaluation is the best so far by any --best criterion."""
    at, is_best = loop.at, False
    for best in loop.program.config.best:
        found = {**loop.best.get(best, {}), at: row}
        step = best_of(best, found)
        loop.best[best] = {} if step is None else {step: found[step]}
        if step == at:
            loop.reporter.line(f"step {at} is the best so far (--best {best})")
            is_best = True
    return is_best


def _held_out_means(program, task, state):
    """Return (mean held-out loss, {name: mean} for each source and for the loss's other sums)."""
    first, totals = 0, {}
    for name, count in (task.sources or {"": len(task.held_out)}).items():
        for sums in _held_out_sums(program, task, state, first, first + count):
            for key in {name, ""}:
                totals[key] = jax.tree.map(_add, totals[key], sums) if key in totals else sums
        first += count
    loss, count, others = totals.pop("")
    means = {f"eval_loss_{name}": float(loss / (count or 1))
             for name, (loss, count, _) in totals.items()}
    return float(loss / (count or 1)), means | {
        f"eval_{name}": plain(x / (count or 1)) for name, x in others.items()}


def _held_out_sums(program, task, state, first, last):
    """Yield the loss's sums over batches of held-out examples, from `first` up to `last`."""
    config, groups = program.config, row_groups(program.mesh)
    while first < last:
        rows = min(rows_at_once(config), last - first)
        if config.collectives == "explicit" and "all_rows" not in program.plan.names:
            rows = rows // groups * groups or rows      # fewer rows than groups: one padded batch
        # Rows that a loss compares stay in the same batch. With jit, any loss may compare rows.
        batch = _batch(program, task, first, rows)
        # Wait for the result: collectives that nobody awaits deadlock the CPU backend.
        yield jax.tree.map(lambda x: np.asarray(x, float), jax.device_get(
            program.evaluate(averages.used(state), batch, state["frozen"])))
        first += rows


def rows_at_once(config: Any) -> int:
    return config.eval_batch or config.batch // config.accumulate


def _add(a, b):
    if a.shape != b.shape:
        raise ConfigError(f"one of the loss's other sums has the shape {list(a.shape)} for some "
                          f"batches and {list(b.shape)} for others: return what adds up over rows")
    return a + b


def _batch(program, task, first, rows):
    """Make a batch of `rows` held-out examples starting at `first`. Past the end, repeat the last
    example."""
    last = len(task.held_out) - 1

    def make(begin, end):
        return batch_arrays(task.collate, [task.held_out[min(i, last)]
                                           for i in range(first + begin, first + end)])

    return place_batch(program.mesh, make, rows)


# -------------------------------------------------------------------------------------------
# Predictions

def predict_all(program: Program, task: Task, params: Any, count: int) -> Any:
    """Return the outputs of task.predict(params, batch) for the first `count` held-out examples, in
    order: a tree of numpy arrays [count, ...], in every process. All batches have the same number
    of rows, so jax compiles a single program. Drop the last batch's padding."""
    groups = row_groups(program.mesh)
    rows = min(max(rows_at_once(program.config) // groups, 1), -(-count // groups)) * groups
    compiled = jax.jit(task.predict, compiler_options=program.plan.compiler_options,
                       out_shardings=NamedSharding(program.mesh, P()))
    parts = []
    for first in range(0, count, rows):
        outputs = jax.device_get(compiled(params, _batch(program, task, first, rows)))
        _check_outputs(outputs, rows, [*parts, outputs][0])
        parts.append(jax.tree.map(lambda x: x[:count - first], outputs))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _check_outputs(outputs, rows, first):
    shapes = [np.shape(x) for x in jax.tree.leaves(outputs)]
    wanted = [(rows, *np.shape(x)[1:]) for x in jax.tree.leaves(first)]
    if shapes != wanted:
        raise ConfigError(f"predict returned arrays of shapes {shapes} for {rows} examples, not "
                          f"{wanted}: the first dimension must count the examples, and every batch "
                          f"must be padded to the same shape")


def _apply_metric(task, outputs, count, row):
    """Return the metric's numbers by name. Every process returns process 0's."""
    if not task.metric:
        return {}
    examples = task.held_out if count == len(task.held_out) else [
        task.held_out[i] for i in range(count)]
    found = task.metric(outputs, examples)
    found = found if isinstance(found, dict) else {"metric": found}
    check_names(found, "the metric gave a number", {*LOGGED, *row})
    for name, x in found.items():
        if np.asarray(x).dtype.kind not in "biufO" or np.ndim(x) or x is None:
            raise ConfigError(f"the metric gave {repr(x)[:60]} as {name!r}: expected a number, or "
                              f"a dict of numbers")
    return process_allgather({name: float(x) for name, x in found.items()})[0]


def preview(tokenizer: Any, write: Callable, begin: int, question: np.ndarray
            ) -> tuple[Callable, Callable]:
    """Make a decoder's (predict, show). predict continues the first `begin` tokens of a held-out
    row. Given a `question` (packing.question_in), it answers that in every row instead, so shapes
    don't change between evaluations. write(params, batch) returns new ids for `tokens`."""
    is_asked = len(question) > 0
    begin = len(question) or begin

    def predict(params, batch):
        tokens = batch["tokens"][:, :begin]
        tokens = jnp.broadcast_to(question, (len(tokens), begin)) if is_asked else tokens
        return jnp.concatenate([tokens, write(params, {"tokens": tokens})], 1)

    def show(outputs):
        before, new = outputs[0][:begin].tolist(), outputs[0][begin:].tolist()
        new = tokenizer.decode(cut_at_end(tokenizer.ends, new) if is_asked else new)
        if is_asked:
            return {"question": tokenizer.spelled(before), "answer": new}
        return {"prompt": tokenizer.decode(before), "written": new}

    return predict, show

