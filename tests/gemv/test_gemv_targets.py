# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The GEMV compiles for every target: no spills, the instructions that it needs."""

from pathlib import Path

import pytest

from support.targets import TARGETS, compile_for, sass_without_spills

KINDS = ["nvfp4", "nvfp4-silu", "nvfp4-normed", "bf16", "bf16-normed"]
BUILT = [(target, kind) for target in TARGETS for kind in KINDS]
# Only SM90 reads the layout of quack's GEMM.
BUILT += [("sm_90a", "fragments"), ("sm_90a", "fragments-normed")]
SCRIPT = """
import pathlib, sys
from ptx.gemv import compile_files
from vllm.models.flint.ops.gemv.config import GemvConfig, GemvSpec
nvfp4, *kinds, folder = sys.argv[1:]
for kind in kinds:
    form = "bf16" if kind.startswith("bf16") else nvfp4
    layout = "fragments" if kind.startswith("fragments") else "row_major"
    eps = 1e-6 if kind.endswith("normed") else None
    silu = kind == "nvfp4-silu"
    spec = GemvSpec(2048, form, silu, layout=layout, norm_eps=eps)
    config = GemvConfig(1, 4, 1, 2, 2, 16 if form == "bf16" else 4, 1)
    cubin = compile_files(spec, config)["cubin"]
    pathlib.Path(folder, f"{kind}.cubin").write_bytes(cubin)
"""


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of cubins for each target."""
    found = {}
    for target in TARGETS:
        found[target] = tmp_path_factory.mktemp(target)
        kinds = [kind for built_for, kind in BUILT if built_for == target]
        compile_for(target, SCRIPT, found[target], nvfp4_form(target), *kinds)
    return found


def nvfp4_form(target: str) -> str:
    return "mul" if target == "sm_90a" else "cvt"


@pytest.mark.parametrize(("target", "kind"), BUILT)
def test_compiles_for_target(cubins: dict[str, Path], target: str, kind: str) -> None:
    sass = sass_without_spills(cubins[target] / f"{kind}.cubin")
    wait = sass.index("ACQBULK")
    loads = [i for i in range(len(sass)) if sass.startswith("LDG.E.NA.128", i)]
    assert loads
    assert max(loads) < wait
    # FP16 holds a scale exactly: the cheapest way to BF16 where none is negative.
    assert ("F2FP.F16.E4M3" in sass) == kind.startswith("fragments")
    assert "HMMA.16816.F32.BF16" in sass
    assert ("F2FP.BF16.E2M1" in sass) == (
        not kind.startswith("bf16") and nvfp4_form(target) == "cvt"
    )
