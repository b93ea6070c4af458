# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""GPU tests use variants compiled ahead of time where FLINT_TEST_VARIANTS names some.

`python3 scripts/gemvbench build` makes such a library, in several processes; without
it each test compiles what it launches.
"""

import itertools
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def prebuilt_variants() -> None:
    path = os.environ.get("FLINT_TEST_VARIANTS")
    if path:
        from gemvbench import sets
        from gemvbench.library import Library

        library = Library(Path(path))
        wanted = itertools.chain(sets.tested("sm90", "mul"), sets.served("sm90", "mul"))
        assert library.offer(wanted), f"{path} holds none of the tests' variants"
