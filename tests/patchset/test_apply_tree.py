# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""apply, unapply, status and verify on trees, checkouts and packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from synthetic_vllm import (
    OVERLAY,
    Synthetic,
    commit_edits,
    folders,
    git,
    replace_lines,
    snapshot,
)

from patchset.apply import apply_tree, status_tree
from patchset.errors import DirtyTreeError, PatchsetError
from patchset.report import Report
from patchset.txn import locked
from patchset.unapply import unapply_tree
from patchset.verify import verify

MARKER = "vllm/models/flint/_patchset.json"
KINDS = ("source", "checkout", "package", "cpu-package")


def make(synthetic: Synthetic, kind: str) -> Path:
    if kind == "cpu-package":
        return synthetic.package("cpu", "cpu-site")
    return getattr(synthetic, kind)()


def statuses(report: Report, kind: str = "patch") -> dict[str, str]:
    return {item.name: item.status for item in report.items if item.kind == kind}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(synthetic: Synthetic, kind: str) -> None:
    root, repo = make(synthetic, kind), synthetic.repo
    before, before_folders = snapshot(root), folders(root)
    first = apply_tree(root, repo)
    assert (first.exit_code, first.state) == (0, "patched"), first.text()
    assert first.trees["package"].equal
    assert "flint = 'Flint'\n" in (root / "vllm/registry.py").read_text()
    patched = snapshot(root)

    again = apply_tree(root, repo)
    assert again.exit_code == 0
    assert again.summary.startswith("already applied")
    assert set(statuses(again).values()) <= {
        "already-applied",
        "skipped-outside-package",
    }
    assert snapshot(root) == patched

    assert status_tree(root, repo).state == "patched"
    assert verify(root, repo).exit_code == 0

    back = unapply_tree(root, repo)
    assert back.exit_code == 0
    assert back.summary.endswith(f"this is vLLM {repo.pin.base.version} again")
    stale = {"vllm/__pycache__/registry.cpython-311.pyc",
             "vllm/__pycache__/config.cpython-312.opt-1.pyc"}  # fmt: skip
    assert snapshot(root) == {k: v for k, v in before.items() if k not in stale}
    assert folders(root) == before_folders
    assert unapply_tree(root, repo).summary.startswith("nothing to undo")
    assert verify(root, repo).exit_code == 1


def test_kinds_agree_on_identity(synthetic: Synthetic) -> None:
    trees = {}
    for kind in KINDS:
        trees[kind] = apply_tree(make(synthetic, kind), synthetic.repo).trees
    package = {kind: tree["package"].actual for kind, tree in trees.items()}
    assert package["source"] == package["checkout"] == package["package"]
    assert package["cpu-package"] != package["package"]
    assert trees["source"]["source"].actual == trees["checkout"]["source"].actual


def test_identity_is_gits_own(synthetic: Synthetic) -> None:
    """The source tree id is what git writes for the patched checkout."""
    root = synthetic.checkout()
    report = apply_tree(root, synthetic.repo)
    git(root, "rm", "--quiet", "--cached", "PKG-INFO", "setup.cfg")
    git(root, "add", "--all", ":!PKG-INFO", ":!setup.cfg", f":!{MARKER}")
    assert git(root, "write-tree") == report.trees["source"].actual


def test_package_leaves_out_what_lies_outside(synthetic: Synthetic) -> None:
    root = synthetic.package()
    report = apply_tree(root, synthetic.repo)
    assert statuses(report) == {
        "model-register-flint": "applied",
        "core-read-the-config-of-flint": "applied",
        "doc-say-that-flint-is-tested": "skipped-outside-package",
    }
    assert report.items[0].outside == ("docs/models.md",)
    assert statuses(report, "overlay")["tests/flint/test_model.py"] == (
        "skipped-outside-package"
    )
    assert not (root / "tests").exists()
    assert not (root / "docs").exists()


