# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The git store of one rebase: the base, the upstream, and the series on it.

It is a bare repository, so that a person mends a conflict with nothing but git.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.git import fixed_identity, git
from patchset.gittree import MODE_EXEC, MODE_FILE, Blob, Entry, Globs

MACHINE = fixed_identity("Flint patch set rebase", "rebase@localhost")


class Store:
    """A bare git repository with a process that reads its blobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "HEAD").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            git(folder, "init", "--quiet", "--bare", "--initial-branch=unused", ".")
        self._reader: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the reading process."""
        if self._reader is not None:
            assert self._reader.stdin is not None
            self._reader.stdin.close()
            self._reader.wait()
            self._reader = None

    def commit_of(self, name: str) -> str | None:
        """The full id of a ref's or an abbreviated commit, None if unknown."""
        found = git(
            self.folder,
            "rev-parse",
            "--verify",
            "--quiet",
            f"{name}^{{commit}}",
            check=False,
        )
        return found.decode().strip() or None

    def set_ref(self, ref: str, commit: str) -> None:
        """Point a full ref name at a commit."""
        git(self.folder, "update-ref", ref, commit)

    def borrow(self, objects: Path) -> None:
        """Read another repository's objects without copying them."""
        file = self.folder / "objects" / "info" / "alternates"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{objects.resolve()}\n")

    def entries(self, commit: str) -> dict[str, Entry]:
        """Mode and blob id of every plain file of a commit's tree."""
        rows = git(self.folder, "ls-tree", "-r", "-z", "--full-tree", commit)
        found = {}
        for row in rows.split(b"\0"):
            if not row:
                continue
            head, _, path = row.partition(b"\t")
            mode, _, blob = head.decode().split()
            if int(mode, 8) in (MODE_FILE, MODE_EXEC):
                found[path.decode("utf-8", "surrogateescape")] = Entry(
                    int(mode, 8), blob
                )
        return found

    def read(self, blob: str) -> bytes:
        """The bytes of a blob."""
        if self._reader is None:
            self._reader = subprocess.Popen(
                ["git", "cat-file", "--batch"],
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._reader.stdin is not None and self._reader.stdout is not None
        self._reader.stdin.write(f"{blob}\n".encode())
        self._reader.stdin.flush()
        head = self._reader.stdout.readline().split()
        if len(head) != 3:
            raise PatchsetError(f"{self.folder} lacks the object {blob}; remove it")
        data = self._reader.stdout.read(int(head[2]))
        self._reader.stdout.read(1)
        return data

    def write(self, data: bytes) -> str:
        """Keep a blob and return its id."""
        return (
            git(self.folder, "hash-object", "-w", "--stdin", data=data).decode().strip()
        )

    def write_commit(
        self,
        parent: str,
        changes: Mapping[str, Blob | None],
        message: str,
        env: Mapping[str, str] = MACHINE,
    ) -> str:
        """Commit a parent's tree with some files changed (None: removed)."""
        rows = []
        for path, blob in sorted(changes.items()):
            if blob is None:
                rows.append(f"0 {'0' * 40}\t{path}")
            else:
                rows.append(f"{blob.mode:o} {self.write(blob.data)}\t{path}")
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            index = {"GIT_INDEX_FILE": str(Path(temporary, "index"))}
            git(self.folder, "read-tree", parent, env=index)
            data = "".join(f"{row}\0" for row in rows).encode()
            git(self.folder, "update-index", "-z", "--index-info", data=data, env=index)
            tree = git(self.folder, "write-tree", env=index).decode().strip()
        made = git(
            self.folder,
            "commit-tree",
            tree,
            "-p",
            parent,
            data=message.encode(),
            env=dict(env),
        )
        return made.decode().strip()

    def renames(self, old: str, new: str) -> dict[str, str]:
        """Files of `old` that git finds under another name in `new`."""
        rows = git(
            self.folder,
            "-c",
            "diff.renameLimit=4000",
            "diff-tree",
            "-r",
            "-z",
            "--find-renames=60%",
            "--diff-filter=R",
            "--name-status",
            old,
            new,
        )
        words = rows.decode("utf-8", "surrogateescape").split("\0")
        return {words[i + 1]: words[i + 2] for i in range(0, len(words) - 2, 3)}

    def import_files(self, ref: str, files: Iterable[tuple[str, Blob]]) -> str:
        """Make a parentless commit of files and point `ref` at it."""
        with subprocess.Popen(
            ["git", "fast-import", "--quiet", "--force", "--done"],
            cwd=self.folder,
            stdin=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None
            out = process.stdin
            out.write(
                f"commit {ref}\ncommitter {MACHINE['GIT_COMMITTER_NAME']} "
                f"<{MACHINE['GIT_COMMITTER_EMAIL']}> 946684800 +0000\n"
                f"data 0\ndeleteall\n".encode()
            )
            for path, blob in files:
                out.write(f"M {blob.mode:o} inline {path}\n".encode())
                out.write(b"data %d\n%s\n" % (len(blob.data), blob.data))
            out.write(b"done\n")
            out.close()
        commit = self.commit_of(ref)
        if process.returncode or commit is None:
            raise PatchsetError(f"git fast-import failed in {self.folder}")
        return commit


def archive_files(archive: Path, skip: Globs) -> Iterator[tuple[str, Blob]]:
    """The plain files of a source archive's single top folder."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = member.name.partition("/")[2]
                if not member.isfile() or path in skip or "\n" in path:
                    continue
                file = tar.extractfile(member)
                assert file is not None
                mode = MODE_EXEC if member.mode & 0o100 else MODE_FILE
                yield path, Blob(file.read(), mode)
    except (OSError, tarfile.TarError) as exc:
        raise PatchsetError(f"cannot read {archive}: {exc}") from None


def folder_files(folder: Path, skip: Globs) -> Iterator[tuple[str, Blob]]:
    """The plain files below a folder."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in skip or path.is_symlink() or not path.is_file():
            continue
        mode = MODE_EXEC if path.stat().st_mode & 0o100 else MODE_FILE
        yield name, Blob(path.read_bytes(), mode)
