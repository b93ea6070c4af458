# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs the steps of docker/Dockerfile outside Docker."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def imagebuild(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one step as docker/Dockerfile does."""
    script = ROOT / "scripts" / "imagebuild"
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
