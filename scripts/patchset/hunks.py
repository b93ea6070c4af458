# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Places hunks as ``git apply`` does: exact context, any offset, no overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from patchset.diff import FileDiff, Hunk, split_lines
from patchset.gittree import MODE_EXEC, MODE_FILE, Blob


@dataclass(frozen=True)
class HunkConflict:
    """A hunk that fits nowhere.

    Attributes:
        path: the file.
        hunk: the hunk's header, or "" when the file as a whole does not fit.
        why: one line.
        line: where it was looked for first, counted from 1.
        expected: the lines the hunk expects.
        found: the lines that are there.
    """

    path: str
    hunk: str
    why: str
    line: int = 0
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class Applied:
    """The outcome for one file.

    Attributes:
        after: the file after the diff; None when it is deleted or conflicts.
        conflicts: every hunk that does not fit.
        offsets: (hunk header, lines it moved by) for each hunk that moved.
    """

    after: Blob | None
    conflicts: tuple[HunkConflict, ...] = ()
    offsets: tuple[tuple[str, int], ...] = ()


def apply_file(diff: FileDiff, before: Blob | None) -> Applied:
    """Apply one file's diff to `before` (None: no such file)."""

    def refuse(why: str) -> Applied:
        return Applied(None, (HunkConflict(diff.path, "", why),))

    if diff.creates:
        if before is not None:
            return refuse("the patch makes this file, but it exists")
        before = Blob(b"", diff.new_mode or MODE_FILE)
    elif before is None:
        return refuse("no such file")
    elif before.mode not in (MODE_FILE, MODE_EXEC):
        return refuse("not a plain file")
    elif diff.old_mode not in (None, before.mode):
        return refuse(f"its mode is {before.mode:o}, not {diff.old_mode:o}")
    lines, conflicts, offsets = _apply_hunks(diff, split_lines(before.data))
    if conflicts:
        return Applied(None, conflicts)
    if diff.deletes:
        if lines:
            return refuse("the patch deletes this file, but it has other lines")
        return Applied(None, (), offsets)
    return Applied(Blob(b"".join(lines), diff.new_mode or before.mode), (), offsets)


def _apply_hunks(
    diff: FileDiff, lines: list[bytes]
) -> tuple[list[bytes], tuple[HunkConflict, ...], tuple[tuple[str, int], ...]]:
    taken = [False] * len(lines)  # lines that an earlier hunk left or kept
    conflicts: list[HunkConflict] = []
    offsets: list[tuple[str, int]] = []
    missed = 0  # lines that refused hunks would have added
    for hunk in diff.hunks:
        old, new = hunk.old, hunk.new
        start = max(hunk.new_start - 1, 0)
        place = _find(hunk, old, lines, taken, max(start - missed, 0))
        if place is None:
            conflicts.append(_conflict(diff.path, hunk, lines, start - missed))
            missed += len(new) - len(old)
            continue
        if hunk.old_start and place != start - missed:
            offsets.append((hunk.header, place - start + missed))
        lines[place : place + len(old)] = new
        taken[place : place + len(old)] = [True] * len(new)
    return lines, tuple(conflicts), tuple(offsets)


def _find(
    hunk: Hunk, old: list[bytes], lines: list[bytes], taken: list[bool], start: int
) -> int | None:
    """The first place, nearest to `start`, where the old lines stand.

    A hunk that starts at line 1 must match there, and one without trailing
    context must match at the end: more context would exist otherwise.
    """
    last = len(lines) - len(old)
    at_start = hunk.old_start <= 1
    at_end = hunk.lines[-1][0] != b" "
    for place in _nearest_first(start, len(lines)):
        if place > last or (at_start and place) or (at_end and place != last):
            continue
        end = place + len(old)
        if lines[place:end] == old and not any(taken[place:end]):
            return place
    return None


def _nearest_first(start: int, last: int) -> Iterator[int]:
    """`start`, then one after, one before, two after, ... within 0..last."""
    start = min(start, last)
    yield start
    for step in range(1, last + 1):
        if start + step <= last:
            yield start + step
        if start - step >= 0:
            yield start - step


def _conflict(path: str, hunk: Hunk, lines: list[bytes], start: int) -> HunkConflict:
    start = max(0, min(start, len(lines)))
    found = lines[start : start + len(hunk.old)]
    return HunkConflict(
        path=path,
        hunk=hunk.header,
        why="the lines it expects are not there",
        line=start + 1,
        expected=tuple(map(_text, hunk.old)),
        found=tuple(map(_text, found)),
    )


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\n")
