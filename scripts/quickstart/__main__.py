# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Entry point inside the environment; scripts/quickstart.py is the one outside."""

import sys
from pathlib import Path

if not __package__:
    # Run as a folder: its own path stands first and would hide the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bootstrap.environment import stop_on_sigterm
from quickstart.cli import parse
from quickstart.run import QuickstartError, run
from quickstart.server import ServerError

if __name__ == "__main__":
    stop_on_sigterm()
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except (QuickstartError, ServerError, OSError) as error:
        sys.exit(f"quickstart: {error}")
    except KeyboardInterrupt:
        sys.exit("quickstart: stopped; the server is down")
