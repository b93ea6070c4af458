# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The patched tree passes the base's own checks, with the base's own settings."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from patchset.repo import Repo

# Checks of the base's pre-commit configuration that take file names.
HOOKS = [
    "check_spdx_header.py",
    "check_forbidden_imports.py",
    "check_torch_cuda.py",
    "check_boolean_context_manager.py",
]


def run(tree: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_ruff_check(patched_tree: Path, changed_python: list[str]):
    run(patched_tree, "-m", "ruff", "check", "--no-cache", *changed_python)


def test_ruff_format(patched_tree: Path, changed_python: list[str]):
    run(patched_tree, "-m", "ruff", "format", "--no-cache", "--check", *changed_python)


def test_ruff_sees_these_files(patched_tree: Path, changed_python: list[str]):
    """A settings file that leaves the overlay out would make the above pass."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", *changed_python],
        cwd=patched_tree,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = {Path(line) for line in done.stdout.splitlines()}
    assert {patched_tree / path for path in changed_python} <= seen


# What the base's pre-commit hook installs beside mypy. It has neither torch nor
# transformers, and so takes what comes from them for Any.
HOOK_PACKAGES = [
    "annotated_types",
    "cachetools-stubs",
    "pydantic",
    "pydantic_core",
    "regex",
    "requests-stubs",
    "setuptools-stubs",
    "typing_extensions.py",
    "typing_inspection",
    "yaml-stubs",
]


@pytest.fixture
def mypy_of_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a mypy on PATH that sees the packages of the hook's environment only."""
    hook = tmp_path / "env"
    venv.create(hook, with_pip=False)
    here = Path(sysconfig.get_path("purelib"))
    site = Path(sysconfig.get_path("purelib", vars={"base": str(hook)}))
    for name in HOOK_PACKAGES:
        assert (here / name).exists(), name
        (site / name).symlink_to(here / name)
    command = tmp_path / "bin" / "mypy"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m mypy '
        f'--python-executable "{hook}/bin/python" "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("MYPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")


def test_mypy(mypy_of_the_hook: None, patched_tree: Path, changed_python: list[str]):
    run(patched_tree, "tools/pre_commit/mypy.py", "3.11", *changed_python)


@pytest.mark.parametrize("hook", HOOKS)
def test_pre_commit_hook(patched_tree: Path, changed_python: list[str], hook: str):
    run(patched_tree, f"tools/pre_commit/{hook}", *changed_python)


def test_overlay_files_start_with_the_bases_spdx_lines(repo: Repo):
    wanted = (
        b"# SPDX-License-Identifier: Apache-2.0\n"
        b"# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
    )
    python = [file for file in repo.overlay if file.path.endswith(".py")]
    assert python
    assert [f.path for f in python if not f.blob.data.startswith(wanted)] == []
