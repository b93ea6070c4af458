# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The identity of a tree: what it was made from, and what it came out as.

Two ids, both git tree ids with generated files left out:

- the package tree: ``vllm/`` with every mode 100644. A source archive, a
  checkout, an installed package and a wheel of one flavour agree on it.
- the source tree: the whole source with its modes. An archive and a checkout
  made from it agree on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from patchset.gittree import MODE_FILE, Blob, Entry, tree_id
from patchset.pin import Pin
from patchset.plan import PACKAGE, Change
from patchset.repo import Repo


def package_tree(entries: Mapping[str, Entry], pin: Pin) -> str:
    """The id of ``vllm/`` in `entries` (paths relative to the tree's root)."""
    return tree_id(
        {
            path.removeprefix(PACKAGE): Entry(MODE_FILE, entry.blob)
            for path, entry in entries.items()
            if path.startswith(PACKAGE) and path not in pin.package_globs
        }
    )


def source_tree(entries: Mapping[str, Entry], pin: Pin) -> str:
    """The id of the whole source tree in `entries`."""
    return tree_id(
        {path: e for path, e in entries.items() if path not in pin.source_globs}
    )


def with_changes(
    entries: Mapping[str, Entry], changes: Iterable[Change]
) -> dict[str, Entry]:
    """The entries after `changes`, without touching the tree."""
    after = dict(entries)
    for change in changes:
        if change.after is None:
            after.pop(change.path, None)
        else:
            after[change.path] = change.after.entry
    return after


def marker(repo: Repo, package_id: str) -> Blob:
    """The generated file that tells the running vLLM what it is.

    Args:
        repo: the patch set.
        package_id: the package tree of the result.
    """
    content = {
        "base_version": repo.pin.base.version,
        "base_commit": repo.pin.base.commit,
        "release": repo.pin.release,
        "series_sha256": repo.series_sha256,
        "package_tree": package_id,
        "required": [patch.name for patch in repo.series if patch.required],
        "patches": [patch.name for patch in repo.series],
    }
    return Blob(json.dumps(content, indent=2).encode() + b"\n")
