# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Flint's kernels run where they are asked for, and a wrong answer is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers import layernorm
from vllm.models.flint.ops.norm import RMSNorm
from vllm.models.flint.opt_in import kernels_requested, norm_class


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"another": 1}, False),
        ({"flint_kernels": False}, False),
        ({"flint_kernels": True}, True),
        (object(), False),
    ],
)
def test_requested(options: Any, wanted: bool) -> None:
    config: Any = SimpleNamespace(additional_config=options)
    assert kernels_requested(config) is wanted


@pytest.mark.parametrize("value", [1, "true", None])
def test_anything_else_is_refused(value: Any) -> None:
    config: Any = SimpleNamespace(additional_config={"flint_kernels": value})
    with pytest.raises(ValueError, match="flint_kernels must be true or false"):
        kernels_requested(config)


@pytest.mark.parametrize(
    ("value", "wanted"), [(False, layernorm.RMSNorm), (True, RMSNorm)]
)
def test_norms_follow(value: bool, wanted: type) -> None:
    config: Any = SimpleNamespace(additional_config={"flint_kernels": value})
    assert norm_class(config) is wanted
