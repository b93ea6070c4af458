# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Child processes that end with us, together with the ones they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def child(command: list[str], errors: int | None) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process group of its own; its output is a pipe.

    Where the body is left by an exception, such as Ctrl-C, the whole group is
    killed: what it was making is thrown away anyhow.

    Args:
        command: The program and its arguments.
        errors: Where its stderr goes, as for subprocess.Popen.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        process_group=0,
    )
    with process:
        try:
            yield process
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def output_of(command: list[str], errors: int | None) -> tuple[int, str]:
    """Run a program to its end; returns its exit code and what it printed."""
    with child(command, errors) as process:
        text, _ = process.communicate()
    return process.returncode, text
