# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Applies the patch set to a folder, or says where the folder stands."""

from __future__ import annotations

from pathlib import Path

from patchset import plan as planning
from patchset import report as reporting
from patchset.errors import EXIT_CONFLICT, EXIT_DIRTY, EXIT_WRONG_BASE
from patchset.examine import (
    FOREIGN,
    Examined,
    examine,
    name_some,
    read_record,
    record_path,
    tree_checks,
)
from patchset.gittree import MODE_FILE, Blob, Entry
from patchset.identity import marker, package_tree, with_changes
from patchset.opening import carries_other_series, opened
from patchset.overlay import MARKER_PATH
from patchset.plan import Change
from patchset.record import update_record
from patchset.repo import Repo
from patchset.report import Report


def apply_tree(
    root: Path, repo: Repo, *, dry_run: bool = False, check_identity: bool = True
) -> Report:
    """Apply the whole patch set to a source tree, checkout or installed package.

    Args:
        root: the folder that holds ``vllm/``.
        repo: the patch set.
        dry_run: only say what would be done.
        check_identity: refuse a result that is not the pinned one.

    Returns:
        The report; its exit code says whether the patch set is in place.

    Raises:
        PatchsetError: no vLLM, another version, or the disk cannot be written.
    """
    with opened("apply", root, repo) as at:
        result = at.result
        if carries_other_series(at, repo):
            return result
        found = examine(at.target, repo)
        result.items = found.plan.items
        result.state = found.state
        if found.state == planning.PATCHED:
            result.summary = f"already applied: this is vLLM {repo.pin.release}"
            _check_identity(found, found.entries, repo, result, check_identity)
        elif found.state == planning.PRISTINE:
            after = with_changes(found.entries, found.plan.changes)
            if _check_identity(found, after, repo, result, check_identity):
                if not dry_run:
                    at.state.run(_all_changes(found, after, repo), repo.series_sha256)
                _say_applied(result, repo, dry_run)
        else:
            _explain(found, result)
            result.summary = f"nothing was changed: {result.summary}"
    return result


def status_tree(root: Path, repo: Repo) -> Report:
    """Say what a folder is: pristine, patched, partly patched, or foreign.

    The exit code is 0 for a pristine or fully patched tree, else what `apply`
    would exit with.
    """
    with opened("status", root, repo) as at:
        result = at.result
        if carries_other_series(at, repo):
            return result
        found = examine(at.target, repo)
    result.items = found.plan.items
    for item in result.items:
        if item.status == reporting.WOULD_APPLY:
            item.status = reporting.NOT_APPLIED
    result.state = found.state
    if found.state == planning.PATCHED:
        result.summary = f"patched: this is vLLM {repo.pin.release}"
        _check_identity(found, found.entries, repo, result, check=True)
        return result
    result.trees = tree_checks(
        at.target, found.entries, repo.pin, source_known=found.source_known
    )
    if found.state == planning.PRISTINE:
        result.summary = f"pristine: this is vLLM {repo.pin.base.version}, not patched"
    else:
        _explain(found, result)
    return result


def _check_identity(
    found: Examined, entries: dict[str, Entry], repo: Repo, result: Report, check: bool
) -> bool:
    """Compare a patched tree with the pin; say so where it differs."""
    result.trees = tree_checks(
        found.target,
        entries,
        repo.pin,
        patched=True,
        source_known=found.source_known,
    )
    pinned = repo.pin.series_sha256 == repo.series_sha256
    if not check or (pinned and all(tree.equal for tree in result.trees.values())):
        return True
    what = "result" if pinned else "series"
    result.exit_code = EXIT_WRONG_BASE
    result.summary = (
        f"the {what} is not the one that pin.toml names; after a change of the "
        "patches or the overlay run `python3 scripts/patchset refresh`"
    )
    return False


def _all_changes(found: Examined, after: dict[str, Entry], repo: Repo) -> list[Change]:
    """The plan's changes, the marker, and an installed package's RECORD."""
    target = found.target
    content = marker(repo, package_tree(after, repo.pin))
    changes = [*found.plan.changes, Change(MARKER_PATH, None, content)]
    if target.dist_info:
        before = read_record(target)
        record = Change(
            record_path(target),
            Blob(before, MODE_FILE),
            Blob(update_record(before, changes), MODE_FILE),
        )
        changes.append(record)
    return changes


def _say_applied(result: Report, repo: Repo, dry_run: bool) -> None:
    patches = [item for item in result.items if item.kind == "patch"]
    files = sum(item.status == reporting.WOULD_APPLY for item in result.items)
    files -= sum(item.status == reporting.WOULD_APPLY for item in patches)
    what = f"{len(patches)} patches and {files} new files"
    if dry_run:
        result.summary = f"would apply {what}: nothing is in the way"
        return
    for item in result.items:
        if item.status == reporting.WOULD_APPLY:
            item.status = reporting.APPLIED
    result.state = planning.PATCHED
    result.summary = f"applied {what}: this is now vLLM {repo.pin.release}"


def _explain(found: Examined, result: Report) -> None:
    """Why this tree is neither the base nor the result."""
    names = name_some(sorted({*found.plan.edited, *found.differing}))
    result.notes += [f"differs: {name}" for name in names]
    result.exit_code = EXIT_DIRTY
    if found.state == planning.CONFLICTING:
        patches = [item for item in result.items if item.kind == "patch"]
        failed = sum(item.status == reporting.CONFLICT for item in patches)
        result.exit_code = EXIT_CONFLICT
        result.summary = f"conflict: {failed} of {len(patches)} patches do not fit"
    elif found.state == planning.EDITED:
        result.summary = "edited: files of the series have contents of their own"
    elif found.state == planning.PARTLY:
        result.summary = "half-patched: only a part of the series is in place"
    elif found.state == FOREIGN:
        result.summary = "edited: files that the series does not touch differ"
        if not names:
            result.notes.append(
                "to have them named, run `python3 scripts/patchset fetch source`"
            )
