"""What a machine keeps of an address: files(address) for --data, run_folder(address) for a run.

A file that is here already is downloaded again only if the object has changed since. Checkpoints
always are. Nothing here imports jax, because --plot needs none.
"""

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO, Iterable

from stores.store import Meta, Store, parts_of
from zigzag.core.errors import ConfigError, RunError
from zigzag.core.files import lock, write_json
from zigzag.core.parts import mirrors

MARKER = "_CHECKPOINT_METADATA"         # a checkpoint's last object
DATA = re.compile(r"(data|held_out)[^/]*/")
MOST = 1000             # objects to look at under an address that holds no run

_locks: list[IO] = []   # held until this process ends


def _scratch():
    """Return the folder for everything that is kept here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ZIGZAG_SCRATCH") or cache / "zigzag/stores")


def _own_folder(address):
    """Return a folder for an address that no other process uses until this one ends."""
    digest = hashlib.sha256(address.encode()).hexdigest()
    root = _scratch() / f"{re.sub(r'[^a-zA-Z0-9]+', '-', address)[-80:]}-{digest[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            held = open(root / f"{number}.lock", "a")
            try:
                lock(held)
            except BlockingIOError:
                held.close()
                continue
            _locks.append(held)
            (root / str(number)).mkdir(exist_ok=True)
            return (root / str(number)).resolve()
    except OSError as e:
        raise RunError(f"{address}: nothing can be kept in {root} ({e.strerror}); set "
                       f"ZIGZAG_SCRATCH to a folder on another disk") from None


class Copy:
    """A folder with the files of some of the objects under an address."""

    def __init__(self, store: Store, folder: Path):
        self.store, self.folder, self.there = store, folder, {}
        self.index = folder.with_name(folder.name + ".json")
        try:
            self.known = dict(json.loads(self.index.read_text()))
        except (OSError, ValueError):
            self.known = {}     # {name: [the object's e_tag, the file's size and time]}

    def is_here(self, name: str) -> bool:
        """Return whether the file is the object that is there."""
        if name not in self.there or not self.is_sent(name):
            return False
        return self.known[name][0] == self.there[name]["e_tag"]

    def is_sent(self, name: str) -> bool:
        """Return whether the file is as it was downloaded or uploaded."""
        return name in self.known and self.known[name][1:] == self._state(name)

    def _state(self, name):
        try:
            found = (self.folder / name).stat()
        except OSError:
            return None
        return [found.st_size, found.st_mtime_ns]

    def fetch(self, names: Iterable[str]) -> None:
        """Download these objects, unless they are here."""
        def one(name):
            meta = self.store.download(name, self.folder / name)
            self.known[name] = [meta["e_tag"], *self._state(name)]

        if missing := [name for name in names if not self.is_here(name)]:
            self.store.all(one, missing)
            write_json(self.index, self.known)

    def send(self, names: Iterable[str]) -> None:
        """Upload these files, unless they are there."""
        def one(name):
            if before := self._state(name):     # a file may grow while it is read
                self.known[name] = [self.store.put(name, self.folder / name)["e_tag"], *before]

        if changed := [name for name in names if not self.is_sent(name)]:
            self.store.all(one, changed)
            write_json(self.index, self.known)


class Mirror(Copy):
    """The scratch folder of a run. `steps` are the checkpoints that are complete in the store."""

    def __init__(self, address: str):
        store = Store(address)
        super().__init__(store, _own_folder(address))
        self.address, self.steps = address, set()
        self.look()
        self._clear()
        if "config.json" not in self.there:     # no run: show only that something is there
            for name in itertools.islice(self.there, MOST):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).touch()
            return
        self.fetch([*(name for name in self.there if "/" not in name and name != "lock"
                      and not name.startswith("log-")),
                    *(f"checkpoints/{step}/{name}" for step in self.steps
                      for name in (MARKER, "meta/metadata"))])

    def look(self) -> None:
        """Find out what is there."""
        self.there = self.store.list()
        found = (re.fullmatch(rf"checkpoints/(\d+)/{MARKER}", name) for name in self.there)
        self.steps = {int(match[1]) for match in found if match}

    def _clear(self):
        """Remove the files that an earlier process left, except those that are still right."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif not self.is_here(path.relative_to(self.folder).as_posix()):
                path.unlink()

    def of_checkpoint(self, step: int) -> dict[str, Meta]:
        """Return the objects of a checkpoint."""
        return {name: meta for name, meta in self.there.items()
                if name.startswith(f"checkpoints/{step}/")}

    def fetch_data(self) -> None:
        """Download the encoded text, as process 0 or an earlier start has uploaded it."""
        self.look()
        self.fetch(filter(DATA.match, self.there))

    def send_data(self) -> None:
        """Upload the encoded text."""
        names = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")
                 if path.is_file())
        self.send([name for name in names if DATA.match(name) and ".part/" not in name])


@functools.cache
def run_folder(address: str) -> Path:
    """Return the scratch folder of a run's address."""
    mirror = Mirror(address)
    mirrors[mirror.folder] = mirror
    return mirror.folder


@functools.cache
def files(address: str) -> str:
    """Download what an address names: an object, all objects in a folder, or those that a pattern
    such as s3://BUCKET/texts/*.jsonl matches. Return their path or pattern on this machine."""
    scheme, bucket, key = parts_of(address)
    store, root = Store(f"{scheme}://{bucket}"), _scratch() / "data" / f"{scheme}-{bucket}"
    fixed = re.match(r"[^*?[]*", key)[0]
    folder, is_wanted = key, re.compile(".*").fullmatch
    if fixed != key:
        folder, is_wanted = fixed.rpartition("/")[0], _pattern(key).fullmatch
    there = {name: meta for name, meta in store.list(folder).items() if is_wanted(name)}
    if not there and (meta := store.facts(key)):
        there = {key: meta}
    if not there:
        raise ConfigError(f"{address}: no object there")
    root.mkdir(parents=True, exist_ok=True)
    with open(root.with_name(f"{root.name}.lock"), "a") as held:
        while True:                 # another process may be downloading
            with contextlib.suppress(BlockingIOError):
                lock(held)
                break
            time.sleep(0.2)
        copy = Copy(store, root)
        copy.there = there
        for path in (root / folder).rglob("*"):         # of objects that are gone
            name = path.relative_to(root).as_posix()
            if path.is_file() and is_wanted(name) and name not in there:
                path.unlink()
        copy.fetch(there)
    return str(root / key) if fixed == key else f"{glob.escape(str(root))}/{key}"


# {a part of a pattern: the regular expression for it}
WILD = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]", "[!": "[^", "[": "[", "]": "]"}


def _pattern(key):
    """Return the regular expression for a pattern of names, as glob reads it."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!|\[|\])", key)
    return re.compile("".join(WILD.get(part, re.escape(part)) for part in parts))
