# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What of a series a repacked wheel can carry besides the package's own files."""

from __future__ import annotations

from patchset.errors import PatchsetError
from patchset.gittree import Globs
from patchset.native import NATIVE
from patchset.repo import Repo

_COMMON = "requirements/common.txt"
# What else a wheel that is not built anew cannot carry: how it is built, and
# requirements of one platform only.
_BUILD = Globs(
    (
        "pyproject.toml",
        "requirements/build/**",
        "requirements/cpu.txt",
        "requirements/cuda.txt",
    )
)


def refuse_native(repo: Repo) -> None:
    """Refuse a series that a repack cannot carry.

    Raises:
        PatchsetError: A patch or an overlay file touches native code or the build.
    """
    places = [
        (diff.path, patch.filename) for patch in repo.series for diff in patch.files
    ]
    places += [(file.path, "the overlay") for file in repo.overlay]
    found = [
        f"{path} (by {who})" for path, who in places if path in NATIVE or path in _BUILD
    ]
    if found:
        raise PatchsetError(
            "repacking cannot carry changes of native code or of the build; build the "
            f"wheel from source instead. Touched: {', '.join(found)}"
        )


def added_requirements(repo: Repo) -> list[str]:
    """Return the requirements that the series adds for every platform.

    Raises:
        PatchsetError: The series removes or changes a requirement; then the official
            wheel's metadata no longer tells what the result needs.
    """
    added = []
    for patch in repo.series:
        for diff in patch.files:
            if diff.path != _COMMON:
                continue
            for tag, line in (pair for hunk in diff.hunks for pair in hunk.lines):
                requirement = line.decode().partition("#")[0].strip()
                if tag == b"-" and requirement:
                    raise PatchsetError(
                        f"{patch.filename} changes {requirement!r} in {_COMMON}; a "
                        "repack only carries requirements that are added"
                    )
                if tag == b"+" and requirement:
                    added.append(requirement)
    return added
