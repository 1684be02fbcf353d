"""A run's folder: what the run writes to disk, and how commands read it back.

    out/config.json             the config, which must match when a run resumes, and each change
                                made by --change, with its step
    out/metrics.jsonl           a line per step and per evaluation
    out/lock                    held while a process writes to the folder
    out/checkpoints/STEP/       params    the weights alone
                                opt       what only training needs: optimizer state, and the step
                                meta      step, skipped updates, shapes, a checksum of every
                                          array, and the numbers of an evaluation at this step

orbax writes the arrays in the background, and renames each folder once it's complete. The checksums
catch what orbax misses, such as a flipped byte. If a checkpoint is damaged, the run renames it and
uses the previous one. Each process writes its own part of the arrays; process 0 writes everything
else.

A resumed run gets the same bits as one that never stopped. Weights, optimizer state and step are in
the checkpoint. Batches and dropout are functions of (seed, step), and the learning rate is a
function of the step. The run drops the lines of metrics.jsonl that come after the checkpoint, and
writes them again.

A run keeps its newest checkpoints and the best one (--best). No file stores which one is best: the
run derives it from the evaluations in the existing checkpoints.
"""

import contextlib
import ctypes
import functools
import gc
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from zigzag.core.chips import compiler_options
from zigzag.core.errors import ConfigError, CorruptCheckpoint, RunError, listed, one_line
from zigzag.core.files import (
    MARKER,
    appears,
    check_format,
    lock,
    record_in,
    run_has_begun,
    write_json,
    write_whole,
)
from zigzag.core.hosts import process_allgather, watchdog
from zigzag.core.mesh import by_path, cast, cast_like, mesh_of, platform
from zigzag.core.options import only, options, without
from zigzag.core.parts import mirrors, part, place
from zigzag.disk.lines import Record
from zigzag.disk.tokenizers import Tokenizer, read_record, tokenizer_of

# How much to compress at a time. For a 1.7 GB state, compressing everything at once took 0.9 GB
# more memory and was no faster.
SAVING_GB = 0.3
# On CPU devices, with at least this many bytes of state, the loop waits for each save to finish.
# A save reads the state in place there, so the next state would need more memory in the meantime.
WAITS_FROM = 2**28


# -------------------------------------------------------------------------------------------
# config.json

# The format of config.json and the files next to it. `run_record` rejects any other.
FORMAT = 1


def run_config(folder: str | Path, config: type, flag: str = "--run", **given: Any) -> Any:
    """Make a `config` (a dataclass) from the values in a run's config.json, overridden by the
    values in `given`. Fields newer than the run get their default or derived values."""
    record, path = run_record(folder, flag), place(folder) / "config.json"
    known = without(only(record, *options(config)), *given)
    if not known:
        raise ConfigError(f"{path} is damaged or not a run's: it has no configuration")
    try:
        return config(**{name: tuple(value) if isinstance(value, list) else value
                         for name, value in known.items()}, **given)
    except (ConfigError, TypeError) as e:
        raise ConfigError(f"{path} is damaged: {one_line(e)}") from None


def is_published(folder: str | Path) -> bool:
    """Return whether a folder or an address holds a published model."""
    return "model_type" in read_record(place(folder) / "config.json")


def run_record(folder: str | Path, flag: str = "--run") -> Record:
    """Read the config.json of the run that `flag` names."""
    path = place(folder) / "config.json"
    try:
        record = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(f"{flag} {folder}: no run there (cannot read {path}: {one_line(e)}); "
                          f"give the --out of a run that has started") from None
    if "model_type" in record:
        raise ConfigError(f"{flag} {folder}: this is a published model; give it as --model")
    check_format(record, FORMAT, f"{flag} {folder}", "train a new run")
    return record


def tokenizer_of_run(folder: str | Path) -> Tokenizer | None:
    """Return a run's tokenizer, or None if it has none."""
    record = run_record(folder)
    return tokenizer_of(place(folder), record) if "tokenizer" in record else None


# -------------------------------------------------------------------------------------------
# The folder of a run in progress

class OnDisk:
    """The counterpart of stores.uploads.Uploads for a run in a folder on disk: the lock file says
    which run writes there, and there is nothing to upload."""

    def __init__(self, folder: Path):
        self.word, self.holder = secrets.token_hex(8), (folder / "lock").read_text

    def nothing(self, *_: Any) -> None:
        pass

    take = start = check = wait = set_aside = finish = nothing


