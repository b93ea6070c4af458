# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which sparse layers Flint's expert kernels serve, and what asks for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig
from vllm.models.flint import kernel_switch
from vllm.models.flint import moe_path as path
from vllm.platforms.interface import DeviceCapability

FACTS = path.MoEFacts(
    off=None,
    capability=90,
    missing_compiler=None,
    kernel=path.NVFP4_EXPERTS,
    weights="NVFP4 experts",
    dtype=torch.bfloat16,
    moe_backend="auto",
    scores="sigmoid",
    renormalized=True,
)


@pytest.mark.parametrize("kernel", [path.NVFP4_EXPERTS, path.BF16_EXPERTS])
def test_served(kernel: str):
    assert path.why_not_kernels(replace(FACTS, kernel=kernel)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": 80}, "sm_90"),
        ({"off": "they are switched off"}, "they are switched off"),
        ({"kernel": None}, "do not serve NVFP4 experts"),
        ({"disabled": (path.NVFP4_EXPERTS,)}, "VLLM_DISABLED_KERNELS"),
        ({"moe_backend": "marlin"}, "--moe-backend asks for marlin"),
        ({"spread": "expert parallelism"}, "expert parallelism spreads"),
    ],
)
def test_left_to_the_backend(change: dict[str, Any], reason: str):
    assert reason in (path.why_not_kernels(replace(FACTS, **change)) or "")


@pytest.mark.parametrize("asked", [True, False, None])
def test_what_was_not_checked_waits_to_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None
):
    options = {} if asked is None else {"flint_kernels": asked}
    config = VllmConfig(additional_config=options)
    monkeypatch.setattr(kernel_switch.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(
        kernel_switch.current_platform,
        "get_device_capability",
        lambda: DeviceCapability(12, 1),
    )
    for part in ("linears", "attention", "NVFP4 experts", "BF16 experts"):
        assert (kernel_switch.why_off(config, part) is None) == (asked is True)
