"""Uploads a run while it trains, for zigzag.disk.checkpoint.RunFolder.

A thread looks for what is new in the scratch folder. It uploads this process's arrays of each
complete checkpoint and tells process 0. Once all have done so, process 0 uploads the metrics and
other files, and then _CHECKPOINT_METADATA. So a killed run continues from a checkpoint whose
metrics are in the store, and repeats the rest. In between, process 0 uploads changed files every
INTERVAL seconds, or less often if that takes long.
"""

import re
import threading
import time
from typing import Callable

import jax

from stores import lease
from stores.mirror import Mirror
from zigzag.core import hosts
from zigzag.core.errors import ConfigError, RunError
from zigzag.core.files import MARKER

INTERVAL = 10.0         # minimum seconds between two uploads of metrics.jsonl,
SHARE = 20              # and this many times as long as the last one took
BESIDE_STEPS = 3        # files of a checkpoint at once (8 were no faster, and steps took longer)
LOOKS = 0.1             # seconds between two looks at the scratch folder


class Uploads:
    """The uploads of a run. `kept` is a function: steps of checkpoints -> steps to keep."""

    def __init__(self, mirror: Mirror, patience: int, kept: Callable):
        self.mirror, self.store, self.kept = mirror, mirror.store, kept
        self.store.patience = patience
        self.number, self.count = jax.process_index(), jax.process_count()
        self.lease, self.word = mirror.lease, mirror.lease.word
        self.ending, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.next, self.log = 0.0, f"log-{self.number}."
        self.folder = mirror.folder / "checkpoints"
        self.folder.mkdir(exist_ok=True)

    def take(self) -> None:
        """In process 0, lock the address. Raise ConfigError if another run holds it."""
        self.lease.take()
        self.mirror.look()
        # What a killed run left of a save must not mix with the next save of that step.
        self.store.delete([name for name in self.mirror.there if (found := re.match(
            r"checkpoints/(\d+)/", name)) and int(found[1]) not in self.mirror.steps])

    def holder(self) -> str:
        """Return the word of the run that holds the lock."""
        return lease.read(self.store)[0].get("word", "")

    def start(self, word: str) -> None:
        """Begin to upload. `word` is process 0's."""
        self.word = word
        views = hosts.process_allgather([sorted(self._complete()), sorted(self.mirror.steps)])
        if any(here != views[0][1] for here, _ in views):
            if self.number == 0:
                self.lease.release()
            raise ConfigError(f"--out {self.store.address}: another run wrote there while this one "
                              f"started; give the same command again")
        self.mirror.fetch(name for name in self.mirror.there    # the run appends to these
                          if name.startswith(self.log))
        self.thread.start()

    def check(self) -> None:
        """Raise the error that has ended the uploads, if any."""
        if error := self.error or self.lease.error:
            raise error

    def wait(self, step: int | None) -> None:
        """Wait until the store has a checkpoint that is complete here."""
        while step is not None and step not in self.mirror.steps:
            self.check()
            time.sleep(LOOKS / 2)
        self.check()

    def finish(self) -> None:
        """Upload the rest, and unlock the address once every process is done."""
        self.ending.set()
        self.thread.join()
        self.check()
        hosts.process_allgather("uploaded")
        if self.number == 0:
            self.lease.release()

    def set_aside(self, step: int, name: str) -> None:
        """Rename a damaged checkpoint in the store."""
        if self.number == 0:
            there, at = self._objects(step), f"checkpoints/{step}/"
            self.store.all(lambda old: self.store.copy(
                old, f"checkpoints/{name}/{old.removeprefix(at)}"), there)
            self.store.delete(there)
        self.mirror.steps.discard(step)

    def _run(self):
        try:
            while not self.ending.wait(LOOKS):
                self._upload(everything=False)
            self._upload(everything=True)
        except Exception as e:
            self.error = e if isinstance(e, RunError) else RunError(
                f"{self.store.address}: not all could be uploaded: {type(e).__name__}: {e}")

    def _upload(self, everything):
        """Upload what is new."""
        for step in sorted(self._complete()):       # orbax is about to delete an older one
            if step > max(self.mirror.steps, default=-1):
                self._upload_checkpoint(step)
        if everything or time.monotonic() > self.next:
            self._upload_files()

    def _complete(self):
        """Return the steps of the checkpoints that are complete here."""
        return {int(path.parent.name) for path in self.folder.glob(f"*/{MARKER}")
                if path.parent.name.isdecimal()}

    def _upload_checkpoint(self, step):
        marker = f"checkpoints/{step}/{MARKER}"
        # All processes have the descriptions, and process 0 uploads them. The rest are chunks.
        own = "" if self.number == 0 else r"/[\d.]+$"
        self.store.all(self._put, [name for name in self.mirror.files(f"checkpoints/{step}")
                                   if name != marker and re.search(own, name)], BESIDE_STEPS)
        hosts.tell(f"{self.word}/{step}/{self.number}")
        if self.number == 0:
            for other in range(self.count):
                hosts.hear(f"{self.word}/{step}/{other}")
            self._upload_files()
            self.lease.check()
            self._put(marker)
            self._delete_old({*self.mirror.steps, step})
            hosts.tell(f"{self.word}/{step}/complete")
        hosts.hear(f"{self.word}/{step}/complete")
        self.mirror.steps.add(step)

    def _put(self, name):
        self.store.put(name, self.mirror.folder / name)

    def _delete_old(self, steps):
        """Delete the checkpoints that the run does not keep, each one's MARKER first."""
        for step in steps - self.kept(sorted(steps)):
            self.store.delete(self._objects(step))
            self.mirror.steps.discard(step)

    def _objects(self, step):
        """Return the names of a checkpoint's objects, starting with the one that completes it."""
        return sorted(self.store.list(f"checkpoints/{step}"), key=lambda n: MARKER not in n)

    def _upload_files(self):
        """Upload the run's other files that have changed, with config.json last."""
        begin, found = time.monotonic(), list(filter(self._is_mine, self.mirror.files()))
        self.mirror.send([name for name in found if name != "config.json"])
        self.mirror.send([name for name in found if name == "config.json"])
        self.next = time.monotonic() + max(INTERVAL, SHARE * (time.monotonic() - begin))

    def _is_mine(self, name):
        if name.startswith(("log-", "profile/")) or self.number:
            return name.startswith((self.log, "profile/"))
        return name != "lock" and not re.match(r"checkpoints/|\.", name) and not re.search(
            r"\.(part|before)(/|$)", name)
