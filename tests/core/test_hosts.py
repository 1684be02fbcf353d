"""Several processes, connected by gloo: real processes, real signals.

Tests that are not marked slow need one process.
"""

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

import data
from tests.common import (
    SMALL,
    all_succeed,
    ends,
    hosts,
    refuses,
    started,
    succeeds,
    survives_kills,
    until_step,
)
from tests.helpers import all_losses, assert_same_bits, rows_of
from zigzag.core import hosts as hosts_lib
from zigzag.disk.checkpoint import run_steps
from zigzag.parallel.saved import load_run

TWO = (*SMALL, "--mesh", "data=2,tensor=2", "--eval_every", 1000)


# -------------------------------------------------------------------------------------------
# In this process

def test_a_port_in_use_is_refused_before_jax_crashes():
    """A segmentation fault in jax, without a message."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "192.0.2.1"):    # (the last is never this machine's)
            with refuses(f"{host}:{port}: port {port} is in use"):
                hosts_lib._check_port(f"{host}:{port}")
    hosts_lib._check_port(f"127.0.0.1:{port}")
    with refuses("a:70000: a port must be below 65536"):
        hosts_lib._check_port("a:70000")


def test_the_watchdogs_limit_follows_from_what_was_measured(monkeypatch):
    """A limit that ends a slow run, or one that a stalled run never reaches."""
    dog, now = hosts_lib.Watchdog(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(hosts_lib.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    dog.arm("a step")
    assert dog.limit == math.inf, "with one process it is never started"
    dog.patience = 7
    for what, limit, took in (
            ("a step", 3607, 2), ("a step", 27, 3), ("a save", 3607, 1), ("a step", 37, 1),
            ("a save", 3607, 1), ("", math.inf, 1)):
        dog.arm(what)
        assert dog.limit == limit, what
        now[0] += took
    dog.arm("waiting", 5)
    assert dog.limit == 5


@pytest.fixture
def signals(monkeypatch, capfd):
    """raise_and_read(number, words): raise a signal here, and return what was printed about it."""
    def raise_and_read(number, words):
        signal.raise_signal(number)     # (os.kill may reach another thread, and later)
        said, begin = "", time.monotonic()
        while words not in said and time.monotonic() - begin < 60:
            said += capfd.readouterr().err
            time.sleep(0.01)
        return said

    monkeypatch.setattr(hosts_lib, "TOGETHER", 0)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)    # (ignored in background)
    yield raise_and_read
    signal.signal(signal.SIGINT, usual)


def test_signals_are_as_before_when_a_run_has_ended(signals):
    """A second run, or whoever calls fit, that cannot be interrupted."""
    before = signal.getsignal(signal.SIGTERM)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old = signal.set_wakeup_fd(writer)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            stop = []
            with hosts_lib.stop_on_signals(stop):
                assert "stopping: planning; 1 more" in signals(number, "losing nothing\n")
                assert stop == [number]
            assert signal.getsignal(signal.SIGTERM) == before
            assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        assert signal.set_wakeup_fd(old) == writer
    finally:
        signal.set_wakeup_fd(old)
        os.close(reader)
        os.close(writer)
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(_listen)")]


def test_the_third_signal_interrupts_a_notebook_and_does_not_end_it(signals, monkeypatch):
    """All that a notebook holds, lost with its process; a fit that cannot be interrupted there. The
    second signal changes nothing."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    stop = []
    with pytest.raises(KeyboardInterrupt), hosts_lib.stop_on_signals(stop, "some/folder"):
        hosts_lib.watchdog.arm("a step")
        assert signals(signal.SIGINT, "\n") == (
            "stopping: a step, then saving to some/folder; 2 more Ctrl-C or SIGTERM end this at "
            "once, losing unsaved steps\n")
        hosts_lib.watchdog.arm("a save")
        assert signals(signal.SIGTERM, "\n").startswith(
            "stopping: a save, then saving to some/folder; 1 more Ctrl-C or SIGTERM ends this")
        assert stop == [signal.SIGINT]
        assert signals(signal.SIGINT, "\n").startswith("interrupted: run the same command")
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_signal_that_comes_twice_at_once_counts_once(signals, monkeypatch):
    """A run that a launcher ends without saving: the terminal sends Ctrl-C to both, and the
    launcher passes it on."""
    monkeypatch.setattr(hosts_lib, "TOGETHER", 1e9)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)      # (or a mistake ends this process)
    stop = []
    with hosts_lib.stop_on_signals(stop):
        said = signals(signal.SIGINT, "\n")
        for _ in range(4):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)
    assert said.count("stopping: ") == 1 and len(stop) == 1


