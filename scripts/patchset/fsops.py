# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Every change the patch set makes to a disk, each one durable.

All writes go through these few functions, so that a test can stop the program
before or inside any of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a new file and sync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Move a file or folder over `target` in one step."""
    os.replace(source, target)
    sync_folder(target.parent)


def unlink(path: Path) -> None:
    """Remove a file, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, if there is none."""
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove an empty folder; one that still holds something stays."""
    if path.is_dir():
        with contextlib.suppress(OSError):
            path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a folder and all it holds, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; some file systems cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
