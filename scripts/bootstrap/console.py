# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""One line of progress that changes in place, or now and then in a log."""

from __future__ import annotations

import shutil
import sys
import time

_LOG_INTERVAL_S = 15.0
_REDRAW_S = 0.1


class StatusLine:
    """Shows the state of one long step and how long it has taken.

    On a terminal the line is redrawn in place; elsewhere a new line is printed
    every 15 seconds, so that a log stays short and still shows life.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = time.monotonic()
        self._terminal = sys.stdout.isatty()
        self._due = self._start + (0 if self._terminal else _LOG_INTERVAL_S)

    def update(self, state: str) -> None:
        """Show the state if enough time has passed since the last one."""
        now = time.monotonic()
        if now < self._due:
            return
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{self._text(state)[:width]}", end="", flush=True)
            self._due = now + _REDRAW_S
        else:
            print(self._text(state), flush=True)
            self._due = now + _LOG_INTERVAL_S

    def finish(self, state: str) -> None:
        """Replace the line with its last state and go to the next line."""
        start = "\r\x1b[K" if self._terminal else ""
        print(f"{start}{self._text(state)}", flush=True)

    def clear(self) -> None:
        """Remove an unfinished line, before an error is printed."""
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)

    def _text(self, state: str) -> str:
        seconds = int(time.monotonic() - self._start)
        return f"  {self._label}: {state} ({seconds // 60}:{seconds % 60:02d})"