def test_a_worker_that_was_forked_does_not_hold_up_the_end():
    """A fit that never returns, because a loader's processes have the pipe open, too."""
    with hosts_lib.stop_on_signals([]):
        pipe = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(pipe)
        held = os.dup(pipe)
    os.close(held)


def test_a_run_in_a_thread_leaves_signals_alone():
    """A ValueError from a fit that a server calls in a thread of its own."""
    found = []
    before = signal.getsignal(signal.SIGINT)

    def run():
        with hosts_lib.stop_on_signals([]):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


# train.py, in which a step or a compilation is long: inside C, where no Python code of the main
# thread runs, until a file is there.
LONG = """
import contextlib, ctypes, os, sys, threading, time
sys.path.insert(0, os.getcwd())
import train
from zigzag.core import flags
from zigzag.run import loop
C, mutex, where, free = ctypes.CDLL(None), ctypes.create_string_buffer(64), {!r}, {!r}
def unlock():
    while not os.path.exists(free):
        time.sleep(0.02)
    C.pthread_mutex_unlock(mutex)
def wait():
    print("long", flush=True)
    C.pthread_mutex_lock(mutex)
    threading.Thread(target=unlock, daemon=True).start()
    C.pthread_mutex_lock(mutex)         # (a signal does not end this)
running, compiled, made = train.running, loop.compiled, []
def long_step(step):
    def one(state, batch):
        made.append(1)
        if len(made) == 6:
            wait()
        return step(state, batch)
    return one
@contextlib.contextmanager
def with_long_step(*given):
    with running(*given) as run:
        run.step = long_step(run.step)
        yield run
if where == "step":
    train.running = with_long_step
else:
    loop.compiled = lambda program: wait() or compiled(program)
flags.run_main(train.main)
"""


@contextlib.contextmanager
def in_something_long(folder, text, where):
    """A run that is inside of it. Also press(): send Ctrl-C, and the line about it; and go_on()."""
    file, free = folder / "long.py", folder / "free"
    file.write_text(LONG.format(where, str(free)))
    run = started(*SMALL, "--mesh", "data=1", "--steps", 8, "--save_every", 3, "--eval_every", 100,
                  "--data", text, "--out", folder / "run", file=file)
    stuck = threading.Timer(240, run.kill)      # (so that nothing below waits for ever)
    stuck.start()

    def press():
        time.sleep(1.5 * hosts_lib.TOGETHER)
        run.send_signal(signal.SIGINT)
        return run.stderr.readline()

    try:
        while (line := run.stdout.readline()) != "long\n":
            assert line, run.stderr.read()
        yield run, press, free.touch
    finally:
        stuck.cancel()
        run.kill()
        run.communicate()


@pytest.mark.full
def test_a_signal_during_a_long_step_is_answered_at_once_and_twice_saves(tmp_path, text):
    """Ctrl-C that seems to do nothing for the minute that a step takes, so that a person presses it
    again, and loses all since the last save."""
    with in_something_long(tmp_path, text, "step") as (run, press, go_on):
        assert press().startswith(f"stopping: a step, then saving to {tmp_path}/run; 2 more")
        assert press().startswith("stopping: a step, then saving to ")
        go_on()
        said, error = run.communicate()
    assert run.returncode == 0 and not error, error
    assert "stopped at step 6 by SIGINT, saved in" in said
    assert (tmp_path / "run/checkpoints/6").is_dir()


@pytest.mark.full
def test_a_third_signal_ends_a_long_step_at_once(tmp_path, text):
    """A run that only kill -9 ends, because its step hangs; a traceback; another exit status."""
    with in_something_long(tmp_path, text, "step") as (run, press, _):
        assert "; 2 more Ctrl-C or SIGTERM end this at once, losing unsaved" in press()
        assert "; 1 more Ctrl-C or SIGTERM ends this at once" in press()
        assert press() == ("interrupted: run the same command to continue from the last "
                           "checkpoint, if any\n")
        assert run.wait(timeout=120) == 130 and not run.stderr.read()
    assert run_steps(tmp_path / "run") == [3]


