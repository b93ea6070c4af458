# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Checkpoints of the tiny models, written once a test run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tinymodel import SPECS, write_gguf, write_safetensors

Checkpoint = Callable[[str, str, str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Writes a checkpoint: (spec, family, "safetensors" or "gguf") to its path."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(spec: str, family: str, form: str) -> Path:
        path = root / f"{spec}-{family}"
        if form == "gguf":
            path = path.with_suffix(".gguf")
        if not path.exists():
            write = write_gguf if form == "gguf" else write_safetensors
            write(path, SPECS[spec], 0, family)
        return path

    return get