class RunFolder(contextlib.AbstractContextManager):
    """Saves and restores a run's state and writes its metrics. As a context manager, it closes the
    folder on exit."""

    def __init__(self, config: Any, record: Record, changed: dict[str, list], state: Any):
        """`config` is the run's config, and `record` becomes config.json. `changed` is {fact: [old,
        new]} for the facts changed by this start. `state` is a tree of shapes with shardings."""
        self.out, self.folder = config.out, place(config.out).resolve()
        self.record, self.changed, self.state = record, changed, state
        self.keep, self.verify = config.keep, config.verify == "on"
        self.is_process_0 = jax.process_index() == 0
        self.files, self.saved, self.restored = contextlib.ExitStack(), None, None
        self.has_damaged = False        # whether `restore` set aside damaged, newer checkpoints
        self.skipped = 0        # consecutive updates, up to the restored step, that learned nothing
        self.losses = []        # training losses from the last evaluation to the restored step
        self.best = set()       # steps of the best checkpoints
        # For a run in an object store, stores/ locks the address and uploads what appears here.
        mirror = mirrors.get(self.folder)
        self.uploads = part("stores.uploads", self.out).Uploads(
            mirror, config.patience, self.kept) if mirror else OnDisk(self.folder)
        if self.is_process_0:
            self._take()
        word = process_allgather(self.uploads.word)[0]
        sees = process_allgather(appears(lambda: self.uploads.holder() == word, self.folder,
                                         min(60, config.patience)))
        if not all(sees):
            raise ConfigError(f"--out {self.out}: process {sees.index(False)} does not see what "
                              f"process 0 writes there; give a folder that every process sees")
        self.manager = _orbax_manager(self.folder / "checkpoints", self, is_shared=not mirror)
        # Whether this process renames a checkpoint here. With a store, each process has a folder.
        self.renames = self.is_process_0 or mirror
        self.uploads.start(word)
        self.files.callback(self.uploads.finish)

    def _take(self):
        """Lock the folder until the process ends. In a new run, write config.json."""
        try:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            held = self.files.enter_context(open(self.folder / "lock", "a"))
            lock(held)
            self.uploads.take()
            held.truncate(0)
            held.write(self.uploads.word)
            held.flush()
            os.fsync(held.fileno())
            if not (self.folder / "config.json").exists():      # else `restore` writes it
                write_json(self.folder / "config.json", self.record)
            run_has_begun()
        except BlockingIOError:
            raise ConfigError(f"--out {self.out}: another run is writing there; give another "
                              f"--out, or wait for it to end") from None
        except OSError as e:
            raise ConfigError(f"--out {self.out}: cannot write there ({e.strerror})") from None

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Wait for the save in flight, which would otherwise be lost. If one of several processes
        failed, don't wait, because the others would never join."""
        if kind is not None and jax.process_count() > 1:
            return
        watchdog.arm("a save")
        with self.files, _as_run_error("the last checkpoint could not be saved"):
            self.manager.close()

    def restore(self, say: Callable[[str], Any]) -> Any:
        """Return the state in the newest readable checkpoint, sharded like `self.state`, or None if
        there is no checkpoint. Set damaged checkpoints aside."""
        state = None
        steps = process_allgather(_saved_steps(self.folder))[0]
        for at in steps:
            try:
                items, meta = read_checkpoint(_checkpoint(self.folder, at), state_items(self.state),
                                              f"--out {self.out}", self.verify)
                state = {"params": items["params"], **items["opt"]}
                self.saved, self.skipped = at, meta.get("skipped", 0)
                break
            except CorruptCheckpoint as e:
                name, self.has_damaged = self._set_aside(at), True
                say(f"checkpoint {at} is damaged ({e}): moved to {name}")
        if steps and state is None:
            raise RunError(f"none of the {len(steps)} checkpoints in {self.folder / 'checkpoints'} "
                           f"can be read; all were set aside, so the same command starts over from "
                           f"step 0")
        self.restored = self.saved
        if self.changed:
            self.record["changes"] = [*self.record.get("changes", []),
                                      {"step": self.saved or 0, **self.changed}]
        if self.is_process_0:
            write_json(self.folder / "config.json", self.record)
            self.metrics = self._go_on()
        return state

    def _set_aside(self, at):
        """Rename a damaged checkpoint once no process is reading it. Return its new name."""
        name = f"damaged-{at}"
        self.uploads.set_aside(at, name)
        if self.renames:
            path = _checkpoint(self.folder, name)
            shutil.rmtree(path, ignore_errors=True)     # an earlier one of this step
            _checkpoint(self.folder, at).rename(path)
        process_allgather(name)         # the other processes wait here
        self.manager.reload()
        return name

    def _go_on(self):
        """Open metrics.jsonl for appending. First drop incomplete lines, and the lines for steps
        after the restored one, which the run will rewrite."""
        path, lines = self.folder / "metrics.jsonl", []
        path.touch()
        for line in path.read_bytes().splitlines(keepends=True):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                if self.restored is None or row["step"] > self.restored or line[-1:] != b"\n":
                    continue
                lines.append(line)
                if "eval_loss" in row:
                    self.losses = []
                elif row.get("loss") is not None:
                    self.losses.append(float(row["loss"]))
        write_whole(path, b"".join(lines))
        return self.files.enter_context(open(path, "a", buffering=1))       # flushes each line

    def write(self, row: dict) -> None:
        """Append a line to metrics.jsonl. JSON has no infinity or NaN, so these become null."""
        self.uploads.check()
        if self.is_process_0:
            self.metrics.write(json.dumps(as_saved(row)) + "\n")

    def compile_checks(self, state: Any) -> None:
        """Compile the checks before the first step, so no save waits for the compiler. Remember
        which weights are finite."""
        items = state_items(state)
        checksums(items)
        self.finite = [path for path, is_finite in _of_leaves(_finite, items["params"]).items()
                       if is_finite]

    def read_best(self, several: Sequence[str]) -> dict[str, dict[int, dict]]:
        """Return {each --best criterion: {its best saved step: the evaluation}, or {}}. From
        here on, the folder keeps these checkpoints."""
        found = evaluations(self.folder) if several and self.is_process_0 else {}
        found = {int(step): numbers for step, numbers in process_allgather(found)[0].items()}
        steps = {best: best_of(best, found) for best in several}
        self.best = {*steps.values()} - {None}
        return {best: {} if at is None else {at: found[at]} for best, at in steps.items()}

    def save(self, at: int, state: Any, skipped: int, evaluation: dict, best: set[int]) -> None:
        """Start saving the state of step `at` with its evaluation's numbers. The save continues in
        the background. Keep the checkpoints of the best steps so far (`best`)."""
        if self.saved == at:
            return
        if self.is_process_0 and not self._is_ours():
            raise RunError(f"--out {self.out}: step {at} was not saved, because this folder was "
                           f"moved, deleted or replaced while the run wrote there")
        self.uploads.wait(self.saved)
        _trim_memory()
        items, self.best = state_items(state), best
        finite = _of_leaves(_finite, items["params"])
        if broken := [path for path in self.finite if not finite[path]]:
            self.drain()        # every process gets here
            raise RunError(f"step {at}: not saved, because {listed(broken, 2)} became infinite or "
                           f"NaN; try a smaller --lr")
        meta = {"step": at, "skipped": skipped, "evaluation": as_saved(evaluation),
                "leaves": _kinds(items), "checksums": checksums(items)}
        ocp = _orbax()
        with _as_run_error(f"the checkpoint of step {at} could not be saved"):
            is_saving = self.manager.save(at, force=True, args=ocp.args.Composite(
                meta=ocp.args.JsonSave(meta),
                **{name: ocp.args.StandardSave(tree) for name, tree in items.items()}))
        if not is_saving:
            raise RunError(f"the checkpoint of step {at} was not saved")
        self.saved = at
        if platform() == "cpu" and sum(x.nbytes for x in jax.tree.leaves(state)) > WAITS_FROM:
            self.drain(uploads=False)

    def _is_ours(self):
        config, lock = self.folder / "config.json", self.folder / "lock"
        return config.exists() and (not lock.exists() or lock.read_text() == self.uploads.word)

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return the steps of the checkpoints to keep: the last `keep` of these, and the best."""
        return {*steps[-self.keep:], *self.best}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """At the start of a save, tell orbax which checkpoints to keep. orbax deletes the rest only
        once that save is complete, so a kill never leaves fewer."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in self.kept(steps) for step in steps]

    def drain(self, uploads: bool = True) -> None:
        """Wait for the save in flight and its upload, which would otherwise be lost."""
        watchdog.arm("a save")
        with _as_run_error("the last checkpoint could not be saved"):
            self.manager.wait_until_finished()
        if uploads:
            self.uploads.wait(self.saved)
        _trim_memory()


