# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Hands over from the system's Python to a program in the environment."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from bootstrap import environment
from bootstrap.errors import BootstrapError


def run_in_environment(arguments: list[str]) -> NoReturn:
    """Make the environment if need be, then become its Python.

    Args:
        arguments: What the environment's interpreter gets.
    """
    environment.stop_on_sigterm()
    try:
        python = environment.ensure()
    except (BootstrapError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; run this again to go on")
    os.execve(python, [str(python), *arguments], environment.variables())
