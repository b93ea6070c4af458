# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Decode-attention problems, and what may be answered: bounds from the contract.

The contract rounds P to BF16, relative to whatever maximum a kernel has seen so far,
adds in FP32 in any order, and rounds the output once. So the exact result may be off by
a bounded amount before that rounding, and nothing else is accepted.
"""

from dataclasses import dataclass

import torch

from contract.attention import gather_pages
from support.gemv import Bounds

HEAD_DIM = 128
GROUP = 8
# Error of an FP32 operation, relative; tensor cores truncate where others round.
_FP32 = 2.0**-23
_FP32_NORMAL = 2.0**-126
# BF16 has 8 significant bits.
_BF16 = 2.0**-8


@dataclass
class Problem:
    """Arguments of `flint_decode_attention`, and the cache's exact values.

    Attributes:
        q: BF16 [B, H, 128].
        kv_cache: BF16 or E4M3 bytes (uint8), [blocks, KV heads, page, 256], strided.
        block_tables: int32 [B, pages].
        seq_lens: int32 [B].
        sinks: FP32 [H].
        window: keys a query sees, or None.
        scale: of the scores.
        k_scale: FP32 [1] for E4M3, else None.
        v_scale: likewise.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor
    window: int | None = None
    scale: float = HEAD_DIM**-0.5
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def random(
        cls,
        lengths: list[int],
        kv_heads: int = 4,
        page: int = 16,
        window: int | None = None,
        layout: str = "NHD",
        fp8: bool = False,
        sink: float = 1.0,
        device: str = "cpu",
        blocks: int | None = None,
        seed: int = 0,
    ) -> "Problem":
        """Random values, and blocks in random order.

        Args:
            lengths: Of the requests.
            kv_heads: KV heads.
            page: Keys in a block.
            window: Keys a query sees.
            layout: NHD, HND, or LAYERS: head-major blocks with other layers between.
            fp8: E4M3 cache.
            sink: Size of the sinks, of both signs.
            device: Where.
            blocks: How many there are; fewer than needed are shared. None for one
                more than needed.
            seed: Of the random numbers.

        Every key that no request may read is NaN.
        """
        g = torch.Generator(device).manual_seed(seed)
        needed = [-(-n // page) for n in lengths]
        count = blocks or sum(needed) + 1
        shape = (count, kv_heads, page, 2 * HEAD_DIM)
        values = torch.randn(shape, device=device, generator=g)
        if fp8:
            cache = values.to(torch.float8_e4m3fn).view(torch.uint8)
            nan: float = 0x7F
        else:
            cache, nan = values.bfloat16(), float("nan")
        width = max(max(needed), 1)
        order = torch.randperm(max(count, sum(needed)), device=device, generator=g)
        order = (order % count).int()
        # Past its end a row names blocks that do not exist.
        tables = torch.full((len(lengths), width), 1 << 30, device=device).int()
        used = torch.zeros(count, page, dtype=torch.bool, device=device)
        start = 0
        for i, (n, pages) in enumerate(zip(lengths, needed)):
            mine = order[start : start + pages]
            tables[i, :pages] = mine
            used[mine[: n // page].long()] = True
            if n % page:
                used[mine[-1].long(), : n % page] = True
            start += pages
        cache.masked_fill_(~used[:, None, :, None], nan)
        heads = GROUP * kv_heads
        signs = 1 - 2 * (torch.arange(heads, device=device) % 2)
        q = torch.randn(len(lengths), heads, HEAD_DIM, device=device, generator=g)
        noise = torch.rand(heads, device=device, generator=g)
        return cls(
            q.bfloat16(),
            strided(cache, layout),
            tables,
            torch.tensor(lengths, dtype=torch.int32, device=device),
            (sink * signs * (0.5 + noise)).float(),
            window,
            k_scale=torch.full((1,), 0.75, device=device) if fp8 else None,
            v_scale=torch.full((1,), 1.25, device=device) if fp8 else None,
        )

    def flat_cache(self):
        """The cache's storage as a NumPy array, its strides, and its byte offset."""
        cache = self.kv_cache
        raw = torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())
        return (
            raw.numpy(),
            cache.stride()[:3],
            cache.storage_offset() * cache.element_size(),
        )

    def keys_values(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 keys and values of a request, [length, KV heads, 128]."""
        length = int(self.seq_lens[request])
        cache = self.kv_cache
        if self.k_scale is not None:
            cache = cache.view(torch.float8_e4m3fn)
        pages = -(-length // cache.shape[2])
        # Only this request's blocks: some problems have far more.
        mine = cache[self.block_tables[request, :pages].long()].transpose(1, 2)
        order = torch.arange(pages, device=cache.device)
        both = gather_pages(mine, order, length)
        k, v = both.split(HEAD_DIM, dim=-1)
        if self.k_scale is not None and self.v_scale is not None:
            k, v = k * self.k_scale.double(), v * self.v_scale.double()
        return k, v

    def bounds(self) -> Bounds:
        """What the output may be."""
        low = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        high = low.clone()
        for i, length in enumerate(self.seq_lens.tolist()):
            if length:
                low[i], high[i] = self._request_bounds(i)
        return Bounds(low, high).rounded()

    def _request_bounds(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.keys_values(request)
        if self.window is not None:
            k, v = k[-self.window :], v[-self.window :]
        kv_heads = k.shape[1]
        q = self.q[request].double().reshape(kv_heads, GROUP, HEAD_DIM)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        scores = q @ k.transpose(1, 2) * self.scale
        sinks = self.sinks.double().reshape(kv_heads, GROUP, 1)
        peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        p = torch.exp(scores - peak)
        sink = torch.exp(sinks - peak)
        total = p.sum(-1, keepdim=True) + sink
        # FP32 sums of 128 products, the scale, the difference, the exponential.
        terms = q.abs() @ k.abs().transpose(1, 2) * self.scale
        error = (HEAD_DIM + 4) * _FP32 * terms + 8 * _FP32 * (1 + (scores - peak).abs())
        sink_error = 8 * _FP32 * (1 + (sinks - peak).abs())
        steps = p.shape[-1] / 16 + 64
        total_error = (p * error).sum(-1, keepdim=True) + sink * sink_error
        total_error = total_error + steps * _FP32 * total
        exact = p @ v / total
        # Below the smallest normal value an FP32 exponential may be 0.
        weighted = p * (error + _BF16 * (1 + error)) + _FP32_NORMAL
        slack = (weighted + steps * _FP32 * p) @ v.abs() / total
        slack = slack * 1.01 + exact.abs() * (total_error / total)
        heads = self.q.shape[1:]
        return (exact - slack).reshape(heads), (exact + slack).reshape(heads)


def strided(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values behind a layout's strides."""
    blocks, heads, page, content = cache.shape
    if layout == "HND":
        return cache.contiguous()
    if layout == "NHD":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert layout == "LAYERS"
    whole = cache.new_zeros(blocks, 3, heads, page, content)
    whole[:, 1] = cache
    return whole[:, 1]
