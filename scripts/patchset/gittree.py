# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Git blob and tree ids in pure Python: no git, no clock, no committer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MODE_FILE = 0o100644
MODE_EXEC = 0o100755
MODE_LINK = 0o120000
_MODE_TREE = b"40000"


class Entry(NamedTuple):
    """One file of a tree: its git mode and the hex id of its blob."""

    mode: int
    blob: str


class Blob(NamedTuple):
    """The contents of one file and its git mode."""

    data: bytes
    mode: int = MODE_FILE

    @property
    def entry(self) -> Entry:
        """Mode and blob id, as a tree holds them."""
        return Entry(self.mode, blob_id(self.data))


def blob_id(data: bytes) -> str:
    """The git id of `data` as a blob."""
    digest = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    digest.update(data)
    return digest.hexdigest()


def tree_id(entries: Mapping[str, Entry]) -> str:
    """The git id of the tree that holds `entries`.

    Args:
        entries: POSIX path relative to the tree's root -> mode and blob.

    Returns:
        What ``git write-tree`` prints for an index of these entries.
    """
    root: dict[bytes, object] = {}
    for path, entry in entries.items():
        *folders, name = path.encode().split(b"/")
        node = root
        for folder in folders:
            child = node.setdefault(folder, {})
            assert isinstance(child, dict), f"{path}: both a file and a folder"
            node = child
        node[name] = entry
    return _write_tree(root).hex()


def _write_tree(node: dict[bytes, object]) -> bytes:
    rows = []
    for name, child in node.items():
        if isinstance(child, Entry):
            row = b"%o %s\0" % (child.mode, name) + bytes.fromhex(child.blob)
            rows.append((name, row))
        else:
            assert isinstance(child, dict)
            row = _MODE_TREE + b" " + name + b"\0" + _write_tree(child)
            # Git sorts a folder as if its name ended with a slash.
            rows.append((name + b"/", row))
    body = b"".join(row for _, row in sorted(rows))
    digest = hashlib.sha1(b"tree %d\0" % len(body), usedforsecurity=False)
    digest.update(body)
    return digest.digest()


class Globs:
    """Paths named by patterns: ``*`` stays in a folder, ``**`` crosses them."""

    def __init__(self, patterns: Iterable[str]) -> None:
        joined = "|".join(_glob_to_regex(pattern) for pattern in patterns)
        self._regex = re.compile(joined or r"(?!)")

    def __contains__(self, path: str) -> bool:
        return self._regex.fullmatch(path) is not None

    def covers_folder(self, path: str) -> bool:
        """Whether everything below the folder `path` is named.

        Judged by a file name that no pattern spells out.
        """
        return f"{path}/\N{REPLACEMENT CHARACTER}/\N{REPLACEMENT CHARACTER}" in self


def _glob_to_regex(pattern: str) -> str:
    out = []
    for part in re.split(r"(\*\*/|\*\*|\*)", pattern):
        out.append(
            {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}.get(part, re.escape(part))
        )
    return "".join(out)
