# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""vLLM's own sparse block on the same weights: the layers that stock engines run."""

import atexit
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from enginebench.engines import ENGINES
from enginebench.models import write_config
from moebench.weights import EPS, BlockWeights, Tokens
from tinymodel.specs import TinySpec


@functools.cache
def _start(device: torch.device) -> None:
    """Sets up what a worker of vLLM has, once a process."""
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.v1.worker.workspace import init_workspace_manager

    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        init_distributed_environment(1, 0, meeting, 0, backend)
        ensure_model_parallel_initialized(1, 1)
    init_workspace_manager(device)
    # A process that leaves NCCL as it is may hang in the end.
    atexit.register(cleanup_dist_env_and_memory)


class StockModel:
    """vLLM's configuration for one of its MoE backends.

    Args:
        engine: Name of one of enginebench's engines.
        spec: The model.
        most_tokens: Tokens of the largest step.
        nvfp4: Whether its weights are NVFP4.
        device: Where the blocks live.
    """

    def __init__(
        self,
        engine: str,
        spec: TinySpec,
        most_tokens: int,
        nvfp4: bool = True,
        device: str = "cuda",
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        self.engine = ENGINES[engine]
        self.device = torch.device(device)
        os.environ.update(self.engine.env)
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), spec, nvfp4)
            options: dict[str, Any] = {
                "model": folder,
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "max_model_len": min(most_tokens, spec.max_position_embeddings),
                "max_num_batched_tokens": most_tokens,
                # Names of layers stay in their calls: each block is called alone.
                "compilation_config": {"mode": 0, "fast_moe_cold_start": False},
            }
            arguments = EngineArgs(**options | self.engine.options)
            self.config = arguments.create_engine_config()
        with set_current_vllm_config(self.config):
            _start(self.device)
        self._blocks = 0

    def block(self, weights: BlockWeights) -> "StockBlock":
        """Makes one more sparse block, with these weights.

        Raises:
            KeyError: If a parameter of vLLM's block is not among them.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import (
            process_weights_after_loading,
        )
        from vllm.models.flint.model import FlintSparseMoeBlock
        from vllm.utils.torch_utils import set_default_torch_dtype

        # Dense layers come first in the model.
        layer = 2 + self._blocks
        self._blocks += 1
        with (
            set_current_vllm_config(self.config),
            set_default_torch_dtype(torch.bfloat16),
        ):
            with self.device:
                module = FlintSparseMoeBlock(self.config, f"model.layers.{layer}.mlp")
            _copy(module, weights)
            model_config = self.config.model_config
            process_weights_after_loading(module, model_config, self.device)
        return StockBlock(self, module, weights.norm)


def _copy(module: torch.nn.Module, weights: BlockWeights) -> None:
    named = weights.named()
    for name, parameter in module.named_parameters():
        last = name.rpartition(".")[2]
        key = last if last in named else ".".join(name.split(".")[-2:])
        source, target = named[key], parameter.data
        if target.element_size() == 1:
            target = target.view(torch.uint8)
        target.copy_(source.expand(target.shape) if source.numel() == 1 else source)


class StockBlock:
    """`__call__` maps tokens to the block's output and the new residual stream."""

    def __init__(
        self, model: StockModel, module: torch.nn.Module, norm: torch.Tensor
    ) -> None:
        self._model, self._module, self._norm = model, module, norm

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        normed, residual = tokens.x.clone(), tokens.residual.clone()
        torch.ops._C.fused_add_rms_norm(normed, residual, self._norm, EPS)
        config = self._model.config
        m = normed.shape[0]
        with (
            set_current_vllm_config(config),
            set_forward_context(None, config, num_tokens=m),
        ):
            return self._module(normed), residual
