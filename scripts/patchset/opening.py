# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""How every command on a folder begins: detect, lock, repair, look."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import EXIT_DIRTY, DirtyTreeError, PatchsetError
from patchset.examine import folder_target, start_report
from patchset.gittree import blob_id
from patchset.listing import read_blob
from patchset.overlay import MARKER_PATH
from patchset.repo import Repo
from patchset.report import Report
from patchset.sources import Target
from patchset.txn import Applied, State, locked

OTHER_SERIES = "other-series"


@dataclass(frozen=True)
class Opened:
    """A locked target with no unfinished business.

    Attributes:
        target: what it is.
        state: its undo state.
        applied: what we applied to it, if the target still holds any of it.
        result: the report to fill.
    """

    target: Target
    state: State
    applied: Applied | None
    result: Report


@contextlib.contextmanager
def opened(command: str, root: Path, repo: Repo) -> Iterator[Opened]:
    """Lock a target for `command` and repair what a killed command left.

    Raises:
        PatchsetError: no vLLM, another version, or another command at work.
        DirtyTreeError: a killed command's files were edited since.
    """
    target = folder_target(root, repo.pin)
    with locked(target.path):
        state = State(target.path)
        result = start_report(command, target, repo)
        try:
            message = state.recover()
        except OSError as exc:
            raise PatchsetError(
                f"an earlier command was interrupted in {target.path} and cannot be "
                f"repaired: cannot write {exc.filename}: {exc.strerror}"
            ) from None
        if message:
            result.notes.append(message)
        applied = state.applied()
        if applied and _is_gone(target, applied):
            applied = None
        yield Opened(target, state, applied, result)


def _is_gone(target: Target, applied: Applied) -> bool:
    """Whether somebody else put the base back: then the record is stale."""
    return all(
        current_blob(target, file["path"]) == file["before"] for file in applied.files
    )


def current_blob(target: Target, path: str) -> str | None:
    """The blob id of a target's file, or None."""
    blob = read_blob(target.path, path)
    return blob and blob_id(blob.data)


def carries_other_series(at: Opened, repo: Repo) -> bool:
    """Whether another version of the series is in place; the report says so."""
    series = at.applied.series_sha256 if at.applied else _marked_series(at.target)
    if series in (None, repo.series_sha256):
        return False
    remedy = (
        "run `unapply`, then `apply`"
        if at.applied
        else "nothing here can undo it: put the base's own files back"
    )
    at.result.state = OTHER_SERIES
    at.result.exit_code = EXIT_DIRTY
    at.result.summary = (
        f"another version of the series is applied here (series {series}); {remedy}"
    )
    return True


def _marked_series(target: Target) -> str | None:
    held = read_blob(target.path, MARKER_PATH)
    if held is None:
        return None
    try:
        return str(json.loads(held.data)["series_sha256"])
    except (ValueError, KeyError, TypeError):
        raise DirtyTreeError(
            f"{target.path / MARKER_PATH} is damaged; remove it and try again"
        ) from None
