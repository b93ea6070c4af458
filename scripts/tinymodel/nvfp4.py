# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""NVFP4 in NumPy: what a tiny model's quantized matrix is and how GGML packs it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP = 16
BLOCK = 64

E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


def e4m3_values() -> NDArray[np.float32]:
    """Returns what the scale bytes 0x00 to 0x7E stand for."""
    byte = np.arange(0x7F)
    exponent, mantissa = byte >> 3, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)


E4M3 = e4m3_values()


@dataclass(frozen=True)
class Nvfp4Matrix:
    """A matrix that NVFP4 holds exactly.

    Attributes:
        codes: uint8 [N, K], E2M1 codes 0 to 15.
        scales: uint8 [N, K / 16], E4M3 scale bytes 0x00 to 0x7E.
        tensor_scale: The factor of the whole matrix, a float32 value.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    tensor_scale: float

    def unscaled(self) -> NDArray[np.float32]:
        """Returns [N, K] without the tensor scale; BF16 holds every value."""
        return E2M1[self.codes] * np.repeat(E4M3[self.scales], GROUP, axis=1)

    def dequantize(self) -> NDArray[np.float32]:
        """Returns [N, K]; exact if the tensor scale is a power of two."""
        return self.unscaled() * np.float32(self.tensor_scale)

    def ggml_bytes(self) -> NDArray[np.uint8]:
        """Returns GGML's NVFP4 blocks, uint8 [N, K / 64 * 36].

        A block is four scale bytes, then 8 code bytes for each scale: byte j
        holds value j in its low nibble and value j + 8 in its high one.
        """
        rows, columns = self.codes.shape
        blocks = columns // BLOCK
        halves = self.codes.reshape(rows, blocks, BLOCK // GROUP, 2, GROUP // 2)
        nibbles = halves[..., 0, :] | halves[..., 1, :] << 4
        parts = (
            self.scales.reshape(rows, blocks, BLOCK // GROUP),
            nibbles.reshape(rows, blocks, BLOCK // 2),
        )
        return np.concatenate(parts, axis=-1).reshape(rows, -1)
