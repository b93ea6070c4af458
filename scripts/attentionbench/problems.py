# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Caches and queries for measurements, rotated past the L2 cache."""

from dataclasses import dataclass

import torch

from gemvbench.weights import copies_of

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 4, 128, 16
WINDOW = 513


@dataclass(frozen=True)
class Case:
    """One row of the comparison.

    Attributes:
        batch: requests.
        context: keys of each, the current one included.
        sliding: whether only the window counts.
    """

    batch: int
    context: int
    sliding: bool

    @property
    def window(self) -> int | None:
        return WINDOW if self.sliding else None

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values that the layer must read."""
        keys = min(self.context, WINDOW) if self.sliding else self.context
        return self.batch * keys * KV_HEADS * 2 * HEAD_DIM * 2


@dataclass(frozen=True)
class Inputs:
    """Tensors of one launch, as vLLM gives them to an attention backend.

    Attributes:
        q: BF16 [B, 32, 128].
        out: likewise.
        kv_cache: BF16 [blocks, 4, 16, 256], token-major.
        block_tables: int32 [B, pages], blocks in random order.
        seq_lens: int32 [B].
        sinks: FP32 [32].
    """

    q: torch.Tensor
    out: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor

    @classmethod
    def random(cls, case: Case, device: str = "cuda") -> "Inputs":
        """Random values; the whole context is in memory, in a sliding layer too."""
        pages = -(-case.context // PAGE)
        blocks = case.batch * pages
        shape = (blocks, PAGE, KV_HEADS, 2 * HEAD_DIM)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        order = torch.randperm(blocks, device=device, dtype=torch.int32)
        q = torch.randn(case.batch, HEADS, HEAD_DIM, device=device).bfloat16()
        return cls(
            q,
            torch.empty_like(q),
            cache.transpose(1, 2),
            order.view(case.batch, pages),
            torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
            torch.randn(HEADS, device=device),
        )

    def expected(self, window: int | None) -> torch.Tensor:
        """float64 output of the first request, [32, 128]."""
        n = int(self.seq_lens[0])
        pages = self.block_tables[0, : -(-n // PAGE)].long()
        both = self.kv_cache[pages].transpose(1, 2).flatten(0, 1)[:n]
        if window is not None:
            both = both[-window:]
        k, v = both.double().transpose(0, 1).split(HEAD_DIM, dim=-1)
        q = self.q[0].double().view(KV_HEADS, -1, HEAD_DIM)
        scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
        sinks = self.sinks.double().view(KV_HEADS, -1, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)
        return (weights[..., :-1] @ v).view(HEADS, HEAD_DIM)

    @classmethod
    def rotated(cls, case: Case) -> "list[Inputs]":
        """Enough copies that no launch finds its keys in L2."""
        return [cls.random(case) for _ in range(copies_of(case.n_bytes))]
