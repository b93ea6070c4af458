# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Reads git's unified diffs. Anything not understood exactly is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from patchset.errors import PatchsetError
from patchset.gittree import MODE_EXEC, MODE_FILE, blob_id

NO_BLOB = "0" * 40
_EMPTY_BLOB = blob_id(b"")
_MODES = {b"100644": MODE_FILE, b"100755": MODE_EXEC}
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?\n?")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d{6}))?\n")
_NO_NEWLINE = b"\\ No newline at end of file"


class DiffError(PatchsetError):
    """The text is no diff that this reader serves."""


@dataclass(frozen=True)
class Hunk:
    """One hunk. Lines keep their line ends, so CRLF and a missing one survive.

    Attributes:
        old_start: first old line, counted from 1 (0 in an empty file).
        new_start: first new line, counted likewise.
        lines: (b" ", b"-" or b"+", line).
    """

    old_start: int
    new_start: int
    lines: tuple[tuple[bytes, bytes], ...]

    @property
    def old(self) -> list[bytes]:
        """The lines it expects."""
        return [line for tag, line in self.lines if tag != b"+"]

    @property
    def new(self) -> list[bytes]:
        """The lines it leaves."""
        return [line for tag, line in self.lines if tag != b"-"]

    @property
    def header(self) -> str:
        """Its place as a diff writes it."""
        old, new = len(self.old), len(self.new)
        return f"@@ -{self.old_start},{old} +{self.new_start},{new} @@"

    def reversed(self) -> Hunk:
        """The hunk that undoes this one."""
        swap = {b"+": b"-", b"-": b"+", b" ": b" "}
        lines = tuple((swap[tag], line) for tag, line in self.lines)
        return Hunk(self.new_start, self.old_start, lines)


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file.

    Attributes:
        path: POSIX path relative to the tree's root.
        old_mode, new_mode: git modes; None where the file does not exist, or
            where the diff does not name the mode of a file it keeps.
        old_blob, new_blob: full blob ids, `NO_BLOB` where it does not exist;
            None for a diff that only changes the mode.
    """

    path: str
    creates: bool
    deletes: bool
    old_mode: int | None
    new_mode: int | None
    old_blob: str | None
    new_blob: str | None
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        """The diff that undoes this one."""
        return replace(
            self,
            creates=self.deletes,
            deletes=self.creates,
            old_mode=self.new_mode,
            new_mode=self.old_mode,
            old_blob=self.new_blob,
            new_blob=self.old_blob,
            hunks=tuple(hunk.reversed() for hunk in self.hunks),
        )


def parse_diff(data: bytes, name: str) -> tuple[FileDiff, ...]:
    """Parse a diff that starts with its first ``diff --git`` line.

    Args:
        data: the diff.
        name: what to call it in messages.

    Raises:
        DiffError: naming the line that is not served.
    """
    reader = _Reader(data, name)
    files = []
    while reader.more():
        files.append(_parse_file(reader))
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise DiffError(f"{name}: {file.path} occurs twice; merge its hunks")
        seen.add(file.path)
    return tuple(files)


class _Reader:
    def __init__(self, data: bytes, name: str) -> None:
        self.lines = split_lines(data)
        self.name = name
        self.at = 0

    def more(self) -> bool:
        return self.at < len(self.lines)

    def peek(self) -> bytes:
        return self.lines[self.at] if self.more() else b""

    def take(self) -> bytes:
        line = self.peek()
        self.at += 1
        return line

    def fail(self, why: str) -> DiffError:
        return DiffError(f"{self.name}, line {self.at} of its diff: {why}")


def _parse_file(reader: _Reader) -> FileDiff:
    path = _git_path(reader)
    old_mode: int | None = None
    new_mode: int | None = None
    creates = deletes = False
    blobs: tuple[str | None, str | None] = (None, None)
    while reader.more():
        line = reader.peek()
        if line.startswith((b"diff --git ", b"--- ", b"@@ ")):
            break
        reader.take()
        words = line.rstrip(b"\n").split(b" ")
        if line.startswith(b"old mode "):
            old_mode = _mode(reader, words[2])
        elif line.startswith(b"new mode "):
            new_mode = _mode(reader, words[2])
        elif line.startswith(b"new file mode "):
            creates, new_mode = True, _mode(reader, words[3])
        elif line.startswith(b"deleted file mode "):
            deletes, old_mode = True, _mode(reader, words[3])
        elif match := _INDEX.fullmatch(line):
            blobs = (match[1].decode(), match[2].decode())
            if match[3]:
                old_mode = new_mode = _mode(reader, match[3])
        elif line.startswith((b"rename ", b"copy ", b"similarity ", b"dissimilarity ")):
            raise reader.fail("renames and copies are not served; use --no-renames")
        elif line.startswith((b"Binary files", b"GIT binary patch")):
            raise reader.fail(f"{path}: binary changes are not served")
        elif line.startswith(b"index "):
            raise reader.fail("the index line must hold full ids (--full-index)")
        else:
            raise reader.fail(f"not a line of a git diff: {_show(line)}")
    hunks = _parse_hunks(reader, path, creates, deletes)
    if hunks and blobs[0] is None:
        raise reader.fail(f"{path}: no index line with full ids (--full-index)")
    mode_only = blobs[0] is None and old_mode is not None and new_mode is not None
    empty_file = set(blobs) == {NO_BLOB, _EMPTY_BLOB}
    if not (hunks or mode_only or empty_file):
        raise reader.fail(f"{path}: changes nothing")
    if creates != (blobs[0] == NO_BLOB) or deletes != (blobs[1] == NO_BLOB):
        raise reader.fail(f"{path}: the index line contradicts the file's mode line")
    return FileDiff(path, creates, deletes, old_mode, new_mode, *blobs, hunks)


def _git_path(reader: _Reader) -> str:
    line = reader.take()
    match = re.fullmatch(rb"diff --git a/(.+) b/(.+)\n", line)
    if not match or match[1] != match[2]:
        raise reader.fail(f"not a 'diff --git' line of one file: {_show(line)}")
    try:
        path = match[1].decode("ascii")
    except UnicodeDecodeError:
        raise reader.fail("only ASCII paths are served") from None
    parts = path.split("/")
    if {"", ".", "..", ".git"} & set(parts) or "\\" in path or "\t" in path:
        raise reader.fail(f"unsafe path {path!r}")
    return path


def _mode(reader: _Reader, text: bytes) -> int:
    if text not in _MODES:
        raise reader.fail(f"mode {_show(text)}: only plain files are served")
    return _MODES[text]


def _parse_hunks(
    reader: _Reader, path: str, creates: bool, deletes: bool
) -> tuple[Hunk, ...]:
    if not reader.peek().startswith(b"--- "):
        if reader.peek().startswith(b"@@ "):
            raise reader.fail(f"{path}: a hunk without --- and +++ lines")
        return ()
    # Git ends the name with a tab where it holds a space.
    names = [reader.take().rstrip(b"\n").removesuffix(b"\t") for _ in range(2)]
    old = b"--- /dev/null" if creates else b"--- a/" + path.encode()
    new = b"+++ /dev/null" if deletes else b"+++ b/" + path.encode()
    if names != [old, new]:
        raise reader.fail(f"{path}: the --- and +++ lines name another file")
    hunks = []
    while reader.peek().startswith(b"@@ "):
        hunks.append(_parse_hunk(reader))
    if not hunks:
        raise reader.fail(f"{path}: no hunk")
    if (creates or deletes) and len(hunks) != 1:
        raise reader.fail(f"{path}: a file is made or deleted by one hunk")
    if creates and hunks[0].old or deletes and hunks[0].new:
        raise reader.fail(f"{path}: keeps lines of a file that does not exist")
    return tuple(hunks)


def _parse_hunk(reader: _Reader) -> Hunk:
    match = _HUNK.fullmatch(reader.take())
    if not match:
        raise reader.fail("malformed hunk header")
    old_left, new_left = (int(match[i] or b"1") for i in (2, 4))
    lines: list[tuple[bytes, bytes]] = []
    ended = {b"-": False, b"+": False}
    while old_left or new_left:
        if not reader.more():
            raise reader.fail("the hunk ends early")
        line = reader.take()
        tag, text = line[:1], line[1:]
        if tag not in (b" ", b"-", b"+"):
            raise reader.fail(f"not a line of a hunk: {_show(line)}")
        old_left -= tag != b"+"
        new_left -= tag != b"-"
        if old_left < 0 or new_left < 0:
            raise reader.fail("the hunk holds more lines than its header says")
        sides = (b"-", b"+") if tag == b" " else (tag,)
        if any(ended[side] for side in sides):
            raise reader.fail("a line after the one without a line end")
        if not text.endswith(b"\n"):
            raise reader.fail("the hunk is cut off inside a line")
        if reader.peek().rstrip(b"\n") == _NO_NEWLINE:
            reader.take()
            text = text[:-1]
            ended.update(dict.fromkeys(sides, True))
        lines.append((tag, text))
    if all(tag == b" " for tag, _ in lines):
        raise reader.fail("a hunk that changes nothing")
    return Hunk(int(match[1]), int(match[3]), tuple(lines))


def split_lines(data: bytes) -> list[bytes]:
    """Split at LF only (bytes.splitlines also splits at a lone CR)."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", data)


def _show(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace").rstrip("\n"))
