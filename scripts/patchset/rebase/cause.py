# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Says what became of the code that a hunk or file of a patch expects."""

from __future__ import annotations

import difflib
import re

from patchset.diff import FileDiff
from patchset.hunks import HunkConflict
from patchset.rebase.place import merge_hunk
from patchset.rebase.results import CHANGED, MOVED, VANISHED, Cause, Trouble
from patchset.rebase.trees import Tree

_ALIKE = 0.5  # of a hunk's lines: fewer, and the code is not the same code
_SHOWN = 12  # lines of upstream in a report
_WORD = re.compile(r"[^\W\d]\w+")
_CONFLICT = re.compile(
    r"^<<<<<<< upstream\n(?P<ours>.*?)^\|\|\|\|\|\|\| base\n(?P<base>.*?)^=======$",
    re.M | re.S,
)


def explain(
    diff: FileDiff,
    conflict: HunkConflict,
    tree: Tree,
    origin: Tree,
    renamed: str | None,
) -> Trouble:
    """Say what became of the code that one hunk, or a whole file, expects.

    Args:
        diff: the patch's change of that file.
        conflict: the hunk that does not fit; without a header, the file.
        tree: the upstream.
        origin: what the patch was made for.
        renamed: where git finds the file in the upstream, if not at its path.
    """
    trouble = Trouble(diff.path, conflict.hunk, conflict.why, conflict.expected)
    if diff.path not in tree:
        fate = MOVED if renamed else VANISHED
        trouble.cause = Cause(fate, where=renamed or "")
        return trouble
    expected = [line for line in conflict.expected if line.strip()]
    here = (tree.text(diff.path) or "").splitlines()
    share, start = _best_match(expected, here)
    elsewhere = _search(expected, diff.path, tree)
    if elsewhere and elsewhere[0] > max(share, _ALIKE):
        _, path, start = elsewhere
        lines = (tree.text(path) or "").splitlines()
        trouble.cause = Cause(MOVED, *_place(path, lines, start, len(expected)))
        return trouble
    if share >= _ALIKE:
        trouble.cause = Cause(CHANGED, *_place(diff.path, here, start, len(expected)))
        return trouble
    now = _in_its_place(diff, conflict.hunk, tree, origin)
    if now:
        start = here.index(now[0])
        where, _ = _place(diff.path, here, start, len(now))
        trouble.cause = Cause(CHANGED, where, tuple(now[:_SHOWN]))
    else:
        trouble.cause = Cause(VANISHED)
    return trouble


def _in_its_place(diff: FileDiff, hunk: str, tree: Tree, origin: Tree) -> list[str]:
    """Upstream's lines where git's merge conflicts, if they are the same code.

    Lines may be joined, split or edited: it is the names in them that count.
    """
    ours, ancestor = tree.read(diff.path), origin.read(diff.path)
    if not hunk or ours is None or ancestor is None:
        return []
    merged = merge_hunk(diff, hunk, ancestor, ours)
    for region in _CONFLICT.finditer(merged.decode("utf-8", "replace")):
        now, then = region["ours"], region["base"]
        wanted = set(_WORD.findall(then))
        if wanted and len(wanted & set(_WORD.findall(now))) >= _ALIKE * len(wanted):
            return [line for line in now.splitlines() if line.strip()]
    return []


def _place(
    path: str, lines: list[str], start: int, count: int
) -> tuple[str, tuple[str, ...]]:
    shown = lines[start : start + min(count + 2, _SHOWN)]
    return f"{path}:{start + 1}", tuple(shown)


def _best_match(expected: list[str], lines: list[str]) -> tuple[float, int]:
    """The share of the expected lines in the window with most of them, its start."""
    if not expected:
        return 0.0, 0
    wanted = {line.strip() for line in expected}
    hits = [i for i, line in enumerate(lines) if line.strip() in wanted]
    best, start = 0.0, 0
    for first in hits:
        window = [line.strip() for line in lines[first : first + 2 * len(expected)]]
        matcher = difflib.SequenceMatcher(
            None, [line.strip() for line in expected], window, autojunk=False
        )
        share = sum(m.size for m in matcher.get_matching_blocks()) / len(expected)
        if share > best:
            best, start = share, first
    return best, start


def _search(
    expected: list[str], path: str, tree: Tree
) -> tuple[float, str, int] | None:
    """Where else most of the lines stand, among files of the same kind.

    The longest line is looked for first: only files that hold it are compared.
    """
    telling = sorted({line.strip() for line in expected}, key=len)[-3:]
    needles = [line.encode() for line in telling if len(line) >= 8]
    if not needles:
        return None
    suffix = path.rpartition(".")[2]
    best: tuple[float, str, int] | None = None
    top = path.partition("/")[0] + "/"
    for other in tree:
        if other == path or not other.endswith(suffix) or not other.startswith(top):
            continue
        blob = tree.read(other)
        if blob is None or not any(needle in blob.data for needle in needles):
            continue
        lines = blob.data.decode("utf-8", "replace").splitlines()
        share, start = _best_match(expected, lines)
        if best is None or share > best[0]:
            best = (share, other, start)
    return best
