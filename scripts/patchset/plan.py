# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Decides in memory what the series does to a tree; nothing is written here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from patchset import report
from patchset.diff import NO_BLOB, FileDiff
from patchset.errors import PatchsetError
from patchset.gittree import Blob, blob_id
from patchset.hunks import HunkConflict, apply_file
from patchset.repo import Repo
from patchset.report import Item
from patchset.series import Patch

PACKAGE = "vllm/"

# Reads one file of a tree by its path; None where there is none.
Reader = Callable[[str], Blob | None]

PRISTINE = "pristine"
PATCHED = "patched"
PARTLY = "partly"
EDITED = "edited"
CONFLICTING = "conflict"


@dataclass(frozen=True)
class Change:
    """One file before and after; None means that it does not exist."""

    path: str
    before: Blob | None
    after: Blob | None


@dataclass
class Plan:
    """What applying the series to a tree would do.

    Attributes:
        state: of the files that the series and the overlay name: "pristine",
            "patched", "partly" (some of it), "edited" (contents that are neither)
            or "conflict" (edited where a hunk must go).
        items: a status for each patch and overlay file.
        changes: each file that changes, sorted by path. Meaningful unless
            `state` is "conflict".
        edited: files with contents that no step of the series has.
        origin: for each file concerned the blob id that the base has, `NO_BLOB`
            where it has none.
    """

    state: str
    items: list[Item]
    changes: list[Change]
    edited: list[str]
    origin: dict[str, str]


def in_scope(path: str, full: bool) -> bool:
    """Whether a target holds the path: a package holds only ``vllm/``."""
    return full or path.startswith(PACKAGE)


def touched_paths(repo: Repo, full: bool) -> list[str]:
    """Every file that the series or the overlay touches in such a target."""
    paths = {diff.path for patch in repo.series for diff in patch.files}
    paths.update(file.path for file in repo.overlay)
    return sorted(path for path in paths if in_scope(path, full))


def plan_apply(repo: Repo, read: Reader, *, full: bool) -> Plan:
    """Plan to apply the series, then the overlay.

    Args:
        repo: the patch set.
        read: reads the target.
        full: whether the target is a whole source tree; else it is a package,
            which keeps no modes and nothing outside ``vllm/``.
    """
    return _Planner(repo, read, full).run()


def plan_reverse(repo: Repo, read: Reader, *, full: bool) -> list[Change]:
    """The changes that take a fully patched tree back to the base.

    Raises:
        PatchsetError: a patch does not reverse; never for a tree whose plan's
            state is "patched".
    """
    before = {path: read(path) for path in touched_paths(repo, full)}
    now = dict(before)
    for file in repo.overlay:
        if file.path in now:
            now[file.path] = None
    for patch in reversed(repo.series):
        for diff in _scoped(patch, full):
            result = apply_file(diff.reversed(), now[diff.path])
            if result.conflicts:
                raise PatchsetError(f"{patch.name} does not reverse in {diff.path}")
            now[diff.path] = result.after
    return _changes(before, now)


def _scoped(patch: Patch, full: bool) -> list[FileDiff]:
    if full:
        return list(patch.files)
    return [
        # Installers set modes as they like: only contents count there.
        replace(diff, old_mode=None, new_mode=None)
        for diff in patch.files
        if in_scope(diff.path, full)
    ]


def _changes(
    before: dict[str, Blob | None], after: dict[str, Blob | None]
) -> list[Change]:
    paths = sorted(path for path in before if before[path] != after[path])
    return [Change(path, before[path], after[path]) for path in paths]


