# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs pip and condenses its output to one line of progress."""

from __future__ import annotations

import re
import subprocess
from collections import deque
from pathlib import Path

from bootstrap.console import StatusLine
from bootstrap.errors import BootstrapError
from bootstrap.process import child, output_of

_TAIL_LINES = 12
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class PipOutput:
    """Reads pip's output line by line and says in a few words where it is."""

    def __init__(self) -> None:
        self.packages = 0
        self._doing = "starting"
        self._download = ""

    def feed(self, line: str) -> str:
        """Take one line; return the state to show."""
        line = line.strip()
        word, _, rest = line.partition(" ")
        progress = _PROGRESS.fullmatch(line)
        if progress:
            done, total = (int(value) / 1e6 for value in progress.groups())
            return f"{self._download}, {done:.0f} of {total:.0f} MB"
        if word in ("Collecting", "Requirement"):
            self.packages += 1
            self._doing = f"{self.packages} packages found"
        elif word == "Downloading":
            name = rest.split("/")[-1].split("-")[0]
            self._download = f"{self.packages} packages found, downloading {name}"
            return self._download
        elif line.startswith("Installing collected packages"):
            count = rest.count(",") + 1
            self._doing = f"unpacking {count} package" + ("s" if count > 1 else "")
        return self._doing


def run_pip(python: Path, label: str, arguments: list[str], raw: bool = True) -> None:
    """Run ``pip install`` in an environment.

    Args:
        python: The environment's interpreter.
        label: What the line of progress is called.
        arguments: Arguments of pip install.
        raw: Whether this pip can print progress for a machine to read (>= 24.1).

    Raises:
        BootstrapError: pip failed; the message ends with what it printed last.
    """
    # -I: no PYTHONPATH and no user site, which would leak into the environment.
    command = [str(python), "-I", "-m", "pip", "install", "--no-input"]
    command += ["--disable-pip-version-check", "--no-compile"]
    command += ["--progress-bar", "raw" if raw else "off", *arguments]
    line = StatusLine(label)
    output = PipOutput()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        with child(command, subprocess.STDOUT) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if not _PROGRESS.match(text):
                    tail.append(text.rstrip())
                line.update(output.feed(text))
    except BaseException:
        line.clear()
        raise
    if process.returncode:
        line.clear()
        raise BootstrapError(
            f"pip could not install {label}. It said:\n  " + "\n  ".join(tail)
        )
    line.finish("done")


def check_environment(python: Path) -> None:
    """Run ``pip check``.

    Raises:
        BootstrapError: Something installed does not fit together.
    """
    command = [str(python), "-I", "-m", "pip", "check", "--disable-pip-version-check"]
    code, text = output_of(command, subprocess.STDOUT)
    if code:
        raise BootstrapError(
            f"the installed packages do not fit together (pip check):\n{text}"
        )
