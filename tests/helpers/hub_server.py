"""The Hugging Face hub on this machine, as far as feddg asks it: listings and files."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from file_server import listening

_API = re.compile(r"/api/(datasets|models)/([^/]+/[^/]+)/(revision)/([^/]+)")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """What the hub holds, and what it was asked.

    Attributes:
        commits: files by path, of each commit.
        heads: a repository's commit, by ``datasets/owner/name`` or ``models/owner/name``.
        cuts: after how many bytes of each file the connection is cut, one after the other.
        failures: status codes of the next answers to those who want a file, by its path.
        token: what a file is handed out for; empty for everybody.
        asked: method and path of every request, with its ``Range``.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    failures: dict[str, list[int]] = field(default_factory=dict)
    token: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    address: str = ""

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Lays files over those of a repository's last commit; returns the new commit."""
        whole = self.commits.get(self.heads.get(repository, ""), {}) | files
        text = repr(sorted((path, hashlib.sha256(data).digest()) for path, data in whole.items()))
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name], self.heads[repository] = whole, name
        return name

    def find(self, repository: str, revision: str) -> str | None:
        """Returns the commit that a revision of a repository is."""
        head = self.heads.get(repository)
        return head if revision == "main" else revision if revision in self.commits else None


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _json(self, content: object, status: int = 200, code: str = "") -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _note(self) -> str:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            return path

        def do_GET(self) -> None:
            path = self._note()
            api, file = _API.fullmatch(path), _FILE.fullmatch(path)
            if api:
                repository, revision = f"{api[1]}/{api[2]}", api[4]
            elif file:
                repository, revision = f"{'datasets' if file[1] else 'models'}/{file[2]}", file[3]
            else:
                self._json({}, 404)
                return
            commit = hub.find(repository, revision)
            if repository not in hub.heads:
                self._json({"error": "Repository not found"}, 401, "RepoNotFound")
            elif commit is None:
                self._json({"error": "Invalid rev id"}, 404, "RevisionNotFound")
            elif api:
                self._json({"id": api[2], "sha": commit, "siblings": self._siblings(commit)})
            elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._json({"error": "Access is restricted"}, 401, "GatedRepo")
            elif file and self.command == "GET" and hub.failures.get(file[4]):
                self._json({"error": "Internal error"}, hub.failures[file[4]].pop())
            elif file and file[4] in hub.commits[commit]:
                self._file(commit, hub.commits[commit][file[4]])
            else:
                self._json({"error": "Entry not found"}, 404, "EntryNotFound")

        do_HEAD = do_GET

        def _siblings(self, commit: str) -> list[dict[str, object]]:
            return [
                {
                    "rfilename": path,
                    "size": len(data),
                    "blobId": hashlib.sha1(data).hexdigest(),
                    "lfs": {
                        "sha256": hashlib.sha256(data).hexdigest(),
                        "size": len(data),
                        "pointerSize": 130,
                    },
                }
                for path, data in sorted(hub.commits[commit].items())
            ]

        def _file(self, commit: str, content: bytes) -> None:
            tag = f'"{hashlib.sha256(content).hexdigest()}"'
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            start = int(asked[1]) if asked else 0
            self.send_response(206 if asked else 200)
            if asked:
                where = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.send_header("Content-Range", where)
            self.send_header("Content-Length", str(len(content) - start))
            for name, value in (
                ("ETag", tag),
                ("X-Linked-Etag", tag),
                ("X-Linked-Size", str(len(content))),
                ("X-Repo-Commit", commit),
            ):
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = hub.cuts.pop(0) if hub.cuts else None
            self.wfile.write(content[start:] if cut is None else content[start:][:cut])
            self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serves a hub on a free port of this machine."""
    hub = Hub()
    with listening(_handler(hub)) as hub.address:
        yield hub