@pytest.mark.slow
def test_a_second_signal_before_the_first_update_ends_the_run(tmp_path, text):
    """A person who waits for the compiler, to save weights that have learned nothing."""
    with in_something_long(tmp_path, text, "compile") as (run, press, _):
        assert re.match(f"stopping: compiling, then saving to {tmp_path}/run; 1 more .* ends this "
                        "at once, losing nothing", press())
        assert press().startswith("interrupted: ")
        assert run.wait(timeout=120) == 130 and not run.stderr.read()


def test_alone_a_failing_command_ends_as_any_does():
    """An exit that hides the exception from whoever called main."""
    with pytest.raises(KeyError), hosts_lib.exit_together():
        raise KeyError("ours")


# -------------------------------------------------------------------------------------------
# In several processes

# train.py, in which process 1 does something when it makes a batch: the 12th, unless another is
# given. (The first batch is only for its shape, before the checkpoint is read.)
AWRY = """
import os, signal, sys, time
sys.path.insert(0, os.getcwd())
import train, data, jax
from zigzag.core import errors, flags
collate, made = data.collate, []
def other(examples, length):
    made.append(1)
    if len(made) == {} and jax.process_index() == 1:
        {}
    return collate(examples, length)
data.collate = other
flags.run_main(train.main)
"""


class Folders:
    """Where the tests below have their runs: here in folders, in tests/stores in a bucket."""

    def __init__(self, folder):
        self.folder = folder

    def out(self, name="run"):
        """--out of a run."""
        return self.folder / name

    def here(self, name="run"):
        """A folder of this machine with what the run holds."""
        return self.folder / name

    def copy(self, name, to):
        shutil.copytree(self.folder / name, self.folder / to)

    def until_step(self, at, processes):
        until_step(at, self.folder / "run", *processes)


@pytest.fixture
def runs(tmp_path):
    return Folders(tmp_path)


def awry(folder, what, batch=12):
    file = folder / "awry.py"
    file.write_text(AWRY.format(batch, what))
    return file


# After the restore: writes every array, as the devices of all processes have it, to a file.
STATE = """
import os, sys
sys.path.insert(0, os.getcwd())
import numpy as np
import train, jax
from jax.experimental import multihost_utils
from zigzag.core import flags, mesh
from zigzag.disk import checkpoint
restore = checkpoint.RunFolder.restore
def other(self, say):
    state = restore(self, say)
    paths, leaves, _ = mesh.flatten(state)
    leaves = multihost_utils.process_allgather(leaves, tiled=True)
    if jax.process_index() == 0:
        np.savez(self.folder / "state.npz", **dict(zip(paths, leaves)))
    return state
checkpoint.RunFolder.restore = other
flags.run_main(train.main)
"""

# Process 1 alone finds a checkpoint damaged.
ONE_CANNOT_READ = """
import os, sys
sys.path.insert(0, os.getcwd())
import train, jax
from zigzag.core import errors, flags
from zigzag.disk import checkpoint
read = checkpoint._read_items
def other(folder, *rest):
    if folder.name == "6" and jax.process_index() == 1:
        raise errors.CorruptCheckpoint("for one")
    return read(folder, *rest)
checkpoint._read_items = other
flags.run_main(train.main)
"""


