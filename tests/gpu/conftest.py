# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""GPU tests use kernels compiled ahead of time where there are some."""

import pytest

from support.variants import offer_prebuilt


@pytest.fixture(scope="session", autouse=True)
def prebuilt_variants() -> None:
    offer_prebuilt()
