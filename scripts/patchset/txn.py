# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Carries a plan out, all or nothing.

A transaction has three phases:

1. *prepare*: the new contents, a copy of the old ones and the record of what
   will be applied are written aside and synced. There is no journal yet; left
   here, the transaction is thrown away.
2. *commit*: begins when ``journal.json``, which says so, has been renamed into
   place. The new files are renamed into the target. Left here, the old contents
   are put back.
3. *done*: begins with a journal that says so. The record is renamed into place
   and folders that became empty go. Left here, that is finished.

``recover`` ends what a killed command left; it may be killed itself at any point.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchset import fsops
from patchset.errors import DirtyTreeError, PatchsetError
from patchset.git import git_dir
from patchset.gittree import MODE_EXEC, MODE_FILE, Blob, blob_id
from patchset.listing import read_blob
from patchset.plan import Change

COMMIT, DONE = "commit", "done"
_STATE_NAME = "flint-patchset"


def state_folder(root: Path) -> Path:
    """Where a target's undo state lives: in its git directory, if it has one.

    It must be on the target's own file system, for renames to be atomic.
    """
    inside = git_dir(root)
    if inside and inside.stat().st_dev == root.stat().st_dev:
        return inside / _STATE_NAME
    return root / f".{_STATE_NAME}"


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other patchset commands off the target.

    Raises:
        PatchsetError: another one is at work.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchsetError(
                f"another patchset command is at work on {root}; wait for it"
            ) from None
        except OSError as exc:
            print(f"warning: {root} cannot be locked ({exc.strerror})", file=sys.stderr)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Applied:
    """The record of what was applied to a target.

    Attributes:
        series_sha256: of the series that was applied.
        files: for each changed file its path, and as "before" and "after" the
            blob id or None. The n-th file's old contents are saved/<n>.
    """

    series_sha256: str
    files: list[dict[str, Any]]


