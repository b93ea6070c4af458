# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which layers and which batches Flint's attention kernels serve, and why not others.

Nothing here needs a GPU. What the kernels do not serve, stock layers and the attention
backend that vLLM selected do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention

from .kernel_switch import cuda_capability, why_not_gpu, why_off
from .ops.gemv.variants import missing_compiler

# Names in VLLM_DISABLED_KERNELS.
ATTENTION_KERNELS = "FlintAttention"
DECODE_KERNEL = "FlintDecodeAttention"
# What the decode kernel is written for: channels of a head, query heads a key head.
_DECODE_HEAD_DIM, _DECODE_GROUP = 128, 8
# Rotation of all channels, NeoX style: what these alone describe.
_ROPE_PARAMETERS = {"rope_type", "rope_theta"}
_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")

# Why the backend serves a batch, where that is as it should be.
NOT_A_DECODE = "it has more than one token of a request"
PROFILING = "it is a profiling run"


@dataclass(frozen=True)
class AttentionFacts:
    """What a layer's kernels depend on.

    Attributes:
        off: why the engine is not to run on these kernels, or None.
        capability: compute capability times ten; None where there is no CUDA GPU.
        missing_compiler: why CuTe DSL cannot compile here, or None.
        backend: name of the attention backend that vLLM selected.
        dtype: the model's.
        cache_dtype: the KV cache's, as vLLM names it.
        num_heads: query heads on this rank.
        num_kv_heads: key heads on this rank.
        head_dim: channels of a head.
        rope_parameters: the config's.
        context_parallel: whether a request's keys lie on several ranks.
        microbatches: whether two batches run at the same time.
        scales_by_head: whether each key head of an FP8 cache has a scale of its own.
        batch_invariant: whether VLLM_BATCH_INVARIANT is set.
        disabled: what VLLM_DISABLED_KERNELS names.

    """

    off: str | None
    capability: int | None
    missing_compiler: str | None
    backend: str
    dtype: torch.dtype
    cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_parameters: Mapping[str, Any]
    context_parallel: bool = False
    microbatches: bool = False
    scales_by_head: bool = False
    batch_invariant: bool = False
    disabled: tuple[str, ...] = ()


def facts_of(
    attn: Attention,
    num_heads: int,
    num_kv_heads: int,
    rope_parameters: Mapping[str, Any],
) -> AttentionFacts:
    """Gather what the kernels of a layer depend on, as the engine's config is set.

    Args:
        attn: vLLM's attention of the layer.
        num_heads: query heads on this rank.
        num_kv_heads: key heads on this rank.
        rope_parameters: the config's.

    """
    vllm_config = get_current_vllm_config()
    parallel = vllm_config.parallel_config
    key_scale = getattr(attn, "k_scale", None)
    return AttentionFacts(
        off=why_off(vllm_config, "attention"),
        capability=cuda_capability(),
        missing_compiler=missing_compiler(),
        backend=attn.attn_backend.get_name(),
        dtype=torch.get_default_dtype(),
        cache_dtype=attn.kv_cache_dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=attn.head_size,
        rope_parameters=rope_parameters,
        context_parallel=parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        microbatches=parallel.use_ubatching,
        scales_by_head=key_scale is not None and key_scale.numel() > 1,
        batch_invariant=envs.VLLM_BATCH_INVARIANT,
        disabled=tuple(envs.VLLM_DISABLED_KERNELS),
    )


