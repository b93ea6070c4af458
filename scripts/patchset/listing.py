# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Lists the files of a target with their blob ids; reads one of them."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

from patchset.errors import DirtyTreeError, PatchsetError
from patchset.git import git
from patchset.gittree import (
    MODE_EXEC,
    MODE_FILE,
    MODE_LINK,
    Blob,
    Entry,
    Globs,
    blob_id,
)
from patchset.pin import Pin
from patchset.sources import CHECKOUT, Target


def list_entries(target: Target, pin: Pin) -> dict[str, Entry]:
    """Every file of a folder target that counts, with mode and blob id.

    A checkout gives what ``git add`` would take; a folder or package everything
    but generated files.
    """
    root = target.path
    if target.kind == CHECKOUT:
        flags = ("--cached", "--others", "--exclude-per-directory=.gitignore")
        names = git(root, "ls-files", "-z", *flags).decode().split("\0")
        paths = sorted(
            {
                name
                for name in names
                if name
                and name not in pin.source_globs
                and os.path.lexists(root / name)
            }
        )
    elif target.full:
        paths = _walk(root, "", pin.source_globs)
    else:
        paths = _walk(root, "vllm", pin.package_globs)
    # Installers may link a package's files from their cache; sources hold links.
    follow = not target.full
    return {path: _entry(root / path, follow) for path in paths}


def read_blob(root: Path, path: str) -> Blob | None:
    """One file of a tree, or None.

    Raises:
        DirtyTreeError: it, or a folder on the way, is a link or no plain file.
    """
    place = root
    for part in path.split("/"):
        place = place / part
        try:
            kind = place.lstat().st_mode
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise DirtyTreeError(f"{place.parent} should be a folder") from None
        except OSError as exc:
            raise PatchsetError(f"cannot read {place}: {exc.strerror}") from None
        if stat.S_ISLNK(kind) and place != root / path:
            raise DirtyTreeError(f"{place} is a link; refusing to follow it")
    if stat.S_ISLNK(kind):
        # An installer may link files from its cache; the link gets replaced.
        kind = place.stat().st_mode
    if not stat.S_ISREG(kind):
        raise DirtyTreeError(f"{place} should be a plain file")
    return Blob(_read(place), MODE_EXEC if kind & 0o100 else MODE_FILE)


def list_archive(
    archive: Path, pin: Pin, wanted: Iterable[str] = ()
) -> tuple[dict[str, Entry], dict[str, Blob]]:
    """The files of a source archive, read without unpacking it.

    Returns:
        Mode and blob id of every file, and the contents of those `wanted`.
    """
    wanted = frozenset(wanted)
    entries, blobs = {}, {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if not member.isfile() or path in pin.source_globs:
                continue
            file = tar.extractfile(member)
            assert file is not None
            mode = MODE_EXEC if member.mode & 0o100 else MODE_FILE
            blob = Blob(file.read(), mode)
            entries[path] = blob.entry
            if path in wanted:
                blobs[path] = blob
    return entries, blobs


def _walk(root: Path, below: str, skip: Globs) -> list[str]:
    paths = []
    folders = [below]
    while folders:
        folder = folders.pop()
        for item in os.scandir(root / folder):
            path = f"{folder}/{item.name}" if folder else item.name
            if item.is_dir(follow_symlinks=False):
                if not skip.covers_folder(path):
                    folders.append(path)
            elif path not in skip:
                paths.append(path)
    return sorted(paths)


def _entry(path: Path, follow: bool) -> Entry:
    kind = path.stat().st_mode if follow else path.lstat().st_mode
    if stat.S_ISLNK(kind):
        return Entry(MODE_LINK, blob_id(os.fsencode(os.readlink(path))))
    if not stat.S_ISREG(kind):
        raise DirtyTreeError(f"{path} should be a plain file")
    return Entry(MODE_EXEC if kind & 0o100 else MODE_FILE, blob_id(_read(path)))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise PatchsetError(f"cannot read {path}: {exc.strerror}") from None
