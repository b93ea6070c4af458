# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The expert kernels compile for every target: no spills, the instructions needed."""

from pathlib import Path

import pytest

from support.targets import TARGETS, compile_for, sass_without_spills

KINDS = ["nvfp4", "bf16"]
SCRIPT = """
import pathlib, sys
from ptx.compiled import compiled_files
from vllm.models.flint.ops.experts.compile import compile_down, compile_gate_up
from vllm.models.flint.ops.experts.spec import (
    DOWN_CASES, TOKEN_CASES, DownSpec, GateUpSpec, down_config, gate_up_config)
from vllm.models.flint.ops.gemv.config import GemvSpec
nvfp4, folder = sys.argv[1:]
layout = "fragments" if nvfp4 == "mul" else "row_major"
forms = {"nvfp4": nvfp4, "bf16": "bf16"}
if nvfp4 == "mul":
    forms["packed"] = "packed"
for kind, form in forms.items():
    own, dense = ("row_major", form) if kind == "bf16" else (layout, nvfp4)
    for case in TOKEN_CASES:
        shared = GemvSpec(2048, dense, True, layout=own)
        spec = GateUpSpec(6, 512, GemvSpec(2048, form, True), shared, 1024, case)
        cubin = compiled_files(compile_gate_up, spec, gate_up_config(spec))["cubin"]
        pathlib.Path(folder, f"gate_up-{kind}-{case}.cubin").write_bytes(cubin)
    spec = DownSpec(6, 2048, GemvSpec(512, form), GemvSpec(1024, dense, layout=own))
    configs = dict.fromkeys(down_config(spec, case) for case in DOWN_CASES)
    for case, config in enumerate(configs):
        cubin = compiled_files(compile_down, spec, config)["cubin"]
        pathlib.Path(folder, f"down-{kind}-{case}.cubin").write_bytes(cubin)
"""


def nvfp4_form(target: str) -> str:
    return "mul" if target == "sm_90a" else "cvt"


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_target(target: str, tmp_path: Path) -> None:
    compile_for(target, SCRIPT, tmp_path, nvfp4_form(target))
    cubins = sorted(tmp_path.glob("*.cubin"))
    assert len(cubins) == (18 if nvfp4_form(target) == "mul" else 11)
    for cubin in cubins:
        sass = sass_without_spills(cubin)
        kernel, kind, *case = cubin.stem.split("-")
        assert "HMMA.16816.F32.BF16" in sass
        converts = kind == "nvfp4" and nvfp4_form(target) == "cvt"
        assert ("F2FP.BF16.E2M1" in sass) == converts
        assert ("SHF.R.W" in sass) == (kind == "packed")
        # Two kinds of CTAs or warps, each with its wait; what follows is released
        # after it.
        assert sass.count("ACQBULK") == 2
        assert sass.count("PREEXIT") == 2
        assert sass.index("ACQBULK") < sass.index("PREEXIT")
        first_wait = sass.index("ACQBULK")
        assert sass.index("LDG.E.NA.128") < first_wait
        if kernel == "gate_up":
            # One token has no pairs to search for.
            assert ("VOTE" in sass) == (case != ["1"])
