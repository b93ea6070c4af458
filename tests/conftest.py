# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tests stay out where there is no GPU or compiler for them, and the run says so."""

from __future__ import annotations

import functools
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["support.checkpoints", "support.patchsets"]

# A shell starts what it puts in the background with SIGINT ignored, and every process
# below would inherit that; tests of Ctrl-C need it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
GPU_TESTS = TESTS / "gpu"
# Tests that compile kernels, which needs no GPU.
COMPILING = ("test_*_emulated.py", "test_*_targets.py")


@functools.cache
def has_cuda() -> bool:
    """Whether torch can use a CUDA device here."""
    import torch

    return torch.cuda.is_available()


def has_compiler() -> bool:
    """Whether CuTe DSL is installed."""
    return importlib.util.find_spec("nvidia_cutlass_dsl") is not None


@pytest.fixture(autouse=True)
def forget_kept_variants() -> Iterator[None]:
    """What one test gives for a compiled kernel is not launched by another."""
    yield
    variants = sys.modules.get("vllm.models.flint.ops.gemv.variants")
    if variants is not None:
        variants.forget_kept()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if GPU_TESTS in (collection_path, *collection_path.parents) and not has_cuda():
        return True
    if any(map(collection_path.match, COMPILING)) and not has_compiler():
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files = sorted(GPU_TESTS.rglob("test_*.py"))
    if files and not has_cuda():
        terminalreporter.write_line(
            f"NOT RUN: {len(files)} files of GPU tests in tests/gpu, because torch "
            "finds no CUDA device on this machine"
        )
    names = sorted(path.name for glob in COMPILING for path in TESTS.rglob(glob))
    if names and not has_compiler():
        terminalreporter.write_line(
            f"NOT RUN: {', '.join(names)}, because nvidia-cutlass-dsl is not installed"
        )
