# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's loader for Flint in a GGUF file.

`vllm.model_executor.model_loader` imports this module, so import that one first.
"""

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from .configs import FlintConfig
from .errors import FlintCheckpointError
from .gguf_config import gguf_path
from .gguf_nvfp4 import gguf_nvfp4_weights_iterator

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class FlintGGUFModelLoader(DefaultModelLoader):
    """Loads Flint from one GGUF file."""

    def download_model(self, model_config: "ModelConfig") -> None:
        """Make the file available locally."""
        self._path(model_config)

    def get_all_weights(
        self, model_config: "ModelConfig", model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Read the file; see `gguf_nvfp4_weights_iterator`."""
        self.counter_before_loading_weights = time.perf_counter()
        config = model_config.hf_config
        assert isinstance(config, FlintConfig)
        device = self.load_config.device or current_platform.device_type
        # A reload keeps a layer's tensors until it has all, beside a KV cache.
        reloads = any(parameter.is_meta for parameter in model.parameters())
        quantization = getattr(config, "quantization_config", None) or {}
        yield from gguf_nvfp4_weights_iterator(
            self._path(model_config),
            config,
            nvfp4_modules=set(quantization.get("quantized_layers", ())),
            dtype=model_config.dtype,
            use_tqdm=self.load_config.use_tqdm_on_load,
            device="cpu" if reloads else device,
        )

    def _path(self, model_config: "ModelConfig") -> str:
        path = gguf_path(model_config, self.load_config)
        if path is None:
            raise FlintCheckpointError(f"{model_config.model} has no GGUF file")
        return path
