# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Opens or updates the tracking issue of an upstream version.

    python3 scripts/tracking --version 0.33.0 --report DIR [--branch NAME]

Needs the GitHub command line, `gh`, with a token that may write issues; the
repository is the one that it is run in. DIR holds report.md as `patchset rebase`
writes it. Nothing is written where the issue says the same already.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

LABEL = "upstream-rebase"
# GitHub refuses longer bodies.
MAX_BODY = 60_000
_CUT = "\n\n(The report goes on; the whole of it is among the files of the run.)\n"


class TrackingError(Exception):
    """Something is missing or failed; the message says what."""


def gh(*arguments: str, text: str | None = None) -> str:
    """Run the GitHub command line; returns what it printed.

    Raises:
        TrackingError: it is missing or failed.
    """
    try:
        done = subprocess.run(
            ["gh", *arguments], input=text, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise TrackingError("gh, the GitHub command line, is not installed") from None
    if done.returncode:
        raise TrackingError(f"gh {' '.join(arguments[:2])}: {done.stderr.strip()}")
    return done.stdout


def title_of(version: str) -> str:
    """The issue's title, by which it is found again."""
    return f"Rebase onto vLLM {version}"


def body_of(report: Path, branch: str) -> str:
    """The issue's body.

    Raises:
        TrackingError: there is no report.
    """
    try:
        text = (report / "report.md").read_text(encoding="utf-8")
    except OSError as error:
        raise TrackingError(f"no report: {error}") from None
    if branch:
        text = (
            "Only machine-made changes are needed; they are on the branch "
            f"`{branch}`.\n\n{text}"
        )
    return text if len(text) <= MAX_BODY else text[: MAX_BODY - len(_CUT)] + _CUT


def track(version: str, report: Path, branch: str) -> str:
    """Open or update the issue; returns what was done.

    Raises:
        TrackingError: GitHub or the report cannot be read.
    """
    title, body = title_of(version), body_of(report, branch)
    fields = "number,title,body,state"
    listed = gh(
        *("issue", "list", "--state", "all", "--label", LABEL),
        *("--limit", "200", "--json", fields),
    )
    same = [issue for issue in json.loads(listed) if issue["title"] == title]
    if not same:
        gh(*("label", "create", LABEL, "--force"))
        url = gh(
            *("issue", "create", "--title", title, "--label", LABEL),
            *("--body-file", "-"),
            text=body,
        )
        return f"opened {url.strip()}"
    issue = min(same, key=lambda found: found["number"])
    number = str(issue["number"])
    # GitHub gives line ends back as it pleases.
    if issue["body"].replace("\r\n", "\n").strip() == body.strip():
        return f"issue {number} says the same already"
    gh("issue", "edit", number, "--body-file", "-", text=body)
    if issue["state"].upper() != "OPEN":
        gh("issue", "reopen", number)
    return f"updated issue {number}"


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", required=True, help="the upstream version")
    parser.add_argument("--report", required=True, type=Path, help="rebase's folder")
    parser.add_argument("--branch", default="", help="branch that was pushed, if any")
    args = parser.parse_args(argv)
    try:
        print(track(args.version, args.report, args.branch))
    except TrackingError as error:
        print(f"tracking: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
