# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Entry point: `python3 scripts/moebench COMMAND`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from moebench.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
