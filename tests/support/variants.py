# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Kernel variants compiled ahead of time, for tests on a GPU.

`python3 scripts/gemvbench build`, `attentionbench build` and `moebench build` make such
libraries, in several processes; without FLINT_TEST_VARIANTS, which names some as PATH
names folders, each process compiles what it launches.
"""

import os
from pathlib import Path


def offer_prebuilt() -> None:
    """Gives the overlay the libraries' variants, if any are named."""
    paths = os.environ.get("FLINT_TEST_VARIANTS")
    if not paths:
        return
    from attentionbench import sets as attention
    from gemvbench import sets as gemv
    from gemvbench.library import Library
    from moebench import sets as experts

    wanted = [
        *gemv.tested("sm90", "mul"),
        *gemv.served("sm90", "mul"),
        *attention.tested(),
        *attention.served(),
        *experts.served("mul", "fragments"),
        *experts.served("mul", "row_major"),
    ]
    for path in paths.split(os.pathsep):
        if not Library(Path(path)).offer(wanted):
            raise ValueError(f"{path} holds none of the variants that tests launch")
