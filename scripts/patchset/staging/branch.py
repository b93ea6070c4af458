# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Commits the steps on a branch of the upstream's checkout; pushes nothing."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.git import git, git_dir
from patchset.gittree import Blob
from patchset.staging.steps import Plan, Step


@dataclass(frozen=True)
class Person:
    """Who signs off."""

    name: str
    email: str

    @property
    def trailer(self) -> str:
        """The DCO's line."""
        return f"Signed-off-by: {self.name} <{self.email}>"


def signer(checkout: Path) -> Person:
    """Who commits in a checkout, as git is configured there.

    Raises:
        PatchsetError: git does not know.
    """
    name, email = (
        git(checkout, "config", f"user.{key}", check=False).decode().strip()
        for key in ("name", "email")
    )
    if not name or not email:
        raise PatchsetError(
            f"git does not know who you are in {checkout}: set user.name and "
            "user.email, since each commit is signed off"
        )
    return Person(name, email)


@contextlib.contextmanager
def new_branch(checkout: Path, branch: str, onto: str) -> Iterator[Path]:
    """A worktree on a new branch; the branch stays only if all goes well.

    The checkout's own files and current branch are not touched.

    Raises:
        PatchsetError: no checkout, no such commit, or the branch exists.
    """
    if git_dir(checkout) is None:
        raise PatchsetError(f"{checkout} is no git checkout")
    command = ("rev-parse", "--verify", "--quiet")
    if not git(checkout, *command, f"{onto}^{{commit}}", check=False):
        raise PatchsetError(f"{checkout} has no commit {onto!r}")
    if git(checkout, *command, f"refs/heads/{branch}", check=False):
        raise PatchsetError(
            f"{checkout} has a branch {branch} already; delete it, or name another "
            "with --branch"
        )
    with tempfile.TemporaryDirectory(prefix="patchset-") as temporary:
        tree = Path(temporary, "vllm")
        finished = False
        git(checkout, "worktree", "add", "--quiet", "-b", branch, str(tree), onto)
        try:
            yield tree
            finished = True
        finally:
            git(checkout, "worktree", "remove", "--force", str(tree), check=False)
            git(checkout, "worktree", "prune", check=False)
            if not finished:
                git(checkout, "branch", "--quiet", "-D", branch, check=False)


def message_of(plan: Plan, step: Step, person: Person) -> str:
    """A step's commit message, with its trailers."""
    trailers = f"Assisted-by: {plan.assisted_by}\n{person.trailer}\n"
    return f"{step.subject}\n\n{step.body}\n\n{trailers}"


def commit_step(tree: Path, changes: dict[str, Blob | None], message: str) -> str:
    """Write a step's files and commit them.

    Returns:
        The commit.
    """
    for path, blob in changes.items():
        place = tree / path
        if blob is None:
            place.unlink(missing_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(blob.data)
        place.chmod(0o755 if blob.mode & 0o100 else 0o644)
    names = "\0".join(changes).encode()
    flags = ("--force", "--pathspec-from-file=-", "--pathspec-file-nul")
    git(tree, "add", "--all", *flags, data=names)
    git(tree, "commit", "--quiet", "--file=-", data=message.encode())
    return git(tree, "rev-parse", "HEAD").decode().strip()
