# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which files of vLLM need a compiler: a change of one forbids a repack."""

from __future__ import annotations

from patchset.gittree import Globs

NATIVE = Globs(
    (
        "csrc/**",
        "cmake/**",
        "rust/**",
        "**/CMakeLists.txt",
        "**/*.cu",
        "**/*.cuh",
        "**/*.c",
        "**/*.cc",
        "**/*.cpp",
        "**/*.h",
        "**/*.hpp",
        "**/*.rs",
        "**/*.so",
        "setup.py",
    )
)
