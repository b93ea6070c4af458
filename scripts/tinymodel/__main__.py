# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Lets `python3 scripts/tinymodel` run the package from its directory."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tinymodel.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
