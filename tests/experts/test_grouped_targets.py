# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The grouped GEMM compiles for every target: no spills, the expected instructions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.models.flint.ops.experts.grouped_config import picked_configs

from support import triton_build
from support.targets import sass_without_spills

# What a block may use of an SM's shared memory, in KiB.
SHARED = {90: 227, 100: 227, 103: 227, 120: 99, 80: 163}
BUILT = [
    (capability, f"{name}-{config.block_t}")
    for capability in SHARED
    for name in ("gate-up", "down", "ordered-gate-up", "ordered-down")
    if capability == 90 or not name.startswith("ordered")
    for config in picked_configs(divmod(capability, 10))
]

AROUND = [
    (capability, name)
    for capability in SHARED
    for name in (
        "permute",
        "combine",
        *(f"group-{c.block_t}" for c in picked_configs(divmod(capability, 10))),
    )
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A folder of cubins for each target."""
    found = {}
    for capability in SHARED:
        folder = found[capability] = tmp_path_factory.mktemp(f"sm{capability}")
        subprocess.run(
            [sys.executable, triton_build.__file__, str(capability), str(folder)],
            check=True,
            env=os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")},
        )
    return found


@pytest.mark.parametrize(("capability", "name"), BUILT)
def test_compiles_for_target(
    built: dict[int, Path], capability: int, name: str
) -> None:
    path = built[capability] / name
    sass = sass_without_spills(path.with_suffix(".cubin"))
    ptx = path.with_suffix(".ptx").read_text()
    assert int(path.with_suffix(".shared").read_text()) <= 1024 * SHARED[capability]
    # Loads of a stage to come go past the registers.
    assert "LDGSTS" in sass
    # Codes times scales, two in one instruction.
    assert "fma.rn.bf16x2" in ptx
    if capability != 90:
        return
    # Weights are the A operand, from registers: no shared memory between decoding
    # and the MMA, so what is stored there is the output on its way out.
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (.)", ptx)
    assert products
    assert set(products) == {"{"}
    stores = [m.start() for m in re.finditer(r"\bSTS\b", sass)]
    last = max(m.start() for m in re.finditer(r"\bHGMMA\b", sass))
    assert all(place > last for place in stores)


@pytest.mark.parametrize(("capability", "name"), AROUND)
def test_kernels_around_it(built: dict[int, Path], capability: int, name: str) -> None:
    path = built[capability] / name
    sass_without_spills(path.with_suffix(".cubin"))
    assert int(path.with_suffix(".shared").read_text()) <= 1024 * SHARED[capability]
    assert ("griddepcontrol" in path.with_suffix(".ptx").read_text()) == (
        capability >= 90
    )
