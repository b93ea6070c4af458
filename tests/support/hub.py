# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A model hub on the loopback interface: folders served as repositories.

It answers what the huggingface_hub client asks for when it lists a repository and
downloads files from it, and counts the downloads.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the one commit of every repository").hexdigest()


class Hub(ThreadingHTTPServer):
    """The server.

    Attributes:
        repositories: Folder of each repository, by "owner/name".
        downloads: How often each "owner/name/file" was sent whole.
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.downloads: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        """What the client wants in HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve_hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    """Serves the repositories until the block ends."""
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self._api("/".join(path[2:4]), path[4:])
        elif path[2:3] == ["resolve"]:
            self._file("/".join(path[:2]), "/".join(path[4:]), body)
        else:
            self._missing("RepoNotFound")

    def _api(self, repository: str, rest: list[str]) -> None:
        folder = self.server.repositories.get(repository)
        if folder is None:
            self._missing("RepoNotFound")
            return
        files = sorted(p for p in folder.iterdir() if p.is_file())
        if rest[:1] == ["tree"]:
            tree = [
                {
                    "type": "file",
                    "path": p.name,
                    "size": p.stat().st_size,
                    "oid": _etag(p),
                }
                for p in files
            ]
            self._json(tree)
            return
        self._json(
            {
                "id": repository,
                "modelId": repository,
                "sha": COMMIT,
                "private": False,
                "siblings": [{"rfilename": p.name} for p in files],
            }
        )

    def _file(self, repository: str, name: str, body: bool) -> None:
        folder = self.server.repositories.get(repository)
        if folder is None:
            self._missing("RepoNotFound")
            return
        file = folder / name
        if not file.is_file():
            self._missing("EntryNotFound")
            return
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.server.downloads[f"{repository}/{name}"] += 1
            self.wfile.write(data)

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
