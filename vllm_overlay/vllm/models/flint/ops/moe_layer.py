# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's kernels as the quantization methods of vLLM's routed experts.

They take over from the method that vLLM chose, after it made the parameters and before
it processes them, so loading and sharding stay vLLM's. Each reads one copy of the
weights, whatever the count of tokens.
"""

from abc import ABC, abstractmethod

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from .experts.dispatch import (
    BF16_DECODE_MAX_TOKENS,
    DECODE_MAX_TOKENS,
    flint_moe,
    flint_moe_bf16_decode,
)
from .experts.grouped import warmup_grouped
from .experts.weights import FlintMoEWeights, LLMoEWeights
from .moe_gemv import warmup_experts
from .nvfp4_gemv import decode_form

__all__ = [
    "FlintBf16DecodeMoE",
    "FlintExperts",
    "FlintNvfp4Experts",
    "install_flint_experts",
]

logger = init_logger(__name__)


class FlintExperts(ABC):
    """What a sparse block asks of its experts' method.

    Attributes:
        weights: the experts, in the layer's own memory, once they are processed.
        max_decode_tokens: for how many tokens ``decode`` may be called.

    """

    weights: FlintMoEWeights
    max_decode_tokens: int

    def _keep(self, weights: FlintMoEWeights) -> None:
        """Give the kernels the weights that were processed first.

        A reload processes others, which vLLM copies over these and then drops: here
        they would stay as a second copy, which no captured graph reads.
        """
        if not hasattr(self, "weights"):
            self.weights = weights

    def warmup(self, fused: LLMoEWeights | None, top_k: int) -> None:
        """Compile what may be launched.

        Args:
            fused: the layer's weights, where its shared expert joins the launches.
            top_k: experts of a token.

        """
        warmup_experts(
            self.weights,
            None if fused is None else fused.shared_gate_up,
            None if fused is None else fused.shared_down,
            top_k,
            self.max_decode_tokens,
        )

    @abstractmethod
    def decode(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        fused: LLMoEWeights,
    ) -> torch.Tensor:
        """Mix the experts of a few tokens, the shared one in the same launches.

        Args:
            x: BF16 [M, H], M <= ``max_decode_tokens``.
            ids: int32 [M, top_k].
            weights: FP32 [M, top_k], rounded to BF16.
            fused: the layer's weights.

        Returns:
            BF16 [M, H].

        """

    @abstractmethod
    def mix(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """Mix the routed experts of any count of tokens, and add the shared one's.

        Args:
            layer: the experts.
            x: BF16 [M, H].
            ids: int32 [M, top_k].
            weights: FP32 [M, top_k], rounded to BF16.
            shared: the shared expert's output, BF16 [M, H]; None adds nothing.

        Returns:
            BF16 [M, H].

        """


class FlintModelOptNvfp4Experts(FlintExperts, ModelOptNvFp4FusedMoE):
    """NVFP4 experts on Flint's kernels, for any count of tokens.

    vLLM's weight loader knows ModelOpt's tensors by "ModelOpt" in the class's name.
    """

    supports_pre_processed_weights = False
    max_decode_tokens = DECODE_MAX_TOKENS

    def warmup(self, fused: LLMoEWeights | None, top_k: int) -> None:
        """Compile what any count of tokens may launch; see ``FlintExperts.warmup``."""
        super().warmup(fused, top_k)
        warmup_grouped(self.weights, top_k, shared=True)

    @property
    def is_monolithic(self) -> bool:
        """Never: vLLM's router selects the experts."""
        return False

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Say that activations stay as they are; no kernel of vLLM's asks for more."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Swizzle block scales; pack codes in place if the GPU decodes in integers.

        Raises:
            ValueError: an expert's gate and up differ in their global scale.

        """
        scale_2 = layer.w13_weight_scale_2.data
        _check_global_scales(layer.layer_name, scale_2)
        weights = FlintMoEWeights.from_modelopt(
            layer.w13_weight.data,
            layer.w13_weight_scale.data,
            scale_2[:, 0].contiguous(),
            layer.w2_weight.data,
            layer.w2_weight_scale.data,
            layer.w2_weight_scale_2.data,
        )
        replace_parameter(layer, "w13_weight_scale", weights.w1_scale)
        replace_parameter(layer, "w13_weight_scale_2", weights.alpha1)
        replace_parameter(layer, "w2_weight_scale", weights.w2_scale)
        # GPUs that decode in integers decode packed codes faster.
        self._keep(weights.packed() if decode_form() == "mul" else weights)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Mix the experts that vLLM's router selected."""
        rounded = topk_weights.bfloat16().float()
        return self.mix(layer, x, topk_ids.int(), rounded, None)

    def decode(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        fused: LLMoEWeights,
    ) -> torch.Tensor:
        """See ``FlintExperts.decode``."""
        return flint_moe(x, (ids, weights), self.weights, fused)

    def mix(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``FlintExperts.mix``."""
        return flint_moe(x, (ids, weights), self.weights, shared_out=shared)


FlintNvfp4Experts = FlintModelOptNvfp4Experts


class FlintBf16DecodeMoE(FlintExperts, UnquantizedFusedMoEMethod):
    """BF16 experts on Flint's kernels for a few tokens, on vLLM's MoE for more."""

    max_decode_tokens = BF16_DECODE_MAX_TOKENS

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Prepare vLLM's MoE, which leaves the weights as they are."""
        super().process_weights_after_loading(layer)
        w1, w2 = layer.w13_weight.data, layer.w2_weight.data
        self._keep(FlintMoEWeights(w1, None, None, w2, None, None))

    def decode(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        fused: LLMoEWeights,
    ) -> torch.Tensor:
        """See ``FlintExperts.decode``."""
        return flint_moe_bf16_decode(x, (ids, weights), self.weights, fused)

    def mix(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``FlintExperts.mix``."""
        if x.shape[0] <= self.max_decode_tokens:
            routed = flint_moe_bf16_decode(x, (ids, weights), self.weights)
        else:
            routed = self.apply(layer, x, weights, ids, None, None)
        return routed if shared is None else routed + shared


def install_flint_experts(layer: RoutedExperts) -> None:
    """Put Flint's method in the place of the one that vLLM chose.

    Args:
        layer: routed experts with parameters that are not loaded yet, which
            ``moe_path.why_not_kernels`` has nothing against.

    """
    chosen = layer.quant_method
    method: ModelOptNvFp4FusedMoE | UnquantizedFusedMoEMethod
    if isinstance(chosen, ModelOptNvFp4FusedMoE):
        method = FlintNvfp4Experts(chosen.quant_config, layer.moe_config)
        for scale in (layer.w13_weight_scale_2, layer.w2_weight_scale_2):
            # Random ones would differ between gate and up.
            set_weight_attrs(scale, {"dummy_weight_value": 1e-3})
    else:
        method = FlintBf16DecodeMoE(layer.moe_config)
    layer._replace_quant_method(method)
    logger.info_once(
        "Flint's kernels serve the routed experts in place of the backend above"
    )


def _check_global_scales(layer_name: str, scale_2: torch.Tensor) -> None:
    """Refuse FP32 [E, 2] scales of gate and up that differ within an expert."""
    unequal = (scale_2[:, 0] != scale_2[:, 1]).nonzero()
    if unequal.numel() == 0:
        return
    expert = int(unequal[0])
    gate, up = scale_2[expert].tolist()
    name = f"{layer_name}.{expert}"
    raise ValueError(
        f"{name}.gate_proj.weight_scale_2 is {gate!r} but "
        f"{name}.up_proj.weight_scale_2 is {up!r}: gate and up of an expert need one "
        "global scale. Quantize the checkpoint again with equal scales for fused "
        "projections."
    )