class State:
    """The undo state of one target."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = state_folder(root)
        self.txn = self.folder / "txn"
        self.record = self.folder / "applied.json"
        self.saved = self.folder / "saved"
        self.is_done = False  # past the point of no return

    def applied(self) -> Applied | None:
        """What is applied here, as far as we did it."""
        try:
            data = json.loads(self.record.read_bytes())
            return Applied(data["series_sha256"], data["files"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as exc:
            raise DirtyTreeError(f"{self.record} is damaged: {exc!r}") from None

    def saved_blob(self, index: int, blob: str) -> Blob:
        """The saved contents of the n-th file of the record, checked."""
        path = self.saved / str(index)
        try:
            data = path.read_bytes()
            executable = path.stat().st_mode & 0o100
        except OSError as exc:
            raise DirtyTreeError(f"cannot read the saved {path}: {exc}") from None
        if blob_id(data) != blob:
            raise DirtyTreeError(f"the saved {path} is damaged")
        return Blob(data, MODE_EXEC if executable else MODE_FILE)

    # ---- running

    def run(self, changes: Sequence[Change], series_sha256: str | None) -> None:
        """Carry out `changes` and record the series (None: nothing is applied).

        What fails or interrupts it before the point of no return is undone; after
        it, the work is finished all the same.

        Raises:
            PatchsetError: it could not be done; the target is as before.
        """
        try:
            self._prepare(changes, series_sha256)
            self._commit()
            self._finish()
        except BaseException as exc:
            outcome = "is unchanged"
            try:
                self.recover()
            except OSError:
                outcome = "is half-changed; the next command on it repairs that"
            if self.is_done:
                return
            if not isinstance(exc, OSError):
                raise
            raise PatchsetError(
                f"cannot write {exc.filename or self.root}: {exc.strerror or exc}; "
                f"{self.root} {outcome}"
            ) from None

    def _prepare(self, changes: Sequence[Change], series_sha256: str | None) -> None:
        for folder in (self.folder, self.txn, self.txn / "new", self.txn / "old"):
            fsops.make_folder(folder)
        files = []
        for index, change in enumerate(changes):
            path = self.root / change.path
            keep = path.stat() if change.before is not None else None
            files.append(
                {
                    "path": change.path,
                    "before": change.before and blob_id(change.before.data),
                    "after": change.after and blob_id(change.after.data),
                }
            )
            if change.after is not None:
                mode = _permissions(change, keep)
                fsops.write_file(self._new(index), change.after.data, mode)
                _keep_owner(self._new(index), keep)
            if change.before is not None and keep is not None:
                mode = keep.st_mode & 0o7777
                fsops.write_file(self._old(index), change.before.data, mode)
                _keep_owner(self._old(index), keep)
        # Written now: once the target is changed, no more space is needed.
        record = {"series_sha256": series_sha256, "files": files}
        staged = json.dumps(record, indent=1).encode()
        fsops.write_file(self.txn / "applied.json", staged)
        folders = self._missing_folders(changes)
        self._write_journal({"phase": COMMIT, "folders": folders} | record)

    def _missing_folders(self, changes: Sequence[Change]) -> list[str]:
        needed = {
            folder.as_posix()
            for change in changes
            if change.after is not None
            for folder in Path(change.path).parents
        }
        return sorted(path for path in needed if not (self.root / path).is_dir())

    def _commit(self) -> None:
        journal = self._journal()
        for folder in journal["folders"]:
            fsops.make_folder(self.root / folder)
        for index, file in enumerate(journal["files"]):
            if file["after"] is None:
                fsops.unlink(self.root / file["path"])
            else:
                fsops.rename(self._new(index), self.root / file["path"])
        self._write_journal(journal | {"phase": DONE})
        self.is_done = True

    def _finish(self) -> None:
        """The last phase; any of its steps may be done already."""
        journal = self._journal()
        for file in journal["files"]:
            self._drop_bytecode(file["path"])
        if journal["series_sha256"]:
            if (self.txn / "old").is_dir():
                fsops.remove_tree(self.saved)
                fsops.rename(self.txn / "old", self.saved)
            if (self.txn / "applied.json").is_file():
                fsops.rename(self.txn / "applied.json", self.record)
        else:
            fsops.unlink(self.record)
            fsops.remove_tree(self.saved)
        gone = [file["path"] for file in journal["files"] if file["after"] is None]
        self._remove_unused({str(f) for path in gone for f in Path(path).parents})
        self._clear()

    # ---- recovering

    def recover(self) -> str | None:
        """End a transaction that a killed command left behind.

        Returns:
            What was done, for the user; None if there was nothing to do.

        Raises:
            DirtyTreeError: files were edited since; nothing was touched.
        """
        if not self.txn.is_dir():
            fsops.remove_folder(self.folder)
            return None
        journal = self._journal()
        if not journal:
            self._clear()
            return "cleaned up after an interrupted command; the tree is whole"
        if journal["phase"] == DONE:
            self.is_done = True
            self._finish()
            return "an interrupted command had done its work; finished its records"
        self._roll_back(journal)
        self._clear()
        return "an interrupted command left the tree half-changed; rolled it back"

    def _roll_back(self, journal: dict[str, Any]) -> None:
        strange, changed = [], []
        for index, file in enumerate(journal["files"]):
            blob = read_blob(self.root, file["path"])
            found = blob and blob_id(blob.data)
            restorable = file["before"] is None or self._old(index).exists()
            if found == file["after"] and restorable:
                changed.append((index, file))
            elif found != file["before"]:
                strange.append(file["path"])
        if strange:
            raise DirtyTreeError(
                "a command was interrupted here, and since then these files were "
                f"edited: {', '.join(strange)}. Old contents are in {self.txn}/old; "
                "put the files in order, then run the command again"
            )
        for index, file in changed:
            if file["before"] is None:
                fsops.unlink(self.root / file["path"])
            else:
                fsops.rename(self._old(index), self.root / file["path"])
            self._drop_bytecode(file["path"])
        self._remove_unused(set(journal["folders"]))

    # ---- details

    def _new(self, index: int) -> Path:
        return self.txn / "new" / str(index)

    def _old(self, index: int) -> Path:
        return self.txn / "old" / str(index)

    def _journal(self) -> dict[str, Any]:
        try:
            return json.loads((self.txn / "journal.json").read_bytes())
        except FileNotFoundError:
            return {}

    def _write_journal(self, journal: dict[str, Any]) -> None:
        staged = self.txn / "journal.new"
        fsops.write_file(staged, json.dumps(journal, indent=1).encode())
        fsops.rename(staged, self.txn / "journal.json")

    def _clear(self) -> None:
        """Remove the transaction; without its journal, what is left is junk."""
        fsops.unlink(self.txn / "journal.json")
        fsops.remove_tree(self.txn)
        fsops.remove_folder(self.folder)

    def _drop_bytecode(self, path: str) -> None:
        file = self.root / path
        if file.suffix == ".py":
            for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                with contextlib.suppress(OSError):
                    fsops.unlink(cached)

    def _remove_unused(self, folders: set[str]) -> None:
        """Remove those of the folders that are empty, innermost first."""
        for folder in sorted(folders - {"."}, reverse=True):
            fsops.remove_folder(self.root / folder / "__pycache__")
            fsops.remove_folder(self.root / folder)


def _permissions(change: Change, keep: os.stat_result | None) -> int:
    assert change.after is not None
    if keep is None:
        umask = os.umask(0)
        os.umask(umask)
        return (0o777 if change.after.mode == MODE_EXEC else 0o666) & ~umask
    mode = keep.st_mode & 0o7777
    if change.before and change.before.mode != change.after.mode:
        readable = (mode & 0o444) >> 2
        return mode | readable if change.after.mode == MODE_EXEC else mode & ~0o111
    return mode


def _keep_owner(path: Path, keep: os.stat_result | None) -> None:
    if keep is not None:
        with contextlib.suppress(OSError):
            os.chown(path, keep.st_uid, keep.st_gid)