def test_record_stays_right(synthetic: Synthetic) -> None:
    root = synthetic.package()
    record = root / "vllm-0.32.0.dist-info/RECORD"
    before = record.read_text()
    apply_tree(root, synthetic.repo)
    rows = record.read_text().splitlines()
    names = [row.split(",")[0] for row in rows]
    for path in (*(p for p in OVERLAY if p.startswith("vllm/")), MARKER):
        assert names.count(path) == 1
    assert verify(root, synthetic.repo).exit_code == 0, "RECORD has a wrong hash"
    unapply_tree(root, synthetic.repo)
    assert record.read_text() == before


def test_verify_covers_binaries_of_a_package(synthetic: Synthetic) -> None:
    root = synthetic.package()
    apply_tree(root, synthetic.repo)
    (root / "vllm/native.so").write_bytes(b"\x7fELG")
    report = verify(root, synthetic.repo)
    assert report.exit_code == 1
    assert "differs: vllm/native.so" in report.notes


def test_stale_bytecode_goes(synthetic: Synthetic) -> None:
    root = synthetic.package()
    apply_tree(root, synthetic.repo)
    left = {path.name for path in (root / "vllm/__pycache__").iterdir()}
    assert left == {"__init__.cpython-311.pyc"}


def test_marker(synthetic: Synthetic) -> None:
    root, repo = synthetic.source(), synthetic.repo
    report = apply_tree(root, repo)
    content = json.loads((root / MARKER).read_text())
    assert content == {
        "base_version": "0.32.0",
        "base_commit": "0123456789",
        "release": "0.32.0+flint.1",
        "series_sha256": repo.series_sha256,
        "package_tree": report.trees["package"].actual,
        "required": ["model-register-flint", "core-read-the-config-of-flint"],
        "patches": [patch.name for patch in repo.series],
    }


def test_dry_run_writes_nothing(synthetic: Synthetic) -> None:
    root, repo = synthetic.source(), synthetic.repo
    before = snapshot(root)
    report = apply_tree(root, repo, dry_run=True)
    assert set(statuses(report).values()) == {"would-apply"}
    assert snapshot(root) == before
    apply_tree(root, repo)
    patched = snapshot(root)
    assert unapply_tree(root, repo, dry_run=True).summary.startswith("would restore")
    assert snapshot(root) == patched


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


def test_linked_package_files_do_not_change_their_origin(
    synthetic: Synthetic, tmp_path: Path
) -> None:
    """Installers link files from a cache, hard or soft; the cache must not change."""
    root = synthetic.package()
    for link in (Path.hardlink_to, Path.symlink_to):
        name = "registry" if link is Path.hardlink_to else "config"
        origin = tmp_path / f"{name}.py"
        shutil.move(root / f"vllm/{name}.py", origin)
        link(root / f"vllm/{name}.py", origin)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.py")}
    assert apply_tree(root, synthetic.repo).exit_code == 0
    assert {path: path.read_bytes() for path in tmp_path.glob("*.py")} == before


def test_unapply_refuses_edits_after_apply(synthetic: Synthetic) -> None:
    root = synthetic.source()
    apply_tree(root, synthetic.repo)
    with (root / "vllm/models/flint/model.py").open("a") as file:
        file.write("edited = True\n")
    before = snapshot(root)
    with pytest.raises(DirtyTreeError, match="vllm/models/flint/model.py") as caught:
        unapply_tree(root, synthetic.repo)
    assert caught.value.exit_code == 3
    assert snapshot(root) == before


def test_unapply_refuses_damaged_saved_bytes(synthetic: Synthetic) -> None:
    root = synthetic.source()
    apply_tree(root, synthetic.repo)
    saved = sorted((root / ".flint-patchset/saved").iterdir())
    saved[0].write_bytes(saved[0].read_bytes() + b"x")
    before = snapshot(root)
    with pytest.raises(DirtyTreeError, match="damaged"):
        unapply_tree(root, synthetic.repo)
    assert snapshot(root) == before


