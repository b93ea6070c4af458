# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Kernel variants compiled ahead of time, for tests on a GPU.

`python3 scripts/gemvbench build` makes such a library, in several processes; without
FLINT_TEST_VARIANTS, which names one, each process compiles what it launches.
"""

import itertools
import os
from pathlib import Path


def offer_prebuilt() -> None:
    """Gives the overlay the library's variants, if one is named."""
    path = os.environ.get("FLINT_TEST_VARIANTS")
    if path:
        from gemvbench import sets
        from gemvbench.library import Library

        library = Library(Path(path))
        wanted = itertools.chain(sets.tested("sm90", "mul"), sets.served("sm90", "mul"))
        if not library.offer(wanted):
            raise ValueError(f"{path} holds none of the variants that tests launch")