def why_not_kernels(facts: AttentionFacts) -> str | None:
    """Why a layer must be served by stock operators, or None."""
    if (reason := why_not_gpu(facts.capability)) is not None:
        return reason
    if facts.off is not None:
        return facts.off
    if ATTENTION_KERNELS in facts.disabled:
        return f"{ATTENTION_KERNELS} is in VLLM_DISABLED_KERNELS"
    if facts.batch_invariant:
        return "VLLM_BATCH_INVARIANT is set"
    if facts.missing_compiler is not None:
        return facts.missing_compiler
    if facts.backend not in _READERS:
        return f"they do not know how {facts.backend} lays out its KV cache"
    if facts.dtype != torch.bfloat16:
        return f"they require bfloat16, and the model's dtype is {facts.dtype}"
    if facts.cache_dtype not in _CACHE_DTYPES:
        return f"they do not serve a KV cache of {facts.cache_dtype}"
    if facts.scales_by_head:
        return "they take one scale for all heads of an FP8 KV cache"
    if facts.microbatches:
        return "two microbatches at the same time would share what they write to"
    if facts.context_parallel:
        return "context parallelism spreads the KV cache over several ranks"
    unknown = facts.rope_parameters.keys() - _ROPE_PARAMETERS
    if unknown or facts.rope_parameters.get("rope_type", "default") != "default":
        return f"they do not know RoPE with {dict(facts.rope_parameters)}"
    return None


def why_not_decode(facts: AttentionFacts) -> str | None:
    """Why decode batches of a layer with kernels go to the backend, or None."""
    if DECODE_KERNEL in facts.disabled:
        return f"{DECODE_KERNEL} is in VLLM_DISABLED_KERNELS"
    group = facts.num_heads // facts.num_kv_heads
    if (facts.head_dim, group) != (_DECODE_HEAD_DIM, _DECODE_GROUP):
        return (
            f"it takes heads of {_DECODE_HEAD_DIM} and {_DECODE_GROUP} query heads a "
            f"key head, and these are {facts.head_dim} and {group}"
        )
    return None


@dataclass(frozen=True)
class DecodeBatch:
    """One token of each request, in the first rows of the batch.

    Attributes:
        block_tables: int32 [rows, pages], on the device.
        seq_lens: int32 [rows], the current token included; 0 for padding.

    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor


def decode_batch(backend: str, metadata: Any, max_batch: int) -> DecodeBatch | str:
    """What the decode kernel needs of a batch, or why the backend serves it.

    CUDA graphs of mixed batches are captured with a longest query of as many tokens as
    the batch has, so what is decided at capture holds at every replay.

    Args:
        backend: name of the attention backend.
        metadata: what that backend's builder made, or None in a profiling run.
        max_batch: how many requests the decode kernel takes.

    """
    if metadata is None:
        return PROFILING
    batch = _READERS[backend](metadata)
    if isinstance(batch, DecodeBatch) and batch.seq_lens.shape[0] > max_batch:
        return f"it has more than {max_batch} requests"
    return batch


def _from_query_lens(metadata: Any) -> DecodeBatch | str:
    """FlashAttention and Triton describe a batch by its longest query."""
    if metadata.max_query_len != 1:
        return NOT_A_DECODE
    if metadata.causal is not True:
        return "attention is not causal"
    return _rows(metadata, metadata.block_table, metadata.seq_lens)


def _from_flashinfer(metadata: Any) -> DecodeBatch | str:
    """FlashInfer splits a batch into decodes and prefills."""
    decode = metadata.decode
    if metadata.num_prefills or decode is None:
        return NOT_A_DECODE
    if not hasattr(decode, "block_tables"):
        return "FlashInfer's own decode keeps no block table on the device"
    if decode.q_len_per_req != 1 or decode.q_cu_seq_lens is not None:
        return NOT_A_DECODE
    if metadata.causal is not True:
        return "attention is not causal"
    return _rows(metadata, decode.block_tables, decode.seq_lens)


def _rows(
    metadata: Any, block_tables: torch.Tensor, seq_lens: torch.Tensor
) -> DecodeBatch:
    """Without the padding, which may be of tokens or of requests."""
    rows = min(metadata.num_actual_tokens, seq_lens.shape[0])
    return DecodeBatch(block_tables[:rows], seq_lens[:rows])


_READERS: dict[str, Callable[[Any], DecodeBatch | str]] = {
    "FLASH_ATTN": _from_query_lens,
    "FLASHINFER": _from_flashinfer,
    "TRITON_ATTN": _from_query_lens,
}
