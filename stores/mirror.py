"""A machine's copy of what is at an address: the files in --data, or a run. It doesn't import
jax, so that --plot can use it."""

import contextlib
import fnmatch
import functools
import glob
import itertools
import os
import re
import shutil
from pathlib import Path
from typing import IO, Any, Iterable

from stores.lease import Lease
from stores.store import Store, no_room, parts_of, time_of
from zigzag.core.errors import ConfigError
from zigzag.core.files import MARKER, digest, fcntl, lock
from zigzag.core.parts import mirrors

DATA = re.compile(r"(data|held_out)[\w-]*/")
MOST = 1000             # objects to look at under an address that holds no run

_locks: list[IO] = []   # held until this process ends


def _scratch():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ZIGZAG_SCRATCH") or cache / "zigzag/stores")


def _own_folder(address):
    """Return a folder for an address. No other process uses it until this one ends."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", address)[-80:]
    root = _scratch() / f"{name}-{digest(address.encode())[:8]}"
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
            return (root / str(number)).resolve()
    except OSError as e:
        raise no_room(address, root, e) from None


def _state(path):
    """Return a file's size and modification time, or None if there is no file."""
    found = path.stat() if path.exists() else None
    return found and (found.st_size, found.st_mtime_ns)


def _fetch(store, folder, objects):
    """Download these objects, {name: facts}, into a folder, unless they are already here."""
    store.all(lambda name: store.download(name, folder / name),
              [name for name, meta in objects.items()
               if _state(folder / name) != (meta["size"], time_of(meta))])


class Mirror:
    """A run's scratch folder. Its address holds the objects `there` and the checkpoints `steps`."""

    def __init__(self, address: str):
        self.store, self.folder = Store(address), _own_folder(address)
        self.lease = Lease(self.store)
        self.sent: dict[str, Any] = {}      # {name: the file's state when it was uploaded}
        shutil.rmtree(self.folder, ignore_errors=True)      # what an earlier process left
        self.folder.mkdir()
        self.look()
        if "config.json" not in self.there:     # no run: show only that something is there
            for name in self.there:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).touch()
            return
        self.fetch(name for name in self.there if "/" not in name and name != "lock"
                   and not name.startswith("log-"))
        with contextlib.suppress(FileNotFoundError):    # a run may be deleting its oldest one
            self.fetch(f"checkpoints/{step}/{name}" for step in self.steps
                       for name in (MARKER, "meta/metadata"))

    def look(self) -> None:
        """Find out what is at the address."""
        self.there = self.store.list(most=None if self.store.facts("config.json") else MOST)
        found = (re.fullmatch(rf"checkpoints/(\d+)/{MARKER}", name) for name in self.there)
        self.steps = {int(match[1]) for match in found if match}

    def fetch(self, names: Iterable[str]) -> None:
        """Download these objects. Raise KeyError or FileNotFoundError if one is not there."""
        objects = {name: self.there[name] for name in names}
        _fetch(self.store, self.folder, objects)
        self.sent |= {name: _state(self.folder / name) for name in objects}

    def send(self, names: Iterable[str]) -> None:
        """Upload these files, unless they are already there."""
        def one(name):
            before = _state(self.folder / name)     # a file may grow while it is read
            self.store.put(name, self.folder / name)
            return name, before

        self.sent |= self.store.all(one, [name for name in names if self.sent.get(name)
                                          != _state(self.folder / name)])

    def files(self, folder: str = "") -> list[str]:
        """Return the names of the files that are here. (rglob fails if a folder is deleted.)"""
        return [Path(root, name).relative_to(self.folder).as_posix()
                for root, _, names in os.walk(self.folder / folder) for name in names]

    def fetch_data(self) -> None:
        """Download the encoded text that process 0 or an earlier start has uploaded."""
        self.there |= {name: meta for name, meta in self.store.list().items() if DATA.match(name)}
        self.fetch(filter(DATA.match, self.there))

    def send_data(self) -> None:
        """Lock the address, and upload the encoded text for the other processes."""
        self.lease.take()
        if "config.json" not in self.there and self.store.facts("config.json"):
            raise ConfigError(f"--out {self.store.address}: another run has just begun there")
        self.send([name for name in self.files() if DATA.match(name)])


@functools.cache
def run_folder(address: str) -> Path:
    """Return the scratch folder for a run's address."""
    mirror = Mirror(address)
    mirrors[mirror.folder] = mirror
    return mirror.folder


@functools.cache
def files(address: str) -> str:
    """Download what an address names: an object, all objects in a folder, or all that match a
    pattern such as s3://BUCKET/texts/*.jsonl. Return their path or pattern on this machine."""
    scheme, bucket, key = parts_of(address)
    store, root = Store(f"{scheme}://{bucket}"), _scratch() / "data" / f"{scheme}-{bucket}"
    folder = re.match(r"[^*?[]*", key)[0]
    is_pattern = folder != key
    if is_pattern:
        folder = folder.rpartition("/")[0]

    def is_wanted(name):
        is_there = "**" in key or name.count("/") == key.count("/")
        return not is_pattern or is_there and fnmatch.fnmatchcase(name, key.replace("**/", "*"))

    there = {name: meta for name, meta in store.list(folder).items() if is_wanted(name)}
    if not there and (meta := store.facts(key)):
        there = {key: meta}
    if not there:
        raise ConfigError(f"{address}: no object there")
    root.mkdir(parents=True, exist_ok=True)
    with open(root.with_name(f"{root.name}.lock"), "a") as held:
        if fcntl:                   # another process may be downloading
            fcntl.flock(held, fcntl.LOCK_EX)
        for path in (root / folder).rglob("*"):         # delete files whose objects were deleted
            name = path.relative_to(root).as_posix()
            if path.is_file() and is_wanted(name) and name not in there:
                path.unlink()
        _fetch(store, root, there)
    return f"{glob.escape(str(root))}/{key}" if is_pattern else str(root / key)

