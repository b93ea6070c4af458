# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What torch.compile's cache on disk must know besides what vLLM's key has."""

from vllm.config import VllmConfig

from .fragments import missing_quack
from .gemv.variants import missing_compiler

_OPTION = "flint_missing_packages"


def tell_compile_cache(vllm_config: VllmConfig) -> None:
    """Keep an engine from a graph that was traced with other packages installed.

    Compiled graphs hold which kernels a layer has, and how its weights lie. That
    depends on packages beside vLLM, which are not in its key; the additional config is.
    """
    options = vllm_config.additional_config
    if isinstance(options, dict):
        options[_OPTION] = [missing_compiler(), missing_quack()]
