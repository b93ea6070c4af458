# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Weights for measurements: random, rotated past the L2 cache."""

from dataclasses import dataclass

import torch

# The copies of a weight exceed the L2 cache of any GPU this runs on, twice over.
ROTATED_BYTES = 160 << 20
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def copies_of(n_bytes: int) -> int:
    """Copies of a weight of `n_bytes` that rotation needs."""
    return max(2, -(-ROTATED_BYTES // n_bytes))


def weight_bytes(n: int, k: int, bf16: bool) -> int:
    """Bytes that one pass over a weight reads."""
    return n * k * 2 if bf16 else n * k * 9 // 16


@dataclass(frozen=True)
class Weight:
    """An NVFP4 weight on the GPU.

    Attributes:
        codes: uint8 [N, K / 2], ModelOpt layout.
        scales: uint8 [N, K / 16], E4M3 bytes.
        global_scale: FP32 [1].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    @classmethod
    def random(cls, n: int, k: int, device: str = "cuda") -> "Weight":
        """Random codes, and scales of the size that trained weights have."""
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        shape = (n, k // 16)
        scales = torch.randint(0x28, 0x58, shape, dtype=torch.uint8, device=device)
        return cls(codes, scales, torch.full((1,), 0.01, device=device))

    def swizzled(self) -> torch.Tensor:
        """The scales in the 128x4 swizzle, flat."""
        n, width = self.scales.shape
        rows, columns = -(-n // 128) * 128, -(-width // 4) * 4
        padded = self.scales.new_zeros(rows, columns)
        padded[:n, :width] = self.scales
        tiles = padded.view(rows // 128, 4, 32, columns // 4, 4)
        return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1)

    def dequantized(self) -> torch.Tensor:
        """BF16 [N, K], exact, without the global scale."""
        table = torch.tensor(_E2M1, dtype=torch.bfloat16, device=self.codes.device)
        pairs = torch.stack([self.codes & 15, self.codes >> 4], dim=-1)
        values = self.scales.view(torch.float8_e4m3fn).bfloat16()
        return table[pairs.flatten(1).int()] * values.repeat_interleave(16, dim=1)
