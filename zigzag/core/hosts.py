"""Multiple processes, one per host, running the same program in lockstep.

    Processes                the options that name a run's processes
    init_distributed         join the other processes
    process_allgather        exchange values through process 0
    assert_same_everywhere   refuse to train if the processes' configs differ
    watchdog                 end a process that waits too long, with a message
    end_at_sigterm           exit with a single line on SIGTERM
    stop_on_signals          on Ctrl-C or SIGTERM, let the loop finish its step and save
    exit_together            end a failed process immediately, so that the others notice

With a single process, all but end_at_sigterm and stop_on_signals do nothing or return at once.
"""

import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, Iterator

import jax
from jax._src import distributed  # the processes' key-value store has no public name
from jax.experimental import multihost_utils

from zigzag.core.errors import ConfigError, RunError, one_line
from zigzag.core.files import take_back_all
from zigzag.core.flags import exit_line
from zigzag.core.options import Values, flag

CONTINUES = "once all have ended, run the same command in each to continue from the last checkpoint"


# -------------------------------------------------------------------------------------------
# Joining the other processes, and exchanging values

@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """Options for a command that may run in several processes."""
    # many hosts (rare)
    coordinator: str = flag("", recorded=False)     # many hosts: HOST:PORT of process 0
    processes: int = flag(0, recorded=False)        # number of processes
    process_id: int = flag(-1, least=-1, recorded=False)
                                    # this process's number, from 0; process 0 prints
    distributed: bool = flag(False, recorded=False)
                                    # find the processes through SLURM, Open MPI, Kubernetes or a
                                    # TPU pod
    patience: int = flag(120, least=1, recorded=False)
                                    # seconds to wait for others, plus ten times the longest wait


def check_processes(c: Processes) -> None:
    """Reject flags that leave out something needed to join the processes."""
    given = bool(c.coordinator), c.processes > 0, c.process_id >= 0, not c.distributed
    if any(given[:3]) and not all(given):
        raise ConfigError("several processes need all of --coordinator HOST:PORT, --processes N "
                          "and --process_id I (from 0), or only --distributed under SLURM, Open "
                          "MPI or on a TPU pod")
    if c.coordinator and not re.fullmatch(r"\S+:\d{1,5}", c.coordinator):
        raise ConfigError(f"--coordinator {c.coordinator}: expected HOST:PORT, where process 0 "
                          f"listens")
    if c.coordinator and c.process_id >= c.processes:
        raise ConfigError(f"--process_id {c.process_id}: with --processes {c.processes}, expected "
                          f"0 to {c.processes - 1}")