@pytest.mark.parametrize("kind", ["source", "package"])
def test_unapply_without_saved_bytes_reverses(synthetic: Synthetic, kind: str) -> None:
    root = make(synthetic, kind)
    before = snapshot(root)
    apply_tree(root, synthetic.repo)
    shutil.rmtree(root / ".flint-patchset")
    assert unapply_tree(root, synthetic.repo).exit_code == 0
    after = snapshot(root)
    assert after == {k: v for k, v in before.items() if k in after}
    assert {k for k in before if k not in after} <= {
        k for k in before if k.endswith(".pyc")
    }


def test_unapply_of_a_patched_wheel_is_refused(synthetic: Synthetic) -> None:
    root = synthetic.package()
    apply_tree(root, synthetic.repo)
    shutil.rmtree(root / ".flint-patchset")
    metadata = root / "vllm-0.32.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.32.0+flint.1"))
    assert status_tree(root, synthetic.repo).state == "patched"
    with pytest.raises(PatchsetError, match="built patched"):
        unapply_tree(root, synthetic.repo)


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


def test_base_put_back_by_git(synthetic: Synthetic) -> None:
    """A record of bytes that somebody else has undone does not stand in the way."""
    root = synthetic.checkout()
    apply_tree(root, synthetic.repo)
    git(root, "checkout", "--quiet", ".")
    git(root, "clean", "-fdq")
    assert status_tree(root, synthetic.repo).state == "pristine"
    assert apply_tree(root, synthetic.repo).exit_code == 0


def test_committed_change_of_a_checkout_is_seen(synthetic: Synthetic) -> None:
    root = synthetic.checkout()
    commit_edits(root, "mine", "no", {"setup.py": {"import setuptools": "import os"}})
    report = apply_tree(root, synthetic.repo)
    assert (report.exit_code, report.state) == (3, "foreign")
    assert report.notes == ["differs: setup.py"]


def test_upstream_checkout_is_known_by_its_commit(synthetic: Synthetic) -> None:
    """A checkout of the pinned commit may hold files that the archive lacks."""
    root = synthetic.checkout()
    (root / "LINK").symlink_to("setup.py")
    git(root, "add", "LINK")
    git(root, "commit", "--quiet", "-m", "upstream")
    head = git(root, "rev-parse", "HEAD")
    pin = synthetic.root / "pin.toml"
    pin.write_text(pin.read_text().replace("0123456789", head[:9]))
    assert apply_tree(root, synthetic.repo).exit_code == 0
    assert status_tree(root, synthetic.repo).state == "patched"
    (root / "setup.py").write_text("changed\n")
    report = status_tree(root, synthetic.repo)
    assert (report.exit_code, report.state) == (3, "foreign")


def test_untracked_ignored_files_do_not_count(synthetic: Synthetic) -> None:
    root = synthetic.checkout()
    (root / "vllm/built.so").write_bytes(b"\x7fELF")
    (root / "vllm/__pycache__").mkdir()
    (root / "vllm/__pycache__/x.cpython-311.pyc").write_bytes(b"")
    assert apply_tree(root, synthetic.repo).exit_code == 0


def test_permissions_survive(synthetic: Synthetic) -> None:
    root = synthetic.source()
    (root / "vllm/registry.py").chmod(0o600)
    apply_tree(root, synthetic.repo)
    assert (root / "vllm/registry.py").stat().st_mode & 0o777 == 0o600


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


def test_verify_archive(synthetic: Synthetic, tmp_path: Path) -> None:
    assert verify(synthetic.archive, synthetic.repo).exit_code == 0
    other = tmp_path / "vllm-0.32.0.tar.gz"
    other.write_bytes(synthetic.archive.read_bytes() + b"\0")
    assert verify(other, synthetic.repo).exit_code == 1
