# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Compiles kernels for every target, and looks into what comes out."""

import os
import subprocess
import sys
from pathlib import Path

TARGETS = ["sm_90a", "sm_100a", "sm_103a", "sm_120a"]
_TESTS = Path(__file__).parents[1]


def compile_for(target: str, script: str, folder: Path, *arguments: str) -> None:
    """Runs a Python script that writes cubins to a folder, its last argument.

    In a fresh process, since CuTe DSL reads its target once.
    """
    path = os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", script, *arguments, str(folder)],
        check=True,
        env=os.environ | {"CUTE_DSL_ARCH": target, "PYTHONPATH": path},
    )


def sass_without_spills(cubin: Path) -> str:
    """Disassembles a cubin that must use no stack and no local memory."""
    usage = _output(_tool("cuobjdump"), "-res-usage", str(cubin))
    assert "STACK:0 " in usage
    assert "LOCAL:0 " in usage
    sass = _output(_tool("nvdisasm"), "-c", str(cubin))
    assert "LDL" not in sass
    assert "STL" not in sass
    return sass


def _tool(name: str) -> str:
    """One of NVIDIA's tools: Triton's copy, else a CUDA toolkit's."""
    pattern = f"lib/*/site-packages/triton/backends/nvidia/bin/{name}"
    return str(next(Path(sys.prefix).glob(pattern), name))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
