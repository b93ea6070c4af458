# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The report of a rebase for a reader, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from patchset.rebase.results import Cause, PatchOutcome, RebaseReport, Trouble


def markdown(report: RebaseReport) -> str:
    """The report as Markdown."""
    lines = [f"# The patch set on {report.onto}", "", report.summary, ""]
    lines += _table(
        ("", ""),
        [
            ("base", _row(report.base)),
            ("upstream", _row(report.upstream)),
            ("series", report.series_sha256[:12]),
            ("gear", report.gear),
            ("branch", f"`{report.branch}` in `{report.store}`"),
            ("last good", _row(report.last_good) or "none recorded"),
        ],
    )
    lines += ["", "## Patches", ""]
    lines += _table(
        ("patch", "status", "made by", "files"),
        [
            (p.name, p.status, p.made or "-", _files(p) + _detail(p))
            for p in report.patches
        ],
    )
    for patch in report.patches:
        lines += _patch(patch)
    lines += _superseded(report)
    lines += _drift(report)
    if report.checks:
        lines += ["", "## Is it good?", ""]
        lines += _table(
            ("check", "result", "seconds", ""),
            [(c.name, c.result, f"{c.seconds:.0f}", c.detail) for c in report.checks],
        )
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def _row(fields: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(plain)} |"

    return [line(head), line(("---",) * len(head)), *map(line, rows)]


def _files(patch: PatchOutcome) -> str:
    counts = Counter(file.status for file in patch.files)
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _detail(patch: PatchOutcome) -> str:
    return f"; {patch.detail}" if patch.detail else ""


def _patch(patch: PatchOutcome) -> Iterator[str]:
    told = [file for file in patch.files if file.detail or file.rows]
    if not told and not patch.troubles:
        return
    yield from ("", f"### {patch.name}", "")
    for file in told:
        rows = f" ({', '.join(f'`{row}`' for row in file.rows)})" if file.rows else ""
        detail = f": {file.detail}" if file.detail else ""
        yield f"- `{file.path}`: {file.status}{detail}{rows}"
    for trouble in patch.troubles:
        yield from _trouble(trouble)
    if patch.fix:
        yield from ("", f"To mend it: `{patch.fix}`")


def _trouble(trouble: Trouble) -> Iterator[str]:
    yield ""
    yield f"`{trouble.path}` {trouble.hunk}: {trouble.why}."
    cause = trouble.cause
    if cause is not None:
        yield f"The code {_fate(cause)}.{_since(cause)}"
    if trouble.expected:
        yield from ("", "```", *trouble.expected, "```")
    if cause is not None and cause.now:
        yield from ("", f"Upstream, {cause.where}:", "", "```", *cause.now, "```")


def _fate(cause: Cause) -> str:
    words = {"moved": "moved to", "changed": "changed at"}
    if cause.where and cause.fate in words:
        return f"{words[cause.fate]} `{cause.where}`"
    return cause.fate


def _since(cause: Cause) -> str:
    if cause.commit:
        pull = f" (pull request {cause.pull_request})" if cause.pull_request else ""
        return f" Broken by {cause.commit[:12]}, {cause.subject!r}{pull}."
    if cause.release:
        return f" The first release that breaks it is {cause.release}."
    return ""


def _superseded(report: RebaseReport) -> Iterator[str]:
    if not report.superseded:
        return
    yield from ("", "## Upstream's files that ours supersede", "")
    yield "Each is ours or gone; none is mixed with upstream's."
    yield ""
    yield from _table(
        ("file", "outcome"), [(f.path, f.outcome) for f in report.superseded]
    )


def _drift(report: RebaseReport) -> Iterator[str]:
    yield from ("", "## Overlay drift", "")
    if not report.drift:
        yield "None: every import, signature and overridden method is as in the base."
        return
    yield from _table(
        ("kind", "where", "what", "difference"),
        [(d.kind, f"{d.path}:{d.line}", f"`{d.name}`", d.detail) for d in report.drift],
    )
