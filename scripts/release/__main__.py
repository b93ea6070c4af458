# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Entry point of ``python3 scripts/release``."""

import sys
from pathlib import Path

if not __package__:
    # Run as a folder: its own path stands first and would hide the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from release.cli import main

if __name__ == "__main__":
    sys.exit(main())