@contextlib.contextmanager
def _as_run_error(what):
    """A context that turns any error, such as a full disk, into a one-line RunError, and silences
    errors raised later by background threads."""
    try:
        yield
    except Exception as e:
        logging.disable(logging.CRITICAL)
        sys.unraisablehook = _ignore
        raise RunError(f"{what}: {one_line(e)}; earlier checkpoints are complete") from None


def _orbax():
    """Import orbax.checkpoint lazily: it takes 0.4 s, and commands that don't use a checkpoint
    shouldn't pay for it."""
    import orbax.checkpoint
    return orbax.checkpoint


def _alone(ocp):
    """Return orbax's options for a process that reads or writes without waiting for others."""
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=None, active_processes={me},
                                              barrier_sync_key_prefix=str(me))


def _orbax_manager(folder, policy, is_shared):
    # By default orbax records which device held which part, and then won't open the checkpoint on
    # different devices without explicit shardings. Without that record it opens anywhere.
    ocp = _orbax()
    logging.getLogger("absl").setLevel(logging.CRITICAL)    # our messages take one line
    ocp.type_handlers.register_type_handler(
        Array, ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False), override=True)
    # With a folder of its own, each process writes files that don't need the others'. Create its
    # folders synchronously: otherwise orbax counts signals as if all processes shared one folder.
    who = {"multiprocessing_options": ocp.options.MultiprocessingOptions() if is_shared
           else _alone(ocp)}
    arrays = {name: ocp.StandardCheckpointHandler(save_concurrent_gb=SAVING_GB, use_ocdbt=is_shared,
                                                  **who) for name in ("params", "opt")}
    return ocp.CheckpointManager(
        folder, item_handlers={**arrays, "meta": ocp.JsonCheckpointHandler(**who)},
        options=ocp.CheckpointManagerOptions(
            preservation_policy=policy, create=is_shared, cleanup_tmp_directories=True, **who,
            async_options=ocp.AsyncOptions(create_directories_asynchronously=is_shared)))


