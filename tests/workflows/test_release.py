# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What a release publishes, and what may be released."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from patchset.errors import PatchsetError
from patchset.repo import Repo, load_repo
from release.build import check, notes_of, tag_of
from release.changelog import section
from support.image_steps import ROOT
from support.side_env import side_environment

KIND = "cpu-x86_64"


@pytest.fixture(scope="module")
def repo() -> Repo:
    return load_repo(ROOT)


def with_changelog(repo: Repo, root: Path, rest: str) -> Repo:
    """The patch set with a changelog whose heading ends like this."""
    (root / "CHANGELOG.md").write_text(f"## {repo.pin.release}{rest}\n\n- News.\n")
    return replace(repo, root=root)


def test_the_changelog_has_this_version(repo: Repo):
    assert notes_of(repo).startswith("### ")


def test_a_tag_that_everything_agrees_on_may_be_released(repo: Repo, tmp_path: Path):
    dated = with_changelog(repo, tmp_path, " - 2026-12-01")
    assert check(dated, tag_of(repo)) == "- News.\n"
    with pytest.raises(PatchsetError, match="has no date for"):
        check(with_changelog(repo, tmp_path, " - unreleased"), tag_of(repo))


def test_another_tag_is_refused(repo: Repo):
    with pytest.raises(PatchsetError, match=r"the tag is v1\.0, but pin\.toml"):
        check(repo, "v1.0")


def test_stale_ids_are_refused(repo: Repo):
    stale = replace(repo, pin=replace(repo.pin, series_sha256="0" * 64))
    with pytest.raises(PatchsetError, match="patchset refresh"):
        check(stale, tag_of(repo))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Changelog\n\n## 2 - 2026-01-01\n\n- More.\n", "says nothing of 1"),
        ("## 1 - 2026-01-01\n\n## 0 - 2025-01-01\n\n- Old.\n", "says nothing of 1"),
    ],
)
def test_a_changelog_that_lacks_it_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "CHANGELOG.md"
    path.write_text(text)
    with pytest.raises(PatchsetError, match=message):
        section(path, "1")


def test_a_section_ends_at_the_next(tmp_path: Path):
    path = tmp_path / "CHANGELOG.md"
    path.write_text("## 2 - 2026-02-01\n\n- Two.\n\n## 1 - 2026-01-01\n\n- One.\n")
    assert section(path, "2") == "- Two.\n"
    assert section(path, "1") == "- One.\n"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the CPU wheel, which the cache has."""
    out = tmp_path_factory.mktemp("release") / "dist"
    python = side_environment("sbom", with_engine=True) / "bin" / "python"
    command = [str(python), str(ROOT / "scripts" / "release"), "build"]
    done = subprocess.run(
        [*command, "--kind", KIND, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_checksums_are_those_of_the_files(released: Path):
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=released,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = {line.split(": ")[0] for line in done.stdout.splitlines()}
    assert names == {p.name for p in released.iterdir()} - {"SHA256SUMS"}
    assert sum(name.endswith(".whl") for name in names) == 1


def test_the_bill_of_materials_names_what_is_locked(released: Path, repo: Repo):
    bill = json.loads((released / "sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    subject = bill["metadata"]["component"]
    assert (subject["name"], subject["version"]) == ("vllm", repo.pin.release)
    listed = {f"{c['name']}=={c['version']}" for c in bill["components"]}
    lock = (ROOT / "requirements" / "image-cu130.txt").read_text().splitlines()
    assert {line for line in lock if not line.startswith("#")} <= listed


def test_the_notes_are_the_changelogs(released: Path, repo: Repo):
    assert (released / "NOTES.md").read_text() == notes_of(repo)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path):
    (tmp_path / "mine").touch()
    command = [sys.executable, str(ROOT / "scripts" / "release"), "build"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "is not empty" in done.stderr
