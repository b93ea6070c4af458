# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Puts one patch onto another tree: exactly, by offset, or by three-way merge."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from patchset.diff import FileDiff
from patchset.errors import PatchsetError
from patchset.gittree import Blob
from patchset.hunks import HunkConflict, apply_file
from patchset.overlay import MARKER_PATH
from patchset.rebase.results import (
    ALREADY,
    CLEAN,
    CONFLICT,
    GONE,
    OFFSET,
    SUPERSEDED,
    FileOutcome,
)
from patchset.rebase.rows import Row, rows_of, without_rows
from patchset.rebase.trees import Tree
from patchset.series import Patch

# What the overlay's own names contain; rows with it are ours to replace.
OVERLAY_WORD = Path(MARKER_PATH).parent.name


@dataclass
class Placed:
    """One patch on one tree.

    Attributes:
        status: the worst of the files'.
        files: what happened to each.
        changes: the files after it; all or, with a conflict, none of them apply.
        marked: conflicting files with git's conflict marks.
        conflicts: hunks that fit nowhere and that no merge placed.
        dropped: whether upstream's own version takes this patch's place.
    """

    status: str
    files: list[FileOutcome] = field(default_factory=list)
    changes: dict[str, Blob | None] = field(default_factory=dict)
    marked: dict[str, Blob] = field(default_factory=dict)
    conflicts: list[HunkConflict] = field(default_factory=list)
    dropped: bool = False


_WORST_FIRST = (CONFLICT, GONE, SUPERSEDED, OFFSET, CLEAN)


def place_patch(
    patch: Patch, tree: Tree, origin: Tree, renames: Mapping[str, str]
) -> Placed:
    """Decide what a patch does to `tree`.

    Args:
        patch: the patch.
        tree: the upstream with the patches before it.
        origin: the pinned base with the patches before it: the merge's ancestor.
        renames: base files that upstream has under another name.
    """
    placed = Placed("")
    for diff in patch.files:
        _place_file(diff, tree, origin, renames, placed)
    statuses = [file.status for file in placed.files]
    found = next((status for status in _WORST_FIRST if status in statuses), ALREADY)
    placed.status = found
    if found in (CONFLICT, GONE) or placed.dropped:
        placed.changes = {}
    return placed


def _place_file(
    diff: FileDiff,
    tree: Tree,
    origin: Tree,
    renames: Mapping[str, str],
    placed: Placed,
) -> None:
    before, ancestor = tree.read(diff.path), origin.read(diff.path)

    def outcome(status: str, detail: str = "", rows: list[str] | None = None) -> None:
        placed.files.append(FileOutcome(diff.path, status, detail, rows or []))

    if before is None and not diff.creates:
        if diff.deletes:
            return outcome(ALREADY, "upstream has no such file any more")
        return outcome(GONE, _whereto(diff, tree, ancestor, renames))
    after = apply_file(diff, ancestor).after
    if after is None and not diff.deletes:
        raise PatchsetError(
            f"the patch set is inconsistent: {diff.path} does not fit its own base; "
            "run `python3 scripts/patchset lint`"
        )
    if after is None or before is None or ancestor is None:
        # A whole file made or deleted: nothing to merge.
        result = apply_file(diff, before)
        if result.conflicts:
            placed.conflicts += result.conflicts
            return outcome(CONFLICT, result.conflicts[0].why)
        placed.changes[diff.path] = result.after
        return outcome(CLEAN)
    theirs = _their_rows(diff.path, ancestor, after, before)
    if theirs:
        merged, conflicted = merge(before.data, ancestor.data, after.data)
        if not conflicted and merged == before.data:
            return outcome(ALREADY, rows=[row.key for row in theirs])
    if theirs:
        return _supersede(diff, before, ancestor, after, theirs, placed)
    _merge_file(diff, before, ancestor, after, placed, OFFSET)


def _their_rows(path: str, ancestor: Blob, after: Blob, before: Blob) -> list[Row]:
    """Rows that the patch adds and that upstream has already.

    The same import on both sides is no rival.
    """

    def rows(blob: Blob) -> dict[str, Row]:
        return rows_of(path, blob.data.decode("utf-8", "replace"))

    ours = rows(after)
    new = ours.keys() - rows(ancestor).keys()
    return [
        row
        for key, row in rows(before).items()
        if key in new and not ("import " in key and row.text == ours[key].text)
    ]


def _supersede(
    diff: FileDiff,
    before: Blob,
    ancestor: Blob,
    after: Blob,
    theirs: list[Row],
    placed: Placed,
) -> None:
    keys = [row.key for row in theirs]
    if not any(OVERLAY_WORD in f"{row.key} {row.text}".lower() for row in theirs):
        placed.dropped = True
        detail = "upstream has its own version; ours is left out"
        placed.files.append(FileOutcome(diff.path, SUPERSEDED, detail, keys))
        return
    # The rows in rows go with the outer ones.
    outer = [
        row
        for row in theirs
        if not any(
            other.first <= row.first and row.last <= other.last and other != row
            for other in theirs
        )
    ]
    loose = [row.key for row in outer if not row.whole]
    if loose:
        why = f"upstream has {', '.join(loose)}, which shares lines with other code"
        placed.conflicts.append(HunkConflict(diff.path, "", why))
        placed.files.append(FileOutcome(diff.path, CONFLICT, why, keys))
        return
    text = before.data.decode("utf-8", "surrogateescape")
    cleared = without_rows(text, outer).encode("utf-8", "surrogateescape")
    _merge_file(
        diff, Blob(cleared, before.mode), ancestor, after, placed, SUPERSEDED, keys
    )


