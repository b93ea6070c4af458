# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which layers' experts Flint's kernels serve, and why not others.

Nothing here needs a GPU. What the kernels do not serve, the MoE backend that vLLM
selected does.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE

from .kernel_switch import Part, cuda_capability, why_not_gpu, why_off
from .ops.gemv.variants import missing_compiler
from .ops.moe_gemv import why_not

# Names in VLLM_DISABLED_KERNELS.
NVFP4_EXPERTS = "FlintNvfp4Experts"
BF16_EXPERTS = "FlintBf16DecodeMoE"
_PARTS: dict[str, Part] = {
    NVFP4_EXPERTS: "NVFP4 experts",
    BF16_EXPERTS: "BF16 experts",
}
# vLLM's backends that leave BF16 experts as the checkpoint has them.
_ROW_MAJOR_BACKENDS = (UnquantizedMoeBackend.TRITON,)


@dataclass(frozen=True)
class MoEFacts:
    """What a sparse layer's kernels depend on.

    Attributes:
        off: why the engine is not to run on these kernels, or None.
        capability: compute capability times ten; None where there is no CUDA GPU.
        missing_compiler: why CuTe DSL cannot compile here, or None.
        kernel: which of Flint's kernels fits the experts' weights, as
            VLLM_DISABLED_KERNELS names it; None where there is none.
        weights: what the weights are, where no kernel fits them.
        dtype: the model's.
        moe_backend: what ``--moe-backend`` asks for.
        scores: how the router scores experts.
        renormalized: whether a token's weights are made to add up to one.
        shape: why the kernels cannot compute with the experts' sizes, or None.
        padded: whether vLLM rounded these sizes up.
        spread: what spreads a layer's tokens or experts over ranks, where it is not
            plain tensor parallelism; None elsewhere.
        microbatches: whether two batches run at the same time.
        reports_routing: whether the engine returns which experts tokens took.
        batch_invariant: whether VLLM_BATCH_INVARIANT is set.
        disabled: what VLLM_DISABLED_KERNELS names.

    """

    off: str | None
    capability: int | None
    missing_compiler: str | None
    kernel: str | None
    weights: str
    dtype: torch.dtype
    moe_backend: str
    scores: str
    renormalized: bool
    shape: str | None = None
    padded: bool = False
    spread: str | None = None
    microbatches: bool = False
    reports_routing: bool = False
    batch_invariant: bool = False
    disabled: tuple[str, ...] = ()


def facts_of(experts: RoutedExperts) -> MoEFacts:
    """Gather what the kernels of a layer depend on, as the engine's config is set.

    Args:
        experts: vLLM's routed experts, with the quantization method that it chose.

    """
    vllm_config = get_current_vllm_config()
    moe = experts.moe_config
    kernel, weights = _kernel_for(experts)
    capability = cuda_capability()
    return MoEFacts(
        off=None if kernel is None else why_off(vllm_config, _PARTS[kernel]),
        capability=capability,
        missing_compiler=missing_compiler(),
        kernel=kernel,
        weights=weights,
        dtype=torch.get_default_dtype(),
        moe_backend=moe.moe_backend,
        scores=experts.scoring_func,
        renormalized=experts.renormalize,
        shape=_why_no_shape(experts) if capability and kernel else None,
        padded=_is_padded(experts),
        spread=_spread(experts),
        microbatches=vllm_config.parallel_config.use_ubatching,
        reports_routing=vllm_config.aux_output_config.enabled,
        batch_invariant=envs.VLLM_BATCH_INVARIANT,
        disabled=tuple(envs.VLLM_DISABLED_KERNELS),
    )


def why_not_kernels(facts: MoEFacts) -> str | None:
    """Why a layer's experts must be served by vLLM's own backend, or None."""
    if (reason := why_not_gpu(facts.capability)) is not None:
        return reason
    if facts.off is not None:
        return facts.off
    if facts.kernel is None:
        return f"they do not serve {facts.weights}"
    if facts.kernel in facts.disabled:
        return f"{facts.kernel} is in VLLM_DISABLED_KERNELS"
    if facts.batch_invariant:
        return "VLLM_BATCH_INVARIANT is set"
    if facts.moe_backend != "auto":
        return f"--moe-backend asks for {facts.moe_backend}"
    if facts.missing_compiler is not None:
        return facts.missing_compiler
    if facts.dtype != torch.bfloat16:
        return f"they require bfloat16, and the model's dtype is {facts.dtype}"
    if facts.scores != "sigmoid" or not facts.renormalized:
        return "they require sigmoid scores that are made to add up to one"
    if facts.spread is not None:
        return f"{facts.spread} spreads a layer's tokens or experts over several ranks"
    if facts.microbatches:
        return "they do not run two microbatches at the same time"
    if facts.reports_routing:
        return "they do not report which experts a token took"
    if facts.padded:
        return f"vLLM's backend rounded up the size of {facts.weights}"
    return facts.shape


def _kernel_for(experts: RoutedExperts) -> tuple[str | None, str]:
    """Which kernel serves the weights, and what they are."""
    method = experts.quant_method
    if type(method) is ModelOptNvFp4FusedMoE:
        if method.use_a16:
            return NVFP4_EXPERTS, "NVFP4 experts"
        return None, "NVFP4 experts with quantized activations"
    if type(method) is not UnquantizedFusedMoEMethod:
        return None, f"experts of {type(method).__name__}"
    backend = method.unquantized_backend
    if backend in _ROW_MAJOR_BACKENDS:
        return BF16_EXPERTS, "unquantized experts"
    return None, f"unquantized experts in the order of {backend.value}"


def _why_no_shape(experts: RoutedExperts) -> str | None:
    """Ask before the weights are loaded: their sizes are all that matters."""
    sizes: Any = SimpleNamespace(w1=experts.w13_weight, w2=experts.w2_weight)
    return why_not(sizes, None, None, experts.top_k)


def _is_padded(experts: RoutedExperts) -> bool:
    moe = experts.moe_config
    return (moe.hidden_dim, moe.intermediate_size_per_partition) != (
        moe.hidden_dim_unpadded,
        moe.intermediate_size_per_partition_unpadded,
    )


def _spread(experts: RoutedExperts) -> str | None:
    parallel = experts.moe_config.moe_parallel_config
    if parallel.use_ep:
        return "expert parallelism"
    if parallel.is_sequence_parallel:
        return "sequence parallelism"
    if parallel.dp_size > 1:
        return "data parallelism"
    if parallel.pcp_size > 1:
        return "context parallelism"
    return None
