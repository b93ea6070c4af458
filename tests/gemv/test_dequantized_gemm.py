# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The parts of a dequantized GEMM, with stand-ins for what needs a GPU."""

import pytest
import torch
from vllm.models.flint.ops import dense

N, K = 384, 32


@pytest.mark.parametrize("fp32_out", [False, True])
@pytest.mark.parametrize("m", [0, 1, 7, 8, 19])
def test_parts_join_and_round_once(
    monkeypatch: pytest.MonkeyPatch, fp32_out: bool, m: int
) -> None:
    """Three parts of a weight, and of more than eight tokens."""
    weight = torch.randint(-3, 4, (N, K)).bfloat16()
    rows_of = torch.arange(N).view(N, 1).expand(N, K // 2)
    seen: list[int] = []

    def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # Each 128 rows have their own 256 bytes of swizzled scales.
        assert (scales == codes[0, 0] // 128).all()
        seen.append(len(codes))
        return weight[codes[:, 0]]

    def mm(
        a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert out_dtype == torch.float32
        assert len(a) <= 8
        return a.float() @ b.float()

    monkeypatch.setattr(dense, "dequantize_rows", dequantize_rows)
    monkeypatch.setattr(dense.torch, "mm", mm)
    monkeypatch.setattr(dense, "_TEMPORARY_BYTES", 2 * K * 128)
    monkeypatch.setattr(dense, "_SUM_BYTES", 4 * 128 * 8)
    blocks = torch.arange(N // 128, dtype=torch.uint8).repeat_interleave(256)
    # Sums are exact, in any order.
    x = torch.randint(-3, 4, (m, K)).bfloat16()
    scale = torch.tensor([0.0123])
    out = dense._dequantized_gemm(x, rows_of, blocks, scale, fp32_out)
    wanted = x.float() @ weight.float().T * scale
    assert out.dtype == (torch.float32 if fp32_out else torch.bfloat16)
    assert torch.equal(out, wanted.to(out.dtype))
    assert seen == [128] * 3
