"""The lock of an address: an object that its holder writes again every few seconds.

Each write is conditional on the object that the holder wrote before, so a run that lost its lock
notices. If nobody writes it for LEASE seconds, for example after a kill, the lock is stale, and the
next run takes it. That run does not wait if the holder was a process of this machine that ended.
"""

import json
import os
import socket
import time

from stores.store import Meta, Store
from zigzag.core.errors import ConfigError, RunError, note

LEASE = 30.0            # longer than the processes of a run take to notice that one of them ended
BEATS = 5.0             # seconds between two writes
NAME = "lock"


def _this_process():
    """Return what names this process on this machine until it restarts."""
    found = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        found["boot"] = open("/proc/sys/kernel/random/boot_id").read().strip()
        found["space"] = os.readlink("/proc/self/ns/pid")
    except OSError:             # not Linux: nobody can tell whether the process has ended
        found["boot"] = found["space"] = ""
    return found


def _has_ended(holder):
    """Return whether a holder was a process of this machine, and has ended."""
    own = _this_process()
    if not own["boot"] or any(holder.get(key) != own[key] for key in ("boot", "space")):
        return False
    return not os.path.exists(f"/proc/{holder.get('pid')}")


class Lease:
    """A lock that this process holds, once it has taken it."""

    def __init__(self, store: Store):
        self.store, self.word, self.beat, self.at = store, "", 0, 0.0
        self.meta: Meta = {}

    def take(self, word: str) -> None:
        """Take the lock. Raise ConfigError if another run holds it, or if the store cannot keep two
        writers apart."""
        self.word = word
        if not self._write("create") and not self._write(self._stale()):
            raise self._taken()
        old = self.meta
        self._write(self.meta)
        if self._write("create") or self._write(old):
            raise ConfigError(f"--out {self.store.address}: this store has no conditional writes, "
                              f"so two runs could write there at once; give a folder, or a bucket "
                              f"of a store that has them")

    def renew(self) -> None:
        """Write the lock again if it is due. Raise RunError if another run has taken it."""
        if time.monotonic() - self.at > BEATS and not self._write(self.meta):
            raise RunError(f"{self.store.address}: another run has taken it, because this one did "
                           f"not renew its lock for {LEASE:.0f} s; this one ends")

    def release(self) -> None:
        if holder_of(self.store)[0] == self.word:
            self.store.delete([NAME])

    def _write(self, mode):
        """Write the lock under a condition. Return whether it is ours."""
        self.beat += 1
        content = json.dumps({"word": self.word, "beat": self.beat, **_this_process()}).encode()
        try:
            self.meta = self.store.put(NAME, content, mode)
        except self.store.refused:
            found, meta = self._read()
            # A write whose answer was lost succeeds, and is refused when it is repeated.
            if (found.get("word"), found.get("beat")) != (self.word, self.beat):
                return False
            self.meta = meta
        self.at = time.monotonic()
        return True

    def _stale(self):
        """Return the facts of a lock that its holder has left. Raise ConfigError if it is held."""
        found, meta = self._read()
        # A copied run folder has a lock file without a holder.
        if "host" in found and not _has_ended(found):
            note(f"{self.store.address}: locked by a run on {found.get('host')}; waiting "
                 f"{LEASE:g} s to see whether it has ended")
            time.sleep(LEASE)
            later = self._read()[1]
            if later["e_tag"] != meta["e_tag"]:
                raise self._taken()
        return meta

    def _taken(self):
        host = self._read()[0].get("host", "a machine")
        return ConfigError(f"--out {self.store.address}: another run is writing there (on {host}); "
                           f"give another --out, or wait for it to end")

    def _read(self):
        try:
            content, meta = self.store.read(NAME)
        except FileNotFoundError:
            return {}, {"e_tag": "gone"}
        try:
            return dict(json.loads(content)), meta
        except ValueError:
            return {}, meta


def holder_of(store: Store) -> tuple[str, Meta]:
    """Return (the word that the holder gave, the lock's facts)."""
    found, meta = Lease(store)._read()
    return found.get("word", ""), meta
