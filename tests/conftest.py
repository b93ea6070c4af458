# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tests that need a GPU stay out where there is none, and the run says so."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

pytest_plugins = ["support.checkpoints"]

# A shell starts what it puts in the background with SIGINT ignored, and every process
# below would inherit that; tests of Ctrl-C need it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GPU_TESTS = Path(__file__).parent / "gpu"


@functools.cache
def has_cuda() -> bool:
    """Whether torch can use a CUDA device here."""
    import torch

    return torch.cuda.is_available()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if GPU_TESTS in (collection_path, *collection_path.parents) and not has_cuda():
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files = sorted(GPU_TESTS.rglob("test_*.py"))
    if files and not has_cuda():
        terminalreporter.write_line(
            f"NOT RUN: {len(files)} files of GPU tests in tests/gpu, because torch "
            "finds no CUDA device on this machine"
        )
