# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Stands for the pinned memory of vLLM's V2 runner, where there is no GPU."""

from collections.abc import Sequence

import torch


class HostBuffer:
    """A buffer whose GPU view is its memory, as with UVA."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        """Returns the first `n` elements, or all."""
        return self.cpu[:n]
