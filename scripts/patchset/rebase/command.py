# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command `rebase`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from patchset import fsops
from patchset.download import cache_folder
from patchset.errors import PatchsetError
from patchset.identity import package_tree
from patchset.rebase.carry import Carried, carry, mentions
from patchset.rebase.drift.compare import overlay_drift
from patchset.rebase.render import markdown
from patchset.rebase.results import (
    CONFLICT,
    GONE,
    HAND,
    Check,
    Drift,
    RebaseReport,
    Superseding,
    patch_from_dict,
)
from patchset.rebase.upstream import find_upstream, history_of, load_trees
from patchset.rebase.work import Work
from patchset.repo import Repo
from patchset.txn import locked

APPLIES, GOOD = "applies", "good"


class Outcome:
    """What the command prints; `text`, `json` and `exit_code` as a Report has them."""

    def __init__(self, report: RebaseReport) -> None:
        self.report = report
        self.exit_code = report.exit_code

    def text(self) -> str:
        """One line when nothing changed, else the report."""
        if self.report.unchanged:
            return self.report.summary
        return markdown(self.report).rstrip("\n")

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.report.as_dict(), indent=2)


def rebase(
    repo: Repo,
    onto: str,
    *,
    checkout: Path | None = None,
    gear: str = APPLIES,
    work_folder: Path | None = None,
    report_folder: Path | None = None,
) -> Outcome:
    """Carry the patch set to another upstream and report.

    Args:
        repo: the patch set.
        onto: a version, a folder, or a git ref in `checkout`.
        checkout: the upstream's git checkout.
        gear: "applies", or "good" to run the result too.
        work_folder: where to work; by default below the download cache.
        report_folder: where report.md and report.json go.

    Raises:
        PatchsetError: wrong use, no network, or a full disk.
    """
    try:
        report = _rebase(repo, onto, checkout, gear, work_folder, report_folder)
        if report_folder is not None:
            _write(report, report_folder)
    except OSError as exc:
        place = exc.filename or work_folder or cache_folder()
        raise PatchsetError(
            f"cannot write {place}: {exc.strerror or exc}; run it again to go on"
        ) from None
    return Outcome(report)


def _rebase(
    repo: Repo,
    onto: str,
    checkout: Path | None,
    gear: str,
    work_folder: Path | None,
    report_folder: Path | None,
) -> RebaseReport:
    began = time.monotonic()
    upstream = find_upstream(onto, checkout, repo)
    top = work_folder or cache_folder() / "rebase"
    work = Work(top / upstream.slug, upstream.slug)
    with locked(work.folder):
        try:
            key = work.key(repo, upstream.identity, gear)
            done, known = work.load(key)
            if known is not None:
                report = _known(known)
            else:
                report = RebaseReport(
                    upstream.onto,
                    vars(repo.pin.base).copy(),
                    upstream.as_dict(),
                    repo.series_sha256,
                    gear,
                )
                base, tip = load_trees(upstream, repo, work.store)
                history = history_of(upstream, repo, work.store, base, tip)
                carried = carry(
                    repo,
                    work,
                    base,
                    tip,
                    history,
                    done,
                    lambda patches: work.save(key, patches),
                )
                _fill(report, carried, work, repo)
                if gear == GOOD:
                    from patchset.rebase.good import run_good

                    run_good(report, carried, work, upstream, repo, report_folder)
                _judge(report, work)
                report.seconds = round(time.monotonic() - began, 1)
                work.save(key, report.patches, report)
        finally:
            work.store.close()
    return report


def _fill(report: RebaseReport, carried: Carried, work: Work, repo: Repo) -> None:
    report.patches = carried.patches
    report.superseded = carried.superseded
    report.resumed = carried.resumed
    report.store = str(work.store.folder)
    report.branch = f"rebase/{work.slug}"
    overlay = [file.path for file in repo.overlay]
    report.drift = overlay_drift(overlay, carried.base, carried.upstream)
    entries = carried.upstream.entries
    report.notes.append(f"package tree: {package_tree(entries, repo.pin)}")
    for path in mentions(carried.superseded, carried.upstream):
        report.notes.append(f"{path} names a folder whose files ours supersede")
    if carried.resumed:
        report.notes.append(
            f"resumed: an interrupted run had finished {carried.resumed} patches"
        )


def _judge(report: RebaseReport, work: Work) -> None:
    stuck = [p for p in report.patches if p.status in (CONFLICT, GONE) and not p.made]
    failed = [check for check in report.checks if check.result == "failed"]
    waiting = [check for check in report.checks if check.result == "not run"]
    report.exit_code = 1 if stuck or report.drift or failed else 0
    if stuck or report.drift or failed:
        report.verdict = "broken"
    else:
        good = report.checks and not waiting
        report.verdict = GOOD if good else APPLIES
    by_hand = sum(patch.made == HAND for patch in report.patches)
    parts = [
        f"{len(report.patches) - len(stuck)} of {len(report.patches)} patches apply",
        f"{by_hand} by hand" if by_hand else "",
        f"{len(report.superseded)} upstream files superseded"
        if report.superseded
        else "",
        f"{len(report.drift)} drifts of the overlay" if report.drift else "no drift",
        *(f"{check.name} {check.result}" for check in report.checks),
    ]
    report.summary = f"{report.verdict}: {', '.join(filter(None, parts))}"
    report.last_good = work.last_good


def _known(data: dict) -> RebaseReport:
    report = RebaseReport(
        **{
            **data,
            "patches": [patch_from_dict(row) for row in data["patches"]],
            "superseded": [Superseding(**row) for row in data["superseded"]],
            "drift": [Drift(**row) for row in data["drift"]],
            "checks": [Check(**row) for row in data["checks"]],
        }
    )
    report.unchanged = True
    report.exit_code = 0
    report.summary = (
        f"rebase onto {report.onto}: nothing changed since the last run ("
        f"{report.summary})"
    )
    return report


def _write(report: RebaseReport, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "report.md": markdown(report),
        "report.json": json.dumps(report.as_dict(), indent=2) + "\n",
    }
    for name, text in files.items():
        staged = folder / f".{name}.new"
        fsops.write_file(staged, text.encode())
        fsops.rename(staged, folder / name)