@pytest.mark.full
def test_one_run_on_any_number_of_processes(runs, tmp_path, text):
    """A run that changes with the number of processes. Two processes with two devices each are
    ended by a SIGTERM to one, after the same step; four processes with one device each, and one
    with four, continue from the same bits with the same losses."""
    words = (*TWO, "--steps", 40, "--save_every", 15, "--dropout", 0.1, "--data", text)
    results = all_succeed(hosts(2, *words, "--out", runs.out("whole")))
    assert len(re.findall(r"^devices  process \d on \S+: 2 x cpu", results[0][1], re.M)) == 2
    whole = rows_of(runs.here("whole"))
    succeeds(*words, "--out", tmp_path / "alone")
    assert all_losses(whole) == pytest.approx(all_losses(rows_of(tmp_path / "alone")), rel=1e-5)

    sigterm = "os.kill(os.getpid(), signal.SIGTERM)"
    (_, said, _), (_, nothing, _) = all_succeed(hosts(2, *words, "--out", runs.out(),
                                                      file=awry(tmp_path, sigterm, 16)))
    assert "stopped at step" in said
    # (Gloo itself prints.)
    assert not re.search("step|loss|mesh|weights|data |devices", nothing), nothing
    here = runs.here()
    step = rows_of(here)[-1]["step"]
    assert f"stopped at step {step} " in said
    assert 11 <= step < 40 and (here / f"checkpoints/{step}").is_dir()

    # A signal before the first step of a run that goes on is not lost.
    runs.copy("run", "early")
    early = all_succeed(hosts(2, *words, "--out", runs.out("early"),
                              file=awry(tmp_path, sigterm, 1)))
    assert int(re.search(r"stopped at step (\d+) ", early[0][1])[1]) - step in (0, 1, 2, 3)
    file, states = tmp_path / "state.py", []
    file.write_text(STATE)
    for count in 4, 1:
        name = f"by-{count}"
        runs.copy("run", name)
        go = (*words, "--out", runs.out(name))
        all_succeed(hosts(count, *go, file=file) if count > 1 else [started(*go, file=file)])
        out = runs.here(name)
        states.append(dict(np.load(out / "state.npz")))
        for got, want in zip(rows_of(out), whole, strict=True):
            assert got["step"] == want["step"]
            assert got.get("loss", 0) == pytest.approx(want.get("loss", 0), rel=1e-5)
    assert_same_bits(states[1], states[0])
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(here / f"checkpoints/{step}/params")
    assert_same_bits(states[0], {"params": params})


@pytest.mark.full
def test_ctrl_c_in_one_process_is_answered_there_and_stops_all(runs, text):
    """A process that ignores Ctrl-C, or that leaves the others waiting."""
    two = hosts(2, *TWO, "--steps", 2000, "--data", text, "--out", runs.out())
    runs.until_step(5, two)
    two[1].send_signal(signal.SIGINT)
    (_, said, _), (_, _, error) = all_succeed(two)
    assert re.search(f"^stopping: a step, then saving to {runs.out()}; ", error, re.M)
    assert "stopped at step" in said and int(run_steps(runs.here())[0]) < 2000


@pytest.mark.full
def test_what_one_process_cannot_read_is_damaged_for_all(runs, tmp_path, text):
    """Two processes that continue from different steps; one that waits for the other for ever."""
    words = (*SMALL, "--mesh", "fsdp=2,tensor=2", "--eval_every", 1000, "--save_every", 3,
             "--data", text, "--out", runs.out())
    all_succeed(hosts(2, *words, "--steps", 6))
    file = tmp_path / "one.py"
    file.write_text(ONE_CANNOT_READ)
    (_, said, _), _ = all_succeed(hosts(2, *words, "--steps", 8, "--patience", 5, file=file))
    assert "checkpoint 6 is damaged (for one)" in said and "at step 3" in said
    assert (runs.here() / "checkpoints/damaged-6").is_dir()


@pytest.mark.full
def test_two_processes_survive_kills_at_random_moments(tmp_path, text):
    """A folder that two processes cannot continue, after a kill of one at some moment."""
    words = (*SMALL, "--mesh", "data=2,tensor=2", "--steps", 40, "--save_every", 5,
             "--eval_every", 15, "--dropout", 0.1, "--data", text)
    survives_kills(1, int(os.environ.get("KILLS", 2)), tmp_path,
                   lambda out: hosts(2, *words, "--out", out))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("what, says", [
    ("os.kill(os.getpid(), signal.SIGKILL)", "another process ended"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "another process ended or is unreachable"),
    ("raise KeyError('broken')", "another process ended"),
    ("raise errors.ConfigError('a bad row')", "another process ended"),
    ("time.sleep(600)", "a step took more than")])
def test_when_one_process_fails_all_end_and_say_so(runs, tmp_path, text, what, says):
    """A process that waits for ever for one that is gone. All must end in 15 seconds, or, if one is
    stalled, 15 seconds after the limit, which depends on the previous steps."""
    file = awry(tmp_path, what)
    words = (*TWO, "--save_every", 5, "--data", text, "--out", runs.out())
    two = hosts(2, *words, "--steps", 500, "--patience", 10, file=file)
    runs.until_step(9, two)
    begin = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        two[0].wait(timeout=60)
    took, stalled = time.monotonic() - begin, "sleep" in what
    if "SIGSTOP" in what:
        two[1].kill()
    (first, _, error), (second, _, broken) = ends(two, 15)
    assert first == 1 and second != 0 and took < (60 if stalled else 15), (took, first, error)
    if stalled and "a step took" in broken:         # the one that sleeps may be the first to notice
        error = broken
    assert says in error
    assert "run the same command in each to continue from the last" in error
    assert (" in fit\n" in error) == stalled        # a stack only where it is known where
    assert "KeyError" not in what or "KeyError: 'broken'" in broken
    assert "ConfigError" not in what or (
        second == 2 and broken.splitlines()[-1] == "error: a bad row")
    if stalled:
        assert ends(hosts(2, *words, "--steps", 14))[0][0] == 0


