# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Fixtures: rebases of the stand-in's series."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset.rebase.command import rebase
from patchset.rebase.results import RebaseReport
from support.rebases import Run
from support.synthetic_vllm import Synthetic


@pytest.fixture
def run(synthetic: Synthetic) -> Run:
    """Rebases the stand-in's series onto a folder or a ref."""

    def call(onto: Path | str, **options: object) -> RebaseReport:
        return rebase(synthetic.repo, str(onto), **options).report  # type: ignore[arg-type]

    return call
