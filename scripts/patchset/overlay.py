# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The overlay: new files, kept in a folder that mirrors the vLLM tree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.gittree import MODE_EXEC, MODE_FILE, Blob

OVERLAY_NAME = "vllm_overlay"
# Written into the target at apply; the overlay's runtime reads it.
MARKER_PATH = "vllm/models/flint/_patchset.json"
_CACHES = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@dataclass(frozen=True)
class OverlayFile:
    """A file to add: its path in the vLLM tree and its contents."""

    path: str
    blob: Blob


def load_overlay(root: Path) -> tuple[OverlayFile, ...]:
    """Read every file of the overlay, sorted by path.

    Raises:
        PatchsetError: it is missing, or holds a link or the generated marker.
    """
    top = root / OVERLAY_NAME
    if not top.is_dir():
        raise PatchsetError(f"no overlay folder at {top}")
    files = []
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(set(folders) - _CACHES)
        for name in names:
            file = Path(folder, name)
            path = file.relative_to(top).as_posix()
            if name.endswith(".pyc"):
                continue
            if file.is_symlink():
                raise PatchsetError(f"{file}: the overlay holds no links")
            if path == MARKER_PATH:
                raise PatchsetError(f"{file} is made by apply; remove it")
            mode = MODE_EXEC if file.stat().st_mode & 0o100 else MODE_FILE
            files.append(OverlayFile(path, Blob(file.read_bytes(), mode)))
    return tuple(sorted(files, key=lambda file: file.path))
