# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""NVFP4: values of codes and scale bytes, both layouts, exact dequantization."""

from dataclasses import dataclass

import torch

GROUP = 16
GGML_BLOCK_BYTES = 36

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), dtype=torch.float64)

# The two bytes that E4M3 gives to "not a number"; the top bit is the sign.
NAN_SCALE_BYTES = (0x7F, 0xFF)


def e4m3_value(byte: int) -> float:
    """Returns the value of one E4M3 scale byte (bias 7, subnormals m * 2^-9)."""
    if byte in NAN_SCALE_BYTES:
        return float("nan")
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = torch.tensor([e4m3_value(b) for b in range(256)], dtype=torch.float64)


@dataclass(frozen=True)
class Nvfp4Weight:
    """A quantized matrix in the ModelOpt layout, scales not swizzled.

    Attributes:
        weight: uint8 [N, K / 2], two consecutive codes a byte, low nibble first.
        weight_scale: uint8 [N, K / 16], E4M3 bytes.
        global_scale: The factor of the whole matrix.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    global_scale: float


def unpack_codes(weight: torch.Tensor) -> torch.Tensor:
    """Turns ModelOpt bytes, uint8 [..., K / 2], into codes 0 to 15, [..., K]."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Turns codes 0 to 15, uint8 [..., K], into ModelOpt bytes, [..., K / 2]."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def dequantize(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Returns e2m1 * e4m3 in float64, [..., K], without the global scale.

    BF16 holds every value: six significant bits at most, and small exponents.

    Args:
        weight: uint8 [..., K / 2], ModelOpt bytes.
        weight_scale: uint8 [..., K / 16], E4M3 bytes.
    """
    values = E2M1[unpack_codes(weight).long()]
    scales = E4M3[weight_scale.long()]
    return values * scales.repeat_interleave(GROUP, dim=-1)


def ggml_to_modelopt(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Repacks GGML NVFP4 blocks, uint8 [..., K / 64 * 36], without any loss.

    Returns:
        The ModelOpt weight, uint8 [..., K / 2], and scale bytes, [..., K / 16],
        such that they decode to what GGML's decoder gives: it ignores the top
        bit of a scale byte and reads 0x7F as zero.

    Raises:
        ValueError: If a scale byte is 0xFF, which is not a number.
    """
    parts = blocks.unflatten(-1, (-1, GGML_BLOCK_BYTES))
    scales, packed = parts[..., :4], parts[..., 4:].unflatten(-1, (4, 8))
    if (scales == 0xFF).any():
        raise ValueError("scale byte 0xFF is not a number")
    scales = torch.where(scales == 0x7F, 0, scales & 0x7F).flatten(-2)
    codes = torch.cat((packed & 15, packed >> 4), dim=-1).flatten(-3)
    return pack_codes(codes), scales


def swizzle_scales(weight_scale: torch.Tensor) -> torch.Tensor:
    """Puts scale bytes [N, K / 16] in the 128x4 order that kernels read.

    The matrix is padded with zeros to multiples of 128 rows and 4 columns. Row r
    and column c of a 128x4 tile land at byte (r % 32) * 16 + r // 32 * 4 + c of
    the tile; tiles follow each other along K first.

    Returns:
        The flat bytes, uint8 [tiles * 512].
    """
    rows, columns = weight_scale.shape
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    padded = weight_scale.new_zeros(row_tiles * 128, column_tiles * 4)
    padded[:rows, :columns] = weight_scale
    tiles = padded.reshape(row_tiles, 4, 32, column_tiles, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Undoes `swizzle_scales` for a matrix of [rows, columns] scale bytes."""
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    tiles = flat.reshape(row_tiles, column_tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns]


def fragment_weight(weight: torch.Tensor) -> torch.Tensor:
    """Puts ModelOpt bytes [N, K / 2] in the order of quack's GEMM for SM90.

    Of each 64 x 64 block, thread t has 16 bytes, four for each 16 of k. Byte p of these
    has row 16 * (t // 32) + t % 32 // 4, or 8 further where p is odd, and the two codes
    at k = 2 * (t % 4), or 8 further where p is 2 or 3.

    Returns:
        uint8 [N / 64, K / 64, 128, 16].
    """
    rows, width = weight.shape
    thread = torch.arange(128).view(-1, 1)
    byte = torch.arange(16).view(1, -1)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (byte % 2)
    column = 8 * (byte // 4) + thread % 4 + 4 * (byte % 4 // 2)
    blocks = weight.cpu().view(rows // 64, 64, width // 32, 32).permute(0, 2, 1, 3)
    return blocks[:, :, row, column].contiguous().to(weight.device)


def fragment_scales(weight_scale: torch.Tensor) -> torch.Tensor:
    """Puts scale bytes [N, K / 16] in the order of quack's GEMM for SM90.

    Returns:
        uint8 [N / 64, K / 64, 32, 4, 2]: entry (s, b, i) of a 64 x 64 block has row
        16 * (s // 8) + s % 8 + 8 * i and the b-th 16 of k.
    """
    rows, width = weight_scale.shape
    split = weight_scale.view(rows // 64, 4, 2, 8, width // 4, 4)
    return split.permute(0, 4, 1, 3, 5, 2).reshape(rows // 64, width // 4, 32, 4, 2)
