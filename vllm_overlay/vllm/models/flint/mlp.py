# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's MLPs, dense and sparse.

A sparse one runs on Flint's own kernels where they apply and on vLLM's MoE elsewhere;
``moe_path`` says what the kernels serve.
"""

import torch
from torch import nn
from torch.nn import functional

from vllm.config import VllmConfig
from vllm.distributed import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, GateLinear
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.models.utils import sequence_parallel_chunk
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name

from . import moe_ops  # noqa: F401  (registers the operator)
from .moe_path import facts_of, why_not_kernels
from .ops.dense import fp32_split_k
from .ops.gemv.variants import report_compilation
from .ops.linear import gate_up_silu_mul
from .ops.moe import (
    LL_MOE_MAX_TOKENS,
    LLMoEWeights,
    flint_moe_ll,
    ll_weights_from_layers,
    topk_sigmoid,
)
from .ops.moe_gemv import why_not
from .ops.moe_layer import FlintExperts, install_flint_experts
from .ops.norm import add_rms_norm

logger = init_logger(__name__)


class FlintMLP(nn.Module):
    """SwiGLU MLP: a dense layer's, or the shared expert of a sparse one."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        quant_config: QuantizationConfig | None = None,
        reduce_results: bool = True,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=False,
            quant_config=quant_config,
            reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        act = gate_up_silu_mul(self.gate_up_proj, x)
        if act is None:
            gate_up, _ = self.gate_up_proj(x)
            act = self.act_fn(gate_up)
        output, _ = self.down_proj(act)
        return output


class FlintSparseMoeBlock(nn.Module):
    """Sigmoid-routed experts plus a shared expert that is added in full.

    Attributes:
        uses_kernels: whether ``forward_fused`` is to be called instead of ``forward``.

    """

    _counter: torch.Tensor
    _router: torch.Tensor

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        parallel_config = vllm_config.parallel_config
        quant_config = vllm_config.quant_config
        if parallel_config.enable_eplb:
            raise ValueError("Flint does not support --enable-eplb; leave it out")
        self.is_sequence_parallel = parallel_config.use_sequence_parallel_moe
        self.top_k = config.num_experts_per_tok
        self.gate = GateLinear(
            config.hidden_size,
            config.num_experts,
            quant_config=None,
            prefix=f"{prefix}.gate",
        )
        self.shared_expert = FlintMLP(
            config.hidden_size,
            config.shared_expert_intermediate_size,
            quant_config=quant_config,
            # The runner reduces the routed and the shared output together.
            reduce_results=False,
            prefix=f"{prefix}.shared_expert",
        )
        # vLLM's CPU router knows sigmoid scores with grouped experts only; one group
        # of all experts is the same.
        one_group = 1 if current_platform.is_cpu() else None
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            scoring_func=config.router_score_function,
            use_grouped_topk=one_group is not None,
            num_expert_group=one_group,
            topk_group=one_group,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            is_sequence_parallel=self.is_sequence_parallel,
            gate=self.gate,
            shared_experts=self.shared_expert,
        )

        self._name = prefix
        self._reduces = parallel_config.tensor_parallel_size > 1
        self._fused: LLMoEWeights | None = None
        reason = why_not_kernels(facts_of(self.experts.routed_experts))
        self.uses_kernels = reason is None
        if reason is not None:
            logger.info_once("Flint's expert kernels are not used: %s", reason)
            return
        install_flint_experts(self.experts.routed_experts)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    @property
    def _method(self) -> FlintExperts:
        method = self.experts.routed_experts.quant_method
        assert isinstance(method, FlintExperts)
        return method

    def prepare_kernels(self, counter: torch.Tensor) -> None:
        """Compile what this layer may launch, once its weights are processed.

        Args:
            counter: of ``make_route_counter``, for layers that run one after the
                other.

        """
        if not self.uses_kernels:
            return
        self._counter = counter
        # Each use of vLLM's own parameter class goes through Python.
        self._router = self.gate.weight.data
        reason = self._fuse_shared_expert()
        if reason is not None:
            logger.info_once(
                "Flint's expert kernels leave the shared expert to its layers: %s",
                reason,
            )
        self._method.warmup(self._fused, self.top_k)

    def _fuse_shared_expert(self) -> str | None:
        """Let the shared expert join the routed ones' launches, or say why not."""
        shared, experts = self.shared_expert, self._method.weights
        fused = ll_weights_from_layers(
            self.gate, experts, shared.gate_up_proj, shared.down_proj
        )
        if isinstance(fused, str):
            return fused
        reason = why_not(experts, fused.shared_gate_up, fused.shared_down, self.top_k)
        if reason is None:
            self._fused = fused
        return reason

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        num_tokens = hidden_states.shape[0]
        if self.is_sequence_parallel:
            hidden_states = sequence_parallel_chunk(hidden_states)
        # The runner owns the gate, so it takes the hidden states as its logits.
        output = self.experts(hidden_states=hidden_states, router_logits=hidden_states)
        if self.is_sequence_parallel:
            output = tensor_model_parallel_all_gather(output, 0)[:num_tokens]
        return output

    def forward_fused(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, norm: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, norm, route and mix the experts, on Flint's kernels.

        Args:
            hidden_states: The attention's output, [num_tokens, hidden_size].
            residual: The residual stream before it.
            norm: The RMSNorm before this block.

        Returns:
            This block's contribution and the new residual stream, both
            [num_tokens, hidden_size].

        """
        output, residual = torch.ops.vllm.flint_sparse_mlp(
            hidden_states,
            residual,
            norm.weight,
            norm.variance_epsilon,
            _encode_layer_name(self._name),
        )
        if self._reduces:
            output = tensor_model_parallel_all_reduce(output)
        return output, residual

    def add_norm_and_mix(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``forward_fused`` does on one rank.

        Rows of padding may hold anything: a row has no part in another's answer.

        Args:
            x: The attention's output, BF16 [num_tokens, hidden_size].
            residual: The residual stream before it.
            norm_weight: Of the norm before this block.
            eps: Of the same.

        Returns:
            This rank's share of the block's contribution, and the new residual
            stream, both BF16 [num_tokens, hidden_size].

        """
        report_compilation()
        num_tokens, method, fused = x.shape[0], self._method, self._fused
        if num_tokens > method.max_decode_tokens:
            fused = None
        if fused is not None and num_tokens <= LL_MOE_MAX_TOKENS:
            return flint_moe_ll(
                x, residual, norm_weight, eps, fused, self.top_k, self._counter
            )
        normed, residual = add_rms_norm(x, residual, norm_weight, eps)
        with fp32_split_k():
            logits = functional.linear(normed, self._router)
        ids, weights = topk_sigmoid(logits, self.top_k)
        if fused is not None:
            return method.decode(normed, ids, weights, fused), residual
        layer, shared = self.experts.routed_experts, self.shared_expert(normed)
        return method.mix(layer, normed, ids, weights, shared), residual
