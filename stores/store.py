"""An object store. If it fails for a while, each call prints a line and tries again, for `patience`
seconds. Any other error ends the command with one line that says what to do."""

import concurrent.futures
import datetime
import itertools
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

from zigzag.core.errors import ConfigError, RunError, note, optional_package

Meta = dict[str, Any]           # path, size, e_tag, version, last_modified

AT_ONCE = 8             # files; each may take a dozen requests of 5 MB
QUIET = 60              # seconds after a line about failures before the next such line
LONGEST_WAIT = 5.0      # seconds between two tries

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION (and perhaps AWS_ENDPOINT)",
    "gs": "set GOOGLE_SERVICE_ACCOUNT to a key file, or run gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"}


def parts_of(address: str) -> tuple[str, str, str]:
    """Return an address's (scheme, bucket, key without a slash at its end)."""
    found = re.fullmatch(r"(\w+)://([^/]+)/?(.*?)/*", address)
    if not found or found[1] not in CREDENTIALS:
        raise ConfigError(f"{address}: expected a path, or an address such as s3://BUCKET/FOLDER, "
                          f"gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")
    return found[1], found[2], found[3]


class Store:
    """The objects under an address. Names are relative to it."""

    def __init__(self, address: str):
        self.address, self.patience = address, 120.0
        self.scheme, self.bucket, key = parts_of(address)
        self.package = optional_package("obstore", address)
        stores = optional_package("obstore.store", address)
        errors = optional_package("obstore.exceptions", address)
        self.refused = errors.AlreadyExistsError, errors.PreconditionError  # a condition failed
        self.errors = errors.BaseError
        self.is_reached, self.said, self.saying = False, -QUIET, threading.Lock()
        try:
            self.store = stores.from_url(
                f"{self.scheme}://{self.bucket}/{key}", client_options={"allow_http": True},
                retry_config={"max_retries": 1, "retry_timeout": datetime.timedelta(seconds=10)})
        except self.errors as e:
            raise self._error(e) or ConfigError(f"{address}: {_why(e)}") from None

    def call(self, do: Callable[[], Any]) -> Any:
        """Return do(). If the store fails in a way that may pass, print a line and try again."""
        since, wait = None, 0.25
        while True:
            try:
                found = do()
                self.is_reached = True
                return found
            except self.refused:
                raise
            except self.errors as e:
                if error := self._error(e):
                    raise error from None
                now, why = time.monotonic(), _why(e)
            since = since or now
            if now - since >= self.patience:
                raise RunError(f"{self.address}: the store has failed for {now - since:.0f} s "
                               f"(--patience): {why}; what it holds is complete, and the same "
                               f"command continues from there")
            with self.saying:
                if now - self.said >= QUIET:
                    self.said = now
                    note(f"{self.address}: {why}; trying again for up to {self.patience:.0f} s")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT, self.patience)

    def _error(self, e):
        """Return the error to raise for a failure that will not pass, or None."""
        text, how = str(e), CREDENTIALS[self.scheme]
        kind = RunError if self.is_reached else ConfigError     # has anything worked so far?
        if re.search("NoSuchBucket|ContainerNotFound|bucket does not exist", text):
            return kind(f"{self.address}: there is no bucket {self.bucket}")
        # Without credentials in the environment, the package asks the cloud's metadata server.
        if not self.is_reached and re.search("169.254.169.254|metadata.google|Account must be|"
                                             "Missing|[Cc]redential", text):
            return ConfigError(f"{self.address}: no credentials were found; {how}")
        if re.search("40[13] [FU]|Signature|InvalidAccessKey", text):
            return kind(f"{self.address}: access was denied ({_why(e)}); {how}")

    def all(self, do: Callable[[Any], Any], of: Iterable[Any], at_once: int = AT_ONCE
            ) -> list[Any]:
        """Return do(x) for each x, several at once."""
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(do, of))

    def list(self, folder: str = "", most: int | None = None) -> dict[str, Meta]:
        """Return {name: facts} of the objects in a folder ('': all), or of the first `most`."""
        def do():
            found = itertools.chain.from_iterable(self.package.list(self.store, folder or None))
            return {one["path"]: one for one in itertools.islice(found, most)
                    if ".." not in one["path"].split("/")}

        return self.call(do)

    def download(self, name: str, path: Path) -> None:
        """Download an object into a file, whole or not at all."""
        part = path.with_name(path.name + ".part")

        def do():
            path.parent.mkdir(parents=True, exist_ok=True)
            found = self.package.get(self.store, name)
            with open(part, "wb") as f:
                for piece in found.stream(min_chunk_size=2**22):
                    f.write(piece)
            os.utime(part, ns=(time_of(found.meta),) * 2)
            os.replace(part, path)

        try:
            self.call(do)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise no_room(self.address, path.parent, e) from None

    def read(self, name: str) -> tuple[bytes, Meta]:
        """Return a small object and its facts."""
        def do():
            found = self.package.get(self.store, name)
            return bytes(found.bytes()), found.meta

        return self.call(do)

    def facts(self, name: str) -> Meta | None:
        """Return the facts of an object, or None if there is none."""
        try:
            return self.call(lambda: self.package.head(self.store, name))
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes | Path, mode: Any = "overwrite") -> Meta:
        """Write an object: these bytes, or a file. `mode` is "create" or the facts of the object
        that this may replace. If a different object is there, raise one of self.refused."""
        if isinstance(mode, dict):
            mode = {key: mode[key] for key in ("e_tag", "version") if mode.get(key)}
        return self.call(lambda: self.package.put(self.store, name, content, mode=mode))

    def copy(self, name: str, to: str) -> None:
        self.call(lambda: self.package.copy(self.store, name, to))

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects, the first one before all others."""
        for some in filter(None, (names[:1], names[1:])):
            self.call(lambda: self.package.delete(self.store, some))


def time_of(meta: Meta) -> int:
    """Return the time when an object was written, in ns. `download` gives its file this time."""
    return int(meta["last_modified"].timestamp() * 10**9)


def no_room(address: str, folder: Path, e: OSError) -> RunError:
    """Return the error for a disk that is too full for what an address holds."""
    return RunError(f"{address}: {folder} cannot be written ({e.strerror}); set ZIGZAG_SCRATCH to "
                    f"a folder on another disk")


def _why(e):
    """Return the important part of an obstore error, on one line."""
    text = " ".join(str(e).partition("Debug source")[0].split())
    if code := re.search(r"status code: (\d+ [\w ]+)", text):
        return f"the store answers {code[1].strip()}"
    found = re.findall(r"timed out|[Cc]onnection \w+|incomplete message", repr(e))
    return f"the store cannot be reached ({found[-1]})" if found else text[:120]
