# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Fixtures: the made-up base and its patched wheel."""

from pathlib import Path

import pytest
from lab import Lab, make_lab

from patchset.wheel import repack


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    return make_lab(tmp_path / "repo")


@pytest.fixture
def patched(lab: Lab) -> Path:
    return repack(lab.wheel, lab.root / "out", lab.repo).path
