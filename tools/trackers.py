"""--log: send a run's numbers to TensorBoard, Weights & Biases or trackio, besides metrics.jsonl.

A logger is a function log(step, numbers). To add a logger, write a function that opens it, like
`_tensorboard`, and add that to LOGGERS, or pass a custom log to fit. zigzag/run/loggers.py calls
the loggers.
"""

import os
import time
from typing import Sequence

import jax

from zigzag.core.errors import ConfigError, did_you_mean, optional_package

# A function that opens a logger takes the run's folder, the run's id in loggers (unchanged when it
# resumes), the number of updates made by earlier starts, and config.json. It returns two functions:
# log(step, {name: number}) and close().


def _tensorboard(out, own_id, began, config):
    """Write event files in OUT/tensorboard. This needs only the package `tensorboard`."""
    writers, event_pb2, summary_pb2 = (
        optional_package(f"tensorboard.{module}", "--log tensorboard")
        for module in ("summary.writer.event_file_writer", "compat.proto.event_pb2",
                       "compat.proto.summary_pb2"))
    writer = writers.EventFileWriter(str(out / "tensorboard"))

    def add(step, **what):
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, **what))

    if began:           # makes TensorBoard drop what an earlier start logged after update `began`
        add(began + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def log(step, numbers):
        add(step, summary=summary_pb2.Summary(value=[
            summary_pb2.Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]))

    return log, writer.close


def _wandb(out, own_id, began, config):
    """Open a Weights & Biases run in the project WANDB_PROJECT (default: zigzag). With
    WANDB_MODE=offline, it stays in OUT/wandb for `wandb sync`."""
    return _opened("wandb", config, dir=str(out), name=os.environ.get("WANDB_NAME", out.name),
                   id=own_id)


def _trackio(out, own_id, began, config):
    """Open a trackio run, identified by its name, in TRACKIO_PROJECT (default: zigzag)."""
    return _opened("trackio", config, name=f"{out.name}-{own_id}")


def _opened(package, config, **given):
    run = optional_package(package, f"--log {package}").init(
        project=os.environ.get(f"{package.upper()}_PROJECT", "zigzag"), config=config,
        resume="allow", **given)
    return lambda step, numbers: run.log(numbers, step=step), run.finish


LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def check(names: Sequence[str], out: str) -> None:
    """Reject loggers that don't exist, any logger for a run without a folder, and loggers whose
    package isn't installed. Only process 0 needs the package."""
    for name in names:
        if name not in (*LOGGERS, "none"):
            raise ConfigError(f"--log {name}: expected some of {', '.join(LOGGERS)}, or none"
                              + did_you_mean(name, LOGGERS))
        if name in LOGGERS and not out:
            raise ConfigError(f"--log {name}: a run without a folder saves nothing; give --out")
        if name in LOGGERS and jax.process_index() == 0:
            optional_package(name, f"--log {name}")