def _trim_memory():
    """Return to the system the memory that the last save freed. glibc would keep it in the pools of
    orbax's threads: with a 1.7 GB state, 1.5 GB more after each of three saves."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def as_saved(value: Any) -> Any:
    """Return a value as JSON keeps it: lists instead of tuples, and None for a non-finite number,
    even in nested lists and dicts."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


# -------------------------------------------------------------------------------------------
# One checkpoint

def state_items(state: Any) -> dict[str, Any]:
    """Split a state into a checkpoint's two items: params (the weights) and opt (everything only
    training needs)."""
    return {"params": state["params"], "opt": without(state, "params")}


def _kinds(tree):
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in by_path(tree).items()}


def _differences(saved, name, tree):
    """Describe how the arrays in the item `name` differ from `saved`, the list in a checkpoint's
    description. Return '' if they match."""
    now = _kinds({name: tree})
    before = {path: kind for path, kind in saved.items() if path.split(".")[0] == name}
    found = [f"{path.removeprefix('params.')} was {before.get(path, 'not there')} and is "
             f"{now.get(path, 'gone')}"
             for path in sorted({*before, *now}) if before.get(path) != now.get(path)]
    more = [f"and {len(found) - 6} more"] if len(found) > 6 else []
    return "; ".join(found[:6] + more)


def differing_weights(folder: str | Path, params: Any) -> str:
    """Describe how the weights that a run has saved differ from `params`."""
    found = (_differences(meta.get("leaves", {}), "params", params)
             for meta in _descriptions(folder).values())
    return next(filter(None, found), "no checkpoint lists them")


