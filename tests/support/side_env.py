# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Small environments beside .venv, made from requirements/<name>.txt and kept."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def side_environment(name: str, with_engine: bool = False) -> Path:
    """Return the folder of an environment, made first if its lock changed.

    Args:
        name: of the lock file.
        with_engine: whether it sees the packages of this interpreter as well.
    """
    lock = ROOT / "requirements" / f"{name}.txt"
    key = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:12]
    place = ROOT / "build" / f"side-{name}-{key}"
    complete = place / "complete"
    if not complete.exists():
        for old in place.parent.glob(f"side-{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        _run(sys.executable, "-I", "-m", "venv", str(place))
        pip = (str(place / "bin" / "python"), "-I", "-m", "pip", "install", "-q")
        _run(*pip, "--no-input", "--no-deps", "--requirement", str(lock))
        complete.touch()
    if with_engine:
        (site_packages(place) / "engine.pth").write_text(sysconfig.get_path("purelib"))
    return place


def lint(program: str, *arguments: str | Path) -> str:
    """Run a program of the linters' environment; returns what it printed.

    Raises:
        AssertionError: It found something, or failed.
    """
    return _run(str(side_environment("lint") / "bin" / program), *map(str, arguments))


def site_packages(place: Path) -> Path:
    """Return where an environment's packages are."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(place)}))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
