# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The `wheel` command: fetch, repack, verify."""

from __future__ import annotations

from pathlib import Path

from patchset.download import fetch
from patchset.errors import PatchsetError
from patchset.repo import Repo
from patchset.report import Report
from patchset.wheel import repack
from patchset.wheel_verify import verify_wheel


def wheel_command(repo: Repo, kind: str, wheel: Path | None, out: Path) -> Report:
    """Make a patched wheel and check it.

    Args:
        repo: The patch set.
        kind: Which pinned wheel to fetch; unused where `wheel` is given.
        wheel: The official wheel, if it is here already.
        out: Folder for the result.

    Raises:
        PatchsetError: There is no such kind, or the repack failed.
    """
    if wheel is None:
        if kind not in repo.pin.wheels:
            kinds = ", ".join(repo.pin.wheels)
            raise PatchsetError(f"no wheel {kind!r} in pin.toml; there are: {kinds}")
        wheel = fetch(repo.pin.wheels[kind])
    made = repack(wheel, out, repo)
    report = verify_wheel(made.path, repo)
    report.command = "wheel"
    if report.exit_code == 0:
        report.summary = f"made and verified: {made.path}"
        report.notes = [f"metadata: {edit}" for edit in made.edits]
    return report
