"""A server that speaks as much of the Hugging Face Hub as uploading and downloading a model needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_test"


@dataclass
class Repository:
    """The files of every commit, and the commit of every branch."""

    private: bool | None = None
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})

    def files(self, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = self.branches.get(revision, revision)
        return commit, self.commits[commit]


@dataclass
class Hub:
    """What the server knows and has been asked."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        self.requests.append(f"{method} {path}")
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if method == "POST" and token != f"Bearer {TOKEN}":
            return 401, {}, b"{}"
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            known = name in self.repositories
            self.repositories.setdefault(name, Repository(asked.get("private", asked.get("visibility") == "private")))
            return _json({"url": f"{self.address}/{name}"}, 409 if known else 200)
        match = re.fullmatch(
            r"/(?P<api>api/models/)?(?P<name>[^/]+/[^/]+)(?:/(?P<verb>\w+)/(?P<revision>[^/]+)(?P<file>/.*)?)?", path
        )
        repository = self.repositories.get(match["name"]) if match else None
        if match is None or repository is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        return self._of_repository(repository, match, body)

    def _of_repository(self, repository: Repository, match: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        verb, revision = match["verb"], unquote(match["revision"] or "main")
        if verb == "branch":
            repository.branches.setdefault(revision, repository.branches["main"])
            return _json({})
        if verb == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            return _json({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        if verb == "commit":
            return self._commit(repository, revision, body, match["name"])
        try:
            commit, files = repository.files(revision)
        except KeyError:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if verb == "tree":
            return _json([{"type": "file", "path": p, "oid": "0", "size": len(c)} for p, c in files.items()])
        if verb != "resolve":
            return _json({"id": match["name"], "sha": commit, "siblings": []})
        content = files.get((match["file"] or "").lstrip("/"))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content

    def _commit(
        self, repository: Repository, revision: str, body: bytes, name: str
    ) -> tuple[int, dict[str, str], bytes]:
        files = dict(repository.files(revision)[1])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = hashlib.sha1(body + revision.encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[revision] = commit
        return _json({"success": True, "commitOid": commit, "commitUrl": f"{self.address}/{name}/commit/{commit}"})


def _json(value: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def running() -> Iterator[Hub]:
    """Run a hub on this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, token = urlsplit(self.path).path, self.headers.get("Authorization", "")
            status, headers, content = hub.answer(self.command, path, body, token)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = _handle

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
