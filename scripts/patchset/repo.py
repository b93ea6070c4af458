# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The patch set as a whole: pin, series and overlay of one repository."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.overlay import OVERLAY_NAME, OverlayFile, load_overlay
from patchset.pin import PIN_NAME, Pin, load_pin
from patchset.series import SERIES_NAME, Patch, load_series


@dataclass(frozen=True)
class Repo:
    """One repository's patch set.

    Attributes:
        root: the repository.
        pin: its pin file.
        series: its patches, in order.
        overlay: its new files, sorted by path.
    """

    root: Path
    pin: Pin
    series: tuple[Patch, ...]
    overlay: tuple[OverlayFile, ...]

    @cached_property
    def series_sha256(self) -> str:
        """A hash over the names, modes and bytes of all patches and overlay files.

        It is the SHA-256 of the lines ``<sha256> <mode> <path>``, patches first
        and in order: comments in the series file do not count, its order does.
        """
        rows = [(f"patches/{p.filename}", 0o100644, p.data) for p in self.series]
        rows += [
            (f"{OVERLAY_NAME}/{file.path}", file.blob.mode, file.blob.data)
            for file in self.overlay
        ]
        digest = hashlib.sha256()
        for path, mode, data in rows:
            line = f"{hashlib.sha256(data).hexdigest()} {mode:o} {path}\n"
            digest.update(line.encode())
        return digest.hexdigest()


def find_root(start: Path | None = None) -> Path:
    """The repository that `start` (by default this file) lies in."""
    start = (start or Path(__file__)).resolve()
    for folder in (start, *start.parents):
        if (folder / PIN_NAME).is_file() and (folder / SERIES_NAME).is_file():
            return folder
    raise PatchsetError(
        f"no patch set here: {start} lies in no folder with {PIN_NAME} and "
        f"{SERIES_NAME}; pass --repo"
    )


def load_repo(root: Path | None = None) -> Repo:
    """Load the patch set at `root`, by default the one this file belongs to."""
    root = find_root() if root is None else root.resolve()
    return Repo(root, load_pin(root), load_series(root), load_overlay(root))
