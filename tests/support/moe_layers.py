# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""vLLM's own MoE layers on the CPU, with the parameters and methods of a GPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import modelopt

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 128, 64


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """Groups of one rank, which vLLM's layers ask for their size."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel()
    try:
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def marlin_on_cpu() -> Any:
    """A patch with which vLLM chooses, on any machine, what it does on an H200."""
    return patch.object(
        modelopt,
        "select_nvfp4_moe_backend",
        lambda **_: (NvFp4MoeBackend.MARLIN, MarlinExperts),
    )


def nvfp4_config(algorithm: str = "W4A16_NVFP4") -> modelopt.ModelOptNvFp4Config:
    """NVFP4 experts beside BF16 linears."""
    return modelopt.ModelOptNvFp4Config(algorithm, True, None, ["*shared_expert*"])


def nvfp4_experts(algorithm: str = "W4A16_NVFP4") -> RoutedExperts:
    """Experts of a ModelOpt checkpoint, not loaded."""
    with marlin_on_cpu():
        return _experts(nvfp4_config(algorithm))


def bf16_experts() -> RoutedExperts:
    """Experts without quantization, not loaded."""
    return _experts(None)


def _experts(quant_config: Any) -> RoutedExperts:
    with set_current_vllm_config(VllmConfig()):
        runner = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            params_dtype=torch.bfloat16,
            scoring_func="sigmoid",
            use_grouped_topk=True,
            num_expert_group=1,
            topk_group=1,
            quant_config=quant_config,
            prefix="model.layers.2.mlp.experts",
        )
    return runner.routed_experts
