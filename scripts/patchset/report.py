# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What a command found and did: one report, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from patchset.hunks import HunkConflict

# Statuses of a patch or an overlay file.
APPLIED = "applied"
UNAPPLIED = "unapplied"
WOULD_APPLY = "would-apply"
WOULD_UNAPPLY = "would-unapply"
ALREADY = "already-applied"
NOT_APPLIED = "not-applied"
CONFLICT = "conflict"
PARTLY = "partly-applied"
EDITED = "edited"
OUTSIDE = "skipped-outside-package"


@dataclass
class Item:
    """One line of a report.

    Attributes:
        kind: "patch", "overlay" or another command's word for what it checks.
        name: the patch's name or the file's path.
        status: one of the statuses above, or the command's own.
        detail: one line more.
        conflicts: hunks that fit nowhere.
        outside: files left out because they lie outside the package.
    """

    kind: str
    name: str
    status: str
    detail: str = ""
    conflicts: tuple[HunkConflict, ...] = ()
    outside: tuple[str, ...] = ()


@dataclass
class TreeCheck:
    """A tree id next to the one the pin expects."""

    actual: str
    expected: str

    @property
    def equal(self) -> bool:
        """Whether the tree is the expected one."""
        return self.actual == self.expected


@dataclass
class Report:
    """The outcome of one command on one target.

    Attributes:
        exit_code: 0 done, 1 conflict, 2 wrong base or use, 3 dirty tree.
        summary: one line.
        state: what the target is: "pristine", "patched", "partly", "edited",
            "foreign".
        identity: what it is made of: base, release, series_sha256.
        trees: tree ids by name ("package", "source").
        items: one for each patch and overlay file, or other thing checked.
        notes: further lines, such as files that differ.
    """

    command: str
    target: str
    kind: str = ""
    exit_code: int = 0
    summary: str = ""
    state: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    trees: dict[str, TreeCheck] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        data = asdict(self)
        for name, tree in self.trees.items():
            data["trees"][name]["equal"] = tree.equal
        return data

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def text(self) -> str:
        """The report for a reader: a table, the conflicts, then the summary."""
        kind = f" ({self.kind})" if self.kind else ""
        lines = [f"{self.command} {self.target}{kind}".rstrip()]
        lines += [f"  {key:<14} {value}" for key, value in self.identity.items()]
        for name, tree in self.trees.items():
            verdict = "as pinned" if tree.equal else f"pinned: {tree.expected or '-'}"
            lines.append(f"  {name + ' tree':<14} {tree.actual} ({verdict})")
        lines += self._item_lines()
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(self.summary)
        return "\n".join(lines)

    def _item_lines(self) -> list[str]:
        lines = []
        width = max((len(item.status) for item in self.items), default=0)
        files: Counter[str] = Counter()  # overlay files with nothing more to say
        for item in self.items:
            if item.kind == "overlay" and not item.detail:
                files[item.status] += 1
                continue
            detail = f"  ({item.detail})" if item.detail else ""
            lines.append(f"  {item.status:<{width}}  {item.kind} {item.name}{detail}")
            lines += [f"      outside the package: {path}" for path in item.outside]
            for conflict in item.conflicts:
                lines += _conflict_lines(conflict)
        for status, count in files.items():
            noun = "file" if count == 1 else "files"
            lines.append(f"  {status:<{width}}  overlay ({count} {noun})")
        return lines


def _conflict_lines(conflict: HunkConflict) -> list[str]:
    lines = [f"      {conflict.path} {conflict.hunk}".rstrip() + f": {conflict.why}"]
    if conflict.expected:
        lines.append(f"        expected at line {conflict.line}:")
        lines += [f"        | {line}" for line in conflict.expected]
        lines.append("        found:")
        lines += [f"        | {line}" for line in conflict.found or ("(end of file)",)]
    return lines
