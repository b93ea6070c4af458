# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Takes the patch set back: the base's own bytes, or nothing is touched."""

from __future__ import annotations

from pathlib import Path

from patchset import plan as planning
from patchset import report as reporting
from patchset.errors import DirtyTreeError, PatchsetError
from patchset.examine import FOREIGN, examine, read_record, record_path, tree_checks
from patchset.gittree import MODE_FILE, Blob
from patchset.identity import with_changes
from patchset.listing import list_entries, read_blob
from patchset.opening import Opened, carries_other_series, current_blob, opened
from patchset.overlay import MARKER_PATH
from patchset.plan import Change, plan_reverse
from patchset.record import update_record
from patchset.repo import Repo
from patchset.report import Item, Report
from patchset.txn import Applied


def unapply_tree(root: Path, repo: Repo, *, dry_run: bool = False) -> Report:
    """Give a folder the base's own bytes back.

    Whatever version of the series was applied here is undone from the bytes that
    `apply_tree` saved. Without them, this version is undone by reversing it.

    Raises:
        DirtyTreeError: files were edited after apply; nothing was touched.
    """
    with opened("unapply", root, repo) as at:
        result = at.result
        saved = at.applied
        changes = _from_saved(at, saved) if saved else _by_reversing(at, repo)
        if changes is None:
            return result
        entries = with_changes(list_entries(at.target, repo.pin), changes)
        result.trees = tree_checks(at.target, entries, repo.pin)
        status = reporting.WOULD_UNAPPLY if dry_run else reporting.UNAPPLIED
        result.items = [Item("file", change.path, status) for change in changes]
        if not dry_run:
            at.state.run(changes, None)
        _say_unapplied(result, repo, dry_run)
    return result


def _from_saved(at: Opened, applied: Applied) -> list[Change]:
    """The changes that put every saved byte back."""
    edited = [
        file["path"]
        for file in applied.files
        if current_blob(at.target, file["path"]) != file["after"]
    ]
    if edited:
        raise DirtyTreeError(
            "nothing was changed: these files were edited after apply: "
            + ", ".join(edited)
        )
    changes = []
    for index, file in enumerate(applied.files):
        before = None
        if file["before"] is not None:
            before = at.state.saved_blob(index, file["before"])
        now = read_blob(at.target.path, file["path"])
        changes.append(Change(file["path"], now, before))
    return changes


def _by_reversing(at: Opened, repo: Repo) -> list[Change] | None:
    """The changes that reverse the series; None where it is not applied."""
    target = at.target
    if target.dist_info and "+" in (target.version or ""):
        raise PatchsetError(
            f"{target.path} holds a wheel that was built patched ({target.version}); "
            f"to go back, install vLLM {repo.pin.base.version} with pip"
        )
    if carries_other_series(at, repo):
        raise DirtyTreeError(at.result.summary)
    found = examine(target, repo)
    at.result.state = found.state
    if found.plan.state == planning.PRISTINE:
        at.result.trees = tree_checks(target, found.entries, repo.pin)
        at.result.summary = "nothing to undo: the patch set is not applied here"
        return None
    if found.plan.state != planning.PATCHED:
        names = sorted({*found.plan.edited, *found.differing})
        raise DirtyTreeError(
            "nothing was changed: the tree is neither the base nor the patched one, "
            "and nothing was saved to restore it from"
            + (f"; these files differ: {', '.join(names)}" if names else "")
        )
    changes = plan_reverse(repo, lambda p: read_blob(target.path, p), full=target.full)
    marker = read_blob(target.path, MARKER_PATH)
    if marker is not None:
        changes.append(Change(MARKER_PATH, marker, None))
    if target.dist_info:
        now = read_record(target)
        before = Blob(update_record(now, changes), MODE_FILE)
        changes.append(Change(record_path(target), Blob(now, MODE_FILE), before))
    return changes


def _say_unapplied(result: Report, repo: Repo, dry_run: bool) -> None:
    if dry_run:
        result.summary = f"would restore {len(result.items)} files"
        return
    result.state = planning.PRISTINE
    result.summary = f"restored {len(result.items)} files"
    if all(tree.equal for tree in result.trees.values()):
        result.summary += f": this is vLLM {repo.pin.base.version} again"
    else:
        result.state = FOREIGN
        result.summary += "; other files differ from the base, and were left alone"
