# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Norm, RoPE and cache writes: bounds in float64, from the contract alone, and caches.

A kernel computes in FP32, in an order of its own. Sums of squares have no cancellation,
so their relative error is bounded; what is rounded to BF16 may be any value between the
roundings of the two ends.
"""

from dataclasses import dataclass

import torch

from contract import ops
from contract.numerics import Numerics
from support.attention import strided
from support.gemv import Bounds

_ULP = 2.0**-24


def around(value: torch.Tensor, slack: torch.Tensor) -> Bounds:
    """Bounds of what BF16 rounding makes of values within `slack` of `value`."""
    return Bounds(value - slack, value + slack).rounded()


def norm_bounds(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> Bounds:
    """Bounds of RMSNorm over the last axis, rounded once.

    Args:
        x: BF16 [..., K].
        weight: [K].
        eps: Added to the mean of squares.
        residual: BF16 like x.
    """
    old = None if residual is None else residual.double()
    exact, _ = ops.rms_norm(x.double(), weight, eps, Numerics.EXACT, old)
    return around(exact, exact.abs() * _norm_error(x.shape[-1]))


def qk_bounds(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    table_rows: torch.Tensor | None = None,
) -> Bounds:
    """Bounds of q/k norm and RoPE of BF16 [T, heads, dim], rounded once.

    Args:
        weight: [dim].
        table_rows: [T, dim], cosines and sines; None on layers without RoPE.
    """
    exact = ops.qk_norm_rope(x.double(), weight, eps, Numerics.EXACT, table_rows)
    normed, _ = ops.rms_norm(x.double(), weight, eps, Numerics.EXACT)
    size = normed.abs()
    if table_rows is not None:
        # Both products of a channel, with signs that add up.
        cos, sin = table_rows.double().abs().unsqueeze(1).chunk(2, dim=-1)
        first, second = size.chunk(2, dim=-1)
        size = torch.cat((first * cos + second * sin, second * cos + first * sin), -1)
    return around(exact, size * _norm_error(x.shape[-1]))


def _norm_error(width: int) -> float:
    """Relative: half of a sum of `width` squares in any order, and a few roundings."""
    return (width / 2 + 8) * _ULP


@dataclass(frozen=True)
class PagedCache:
    """A KV cache as vLLM lays it out, poisoned.

    Attributes:
        raw: [pages, kv heads, page size, 2 * dim], the logical shape of every backend;
            its strides are the layout's.
    """

    raw: torch.Tensor

    @classmethod
    def poisoned(
        cls,
        layout: str,
        pages: int,
        page_size: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> "PagedCache":
        """Makes one of layout NHD or HND, full of not-a-number bytes."""
        shape = (pages, kv_heads, page_size, 2 * dim)
        raw = torch.full(shape, float("nan"), device=device).to(dtype)
        return cls(strided(raw, layout))

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [pages, page size, kv heads, dim] each."""
        k, v = self.raw.transpose(1, 2).chunk(2, dim=-1)
        return k, v

    def check(self, slots: torch.Tensor, k: Bounds, v: torch.Tensor) -> None:
        """Asserts what tokens put into a BF16 cache, and that the rest is untouched.

        Args:
            slots: [T], distinct or negative.
            k: Bounds [T, kv heads, dim].
            v: [T, kv heads, dim].
        """
        cached_k, cached_v = (part.flatten(0, 1) for part in self.views())
        kept = slots >= 0
        places = slots[kept].long()
        Bounds(k.low[kept], k.high[kept]).check(cached_k[places])
        assert torch.equal(cached_v[places], v[kept])
        untouched = torch.ones(len(cached_k), dtype=torch.bool, device=slots.device)
        untouched[places] = False
        assert cached_k[untouched].isnan().all()
        assert cached_v[untouched].isnan().all()
