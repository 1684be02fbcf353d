"""A server of S3's protocol in a process of its own (moto), its buckets, a proxy that fails, and a
proxy that speaks Google's protocol.

moto answers for Amazon's S3. Google's XML protocol is S3's with other headers, which `Google`
translates, so what obstore sends to gs:// and reads from it is tested too. (The emulator that pip
has, gcp-storage-emulator 2026.7.19, answers Google's JSON protocol: obstore can't use it.) No
server of Azure's protocol is tested here.
"""

import contextlib
import copy
import http.client
import http.server
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from pathlib import Path

import stores
from stores.store import Store
from tests.common import peer
from zigzag.core.parts import mirrors

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def server():
    """Start moto's server. Yields its port."""
    peer("moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p",
                            str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while run.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.05)
        yield port
    finally:
        run.kill()
        run.wait()


def request(port, method, path, body=b"", headers={}):
    """Send a request to a server on this machine. Returns (status, headers, content)."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as there:
        there.putrequest(method, path, skip_accept_encoding=True)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            there.putheader(name, value)
        there.endheaders(body)
        answer = there.getresponse()
        return answer.status, answer.getheaders(), answer.read()


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a server. `trouble` is what happens to the next `times` requests: "",
    "503", "reset", "slow" (2 s each), "held" (until `gate` opens), or "unconditional" (without
    their conditions, as in a store that has none)."""

    daemon_threads = True

    def __init__(self, to, handler=None):
        super().__init__(("127.0.0.1", 0), handler or _Handler)
        self.to, self.trouble, self.times = to, "", math.inf
        self.gate = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        pass


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one(self):
        self.server.times -= 1
        trouble = self.server.trouble if self.server.times >= 0 else ""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if trouble == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        if trouble == "503":
            return self.answer(503, [], b"SlowDown")
        if trouble == "slow":
            time.sleep(2)
        if trouble == "held":
            self.server.gate.wait(100)
        headers = {name: value for name, value in self.headers.items()
                   if name.lower() not in ("content-length", "host") and (
                       trouble != "unconditional" or not name.lower().startswith("if-"))}
        self.answer(*request(self.server.to, self.command, self.path, body, headers))

    def answer(self, status, headers, content):
        self.send_response_only(status)
        length = len(content)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

    def log_message(self, *_):
        pass


class _GoogleHandler(_Handler):
    def handle_one(self):
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/"
                                    "aws4_request, SignedHeaders=host, Signature=none"}
        for name, value in self.headers.items():
            name = name.lower().replace("x-goog-", "x-amz-")
            if name == "x-amz-if-generation-match":
                name, value = (("If-None-Match", "*") if value == "0" else
                               ("If-Match", self.server.tags.get(value, '"none"')))
            if name not in ("content-length", "host", "authorization"):
                headers[name] = value
        path, mark, query = self.path.partition("?")
        path = urllib.parse.quote(urllib.parse.unquote(path))       # obstore sends / as %2F
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, given, content = request(self.server.to, self.command, path + mark + query, body,
                                         headers)
        for tag in [value for name, value in given if name.lower() == "etag"]:
            generation = str(int(tag.strip('"')[:15], 16))
            self.server.tags[generation] = tag
            given.append(("x-goog-generation", generation))
        self.answer(status, given, content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one


class Google(Proxy):
    """Answers requests in Google's protocol with those of a server of S3's. `tags` is
    {generation: ETag}."""

    def __init__(self, to):
        super().__init__(to, _GoogleHandler)
        self.tags = {}


class Bucket:
    """A new bucket, as a test sees it. `port` is of the server or of a proxy before it."""

    def __init__(self, port, patch, scratch, google=None):
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        assert request(port, "PUT", f"/{self.name}")[0] == 200
        self.address, self.scratch = f"{'gs' if google else 's3'}://{self.name}", scratch
        if google:
            key = {"gcs_base_url": f"http://127.0.0.1:{google.server_address[1]}",
                   "disable_oauth": True, "client_email": "", "private_key": "",
                   "private_key_id": ""}
            patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        for name, value in {**KEYS, "ZIGZAG_SCRATCH": str(scratch),
                            "AWS_ENDPOINT": f"http://127.0.0.1:{port}"}.items():
            patch.setenv(name, value)
        self.store = Store(self.address)
        forget()

    def run(self, name="run"):
        """The address of a run."""
        return f"{self.address}/{name}"

    def without_proxy(self, proxy):
        """The same bucket, reached directly."""
        direct, store = copy.copy(self), os.environ["AWS_ENDPOINT"]
        os.environ["AWS_ENDPOINT"] = f"http://127.0.0.1:{proxy.to}"
        direct.store = Store(self.address)
        os.environ["AWS_ENDPOINT"] = store
        return direct

    def of_run(self):
        """The store of a run, for what needs no run."""
        return Store(self.run())

    def names(self, folder="run"):
        """The names of the objects in a folder."""
        return sorted(name.removeprefix(f"{folder}/") for name in self.store.list(folder))

    def steps(self, folder="run"):
        """The steps of a run's complete checkpoints."""
        found = (re.fullmatch(r"checkpoints/(\d+)/_CHECKPOINT_METADATA", name)
                 for name in self.names(folder))
        return sorted(int(match[1]) for match in found if match)

    def save(self, to, folder="run"):
        """Copy a folder of the bucket into a folder of this machine."""
        for name in self.names(folder):
            self.store.download(f"{folder}/{name}", Path(to) / name)
        return to

    def load(self, path, folder="run"):
        """Copy a folder of this machine into the bucket."""
        for file in filter(Path.is_file, Path(path).rglob("*")):
            self.store.put(f"{folder}/{file.relative_to(path).as_posix()}", file)
        return f"{self.address}/{folder}"


def forget():
    """Forget what this process knows of addresses, as if it had just begun."""
    stores.run_folder.cache_clear()
    stores.files.cache_clear()
    mirrors.clear()
