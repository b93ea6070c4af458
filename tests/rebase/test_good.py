# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Only a result that was run moves the pin, and what moves it applies as pinned."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest

from patchset.apply import apply_tree
from patchset.pin import Artifact
from patchset.rebase import good, history, proposal, upstream
from patchset.rebase.site import Ran
from patchset.repo import load_repo
from support.rebases import Run
from support.synthetic_vllm import Synthetic, replace_lines

VERSION = "0.33.0"


@pytest.fixture
def release(synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A later release on the index, with a Flint of its own; its unpacked tree."""
    tree = synthetic.source(f"vllm-{VERSION}")
    replace_lines(tree / "vllm/registry.py", {"entry = 2": "entry = 2\nnew = 1"})
    replace_lines(tree / "vllm/registry.py", {"entry = 70": "entry = 70\nflint = 'x'"})
    (tree / "PKG-INFO").write_text(f"Name: vllm\nVersion: {VERSION}\n")
    (tree / "vllm/_version.py").write_text("commit_id = 'gabcdef012'\n")
    for name in ("__init__.py", "moe.py"):
        place = tree / "vllm/models/flint" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text("")
    packed = synthetic.home / f"vllm-{VERSION}.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(tree, tree.name)
    data = packed.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    (synthetic.home / "cache" / digest).mkdir(parents=True)
    packed.rename(synthetic.home / "cache" / digest / packed.name)
    artifact = Artifact("", "vllm", packed.name, digest, len(data))
    monkeypatch.setattr(upstream, "source_archive", lambda project, version: artifact)
    monkeypatch.setattr(history, "source_archives", lambda project: {})
    monkeypatch.setattr(proposal, "wheels", lambda project, version: [])
    monkeypatch.setattr(good, "_binaries", lambda *args: (artifact, ""))
    monkeypatch.setattr(good, "make_site", lambda *args: None)
    monkeypatch.setattr(good.importlib.util, "find_spec", lambda name: object())
    return tree


def end_with(monkeypatch: pytest.MonkeyPatch, code: int, code_on_base: int = 0) -> None:
    def run_python(site: Path | None, *rest: object) -> Ran:
        return Ran(code_on_base if site is None else code, "the last line", 1.0)

    monkeypatch.setattr(good, "run_python", run_python)


def test_good_moves_the_pin_by_a_proposal(
    run: Run, release: Path, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(monkeypatch, 0)
    before = (synthetic.root / "pin.toml").read_bytes()
    report = run(VERSION, gear="good", report_folder=synthetic.home / "report")
    assert (report.verdict, report.exit_code) == ("good", 0)
    assert report.last_good["version"] == VERSION
    assert (synthetic.root / "pin.toml").read_bytes() == before
    proposed = load_repo(Path(report.proposal))
    assert proposed.pin.base.version == VERSION
    assert proposed.pin.base.commit == "abcdef012"
    assert proposed.pin.supersedes == {
        "vllm/models/flint/__init__.py",
        "vllm/models/flint/moe.py",
    }
    assert proposed.series[0].name == "model-remove-the-base-s-own-flint"
    applied = apply_tree(release, proposed)
    assert applied.exit_code == 0, applied.text()
    assert all(tree.equal for tree in applied.trees.values())
    assert not (release / "vllm/models/flint/moe.py").exists()


def test_failed_check_moves_nothing(
    run: Run, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(monkeypatch, 1)
    report = run(VERSION, gear="good")
    assert (report.verdict, report.exit_code) == ("broken", 1)
    assert [check.result for check in report.checks] == ["failed"]
    assert "the last line" in report.checks[0].detail
    assert report.proposal == "" and report.last_good == {}


def test_check_that_fails_on_the_base_too(
    run: Run, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then this machine is to blame, and nothing was shown either way."""
    end_with(monkeypatch, 1, code_on_base=1)
    report = run(VERSION, gear="good")
    assert [check.result for check in report.checks] == ["not run"]
    assert "with the installed base too" in report.checks[0].detail
    assert report.verdict == "applies" and report.proposal == ""


def test_absent_compiler_is_not_a_pass(
    run: Run, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(monkeypatch, 0)
    monkeypatch.setattr(good.importlib.util, "find_spec", lambda name: None)
    report = run(VERSION, gear="good")
    assert report.checks[-1].result == "not run"
    assert report.verdict == "applies" and report.proposal == ""


def test_conflict_comes_before_any_check(
    run: Run, release: Path, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(monkeypatch, 0)
    conflicting = synthetic.source("upstream")
    replace_lines(conflicting / "vllm/config.py", {"option = 40": "option = 41"})
    report = run(conflicting, gear="good")
    assert [check.result for check in report.checks] == ["not run"]
    assert "core-read-the-config-of-flint" in report.checks[0].detail
