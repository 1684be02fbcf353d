"""How a run begins: everything between its program and its first update.

    begin           opens the run's folder, makes or restores the state, compiles the step
    check_program   compares a custom loss on the mesh with the same loss on one device
    open_folder     the run's folder
"""

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import Any, Callable, Iterator

import jax
import numpy as np

from zigzag.core import hosts
from zigzag.core.report import Reporter
from zigzag.disk.batches import batch_arrays
from zigzag.disk.checkpoint import RunFolder, check_kept, run_record
from zigzag.disk.corpus import tokenizer_record
from zigzag.disk.mixture import numbers_at
from zigzag.disk.tokenizers import Tokenizer, copy_files
from zigzag.measure.hlo import collectives
from zigzag.measure.traffic import expected_traffic, is_complete
from zigzag.run import continuing
from zigzag.run.custom_loss import check_loss, check_traceable, must_compare
from zigzag.run.evaluation import check_task
from zigzag.run.loop import Loop, Task, frozen_state, prepare, report_header
from zigzag.run.made import Made
from zigzag.run.plan import Program, in_one, shapes_hash
from zigzag.run.trainer import Trainer


@contextlib.contextmanager
def begin(program: Program, task: Task, trainer: Trainer, say: Reporter,
          weights: Callable | None = None, record: dict[str, Any] | None = None,
          tokenizer: Tokenizer | None = None, log: Callable | None = None
          ) -> Iterator[tuple[Loop, Callable | None]]:
    """Yield (the loop, with the state of the run so far; the compiled step, or None if all steps
    are done). `weights`, `record`, `tokenizer` and `log` are fit's. At the end, wait for the last
    save."""
    config, plan = program.config, program.plan
    is_made = isinstance(task.examples, Made)
    record = record or (first_example(task, config.out) if config.out and not is_made else {})
    facts = {"shapes": shapes_hash(plan.params), **record,
             **(tokenizer_record(tokenizer) if tokenizer else {})}
    hosts.assert_same_everywhere(facts)     # (check_program has compared the configurations)

    def schedule_of(config):
        return plan.schedule or functools.partial(trainer.learning_rate, config)

    continuing.check_rates(config, schedule_of, trainer.old_config)
    if config.out:
        check_kept(program.saved(program.state))
    if config.out and "fingerprint" not in facts:       # (else main has looked, and printed them)
        continuing.check_steps({"steps": config.steps}, config.out)
        for line in [*continuing.first_lines(
                config, trainer.old_config,
                None if plan.schedule else trainer.learning_rate)][1:]:
            say.line(line)              # (`prepare` prints the first)
    first, of_first = frozen_state(program, weights)
    rates = continuing.rates(config, schedule_of(config))
    folder = open_folder(program, trainer, facts | of_first, rates, say, tokenizer)
    with folder or contextlib.nullcontext(), jax.set_mesh(program.mesh):
        loop = Loop(program, task, folder, say, lambda at: numbers_at(
            task.examples, config.seed, np.arange(config.batch) + at * config.batch), log, first)
        del first
        if is_made:
            task.examples.weights = lambda: program.permute(
                in_one(loop.state["params"], loop.state["frozen"]), back=True)
        report_header(program, say, trainer.hidden(),
                      trainer.networks.describe(config) if plan.trusted else "")
        step = prepare(loop, weights)
        if step:        # (what a step of one's own sends has no formula)
            say.collectives(collectives(step), [] if program.own else expected_traffic(plan),
                            not program.own and is_complete(plan))
        yield loop, step


def first_example(task: Task, out: str) -> dict[str, str]:
    """A fact about examples of which nothing else is recorded: a digest of the first one's row. (If
    collate makes another row of it each time, the digest that the run has.)"""
    def digest(rows):
        return hashlib.sha256(b"".join(name.encode() + np.ascontiguousarray(rows[name]).tobytes()
                                       for name in sorted(rows))).hexdigest()

    found = old = digest(task.first_row)
    if (Path(out) / "config.json").exists():
        old = run_record(out, "--out").get("first_example", found)
    if old != found and digest(batch_arrays(task.collate, [task.examples[0]])) != found:
        found = old
    return {"first_example": hosts.process_allgather(found)[0]}


def has_own_weights(program: Program, trainer: Trainer) -> bool:
    """Whether the weights are a custom task's, not those of the configuration's network."""
    plan, config = program.plan, program.config
    if plan.trusted or config.lora_rank:
        return False
    return not config.vocab_size or shapes_hash(plan.params) != shapes_hash(
        trainer.network(config).weight_shapes(config.network))


def open_folder(program: Program, trainer: Trainer, facts: dict[str, Any], rates: dict[str, float],
                say: Reporter, tokenizer: Tokenizer | None) -> RunFolder | None:
    """The run's folder, ready to save in or to continue; None where nothing is kept. `facts` are
    recorded beside the configuration; when a run continues, they must be the same as before."""
    config = program.config
    if not config.out:
        return None
    folder = RunFolder(config.out, trainer.record_of(config) | facts | {
        "rates": rates, "own_weights": has_own_weights(program, trainer)},
                       [*trainer.facts_of(config), *facts], trainer.read_old,
                       program.saved(program.state), config.keep, config.verify == "on",
                       config.patience, trainer.may_change(), config.change)
    if folder.changed:
        say.line(f"changed  {continuing.changes_text(folder.changed)}, noted in config.json")
    if tokenizer and jax.process_index() == 0:
        copy_files(tokenizer, Path(config.out))
    return folder


def check_program(build: Callable, task: Task, trainer: Trainer, make_gradients: Callable,
                  make_evaluate: Callable, make_batch: Callable, say: Reporter) -> Program:
    """The program of a task: build(), after comparing a custom loss, or an edited one, on the mesh
    with one device. Where they differ, build(typed=False) makes a program in which every device
    computes the loss as one device would, and the loss is refused if that differs too.
    make_gradients(plan) and make_evaluate(plan) are train.py's, and make_batch(config, mesh, task,
    shapes, update)."""
    program = build()
    hosts.assert_same_everywhere(trainer.record_of(program.config))
    check_task(program.config, program, task)
    if not must_compare(program.plan, say.line):
        return program
    hosts.watchdog.arm("compiling")
    batch = functools.partial(make_batch, program.config, program.mesh, task, program.batch)
    with jax.set_mesh(program.mesh):
        batch(0, 0)         # (what cannot be made is refused here, before anything is written)
        if program.own:
            return program.own.check(program, make_evaluate, batch, len(task.held_out) > 0,
                                     say.line)
        while not check_loss(program.plan, make_gradients, make_evaluate, batch,
                             len(task.held_out) > 0, say.line):
            program = build(typed=False)
        check_traceable(program)
    return program
