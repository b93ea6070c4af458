# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's NVFP4 weight-only linear kernel on Flint's GEMV."""

import torch

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import (
    pad_nvfp4_weight_for_cutlass,
    swizzle_blockscale,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.models.flint.ops import dense, fragments
from vllm.models.flint.ops.compile_key import tell_compile_cache
from vllm.models.flint.ops.gemv.config import FRAGMENT_BLOCK, Layout
from vllm.models.flint.ops.gemv.tables import Shape
from vllm.models.flint.ops.gemv.variants import missing_compiler, report_compilation
from vllm.models.flint.ops.gemv_weight import GemvWeight, KeptWeight
from vllm.models.flint.ops.nvfp4_gemv import (
    gemv_of_layer,
    max_tokens,
    tuned,
    warmup_for,
)
from vllm.platforms import current_platform
from vllm.utils.flashinfer import flashinfer_prepare_bf16_fp4_weights

from .flashinfer import FlashInferCuteDslNvFp4W4A16LinearKernel

logger = init_logger(__name__)

# Compute capabilities whose FlashInfer GEMM reads the bytes that the GEMV reads.
_FLASHINFER_PARTNER = (100, 103)
# K must be a multiple of this; zeros make up for what is missing.
_ALIGNMENT = 64


class FlintNvFp4LinearKernel(FlashInferCuteDslNvFp4W4A16LinearKernel):
    """BF16 x NVFP4: a GEMV for few tokens, a partner GEMM on the same bytes for more.

    On SM90 weights take the order of quack's GEMM where quack is installed; otherwise
    they keep the ModelOpt layout, with block scales in the 128x4 swizzle. A
    language-model head gives FP32 logits.
    """

    pdl = True

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        """Return whether the GEMV and its partner can run, or why not."""
        if compute_capability is None:
            capability = current_platform.get_device_capability()
            if not current_platform.is_cuda() or capability is None:
                return False, "Flint's NVFP4 GEMV requires CUDA"
            compute_capability = capability.to_int()
        if compute_capability not in (90, 100, 103, 120, 121):
            return False, "Flint's NVFP4 GEMV requires sm_90, sm_100, sm_103 or sm_12x"
        reason = missing_compiler()
        if reason is not None:
            return False, f"Flint's NVFP4 GEMV cannot be compiled: {reason}"
        if compute_capability in _FLASHINFER_PARTNER:
            return super().is_supported(compute_capability)
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Bring the weight into its layout, and compile what it may launch."""
        if (config := get_current_vllm_config_or_none()) is not None:
            tell_compile_cache(config)
        layer.flint_layout = _layout()
        global_scale = layer.weight_global_scale.data.reshape(1)
        weight, scale = layer.weight.data, layer.weight_scale.data
        layer.flint_partner_scale = None
        if layer.flint_layout == "fragments":
            weight, scale = fragments.to_fragments(weight, scale)
            n, k = (FRAGMENT_BLOCK * size for size in weight.shape[:2])
        else:
            weight, _ = pad_nvfp4_weight_for_cutlass(weight, alignment=_ALIGNMENT)
            scale = swizzle_blockscale(scale)
            n, k = weight.shape[0], 2 * weight.shape[1]
            if _capability() in _FLASHINFER_PARTNER:
                layer.flint_partner_scale = _flashinfer_view(
                    weight, scale, global_scale
                )
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.weight_global_scale = torch.nn.Parameter(
            global_scale, requires_grad=False
        )
        layer.flint_rows = n
        layer.flint_padding = k - layer.input_size_per_partition
        layer.flint_fp32_out = isinstance(layer, ParallelLMHead)
        fragment_order = layer.flint_layout == "fragments"
        layer.flint_kept_weight = KeptWeight(
            GemvWeight.fragments if fragment_order else GemvWeight.row_major
        )
        # Plain numbers: torch.compile cannot trace the look-up.
        layer.flint_max_tokens = max_tokens(n, k, layout=layer.flint_layout)
        self._compile(layer, Shape(n, k, layout=layer.flint_layout))
        layer.flint_max_tokens_silu = None
        if tuned(n, k, silu_mul=True, layout=layer.flint_layout):
            layer.flint_max_tokens_silu = max_tokens(
                n, k, silu_mul=True, layout=layer.flint_layout
            )
            self._compile(layer, Shape(n, k, True, layout=layer.flint_layout))

    def _compile(self, layer: torch.nn.Module, shape: Shape) -> None:
        dtype = torch.float32 if layer.flint_fp32_out else torch.bfloat16
        warmup_for(shape, self.pdl, dtype)
        if shape.layout == "fragments":
            fragments.compile_partner(
                layer.weight,
                layer.weight_scale,
                layer.weight_global_scale,
                shape.silu_mul,
                dtype,
                self.pdl,
            )

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map [..., K] to [..., N]."""
        out = self._linear(layer, x, silu_mul=False)
        n = layer.output_size_per_partition
        if layer.flint_rows != n:
            # Ranks' logits are gathered, which takes no rows with gaps.
            out = out[:, :n].contiguous()
        if bias is not None:
            out = out + bias
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], n)

    def gate_up_silu_mul(
        self, layer: torch.nn.Module, x: torch.Tensor
    ) -> torch.Tensor | None:
        """Map [..., K] to silu(gate) * up, or None where that is not tuned."""
        n = layer.flint_rows
        if n != layer.output_size_per_partition or layer.flint_max_tokens_silu is None:
            return None
        out = self._linear(layer, x, silu_mul=True)
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], n // 2)

    def _linear(
        self, layer: torch.nn.Module, x: torch.Tensor, silu_mul: bool
    ) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            raise ValueError(
                f"Flint's NVFP4 GEMV requires BF16 input, got {x.dtype}. Serve with "
                "--dtype bfloat16, or set "
                "VLLM_DISABLED_KERNELS=FlintNvFp4LinearKernel."
            )
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if layer.flint_padding:
            rows = torch.nn.functional.pad(rows, (0, layer.flint_padding))
        tensors = (layer.weight, layer.weight_scale, layer.weight_global_scale)
        most = layer.flint_max_tokens_silu if silu_mul else layer.flint_max_tokens
        # An operator costs as much as a launch, and only torch.compile needs one.
        traced = torch.compiler.is_compiling()
        if not traced and rows.shape[0] <= most:
            report_compilation()
            dtype = torch.float32 if layer.flint_fp32_out else torch.bfloat16
            weight = layer.flint_kept_weight.of(*tensors)
            return gemv_of_layer(rows, weight, silu_mul, self.pdl, dtype)
        args = (
            rows,
            *tensors,
            silu_mul,
            layer.flint_fp32_out,
            self.pdl,
            most,
        )
        if layer.flint_layout == "fragments":
            if traced:
                return torch.ops.vllm.flint_fragment_linear(*args)
            return fragments.fragment_linear(*args)
        if traced:
            return torch.ops.vllm.flint_nvfp4_linear(*args, layer.flint_partner_scale)
        return dense.nvfp4_linear(*args, layer.flint_partner_scale)


def _capability() -> int:
    capability = current_platform.get_device_capability()
    assert capability is not None
    return capability.to_int()


def _layout() -> Layout:
    """The one place that chooses how weights lie, and so which GEMM reads them."""
    if _capability() != 90:
        return "row_major"
    reason = fragments.missing_quack()
    if reason is None:
        return "fragments"
    logger.warning_once(
        "Flint's NVFP4 linears dequantize their weights at larger batches: %s", reason
    )
    return "row_major"


def _flashinfer_view(
    weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """The scales as FlashInfer's GEMM wants them, without a second copy.

    Raises:
        RuntimeError: FlashInfer moved the weight or its scales to another layout.

    """
    prepared, view, _ = flashinfer_prepare_bf16_fp4_weights(
        weight, scale, global_scale, backend="cute-dsl"
    )
    same = (
        prepared.data_ptr() == weight.data_ptr()
        and view.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr()
    )
    if not same:
        raise RuntimeError(
            "This FlashInfer keeps NVFP4 weights in a layout that Flint's GEMV cannot "
            "read. Install the FlashInfer that this vLLM asks for, or set "
            "VLLM_DISABLED_KERNELS=FlintNvFp4LinearKernel."
        )
    return view