class _Planner:
    def __init__(self, repo: Repo, read: Reader, full: bool) -> None:
        self.repo = repo
        self.full = full
        self.before = {path: read(path) for path in touched_paths(repo, full)}
        self.now = dict(self.before)
        self.chains = self._chains()
        # How many steps of its chain each file has behind it; None: edited.
        self.position = {
            path: _position(chain, self.before[path])
            for path, chain in self.chains.items()
        }
        self.step = dict.fromkeys(self.chains, 0)

    def run(self) -> Plan:
        items = [self._patch(patch) for patch in self.repo.series]
        items += [self._overlay(file.path, file.blob) for file in self.repo.overlay]
        edited = [path for path, at in self.position.items() if at is None]
        return Plan(
            state=self._state(items, edited),
            items=items,
            changes=_changes(self.before, self.now),
            edited=edited,
            origin={path: chain[0] for path, chain in self.chains.items()},
        )

    def _chains(self) -> dict[str, list[str]]:
        """The blob ids that each file goes through, first to last."""
        chains: dict[str, list[str]] = {}
        for patch in self.repo.series:
            for diff in _scoped(patch, self.full):
                if diff.old_blob is None or diff.new_blob is None:
                    raise PatchsetError(
                        f"{patch.filename}: only changes the mode of {diff.path}; "
                        "the series does not serve that"
                    )
                chain = chains.setdefault(diff.path, [diff.old_blob])
                if chain[-1] != diff.old_blob:
                    raise PatchsetError(
                        f"{patch.filename}: its index line for {diff.path} does not "
                        "continue the series; run `python3 scripts/patchset refresh`"
                    )
                chain.append(diff.new_blob)
        for file in self.repo.overlay:
            if in_scope(file.path, self.full):
                chain = chains.setdefault(file.path, [NO_BLOB])
                if chain[-1] != NO_BLOB:
                    raise PatchsetError(
                        f"{file.path} is in the overlay and left in place by a patch"
                    )
                chain.append(blob_id(file.blob.data))
        return chains

    def _patch(self, patch: Patch) -> Item:
        diffs = _scoped(patch, self.full)
        outside = tuple(
            diff.path for diff in patch.files if not in_scope(diff.path, self.full)
        )
        item = Item("patch", patch.name, report.OUTSIDE, outside=outside)
        if not diffs:
            return item
        results = [self._file(diff) for diff in diffs]
        item.conflicts = tuple(c for result in results for c in result.conflicts)
        done = sum(result.already for result in results)
        if item.conflicts:
            item.status = report.CONFLICT
        elif done:
            item.status = report.ALREADY if done == len(results) else report.PARTLY
        else:
            item.status = report.WOULD_APPLY
        item.detail = "; ".join(text for result in results for text in result.moved)
        return item

    def _file(self, diff: FileDiff) -> _FileResult:
        at, step = self.position[diff.path], self.step[diff.path]
        self.step[diff.path] += 1
        if at is not None and at > step:
            return _FileResult(already=True)
        result = apply_file(diff, self.now[diff.path])
        if result.conflicts:
            if (
                at is None
                and not apply_file(diff.reversed(), self.before[diff.path]).conflicts
            ):
                return _FileResult(already=True)
            return _FileResult(conflicts=result.conflicts)
        self.now[diff.path] = result.after
        if at is not None and _id(result.after) != self.chains[diff.path][step + 1]:
            raise PatchsetError(
                f"the index line for {diff.path} is not what the patch makes of it; "
                "run `python3 scripts/patchset refresh`"
            )
        moved = tuple(
            f"{diff.path} {hunk} fits at an offset of {by:+d} lines"
            for hunk, by in result.offsets
        )
        return _FileResult(moved=moved)

    def _overlay(self, path: str, blob: Blob) -> Item:
        if not in_scope(path, self.full):
            return Item("overlay", path, report.OUTSIDE)
        at, step = self.position[path], self.step[path]
        if at is None:
            return Item("overlay", path, report.EDITED, "its contents are not ours")
        if at > step:
            return Item("overlay", path, report.ALREADY)
        self.now[path] = blob
        return Item("overlay", path, report.WOULD_APPLY)

    def _state(self, items: list[Item], edited: list[str]) -> str:
        statuses = {item.status for item in items} - {report.OUTSIDE}
        if report.CONFLICT in statuses:
            return CONFLICTING
        if edited:
            return EDITED
        if statuses <= {report.WOULD_APPLY}:
            return PRISTINE
        return PATCHED if statuses == {report.ALREADY} else PARTLY


@dataclass(frozen=True)
class _FileResult:
    already: bool = False
    conflicts: tuple[HunkConflict, ...] = ()
    moved: tuple[str, ...] = ()


def _id(blob: Blob | None) -> str:
    return NO_BLOB if blob is None else blob_id(blob.data)


def _position(chain: list[str], blob: Blob | None) -> int | None:
    found = _id(blob)
    return chain.index(found) if found in chain else None
