# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An order of the bits of eight e2m1 codes that takes little to decode.

A 32-bit word keeps its codes 0 to 3 in one half and 4 to 7 in the other, as ModelOpt
has them, so that a code and the fourth after it become the two halves of a register.
There a code has its sign at bit 15 and its magnitude at bits 8 to 6. Those are where
code 0 lies. Codes 1 and 2 lie there in the word rotated to the right by 3 and by 6;
their signs wrap into the other half. Code 3 has the four bits that are left, 0, 1, 3
and 4: one multiplication copies each to its place, and what it copies elsewhere falls
on bits that are masked.
"""

import functools

import torch

# How far codes 1 and 2 are rotated.
ROTATIONS = (3, 6)
# Where code 3 lies in both halves, and what moves bits 3, 4, 0 and 1 to 6, 7, 8 and 15.
LAST_BITS = 0x001B001B
LAST_FACTOR = (1 << 3) + (1 << 8) + (1 << 14)
_LAST_PLACES = (3, 4, 0, 1)
_PLACES = (6, 7, 8, 15)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Reorder the bits of NVFP4 codes.

    Args:
        codes: uint8 [..., K / 2], ModelOpt's, contiguous; K is a multiple of 8.

    Returns:
        int32 [..., K / 8].

    Raises:
        ValueError: ``codes`` has another type, width or layout.

    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 4 or not codes.is_contiguous():
        raise ValueError(
            "codes must be contiguous uint8 [..., K / 2], with K a multiple of 8, got "
            f"{codes.dtype} {list(codes.shape)}"
        )
    out = codes.new_zeros((*codes.shape[:-1], codes.shape[-1] // 4), dtype=torch.int32)
    # Not kept there: an engine that sleeps gives up what came with its weights.
    for byte, table in enumerate(_tables().to(codes.device)):
        out |= table[codes[..., byte::4].long()]
    return out


def _places(code: int) -> list[int]:
    """Where a code's bits lie in a word: its magnitude from the lowest, its sign."""
    half, index = divmod(code, 4)
    if index == 3:
        return [16 * half + place for place in _LAST_PLACES]
    rotation = (0, *ROTATIONS)[index]
    return [(16 * half + place + rotation) % 32 for place in _PLACES]


@functools.cache
def _tables() -> torch.Tensor:
    """What each byte, 0 to 3, adds to a word: int32 [4, 256]."""
    value = torch.arange(256)
    tables = torch.zeros((4, 256), dtype=torch.int64)
    for code in range(8):
        nibble = value >> 4 * (code % 2)
        for bit, place in enumerate(_places(code)):
            tables[code // 2] |= (nibble >> bit & 1) << place
    return tables.to(torch.int32)
