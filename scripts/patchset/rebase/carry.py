# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Carries the series and the overlay to an upstream, patch by patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from patchset.diff import FileDiff
from patchset.gittree import Blob
from patchset.hunks import HunkConflict, apply_file
from patchset.rebase.cause import explain
from patchset.rebase.history import History, blame
from patchset.rebase.place import OVERLAY_WORD, Placed, place_patch
from patchset.rebase.results import (
    CONFLICT,
    GONE,
    HAND,
    MACHINE,
    PatchOutcome,
    Superseding,
)
from patchset.rebase.trees import Tree
from patchset.rebase.work import Work
from patchset.repo import Repo
from patchset.series import Patch


@dataclass
class Carried:
    """The series on the upstream.

    Attributes:
        base, upstream: both trees with series and overlay in place.
        commit: the end of the rebased series, overlay included.
        series_start, series_end: the commits around the patches alone.
    """

    patches: list[PatchOutcome]
    superseded: list[Superseding]
    base: Tree
    upstream: Tree
    series_start: str
    series_end: str
    commit: str
    resumed: int


# The overlay adds its files anew, so that the series stays reversible.
_REMOVAL = """\
[Model] Remove the base's own Flint

The base has files at places that the overlay owns. Ours supersede them, file by
file; the overlay can add files, but only a patch can take these away first.

Forwarded: not-needed
Removal: when the base has no Flint of its own, or Flint needs no patch set
Required: no
Signed-off-by: Flint patch set maintainers <flint-patch-set@users.noreply.github.com>
"""


def superseded_files(repo: Repo, upstream: Tree) -> list[Superseding]:
    """Upstream's files at places that the overlay owns: ours win, file by file.

    The overlay owns its files, and every package and test folder of its model's
    name, so that no file of upstream's stays among ours or tests what is gone.
    """
    ours = {file.path: file.blob for file in repo.overlay}
    found = []
    for path in sorted(upstream):
        if path in ours:
            same = upstream.read(path) == ours[path]
            found.append(Superseding(path, "same" if same else "replaced"))
        elif OVERLAY_WORD in PurePosixPath(path).parent.parts:
            found.append(Superseding(path, "removed"))
    return found


def mentions(superseded: list[Superseding], upstream: Tree) -> list[str]:
    """Upstream's files that name the folder of a file which was removed."""
    folders = {
        f"{PurePosixPath(item.path).parent}".encode()
        for item in superseded
        if item.outcome == "removed"
    }
    found = []
    for path in sorted(upstream if folders else ()):
        blob = upstream.read(path)
        if blob and any(folder in blob.data for folder in folders):
            found.append(path)
    return found


def carry(
    repo: Repo,
    work: Work,
    base: str,
    tip: str,
    history: History | None,
    done: list[PatchOutcome],
    finished: Callable[[list[PatchOutcome]], None],
) -> Carried:
    """Place every patch, then the overlay.

    Args:
        repo: the patch set.
        work: the working folder.
        base, tip: commits of the pinned base and of the upstream.
        history: what explains a conflict.
        done: the first patches as an interrupted run left them.
        finished: called after each patch with all so far.
    """
    store = work.store
    origin, tree = Tree.at(store, base), Tree.at(store, tip)
    superseded = superseded_files(repo, tree)
    gone: dict[str, Blob | None] = {item.path: None for item in superseded}
    start = tip
    if gone:
        start = store.write_commit(tip, gone, _REMOVAL)
        tree = Tree.at(store, start)
    renames = store.renames(base, tip)
    at, patches = start, list(done)
    for i, patch in enumerate(repo.series):
        if i < len(done):
            outcome = done[i]
        else:
            outcome = _one(patch, work, tree, origin, at, renames, history)
            patches.append(outcome)
            finished(patches)
        if outcome.commit:
            at = outcome.commit
            tree = Tree.at(store, at)
        origin = origin.changed(
            {d.path: apply_file(d, origin.read(d.path)).after for d in patch.files}
        )
    overlay: dict[str, Blob | None] = {f.path: f.blob for f in repo.overlay}
    commit = store.write_commit(at, overlay, "The overlay\n")
    store.set_ref(f"refs/heads/rebase/{work.slug}", commit)
    return Carried(
        patches,
        superseded,
        origin.changed(overlay),
        Tree.at(store, commit),
        start,
        at,
        commit,
        len(done),
    )


def _one(
    patch: Patch,
    work: Work,
    tree: Tree,
    origin: Tree,
    at: str,
    renames: Mapping[str, str],
    history: History | None,
) -> PatchOutcome:
    placed = place_patch(patch, tree, origin, renames)
    outcome = PatchOutcome(
        patch.name, placed.status, patch.required, files=placed.files
    )
    if placed.status not in (CONFLICT, GONE):
        if placed.dropped:
            outcome.detail = "left out: upstream's own version takes its place"
        elif placed.changes:
            outcome.commit = work.commit(patch, at, placed.changes)
            outcome.made = MACHINE
        return outcome
    _explain(patch, placed, tree, origin, renames, history, outcome)
    fix = work.hand_made(patch, tree, at)
    if fix is None:
        outcome.fix = work.offer_fix(patch, placed, at)
    elif fix.problem:
        outcome.detail = fix.problem
        outcome.fix = f"mend it on the branch fix/{work.slug}/{patch.name}"
    else:
        outcome.made, outcome.commit = HAND, fix.commit
        outcome.detail = "mended by hand"
    return outcome


def _explain(
    patch: Patch,
    placed: Placed,
    tree: Tree,
    origin: Tree,
    renames: Mapping[str, str],
    history: History | None,
    outcome: PatchOutcome,
) -> None:
    diffs: dict[str, FileDiff] = {diff.path: diff for diff in patch.files}
    conflicts = list(placed.conflicts)
    for file in placed.files:
        if file.status == GONE:
            conflicts.append(HunkConflict(file.path, "", file.detail))
    for conflict in conflicts:
        diff = diffs[conflict.path]
        trouble = explain(diff, conflict, tree, origin, renames.get(diff.path))
        if history is not None and trouble.cause is not None:
            blame(history, diff, conflict.hunk, origin, trouble.cause)
        outcome.troubles.append(trouble)
