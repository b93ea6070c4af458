# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The GEMV picks a schedule for every shape, and is right against float64."""

import pytest
import torch

from vllm.model_executor.layers.quantization.utils.nvfp4_utils import (
    swizzle_blockscale,
)
from vllm.models.flint.ops import nvfp4_gemv as ops
from vllm.models.flint.ops.gemv import tables
from vllm.models.flint.ops.gemv.config import GemvSpec
from vllm.models.flint.ops.gemv.variants import missing_compiler
from vllm.platforms import current_platform

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)

needs_gpu = pytest.mark.skipif(
    not current_platform.is_cuda()
    or not current_platform.has_device_capability(90)
    or missing_compiler() is not None,
    reason="needs SM90 or later, and nvidia-cutlass-dsl",
)


@pytest.mark.parametrize("k", [32, 2048, 6144, 16384])
@pytest.mark.parametrize("n", [16, 2048, 12288])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_every_shape_has_a_schedule(n: int, k: int, silu_mul: bool):
    spec = GemvSpec(k, "mul", silu_mul=silu_mul)
    tiles = tables.token_tiles(spec, None)
    assert tiles[:3] == (1, 2, 4)
    for nt in tiles:
        assert tables.default_config(spec, n, nt, 132).why_not(spec) is None


def test_wrong_arguments_are_refused():
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    weight = torch.zeros(16, 32, dtype=torch.uint8)
    scale = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(ValueError, match="global_scale must be one FP32 value"):
        ops.nvfp4_gemv(x, weight, scale, torch.ones(2))
    with pytest.raises(ValueError, match="weight must be contiguous BF16"):
        ops.bf16_gemv(x, weight)


@needs_gpu
@pytest.mark.parametrize("m", [1, 8, 17, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(512, 256), (2048, 2048), (5120, 2048)])
def test_nvfp4_against_float64(m: int, n: int, k: int):
    generator = torch.Generator().manual_seed(n + k + m)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, k // 16, generator=generator).to(torch.float8_e4m3fn)
    # Small whole numbers, so that FP32 sums are nearly exact in any order.
    x = torch.randint(-2, 3, (m, k), generator=generator).bfloat16()
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(n, k).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0).double()
    values *= scales.double().repeat_interleave(16, dim=1)
    expected = x.double() @ values.T * 0.5
    swizzled = swizzle_blockscale(scales.cuda()).view(torch.uint8)
    out = ops.nvfp4_gemv(
        x.cuda(), codes.cuda(), swizzled, torch.full((1,), 0.5, device="cuda")
    )
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2**-8, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("m", [1, 8, 32])
def test_bf16_against_float64(m: int):
    generator = torch.Generator().manual_seed(m)
    x = torch.randint(-2, 3, (m, 2048), generator=generator).bfloat16()
    weight = torch.randn(512, 2048, generator=generator).bfloat16()
    expected = x.double() @ weight.double().T
    out = ops.bf16_gemv(x.cuda(), weight.cuda())
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2**-8, atol=1e-3)