def init_distributed(config: Any) -> None:
    """Join the other processes, if any. Call this before anything touches a device."""
    if not (config.coordinator or config.distributed) or jax.distributed.is_initialized():
        return
    given, others = {}, "the other processes"
    if config.coordinator:
        given = dict(coordinator_address=config.coordinator, num_processes=config.processes,
                     process_id=config.process_id)
        others = f"{config.processes} processes at {config.coordinator}"
        if config.process_id == 0:
            _check_port(config.coordinator)
    watchdog.start(config.patience)
    watchdog.arm(f"waiting for {others}", config.patience)
    try:
        # jax's own timeout comes later than the watchdog's, and gives no advice when it aborts.
        jax.distributed.initialize(**given, initialization_timeout=config.patience + 60,
                                   heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
    except ValueError as e:
        raise ConfigError(f"--distributed: found no cluster here ({one_line(e)}); give "
                          f"--coordinator, --processes and --process_id"
                          ) from None
    watchdog.arm("beginning")


def _check_port(coordinator):
    """Reject a port already in use: jax would crash on it with exit status 139 and no message."""
    port = coordinator.rsplit(":", 1)[1]
    try:
        socket.create_server(("", int(port))).close()
    except OverflowError:
        raise ConfigError(f"--coordinator {coordinator}: a port must be below 65536") from None
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(f"--coordinator {coordinator}: port {port} is in use on this "
                              f"machine; give another") from None


_messages, _stop_questions = itertools.count(), itertools.count(1)      # jax counts from 1


def process_allgather(value: Any) -> list[Any]:
    """Return, on every process, the list of the values that all processes pass. Values must be
    JSON-serializable. They travel through process 0 rather than the devices, whose collectives
    don't wait long for a late process."""
    count, number = jax.process_count(), next(_messages)
    if count == 1:
        return [value]
    tell(f"{number}/{jax.process_index()}", json.dumps(value))
    return [json.loads(hear(f"{number}/{i}")) for i in range(count)]


def tell(name: str, text: str = "") -> None:
    """Send a text to the other processes, if any, under a name that no other text has."""
    if jax.process_count() > 1:
        distributed.global_state.client.key_value_set(f"zigzag/{name}", text)


def hear(name: str) -> str:
    """Wait for the text that some process sends under this name."""
    if jax.process_count() == 1:
        return ""
    return distributed.global_state.client.blocking_key_value_get(
        f"zigzag/{name}", 10**9)        # ms; the watchdog ends it sooner


def assert_same_everywhere(facts: Values) -> None:
    """Refuse to train if a fact differs between processes. No other check would notice."""
    first, *others = process_allgather(facts)
    for i, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ConfigError(f"process {i} has {name} {other.get(name)!r}, but process 0 has "
                                  f"{first.get(name)!r}: give every process the same")


# -------------------------------------------------------------------------------------------
# Stopping

class Watchdog:
    """Ends this process, if it's one of several, when a wait takes too long: over `patience`
    seconds plus ten times the longest wait of its kind so far."""

    def __init__(self):
        self.patience, self.longest = 0, {}
        self.doing = ""         # what this process waits for, even if it's the only process
        self.what, self.since, self.limit = "", 0.0, math.inf

    def start(self, patience: int) -> None:
        self.patience = patience
        threading.Thread(target=self._watch, daemon=True).start()
        # jax aborts a process when it loses another. This handler prints the reason and exits with
        # status 1. Nothing simpler works (jax 0.10.2): Python's own handlers don't run during an
        # abort, a missed_heartbeat_callback ends in std::bad_cast, and even with
        # jax_enable_recoverability, losing process 0 aborts the others.
        line = f"error: another process ended or is unreachable: {CONTINUES}\n".encode()

        @ctypes.CFUNCTYPE(None, ctypes.c_int)
        def on_abort(_):
            os.write(2, line)
            os._exit(1)

        self.on_abort = on_abort        # keep a reference, because ctypes doesn't
        ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)

    def arm(self, what: str, limit: float | None = None) -> None:
        """End the previous wait, and start a wait for `what` ('': no wait)."""
        self.doing = what
        if not self.patience:
            return
        now = time.monotonic()
        if self.what != "a save":       # most of a save happens in the background
            self.longest[self.what] = max(self.longest.get(self.what, 0.0), now - self.since)
        if limit is None:       # for the first wait of its kind, assume 6 minutes
            limit = self.patience + 10 * self.longest.get(what, 360.0) if what else math.inf
        self.what, self.since, self.limit = what, now, limit
        faulthandler.cancel_dump_traceback_later()
        if what:                # in case the thread is never scheduled
            faulthandler.dump_traceback_later(limit + 10, exit=True)

    def _watch(self):
        while True:
            time.sleep(0.5)
            what, since, limit = self.what, self.since, self.limit
            if time.monotonic() - since > limit and since == self.since:
                print(f"error: {what} took more than {limit:.0f} s: this process is stuck, or "
                      f"waits for one that is; {CONTINUES}. Here is where:",
                      file=sys.stderr, flush=True)
                faulthandler.dump_traceback()
                os._exit(1)


watchdog = Watchdog()


def end_at_sigterm() -> None:
    """Make SIGTERM end this process with a single line and status 1, even while jax compiles,
    unless the signal already has a handler. Call this after jax has found the devices; before that,
    libtpu would print a page of addresses."""
    if (threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            or jax.distributed.is_initialized()):
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)      # `listen` acts on it: see stop_on_signals

    def listen():
        while signal.SIGTERM not in os.read(reader, 512):
            pass
        take_back_all()
        _say("stopped by SIGTERM")
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


# Signals within this many seconds count as one: the terminal signals both the launcher (timeout,
# uv) and this process, and the launcher forwards its signal.
TOGETHER = 0.5
# Marks the end of the signal numbers in the pipe.
END = 0
# The watchdog's waits before the first update, during which exiting at once loses nothing.
BEFORE_UPDATES = ("planning", "reading the checkpoint", "initializing the weights", "compiling")


