# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""ModelOpt's codes back from packed words, bit by bit."""

import torch
from vllm.models.flint.ops.gemv.packing import pack_codes


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """Returns uint8 [..., K / 2] for int32 [..., K / 8]."""
    bits = [(1 << i) - (1 << 32 if i == 31 else 0) for i in range(32)]
    singles = torch.tensor(bits, dtype=torch.int32)
    packed = pack_codes(singles.view(torch.uint8).view(32, 4))[:, 0]
    out = torch.zeros_like(words)
    for single, place in zip(singles, packed, strict=True):
        out |= torch.where((words & place) != 0, single, 0).to(torch.int32)
    return out.view(torch.uint8)
