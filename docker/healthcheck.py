# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Exits with 0 if the server on this machine's port PORT says that it is healthy."""

import os
import sys
import urllib.request

_TIMEOUT_S = 8


def main() -> int:
    """Ask once; a proxy in the environment must not be asked for this machine."""
    url = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
