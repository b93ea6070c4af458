# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The weights of a sparse layer as Flint's kernels read them, for any tokens.

There is one copy: codes and BF16 weights stay in the memory that was loaded. Block
scales get a new order, the 128x4 swizzle of each expert, one expert at a time; the bits
of codes may get one, too (``packed``), in place.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..gemv.config import SCALE_ROWS
from ..gemv.packing import pack_codes
from ..gemv_weight import COLUMNS, GemvWeight, swizzled_bytes

_GROUP = 16
# Codes that are packed at once, in bytes; each takes eight more for that time.
_PACKED_BYTES = 1 << 24


@dataclass(frozen=True)
class FlintMoEWeights:
    """The routed experts of a layer, NVFP4 or BF16, on this rank.

    Attributes:
        w1: uint8 [E, 2 * I, H / 2], ModelOpt's codes, int32 [E, 2 * I, H / 8], packed
            ones, or BF16 [E, 2 * I, H]; the rows are [gate | up].
        w1_scale: uint8 [E, bytes]: of each expert the E4M3 bytes of [2 * I, H / 16] in
            the 128x4 swizzle, padded to multiples of 128 and 4. None for BF16.
        alpha1: FP32 [E], each expert's global scale; None for BF16.
        w2: uint8 [E, H, I / 2], int32 [E, H, I / 8], or BF16 [E, H, I].
        w2_scale: like ``w1_scale``, of [H, I / 16].
        alpha2: like ``alpha1``.

    Raises:
        ValueError: a tensor has the wrong type, shape or layout.

    """

    w1: torch.Tensor
    w1_scale: torch.Tensor | None
    alpha1: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    alpha2: torch.Tensor | None

    def __post_init__(self) -> None:
        dtype = self.w1.dtype
        if dtype not in COLUMNS or self.w2.dtype != dtype:
            raise ValueError(
                "w1 and w2 must both be uint8 or int32 (NVFP4) or both BF16, got "
                f"{dtype} and {self.w2.dtype}"
            )
        shapes = tuple(self.w1.shape), tuple(self.w2.shape)
        if self.w1.dim() != 3 or self.w2.dim() != 3 or self.w1.shape[1] % 2:
            raise ValueError(f"w1 and w2 must be [E, 2 * I, H] and [E, H, I]: {shapes}")
        columns = COLUMNS[dtype]
        wanted = (self.num_experts, self.hidden, self.intermediate // columns)
        if self.w2.shape != wanted:
            raise ValueError(f"w2 must be {wanted} beside w1 {shapes[0]}: {shapes[1]}")
        if not (self.w1.is_contiguous() and self.w2.is_contiguous()):
            raise ValueError("w1 and w2 must be contiguous")
        self._check_scales("w1", self.w1_scale, self.alpha1, self.w1)
        self._check_scales("w2", self.w2_scale, self.alpha2, self.w2)

    def _check_scales(
        self,
        name: str,
        scale: torch.Tensor | None,
        alpha: torch.Tensor | None,
        weight: torch.Tensor,
    ) -> None:
        if self.is_bf16:
            if scale is not None or alpha is not None:
                raise ValueError(f"{name} is BF16 and takes no scales")
            return
        n, k = weight.shape[1], weight.shape[2] * COLUMNS[weight.dtype]
        shape = (self.num_experts, swizzled_bytes(n, k))
        if (
            scale is None
            or scale.dtype != torch.uint8
            or scale.shape != shape
            or not scale.is_contiguous()
        ):
            raise ValueError(f"{name}_scale must be contiguous uint8 {list(shape)}")
        if alpha is None or alpha.dtype != torch.float32 or alpha.shape != shape[:1]:
            raise ValueError(f"alpha of {name} must be FP32 [{self.num_experts}]")

    @classmethod
    def from_modelopt(
        cls,
        w1: torch.Tensor,
        w1_scale: torch.Tensor,
        alpha1: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        alpha2: torch.Tensor,
    ) -> "FlintMoEWeights":
        """Take ModelOpt's tensors; only the block scales are copied.

        Args:
            w1: uint8 [E, 2 * I, H / 2], rows [gate | up]. H is a multiple of 16.
            w1_scale: E4M3 or uint8 [E, 2 * I, H / 16], not swizzled.
            alpha1: FP32 [E].
            w2: uint8 [E, H, I / 2]. I is a multiple of 16.
            w2_scale: E4M3 or uint8 [E, H, I / 16], not swizzled.
            alpha2: FP32 [E].

        Returns:
            The weights; codes and global scales share the arguments' memory.

        Raises:
            ValueError: a tensor has the wrong type, shape or layout.

        """
        return cls(
            w1,
            _swizzle("w1", w1, w1_scale),
            alpha1,
            w2,
            _swizzle("w2", w2, w2_scale),
            alpha2,
        )

    @cached_property
    def is_bf16(self) -> bool:
        """Whether the experts are BF16, and not NVFP4."""
        return self.w1.dtype == torch.bfloat16

    @property
    def is_packed(self) -> bool:
        """Whether the bits of codes are in the order of ``pack_codes``."""
        return self.w1.dtype == torch.int32

    def packed(self) -> "FlintMoEWeights":
        """Put the bits of NVFP4 codes in the order of ``pack_codes``, in place.

        Returns:
            The weights, in the same memory; these here must not be used any more.

        """
        return replace(self, w1=_pack(self.w1), w2=_pack(self.w2))

    @cached_property
    def num_experts(self) -> int:
        """Experts on this rank."""
        return self.w1.shape[0]

    @cached_property
    def hidden(self) -> int:
        """Width of a token."""
        return self.w1.shape[2] * COLUMNS[self.w1.dtype]

    @cached_property
    def intermediate(self) -> int:
        """Width between an expert's two projections."""
        return self.w1.shape[1] // 2


@dataclass(frozen=True)
class LLMoEWeights:
    """All of a sparse layer that the three low-latency launches read.

    Attributes:
        router: BF16 [E, H], contiguous.
        experts: the routed experts.
        shared_gate_up: the shared expert's gate and up rows, in the layer's memory.
        shared_down: its down rows.

    Raises:
        ValueError: the parts do not fit together.

    """

    router: torch.Tensor
    experts: FlintMoEWeights
    shared_gate_up: GemvWeight
    shared_down: GemvWeight

    def __post_init__(self) -> None:
        experts, up, down = self.experts, self.shared_gate_up, self.shared_down
        wanted = (experts.num_experts, experts.hidden)
        if self.router.dtype != torch.bfloat16 or self.router.shape != wanted:
            raise ValueError(
                f"router must be BF16 {list(wanted)}, got "
                f"{self.router.dtype} {tuple(self.router.shape)}"
            )
        if not self.router.is_contiguous():
            raise ValueError("router must be contiguous")
        if up.shape.k != experts.hidden or up.shape.n != 2 * down.shape.k:
            raise ValueError(
                "the shared expert's gate and up rows do not fit: "
                f"{up.shape.n} x {up.shape.k}"
            )
        if down.shape.n != experts.hidden:
            raise ValueError(
                f"the shared expert's down rows do not fit: {down.shape.n} of "
                f"{experts.hidden}"
            )


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack the codes of all experts where they lie: int32 [E, N, K / 8]."""
    words = codes.view(torch.int32)
    step = max(1, _PACKED_BYTES // codes[0].numel())
    for first in range(0, len(codes), step):
        words[first : first + step] = pack_codes(codes[first : first + step])
    return words


def _swizzle(name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Put [E, N, K / 16] in the 128x4 swizzle of each expert: uint8 [E, bytes]."""
    if weight.dtype != torch.uint8 or weight.dim() != 3:
        raise ValueError(f"{name} must be uint8 [E, rows, codes / 2]")
    experts, n, k = weight.shape[0], weight.shape[1], 2 * weight.shape[2]
    wanted = (experts, n, k // _GROUP)
    if k % _GROUP or scale.shape != wanted or scale.element_size() != 1:
        raise ValueError(
            f"{name}_scale must be E4M3 bytes {list(wanted)} of a weight whose width "
            f"is a multiple of {_GROUP}, got {scale.dtype} {tuple(scale.shape)}"
        )
    out = scale.new_empty((experts, swizzled_bytes(n, k)), dtype=torch.uint8)
    rows = -(-n // SCALE_ROWS) * SCALE_ROWS
    padded = out.new_zeros((rows, out.shape[1] // rows))
    # Rows 0, 32, 64 and 96 of 128 lie side by side, four scales of each.
    blocks = padded.view(-1, 4, SCALE_ROWS // 4, padded.shape[1] // 4, 4)
    blocks = blocks.permute(0, 3, 2, 1, 4)
    for expert in range(experts):
        padded[:n, : k // _GROUP] = scale[expert].view(torch.uint8)
        out[expert].view(blocks.shape).copy_(blocks)
    return out
