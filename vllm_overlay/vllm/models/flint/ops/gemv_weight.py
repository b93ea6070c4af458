# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A linear layer's weight as the GEMV reads it, checked once for any launches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .gemv.config import FRAGMENT_BLOCK, SCALE_ROWS
from .gemv.tables import Shape

# Columns of a weight in one element of each type that it may have: ModelOpt's codes,
# packed ones (``gemv/packing.py``), BF16.
COLUMNS = {torch.uint8: 2, torch.int32: 8, torch.bfloat16: 1}


@dataclass(frozen=True)
class GemvWeight:
    """A weight of one of the layouts that the GEMV reads.

    Attributes:
        shape: its size, type and layout.
        words: int32 [N, K / 8]; [N, K / 2] for BF16, [N / 64, 8 * K] for fragments.
        scales: the block scales as int32 words; None for BF16.
        global_scale: FP32 [1]; None for BF16.

    """

    shape: Shape
    words: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None

    @classmethod
    def row_major(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        global_scale: torch.Tensor,
    ) -> "GemvWeight":
        """ModelOpt's layout; arguments and errors are those of ``nvfp4_gemv``."""
        n, k = weight.shape[0], 2 * weight.shape[1]
        check_row_major(weight, weight_scale, 32)
        return cls(
            Shape(n, k),
            weight.view(torch.int32),
            weight_scale.view(-1).view(torch.int32),
            _one_scale(global_scale),
        )

    @classmethod
    def fragments(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        global_scale: torch.Tensor,
    ) -> "GemvWeight":
        """Fragment order; arguments and errors are those of ``fragment_gemv``."""
        groups, blocks = weight.shape[:2]
        n, k = FRAGMENT_BLOCK * groups, FRAGMENT_BLOCK * blocks
        for name, tensor, shape in (
            ("weight", weight, (groups, blocks, 128, 16)),
            ("weight_scale", weight_scale, (groups, blocks, 32, 4, 2)),
        ):
            if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be uint8 {list(shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
        if n == 0 or n % SCALE_ROWS or k == 0:
            raise ValueError(
                f"N must be a positive multiple of 128, K of 64: {n} x {k}"
            )
        return cls(
            Shape(n, k, layout="fragments"),
            weight.view(groups, -1).view(torch.int32),
            weight_scale.view(-1).view(torch.int32),
            _one_scale(global_scale),
        )

    @classmethod
    def bf16(cls, weight: torch.Tensor) -> "GemvWeight":
        """Row-major BF16; argument and errors are those of ``bf16_gemv``."""
        n, k = weight.shape
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
            raise ValueError("weight must be contiguous BF16 [N, K]")
        if k == 0 or k % 8:
            raise ValueError(f"K must be a positive multiple of 8, got {k}")
        return cls(Shape(n, k, bf16=True), weight.view(torch.int32), None, None)

    @property
    def operands(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What a compiled variant takes."""
        return self.words, self.scales, self.global_scale


class KeptWeight:
    """The weight that a layer's tensors make, checked again only where they moved.

    Reloading a model gives a layer other tensors, or its tensors other memory. What is
    kept holds the old memory until then, so no other tensor can have its address.
    """

    def __init__(self, make: Callable[..., GemvWeight]) -> None:
        self._make = make
        self._addresses: list[int] = []
        self._weight: GemvWeight | None = None

    def of(self, *tensors: torch.Tensor) -> GemvWeight:
        """The weight of these tensors; arguments and errors are those of ``make``."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._weight is None or addresses != self._addresses:
            self._weight = self._make(*tensors)
            self._addresses = addresses
        return self._weight


def check_row_major(
    weight: torch.Tensor, weight_scale: torch.Tensor, k_multiple: int
) -> None:
    """Raises ValueError where these are no NVFP4 weight in ModelOpt's layout."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    if weight.dtype != torch.uint8 or not weight.is_contiguous():
        raise ValueError("weight must be contiguous uint8 [N, K/2]")
    if k == 0 or k % k_multiple:
        raise ValueError(f"K must be a positive multiple of {k_multiple}, got {k}")
    scale_bytes = weight_scale.numel() * weight_scale.element_size()
    padded = swizzled_bytes(n, k)
    if scale_bytes != padded or not weight_scale.is_contiguous():
        raise ValueError(
            f"weight_scale must be the {padded} swizzled E4M3 bytes of a {n} x {k} "
            f"weight, got {scale_bytes} bytes"
        )


def swizzled_bytes(n: int, k: int) -> int:
    """Bytes of the block scales of an N x K weight in the 128x4 swizzle."""
    return -(-n // SCALE_ROWS) * SCALE_ROWS * -(-k // 64) * 4


def _one_scale(global_scale: torch.Tensor) -> torch.Tensor:
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        raise ValueError("global_scale must be one FP32 value")
    return global_scale.view(1)