def checksum(x: Array) -> Array:
    """Return a uint32 that changes if any single bit of x changes, and is the same on any mesh. It
    is the sum over all elements of their bits times (2 * index + 1), modulo 2**32."""
    if jnp.iscomplexobj(x):
        return checksum(x.real) + checksum(x.imag) * jnp.uint32(2**16 + 1)
    bits = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    index = jnp.uint32(0)
    for d, size in enumerate(x.shape):
        index = index * size + jax.lax.broadcasted_iota(jnp.uint32, x.shape, d)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)


def check_kept(state: Any) -> None:
    """Before the first update, reject a state with arrays that a checkpoint can't hold."""
    for path, x in by_path(state).items():
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        if is_key or not x.size or re.match("u?int[24]$|float4", x.dtype.name):
            raise ConfigError(f"{path} is {x.dtype}{list(x.shape)}: a checkpoint holds only "
                              f"nonempty arrays of numbers of at least 8 bits; store "
                              f"jax.random.key_data(key) for a key, or save nothing with --out ''")


def _finite(x):
    return jnp.isfinite(x).all()


@functools.cache
def _compiled(check, mesh):
    return jax.jit(functools.partial(jax.tree.map, check),
                   out_shardings=jax.NamedSharding(mesh, jax.P()),
                   compiler_options=compiler_options(mesh))


def _of_leaves(check, tree):
    """Return {path: check(array)} for a tree of arrays on a mesh."""
    return by_path(jax.device_get(_compiled(check, mesh_of(tree))(tree)))


def checksums(tree: Any) -> dict[str, int]:
    """Return {path: checksum} for a tree of arrays on a mesh."""
    return {path: int(x) for path, x in _of_leaves(checksum, tree).items()}


def _checkpoint(folder, step):
    """Return the folder of a run's checkpoint."""
    return place(folder).resolve() / f"checkpoints/{step}"


def _saved_steps(folder):
    names = [path.name for path in _checkpoint(folder, "").glob("*")]
    return sorted(map(int, filter(str.isdecimal, names)), reverse=True)


def newest_step(folder: str | Path) -> int:
    """Return the step of a run's newest checkpoint, or 0 if it has none yet."""
    return next((step for step in _saved_steps(folder)
                 if (_checkpoint(folder, step) / MARKER).exists()), 0)


def run_steps(folder: str | Path, flag: str = "--run") -> list[int]:
    """Return the steps of a run's checkpoints, newest first."""
    if steps := _saved_steps(folder):
        return steps
    raise ConfigError(f"{flag} {folder}: no checkpoint yet")


def saved_shapes(folder: str | Path, step: int | None = None) -> Any:
    """Return the shapes of the weights saved at a run's newest (or given) step, as a tree of dicts
    and lists."""
    path = _checkpoint(folder, run_steps(folder)[0] if step is None else step)
    _fetch(path, {"params": {}})
    with _reading(path), _orbax().StandardCheckpointer() as reader:
        found = reader.metadata(path / "params")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found.item_metadata.tree)


def evaluations(folder: str | Path) -> dict[int, Record]:
    """Return {step: its evaluation's numbers} for a run's checkpoints."""
    return {step: meta.get("evaluation", {}) for step, meta in _descriptions(folder).items()}


def _descriptions(folder):
    """Return {step: its description} for a run's checkpoints, newest first. Skip any description
    that can't be read."""
    return {step: meta for step in _saved_steps(folder)
            if (meta := record_in(_checkpoint(folder, step) / "meta/metadata"))}


def best_of(best: str, numbers: dict[int, Record]) -> int | None:
    """Return the step whose evaluation is best. `best` is "smallest:NAME" or "largest:NAME". On a
    tie, the earliest step wins. Return None if no evaluation has a finite number by that name."""
    which, name = best.split(":", 1)
    found = {step: row[name] for step, row in sorted(numbers.items())
             if isinstance(row.get(name), float) and math.isfinite(row[name])}
    return (min if which == "smallest" else max)(found, key=found.get, default=None)


def best_step(folder: str | Path, flag: str = "--run", by: str = "") -> int:
    """Return the step of a run's best checkpoint. `by` is the criterion, smallest:NAME or
    largest:NAME (default: the run's first --best)."""
    best = by or next(iter(run_record(folder, flag).get("best") or ()), "")
    if not best:
        raise ConfigError(f"{flag} {folder}: this run was trained without --best, so it has no "
                          f"best checkpoint; the newest is step {run_steps(folder, flag)[0]}")
    step = best_of(best, evaluations(folder))
    if step is None:
        raise ConfigError(f"{flag} {folder}: no checkpoint yet has a number for {best}")
    return step


