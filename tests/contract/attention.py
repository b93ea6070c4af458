# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Attention with sinks and a sliding window, over dense and paged keys."""

import torch

from contract.numerics import Numerics


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    numerics: Numerics,
    window: int | None = None,
) -> torch.Tensor:
    """Attends from the last T of S positions, causally.

    The sink of a head joins the denominator of its softmax and adds no value.
    Probabilities are rounded for the product with V; their sum is not.

    Args:
        q: [T, heads, dim], the queries of positions S - T to S - 1.
        k: [S, kv_heads, dim].
        v: [S, kv_heads, dim].
        sinks: [heads].
        window: Positions a query sees, its own included; None for all before it.

    Returns:
        [T, heads, dim], rounded.
    """
    tokens, heads, dim = q.shape
    span, kv_heads, _ = k.shape
    group = heads // kv_heads
    scores = q.reshape(tokens, kv_heads, group, dim).permute(1, 2, 0, 3) @ k.permute(
        1, 2, 0
    ).unsqueeze(1)
    age = torch.arange(span - tokens, span)[:, None] - torch.arange(span)
    unseen = age < 0 if window is None else (age < 0) | (age >= window)
    scores = (scores * scale).masked_fill(unseen, float("-inf"))
    sink = sinks.double().reshape(kv_heads, group, 1, 1)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - peak)
    mixed = numerics.bf16(weights) @ v.transpose(0, 1).unsqueeze(1) / total
    return numerics.bf16(mixed.permute(2, 0, 1, 3).reshape(tokens, heads, dim))


def gather_pages(
    cache: torch.Tensor, block_table: torch.Tensor, length: int
) -> torch.Tensor:
    """Collects the first `length` positions of one request.

    Args:
        cache: [blocks, block_size, kv_heads, dim], keys or values.
        block_table: [max_blocks], the request's blocks in order.

    Returns:
        float64 [length, kv_heads, dim].
    """
    block_size = cache.shape[1]
    blocks = block_table[: -(-length // block_size)].long()
    return cache[blocks].flatten(0, 1)[:length].double()


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    numerics: Numerics,
    window: int | None = None,
) -> torch.Tensor:
    """Attends from the last position of each request to its paged keys.

    Args:
        q: [B, heads, dim].
        k_cache: [blocks, block_size, kv_heads, dim].
        v_cache: [blocks, block_size, kv_heads, dim].
        block_tables: [B, max_blocks].
        seq_lens: [B], the current token included; a request of length 0 gives
            zeros.

    Returns:
        [B, heads, dim], rounded.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, length in enumerate(seq_lens.tolist()):
        if length:
            keys = gather_pages(k_cache, block_tables[i], length)
            values = gather_pages(v_cache, block_tables[i], length)
            row = q[i : i + 1].double()
            out[i] = attention(row, keys, values, sinks, scale, numerics, window)[0]
    return out
