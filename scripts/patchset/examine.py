# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Looks at a folder target once and says all that the commands ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchset import plan as planning
from patchset.diff import NO_BLOB
from patchset.download import cached
from patchset.errors import PatchsetError
from patchset.git import git
from patchset.gittree import MODE_FILE, Entry
from patchset.identity import marker, package_tree, source_tree
from patchset.listing import list_archive, list_entries, read_blob
from patchset.overlay import MARKER_PATH
from patchset.pin import Pin
from patchset.plan import PACKAGE, Plan, plan_apply
from patchset.record import differing_files, parse_record
from patchset.repo import Repo
from patchset.report import Report, TreeCheck
from patchset.sources import ARCHIVE, CHECKOUT, WHEEL, Target, detect

FOREIGN = "foreign"
_MOST_NAMES = 20


@dataclass
class Examined:
    """A folder target and what it holds.

    Attributes:
        target: what it is.
        entries: its files.
        plan: what the series would do.
        state: the plan's state, or "foreign" (files that the series does not
            touch differ from the base) or "partly" (the marker is missing).
        differing: names of such files, as far as they can be told.
        source_known: whether the source tree id can be compared with the pin: a
            checkout of the upstream commit may hold links that an archive lacks.
    """

    target: Target
    entries: dict[str, Entry]
    plan: Plan
    state: str
    differing: list[str]
    source_known: bool


def folder_target(path: Path, pin: Pin) -> Target:
    """Detect `path` and check that it is a tree of the pinned version.

    Raises:
        PatchsetError: it is a file, or another version.
    """
    target = detect(path, pin)
    if target.kind in (ARCHIVE, WHEEL):
        better = "tree" if target.kind == ARCHIVE else "wheel"
        raise PatchsetError(
            f"{path} is a {target.kind}, not a folder; use the command `{better}`"
        )
    base = pin.base.version
    if target.version is not None and target.version.partition("+")[0] != base:
        raise PatchsetError(
            f"wrong base: {path} is vLLM {target.version}, and this patch set is for "
            f"{base}"
        )
    return target


def examine(target: Target, repo: Repo) -> Examined:
    """Hash the target once and plan the series on it."""
    root, pin = target.path, repo.pin
    entries = list_entries(target, pin)
    plan = plan_apply(repo, lambda path: read_blob(root, path), full=target.full)
    found = Examined(target, entries, plan, plan.state, [], source_known=True)
    _compare_with_base(found, repo)
    if target.version is None and found.state not in (
        planning.PRISTINE,
        planning.PATCHED,
    ):
        raise PatchsetError(
            f"wrong base: nothing in {root} names its vLLM version, and its files are "
            f"not those of {pin.base.version}"
        )
    if found.state == planning.PATCHED:
        wanted = marker(repo, package_tree(entries, pin))
        held = read_blob(root, MARKER_PATH)
        if held is None or held.data != wanted.data:
            found.state = planning.PARTLY
            found.differing = [MARKER_PATH]
    return found


def _compare_with_base(found: Examined, repo: Repo) -> None:
    """Is everything that the series does not touch as the base has it?"""
    target, pin = found.target, repo.pin
    reverted = _reverted(found.entries, found.plan.origin)
    same = package_tree(reverted, pin) == pin.pristine.for_package(target.flavour)
    if same and target.full and source_tree(reverted, pin) != pin.pristine.source:
        same = False
        if target.at_base_commit:
            found.source_known = False
            same = not _changed_in_git(target, found.plan, pin)
    if same:
        return
    found.differing = _name_differences(target, reverted, found.plan, pin)
    if found.state in (planning.PRISTINE, planning.PATCHED, planning.PARTLY):
        found.state = FOREIGN


def _reverted(
    entries: Mapping[str, Entry], origin: Mapping[str, str]
) -> dict[str, Entry]:
    """The entries with every file that the series touches as the base has it."""
    reverted = dict(entries)
    for path, blob in origin.items():
        if blob == NO_BLOB:
            reverted.pop(path, None)
        else:
            mode = entries[path].mode if path in entries else MODE_FILE
            reverted[path] = Entry(mode, blob)
    return reverted


def _changed_in_git(target: Target, plan: Plan, pin: Pin) -> list[str]:
    rows = git(target.path, "status", "--porcelain", "-z", "--no-renames", "-uall")
    paths = {row[3:] for row in rows.decode().split("\0") if row}
    return sorted(
        path
        for path in paths
        if path not in plan.origin and path not in pin.source_globs
    )


def _name_differences(
    target: Target, reverted: Mapping[str, Entry], plan: Plan, pin: Pin
) -> list[str]:
    """Which files differ from the base; empty if nothing here can tell."""
    if target.dist_info:
        return _differs_from_record(target, reverted, plan, pin)
    archive = cached(pin.sdist)
    if archive:
        base, _ = list_archive(archive, pin)
        every = base.keys() | reverted.keys()
        return sorted(path for path in every if base.get(path) != reverted.get(path))
    return _changed_in_git(target, plan, pin) if target.kind == CHECKOUT else []


def _differs_from_record(
    target: Target, reverted: Mapping[str, Entry], plan: Plan, pin: Pin
) -> list[str]:
    data = read_record(target)
    listed = {row.path for row in parse_record(data)}

    def ours(path: str) -> bool:
        return (
            not path.startswith(PACKAGE)
            or path in plan.origin
            or path in pin.package_globs
        )

    wrong = differing_files(target.path, data, skip=ours)
    return sorted({*wrong, *(path for path in reverted if path not in listed)})


def record_path(target: Target) -> str:
    """The path of the package's RECORD."""
    return f"{target.dist_info}/RECORD"


def read_record(target: Target) -> bytes:
    """The package's RECORD.

    Raises:
        PatchsetError: there is none.
    """
    blob = read_blob(target.path, record_path(target))
    if blob is None:
        raise PatchsetError(
            f"{target.path}/{record_path(target)} is missing, so what was installed "
            "cannot be verified; reinstall vLLM with pip"
        )
    return blob.data


def tree_checks(
    target: Target,
    entries: Mapping[str, Entry],
    pin: Pin,
    *,
    patched: bool = False,
    source_known: bool = True,
) -> dict[str, TreeCheck]:
    """The tree ids of `entries` next to those pinned for the base or the result."""
    expected = pin.identity if patched else pin.pristine
    checks = {
        "package": TreeCheck(
            package_tree(entries, pin), expected.for_package(target.flavour)
        )
    }
    if target.full and source_known:
        checks["source"] = TreeCheck(source_tree(entries, pin), expected.source)
    return checks


def start_report(command: str, target: Target, repo: Repo) -> Report:
    """A report that says what the target and the patch set are."""
    flavour = ", CPU build" if target.flavour == "cpu" else ""
    return Report(
        command,
        str(target.path),
        target.kind + flavour,
        identity={
            "base": f"{repo.pin.base.version} ({repo.pin.base.commit})",
            "release": repo.pin.release,
            "series_sha256": repo.series_sha256,
        },
    )


def name_some(paths: list[str]) -> list[str]:
    """At most a screenful of names."""
    more = len(paths) - _MOST_NAMES
    return paths[:_MOST_NAMES] + ([f"... and {more} more"] if more > 0 else [])
