# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's linear layers."""

from typing import Any

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import _get_linear_backend
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.flint_gemv import FlintNvFp4LinearKernel
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

from .dense import bf16_linear
from .gemv.variants import report_compilation
from .gemv_weight import GemvWeight, KeptWeight
from .global_scales import check_merged_global_scales
from .nvfp4_gemv import gemv_of_layer, max_tokens, tuned, warmup

__all__ = [
    "FlintBf16LinearMethod",
    "FlintNvFp4LinearKernel",
    "check_merged_global_scales",
    "gate_up_silu_mul",
    "gemv_weight",
    "install_flint_dense_kernels",
]

logger = init_logger(__name__)


class FlintBf16LinearMethod(UnquantizedLinearMethod):
    """BF16 linear on Flint's GEMV where that is the fastest choice, else cuBLAS."""

    def __init__(self, pdl: bool = True) -> None:
        super().__init__()
        self.pdl = pdl

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Compile what this layer may launch; the weight stays as it is."""
        super().process_weights_after_loading(layer)
        n, k = layer.weight.shape
        layer.flint_kept_weight = KeptWeight(GemvWeight.bf16)
        # Plain numbers: torch.compile cannot trace the look-up.
        layer.flint_max_tokens = max_tokens(n, k, bf16=True)
        layer.flint_max_tokens_silu = max_tokens(n, k, silu_mul=True, bf16=True)
        for silu_mul in (False, True):
            if tuned(n, k, silu_mul, bf16=True):
                warmup(n, k, silu_mul, self.pdl, bf16=True)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map [..., K] to [..., N]."""
        if x.dtype != torch.bfloat16 or bias is not None:
            return super().apply(layer, x, bias)
        return self._linear(layer, x, silu_mul=False)

    def gate_up_silu_mul(
        self, layer: torch.nn.Module, x: torch.Tensor
    ) -> torch.Tensor | None:
        """Map [..., K] to silu(gate) * up, or None where that is not tuned."""
        if x.dtype != torch.bfloat16 or layer.flint_max_tokens_silu == 0:
            return None
        return self._linear(layer, x, silu_mul=True)

    def _linear(
        self, layer: torch.nn.Module, x: torch.Tensor, silu_mul: bool
    ) -> torch.Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        most = layer.flint_max_tokens_silu if silu_mul else layer.flint_max_tokens
        # An operator costs as much as a launch, and only torch.compile needs one.
        if torch.compiler.is_compiling():
            args = (rows, layer.weight, silu_mul, self.pdl, most)
            out = torch.ops.vllm.flint_bf16_linear(*args)
        elif rows.shape[0] <= most:
            report_compilation()
            weight = layer.flint_kept_weight.of(layer.weight)
            out = gemv_of_layer(rows, weight, silu_mul, self.pdl, torch.bfloat16)
        else:
            out = bf16_linear(rows, layer.weight, silu_mul, self.pdl, most)
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], out.shape[-1])


def gate_up_silu_mul(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Run a merged gate and up projection, SiLU and the product in one kernel.

    Args:
        layer: The projection; its rows are [gate | up] and it has no bias.
        x: BF16 [..., K].

    Returns:
        silu(gate) * up, BF16 [..., N / 2], or None where the fused form does not
        apply and the caller has to use the layer as usual.

    """
    method = getattr(layer, "quant_method", None)
    if isinstance(method, FlintBf16LinearMethod):
        return method.gate_up_silu_mul(layer, x)
    kernel = getattr(method, "kernel", None)
    if isinstance(kernel, FlintNvFp4LinearKernel):
        return kernel.gate_up_silu_mul(layer, x)
    return None


def gemv_weight(layer: torch.nn.Module) -> GemvWeight | str:
    """Give a layer's processed weight to a kernel that contains the GEMV.

    Args:
        layer: a linear layer without bias.

    Returns:
        The weight, in the layer's own memory, or why there is none.

    """
    method = getattr(layer, "quant_method", None)
    if isinstance(method, FlintBf16LinearMethod):
        return layer.flint_kept_weight.of(layer.weight)
    if not isinstance(getattr(method, "kernel", None), FlintNvFp4LinearKernel):
        return "the layer is on another linear kernel"
    if layer.flint_padding or layer.flint_rows != layer.output_size_per_partition:
        return "the layer's weight was padded"
    return layer.flint_kept_weight.of(
        layer.weight, layer.weight_scale, layer.weight_global_scale
    )


def install_flint_dense_kernels(model: torch.nn.Module) -> int:
    """Put Flint's kernels in a model's layers of tuned shape.

    Call it before weights are processed. Layers keep what vLLM chose where another
    backend was asked for, where the kernel is disabled or cannot run, and where their
    shape is not tuned.

    Args:
        model: The model, with its layers made.

    Returns:
        How many layers have them, by this call or by ``--linear-backend``.

    """
    reason = _why_not()
    if reason is not None:
        logger.info_once("Flint's dense kernels are not used: %s", reason)
        return 0
    count = sum(_install(module) for module in model.modules())
    if count == 0:
        logger.info_once("Flint's dense kernels are not used: no layer can have them")
    return count


def _why_not() -> str | None:
    name = FlintNvFp4LinearKernel.__name__
    if name in envs.VLLM_DISABLED_KERNELS:
        return f"{name} is in VLLM_DISABLED_KERNELS"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set"
    dtype = torch.get_default_dtype()
    if dtype != torch.bfloat16:
        return f"they require bfloat16, and the model's dtype is {dtype}"
    return FlintNvFp4LinearKernel.is_supported()[1]


def _install(module: torch.nn.Module) -> bool:
    method: Any = getattr(module, "quant_method", None)
    if type(method) is UnquantizedLinearMethod and isinstance(module, LinearBase):
        weight = getattr(module, "weight", None)
        if weight is None or not _may_have(*weight.shape, "unquantized", "flint"):
            return False
        module.quant_method = FlintBf16LinearMethod()
        return True
    if not isinstance(method, ModelOptLinearMethod):
        return False
    if method.spec.weight != kNvfp4Static or method.spec.activation is not None:
        return False
    if isinstance(method.kernel, FlintNvFp4LinearKernel):
        # vLLM's registry chose it, as the user asked.
        return True
    n, k = module.output_size_per_partition, module.input_size_per_partition
    if not _may_have(n, k, "nvfp4_w4a16"):
        return False
    method.kernel = FlintNvFp4LinearKernel(NvFp4LinearLayerConfig())
    return True


def _may_have(n: int, k: int, quantization: str, *backends: str) -> bool:
    """Whether a layer may have Flint's kernel; one line says why not."""
    backend = _get_linear_backend(quantization=quantization)
    if backend not in ("auto", *backends):
        logger.info_once(
            "Flint's dense kernels leave %s layers to --linear-backend %s",
            quantization,
            backend,
        )
        return False
    if not _tuned_here(n, k, bf16=quantization == "unquantized"):
        logger.info_once(
            "Flint's dense kernels leave %s layers of %d x %d to vLLM's: that shape is "
            "not tuned for this GPU",
            quantization,
            n,
            k,
        )
        return False
    return True


def _tuned_here(n: int, k: int, bf16: bool) -> bool:
    return tuned(n, k, bf16=bf16) or tuned(n, k, silu_mul=True, bf16=bf16)
