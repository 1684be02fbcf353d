"""The lock on an address: an object that its holder rewrites every few seconds.

A write succeeds only if the object is still the one that the holder last wrote, so a run that lost
its lock notices. A lock that nobody has written for LEASE seconds is stale, and the next run takes
it. That run does not wait if the holder was a process on this machine that has ended.
"""

import json
import os
import secrets
import socket
import threading
import time
from typing import Any

from stores.store import Meta, Store
from zigzag.core.errors import ConfigError, RunError, note

LEASE = 30.0            # longer than the processes of a run take to notice that one of them ended
BEATS = 5.0             # seconds between two writes


def _process():
    """Return what identifies this process, or None on a system that can't tell if it ended."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return [f.read().strip(), os.readlink("/proc/self/ns/pid"), os.getpid()]
    except OSError:
        return None


def _has_ended(holder):
    """Return whether a holder was a process on this machine that has ended."""
    its, own = holder.get("process"), _process()
    return bool(its and own) and its[:2] == own[:2] and not os.path.exists(f"/proc/{its[2]}")


def read(store: Store) -> tuple[dict[str, Any], Meta]:
    """Return (what the lock's holder wrote, the object's facts)."""
    try:
        content, meta = store.read("lock")
        return dict(json.loads(content)), meta
    except FileNotFoundError:
        return {}, {}
    except ValueError:          # the lock file of a copied run folder has no holder
        return {}, meta


class Lease:
    """A lock that this process holds, once it has taken it."""

    def __init__(self, store: Store):
        self.store = store
        self._begin()

    def _begin(self):           # for each run, because a thread starts only once
        self.word, self.beat, self.at = secrets.token_hex(8), 0, 0.0
        self.meta: Meta = {}
        self.error: RunError | None = None
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._renew, daemon=True)

    def take(self) -> None:
        """Take the lock and keep it, unless this process already has it. Raise ConfigError if
        another run holds it, or if the store cannot keep two writers apart."""
        if self.thread.is_alive():
            return
        if not self._write("create") and not self._write(self._stale()):
            raise self._taken()
        old = self.meta
        if not self._write(old) or self._write("create") or self._write(old):
            raise ConfigError(f"--out {self.store.address}: this store has no conditional writes, "
                              f"so two runs could write there at once; give a folder, or a bucket "
                              f"of a store that has them")
        self.thread.start()

    def check(self) -> None:
        """Raise RunError if another run has taken the lock. Wait if this one has not renewed it for
        so long that another might have."""
        while not self.error and time.monotonic() - self.at > LEASE:
            time.sleep(0.1)
        if self.error:
            raise self.error

    def release(self) -> None:
        self.ending.set()
        self.thread.join()
        if not self.error:
            self.store.delete(["lock"])
        self._begin()

    def _renew(self):
        try:
            while not self.ending.wait(BEATS):
                if not self._write(self.meta):
                    raise RunError(f"{self.store.address}: another run has taken it, because this "
                                   f"one did not renew its lock for {LEASE:g} s; this one ends")
        except Exception as e:
            self.error = e if isinstance(e, RunError) else RunError(
                f"{self.store.address}: could not renew its lock: {type(e).__name__}: {e}")

    def _write(self, mode):
        """Write the lock under a condition. Return whether it is ours."""
        self.beat, begin = self.beat + 1, time.monotonic()
        own = {"word": self.word, "beat": self.beat, "host": socket.gethostname(),
               "process": _process()}
        try:
            self.meta = self.store.put("lock", json.dumps(own).encode(), mode)
        except self.store.refused:
            found, meta = read(self.store)
            if found != own:    # else the first try succeeded, but its answer was lost
                return False
            self.meta = meta
        self.at = begin
        return True

    def _stale(self):
        """Return the facts of an abandoned lock. Raise ConfigError if a run still holds it."""
        found, meta = read(self.store)
        if found and not _has_ended(found):
            note(f"{self.store.address}: locked by a run on {found.get('host')}; waiting "
                 f"{LEASE:g} s to see whether it has ended")
            time.sleep(LEASE)
            before, meta = meta, read(self.store)[1]
            if meta and meta["e_tag"] != before["e_tag"]:
                raise self._taken()
        return meta or "create"

    def _taken(self):
        host = read(self.store)[0].get("host")
        return ConfigError(f"--out {self.store.address}: another run is writing there (on {host}); "
                           f"give another --out, or wait for it to end")
