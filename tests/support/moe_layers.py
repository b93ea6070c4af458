# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""vLLM's own MoE layers on the CPU, with the parameters and methods of a GPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
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
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.models.flint.mlp import FlintSparseMoeBlock

from contract.nvfp4 import Nvfp4Weight, dequantize
from contract.ops import Weight
from contract.tiny import tiny_weights
from tinymodel import TinySpec
from tinymodel.specs import config_json

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 128, 64
# A sparse layer of every model of tests.
PREFIX = "model.layers.2.mlp"


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """Groups of one rank, which vLLM's layers ask for their size."""
    with set_current_vllm_config(VllmConfig(additional_config={"flint_kernels": True})):
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


def nvfp4_config(
    algorithm: str = "W4A16_NVFP4", plain_shared: bool = True
) -> modelopt.ModelOptNvFp4Config:
    """NVFP4 experts; the shared one is BF16 where it is `plain_shared`."""
    plain = ["*shared_expert*"] if plain_shared else []
    return modelopt.ModelOptNvFp4Config(algorithm, True, None, plain)


def nvfp4_experts(algorithm: str = "W4A16_NVFP4") -> RoutedExperts:
    """Experts of a ModelOpt checkpoint, not loaded."""
    with marlin_on_cpu():
        return _experts(nvfp4_config(algorithm))


def bf16_experts() -> RoutedExperts:
    """Experts without quantization, not loaded."""
    return _experts(None)


def _experts(quant_config: Any) -> RoutedExperts:
    with set_current_vllm_config(VllmConfig(additional_config={"flint_kernels": True})):
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
            prefix=f"{PREFIX}.experts",
        )
    return runner.routed_experts


def sparse_weights(
    spec: TinySpec, family: str, plain_shared: bool = True
) -> dict[str, Weight]:
    """The contract's weights of the sparse block at `PREFIX`.

    Args:
        spec: The model.
        family: "bf16", or "nvfp4", whose values BF16 holds exactly.
        plain_shared: Whether the shared expert's come in BF16 anyway.
    """
    weights = tiny_weights(spec, 0, family, f"{PREFIX}.")
    for name, weight in weights.items():
        if plain_shared and ".experts." not in name:
            weights[name] = plain(weight).bfloat16()
    return weights


def plain(weight: Weight) -> torch.Tensor:
    """A weight's values, with the global scale: float64 where it is quantized."""
    if isinstance(weight, Nvfp4Weight):
        return dequantize(weight.weight, weight.weight_scale) * weight.global_scale
    return weight


def load_block(block: FlintSparseMoeBlock, weights: dict[str, Weight]) -> None:
    """Loads `sparse_weights` by vLLM's own loaders."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        name = name.removeprefix(f"{PREFIX}.")
        if isinstance(weight, Nvfp4Weight):
            module = name.removesuffix(".weight")
            tensors[name] = weight.weight
            tensors[f"{module}.weight_scale"] = weight.weight_scale.view(
                torch.float8_e4m3fn
            )
            tensors[f"{module}.weight_scale_2"] = torch.tensor(weight.global_scale)
        else:
            tensors[name] = weight.bfloat16()
    mapper = WeightsMapper(
        orig_to_new_stacked={
            "shared_expert.gate_proj": ("shared_expert.gate_up_proj", 0),
            "shared_expert.up_proj": ("shared_expert.gate_up_proj", 1),
        }
    )
    loaded = AutoWeightsLoader(block).load_weights(tensors.items(), mapper=mapper)
    # ModelOpt's layers have scales of activations, which W4A16 does not use.
    names = [name for name, _ in block.named_parameters()]
    assert loaded == {name for name in names if not name.endswith("input_scale")}


def make_block(
    spec: TinySpec, quantized: bool, plain_shared: bool = True
) -> tuple[FlintSparseMoeBlock, Any]:
    """A block of an engine with the kernels on, and that engine's config.

    Args:
        spec: The model.
        quantized: Whether the experts are NVFP4; all else is BF16.
        plain_shared: Whether the shared expert is BF16 anyway.
    """
    config = VllmConfig(additional_config={"flint_kernels": True})
    given = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**config_json(spec))
        ),
        parallel_config=config.parallel_config,
        quant_config=nvfp4_config(plain_shared=plain_shared) if quantized else None,
        compilation_config=config.compilation_config,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            return FlintSparseMoeBlock(given, PREFIX), config
    finally:
        torch.set_default_dtype(default)
