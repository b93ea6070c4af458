# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What the operating system must bring: a recent Python, venv, libnuma."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

from bootstrap.errors import BootstrapError

MACHINES = ("x86_64", "aarch64")


def check_platform() -> None:
    """Refuse a machine that the pinned CPU wheels do not run on.

    Raises:
        BootstrapError: The system, the processor or the Python does not fit.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise BootstrapError(
            f"this is {sys.platform} on {platform.machine()}; the CPU build of vLLM "
            f"runs on Linux on {' or '.join(MACHINES)}"
        )
    if sys.version_info < (3, 11):  # noqa: UP036 (whatever python3 is here runs this)
        raise BootstrapError(
            f"this is Python {platform.python_version()}; vLLM needs 3.11 or newer"
        )


def missing_packages() -> list[str]:
    """Return the Debian packages that are not there yet.

    Debian cuts ensurepip, which makes pip appear in a new environment, out of its
    Python; and the CPU wheel's libraries are linked against libnuma.
    """
    missing = []
    if importlib.util.find_spec("ensurepip") is None:
        missing.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        missing.append("libnuma1")
    return missing


def ensure_packages() -> None:
    """Install what is missing where we may, else say which command does it.

    Raises:
        BootstrapError: Something is missing and could not be installed.
    """
    missing = missing_packages()
    if not missing:
        return
    names = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BootstrapError(
            f"these system packages are missing: {names}. Install them, on Debian or "
            f"Ubuntu with: sudo apt-get install {names}  and run this again"
        )
    print(f"  installing system packages with apt-get: {names}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update"],
        ["apt-get", "install", "--yes", "--no-install-recommends", *missing],
    ):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
            raise BootstrapError(f"{' '.join(command)} failed:\n{tail}")
    importlib.invalidate_caches()
    left = missing_packages()
    if left:
        raise BootstrapError(f"still missing after apt-get: {' '.join(left)}")
