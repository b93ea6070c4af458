# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tests that compile kernels stay out where no compiler is, and the run says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

COMPILING = {"test_gemv_emulated.py", "test_gemv_targets.py"}


def has_compiler() -> bool:
    """Whether CuTe DSL, which needs no GPU, is installed."""
    return importlib.util.find_spec("nvidia_cutlass_dsl") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.name in COMPILING and not has_compiler():
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not has_compiler():
        terminalreporter.write_line(
            f"NOT RUN: {', '.join(sorted(COMPILING))}, because nvidia-cutlass-dsl is "
            "not installed"
        )
