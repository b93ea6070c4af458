# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs the benchmark as `python scripts/enginebench`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from enginebench.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
