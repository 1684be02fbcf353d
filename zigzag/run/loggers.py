"""--log: the numbers of a run for TensorBoard, Weights & Biases or trackio, beside metrics.jsonl.

A logger is a function log(step, numbers). To add one, write a function that opens it, like
`_tensorboard`, and name it in LOGGERS; or give fit a log of your own. Only process 0 logs. A logger
that fails is switched off, and never stops a run.
"""

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import jax

from zigzag.core.errors import ConfigError, did_you_mean, one_line, optional_package
from zigzag.core.files import write_json


class Opened(NamedTuple):
    """A logger that is ready."""
    log: Callable           # (step, {name: number})
    close: Callable         # ()


class Run(NamedTuple):
    """What a logger may want to know about a run."""
    out: Path               # its folder
    id: str                 # its own, the same when it continues
    began: int              # updates made by earlier starts
    config: dict[str, Any]  # config.json


def _tensorboard(run):
    """Event files in OUT/tensorboard. The package `tensorboard` is enough to write them."""
    writers, event_pb2, summary_pb2 = (
        optional_package(f"tensorboard.{module}", "--log tensorboard")
        for module in ("summary.writer.event_file_writer", "compat.proto.event_pb2",
                       "compat.proto.summary_pb2"))
    writer = writers.EventFileWriter(str(run.out / "tensorboard"))
    if run.began:       # TensorBoard drops what an earlier start logged from this step on
        writer.add_event(event_pb2.Event(
            wall_time=time.time(), step=run.began + 1,
            session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)))

    def log(step, numbers):
        writer.add_event(event_pb2.Event(
            wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=[
                summary_pb2.Summary.Value(tag=name, simple_value=x)
                for name, x in numbers.items()])))

    return Opened(log, writer.close)


def _wandb(run):
    """A run of Weights & Biases, in the project zigzag or WANDB_PROJECT. WANDB_MODE=offline keeps
    it in OUT/wandb, for `wandb sync`."""
    wandb = optional_package("wandb", "--log wandb")
    opened = wandb.init(project=os.environ.get("WANDB_PROJECT", "zigzag"), dir=str(run.out),
                        name=os.environ.get("WANDB_NAME", run.out.name), config=run.config,
                        id=run.id, resume="allow")
    return Opened(lambda step, numbers: opened.log(numbers, step=step), opened.finish)


def _trackio(run):
    """A run of trackio, in the project zigzag or TRACKIO_PROJECT. (trackio knows runs by name.)"""
    trackio = optional_package("trackio", "--log trackio")
    opened = trackio.init(project=os.environ.get("TRACKIO_PROJECT", "zigzag"),
                          name=f"{run.out.name}-{run.id}", config=run.config, resume="allow")
    return Opened(lambda step, numbers: opened.log(numbers, step=step), opened.finish)


LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def check(names: Sequence[str], out: str) -> None:
    """Refuse loggers that do not exist, that have no folder, or whose package is not installed
    (process 0 alone needs it)."""
    for name in names:
        if name not in (*LOGGERS, "none"):
            raise ConfigError(f"--log {name}: expected some of {', '.join(LOGGERS)}, or none"
                              + did_you_mean(name, LOGGERS))
        if name in LOGGERS and not out:
            raise ConfigError(f"--log {name}: a run without a folder keeps nothing; give --out")
        if name in LOGGERS and jax.process_index() == 0:
            optional_package(name, f"--log {name}")


class Loggers(contextlib.AbstractContextManager):
    """The open loggers of a run, and fit's own `log`, if it was given one. A context manager, which
    closes them at its end."""

    def __init__(self, names: Sequence[str], out: str, began: int, config: dict[str, Any],
                 log: Callable | None, say: Callable):
        """`began` is the number of updates made so far, `say` prints a line."""
        self.say, self.opened = say, {}
        if jax.process_index():
            return
        if log:
            self.opened["fit's log"] = Opened(log, lambda: None)
        for name in dict.fromkeys(names):
            if name in LOGGERS:
                self._try(name, lambda: self.opened.update(
                    {name: LOGGERS[name](Run(Path(out), _own_id(Path(out)), began, config))}))

    def write(self, row: dict[str, Any]) -> None:
        """Log a line of metrics.jsonl."""
        numbers = numbers_of(row)
        for name, logger in [*self.opened.items()]:
            self._try(name, lambda: logger.log(row["step"], numbers))

    def __exit__(self, *_: Any) -> None:
        """Close them, which waits until everything is written."""
        for name, logger in [*self.opened.items()]:
            self._try(name, logger.close)

    def _try(self, name, do):
        try:
            do()
        except (Exception, SystemExit) as e:
            self.opened.pop(name, None)
            name = f"--log {name}" if name in LOGGERS else name
            self.say(f"warning  {name} failed and is off from here on: {type(e).__name__}: "
                     f"{one_line(e)}")


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """The numbers in a line of metrics.jsonl, without its step. A list, such as the load of each
    expert, has its smallest and its largest number."""
    found = {}
    for name, x in row.items():
        if isinstance(x, list) and (flat := _flat(x)):
            found[f"{name}/smallest"], found[f"{name}/largest"] = min(flat), max(flat)
        elif isinstance(x, (int, float)) and name != "step":
            found[name] = float(x)
    return found


def _flat(x):
    return [y for part in x for y in _flat(part)] if isinstance(x, list) else [x]


def _own_id(out):
    """The id under which the loggers know this run, kept in its folder."""
    path = out / "log_id.json"
    try:
        return json.loads(path.read_text())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        write_json(path, {"id": secrets.token_hex(4)})
        return json.loads(path.read_text())["id"]
