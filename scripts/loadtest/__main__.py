# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs the load test as `python scripts/loadtest`."""

import sys
from pathlib import Path

if not __package__:
    # Run as a folder: its own path stands first and would hide the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bootstrap.environment import stop_on_sigterm
from loadtest.cli import main

if __name__ == "__main__":
    stop_on_sigterm()
    sys.exit(main())
