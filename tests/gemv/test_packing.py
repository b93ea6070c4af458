# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The order of the bits of packed codes, against ModelOpt's codes and their values."""

import pytest
import torch
from vllm.models.flint.ops.gemv.packing import (
    LAST_BITS,
    LAST_FACTOR,
    ROTATIONS,
    pack_codes,
)

from contract.nvfp4 import E2M1, unpack_codes

_BITS = 0x81C081C0
_ALL = 0xFFFFFFFF


def registers(words: torch.Tensor) -> list[torch.Tensor]:
    """What kernels make of packed words: four pairs of BF16, as int64 bits."""
    word = words.long() & _ALL
    turned = [((word >> n) | (word << (32 - n))) & _ALL for n in ROTATIONS]
    last = (word & LAST_BITS) * LAST_FACTOR
    return [x & _BITS for x in (word, *turned, last)]


def as_bf16(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0xFFFF).to(torch.int16).view(torch.bfloat16)


def test_registers_hold_the_values_of_codes() -> None:
    """Each code at each place beside all others there: sixteen words of eight."""
    one = torch.arange(16, dtype=torch.uint8)
    codes = (one[:, None] + 3 * one[None, :8]) % 16
    codes = torch.cat([codes, torch.randint(0, 16, (500, 8), dtype=torch.uint8)])
    given = codes[:, ::2] | codes[:, 1::2] << 4
    assert torch.equal(unpack_codes(given), codes)
    for index, register in enumerate(registers(pack_codes(given)[:, 0])):
        for half in (0, 1):
            found = as_bf16(register >> 16 * half).double() * 2.0**126
            assert torch.equal(found, E2M1[codes[:, index + 4 * half].long()].double())


def test_no_bit_is_lost() -> None:
    """Every bit of a word comes from one bit of the codes."""
    singles = (1 << torch.arange(32)).to(torch.int32).view(torch.uint8).view(32, 4)
    words = pack_codes(singles)[:, 0].long() & _ALL
    assert sorted(words.tolist()) == [1 << i for i in range(32)]


def test_any_shape() -> None:
    codes = torch.randint(0, 256, (3, 5, 24), dtype=torch.uint8)
    words = pack_codes(codes)
    assert (words.shape, words.dtype) == ((3, 5, 6), torch.int32)
    assert torch.equal(words[1, 4], pack_codes(codes[1, 4]))
    assert pack_codes(codes[:0]).shape == (0, 5, 6)


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(4, 4, dtype=torch.int32),
        torch.zeros(4, 6, dtype=torch.uint8),
        torch.zeros(8, 4, dtype=torch.uint8).T,
    ],
    ids=["type", "width", "layout"],
)
def test_wrong_codes(codes: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="codes must be contiguous uint8"):
        pack_codes(codes)
