# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's attention, on its own kernels where they apply and on stock layers elsewhere.

Either way vLLM selects the attention backend, and the KV cache has that backend's
layout. ``attention_path`` says what the kernels serve.
"""

from typing import Any

import torch
from torch import nn

from vllm.config import CacheConfig, get_current_vllm_config
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import _encode_layer_name

from .attention_ops import ATTENTION_SUFFIX, split_graphs_at_attention
from .attention_path import (
    NOT_A_DECODE,
    PROFILING,
    DecodeBatch,
    decode_batch,
    facts_of,
    why_not_decode,
    why_not_kernels,
)
from .backend_attention import BackendAttention
from .configs import FULL_ATTENTION, FlintConfig
from .ops.decode_attention import (
    MAX_BATCH,
    DecodeWorkspace,
    flint_decode_attention,
)
from .ops.decode_attention import warmup as warmup_decode
from .ops.device import current_gpu
from .ops.gemv_weight import GemvWeight
from .ops.linear import gemv_weight
from .ops.norm import add_rms_norm
from .ops.qk_norm_rope import qk_norm_rope_cache
from .ops.qkv_fused import qkv_of_layer, warmup_qkv

logger = init_logger(__name__)


class FlintAttention(nn.Module):
    """GQA attention with a learned sink a head.

    Sliding-window layers use RoPE; full-attention layers use no positional encoding.

    Attributes:
        uses_kernels: whether ``forward_fused`` is to be called instead of ``forward``.
        decodes: whether decode batches go to Flint's decode attention.

    """

    def __init__(
        self,
        config: FlintConfig,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        if config.num_attention_heads % tp_size:
            raise ValueError(
                f"Flint has {config.num_attention_heads} query heads, which tensor "
                f"parallel size {tp_size} does not divide"
            )
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // tp_size
        self.num_kv_heads = max(1, config.num_key_value_heads // tp_size)
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim

        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.sinks = nn.Parameter(torch.empty(self.num_heads), requires_grad=False)
        set_weight_attrs(self.sinks, {"weight_loader": sharded_weight_loader(0)})

        layer_type = config.layer_types[extract_layer_index(prefix)]
        is_sliding = layer_type != FULL_ATTENTION
        self.window = config.sliding_window if is_sliding else None
        self.attn = BackendAttention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=self.window,
            prefix=f"{prefix}{ATTENTION_SUFFIX}",
            sinks=self.sinks,
        )

        facts = facts_of(
            self.attn, self.num_heads, self.num_kv_heads, config.rope_parameters
        )
        reason = why_not_kernels(facts)
        self.uses_kernels = reason is None
        # The kernels take the RoPE table and the sinks in FP32.
        self.rotary_emb = (
            get_rope(
                self.head_dim,
                max_position=config.max_position_embeddings,
                rope_parameters=config.rope_parameters,
                dtype=torch.float32 if self.uses_kernels else None,
            )
            if is_sliding
            else None
        )
        vllm_config = get_current_vllm_config()
        self.decodes = False
        self._workspace: DecodeWorkspace | None = None
        self._max_decode_batch = min(
            MAX_BATCH, vllm_config.scheduler_config.max_num_seqs
        )
        # These need a kernel without PDL in the forward before this layer, which the
        # first rank's embedding is, and no connector that may still write keys. And no
        # request may hit a cached block whose last key is written in the same step:
        # vLLM caches blocks when it schedules their tokens, which async scheduling
        # does not know yet, but for a prompt's.
        self._early_reads = (
            get_pp_group().is_first_rank
            and vllm_config.kv_transfer_config is None
            and vllm_config.scheduler_config.async_scheduling is True
        )
        self._qkv_weight: GemvWeight | None = None
        self._max_fused_tokens = 0
        if reason is not None:
            logger.info_once("Flint's attention kernels are not used: %s", reason)
            return
        self.sinks.data = self.sinks.data.float()
        compilation = vllm_config.compilation_config
        compilation.static_forward_context[prefix] = self
        split_graphs_at_attention(compilation)
        self.decodes = (reason := why_not_decode(facts)) is None
        if reason is not None:
            logger.info_once("Flint's decode attention is not used: %s", reason)

    def new_workspace(self) -> DecodeWorkspace:
        """Allocate what the decode attention of layers like this one shares."""
        return DecodeWorkspace(
            self._max_decode_batch,
            self.num_kv_heads,
            current_gpu().sms,
            self.sinks.device,
        )

    def prepare_kernels(
        self, norm_eps: float, workspace: DecodeWorkspace | None
    ) -> None:
        """Compile what this layer may launch, once its weights are processed.

        Args:
            norm_eps: of the norm before this layer.
            workspace: of a layer like this one; None where no layer ``decodes``.

        """
        if not self.uses_kernels:
            return
        if self.decodes:
            self._workspace = workspace
            warmup_decode(
                self.num_kv_heads,
                self._max_decode_batch,
                fp8=self.attn.kv_cache_dtype.startswith("fp8"),
                early_reads=self._early_reads,
            )
        weight = gemv_weight(self.qkv_proj)
        if isinstance(weight, GemvWeight):
            self._qkv_weight = weight
            self._max_fused_tokens = warmup_qkv(weight.shape, norm_eps)
            reason = "another linear kernel is faster for the layer's shape"
        else:
            reason = weight
        if self._max_fused_tokens == 0:
            logger.info_once("Flint's fused QKV is not used: %s", reason)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Attend.

        Args:
            positions: Position of each token, [num_tokens] int64.
            hidden_states: Normed residual stream, [num_tokens, hidden_size].

        Returns:
            The attention block's contribution, [num_tokens, hidden_size].

        """
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output

    def forward_fused(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        norm: nn.Module,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, norm and attend, on Flint's kernels.

        Args:
            positions: Position of each token, [num_tokens] int64.
            hidden_states: The last block's output, [num_tokens, hidden_size].
            residual: The residual stream before it.
            norm: The RMSNorm before this layer.

        Returns:
            The attention block's contribution and the new residual stream, both
            [num_tokens, hidden_size].

        """
        name = _encode_layer_name(self.attn.layer_name)
        q, residual = torch.ops.vllm.flint_qkv(
            hidden_states,
            residual,
            norm.weight,
            norm.variance_epsilon,
            positions,
            self.q_size,
            name,
        )
        mixed = torch.empty_like(q)
        torch.ops.vllm.flint_attention_with_output(q, mixed, name)
        output, _ = self.o_proj(mixed)
        return output, residual

    def project(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, norm, project, norm and rotate q and k, and write k and v to the cache.

        Args:
            x: The last block's output, BF16 [num_tokens, hidden_size].
            residual: The residual stream before it.
            norm_weight: Of the norm before this layer.
            eps: Of the same.
            positions: [num_tokens].
            kv_cache: vLLM's [pages, num_kv_heads, page size, 2 * head_dim]; of any
                shape in a profiling run.
            slot_mapping: [num_tokens], None in a profiling run.

        Returns:
            q, [num_tokens, num_heads, head_dim], and the new residual stream.

        """
        k_cache = v_cache = None
        if slot_mapping is not None and kv_cache.numel():
            k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        table = None if self.rotary_emb is None else self.rotary_emb.cos_sin_cache
        scales = {"k_scale": self.attn._k_scale, "v_scale": self.attn._v_scale}
        heads = (self.num_heads, self.num_kv_heads)
        cached = (table, positions, k_cache, v_cache, slot_mapping)
        q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        qk_eps = self.q_norm.variance_epsilon
        weight = self._qkv_weight
        if weight is not None and x.shape[0] <= self._max_fused_tokens:
            return qkv_of_layer(
                x,
                residual,
                norm_weight,
                eps,
                weight,
                q_weight,
                k_weight,
                qk_eps,
                *cached,
                *heads,
                **scales,
                launch_dependents=True,
            )
        normed, new_residual = add_rms_norm(x, residual, norm_weight, eps)
        qkv, _ = self.qkv_proj(normed)
        q = qk_norm_rope_cache(
            qkv,
            positions,
            q_weight,
            k_weight,
            qk_eps,
            table,
            k_cache,
            v_cache,
            slot_mapping,
            *heads,
            self.head_dim,
            launch_dependents=True,
            **scales,
        )
        return q, new_residual

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Attend to the cache, on the decode kernel or the backend.

        Args:
            query: BF16 [num_tokens, num_heads * head_dim].
            kv_cache: vLLM's.
            metadata: The backend's, None in a profiling run.
            output: Where to write, like `query`.

        """
        query = query.view(-1, self.num_heads, self.head_dim)
        output = output.view(query.shape)
        batch: DecodeBatch | str = NOT_A_DECODE
        if self.decodes:
            backend = self.attn.attn_backend.get_name()
            batch = decode_batch(backend, metadata, self._max_decode_batch)
        if isinstance(batch, DecodeBatch):
            return self._decode(query, kv_cache, batch, output)
        if batch not in (NOT_A_DECODE, PROFILING):
            logger.info_once(
                "Flint's decode attention leaves a batch to the backend: %s", batch
            )
        layer = self.attn
        # The backends take k and v from the cache; these only have their shape.
        unused = query[:, : self.num_kv_heads]
        if layer.query_quant is not None and layer.impl.supports_quant_query_input:
            flat, _ = layer.query_quant(query.flatten(1), layer._q_scale)
            query = flat.view(query.shape)
        layer.impl.forward(
            layer, query, unused, unused, kv_cache, metadata, output=output
        )

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: DecodeBatch,
        output: torch.Tensor,
    ) -> None:
        rows = batch.seq_lens.shape[0]
        scales = {}
        if self.attn.kv_cache_dtype.startswith("fp8"):
            scales = {"k_scale": self.attn._k_scale, "v_scale": self.attn._v_scale}
        flint_decode_attention(
            query[:rows],
            kv_cache,
            batch.block_tables,
            batch.seq_lens,
            self.sinks,
            self.window,
            self.attn.impl.scale,
            output[:rows],
            workspace=self._workspace,
            early_reads=self._early_reads,
            **scales,
        )
