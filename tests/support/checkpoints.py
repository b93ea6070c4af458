# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Checkpoints of the test models, written once a test run.

FLINT_TEST_CHECKPOINTS may name a folder that keeps them from run to run.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.wide import WIDE
from tinymodel import SPECS, write_gguf, write_safetensors

Checkpoint = Callable[[str, str, str], Path]

_SPECS = SPECS | {WIDE.name: WIDE}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Writes a checkpoint: (spec, family, "safetensors" or "gguf") to its path."""
    kept = os.environ.get("FLINT_TEST_CHECKPOINTS")
    root = Path(kept) if kept else tmp_path_factory.mktemp("checkpoints")

    def get(spec: str, family: str, form: str) -> Path:
        path = root / f"{spec}-{family}"
        if form == "gguf":
            path = path.with_suffix(".gguf")
        if not path.exists():
            write = write_gguf if form == "gguf" else write_safetensors
            write(path, _SPECS[spec], 0, family)
        return path

    return get
