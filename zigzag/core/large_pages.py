"""Large pages of memory for a command, on Linux.

glibc's malloc uses transparent huge pages only if GLIBC_TUNABLES asks for them when a process
starts. So a command that finds the variable unset restarts itself with it, before jax is imported.
ZIGZAG_LARGE_PAGES=0 switches this off.
"""

import os
import sys

TUNABLE = "glibc.malloc.hugetlb=1"


def restart_with_large_pages() -> None:
    """Replace this process by the same command with large pages, if glibc has them and the
    environment does not say otherwise."""
    environment = os.environ
    if (sys.platform == "linux" and environment.get("ZIGZAG_LARGE_PAGES") != "0"
            and "GLIBC_TUNABLES" not in environment and _glibc_version() >= (2, 35)):
        environment["GLIBC_TUNABLES"] = TUNABLE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _glibc_version():
    """(major, minor); (0,) with another libc."""
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
        return tuple(map(int, version.split("."))) if name == "glibc" else (0,)
    except (AttributeError, OSError, ValueError):
        return (0,)
