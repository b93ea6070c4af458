# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The patch set becomes commits on vLLM's own source, and nothing else changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchset.errors import PatchsetError
from patchset.repo import Repo, load_repo
from patchset.staging import command
from patchset.staging.command import stage
from patchset.staging.steps import load_steps
from patchset.staging.texts import pull_request
from patchset.tree import base_archive, unpack
from support.synthetic_vllm import ROOT, git

REPO_FOLDERS = ("patches", "vllm_overlay", "staging")
# What the rules and texts look at; the whole tree would only cost time.
KEPT = ("vllm/", "tests/models/registry.py", "docs/", ".buildkite/", ".github/")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base as a git checkout; tests leave no branch behind."""
    repo = load_repo(ROOT)
    folder = tmp_path_factory.mktemp("staging") / "vllm"
    more = {d.path for patch in repo.series for d in patch.files}
    more.add("tests/transformers_utils/test_speculators_override.py")
    unpack(
        base_archive(repo),
        folder,
        lambda path: path.startswith(KEPT) or path in more,
    )
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--force", ".")
    git(folder, "commit", "--quiet", "-m", "vLLM")
    git(folder, "tag", repo.pin.base.tag)
    git(folder, "config", "user.name", "A Person")
    git(folder, "config", "user.email", "person@example.org")
    return folder


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of this repository's patch set, to be damaged."""
    root = tmp_path / "repo"
    for name in REPO_FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    shutil.copy(ROOT / "pin.toml", root)
    return root


def branches(checkout: Path) -> list[str]:
    return git(checkout, "branch", "--format=%(refname:short)").split()


def test_whole_series(checkout: Path, tmp_path: Path, real_repo: Repo) -> None:
    report = stage(real_repo, checkout, tmp_path, with_hooks=False, with_tests=False)
    plan = load_steps(real_repo)
    assert report.exit_code == 0, report.text()
    assert [step.name for step in report.steps] == [step.name for step in plan.steps]
    base = real_repo.pin.base.tag
    subjects = git(checkout, "log", "--reverse", "--format=%s", f"{base}..flint")
    assert subjects.splitlines() == [step.subject for step in plan.steps]
    trailers = git(
        checkout,
        "log",
        "--format=%(trailers:key=Signed-off-by,valueonly)%(trailers:key=Assisted-by,"
        "valueonly)",
        f"{base}..flint",
    )
    assert trailers.count("A Person <person@example.org>") == len(plan.steps)
    assert trailers.count("AI coding tools") == len(plan.steps)
    # The branch is the patched tree, but for what the steps leave out or add.
    shown = git(checkout, "show", "flint:vllm/models/flint/model.py")
    assert "require_patches" not in shown and "class FlintForCausalLM" in shown
    listed = set(git(checkout, "ls-tree", "-r", "--name-only", "flint").splitlines())
    ours = {file.path for file in real_repo.overlay} - plan.leave_out
    assert ours <= listed and not plan.leave_out & listed
    for patch in real_repo.series:
        for diff in patch.files:
            blob = git(checkout, "rev-parse", f"flint:{diff.path}")
            last = [d for p in real_repo.series for d in p.files if d.path == diff.path]
            assert blob == last[-1].new_blob, diff.path
    # The checkout itself is as it was.
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "branch", "--show-current") == "main"
    assert len(git(checkout, "worktree", "list").splitlines()) == 1
    text = (tmp_path / "02-model.md").read_text()
    for heading in ("## Overview", "## Claims", "## Validation", "## Details"):
        assert heading in text
    assert "<!-- Summarize" not in text and "[x] AI assistance" in text
    with pytest.raises(PatchsetError, match="has a branch flint already"):
        stage(real_repo, checkout, tmp_path, with_hooks=False, with_tests=False)
    git(checkout, "branch", "--quiet", "-D", "flint")


def test_one_step(checkout: Path, tmp_path: Path, real_repo: Repo) -> None:
    report = stage(
        real_repo,
        checkout,
        tmp_path,
        branch="one",
        only=["config-path"],
        with_hooks=False,
        with_tests=False,
    )
    assert [step.name for step in report.steps] == ["config-path"]
    assert git(checkout, "rev-list", "--count", "main..one") == "1"
    git(checkout, "branch", "--quiet", "-D", "one")


