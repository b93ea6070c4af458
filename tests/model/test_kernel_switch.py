# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which of Flint's kernels an engine takes: asked for, refused, or neither."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers import layernorm
from vllm.models.flint import kernel_switch
from vllm.models.flint.kernel_switch import norm_class, why_off
from vllm.models.flint.ops.norm import RMSNorm
from vllm.platforms.interface import DeviceCapability

PARTS = ("linears", "attention", "NVFP4 experts", "BF16 experts")


def config(**options: Any) -> Any:
    return SimpleNamespace(additional_config=options)


@pytest.fixture(params=[None, (8, 0), (9, 0), (10, 0)])
def capability(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int] | None:
    """Of the GPU; None on a machine without one."""
    found = None if request.param is None else DeviceCapability(*request.param)
    platform = SimpleNamespace(
        is_cuda=lambda: found is not None, get_device_capability=lambda: found
    )
    monkeypatch.setattr(kernel_switch, "current_platform", platform)
    return request.param


@pytest.mark.parametrize("part", PARTS)
def test_an_answer_holds_on_every_machine(capability, part: Any) -> None:
    assert why_off(config(flint_kernels=True), part) is None
    assert "turns flint_kernels off" in (
        why_off(config(flint_kernels=False), part) or ""
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "given", [config(), config(another=1), config(flint_kernels=None)]
)
def test_without_one_only_what_was_checked_there_is_on(
    capability, part: Any, given: Any
) -> None:
    off = why_off(given, part)
    if capability == (9, 0):
        assert off is None
    else:
        assert off is not None and part in off and '{"flint_kernels": true}' in off


@pytest.mark.parametrize("value", [1, "true"])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="flint_kernels must be true or false"):
        why_off(config(flint_kernels=value), "linears")


@pytest.mark.parametrize(
    ("value", "wanted"), [(False, layernorm.RMSNorm), (True, RMSNorm)]
)
def test_norms_follow(value: bool, wanted: type) -> None:
    assert norm_class(config(flint_kernels=value)) is wanted
