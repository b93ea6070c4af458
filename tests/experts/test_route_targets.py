# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Routing compiles for every target: no spills, weights before the wait."""

from pathlib import Path

import pytest

from support.targets import TARGETS, compile_for, sass_without_spills

# A CPU build of vLLM imports no Triton; this process gives it one.
SCRIPT = """
import pathlib, sys
import triton
import triton.language
import vllm.triton_utils
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.models.flint.ops.experts import route

*targets, folder = sys.argv[1:]
TYPES = {"ids_out": "*i32", "counters": "*i32", "weights_out": "*fp32", "eps": "fp32"}
SIZES = ("width", "num_experts", "tokens", "stride", "x_stride", "residual_stride")


def compile_to(target, name, kernel, warps, **constants):
    signature = {
        arg: "constexpr" if arg in constants
        else "i32" if arg in SIZES
        else TYPES.get(arg, "*bf16")
        for arg in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(kernel.arg_names)
        if signature[arg] not in ("constexpr", "fp32") and arg != "tokens"
    }
    built = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", int(target[3:-1]), 32),
        options={"num_warps": warps, "launch_pdl": True},
    )
    pathlib.Path(folder, f"{name}-{target}.cubin").write_bytes(built.asm["cubin"])


chosen = dict(TOP_K=6, SLOTS=8, EXPERTS=256, PDL=True)
for target in targets:
    size = route._SLICE
    sizes = dict(SLICE=size, WRITTEN=2048 * size // 256, BLOCK=2048, ADD=True)
    kernel = target, f"route{size}", route._route_kernel, 4
    compile_to(*kernel, **sizes, **chosen)
    for tokens in (1, route._TOKENS_OF_MANY):
        kernel = target, f"topk{tokens}", route._topk_kernel, tokens
        compile_to(*kernel, TOKENS=tokens, **chosen)
"""


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of cubins; Triton compiles for all targets in one process."""
    folder = tmp_path_factory.mktemp("cubins")
    compile_for(TARGETS[0], SCRIPT, folder, *TARGETS)
    return folder


def places(sass: str, text: str) -> list[int]:
    return [i for i in range(len(sass)) if sass.startswith(text, i)]


@pytest.mark.parametrize("target", TARGETS)
def test_route(cubins: Path, target: str) -> None:
    (cubin,) = cubins.glob(f"route*-{target}.cubin")
    sass = sass_without_spills(cubin)
    wait = sass.index("ACQBULK")
    experts = int(cubin.stem.split("-")[0].removeprefix("route"))
    # Of each expert 4 KiB, by 128 threads, and the norm's weight.
    assert len([i for i in places(sass, "LDG.E.128") if i < wait]) == 2 * experts + 2
    assert sass.index("PREEXIT") > wait
    assert len(places(sass, "ATOMG.E.ADD")) == 1
    assert len(places(sass, "REDUX.MAX.S32")) == 6


@pytest.mark.parametrize("target", TARGETS)
def test_topk(cubins: Path, target: str) -> None:
    found = sorted(cubins.glob(f"topk*-{target}.cubin"))
    assert len(found) == 2
    for cubin in found:
        sass = sass_without_spills(cubin)
        assert sass.index("ACQBULK") < sass.index("PREEXIT") < sass.index("LDG.E")
        assert len(places(sass, "REDUX.MAX.S32")) == 6
