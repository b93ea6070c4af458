# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The build stage: a wheel made from source, whose Python part must be as pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from imagebuild.pairing import ImagePin, Pairing
from patchset.errors import ConflictError, PatchsetError
from patchset.identity import package_tree
from patchset.overlay import MARKER_PATH
from patchset.repo import Repo
from patchset.wheel_file import WheelFile


@dataclass(frozen=True)
class CompileOptions:
    """How vLLM is compiled.

    Attributes:
        arch_list: the GPU architectures, as TORCH_CUDA_ARCH_LIST has them.
        jobs: how many compilers run at once, at about 4 GB each.
        nvcc_threads: how many architectures each compiles at once.
    """

    arch_list: str
    jobs: int
    nvcc_threads: int = 1


def compile_wheel(
    tree: Path, out: Path, repo: Repo, options: CompileOptions, python: str
) -> Path:
    """Compile the patched tree into a wheel and check it.

    Args:
        tree: the patched source tree; the build leaves its files in it.
        out: folder for the wheel.
        repo: the patch set.
        options: how to compile.
        python: an interpreter that has the base's build requirements.

    Raises:
        PatchsetError: the build failed, or the wheel is not the patched vLLM.
    """
    settings = {
        "VLLM_TARGET_DEVICE": "cuda",
        "TORCH_CUDA_ARCH_LIST": options.arch_list,
        "MAX_JOBS": str(options.jobs),
        "NVCC_THREADS": str(options.nvcc_threads),
        "CMAKE_BUILD_TYPE": "Release",
    }
    steps = [["bdist_wheel", "--py-limited-api=cp38"]]
    return _run_setup(tree, out, repo, settings, steps, python)


def python_wheel(tree: Path, out: Path, repo: Repo, python: str) -> Path:
    """Make a wheel of the Python part alone, which needs no compiler.

    Same arguments and errors as compile_wheel.
    """
    # Skipping "build" leaves out vLLM's optional Rust programs.
    steps = [["build_py"], ["bdist_wheel", "--skip-build"]]
    return _run_setup(tree, out, repo, {"VLLM_TARGET_DEVICE": "empty"}, steps, python)


def repacked_kind(image: ImagePin, pairing: Pairing, machine: str) -> str:
    """The name in pin.toml of the official wheel to repack for a CUDA version.

    Raises:
        PatchsetError: there is no official wheel for it.
    """
    if not pairing.wheel:
        others = [p.cuda for p in image.pairings.values() if p.wheel]
        raise PatchsetError(
            f"vLLM publishes no wheel for CUDA {pairing.cuda} that could be repacked; "
            f"compile instead, or take CUDA {' or '.join(others)}"
        )
    return f"{pairing.wheel}-{machine}"


def check_wheel(path: Path, repo: Repo) -> str:
    """Compare the Python part of a wheel built from source with the pin.

    Returns:
        The git tree id of its ``vllm/``, generated files left out.

    Raises:
        ConflictError: it is not the pinned one.
    """
    with WheelFile(path) as wheel:
        tree = package_tree(wheel.package_entries(repo.pin), repo.pin)
        version, marked = wheel.name.version, MARKER_PATH in wheel.members
    wrong = []
    if tree != repo.pin.identity.package:
        wrong.append(f"its tree id is {tree}, not {repo.pin.identity.package}")
    if version != repo.pin.release:
        wrong.append(f"its version is {version}, not {repo.pin.release}")
    if not marked:
        wrong.append(f"it lacks {MARKER_PATH}")
    if wrong:
        raise ConflictError(f"{path.name} is not as pinned: {'; '.join(wrong)}")
    return tree


def _run_setup(
    tree: Path,
    out: Path,
    repo: Repo,
    settings: dict[str, str],
    steps: list[list[str]],
    python: str,
) -> Path:
    environment = {
        **os.environ,
        **settings,
        "VLLM_VERSION_OVERRIDE": repo.pin.release,
        "VLLM_RS_BUILD_VERSION": repo.pin.release,
    }
    out.mkdir(parents=True, exist_ok=True)
    old = set(out.glob("*.whl"))
    if old:
        raise PatchsetError(f"{out} holds a wheel already; name an empty folder")
    steps[-1] += ["--dist-dir", str(out.resolve())]
    for step in steps:
        command = [python, "setup.py", *step]
        # Long, and its output is the only sign of progress: it goes to stderr.
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=sys.stderr, check=False
        )
        if done.returncode:
            raise PatchsetError(
                f"setup.py {step[0]} failed in {tree} with code {done.returncode}; see "
                "its output above. A compiler that was killed wants fewer jobs"
            )
    (wheel,) = out.glob("*.whl")
    check_wheel(wheel, repo)
    return wheel