@contextlib.contextmanager
def stop_on_signals(stop: list[int], out: str = "") -> Iterator[None]:
    """Append the first Ctrl-C or SIGTERM to `stop`, so that the loop can finish its step and save
    in `out`. The run immediately prints what it's waiting for. A second signal only counts down; a
    third ends the process. Before the first update, the second already does. With several
    processes, jax handles SIGTERM, and share_stop tells the other processes.
    """
    watchdog.arm("planning")
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    several = jax.process_count() > 1
    numbers = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    seen, gives_up, before = [], threading.Event(), {}

    def on_signal(number, _):
        if gives_up.is_set():
            raise KeyboardInterrupt
        if not seen:
            seen.append(number)
            if several:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                stop.append(number)

    # Python calls on_signal only after jax returns from a step or a compilation, but it writes each
    # signal's number to the pipe immediately.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(reader, numbers, out, gives_up), daemon=True)
    listener.start()
    try:
        for number in numbers:
            before[number] = signal.signal(number, on_signal)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old)
        os.write(writer, bytes([END]))       # a forked process may keep the pipe open
        listener.join()
        os.close(writer)
        os.close(reader)


def _listen(reader, numbers, out, gives_up):
    """Print the effect of each signal in the pipe, until END arrives. After the last signal, end
    the process; in a notebook or an interactive shell, interrupt it instead."""
    count, last = 0, -math.inf
    while END not in (found := os.read(reader, 512)):
        if not {*found} & {*numbers} or time.monotonic() - last < TOGETHER:
            continue
        count, last = count + 1, time.monotonic()
        is_before = watchdog.doing in BEFORE_UPDATES
        left = (2 if is_before else 3) - count      # signals left until the process ends
        if left > 0:
            _say(f"stopping: {watchdog.doing}" + (f", then saving to {out}" if out else "")
                 + f"; {left} more Ctrl-C or SIGTERM end{'s' * (left == 1)} this at once, "
                 + ("losing nothing" if is_before else "losing unsaved steps"))
            continue
        gives_up.set()
        status, line = exit_line(KeyboardInterrupt())
        take_back_all()
        _say(line)
        if not (hasattr(sys, "ps1") or sys.flags.interactive):
            os._exit(status)
        signal.raise_signal(signal.SIGINT)      # on_signal raises KeyboardInterrupt
        return


def _say(line):
    """Print a line to stderr, replacing a terminal's live line."""
    with contextlib.suppress(OSError, ValueError):
        print(("\r\x1b[K" if sys.stderr.isatty() else "") + line, file=sys.stderr, flush=True)


def share_stop(stop: list[int]) -> None:
    """Append SIGTERM to `stop` if any process has received it, so that all processes stop after the
    same step. Call this after every step."""
    if multihost_utils.reached_preemption_sync_point(next(_stop_questions)):
        stop.append(signal.SIGTERM)


# Words in jax's errors after it loses another process.
LOST = re.compile("gloo|connection (reset|closed|refused|aborted)|broken pipe|nccl|heartbeat|"
                  "coordination service|unavailable|deadline.exceeded|barrier", re.I)


_depth = 0      # how many contexts of exit_together are open


@contextlib.contextmanager
def exit_together() -> Iterator[None]:
    """A context for a whole command. If one of several processes fails, it prints the message from
    flags.run_main and exits immediately, without waiting for the others. When contexts are nested,
    only the outermost does so."""
    global _depth
    _depth += 1
    try:
        yield
        watchdog.arm("")
    except (Exception, KeyboardInterrupt) as e:
        if not jax.distributed.is_initialized() or _depth > 1:
            raise
        status, line = exit_line(e)
        if (not line or isinstance(e, RunError)) and LOST.search(str(e)):
            line = (f"error: another process ended, and its output may say why ({one_line(e)}); "
                    f"{CONTINUES}")
        print(line or traceback.format_exc(), file=sys.stderr, flush=True)
        sys.stdout.flush()
        if distributed.global_state.process_id == 0:
            time.sleep(1)       # the others exchange messages through this process
        os._exit(status)
    finally:
        _depth -= 1
