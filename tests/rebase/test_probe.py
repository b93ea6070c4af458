# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The probe takes one patch out at a time, and believes no test that always passes.

What the tests of the real patches say is for `patchset probe` itself: it starts vLLM
twice a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from patchset.basis import read_basis
from patchset.errors import PatchsetError
from patchset.gittree import Blob
from patchset.rebase import probe as probing
from patchset.rebase.probe import probe
from patchset.rebase.site import Ran, write
from patchset.rebase.trees import Tree
from patchset.repo import Repo
from patchset.report import Report

REGISTER = "model-register-flint"
PACKAGING = "build-put-flint-s-data-files-into-wheels-built-from-source"
ROW = '"FlintForCausalLM": ("vllm.models.flint", "FlintForCausalLM")'
Judge = Callable[[Path, Sequence[str]], bool]


@pytest.fixture(scope="module")
def touched(real_repo: Repo, real_archive: Path) -> dict[str, Blob]:
    """The base's files that the series touches; the rest would only cost time."""
    return read_basis(real_archive, real_repo).blobs


@pytest.fixture(autouse=True)
def small_base(monkeypatch: pytest.MonkeyPatch, touched: dict[str, Blob]) -> None:
    monkeypatch.setattr(probing, "archive_files", lambda *args: touched.items())


def run_probe(
    repo: Repo, monkeypatch: pytest.MonkeyPatch, passes: Judge, *names: str
) -> Report:
    """Probe with tests that only look at files."""

    def make_site(folder: Path, tree: Tree, *rest: object) -> None:
        for path, blob in tree.changes.items():
            write(folder, path, blob)

    def run_python(site: Path, root: Path, words: Sequence[str], limit: float) -> Ran:
        return Ran(0 if passes(site, words) else 1, "its last line", 0.0)

    monkeypatch.setattr(probing, "make_site", make_site)
    monkeypatch.setattr(probing, "fetch", lambda artifact: None)
    monkeypatch.setattr(probing, "run_python", run_python)
    return probe(repo, names)


def registered(site: Path, words: Sequence[str]) -> bool:
    return ROW in (site / "vllm/model_executor/models/registry.py").read_text()


def test_test_that_fails_without_the_patch(
    real_repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_probe(real_repo, monkeypatch, registered, REGISTER)
    assert [(i.name, i.status) for i in report.items] == [(REGISTER, "needed")]
    assert report.exit_code == 0
    assert "its last line" in report.items[0].detail


def test_file_that_says_what_a_wheel_holds(
    real_repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(site: Path, words: Sequence[str]) -> bool:
        return "vllm/models/flint" in (site / "MANIFEST.in").read_text()

    report = run_probe(real_repo, monkeypatch, passes, PACKAGING)
    assert [(i.name, i.status) for i in report.items] == [(PACKAGING, "needed")]


def test_test_that_proves_nothing(
    real_repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_probe(real_repo, monkeypatch, lambda site, words: True)
    assert {item.status for item in report.items} == {"unproven"}
    assert len(report.items) == len(real_repo.series)
    assert report.exit_code == 1


def test_test_that_always_fails(
    real_repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_probe(real_repo, monkeypatch, lambda site, words: False, REGISTER)
    assert report.items[0].status == "broken"


def test_every_patch_has_a_test_of_its_own(real_repo: Repo) -> None:
    tests = [probing.test_of(real_repo, patch.name) for patch in real_repo.series]
    assert None not in tests
    for words in tests:
        name = words[-1].partition("::")[0] if words else ""
        assert not name.endswith(".py") or (real_repo.root / name).is_file()


def test_unknown_patch(real_repo: Repo) -> None:
    with pytest.raises(PatchsetError, match="no patch is called nothing"):
        probe(real_repo, ["nothing"])
