# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Engines that start at the same time are timed one after the other."""

import fcntl
import os


class Turn:
    """A lock that engines share while they start, and each has alone while it is timed.

    So no engine is timed while another one starts. A process that ends or is killed
    gives it up.
    """

    def __init__(self, path: str | None) -> None:
        """Shares the file's lock; without a file there is nothing to wait for."""
        self._file: int | None = None
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def wait(self) -> None:
        """Returns once all others have started, and none is timed."""
        if self._file is not None:
            # Gives up the shared lock first, so that two that wait do not block.
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def end(self) -> None:
        """Lets the next one be timed, whatever this process still has to do."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
