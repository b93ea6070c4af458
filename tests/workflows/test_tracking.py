# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""One issue for each upstream version, kept by a `gh` that is made up here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tracking.__main__ import LABEL, MAX_BODY, main

# Keeps its issues in a file, as GitHub does for `gh issue` and `gh label`.
FAKE = """\
#!{python}
import json, pathlib, sys
store = pathlib.Path(__file__).with_name("issues.json")
log = pathlib.Path(__file__).with_name("log")
issues = json.loads(store.read_text()) if store.exists() else []
words = sys.argv[1:]
with log.open("a") as file:
    file.write(" ".join(words[:2]) + "\\n")
option = lambda name: words[words.index(name) + 1]
if words[:2] == ["issue", "list"]:
    print(json.dumps([i for i in issues if i["label"] == option("--label")]))
elif words[:2] == ["issue", "create"]:
    number = len(issues) + 1
    issues.append(dict(number=number, title=option("--title"), state="OPEN",
                       label=option("--label"), body=sys.stdin.read()))
    print(f"https://example.com/issues/{{number}}")
elif words[:2] in (["issue", "edit"], ["issue", "reopen"]):
    issue = next(i for i in issues if str(i["number"]) == words[2])
    edit = words[1] == "edit"
    issue.update(dict(body=sys.stdin.read()) if edit else dict(state="OPEN"))
elif words[:2] != ["label", "create"]:
    sys.exit(f"unknown: {{words}}")
store.write_text(json.dumps(issues))
"""


class GitHub:
    """What the made-up `gh` holds and was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "gh"
        program.write_text(FAKE.format(python=sys.executable))
        program.chmod(0o755)

    @property
    def issues(self) -> list[dict]:
        return json.loads((self.folder / "issues.json").read_text())

    def set(self, issues: list[dict]) -> None:
        (self.folder / "issues.json").write_text(json.dumps(issues))

    def asked(self) -> list[str]:
        log = self.folder / "log"
        lines = log.read_text().splitlines()
        log.unlink()
        return lines


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GitHub:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return GitHub(folder)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.md").write_text("| patch | status |\n")
    return folder


def track(report: Path, version: str = "0.33.0", branch: str = "") -> int:
    return main(["--version", version, "--report", str(report), "--branch", branch])


def test_opens_one_issue_and_then_leaves_it_alone(github: GitHub, report: Path):
    assert track(report) == 0
    (issue,) = github.issues
    assert issue["title"] == "Rebase onto vLLM 0.33.0"
    assert issue["label"] == LABEL
    assert issue["body"] == "| patch | status |\n"
    github.asked()
    assert track(report) == 0
    assert github.issues == [issue]
    assert github.asked() == ["issue list"]


def test_updates_the_same_issue_and_opens_it_again(github: GitHub, report: Path):
    track(report)
    github.set([{**github.issues[0], "state": "CLOSED"}])
    (report / "report.md").write_text("| another |\n")
    assert track(report, branch="rebase/v0.33.0") == 0
    (issue,) = github.issues
    assert issue["state"] == "OPEN"
    assert "`rebase/v0.33.0`" in issue["body"] and "| another |" in issue["body"]


def test_each_version_has_its_own(github: GitHub, report: Path):
    track(report)
    track(report, version="0.34.0")
    titles = [issue["title"] for issue in github.issues]
    assert titles == ["Rebase onto vLLM 0.33.0", "Rebase onto vLLM 0.34.0"]


def test_a_long_report_is_cut(github: GitHub, report: Path):
    (report / "report.md").write_text("x" * (MAX_BODY + 1))
    assert track(report) == 0
    (issue,) = github.issues
    assert len(issue["body"]) == MAX_BODY
    assert "The report goes on" in issue["body"]


def test_without_a_report_nothing_is_asked(
    github: GitHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert track(tmp_path) == 2
    assert "no report" in capsys.readouterr().err
    assert not (github.folder / "log").exists()


def test_without_gh_it_says_so(
    report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(report))
    assert track(report) == 2
    assert "is not installed" in capsys.readouterr().err


def test_what_gh_says_is_passed_on(
    github: GitHub, report: Path, capsys: pytest.CaptureFixture[str]
):
    (github.folder / "gh").write_text("#!/bin/sh\necho not logged in >&2; exit 4\n")
    assert track(report) == 2
    assert "gh issue list: not logged in" in capsys.readouterr().err