def test_failure_leaves_no_branch(
    checkout: Path,
    tmp_path: Path,
    real_repo: Repo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "rule_step", fail)
    with pytest.raises(KeyboardInterrupt):
        stage(real_repo, checkout, tmp_path, with_hooks=False, with_tests=False)
    assert branches(checkout) == ["main"]
    assert len(git(checkout, "worktree", "list").splitlines()) == 1


def test_other_base_names_the_patch(
    checkout: Path, tmp_path: Path, real_repo: Repo
) -> None:
    path = checkout / "vllm/entrypoints/cli/main.py"
    path.write_text(path.read_text().replace("args.dispatch_function(args)", "other()"))
    git(checkout, "commit", "--quiet", "--all", "-m", "Upstream moved on")
    try:
        with pytest.raises(PatchsetError, match="gguf: the patch frontend-.*does not"):
            stage(
                real_repo,
                checkout,
                tmp_path,
                onto="HEAD",
                with_hooks=False,
                with_tests=False,
            )
        assert branches(checkout) == ["main"]
    finally:
        git(checkout, "reset", "--quiet", "--hard", "HEAD~1")


def test_overlay_file_in_no_step(copied: Path) -> None:
    (copied / "vllm_overlay/vllm/models/flint/new.py").write_text("")
    with pytest.raises(PatchsetError, match="no step brings vllm/models/flint/new.py"):
        load_steps(load_repo(copied))


def test_patch_in_no_step(copied: Path) -> None:
    path = copied / "staging/steps.toml"
    path.write_text(path.read_text().replace('["model-register-flint"]', "[]"))
    with pytest.raises(PatchsetError, match="one step; see model-register-flint"):
        load_steps(load_repo(copied))


def test_file_that_comes_in_parts(
    copied: Path, checkout: Path, tmp_path: Path, real_repo: Repo
) -> None:
    """A step's edit cuts an overlay file, and a later step brings it whole."""
    report = stage(real_repo, checkout, tmp_path, with_hooks=False, with_tests=False)
    commits = {step.name: step.commit for step in report.steps}
    for file, name in (("attention", "FlintAttention"), ("mlp", "FlintSparseMoeBlock")):
        path = f"vllm/models/flint/{file}.py"
        cut, whole = (
            git(checkout, "show", f"{commits[step]}:{path}")
            for step in ("model", "kernels")
        )
        assert f"class {name}" in cut and "kernel" not in cut
        assert whole == (ROOT / "vllm_overlay" / path).read_text().strip()
    git(checkout, "branch", "--quiet", "-D", "flint")
    steps = copied / "staging/steps.toml"
    before, later = steps.read_text().split('name = "gguf"')
    steps.write_text(f'{before}name = "gguf"{later.replace(path, "none")}')
    with pytest.raises(PatchsetError, match=f"model edits {path}, and no later"):
        load_steps(load_repo(copied))


def test_edit_that_does_not_fit(copied: Path, checkout: Path, tmp_path: Path) -> None:
    path = "vllm/models/flint/attention.py"
    file = copied / "vllm_overlay" / path
    file.write_text(file.read_text().replace("def project(", "def projected("))
    with pytest.raises(PatchsetError, match=f"staging/edits/model does not fit {path}"):
        stage(load_repo(copied), checkout, tmp_path, with_hooks=False, with_tests=False)
    assert branches(checkout) == ["main"]


def test_dropped_line_must_be_there(
    copied: Path, checkout: Path, tmp_path: Path
) -> None:
    path = copied / "staging/steps.toml"
    path.write_text(path.read_text().replace('"        require_patches()"', '"none()"'))
    with pytest.raises(PatchsetError, match="which has it 0 times"):
        stage(load_repo(copied), checkout, tmp_path, with_hooks=False, with_tests=False)


def test_template_with_other_sections(real_repo: Repo) -> None:
    step = load_steps(real_repo).steps[0]
    with pytest.raises(PatchsetError, match="the template has Purpose, Test Plan"):
        pull_request(real_repo, step, "## Purpose\n\n## Test Plan\n", "", True)


def test_own_tests_pass_on_the_installed_vllm() -> None:
    """The tests that go upstream, here against the patched wheel."""
    files = sorted(str(p) for p in (ROOT / "staging/files").rglob("test_*.py"))
    assert files
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, *words, *files],
        cwd=ROOT / "staging",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
