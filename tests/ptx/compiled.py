# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Compiles kernels without a GPU and keeps what the compiler makes."""

import os
import pathlib
import tempfile
from collections.abc import Callable

# CuTe DSL reads these once, when it is imported.
_DUMP = tempfile.TemporaryDirectory()
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
os.environ.update(
    CUTE_DSL_DUMP_DIR=_DUMP.name, CUTE_DSL_KEEP_PTX="1", CUTE_DSL_KEEP_CUBIN="1"
)


def compiled_files(compiler: Callable[..., object], *variant) -> dict[str, bytes]:
    """Compiles a variant for CUTE_DSL_ARCH; returns its `ptx` and `cubin`."""
    folder = pathlib.Path(_DUMP.name)
    for path in folder.iterdir():
        path.unlink()
    compiler(*variant)
    return {path.suffix[1:]: path.read_bytes() for path in folder.iterdir()}
