# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What can be had of CUDA's compilers from the package index.

CUDA 13.0's nvcc is there whole. Of CUDA 12.8 there is no nvcc: its package has ptxas,
libnvvm and headers. Its compiler is there as a library, NVRTC, which takes no code
for the host and has no C++ standard library; `STANDARD_HEADERS` stands in for the
few headers that a file asks for, by CUDA's own libcu++.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from support.side_env import side_environment, site_packages

# As vLLM's CMakeLists.txt has them for _C_stable_libtorch.
DEFINES = ("-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL")

_ALIAS = """\
#pragma once
#include <cuda/std/{0}>
namespace std {{ using namespace cuda::std; }}
"""
STANDARD_HEADERS = {
    **{n: _ALIAS.format(n) for n in ("cassert", "cstdint", "type_traits", "utility")},
    # libstdc++'s brings numeric_limits along, which torch's headers specialize.
    "cmath": _ALIAS.format("cmath") + "#include <limits>\n",
    "limits": "#pragma once\n#include <cuda/std/limits>\nnamespace std { template "
    "<class T> class numeric_limits : public cuda::std::numeric_limits<T> {}; }\n",
    "cstring": "#pragma once\n",
    # Declared only: device code that printed would not link.
    "ostream": "#pragma once\nnamespace std { struct ostream { template <class T> "
    "ostream& operator<<(const T&); }; }\n",
    "iosfwd": "#pragma once\n#include <ostream>\n",
}

_COMPILE = """
import json, sys
from cuda.bindings import nvrtc
path, name, options, out = json.load(sys.stdin)
code = open(path, "rb").read()
error, program = nvrtc.nvrtcCreateProgram(code, name.encode(), 0, [], [])
assert error == 0, error
options = [option.encode() for option in options]
(error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
_, size = nvrtc.nvrtcGetProgramLogSize(program)
log = b" " * size
nvrtc.nvrtcGetProgramLog(program, log)
if error != 0:
    sys.exit(log.rstrip(b"\\0").decode())
_, size = nvrtc.nvrtcGetCUBINSize(program)
cubin = b" " * size
nvrtc.nvrtcGetCUBIN(program, cubin)
open(out, "wb").write(cubin)
"""


def nvidia(name: str, *parts: str) -> Path:
    """Return a folder of an environment's NVIDIA packages."""
    return site_packages(side_environment(name)).joinpath("nvidia", *parts)


def includes_12_8() -> list[Path]:
    """Return the include folders of CUDA 12.8."""
    packages = ("cuda_runtime", "cuda_cccl", "cuda_nvcc")
    return [nvidia("cuda128", package, "include") for package in packages]


def nvrtc_12_8(
    csrc: Path, name: str, torch_include: Path, architecture: str, work: Path
) -> Path:
    """Compile the device code of a file with CUDA 12.8's own compiler.

    Args:
        csrc: vLLM's csrc folder.
        name: the file, relative to it.
        torch_include: torch's include folder.
        architecture: for example "90a".
        work: folder for the result.

    Returns:
        The cubin.
    """
    standard = work / "std"
    standard.mkdir(exist_ok=True)
    for header, text in STANDARD_HEADERS.items():
        (standard / header).write_text(text)
    folders = [standard, csrc, torch_include, *includes_12_8()]
    options = [f"--gpu-architecture=sm_{architecture}", "-std=c++20", *DEFINES]
    # Functions for the host become functions for the device: those that launch a
    # kernel then launch it from there, which takes relocatable code.
    options += ["-default-device", "-rdc=true", "-D__builtin_clz=__clz"]
    options += [f"-I{folder}" for folder in folders]
    cubin = work / f"{Path(name).stem}-{architecture}.cubin"
    done = subprocess.run(
        [str(side_environment("cuda128") / "bin" / "python"), "-c", _COMPILE],
        input=json.dumps([str(csrc / name), name, options, str(cubin)]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return cubin


def host_12_8(csrc: Path, name: str, torch_include: Path, work: Path) -> Path:
    """Compile a file without device code, against CUDA 12.8's headers.

    Arguments as for nvrtc_12_8; returns the object file.
    """
    made = work / f"{Path(name).stem}-host.o"
    command = ["g++", "-x", "c++", "-std=c++20", "-O2", *DEFINES, "-c"]
    command += [f"-I{folder}" for folder in (csrc, torch_include, *includes_12_8())]
    _run([*command, str(csrc / name), "-o", str(made)])
    return made


def nvcc_13_0(
    csrc: Path, name: str, torch_include: Path, architectures: list[str], work: Path
) -> Path:
    """Compile a file whole, with CUDA 13.0's nvcc.

    Arguments as for nvrtc_12_8; returns the object file, for all architectures.
    """
    home = nvidia("cuda130", "cu13")
    made = work / f"{Path(name).stem}-nvcc.o"
    command = [str(home / "bin" / "nvcc"), "-std=c++20", "-O2", *DEFINES, "-c"]
    command += ["--expt-relaxed-constexpr", f"--threads={os.cpu_count()}"]
    for architecture in architectures:
        command += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    command += [f"-I{csrc}", f"-I{torch_include}"]
    _run([*command, str(csrc / name), "-o", str(made)])
    return made


def torch_headers(version: str, folder: Path) -> Path:
    """Fetch torch's headers; returns the include folder.

    They are taken from the build for macOS, a sixth of the size of the one for
    Linux: the index has no CPU build for Linux, and headers of the stable ABI do not
    differ between builds.
    """
    command = [sys.executable, "-I", "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--only-binary", ":all:", "--platform", "macosx_11_0_arm64"]
    command += ["--python-version", "3.12", "--dest", str(folder)]
    _run([*command, f"torch=={version}"])
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder, [n for n in names if n.startswith("torch/include/")])
    wheel.unlink()
    return folder / "torch" / "include"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
