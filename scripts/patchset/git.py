# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs git, only where a target is a git checkout or a command makes one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from patchset.errors import PatchsetError

# Whatever the user's configuration says must not change the result.
_FIXED = (
    "core.autocrlf=false",
    "core.fsmonitor=false",
    "core.quotePath=false",
    "core.hooksPath=/dev/null",
    "commit.gpgSign=false",
    "gc.auto=0",
    "advice.detachedHead=false",
)


def fixed_identity(name: str, email: str) -> dict[str, str]:
    """Return the environment of commits that do not depend on who makes them, or when.

    Args:
        name: Author and committer.
        email: Theirs.
    """
    return {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (
            ("NAME", name),
            ("EMAIL", email),
            ("DATE", "2000-01-01T00:00:00+0000"),
        )
    }


def git(
    root: Path,
    *args: str,
    data: bytes | None = None,
    env: dict[str, str] | None = None,
    check: bool = True,
) -> bytes:
    """Run git in `root` and return what it printed.

    Raises:
        PatchsetError: git is missing, or it failed and `check` is set.
    """
    fixed = [word for setting in _FIXED for word in ("-c", setting)]
    clean = {key: value for key, value in os.environ.items() if key[:4] != "GIT_"}
    clean |= {"LC_ALL": "C"} | (env or {})
    try:
        done = subprocess.run(
            ["git", *fixed, *args],
            cwd=root,
            env=clean,
            input=data if data is not None else b"",
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise PatchsetError(
            f"{root} needs git, which is not installed (apt-get install git)"
        ) from None
    if check and done.returncode:
        message = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise PatchsetError(f"git {args[0]} failed in {root}: {message}")
    return done.stdout if done.returncode == 0 else b""


def git_dir(root: Path) -> Path | None:
    """The git directory of the checkout at `root`; None if it is none.

    Reads ``.git`` itself, so that it needs no git.
    """
    entry = root / ".git"
    if entry.is_dir():
        return entry
    if entry.is_file():
        text = entry.read_text(encoding="utf-8", errors="replace").strip()
        if text.startswith("gitdir: "):
            return (root / text.removeprefix("gitdir: ")).resolve()
    return None
