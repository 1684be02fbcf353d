"""How a run begins and ends: everything between its program and its first update, and after its
last.

    check_start     before anything runs, reject a program that doesn't fit its task
    running         open the run's folder, create or restore the state, compile the step
    open_folder     open the run's folder
    machine         make a run's mesh on the devices of one or many machines, or of --topology
"""

import collections
import contextlib
import functools
import os
from typing import Any, Callable, Iterator, Sequence

import jax

from zigzag.core import hosts
from zigzag.core.errors import ConfigError, one_line
from zigzag.core.files import digest
from zigzag.core.mesh import make_mesh, mesh_sizes, simulate_own_devices, slices_of
from zigzag.core.options import Values
from zigzag.core.parts import added, has_part, part
from zigzag.core.report import Reporter
from zigzag.disk.checkpoint import RunFolder, check_kept
from zigzag.disk.tokenizers import Tokenizer, copy_files, tokenizer_record
from zigzag.parallel import low_rank
from zigzag.parallel.hlo import collectives
from zigzag.parallel.network import network_of
from zigzag.run import continuing
from zigzag.run.custom_loss import must_compare
from zigzag.run.evaluation import check_task, evaluate
from zigzag.run.loop import (
    Loop,
    end_early,
    end_run,
    first_state,
    flush_metrics,
    prepare,
    report_header,
)
from zigzag.run.plan import Program, in_one, shapes_hash
from zigzag.run.task import GeneratedExamples, Task


@contextlib.contextmanager
def running(program: Program, task: Task, learning_rate: Callable, say: Reporter,
            stop: list[int], log: Callable | None = None) -> Iterator[Loop]:
    """Yield the loop, with the run's state so far and the compiled step (None if all steps are
    done). On exit, save the state if a signal arrived (in `stop`), wait for pending saves, and
    print how the run ended. learning_rate(config, update) is train.py's; `log` is fit's."""
    config, plan = program.config, program.plan
    is_generated = isinstance(task.examples, GeneratedExamples)
    record = task.record or (first_example(task) if config.out and not is_generated else {})
    facts = {"shapes": shapes_hash(plan.params), **record,
             **(tokenizer_record(task.tokenizer) if task.tokenizer else {})}
    hosts.assert_same_everywhere(facts)     # check_start has compared the configs

    def schedule_of(config):
        return plan.schedule or functools.partial(learning_rate, config)

    continuing.check_rates(config, schedule_of)
    if config.out:
        check_kept(program.saved(program.state))
    for line in continuing.first_lines(config, None if plan.schedule else learning_rate):
        say.line(line)
    first = None
    if config.network.lora_rank and config.out:     # no checkpoint holds frozen weights
        first = first_state(program, task.first_weights)
        with jax.set_mesh(program.mesh):
            facts["base_weights"] = low_rank.fingerprint(first["frozen"])
    folder = open_folder(program, facts, continuing.rates(config, schedule_of(config)), say,
                         task.tokenizer)
    with folder or contextlib.nullcontext(), jax.set_mesh(program.mesh):
        loop = Loop(program, task, folder, say, log, first)
        del first
        if is_generated:
            task.examples.weights = lambda: program.permute(
                in_one(loop.state["params"], loop.state["frozen"]), back=True)
        report_header(program, say)
        loop.step = prepare(loop)
        if loop.step:
            say.collectives(collectives(loop.step), *expected(program))
            for module in watchers(config):
                loop.step = module.watched(loop)
        say.hours.begin("step")
        say.hours.note(loop.at)
        yield loop
        flush_metrics(loop)
        say.hours.begin("save")
        if stop:
            end_early(loop, stop)
        elif not loop.evaluation and config.eval_every:     # the run had already finished
            evaluate(loop, is_new=False)
        say.hours.note(loop.at, is_last=True)       # a bucket gets this one
    say.hours.note(loop.at, is_last=True)
    if not stop:
        end_run(loop)


