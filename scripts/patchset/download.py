# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Fetches pinned artifacts: resumed, verified, and cached by their hash."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from patchset.errors import PatchsetError
from patchset.pin import Artifact

if TYPE_CHECKING:
    from pypi_simple import PyPISimple

_CHUNK = 1 << 16  # what a broken connection may cost
_ATTEMPTS = 4
_TIMEOUT = (20, 60)  # seconds to connect, and between two pieces


def cache_folder() -> Path:
    """Where downloads are kept."""
    own = os.environ.get("FLINT_PATCHSET_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(shared) / "flint-patchset"


def cache_path(artifact: Artifact) -> Path:
    """Where the cache keeps an artifact, whether it has it or not."""
    return cache_folder() / artifact.sha256 / artifact.filename


def cached(artifact: Artifact) -> Path | None:
    """The artifact, if the cache holds it whole."""
    path = cache_path(artifact)
    try:
        whole = file_sha256(path) == artifact.sha256
    except OSError:
        return None
    return path if whole else None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seed(artifact: Artifact, source: Path) -> Path:
    """Put a file that came by another way into the cache.

    Raises:
        PatchsetError: it is not the pinned file.
    """
    try:
        found = file_sha256(source)
        if found != artifact.sha256:
            raise PatchsetError(
                f"{source} is not the pinned {artifact.filename}: its SHA-256 is "
                f"{found}, not {artifact.sha256}"
            )
        with _locked(artifact):
            partial = _partial_path(artifact)
            shutil.copyfile(source, partial)
            return _move_in(artifact, partial)
    except OSError as exc:
        raise _disk_error(artifact, exc) from None


def fetch(artifact: Artifact, *, progress: bool = True) -> Path:
    """The artifact's path in the cache, downloaded first if need be.

    An interrupted download is kept and resumed by the next call.

    Raises:
        PatchsetError: no network, a wrong hash, a full disk, or pypi-simple and
            tqdm are missing.
    """
    path = cached(artifact)
    if path:
        return path
    try:
        with _locked(artifact):
            # Another process may have been faster.
            return cached(artifact) or _fetch_locked(artifact, progress)
    except OSError as exc:
        raise _disk_error(artifact, exc) from None


def _fetch_locked(artifact: Artifact, progress: bool) -> Path:
    partial = _partial_path(artifact)
    with partial.open("ab") as file:
        _download(artifact, file, progress)
    found = file_sha256(partial)
    if found != artifact.sha256:
        partial.unlink()
        raise PatchsetError(
            f"{artifact.filename}: the download's SHA-256 is {found}, not the "
            f"pinned {artifact.sha256}; thrown away"
        )
    return _move_in(artifact, partial)


def _partial_path(artifact: Artifact) -> Path:
    return cache_folder() / "partial" / artifact.sha256


def _move_in(artifact: Artifact, partial: Path) -> Path:
    path = cache_path(artifact)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.replace(path)
    return path


@contextlib.contextmanager
def _locked(artifact: Artifact) -> Iterator[None]:
    """Let one process at a time download an artifact."""
    partial = _partial_path(artifact)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another download of {artifact.filename}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _disk_error(artifact: Artifact, exc: OSError) -> PatchsetError:
    folder = cache_folder()
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        need = artifact.size / 1e6
        return PatchsetError(
            f"the disk is full: {artifact.filename} needs {need:.0f} MB in {folder}; "
            "make room, or set FLINT_PATCHSET_CACHE to another folder"
        )
    return PatchsetError(
        f"cannot write {exc.filename or folder}: {exc.strerror or exc}; "
        "FLINT_PATCHSET_CACHE names another folder"
    )


def _download(artifact: Artifact, file: BinaryIO, progress: bool) -> None:
    """Append to `file` what it lacks, trying again after a broken connection."""
    try:
        import pypi_simple
        import requests
        from tqdm import tqdm
    except ImportError as exc:
        raise PatchsetError(
            f"downloading needs the Python package {exc.name}: "
            "pip install pypi-simple tqdm"
        ) from None
    if file.tell() > artifact.size:
        _start_over(file)
    free = shutil.disk_usage(cache_folder()).free
    if free < artifact.size - file.tell():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    index = os.environ.get("PIP_INDEX_URL", pypi_simple.PYPI_SIMPLE_ENDPOINT)
    bar = tqdm(
        desc=artifact.filename,
        total=artifact.size,
        initial=file.tell(),
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        disable=not progress,
    )
    with bar, pypi_simple.PyPISimple(index) as client:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _append(client, artifact, file, bar)
                return
            except requests.RequestException as exc:
                file.flush()
                if attempt == _ATTEMPTS:
                    raise PatchsetError(
                        f"cannot download {artifact.filename}: {_reason(exc)}; run it "
                        "again to go on from here, or give the file with "
                        f"`python3 scripts/patchset fetch {artifact.name} --from FILE`"
                    ) from None


def _append(client: PyPISimple, artifact: Artifact, file: BinaryIO, bar: Any) -> None:
    package = next(
        (
            package
            for package in client.get_project_page(artifact.project, _TIMEOUT).packages
            if package.filename == artifact.filename
        ),
        None,
    )
    if package is None:
        raise PatchsetError(f"the package index no longer has {artifact.filename}")
    have = file.tell()
    if have == artifact.size:
        return
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with client.s.get(
        package.url, stream=True, timeout=_TIMEOUT, headers=headers
    ) as answer:
        answer.raise_for_status()
        if have and answer.status_code != 206:  # the server starts over
            _start_over(file)
            bar.reset()
        for chunk in answer.iter_content(_CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
            if file.tell() > artifact.size:
                raise PatchsetError(
                    f"{artifact.filename}: more than the pinned {artifact.size} bytes"
                )
    if file.tell() < artifact.size:
        from requests import ConnectionError

        raise ConnectionError("the connection ended early")


def _start_over(file: BinaryIO) -> None:
    file.truncate(0)
    file.seek(0)


def _reason(exc: Exception) -> str:
    text = str(exc)
    return text if len(text) < 200 else f"{text[:200]}..."