@pytest.mark.full
def test_a_gradient_not_finite_in_one_process_ends_all_with_what_was_saved(runs, tmp_path, text):
    """A save that is lost because it is still in progress, on a slow disk."""
    file = awry(tmp_path, "batch = collate(examples, length); "
                          "batch['weights'] *= float('nan'); return batch")
    slow = ("rename = os.rename\n"
            "os.rename = lambda *a, **k: (time.sleep(3), rename(*a, **k))\n")
    file.write_text(file.read_text().replace("flags.run_main(", slow + "flags.run_main("))
    words = (*TWO, "--steps", 40, "--save_every", 10, "--max_skipped", 1, "--data", text,
             "--out", runs.out())
    results = ends(hosts(2, *words, file=file))
    at = int(re.search(r"error: step (\d+): the gradient was not finite, 1 times in a row",
                       results[0][2])[1])
    assert [status for status, *_ in results] == [1, 1] and 10 < at < 13
    assert load_run(runs.here(), step=10)


@pytest.mark.slow
@pytest.mark.parametrize("case, says", [
    ("port", "is in use"), ("missing", "waiting for 2 processes at"),
    ("lr", "process 1 has lr 0.25, but process 0 has 0.5"), ("data", "process 1 has fingerprint"),
    ("out", "does not see what process 0 wrote"), ("run", "does not see what process 0 writes")])
def test_processes_that_do_not_fit_do_not_begin(runs, tmp_path, text, case, says):
    """Different runs that train as one; a wait without a message."""
    made, more = tmp_path / "made", {}
    words = [*TWO, "--steps", 4, "--lr", 0.5, "--out", runs.out(), "--patience", 5]
    with socket.socket() as taken:
        if case == "port":
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            more["port"] = taken.getsockname()[1]
        elif case == "lr":
            more["own"] = lambda i: ("--lr", 0.5 / (i + 1))
        elif case == "out":
            more["own"] = lambda i: ("--out", runs.out(f"run{i}"))
        elif case == "run":         # of the same name, on another machine
            data.prepare([str(text)], made)
            text = made
            for i in range(2):
                (tmp_path / str(i)).mkdir()
            more = dict(own=lambda i: ("--out", "run"), cwd=lambda i: tmp_path / str(i))
        elif case == "data":
            for i in range(2):
                data.prepare([str(text / f"{j}.txt") for j in range(3 + i)], tmp_path / f"{i}/made")
            more = dict(own=lambda i: ("--data", "made"), cwd=lambda i: tmp_path / str(i))
        two = hosts(2, *words, *(() if case == "data" else ("--data", text)), **more)
        if case == "missing":
            two.pop().kill()
        results = ends(two, 60)
    # (One that waits for another that has ended may be aborted by jax before it has begun: -6.)
    statuses = {status for status, *_ in results}
    assert statuses <= {1, 2, -6} and statuses & {1, 2}, results
    assert any(line.startswith("error: ") and says in line
               for _, _, error in results for line in error.splitlines()), results
    assert not (runs.here() / "metrics.jsonl").exists()


@pytest.mark.full
def test_processes_are_found_where_a_scheduler_knows_them(runs, text, monkeypatch):
    """Processes of SLURM that are not found with --distributed; a run on a laptop that looks for
    them. (jax reads SLURM's variables.)"""
    def one(i):
        for name, value in {
                "SLURM_JOB_ID": str(20000 + os.getpid() % 20000), "SLURM_PROCID": str(i),
                "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_LOCALID": str(i),
                "SLURM_STEP_NUM_NODES": "1"}.items():
            monkeypatch.setenv(name, value)
        return started(*SMALL, "--mesh", "data=2", "--steps", 1, "--data", text,
                       "--out", runs.out(), "--distributed")

    results = all_succeed([one(0), one(1)])
    assert "devices  process 1 on " in results[0][1]
