# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The source stage, complete, from the archive and from a clone."""

from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.source import source_from_git
from patchset.errors import PatchsetError
from patchset.repo import Repo
from patchset.tree import base_archive, unpack
from patchset.verify import verify
from support.image_steps import imagebuild
from support.synthetic_vllm import git


@pytest.fixture(scope="module")
def upstream(repo: Repo, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Repo]:
    """The base in a git repository, and the patch set with that commit pinned."""
    folder = tmp_path_factory.mktemp("upstream") / "vllm"
    unpack(base_archive(repo, None), folder)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "The base")
    git(folder, "tag", repo.pin.base.tag)
    base = replace(repo.pin.base, commit=git(folder, "rev-parse", "HEAD")[:9])
    return folder, replace(repo, pin=replace(repo.pin, base=base))


def test_from_the_archive_it_is_what_is_pinned(source_stage: Path, repo: Repo):
    report = verify(source_stage, repo)
    assert report.exit_code == 0, report.text()
    assert report.trees["source"].actual == repo.pin.identity.source


def test_from_a_clone_it_is_the_same(upstream: tuple[Path, Repo], tmp_path: Path):
    folder, pinned = upstream
    report = source_from_git(tmp_path / "vllm", pinned, f"file://{folder}")
    assert report.exit_code == 0, report.text()
    assert report.trees["source"].actual == pinned.pin.identity.source


def test_a_moved_tag_is_refused(
    upstream: tuple[Path, Repo], repo: Repo, tmp_path: Path
):
    with pytest.raises(PatchsetError, match=f"not {repo.pin.base.commit} as pinned"):
        source_from_git(tmp_path / "vllm", repo, f"file://{upstream[0]}")
    assert list(tmp_path.iterdir()) == []


def test_a_clone_that_fails_says_why(repo: Repo, tmp_path: Path):
    with pytest.raises(PatchsetError, match=f"cannot clone {repo.pin.base.tag} of "):
        source_from_git(tmp_path / "vllm", repo, f"file://{tmp_path}/nowhere")
    assert list(tmp_path.iterdir()) == []


def test_another_archive_is_refused(repo: Repo, tmp_path: Path):
    other = tmp_path / repo.pin.sdist.filename
    other.write_bytes(b"something else")
    target = tmp_path / "tree"
    done = imagebuild("source", "--from", "archive", "--archive", other, target)
    assert done.returncode == 2
    assert f"is not the pinned {repo.pin.sdist.filename}" in done.stderr
    assert not target.exists()
