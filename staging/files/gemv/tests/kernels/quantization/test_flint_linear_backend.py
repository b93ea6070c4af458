# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""--linear-backend flint takes the kernel, or says why it cannot."""

import pytest

from vllm.config.kernel import KernelConfig
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4 import flint_gemv
from vllm.platforms import PlatformEnum

KERNEL = flint_gemv.FlintNvFp4LinearKernel


def test_backend_selects_the_kernel():
    backend = KernelConfig(linear_backend="flint").linear_backend
    possible = linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    assert linear._filter_kernels_by_backend(backend, possible) == [KERNEL]


def test_reasons_against_it_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flint_gemv, "missing_compiler", lambda: None)
    assert KERNEL.is_supported(90) == (True, None)
    assert "requires sm_90" in (KERNEL.is_supported(80)[1] or "")
    monkeypatch.setattr(flint_gemv, "missing_compiler", lambda: "too old")
    assert "too old" in (KERNEL.is_supported(90)[1] or "")
