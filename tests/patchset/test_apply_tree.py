# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""apply, unapply, status and verify on trees, checkouts and packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from patchset.apply import apply_tree, status_tree
from patchset.errors import DirtyTreeError, PatchsetError
from patchset.unapply import unapply_tree
from patchset.verify import verify
from support.synthetic_vllm import (
    KINDS,
    MARKER,
    OVERLAY,
    Synthetic,
    folders,
    git,
    make,
    snapshot,
    statuses,
)


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


def test_base_put_back_by_git(synthetic: Synthetic) -> None:
    """A record of bytes that somebody else has undone does not stand in the way."""
    root = synthetic.checkout()
    apply_tree(root, synthetic.repo)
    git(root, "checkout", "--quiet", ".")
    git(root, "clean", "-fdq")
    assert status_tree(root, synthetic.repo).state == "pristine"
    assert apply_tree(root, synthetic.repo).exit_code == 0


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


def test_verify_archive(synthetic: Synthetic, tmp_path: Path) -> None:
    assert verify(synthetic.archive, synthetic.repo).exit_code == 0
    other = tmp_path / "vllm-0.32.0.tar.gz"
    other.write_bytes(synthetic.archive.read_bytes() + b"\0")
    assert verify(other, synthetic.repo).exit_code == 1


def test_stale_saved_bytes_are_replaced(synthetic: Synthetic) -> None:
    """Left over from an apply that somebody else has undone."""
    root = synthetic.checkout()
    apply_tree(root, synthetic.repo)
    git(root, "checkout", "--quiet", ".")
    git(root, "clean", "-fdq")
    before = snapshot(root)
    (root / ".git/flint-patchset/saved/99").write_text("stale\n")
    assert apply_tree(root, synthetic.repo).exit_code == 0
    assert not (root / ".git/flint-patchset/saved/99").exists()
    assert unapply_tree(root, synthetic.repo).exit_code == 0
    assert snapshot(root) == before