def _merge_file(
    diff: FileDiff,
    before: Blob,
    ancestor: Blob,
    after: Blob,
    placed: Placed,
    status: str,
    keys: list[str] | None = None,
) -> None:
    """Apply exactly or merge; `status` is what it is called unless clean."""
    ours = "ours replaces upstream's" if status == SUPERSEDED else ""
    result = apply_file(diff, before)
    if not result.conflicts:
        placed.changes[diff.path] = result.after
        moved = "; ".join(f"{hunk} moves {by:+d} lines" for hunk, by in result.offsets)
        exact = CLEAN if not moved and status == OFFSET else status
        detail = "; ".join(filter(None, (ours, moved)))
        placed.files.append(FileOutcome(diff.path, exact, detail, keys or []))
        return
    data, conflicted = merge(before.data, ancestor.data, after.data)
    if conflicted:
        alone = [
            conflict
            for conflict in result.conflicts
            if hunk_conflicts(diff, conflict.hunk, ancestor, before)
        ]
        # Hunks may conflict only together; then all are named.
        conflicts = alone or list(result.conflicts)
        placed.conflicts += conflicts
        placed.marked[diff.path] = Blob(data, before.mode)
        detail = f"{len(conflicts)} of {len(diff.hunks)} hunks do not fit"
        placed.files.append(FileOutcome(diff.path, CONFLICT, detail, keys or []))
    elif data == before.data:
        placed.files.append(FileOutcome(diff.path, ALREADY, "", keys or []))
    else:
        placed.changes[diff.path] = Blob(data, before.mode)
        hunks = ", ".join(conflict.hunk for conflict in result.conflicts)
        merged = f"lines beside {hunks} changed; merged three-way"
        detail = "; ".join(filter(None, (ours, merged)))
        placed.files.append(FileOutcome(diff.path, status, detail, keys or []))


def _whereto(
    diff: FileDiff, tree: Tree, ancestor: Blob | None, renames: Mapping[str, str]
) -> str:
    new = renames.get(diff.path)
    moved = tree.read(new) if new else None
    after = apply_file(diff, ancestor).after
    if new is None or moved is None or ancestor is None or after is None:
        return "upstream has no such file any more, under no name that git finds"
    _, conflicted = merge(moved.data, ancestor.data, after.data)
    fits = "does not fit there" if conflicted else "would fit there"
    return f"upstream has it as {new}; the change {fits}"


def merge_hunk(diff: FileDiff, hunk: str, ancestor: Blob, blob: Blob) -> bytes:
    """One hunk, alone, merged into a file; with conflict marks if it does not fit.

    Args:
        diff: the patch's change of the file.
        hunk: the hunk's header.
        ancestor: the file that the diff was made for.
        blob: the file as upstream has it.
    """
    return _merge_hunk(diff, hunk, ancestor, blob)[0]


def hunk_conflicts(diff: FileDiff, hunk: str, ancestor: Blob, blob: Blob) -> bool:
    """Whether one hunk, alone, does not merge into a file; see `merge_hunk`."""
    return _merge_hunk(diff, hunk, ancestor, blob)[1]


def _merge_hunk(
    diff: FileDiff, hunk: str, ancestor: Blob, blob: Blob
) -> tuple[bytes, bool]:
    one = replace(diff, hunks=tuple(h for h in diff.hunks if h.header == hunk))
    after = apply_file(one, ancestor).after
    if after is None:
        return blob.data, True
    return merge(blob.data, ancestor.data, after.data)


def merge(ours: bytes, ancestor: bytes, theirs: bytes) -> tuple[bytes, bool]:
    """Git's three-way merge of one file.

    Returns:
        The merged bytes, and whether they hold conflict marks.
    """
    with tempfile.TemporaryDirectory(prefix="patchset-") as temporary:
        files = []
        for name, data in (("ours", ours), ("base", ancestor), ("theirs", theirs)):
            files.append(Path(temporary, name))
            files[-1].write_bytes(data)
        labels = ("upstream", "base", "patch")
        names = [word for label in labels for word in ("-L", label)]
        done = subprocess.run(
            ["git", "merge-file", "-p", "--diff3", *names, *map(str, files)],
            capture_output=True,
            check=False,
        )
    if done.returncode < 0 or done.returncode > 127:
        message = done.stderr.decode("utf-8", "replace").strip()
        raise PatchsetError(f"git merge-file failed: {message}")
    return done.stdout, done.returncode > 0
