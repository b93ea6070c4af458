# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The pinned base, read from its archive, and what the series makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchset.gittree import MODE_FILE, Blob, Entry
from patchset.identity import package_tree, source_tree, with_changes
from patchset.listing import list_archive
from patchset.pin import Pin, TreeIds
from patchset.plan import Plan, plan_apply, touched_paths
from patchset.repo import Repo


@dataclass(frozen=True)
class Basis:
    """The base's files, and the contents of those that the series touches."""

    entries: dict[str, Entry]
    blobs: dict[str, Blob]


def read_basis(archive: Path, repo: Repo) -> Basis:
    """Read the source archive once."""
    return Basis(*list_archive(archive, repo.pin, touched_paths(repo, full=True)))


def plan_on_base(basis: Basis, repo: Repo) -> Plan:
    """What the series does to the pristine base."""
    return plan_apply(repo, basis.blobs.get, full=True)


def tree_ids(entries: Mapping[str, Entry], pin: Pin) -> TreeIds:
    """All tree ids of a source tree.

    The CPU wheel's package is the source's but for the files in the pin's
    ``cpu_blobs``, which no patch may touch; so its id needs no CPU wheel.
    """
    cpu = {path: Entry(MODE_FILE, blob) for path, blob in pin.cpu_blobs.items()}
    return TreeIds(
        source=source_tree(entries, pin),
        package=package_tree(entries, pin),
        package_cpu=package_tree({**entries, **cpu}, pin),
    )


def result_ids(basis: Basis, plan: Plan, pin: Pin) -> TreeIds:
    """The tree ids after `plan`."""
    return tree_ids(with_changes(basis.entries, plan.changes), pin)
