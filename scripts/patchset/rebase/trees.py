# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A tree of files in the store, with changes laid over it in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from patchset.gittree import Blob, Entry
from patchset.rebase.store import Store


class Tree:
    """A commit's files and what was changed since.

    Attributes:
        changes: path -> new contents, None for a file taken away.
    """

    def __init__(
        self,
        store: Store,
        entries: Mapping[str, Entry],
        changes: Mapping[str, Blob | None] | None = None,
    ) -> None:
        self.store = store
        self.entries = entries
        self.changes: dict[str, Blob | None] = dict(changes or {})

    @classmethod
    def at(cls, store: Store, commit: str) -> Tree:
        """The tree of a commit."""
        return cls(store, store.entries(commit))

    def __contains__(self, path: str) -> bool:
        if path in self.changes:
            return self.changes[path] is not None
        return path in self.entries

    def __iter__(self) -> Iterator[str]:
        for path in self.entries:
            if self.changes.get(path, True) is not None:
                yield path
        for path, blob in self.changes.items():
            if blob is not None and path not in self.entries:
                yield path

    def read(self, path: str) -> Blob | None:
        """One file; None where there is none."""
        if path in self.changes:
            return self.changes[path]
        entry = self.entries.get(path)
        return entry and Blob(self.store.read(entry.blob), entry.mode)

    def text(self, path: str) -> str | None:
        """One file as text; None where there is none."""
        blob = self.read(path)
        return blob and blob.data.decode("utf-8", "replace")

    def changed(self, changes: Mapping[str, Blob | None]) -> Tree:
        """This tree with more changes."""
        return Tree(self.store, self.entries, {**self.changes, **changes})
