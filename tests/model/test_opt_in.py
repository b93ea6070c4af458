# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Flint's kernels run where they are asked for, and a wrong answer is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.models.flint.opt_in import kernels_requested


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
