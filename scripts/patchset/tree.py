# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Unpacks the pinned source archive, pristine or patched, into a new folder."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from patchset.apply import apply_tree
from patchset.download import fetch, file_sha256
from patchset.errors import PatchsetError
from patchset.repo import Repo
from patchset.report import Report


def base_archive(repo: Repo, given: Path | None = None) -> Path:
    """The pinned source archive: the one given, else the cached or fetched one.

    Raises:
        PatchsetError: the one given is not the pinned one, or there is no network.
    """
    if given is None:
        return fetch(repo.pin.sdist)
    try:
        found = file_sha256(given)
    except OSError as exc:
        raise PatchsetError(f"cannot read {given}: {exc.strerror}") from None
    if found != repo.pin.sdist.sha256:
        raise PatchsetError(
            f"{given} is not the pinned {repo.pin.sdist.filename}: "
            f"its SHA-256 is {found}"
        )
    return given


def unpack(
    archive: Path, folder: Path, keep: Callable[[str], bool] = lambda path: True
) -> None:
    """Unpack an archive's single top folder as the new `folder`.

    Args:
        archive: a .tar.gz file.
        folder: must not exist.
        keep: which of its files to unpack.

    Raises:
        PatchsetError: `folder` exists, or cannot be written; nothing is left behind.
    """
    if folder.exists():
        raise PatchsetError(f"{folder} exists already; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", dir=folder.parent
        ) as temporary:
            inner = Path(temporary, "tree")
            _extract(archive, inner, keep)
            inner.replace(folder)
    except (OSError, tarfile.TarError) as exc:
        raise PatchsetError(f"cannot unpack {archive} into {folder}: {exc}") from None


def _extract(archive: Path, folder: Path, keep: Callable[[str], bool]) -> None:
    """Like extractall(filter="data"), which Python 3.11.2 does not have yet."""
    folder.mkdir()
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = Path(member.name.partition("/")[2])
            if member.isdir() or not keep(path.as_posix()):
                continue
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                raise PatchsetError(f"{archive} holds {member.name}: no plain file")
            source = tar.extractfile(member)
            assert source is not None
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("wb") as file:
                shutil.copyfileobj(source, file)
            (folder / path).chmod(0o755 if member.mode & 0o100 else 0o644)


def make_tree(
    folder: Path, repo: Repo, archive: Path, *, check_identity: bool = True
) -> Report:
    """Unpack the pinned archive as the new `folder` and apply the patch set.

    Whatever ends it early, a half-made folder does not stay.
    """
    unpack(archive, folder)
    finished = False
    try:
        result = apply_tree(folder, repo, check_identity=check_identity)
        finished = result.exit_code == 0
    finally:
        if not finished:
            shutil.rmtree(folder, ignore_errors=True)
    result.command = "tree"
    return result
