# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What the image compiles with while it serves: each package is needed by something.

Evidence is a line of the program that would fail without the package, in the version
that the image's lock has.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from support.image_steps import DOCKER, ROOT

TRITON = "triton/runtime/build.py"
JIT = "flashinfer/jit/cpp_ext.py"
DATA = "flashinfer/data"
# Package -> where, and the line.
EVIDENCE = {
    "gcc": (TRITON, 'gcc = shutil.which("gcc")'),
    "python3-dev": (TRITON, 'sysconfig.get_paths(scheme=scheme)["include"]'),
    "g++": (JIT, 'cxx = os.environ.get("CXX", "c++")'),
    "cuda-nvcc": (JIT, "$cuda_home/bin/nvcc"),
    "cuda-cudart-dev": (JIT, '"-lcudart"'),
    "cuda-nvrtc-dev": (
        f"{DATA}/csrc/nv_internal/tensorrt_llm/deep_gemm/jit_utils.cuh",
        "#include <nvrtc.h>",
    ),
    "libcurand-dev": (
        f"{DATA}/include/flashinfer/sampling.cuh",
        "#include <curand_kernel.h>",
    ),
    "libcublas-dev": (
        f"{DATA}/include/flashinfer/trtllm/common/cudaUtils.h",
        "#include <cublas_v2.h>",
    ),
}
# libnuma1: fastsafetensors, which is among the requirements, opens it.
NO_COMPILER = {"ca-certificates", "libnuma1", "python3", "python3-venv"}


def installed() -> set[str]:
    """Debian packages of the runtime stage, without their CUDA version."""
    text = (DOCKER / "Dockerfile").read_text()
    stage = text[text.index(" AS runtime") :]
    match = re.search(r"apt-get install(.*?)&&", stage.replace("\\\n", " "), re.S)
    assert match
    words = [word.strip('"') for word in match[1].split()]
    names = [word for word in words if not word.startswith("--")]
    return {name.removesuffix("-${cuda}") for name in names}


def test_every_package_has_its_reason():
    assert installed() == set(EVIDENCE) | NO_COMPILER


def test_the_readme_gives_the_reasons():
    text = (DOCKER / "README.md").read_text()
    for package, (file, _) in EVIDENCE.items():
        assert f"`{package}`" in text, package
        assert Path(file).name in text, file


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """FlashInfer's wheel, of the version that the image has."""
    lock = (ROOT / "requirements" / "image-cu128.txt").read_text()
    (pin,) = re.findall(r"^flashinfer-python==.*$", lock, re.M)
    folder = tmp_path_factory.mktemp("flashinfer")
    command = [sys.executable, "-I", "-m", "pip", "download", "-q", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), pin], check=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.mark.parametrize("package", sorted(EVIDENCE))
def test_the_reason_holds(package: str, flashinfer: zipfile.ZipFile):
    file, line = EVIDENCE[package]
    if file == TRITON:
        text = Path(sysconfig.get_path("purelib"), file).read_text()
    else:
        text = flashinfer.read(file).decode()
    assert line in text


def test_triton_compiles_with_gcc_and_not_without(tmp_path: Path):
    """Its launchers are C for Python, made when a kernel is first launched."""
    code = (
        "import sys; from triton.runtime.build import _build\n"
        "open('stub.c', 'w').write('#include <Python.h>\\n')\n"
        "print(_build('stub', 'stub.c', '.', [], [], [], []))"
    )

    def build(path: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={"PATH": path, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert "Failed to find C compiler" in build(str(tmp_path)).stderr
    done = build("/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
