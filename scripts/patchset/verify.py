# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Answers one question of any target: is this what the pin names?"""

from __future__ import annotations

from pathlib import Path

from patchset import plan as planning
from patchset.apply import status_tree
from patchset.download import file_sha256
from patchset.errors import EXIT_CONFLICT, EXIT_OK
from patchset.examine import name_some, read_record, start_report
from patchset.record import differing_files
from patchset.repo import Repo
from patchset.report import Report
from patchset.sources import ARCHIVE, PACKAGE, WHEEL, detect


def verify(path: Path, repo: Repo) -> Report:
    """Compare a tree, installed package, wheel or archive with the pin.

    Returns:
        A report whose exit code is 0 for exactly what the pin names (the patched
        result; of an archive, the base's own), else 1.
    """
    target = detect(path, repo.pin)
    if target.kind == WHEEL:
        from patchset.wheel_verify import verify_wheel

        return verify_wheel(target.path, repo)
    if target.kind == ARCHIVE:
        return _verify_archive(target.path, repo)
    result = status_tree(path, repo)
    result.command = "verify"
    if target.kind == PACKAGE:
        # The tree id leaves the binaries out; RECORD covers them.
        wrong = differing_files(target.path, read_record(target))
        if wrong:
            result.exit_code = EXIT_CONFLICT
            result.summary = "the installed files are not those that RECORD names"
            result.notes += [f"differs: {name}" for name in name_some(wrong)]
    if result.exit_code == EXIT_OK and result.state == planning.PATCHED:
        result.summary = f"verified: this is vLLM {repo.pin.release}, as pinned"
        return result
    result.exit_code = EXIT_CONFLICT
    result.summary = f"not the pinned vLLM {repo.pin.release}: {result.summary}"
    return result


def _verify_archive(path: Path, repo: Repo) -> Report:
    result = start_report("verify", detect(path, repo.pin), repo)
    found = file_sha256(path)
    result.identity["sha256"] = found
    if found == repo.pin.sdist.sha256:
        result.state = planning.PRISTINE
        result.summary = f"verified: the source archive of vLLM {repo.pin.base.version}"
    else:
        result.exit_code = EXIT_CONFLICT
        result.summary = (
            f"not the pinned archive, whose hash is {repo.pin.sdist.sha256}"
        )
    return result
