# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Trees that apply does not touch: another base, edited, half-patched, in use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from patchset.apply import apply_tree, status_tree
from patchset.errors import DirtyTreeError, PatchsetError
from patchset.txn import locked
from patchset.unapply import unapply_tree
from support.synthetic_vllm import (
    KINDS,
    MARKER,
    Synthetic,
    commit_edits,
    git,
    make,
    replace_lines,
    snapshot,
    statuses,
)


@pytest.mark.parametrize("kind", ["source", "package"])
def test_wrong_version(synthetic: Synthetic, kind: str) -> None:
    root = make(synthetic, kind)
    for path in (root / "PKG-INFO", root / "vllm-0.32.0.dist-info/METADATA"):
        if path.exists():
            path.write_text(path.read_text().replace("0.32.0", "0.31.0"))
    with pytest.raises(PatchsetError, match="wrong base: .* 0.31.0") as caught:
        apply_tree(root, synthetic.repo)
    assert caught.value.exit_code == 2


def test_unknown_version_needs_the_right_files(synthetic: Synthetic) -> None:
    root = synthetic.source()
    (root / "PKG-INFO").unlink()
    (root / "vllm/_version.py").unlink()
    assert apply_tree(root, synthetic.repo).exit_code == 0
    other = synthetic.source("other")
    (other / "PKG-INFO").unlink()
    (other / "vllm/_version.py").unlink()
    (other / "setup.py").write_text("changed\n")
    with pytest.raises(PatchsetError, match="wrong base"):
        apply_tree(other, synthetic.repo)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "state"),
    [
        ("vllm/registry.py", "edited"),  # touched, far from any hunk
        ("vllm/models/__init__.py", "foreign"),  # not touched
        ("vllm/models/new.py", "foreign"),  # unknown file
        ("vllm/models/flint/model.py", "edited"),  # in the overlay's place
    ],
)
def test_edited_tree_is_refused(
    synthetic: Synthetic, kind: str, path: str, state: str
) -> None:
    root = make(synthetic, kind)
    (root / path).parent.mkdir(exist_ok=True)
    with (root / path).open("a") as file:
        file.write("edited = True\n")
    before = snapshot(root)
    report = apply_tree(root, synthetic.repo)
    assert (report.exit_code, report.state) == (3, state), report.text()
    assert f"differs: {path}" in report.notes
    assert snapshot(root) == before
    assert status_tree(root, synthetic.repo).exit_code == 3


@pytest.mark.parametrize("kind", KINDS)
def test_conflicting_edit_reports_every_patch(synthetic: Synthetic, kind: str) -> None:
    root = make(synthetic, kind)
    replace_lines(root / "vllm/registry.py", {"entry = 60": "entry = 61"})
    before = snapshot(root)
    report = apply_tree(root, synthetic.repo)
    assert report.exit_code == 1
    found = statuses(report)
    assert found["model-register-flint"] == "would-apply"
    assert found["core-read-the-config-of-flint"] == "conflict"
    assert len(found) == 3
    (conflict,) = report.items[1].conflicts
    assert conflict.path == "vllm/registry.py"
    assert "entry = 60" in conflict.expected
    assert "entry = 61" in conflict.found
    assert snapshot(root) == before


def test_missing_file_is_a_conflict(synthetic: Synthetic) -> None:
    root = synthetic.source()
    (root / "vllm/config.py").unlink()
    report = apply_tree(root, synthetic.repo)
    assert report.exit_code == 1
    assert report.items[1].conflicts[0].why == "no such file"


def test_half_patched_tree_is_refused(synthetic: Synthetic) -> None:
    root = synthetic.checkout()
    for patch in synthetic.repo.series[:2]:
        git(root, "apply", str(synthetic.root / "patches" / patch.filename))
    before = snapshot(root)
    report = apply_tree(root, synthetic.repo)
    assert (report.exit_code, report.state) == (3, "partly")
    assert list(statuses(report).values()) == [
        "already-applied",
        "already-applied",
        "would-apply",
    ]
    assert snapshot(root) == before


def test_missing_marker_is_half_patched(synthetic: Synthetic) -> None:
    root = synthetic.source()
    apply_tree(root, synthetic.repo)
    (root / MARKER).unlink()
    report = apply_tree(root, synthetic.repo)
    assert (report.exit_code, report.state) == (3, "partly")


def test_link_on_the_way_is_refused(synthetic: Synthetic, tmp_path: Path) -> None:
    root = synthetic.source()
    (root / "vllm/models").rename(tmp_path / "elsewhere")
    (root / "vllm/models").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirtyTreeError, match="is a link"):
        apply_tree(root, synthetic.repo)


def test_another_version_of_the_series(synthetic: Synthetic) -> None:
    root = synthetic.source()
    before = snapshot(root)
    apply_tree(root, synthetic.repo)
    model = synthetic.root / "vllm_overlay/vllm/models/flint/model.py"
    model.write_text("class Flint: pass\n")
    report = apply_tree(root, synthetic.repo)
    assert (report.exit_code, report.state) == (3, "other-series")
    assert unapply_tree(root, synthetic.repo).exit_code == 0
    assert snapshot(root) == before


def test_stale_identity_is_refused(synthetic: Synthetic) -> None:
    root = synthetic.source()
    before = snapshot(root)
    model = synthetic.root / "vllm_overlay/vllm/models/flint/model.py"
    model.write_text("class Flint: pass\n")
    report = apply_tree(root, synthetic.repo)
    assert report.exit_code == 2
    assert "refresh" in report.summary
    assert snapshot(root) == before
    assert apply_tree(root, synthetic.repo, check_identity=False).exit_code == 0


def test_committed_change_of_a_checkout_is_seen(synthetic: Synthetic) -> None:
    root = synthetic.checkout()
    commit_edits(root, "mine", "no", {"setup.py": {"import setuptools": "import os"}})
    report = apply_tree(root, synthetic.repo)
    assert (report.exit_code, report.state) == (3, "foreign")
    assert report.notes == ["differs: setup.py"]


def test_other_commands_are_locked_out(synthetic: Synthetic) -> None:
    root = synthetic.source()
    with (
        locked(root),
        pytest.raises(PatchsetError, match="another patchset command"),
    ):
        apply_tree(root, synthetic.repo)


def test_what_is_no_vllm(synthetic: Synthetic, tmp_path: Path) -> None:
    with pytest.raises(PatchsetError, match="holds no vllm/"):
        apply_tree(tmp_path, synthetic.repo)
    with pytest.raises(PatchsetError, match="does not exist"):
        apply_tree(tmp_path / "no", synthetic.repo)
    with pytest.raises(PatchsetError, match="pass the folder above"):
        apply_tree(synthetic.source() / "vllm", synthetic.repo)
    with pytest.raises(PatchsetError, match="use the command `tree`"):
        apply_tree(synthetic.archive, synthetic.repo)
    two = synthetic.package()
    shutil.copytree(two / "vllm-0.32.0.dist-info", two / "vllm-0.31.0.dist-info")
    with pytest.raises(PatchsetError, match="more than one vLLM"):
        apply_tree(two, synthetic.repo)
