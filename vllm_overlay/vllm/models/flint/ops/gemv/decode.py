# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How eight e2m1 codes and their e4m3 scales become BF16 registers.

A weight is e2m1 * e4m3: two significant bits times four, so the product is exact in
BF16. A form differs in instructions for eight codes (SASS, without the four
multiplications by the scale that both of them need):

====== ===== ============ ======== =================================================
form   total integer pipe pairs    where
====== ===== ============ ======== =================================================
cvt    4     4            adjacent SM100 and later: F2FP.BF16.E2M1
mul    13    9            i, i + 4 elsewhere; the other four are IMADs, on the FMA pipe
packed 8     7            i, i + 4 elsewhere, for codes in the order of ``packing``
====== ===== ============ ======== =================================================

``mul`` moves a code's magnitude to bits 8..6 and its sign to bit 15 of a BF16, which
is its value times 2^-126, exactly. The scale is written as s * 2^119, so one BF16
multiplication gives e2m1 * e4m3 * 2^-7, exactly; the 2^7 goes into the FP32 global
scale. This needs BF16 multiplication that keeps subnormals, which every target has.
Negative, zero and subnormal e4m3 scales are exact too.
"""

from dataclasses import dataclass

from cutlass import Uint32

from . import primitives as p
from .packing import LAST_BITS, LAST_FACTOR, ROTATIONS

# BF16 bits that a code occupies: sign at 15, magnitude at 8..6, in both halves.
_CODE_BITS = 0x81C081C0
# From FP16's exponent bias to BF16's, and 119, at BF16's exponent in both halves.
_FP16_TO_SCALE = ((127 - 15 + 119) << 7) * 0x00010001


@dataclass(frozen=True)
class DecodeForm:
    """One way to decode.

    Attributes:
        name: ``cvt``, ``mul`` or ``packed``.
        half_pairs: whether register i holds codes i and i + 4 of a word instead of
            codes 2i and 2i + 1.
        output_scale: what the accumulator must be multiplied by.

    """

    name: str
    half_pairs: bool
    output_scale: float

    def codes(self, word: Uint32) -> tuple[Uint32, ...]:
        """Four BF16 pairs from the eight codes of ``word``, still unscaled."""
        return _CODES[self.name](word)

    def scales(self, both: Uint32, block: int) -> Uint32:
        """BF16 pair (row g, row g + 8) of scales for one 16-wide block.

        Args:
            both: e4m3 bytes (row g block 0, row g block 1, row g+8 block 0,
                row g+8 block 1).
            block: 0 or 1.

        """
        if self.name == "cvt":
            select = 0x0020 if block == 0 else 0x0031
            return p.cvt_e4m3x2_to_bf16x2(p.prmt(both, Uint32(0), Uint32(select)))
        # Exponent and mantissa to bits 10..4, sign to bit 15: s * 2^-120.
        if block == 0:
            magnitude, sign = p.imul(both, 1 << 4), p.imul(both, 1 << 8)
        else:
            magnitude, sign = both >> 4, both
        bits = (magnitude & Uint32(0x07F007F0)) | (sign & Uint32(0x80008000))
        wide = p.mul_bf16x2(bits, Uint32(_bf16_pair(127)))
        return p.mul_bf16x2(wide, Uint32(_bf16_pair(112)))

    def unsigned_scales(self, word: Uint32, high: bool) -> Uint32:
        """BF16 pair of the two e4m3 scales in one half of ``word``.

        Neither may be negative. FP16 holds each as a normal number, so a shift and an
        addition to the exponent give s * 2^119. Zero becomes 2^104: codes under a zero
        scale must be zero.
        """
        half = p.cvt_e4m3x2_to_f16x2(word, high)
        return (half >> 3) + Uint32(_FP16_TO_SCALE)


def _bf16_pair(exponent: int) -> int:
    return ((exponent + 127) << 7) * 0x00010001


def _codes_mul(word: Uint32) -> tuple[Uint32, ...]:
    """Isolates a code, copies it to both places with one IMAD, masks."""
    upper = word >> 8
    bits = Uint32(_CODE_BITS)
    low, high = Uint32(0x000F000F), Uint32(0x00F000F0)
    return (
        p.imul(word & low, (1 << 12) + (1 << 6)) & bits,
        p.imul(word & high, (1 << 8) + (1 << 2)) & bits,
        p.imul(upper & low, (1 << 12) + (1 << 6)) & bits,
        p.imul(upper & high, (1 << 8) + (1 << 2)) & bits,
    )


def _codes_packed(word: Uint32) -> tuple[Uint32, ...]:
    """Three codes of a half lie as in a BF16 that was rotated, the fourth between."""
    bits = Uint32(_CODE_BITS)
    first, second = ROTATIONS
    return (
        word & bits,
        p.rotate_right(word, first) & bits,
        p.rotate_right(word, second) & bits,
        p.imul(word & Uint32(LAST_BITS), LAST_FACTOR) & bits,
    )


_CODES = {
    "cvt": p.cvt_e2m1x8_to_bf16x8,
    "mul": _codes_mul,
    "packed": _codes_packed,
}

FORMS = {
    "cvt": DecodeForm("cvt", half_pairs=False, output_scale=1.0),
    "mul": DecodeForm("mul", half_pairs=True, output_scale=128.0),
    "packed": DecodeForm("packed", half_pairs=True, output_scale=128.0),
}
