# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The working folder of one rebase: what is finished, and hand-made fixes.

Branches in its store, for an upstream called NAME:

- ``rebase/NAME``: the series on the upstream, made anew by every run;
- ``fix/NAME/PATCH``: where a patch conflicts, a machine-made commit with git's
  conflict marks. What a person commits on top of it replaces the patch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from patchset import fsops
from patchset.git import git
from patchset.gittree import Blob
from patchset.rebase.place import Placed, merge
from patchset.rebase.results import PatchOutcome, RebaseReport, patch_from_dict
from patchset.rebase.store import MACHINE, Store
from patchset.rebase.trees import Tree
from patchset.repo import Repo
from patchset.series import Patch

_MARKS = (b"<<<<<<< ", b">>>>>>> ")


class Work:
    """The folder: a store, and a state file that survives a killed run."""

    def __init__(self, folder: Path, slug: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.slug = folder, slug
        self.store = Store(folder / "store.git")
        self._state = folder / "state.json"
        self._last_good = folder.parent / "last-good.json"

    # What is finished ------------------------------------------------------------

    def key(self, repo: Repo, identity: str, gear: str) -> str:
        """A hash of everything that the outcome depends on."""
        digest = hashlib.sha256()
        own = sorted(Path(__file__).parents[1].rglob("*.py"))
        parts = [
            repo.series_sha256.encode(),
            repo.pin.sdist.sha256.encode(),
            identity.encode(),
            gear.encode(),
            *sorted(tip.encode() for tip in self._fixes()),
            *(path.read_bytes() for path in own),
        ]
        for part in parts:
            digest.update(hashlib.sha256(part).digest())
        return digest.hexdigest()

    def _fixes(self) -> list[str]:
        """The last commits of fixes made by hand."""
        rows = git(
            self.store.folder,
            "for-each-ref",
            "--format=%(objectname) %(refname)",
            f"refs/heads/fix/{self.slug}/",
            f"refs/fix-base/{self.slug}/",
        )
        tips: dict[str, set[str]] = {}
        for row in rows.decode().splitlines():
            commit, _, ref = row.partition(" ")
            tips.setdefault(ref.rpartition("/")[2], set()).add(commit)
        return [tip for pair in tips.values() if len(pair) > 1 for tip in pair]

    def load(self, key: str) -> tuple[list[PatchOutcome], dict[str, Any] | None]:
        """What an earlier run of the same work left: its patches, its report."""
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            if state["key"] != key:
                return [], None
            patches = [patch_from_dict(row) for row in state["patches"]]
        except (OSError, ValueError, KeyError, TypeError):
            return [], None
        made = [patch.commit for patch in patches if patch.commit]
        if not all(self.store.commit_of(commit) for commit in made):
            return [], None  # the store was removed since
        return patches, state.get("report")

    def save(
        self, key: str, patches: list[PatchOutcome], report: RebaseReport | None = None
    ) -> None:
        """Keep what is finished, durably."""
        plain = RebaseReport("", {}, {}, "", "", patches=patches).as_dict()["patches"]
        state = {
            "key": key,
            "patches": plain,
            "report": report.as_dict() if report else None,
        }
        _write_json(self._state, state)

    @property
    def last_good(self) -> dict[str, str]:
        """The last upstream that passed the gear "good"; empty if none did."""
        try:
            return json.loads(self._last_good.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def record_good(self, upstream: dict[str, str], repo: Repo) -> None:
        """Remember an upstream that passed."""
        row = {**upstream, "series_sha256": repo.series_sha256}
        _write_json(self._last_good, row)

    # Hand-made fixes --------------------------------------------------------------

    def offer_fix(self, patch: Patch, placed: Placed, at: str) -> str:
        """Make the branch on which a person mends a conflict; say how."""
        branch = f"fix/{self.slug}/{patch.name}"
        message = f"{patch.subject}\n\nConflict marks, made by machine: mend them.\n"
        commit = self.store.write_commit(
            at, {**placed.changes, **placed.marked}, message
        )
        self.store.set_ref(f"refs/heads/{branch}", commit)
        self.store.set_ref(f"refs/fix-base/{self.slug}/{patch.name}", commit)
        return (
            f"git -C {self.store.folder} worktree add ../fix-{patch.name} {branch}; "
            f"mend the files in {self.folder / f'fix-{patch.name}'}, git commit -a, "
            "and run the same rebase again"
        )

    def hand_made(self, patch: Patch, tree: Tree, at: str) -> HandMade | None:
        """What a person committed for a patch, carried to the present tree."""
        tip = self.store.commit_of(f"refs/heads/fix/{self.slug}/{patch.name}")
        marked = self.store.commit_of(f"refs/fix-base/{self.slug}/{patch.name}")
        if tip is None or marked is None or tip == marked:
            return None
        before = self.store.commit_of(f"{marked}~1")
        assert before is not None
        old, new = Tree.at(self.store, before), Tree.at(self.store, tip)
        changes: dict[str, Blob | None] = {}
        for path in sorted({*old.entries, *new.entries}):
            if old.entries.get(path) == new.entries.get(path):
                continue
            ours, ancestor, theirs = (t.read(path) for t in (tree, old, new))
            if ours == ancestor or ours is None or ancestor is None or theirs is None:
                changes[path] = theirs
                continue
            data, conflicted = merge(ours.data, ancestor.data, theirs.data)
            if conflicted:
                return HandMade(problem=f"the fix made by hand no longer fits {path}")
            changes[path] = Blob(data, theirs.mode)
        for path, blob in changes.items():
            if blob and any(line.startswith(_MARKS) for line in blob.data.split(b"\n")):
                return HandMade(problem=f"{path} still holds conflict marks")
        return HandMade(changes, self.commit(patch, at, changes, person=tip))

    def commit(
        self,
        patch: Patch,
        at: str,
        changes: dict[str, Blob | None],
        person: str | None = None,
    ) -> str:
        """Commit a patch on the series; `person` is the commit that names them."""
        message = f"{patch.subject}\n\n{patch.body}\n\n"
        message += "".join(f"{name}: {value}\n" for name, value in patch.trailers)
        env = dict(MACHINE)
        if person is not None:
            form = "%an%x00%ae%x00%aI%x00%cn%x00%ce%x00%cI"
            shown = git(self.store.folder, "log", "-1", f"--format={form}", person)
            keys = [
                f"GIT_{role}_{part}"
                for role in ("AUTHOR", "COMMITTER")
                for part in ("NAME", "EMAIL", "DATE")
            ]
            env = dict(zip(keys, shown.decode().strip().split("\0")))
        return self.store.write_commit(at, changes, message, env)


class HandMade:
    """A person's version of a patch, or why it cannot be used."""

    def __init__(
        self,
        changes: dict[str, Blob | None] | None = None,
        commit: str = "",
        problem: str = "",
    ) -> None:
        self.changes, self.commit, self.problem = changes or {}, commit, problem


def _write_json(path: Path, data: object) -> None:
    staged = path.with_name(f".{path.name}.new")
    fsops.write_file(staged, json.dumps(data, indent=2).encode() + b"\n")
    fsops.rename(staged, path)
