# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention of one new token a request to a paged cache, with sinks.

``attention/kernel.py`` says what is computed, how exactly and how fast. This module
checks arguments, picks a schedule from the batch size alone, and launches. Nothing is
allocated after the first call; a captured graph may be replayed with other lengths and
block tables.
"""

import torch

from .attention.config import (
    GROUP,
    HEAD_DIM,
    NO_WINDOW,
    TILE_KEYS,
    DecodeConfig,
    DecodeSpec,
    pick_config,
    split_target,
)
from .attention.variants import decode_variant
from .attention.workspace import DecodeWorkspace
from .device import current_gpu

__all__ = ["MAX_BATCH", "DecodeWorkspace", "flint_decode_attention", "warmup"]

# The largest batch that the shared workspaces serve.
MAX_BATCH = 256
_workspaces: dict[tuple[torch.device, int, int], DecodeWorkspace] = {}


def flint_decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int | None,
    scale: float,
    out: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    pdl: bool = True,
    early_reads: bool = False,
) -> None:
    """Attend from the last position of each request; the result goes to ``out``.

    Args:
        q: BF16 [B, H, 128] with H = 8 * KV heads; unit inner stride.
        kv_cache: vLLM's cache [blocks, KV heads, page, 256], K then V of a key; any
            strides but the last. BF16, or E4M3 (``float8_e4m3fn`` or its bytes as
            ``uint8``). A page is a multiple of 16 keys.
        block_tables: int32 [B, pages]; entries past a request's length are not read.
        seq_lens: int32 [B], keys of each request, the current token included. A
            request of length 0 writes zeros.
        sinks: FP32 [H], logits that join the softmax and add no value.
        window: keys a query sees, its own included; None for all.
        scale: positive, multiplies q k.
        out: BF16 [B, H, 128], unit inner stride.
        k_scale: FP32, one value on the device that multiplies E4M3 keys.
        v_scale: likewise for values.
        workspace: memory of this caller; see ``DecodeWorkspace``. None shares one for
            this device and stream, which must exist before a graph is captured
            (``warmup``, or any call).
        pdl: start while the previous kernel in the stream drains.
        early_reads: with ``pdl``, read lengths, block tables and all but the last key
            of each request before the previous kernel has ended. Allowed where a
            kernel launched without PDL lies between what writes those and this one,
            as in a model's forward.

    Raises:
        ValueError: an argument has the wrong type, shape or layout.
        RuntimeError: a graph is being captured and there is no workspace yet.

    """
    batch, kv_heads = _check(q, kv_cache, block_tables, seq_lens, sinks, out)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    fp8 = kv_cache.dtype != torch.bfloat16
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if fp8:
        scales = _one_scale("k_scale", k_scale), _one_scale("v_scale", v_scale)
        kv_cache = kv_cache.view(torch.uint8)
    if batch == 0:
        return
    if workspace is None:
        workspace = _shared_workspace(q.device, kv_heads)
    reason = workspace.why_not(batch, kv_heads, q.device)
    if reason is not None:
        raise ValueError(f"the workspace does not fit: {reason}")
    config = _config(batch, kv_heads, window is not None)
    decode_variant(DecodeSpec(fp8, pdl, pdl and early_reads), config)(
        q,
        kv_cache,
        block_tables,
        seq_lens,
        sinks,
        out,
        workspace.records,
        workspace.counters,
        *scales,
        NO_WINDOW if window is None else window,
        split_target(config, kv_heads, current_gpu().sms),
        scale,
    )


def warmup(
    kv_heads: int,
    max_batch: int = MAX_BATCH,
    fp8: bool = False,
    pdl: bool = True,
    early_reads: bool = False,
) -> None:
    """Compile every variant that batches up to ``max_batch`` may pick.

    Nothing is launched.
    """
    spec = DecodeSpec(fp8, pdl, pdl and early_reads)
    batches = range(1, max_batch + 1)
    for config in {_config(b, kv_heads, w) for b in batches for w in (False, True)}:
        decode_variant(spec, config)


def _config(batch: int, kv_heads: int, windowed: bool) -> DecodeConfig:
    return pick_config(batch, kv_heads, current_gpu().sms, windowed)


def _shared_workspace(device: torch.device, kv_heads: int) -> DecodeWorkspace:
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (device, stream, kv_heads)
    if key not in _workspaces:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a graph is being captured and this stream has no decode workspace: "
                "give one, or call flint_decode_attention once before"
            )
        sms = current_gpu().sms
        _workspaces[key] = DecodeWorkspace(MAX_BATCH, kv_heads, sms, device)
    return _workspaces[key]


def _one_scale(name: str, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None or scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"{name} must be one FP32 value for an E4M3 cache")
    return scale.view(1)


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
) -> tuple[int, int]:
    """Batch and KV heads of consistent arguments."""
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * HEAD_DIM:
        raise ValueError(
            "kv_cache must be [blocks, KV heads, page, 256], got "
            f"{tuple(kv_cache.shape)}"
        )
    if kv_cache.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"kv_cache must be BF16 or E4M3, got {kv_cache.dtype}")
    page_bytes = 16 // kv_cache.element_size()
    if kv_cache.stride(3) != 1 or any(s % page_bytes for s in kv_cache.stride()[:3]):
        raise ValueError(
            "kv_cache must have unit inner stride and others of whole 16 bytes, got "
            f"{kv_cache.stride()}"
        )
    if kv_cache.shape[2] == 0 or kv_cache.shape[2] % TILE_KEYS:
        raise ValueError(
            f"a page must be a multiple of {TILE_KEYS} keys, got {kv_cache.shape[2]}"
        )
    batch, heads = seq_lens.numel(), GROUP * kv_cache.shape[1]
    shape = (batch, heads, HEAD_DIM)
    for name, x in (("q", q), ("out", out)):
        if x.dtype != torch.bfloat16 or x.shape != shape:
            raise ValueError(
                f"{name} must be BF16 {shape} ({GROUP} query heads a KV head), got "
                f"{x.dtype} {tuple(x.shape)}"
            )
        if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8:
            raise ValueError(f"{name} must have rows of whole 16 bytes")
    for name, x in (("q", q), ("out", out), ("kv_cache", kv_cache)):
        if x.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")
    if seq_lens.dtype != torch.int32 or not seq_lens.is_contiguous():
        raise ValueError("seq_lens must be contiguous int32 [B]")
    if (
        block_tables.dtype != torch.int32
        or block_tables.dim() != 2
        or block_tables.shape[0] != batch
        or block_tables.stride(1) != 1
    ):
        raise ValueError(f"block_tables must be int32 [{batch}, pages]")
    if sinks.dtype != torch.float32 or sinks.shape != (heads,):
        raise ValueError(f"sinks must be FP32 [{heads}]")
    return batch, kv_cache.shape[1]
