# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
""".github/workflows is linted, pinned, and has few rights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.image_steps import ROOT
from support.side_env import lint, side_environment

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
USES = re.compile(r"^\s*(?:- )?uses: (\S+)(.*)$", re.M)
# The rights that each job has besides reading; the reason stands in the workflow.
WRITES = {
    ("image", "image"): {"id-token", "attestations"},
    ("rebase", "report"): {"contents", "issues"},
    ("release", "build"): {"id-token", "attestations"},
    ("release", "draft"): {"contents"},
}


def parsed(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def steps() -> list[tuple[str, str, dict]]:
    return [
        (path.stem, job, step)
        for path in WORKFLOWS
        for job, body in parsed(path)["jobs"].items()
        for step in body["steps"]
    ]


def test_all_four_are_there():
    assert [path.stem for path in WORKFLOWS] == ["ci", "image", "rebase", "release"]


def test_actionlint():
    shellcheck = side_environment("lint") / "bin" / "shellcheck"
    lint("actionlint", "-shellcheck", shellcheck, *WORKFLOWS)


def test_actionlint_sees_mistakes(tmp_path: Path):
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(
        "on: push\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps:\n"
        "      - run: echo ${{ needs.b.outputs.c }}\n"
    )
    with pytest.raises(AssertionError, match="needs"):
        lint("actionlint", wrong)


def test_zizmor():
    lint("zizmor", "--offline", "--persona", "pedantic", *WORKFLOWS)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_and_named_by_version(path: Path):
    found = USES.findall(path.read_text())
    assert found
    for action, comment in found:
        assert re.fullmatch(r"(actions|docker)/[a-z-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_one_action_has_one_version():
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for action, _ in USES.findall(path.read_text()):
            name, _, commit = action.partition("@")
            pins.setdefault(name, set()).add(commit)
    assert {name: commits for name, commits in pins.items() if len(commits) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_have_no_more_rights_than_they_need(path: Path):
    workflow = parsed(path)
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        rights = job["permissions"]
        writes = {right for right, level in rights.items() if level == "write"}
        assert writes == WRITES.get((path.stem, name), set())
        assert set(rights.values()) <= {"read", "write"}
        assert job["timeout-minutes"] <= 720


def test_no_secret_reaches_a_job_that_runs_foreign_code():
    """Code of a pull request, or of a new vLLM."""
    for name in ("ci", "rebase"):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
        assert "secrets." not in text and "pull_request_target" not in text


def test_no_registry_stands_in_a_workflow():
    for path in WORKFLOWS:
        assert not re.search(r"ghcr|quay|gcr\.io|docker\.io", path.read_text()), path


CALL = re.compile(r"python3? (scripts/[a-z]+)(?: ([a-z]+)\b)?([^|>\n]*)")


def test_scripts_that_are_called_know_the_command_and_its_options():
    called = set()
    for _, _, step in steps():
        called |= set(CALL.findall(step.get("run", "").replace("\\\n", " ")))
    called = {call for call in called if call[0] != "scripts/test"}
    assert {script for script, _, _ in called} == {
        "scripts/imagebuild",
        "scripts/patchset",
        "scripts/release",
        "scripts/tracking",
    }
    for script, command, rest in called:
        words = [sys.executable, str(ROOT / script), *filter(None, [command]), "--help"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script} {command}\n{done.stderr}"
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in done.stdout, f"{script} {command} {option}"


@pytest.mark.parametrize("command", ["release check v0", "imagebuild bake"])
def test_what_runs_before_anything_is_installed_needs_nothing(command: str):
    script, *rest = command.split()
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "scripts" / script), *rest],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Error" not in done.stderr, done.stderr
    assert done.returncode == (2 if script == "release" else 0), done.stderr
