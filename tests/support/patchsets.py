# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Fixtures: a small stand-in for vLLM with a patch set, and the real one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from patchset.download import fetch
from patchset.repo import Repo, load_repo
from support.synthetic_vllm import ROOT, Synthetic, make_synthetic


@pytest.fixture(scope="session")
def pristine_synthetic(tmp_path_factory: pytest.TempPathFactory) -> Synthetic:
    """Made once; tests that change it take `synthetic`."""
    return make_synthetic(tmp_path_factory.mktemp("synthetic"))


@pytest.fixture
def synthetic(
    pristine_synthetic: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Synthetic:
    """A copy of the stand-in, and a download cache that holds its archive."""
    shutil.copytree(pristine_synthetic.home, tmp_path / "home", symlinks=True)
    copy = Synthetic(tmp_path / "home")
    monkeypatch.setenv("FLINT_PATCHSET_CACHE", str(copy.home / "cache"))
    return copy


@pytest.fixture(scope="session")
def real_repo() -> Repo:
    """This repository's own patch set."""
    return load_repo(ROOT)


@pytest.fixture(scope="session")
def real_archive(real_repo: Repo) -> Path:
    """vLLM's own source archive, from the cache or the package index."""
    return fetch(real_repo.pin.sdist)
