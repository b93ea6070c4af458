# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The repository's files, and the patched source tree that the overlay lands in."""

import subprocess
from pathlib import Path

import pytest

from patchset.repo import Repo, load_repo
from patchset.tree import base_archive, make_tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def repo() -> Repo:
    return load_repo(ROOT)


@pytest.fixture(scope="session")
def files() -> list[str]:
    """Every file that is in the repository or would be added to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = sorted({name for name in done.stdout.split("\0") if name})
    found = [name for name in names if (ROOT / name).is_file()]
    assert len(found) > 50
    return found


@pytest.fixture(scope="session")
def patched_tree(repo: Repo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("style") / "vllm"
    report = make_tree(tree, repo, base_archive(repo, None))
    assert report.exit_code == 0, report.text()
    return tree


@pytest.fixture(scope="session")
def changed_python(repo: Repo) -> list[str]:
    """The Python files of the patched tree that the series or overlay brings."""
    paths = {file.path for file in repo.overlay}
    paths |= {diff.path for patch in repo.series for diff in patch.files}
    return sorted(path for path in paths if path.endswith(".py"))
