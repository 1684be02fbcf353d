"""Runs before a command imports jax, which takes seconds.

    begin       make Ctrl-C exit with a single line, and restart with large pages
    has_begun   let the command handle Ctrl-C itself from here on

Importing this file also silences libtpu, even in a process that isn't one of our commands.

Large memory pages, on Linux: glibc's malloc uses transparent huge pages only if GLIBC_TUNABLES
requests them when the process starts. If a command finds the variable unset, it sets it and
restarts itself. It doesn't restart under a debugger or tracer, which would lose the process, or
with ZIGZAG_LARGE_PAGES=0.

libtpu, which --topology needs, prints five lines of errors on a machine without a TPU, even if the
process only computes on the CPU. Its settings for such a machine keep it quiet. They must be set
before jax first looks for devices, so importing this file sets them. model.py, shard.py and
train.py import it, and so does any script or notebook that imports one of them.
"""

import glob
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

# When this process began, on the clock of time.perf_counter.
BEGAN = time.perf_counter()
TUNABLE = "glibc.malloc.hugetlb=1"
# libtpu's settings for a machine without a TPU. They also let several processes compile at once.
LIBTPU = dict(ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1", TPU_MIN_LOG_LEVEL="3",
              TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v5litepod-1")
GOOGLE = "0x1ae0"       # the PCI vendor id of a TPU


def begin() -> None:
    """Prepare a command: make Ctrl-C end it with status 130 and a single line, not a traceback
    through the imports, and give it large pages."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    _restart_with_large_pages()


def _quiet_libtpu():
    # A device from this vendor is a TPU, or a network card in the vendor's cloud.
    if importlib.util.find_spec("libtpu") and not any(
            Path(path).read_text().strip() == GOOGLE
            for path in glob.glob("/sys/bus/pci/devices/*/vendor")):
        for name, value in LIBTPU.items():
            os.environ.setdefault(name, value)


def has_begun() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number, _):
    os.write(2, b"interrupted: nothing had begun\n")
    os._exit(130)


def _restart_with_large_pages():
    environment = os.environ
    if (sys.platform == "linux" and environment.get("ZIGZAG_LARGE_PAGES") != "0"
            and "GLIBC_TUNABLES" not in environment and _glibc_version() >= (2, 35)
            and not is_watched()):
        environment["GLIBC_TUNABLES"] = TUNABLE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_watched() -> bool:
    """Return whether a debugger, a profiler or a tracer (strace, gdb) follows this process."""
    if sys.gettrace() or sys.getprofile() or not {"pdb", "debugpy", "pydevd", "cProfile",
                                                  "coverage"}.isdisjoint(sys.modules):
        return True
    try:
        tracer = re.search(r"^TracerPid:\s*(\d+)", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        return False
    return tracer is not None and tracer[1] != "0"


def _glibc_version():
    """Return (major, minor), or (0,) for a different libc."""
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
        return tuple(map(int, version.split("."))) if name == "glibc" else (0,)
    except (AttributeError, OSError, ValueError):
        return (0,)


_quiet_libtpu()
