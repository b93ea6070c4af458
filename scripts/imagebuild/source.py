# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The source stage: the patched tree, whose base and result are verified."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from patchset.apply import apply_tree
from patchset.errors import PatchsetError
from patchset.git import git
from patchset.repo import Repo
from patchset.report import Report
from patchset.tree import base_archive, make_tree
from patchset.verify import verify


def source_from_git(target: Path, repo: Repo, repository: str) -> Report:
    """Clone the base's tag as the new folder `target`, and patch it.

    Args:
        target: must not exist; nothing stays there if anything is wrong.
        repo: the patch set.
        repository: where to clone from.

    Raises:
        PatchsetError: the clone failed, or the tag is another commit.
    """
    if target.exists():
        raise PatchsetError(f"{target} exists already; name a new folder")
    finished = False
    try:
        _clone(repository, repo.pin.base.tag, target)
        head = git(target, "rev-parse", "HEAD").decode().strip()
        if not head.startswith(repo.pin.base.commit):
            raise PatchsetError(
                f"tag {repo.pin.base.tag} of {repository} is commit {head}, not "
                f"{repo.pin.base.commit} as pinned: the tag was moved, or this is "
                "not vLLM's repository"
            )
        git(target, "checkout", "--quiet", "HEAD")
        report = apply_tree(target, repo)
        finished = report.exit_code == 0
    finally:
        if not finished:
            shutil.rmtree(target, ignore_errors=True)
    return verify(target, repo) if finished else report


def source_from_archive(target: Path, repo: Repo, archive: Path | None) -> Report:
    """Unpack the base's archive as the new folder `target`, and patch it.

    Args:
        target: must not exist; nothing stays there if anything is wrong.
        repo: the patch set.
        archive: the source archive; None to fetch it.

    Raises:
        PatchsetError: the archive is not the pinned one, or cannot be had.
    """
    report = make_tree(target, repo, base_archive(repo, archive))
    return report if report.exit_code else verify(target, repo)


def _clone(repository: str, tag: str, target: Path) -> None:
    command = ["git", "clone", "--quiet", "--no-checkout", "--depth", "1"]
    command += ["--branch", tag]
    command += ["--config", "advice.detachedHead=false", "--", repository, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PatchsetError(
            f"cannot clone {tag} of {repository}: {done.stderr.strip()}"
        )
