"""A small server of the hub's HTTP API, for the package huggingface_hub as its client."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_reader"
REPO = r"/(?:api/)?(models/|datasets/)?([\w.-]+/[\w.-]+)"


class Repo(NamedTuple):
    """A repository's files per commit, and the commits of its branches and tags."""
    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    access: str = ""        # "private" or "gated": for readers with TOKEN


def repo(*versions, access="", **tags):
    """A repository whose commits have these files. The last is main; tags name others by number."""
    commits = {hashlib.sha1(repr(files).encode()).hexdigest(): files for files in versions}
    shas = list(commits)
    return Repo(commits, {"main": shas[-1], **{tag: shas[i] for tag, i in tags.items()}}, access)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def log_message(self, *_):
        pass

    def send(self, content, status=200, **headers):
        """Send bytes or, as JSON, anything else."""
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, code, status=404, **headers):
        self.send({"error": code}, status, X_Error_Code=code, X_Error_Message=code, **headers)

    def answer(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        if hub.is_silent:
            self.close_connection = True        # without an answer
            return
        match = re.match(rf"{REPO}(?:/(revision|resolve|tree)/(.*))?$", path)
        if not match:
            return self.send({}, 404)
        hub.log.append(f"{self.command} {path}")
        kind, name, what, rest = match.groups()
        repo = hub.repos.get(("datasets/" if kind == "datasets/" else "") + name)
        may = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or repo.access == "private" and not may:
            return self.refuse("RepoNotFound", 401 if repo else 404)
        if repo.access == "gated" and not may:
            return self.refuse("GatedRepo", 403)
        rest = rest or "main"
        refs = repo.refs | {sha: sha for sha in repo.commits}
        ref = next((ref for ref in refs if f"{rest}/".startswith(f"{ref}/")), None)
        if ref is None:
            return self.refuse("RevisionNotFound")
        sha, files = refs[ref], repo.commits[refs[ref]]
        file = rest[len(ref) + 1:]
        if what == "tree":
            self.send([{"type": "file", "path": each, "size": len(content), "oid": tag(content)}
                       for each, content in files.items()])
        elif what != "resolve":
            self.send({"id": name, "sha": sha, "siblings": [{"rfilename": f} for f in files]})
        elif file not in files:
            self.refuse("EntryNotFound", X_Repo_Commit=sha)
        else:
            self.send(files[file], ETag=f'"{tag(files[file])}"', X_Repo_Commit=sha)


def tag(content):
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def serving(repos):
    """A server of these repositories ({name, or datasets/name: Repo}). Its .log has the method and
    path of each request. If .is_silent, it closes connections instead of answering."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repos, server.log, server.is_silent = repos, [], False
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
