# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Decode attention compiles for every target: no spills, the instructions it needs."""

from pathlib import Path

import pytest

from support.targets import TARGETS, compile_for, sass_without_spills

KINDS = ["bf16-1", "bf16-8", "fp8-4"]
SCRIPT = """
import pathlib, sys
from ptx.compiled import compiled_files
from vllm.models.flint.ops.attention.compile import compile_decode
from vllm.models.flint.ops.attention.config import DecodeConfig, DecodeSpec
*kinds, folder = sys.argv[1:]
for kind in kinds:
    cache, cluster = kind.split("-")
    variant = DecodeSpec(cache == "fp8"), DecodeConfig(cluster=int(cluster))
    cubin = compiled_files(compile_decode, *variant)["cubin"]
    pathlib.Path(folder, f"{kind}.cubin").write_bytes(cubin)
"""


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_target(target: str, tmp_path: Path) -> None:
    compile_for(target, SCRIPT, tmp_path, *KINDS)
    for kind in KINDS:
        sass = sass_without_spills(tmp_path / f"{kind}.cubin")
        assert "LDG.E.NA.128" in sass
        assert "HMMA.16816.F32.BF16" in sass
        # The wait for the previous kernel comes before every read.
        assert sass.index("ACQBULK") < sass.index("LDG")
        assert ("UCGABAR_WAIT" in sass) == (kind != "bf16-1")
