# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Makes the files of each step from the series, the overlay and staging/."""

from __future__ import annotations

from patchset.errors import ConflictError, PatchsetError
from patchset.gittree import Blob
from patchset.hunks import apply_file
from patchset.rebase.place import place_patch
from patchset.rebase.results import CONFLICT, GONE
from patchset.rebase.trees import Tree
from patchset.repo import Repo
from patchset.staging.steps import Plan, Step, edits_of, files_of


def compose(
    repo: Repo, plan: Plan, step: Step, tree: Tree, origin: Tree
) -> dict[str, Blob | None]:
    """What one step changes.

    Args:
        repo: the patch set.
        plan: all steps.
        step: the step.
        tree: the upstream with the steps before it.
        origin: the pinned base, which the patches were made for.

    Raises:
        ConflictError: a patch or edit does not fit; rebase the patch set first.
    """
    changes: dict[str, Blob | None] = {}
    for patch in repo.series:
        if patch.name in step.patches:
            placed = place_patch(
                patch, tree.changed(changes), _before(repo, patch.name, origin), {}
            )
            if placed.status in (CONFLICT, GONE):
                raise ConflictError(
                    f"{step.name}: the patch {patch.name} does not fit this upstream "
                    f"({placed.status}); see `patchset rebase`"
                )
            changes.update(placed.changes)
    for file in repo.overlay:
        if step.brings(file.path) and file.path not in plan.leave_out:
            dropped = plan.drop.get(file.path, ())
            changes[file.path] = _without(file.blob, dropped, file.path)
    for path, data in files_of(repo, step).items():
        changes[path] = Blob(data)
    for diff in edits_of(repo, step):
        result = apply_file(diff, tree.changed(changes).read(diff.path))
        if result.conflicts:
            raise ConflictError(
                f"staging/edits/{step.name} does not fit {diff.path}: "
                f"{result.conflicts[0].why}"
            )
        changes[diff.path] = result.after
    return changes


def _before(repo: Repo, name: str, origin: Tree) -> Tree:
    """The pinned base with the patches that stand before one in the series."""
    for patch in repo.series:
        if patch.name == name:
            break
        origin = origin.changed(
            {d.path: apply_file(d, origin.read(d.path)).after for d in patch.files}
        )
    return origin


def _without(blob: Blob, lines: tuple[str, ...], path: str) -> Blob:
    """A file without some of its lines, each of which it must have once."""
    text = blob.data.decode()
    for line in lines:
        if text.count(f"\n{line}\n") != 1:
            raise PatchsetError(
                f"staging/steps.toml drops {line!r} from {path}, which has it "
                f"{text.count(line)} times"
            )
        text = text.replace(f"\n{line}\n", "\n")
    return Blob(text.encode(), blob.mode)