def read_newest(folder: str | Path, params: Any, step: int | None = None, flag: str = "--run"
                ) -> Any:
    """Read the weights of a run's newest (or given) step, sharded like the shapes `params`. If the
    newest is damaged, say so and read the previous one. `flag` is the flag that named the run."""
    steps, record = run_steps(folder, flag), run_record(folder, flag)
    if step is not None and step not in steps:
        raise ConfigError(f"{flag} {folder}: no checkpoint of step {step}; there are "
                          f"{', '.join(map(str, steps))}")
    if (ema := record.get("ema")) and jax.process_index() == 0:
        print(f"{flag} {folder}: these weights are averages over updates (--ema {ema:g})",
              file=sys.stderr)
    on_disk = cast(params, record.get("save_dtype", ""))
    for at in steps if step is None else [step]:
        try:
            found, _ = read_checkpoint(_checkpoint(folder, at), {"params": on_disk},
                                       f"{flag} {folder}")
            return cast_like(found["params"], params)
        except CorruptCheckpoint as e:
            print(f"checkpoint {at} is damaged: {e}", file=sys.stderr)
    which = "" if step is None else f"of step {step} "
    raise RunError(f"{flag} {folder}: no checkpoint {which}can be read")


def read_checkpoint(folder: Path, wanted: dict[str, Any], whose: str, verify: bool = True
                    ) -> tuple[dict[str, Any], Record]:
    """Read a checkpoint's `wanted` items, {name: a tree of shapes with shardings}. Return (items,
    the checkpoint's description). Check dtypes and shapes before reading, and checksums afterwards.
    Each process reads its own part; if any fails, they all raise CorruptCheckpoint."""
    try:
        (items, meta), why = _read_items(folder, wanted, whose), None
    except CorruptCheckpoint as e:
        why = str(e)
    for why in filter(None, process_allgather(why)):
        raise CorruptCheckpoint(why)
    if verify:
        for path, found in checksums(items).items():
            if found != meta["checksums"].get(path):
                raise CorruptCheckpoint(f"the checksum of {path} does not match the saved one")
    return items, meta


def _read_items(folder, wanted, whose):
    ocp = _orbax()
    with _reading(folder):
        meta = json.loads((folder / "meta" / "metadata").read_text())
        saved, step, _ = dict(meta["leaves"]), meta["step"], dict(meta["checksums"])
        if str(step) != folder.name:
            raise ValueError(f"it is from step {step}")
    for name, tree in wanted.items():
        if differs := _differences(saved, name, tree):
            what = "weights from this model's" if name == "params" else "arrays from this run's"
            raise ConfigError(f"{whose}: checkpoint {step} holds different {what} ({differs}); "
                              f"undo the code edit that changed them, or train a new run")
    _fetch(folder, wanted)
    with _reading(folder), ocp.StandardCheckpointer(multiprocessing_options=_alone(ocp)) as reader:
        return {name: reader.restore(folder / name, tree) for name, tree in wanted.items()}, meta


def _fetch(folder, wanted):
    """Download what a checkpoint lacks of these items, if its run is in an object store."""
    if mirror := mirrors.get(folder.parents[1]):
        part("stores.shards", str(folder)).fetch(mirror, int(folder.name), wanted)


@contextlib.contextmanager
def _reading(folder):
    """A context that turns read errors into CorruptCheckpoint. If the machine is to blame (memory,
    permissions), it raises RunError instead, so the caller sets nothing aside. It also hides the
    hundreds of lines printed while reading a damaged checkpoint."""
    logging.disable(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, _ignore
    try:
        yield
    except Exception as e:
        if isinstance(e, MemoryError) or re.search(
                "RESOURCE_EXHAUSTED|Cannot allocate|Input/output error|Stale file|"
                "Too many open files|Permission denied|PERMISSION_DENIED", str(e)):
            raise RunError(f"checkpoint {folder.name} cannot be read on this machine right now: "
                           f"{one_line(e)}; nothing was set aside") from None
        raise CorruptCheckpoint(one_line(e)) from None
    finally:
        gc.collect()            # collecting a failed read prints errors, so do it with logging off
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook


def _ignore(_):
    pass
