# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The patch set, what pin.toml says of images, and one patched source tree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from imagebuild.pairing import ImagePin, load_image_pin
from patchset.repo import Repo, load_repo
from support.image_steps import ROOT, imagebuild


@pytest.fixture(scope="session")
def repo() -> Repo:
    return load_repo(ROOT)


@pytest.fixture(scope="session")
def image(repo: Repo) -> ImagePin:
    return load_image_pin(repo.root)


@pytest.fixture(scope="session")
def source_stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source stage, from the archive: /src/vllm of the image's build."""
    tree = tmp_path_factory.mktemp("source") / "vllm"
    done = imagebuild("source", "--from", "archive", tree)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree


@pytest.fixture
def own_tree(source_stage: Path, tmp_path: Path) -> Path:
    """A copy of the source stage that a test may change."""
    return Path(shutil.copytree(source_stage, tmp_path / "vllm", symlinks=True))
