# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What every measurement carries: the GPU, the versions and the command."""

import importlib.metadata
import shlex
import sys
from pathlib import Path

_PACKAGES = (
    "vllm",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "flashinfer-python",
    "triton",
)


def machine() -> dict[str, str]:
    """Describes the GPU and the versions; makes a CUDA context in this process."""
    import torch

    found = {
        "gpu": torch.cuda.get_device_name(),
        # torch's own type of string does not travel between an engine's processes.
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def command() -> str:
    """This process's command line."""
    program = Path(sys.argv[0])
    # Of `python -m PACKAGE`.
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join(["python3", f"scripts/{name}", *sys.argv[1:]])


def provenance() -> dict[str, dict[str, str] | str]:
    """Describes the machine and this process's command line, for a JSON file."""
    return {"machine": machine(), "command": command()}
