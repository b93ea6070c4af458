# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Finds the commit or release that broke a hunk, by bisecting what lies between."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from packaging.version import Version

from patchset.diff import FileDiff
from patchset.download import fetch
from patchset.git import git
from patchset.gittree import Blob
from patchset.pin import Artifact, Pin
from patchset.rebase.place import hunk_conflicts
from patchset.rebase.releases import source_archives
from patchset.rebase.results import Cause
from patchset.rebase.store import Store, archive_files
from patchset.rebase.trees import Tree

_PULL_REQUEST = re.compile(r"\(#(\d+)\)\s*$")


class History(Protocol):
    """What lies between the base and the upstream."""

    def steps(self, path: str) -> list[str]:
        """Names of the steps that may have changed a file, the upstream's last."""

    def read(self, step: str, path: str) -> Blob | None:
        """A file at a step."""

    def name(self, step: str, cause: Cause) -> None:
        """Write into `cause` what the step is."""


class Commits:
    """A git history that holds both base and upstream."""

    def __init__(self, store: Store, base: str, upstream: str) -> None:
        self.store, self.base, self.upstream = store, base, upstream

    def steps(self, path: str) -> list[str]:
        """The first-parent commits that touch the file, oldest first."""
        rows = git(
            self.store.folder,
            "rev-list",
            "--reverse",
            "--first-parent",
            f"{self.base}..{self.upstream}",
            "--",
            path,
        )
        return rows.decode().split()

    def read(self, step: str, path: str) -> Blob | None:
        """The file at a commit."""
        row = git(self.store.folder, "ls-tree", step, "--", path).decode().split()
        return Blob(self.store.read(row[2]), int(row[0], 8)) if row else None

    def name(self, step: str, cause: Cause) -> None:
        """Give commit, subject and pull request."""
        shown = git(self.store.folder, "log", "-1", "--format=%s", step)
        cause.commit, cause.subject = step, shown.decode().strip()
        match = _PULL_REQUEST.search(cause.subject)
        cause.pull_request = match[1] if match else ""


class Releases:
    """The releases between base and upstream, in either direction."""

    def __init__(self, pin: Pin, upstream: str, paths: Sequence[str]) -> None:
        self.pin, self.paths = pin, frozenset(paths)
        first, last = Version(pin.base.version), Version(upstream)
        between = {
            str(version): artifact
            for version, artifact in source_archives(pin.sdist.project).items()
            if min(first, last) <= version <= max(first, last) and version != first
        }
        if first > last:
            between = dict(reversed(between.items()))
        self.archives: dict[str, Artifact] = between
        self._read: dict[str, dict[str, Blob]] = {}

    def steps(self, path: str) -> list[str]:
        """All of them: an archive does not say which files changed."""
        return list(self.archives)

    def read(self, step: str, path: str) -> Blob | None:
        """The file in a release."""
        if step not in self._read:
            archive = fetch(self.archives[step])
            self._read[step] = {
                name: blob
                for name, blob in archive_files(archive, self.pin.source_globs)
                if name in self.paths
            }
        return self._read[step].get(path)

    def name(self, step: str, cause: Cause) -> None:
        """Give the release."""
        cause.release = step


def blame(
    history: History, diff: FileDiff, hunk: str, origin: Tree, cause: Cause
) -> None:
    """Write into `cause` which step broke a hunk, or a file if no hunk is named.

    Nothing is claimed where the hunk cannot be judged alone.
    """
    ancestor = origin.read(diff.path)
    if ancestor is None:
        return

    def broken(blob: Blob | None) -> bool:
        if blob is None:
            return True
        return bool(hunk) and hunk_conflicts(diff, hunk, ancestor, blob)

    if broken(ancestor):
        return
    steps = history.steps(diff.path)
    found, cause.tried = first_that_breaks(
        steps, lambda step: broken(history.read(step, diff.path))
    )
    if found:
        history.name(found, cause)


def first_that_breaks(
    steps: Sequence[str], broken: Callable[[str], bool]
) -> tuple[str | None, int]:
    """Bisect steps that lead from the base, which is whole, to the upstream.

    Returns:
        The first broken step, None if none is, and how many were tried.
    """
    low, high, tried = 0, len(steps) - 1, 0
    found = None
    while low <= high:
        middle = (low + high) // 2
        tried += 1
        if broken(steps[middle]):
            found, high = steps[middle], middle - 1
        else:
            low = middle + 1
    return found, tried
