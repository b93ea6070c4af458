# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Preparing weights for quack's GEMM: padding, and scales without signs."""

import sys
from types import ModuleType

import pytest
import torch
from vllm.models.flint.ops import fragments

from contract.nvfp4 import dequantize, fragment_scales, fragment_weight


@pytest.fixture(autouse=True)
def quack(monkeypatch: pytest.MonkeyPatch) -> None:
    """quack's preparation, as the contract has it; the GPU tests hold quack to it."""

    def prepare(
        codes: torch.Tensor, scales: torch.Tensor, wformat: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert wformat == "nvfp4"
        pad = (0, 0, 0, -len(codes) % 128)
        codes, scales = (torch.nn.functional.pad(x, pad) for x in (codes, scales))
        return fragment_weight(codes), fragment_scales(scales)

    module = ModuleType("quack.gemm_w4")
    module.prepare_w4_weight = prepare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_w4", module)


def values_of(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float64 [N, K] of a weight in fragment order, entry by entry."""
    groups, blocks = codes.shape[:2]
    index = torch.arange(64 * groups * 32 * blocks)
    place = fragment_weight(index.view(64 * groups, 32 * blocks)).flatten()
    rows = torch.empty(index.shape, dtype=torch.uint8)
    rows[place] = codes.flatten()
    index = torch.arange(64 * groups * 4 * blocks)
    place = fragment_scales(index.view(64 * groups, 4 * blocks)).flatten()
    factors = torch.empty(index.shape, dtype=torch.uint8)
    factors[place] = scales.flatten()
    return dequantize(
        rows.view(64 * groups, -1), factors.view(64 * groups, -1).contiguous()
    )


@pytest.mark.parametrize(("n", "k"), [(128, 64), (200, 96), (130, 320)])
def test_every_product_stays(monkeypatch: pytest.MonkeyPatch, n: int, k: int) -> None:
    """Any finite scale, negative ones and both zeros included, and signs of zero."""
    monkeypatch.setattr(fragments, "_ROWS", 128)
    generator = torch.Generator().manual_seed(n)
    shape = (n, k // 2)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scales = torch.arange(n * k // 16).to(torch.uint8).view(n, k // 16)
    scales[(scales & 0x7F) == 0x7F] = 0x80
    before = codes.clone(), scales.clone()
    float8 = scales.view(torch.float8_e4m3fn)
    out_codes, out_scales = fragments.to_fragments(codes, float8)
    assert torch.equal(codes, before[0])
    assert torch.equal(scales, before[1])
    assert out_scales.max() < 0x7F
    values = values_of(out_codes, out_scales)
    assert values.shape == (-(-n // 128) * 128, -(-k // 64) * 64)
    expected = dequantize(codes, scales)
    assert torch.equal(values[:n, :k], expected)
    assert torch.equal(values[:n, :k].signbit(), expected.signbit())
    assert not values[n:].any()
    assert not values[:, k:].any()


def test_codes_under_a_zero_scale_are_zero() -> None:
    codes = torch.full((128, 32), 0xFF, dtype=torch.uint8)
    scales = torch.zeros((128, 4), dtype=torch.uint8)
    assert not (fragments.to_fragments(codes, scales)[0] & 0x77).any()
