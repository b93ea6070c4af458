# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""This repository's own series on vLLM's own archive and CPU wheel."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from patchset.apply import apply_tree, status_tree
from patchset.basis import read_basis, tree_ids
from patchset.download import fetch
from patchset.errors import PatchsetError
from patchset.gitio import refresh
from patchset.identity import package_tree, source_tree
from patchset.lint import lint
from patchset.listing import list_entries
from patchset.overlay import MARKER_PATH
from patchset.pin import Artifact
from patchset.repo import Repo, load_repo
from patchset.sources import detect
from patchset.tree import unpack
from patchset.unapply import unapply_tree
from patchset.verify import verify
from support.synthetic_vllm import replace_lines, snapshot

OLDER = Artifact(
    name="vllm-0.31.0",
    project="vllm",
    filename="vllm-0.31.0.tar.gz",
    sha256="dde46f1efbe846e5bd0c5c4ec6ec71842c42254c7ff3d9bebb2a57028715d380",
    size=43419411,
)


@pytest.fixture(scope="module")
def base(real_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked archive; every test leaves it as it was."""
    folder = tmp_path_factory.mktemp("real") / "vllm"
    unpack(real_archive, folder)
    return folder


@pytest.fixture(scope="module")
def wheel_package(real_repo: Repo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU wheel as installed, without its binaries."""
    site = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(fetch(real_repo.pin.wheels["cpu-x86_64"])) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith(".so")]
        wheel.extractall(site, names)
    return site


def test_pinned_base(real_repo: Repo, real_archive: Path) -> None:
    basis = read_basis(real_archive, real_repo)
    assert tree_ids(basis.entries, real_repo.pin) == real_repo.pin.pristine


def test_lint(real_repo: Repo, real_archive: Path) -> None:
    report = lint(real_repo, real_archive)
    assert report.exit_code == 0, report.text()


def test_round_trip(real_repo: Repo, real_archive: Path, tmp_path: Path) -> None:
    """refresh, which imports and exports, changes no byte of patches/ and pin.toml."""
    for name in ("patches", "vllm_overlay"):
        shutil.copytree(
            real_repo.root / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(real_repo.root / "pin.toml", tmp_path)
    before = snapshot(tmp_path)
    report = refresh(load_repo(tmp_path), real_archive)
    assert {item.status for item in report.items} == {"unchanged"}
    assert snapshot(tmp_path) == before


def test_archive_there_and_back(real_repo: Repo, base: Path) -> None:
    before = snapshot(base)
    first = apply_tree(base, real_repo)
    assert first.exit_code == 0, first.text()
    assert all(tree.equal for tree in first.trees.values())
    assert apply_tree(base, real_repo).summary.startswith("already applied")
    assert verify(base, real_repo).exit_code == 0
    assert unapply_tree(base, real_repo).exit_code == 0
    assert snapshot(base) == before


def test_checkout_gives_the_same_ids(real_repo: Repo, base: Path) -> None:
    """Made from the archive by git: our ids are git's, before and after."""
    checkout = base.with_name("checkout")
    shutil.copytree(base, checkout)

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=checkout, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def written() -> str:
        git("add", ".", f":!{MARKER_PATH}")
        git("rm", "--quiet", "--cached", "PKG-INFO", "setup.cfg")
        tree = git("write-tree")
        git("add", "PKG-INFO", "setup.cfg")
        return tree

    git("init", "--quiet")
    pin = real_repo.pin
    assert written() == pin.pristine.source
    report = apply_tree(checkout, real_repo)
    assert report.exit_code == 0, report.text()
    assert written() == pin.identity.source == report.trees["source"].actual
    entries = list_entries(detect(checkout, pin), pin)
    assert source_tree(entries, pin) == pin.identity.source
    assert package_tree(entries, pin) == pin.identity.package
    assert unapply_tree(checkout, real_repo).exit_code == 0
    assert written() == pin.pristine.source


def test_wheel_package_there_and_back(real_repo: Repo, wheel_package: Path) -> None:
    before = snapshot(wheel_package)
    report = apply_tree(wheel_package, real_repo)
    assert report.exit_code == 0, report.text()
    assert report.trees["package"].expected == real_repo.pin.identity.package_cpu
    assert report.trees["package"].equal
    assert status_tree(wheel_package, real_repo).state == "patched"
    assert unapply_tree(wheel_package, real_repo).exit_code == 0
    assert snapshot(wheel_package) == before


def test_older_release_is_the_wrong_base(real_repo: Repo, tmp_path: Path) -> None:
    older = tmp_path / "older"
    unpack(fetch(OLDER), older)
    before = snapshot(older)
    with pytest.raises(PatchsetError, match="wrong base: .* is vLLM 0.31.0") as caught:
        apply_tree(older, real_repo)
    assert caught.value.exit_code == 2
    assert snapshot(older) == before


def test_edit_is_refused_and_named(real_repo: Repo, base: Path) -> None:
    path = base / "vllm/sampling_params.py"
    original = path.read_bytes()
    path.write_bytes(original + b"# edited\n")
    report = apply_tree(base, real_repo)
    path.write_bytes(original)
    assert report.exit_code == 3
    assert report.notes == ["differs: vllm/sampling_params.py"]


def test_conflict_reports_every_patch(real_repo: Repo, base: Path) -> None:
    """Change the first old line of the first hunk of the first patch."""
    diff = real_repo.series[0].files[0]
    path = base / diff.path
    original = path.read_bytes()
    line = next(old for old in diff.hunks[0].old if original.count(b"\n" + old) == 1)
    replace_lines(path, {line.decode().rstrip("\n"): "# a conflicting edit"})
    report = apply_tree(base, real_repo)
    path.write_bytes(original)
    assert report.exit_code == 1
    patches = [item for item in report.items if item.kind == "patch"]
    assert [item.name for item in patches] == [p.name for p in real_repo.series]
    assert patches[0].status == "conflict"
    assert patches[0].conflicts[0].path == diff.path
    assert status_tree(base, real_repo).state == "pristine"