def watchers(config: Any) -> list[Any]:
    """Return the modules of parts that run something around each step (STEPS in their adds.py)."""
    return [part(module, f"--{flag}")
            for flag, module in collections.ChainMap(*added("STEPS")).items()
            if getattr(config, flag)]


def expected(program: Program) -> tuple[list, bool]:
    """Return (the sends we expect from each device per update, whether that list is complete), from
    the formulas in forecast/, which don't cover a custom step."""
    if program.own or not has_part("forecast"):
        return [], False
    traffic = part("forecast.traffic", "")
    return traffic.expected_traffic(program.plan), traffic.is_complete(program.plan)


def first_example(task: Task) -> dict[str, str]:
    """Return a fact to identify examples that have no record: a digest of the first row."""
    row = b"".join(name.encode() + rows.tobytes() for name, rows in sorted(task.first_row.items()))
    return {"first_example": hosts.process_allgather(digest(row))[0]}


def has_own_weights(program: Program) -> bool:
    """Return whether the weights belong to a custom task instead of the config's network."""
    plan, config = program.plan, program.config
    if plan.network or config.network.lora_rank:
        return False
    return not config.network.vocab_size or shapes_hash(plan.params) != shapes_hash(
        network_of(config).weight_shapes(config.network))


def open_folder(program: Program, facts: Values, rates: dict[str, float], say: Reporter,
                tokenizer: Tokenizer | None) -> RunFolder | None:
    """Return the run's folder, ready to save in or to resume, or None without --out. The folder
    records `facts` next to the config; they must stay the same when a run resumes."""
    config, state = program.config, program.saved(program.state)
    if not config.out:
        return None
    record = continuing.record_of(config) | facts | {
        "rates": rates, "own_weights": has_own_weights(program)}
    old = continuing.check_folder(type(config), config.out, continuing.facts_of(config) | facts,
                                  change=config.change, params=state["params"])
    if "changes" in old:        # from earlier starts
        record["changes"] = old["changes"]
    folder = RunFolder(config, record, continuing.changed_facts(config, record, old), state)
    if folder.changed:
        say.line(f"changed  {continuing.changes_text(folder.changed)}, noted in config.json")
    if tokenizer and jax.process_index() == 0:
        copy_files(tokenizer, folder.folder)
    return folder


def check_start(program: Program, task: Task, say: Reporter) -> bool:
    """Reject a program that doesn't fit its task, or that differs between processes. Return whether
    to compare its loss with one device's."""
    hosts.assert_same_everywhere(continuing.record_of(program.config))
    check_task(program.config, program, task)
    for module in watchers(program.config):
        module.check(program)
    compares = must_compare(program.plan, say.line)
    if compares:
        hosts.watchdog.arm("compiling")
    return compares


def machine(config: Any) -> Any:
    """Make a config's mesh on the --topology devices, on all processes' accelerators, or
    otherwise on as many simulated CPU devices as it needs."""
    simulate_own_devices(config)
    return make_mesh(devices_of(config), **mesh_sizes(config.mesh, config.shards))


def devices_of(config: Any) -> Sequence[Any]:
    """Join this run's processes, and return the --topology devices, or all of the run's devices."""
    hosts.init_distributed(config)
    topology = getattr(config, "topology", "")      # an option of forecast/
    if topology:
        devices = part("forecast.dry_run", f"--topology {topology}").topology_devices(
            topology, config.slices)
    else:
        try:
            devices = jax.devices()
        except (RuntimeError, AssertionError) as e:     # JAX_PLATFORMS=cuda on another machine
            raise ConfigError(f"jax finds no device (JAX_PLATFORMS="
                              f"{os.environ.get('JAX_PLATFORMS', '')}): {one_line(e)}") from None
    wanted, found = getattr(config, "slices", 1), slices_of(devices)
    if wanted > 1 and wanted != found:
        raise ConfigError(f"--slices {wanted}: these devices are in {found}; leave it out, or give "
                          f"--topology to compile for others")
    hosts.end_at_sigterm()
    return devices
