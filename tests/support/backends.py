# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which attention backends serve sinks on this machine."""

import shutil

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def need_sinks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the test if engines on this backend cannot have sinks here.

    On Hopper FlashInfer compiles its kernels with nvcc. vLLM asks all the same whether
    those for other GPUs can be downloaded; engines are told that they are installed.
    """
    on_hopper = current_platform.is_device_capability(90)
    compiled = backend == "FLASHINFER" and on_hopper
    if compiled and has_flashinfer() and shutil.which("nvcc"):
        # This process may have asked already, and keeps the answer.
        monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
        return
    try:
        with set_current_vllm_config(VllmConfig()):
            serves = AttentionBackendEnum[backend].get_class().supports_sink()
    except ImportError:
        serves = False
    if not serves:
        pytest.skip(f"{backend} does not serve sinks on this machine")
