# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Two of vLLM's CUDA files, compiled for the architectures of the image.

`DEVICE` has NVFP4 kernels and their launchers, `HOST` is a .cu file of host code on
torch's stable ABI. They are the small ones among those that need no header of
cuBLAS, whose package is 0.6 GB.
"""

from __future__ import annotations

import platform
import re
import shutil
import struct
import sysconfig
from pathlib import Path

import pytest
from cuda_toolchains import (
    host_12_8,
    nvcc_13_0,
    nvrtc_12_8,
    torch_headers,
)

from imagebuild.pairing import ImagePin, load_image_pin
from patchset.repo import find_root

DEVICE = "nvfp4_ds_mla_cache_kernels.cu"
HOST = "cuda_view.cu"
ARCHITECTURES = [
    name.replace(".", "") for name in load_image_pin(find_root()).arch_list.split()
]
ELF_MACHINE_CUDA = 190
KERNELS = (
    b"concat_and_cache_nvfp4_ds_mla_kernel",
    b"cp_gather_and_upconvert_nvfp4_kv_cache_kernel",
)

pytestmark = [
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="these compilers run on x86-64"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here"),
]


@pytest.fixture(scope="module")
def csrc(source_stage: Path) -> Path:
    return source_stage / "csrc"


@pytest.fixture(scope="module")
def torch_2_11(image: ImagePin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of the torch that CUDA 12.8 is paired with."""
    folder = tmp_path_factory.mktemp("torch")
    return torch_headers(image.pairings["cu128"].torch, folder)


@pytest.fixture(scope="module")
def torch_2_13(image: ImagePin) -> Path:
    """Headers of the torch that CUDA 13.0 is paired with, which is installed here."""
    include = Path(sysconfig.get_path("purelib"), "torch", "include")
    version = (include / "torch" / "headeronly" / "version.h").read_text()
    major, minor, _ = image.pairings["cu130"].torch.split(".")
    assert f"TORCH_VERSION_MAJOR {major}" in version
    assert f"TORCH_VERSION_MINOR {minor}" in version
    return include


def architectures_in(made: Path) -> list[str]:
    """Return the architectures of the device code in a cubin or an object file."""
    data = made.read_bytes()
    found = []
    for match in re.finditer(rb"\x7fELF", data):
        start = match.start()
        (machine,) = struct.unpack_from("<H", data, start + 18)
        if machine == ELF_MACHINE_CUDA:
            (flags,) = struct.unpack_from("<I", data, start + 48)
            # CUDA 13 counts its ELF as ABI 8 and moved the field by a byte.
            shift = 8 if data[start + 8] >= 8 else 0
            found.append(str(flags >> shift & 0xFF))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_device_code_with_the_compiler_of_cuda_12_8(
    architecture: str, csrc: Path, torch_2_11: Path, tmp_path: Path
):
    cubin = nvrtc_12_8(csrc, DEVICE, torch_2_11, architecture, tmp_path)
    assert architectures_in(cubin) == [architecture.rstrip("a")]
    data = cubin.read_bytes()
    assert all(kernel in data for kernel in KERNELS)


def test_that_compiler_is_cuda_12_8s_and_sees_mistakes(
    csrc: Path, torch_2_11: Path, tmp_path: Path
):
    mine = tmp_path / "csrc"
    mine.mkdir()
    (mine / "v.cu").write_text(
        "static_assert(__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ == 8);\n"
        "__global__ void kernel(int* out) { *out = 1; }\n"
    )
    nvrtc_12_8(mine, "v.cu", torch_2_11, ARCHITECTURES[0], tmp_path)
    (mine / "wrong.cu").write_text("__global__ void kernel(int* out) { *out = x; }\n")
    with pytest.raises(AssertionError, match='identifier "x" is undefined'):
        nvrtc_12_8(mine, "wrong.cu", torch_2_11, ARCHITECTURES[0], tmp_path)


def test_host_code_against_the_headers_of_cuda_12_8(
    csrc: Path, torch_2_11: Path, tmp_path: Path
):
    assert "__global__" not in (csrc / HOST).read_text()
    made = host_12_8(csrc, HOST, torch_2_11, tmp_path)
    assert b"get_cuda_view_from_cpu_tensor" in made.read_bytes()


@pytest.mark.parametrize(
    ("name", "torch"),
    [(DEVICE, "torch_2_11"), (HOST, "torch_2_11"), (DEVICE, "torch_2_13")],
)
def test_whole_with_the_nvcc_of_cuda_13_0(
    name: str,
    torch: str,
    csrc: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
):
    include = request.getfixturevalue(torch)
    made = nvcc_13_0(csrc, name, include, ARCHITECTURES, tmp_path)
    if name == DEVICE:
        assert architectures_in(made) == [x.rstrip("a") for x in ARCHITECTURES]
        assert all(kernel in made.read_bytes() for kernel in KERNELS)
