# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Downloads from a package index on this machine: resumed, verified, cached."""

from __future__ import annotations

import builtins
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from patchset import download
from patchset.download import cache_path, cached, fetch, seed
from patchset.errors import PatchsetError
from patchset.pin import Artifact

DATA = hashlib.shake_128(b"wheel").digest(3_000_000)
ARTIFACT = Artifact(
    "source", "vllm", "vllm-0.32.0.tar.gz", hashlib.sha256(DATA).hexdigest(), len(DATA)
)


class Index:
    """A package index whose connection may break, or whose file may be wrong."""

    def __init__(self) -> None:
        self.data = DATA
        self.breaks_after: list[int] = []  # bytes sent, one for each break
        self.ranges = True
        self.lists_file = True
        self.requests: list[str] = []


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    state = Index()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/simple/vllm/":
                name = ARTIFACT.filename if state.lists_file else "vllm-9.tar.gz"
                self.answer(200, f'<a href="/files/{name}">{name}</a>'.encode())
            elif self.path.startswith("/files/"):
                self.file()
            else:
                self.answer(404, b"")

        def file(self) -> None:
            wanted = self.headers.get("Range", "")
            state.requests.append(wanted)
            start = 0
            if wanted and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            body = state.data[start:]
            cut = state.breaks_after.pop(0) if state.breaks_after else len(body)
            self.answer(206 if start else 200, body, cut)

        def answer(self, code: int, body: bytes, cut: int | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:cut])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # broken on purpose
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(
        "PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/"
    )
    monkeypatch.setenv("FLINT_PATCHSET_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield state
    server.shutdown()
    server.server_close()


def test_fetched_once(index: Index) -> None:
    path = fetch(ARTIFACT, progress=False)
    assert path.read_bytes() == DATA
    assert path == cache_path(ARTIFACT) == cached(ARTIFACT)
    assert path.name == ARTIFACT.filename
    assert fetch(ARTIFACT) == path
    assert index.requests == [""]


def test_progress_is_shown(index: Index, capfd: pytest.CaptureFixture) -> None:
    fetch(ARTIFACT)
    shown = capfd.readouterr().err
    assert ARTIFACT.filename in shown
    assert "100%" in shown


def test_broken_connection_is_resumed(index: Index) -> None:
    index.breaks_after = [1_000_000, 500_000]
    assert fetch(ARTIFACT, progress=False).read_bytes() == DATA
    assert index.requests[0] == ""
    starts = [int(r.removeprefix("bytes=")[:-1]) for r in index.requests[1:]]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1] <= 1_500_000


def test_next_call_goes_on_from_there(index: Index) -> None:
    index.breaks_after = [400_000] + [0] * 3
    with pytest.raises(PatchsetError, match="run it again to go on from here"):
        fetch(ARTIFACT, progress=False)
    assert cached(ARTIFACT) is None
    index.requests.clear()
    assert fetch(ARTIFACT, progress=False).read_bytes() == DATA
    assert index.requests[0].startswith("bytes=")


def test_server_without_ranges(index: Index) -> None:
    index.ranges = False
    index.breaks_after = [1_000_000]
    assert fetch(ARTIFACT, progress=False).read_bytes() == DATA


@pytest.mark.parametrize("wrong", [DATA[:-1] + b"?", DATA + b"?"])
def test_wrong_file_is_thrown_away(index: Index, wrong: bytes) -> None:
    index.data = wrong
    with pytest.raises(PatchsetError, match="pinned"):
        fetch(ARTIFACT, progress=False)
    assert cached(ARTIFACT) is None
    index.data = DATA
    assert fetch(ARTIFACT, progress=False).read_bytes() == DATA


def test_too_short_file_is_an_error(index: Index) -> None:
    index.data = DATA[:-1]
    with pytest.raises(PatchsetError, match="cannot download"):
        fetch(ARTIFACT, progress=False)


def test_damaged_cache_is_noticed(index: Index) -> None:
    path = fetch(ARTIFACT, progress=False)
    path.write_bytes(DATA[:-1] + b"?")
    assert cached(ARTIFACT) is None
    assert fetch(ARTIFACT, progress=False).read_bytes() == DATA
    assert len(index.requests) == 2


def test_file_gone_from_the_index(index: Index) -> None:
    index.lists_file = False
    with pytest.raises(PatchsetError, match="no longer has vllm-0.32.0.tar.gz"):
        fetch(ARTIFACT, progress=False)


def test_no_network(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(PatchsetError, match="cannot download") as caught:
        fetch(ARTIFACT, progress=False)
    assert "--from FILE" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_full_disk_is_seen_before(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PatchsetError, match="the disk is full: .* needs 3 MB"):
        fetch(ARTIFACT, progress=False)
    assert index.requests == []


def test_disk_fills_meanwhile(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = download._append
    monkeypatch.setattr(
        download,
        "_append",
        lambda client, a, file, bar: real(client, a, Full(file), bar),
    )
    with pytest.raises(PatchsetError, match="the disk is full"):
        fetch(ARTIFACT, progress=False)


def test_missing_packages_are_named(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "pypi_simple":
            raise ModuleNotFoundError("no", name=name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PatchsetError, match="pip install pypi-simple tqdm"):
        fetch(ARTIFACT, progress=False)


def test_two_at_a_time(index: Index) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch(ARTIFACT, progress=False)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache_path(ARTIFACT)] * 3
    assert cache_path(ARTIFACT).read_bytes() == DATA


def test_seed(index: Index, tmp_path: Path) -> None:
    (tmp_path / "right").write_bytes(DATA)
    (tmp_path / "wrong").write_bytes(DATA + b"?")
    with pytest.raises(PatchsetError, match="not the pinned"):
        seed(ARTIFACT, tmp_path / "wrong")
    with pytest.raises(PatchsetError, match="No such file"):
        seed(ARTIFACT, tmp_path / "none")
    assert cached(ARTIFACT) is None
    assert seed(ARTIFACT, tmp_path / "right") == cached(ARTIFACT)
    assert index.requests == []
