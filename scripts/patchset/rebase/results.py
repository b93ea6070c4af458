# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What a rebase found: plain data, as the JSON report holds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Statuses of a patch. CLEAN: every hunk fits where it did. OFFSET: hunks moved, or
# lines beside them changed and git's three-way merge placed them. ALREADY: upstream
# has exactly this. SUPERSEDED: upstream has the same names with other contents.
CLEAN = "clean"
OFFSET = "clean-with-offset"
ALREADY = "already-upstream"
SUPERSEDED = "superseded"
CONFLICT = "conflict"
GONE = "target-gone"

# What became of code that a patch expects.
MOVED = "moved"
CHANGED = "changed"
VANISHED = "vanished"

HAND, MACHINE = "hand", "machine"


@dataclass
class Cause:
    """What made a hunk or file stop fitting.

    Attributes:
        fate: "moved", "changed" or "vanished".
        where: where the code is now, if it is anywhere: "path:line".
        now: the upstream lines that stand there.
        commit, subject, pull_request: the commit that broke it, with git history.
        release: the first release that breaks it, with archives only.
        tried: how many commits or releases were looked at to find it.
    """

    fate: str
    where: str = ""
    now: tuple[str, ...] = ()
    commit: str = ""
    subject: str = ""
    pull_request: str = ""
    release: str = ""
    tried: int = 0


@dataclass
class Trouble:
    """One hunk that does not fit, or a file that is not there (then no hunk)."""

    path: str
    hunk: str
    why: str
    expected: tuple[str, ...] = ()
    cause: Cause | None = None


@dataclass
class FileOutcome:
    """One file of one patch.

    Attributes:
        status: one of the statuses above.
        detail: one line more.
        rows: names that upstream has too.
    """

    path: str
    status: str
    detail: str = ""
    rows: list[str] = field(default_factory=list)


@dataclass
class PatchOutcome:
    """One patch.

    Attributes:
        status: the worst of its files.
        made: "machine" or "hand" where a commit was made, else "".
        commit: that commit in the store.
        fix: how a person mends a conflict.
    """

    name: str
    status: str
    required: bool
    made: str = ""
    commit: str = ""
    detail: str = ""
    files: list[FileOutcome] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    fix: str = ""


@dataclass
class Superseding:
    """A file of upstream's at a place that the overlay owns.

    Attributes:
        outcome: "replaced" by ours, "removed" because ours has none there, or
            "same" bytes.
    """

    path: str
    outcome: str


@dataclass
class Drift:
    """Something that the overlay or a patch relies on and upstream has changed.

    Attributes:
        kind: "import", "attribute", "call", "override", "abstract" or "user".
        path, line: where it is relied on.
        name: what is relied on.
        detail: what is different.
    """

    kind: str
    path: str
    line: int
    name: str
    detail: str


@dataclass
class Check:
    """One part of the gear "good".

    Attributes:
        result: "passed", "failed" or "not run".
    """

    name: str
    result: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class RebaseReport:
    """All of one rebase.

    Attributes:
        onto: what was asked for.
        upstream: what it is: kind, version, and sha256, commit or tree.
        verdict: "applies", "good", or "broken".
        exit_code: 0 clean, 1 conflicts or drift, as the command returns it.
        resumed: how many patches an interrupted run had finished.
        branch: the ref in `store` that holds the rebased series.
        proposal: folder with the pin and the patches that would follow.
    """

    onto: str
    base: dict[str, str]
    upstream: dict[str, str]
    series_sha256: str
    gear: str
    verdict: str = ""
    summary: str = ""
    exit_code: int = 0
    unchanged: bool = False
    resumed: int = 0
    seconds: float = 0.0
    patches: list[PatchOutcome] = field(default_factory=list)
    superseded: list[Superseding] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    store: str = ""
    branch: str = ""
    proposal: str = ""
    last_good: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def patch_from_dict(data: dict[str, Any]) -> PatchOutcome:
    """A patch's outcome from a report's or state file's JSON."""
    files = [FileOutcome(**file) for file in data["files"]]
    troubles = [
        Trouble(**{**row, "cause": Cause(**row["cause"]) if row["cause"] else None})
        for row in data["troubles"]
    ]
    return PatchOutcome(**{**data, "files": files, "troubles": troubles})
