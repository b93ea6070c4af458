# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What broke a patch: the commit where there is history, else the first release."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest
from packaging.version import Version

from patchset.pin import Artifact
from patchset.rebase import history, upstream
from patchset.rebase.history import first_that_breaks
from patchset.rebase.results import Cause, RebaseReport
from support.rebases import Run
from support.synthetic_vllm import Synthetic, git, replace_lines


def cause_of(report: RebaseReport) -> Cause:
    (trouble,) = report.patches[1].troubles
    assert trouble.cause is not None
    return trouble.cause


def commit(checkout: Path, path: str, old: str, new: str, subject: str) -> str:
    replace_lines(checkout / path, {old: new})
    git(checkout, "commit", "--quiet", "--all", "-m", subject)
    return git(checkout, "rev-parse", "HEAD")


def test_commit_and_pull_request(run: Run, synthetic: Synthetic) -> None:
    checkout = synthetic.checkout()
    git(checkout, "rm", "--quiet", "--cached", "PKG-INFO", "setup.cfg")
    git(checkout, "commit", "--quiet", "--amend", "-m", "v0.32.0")
    git(checkout, "tag", "v0.32.0")
    commit(checkout, "vllm/config.py", "option = 2", "option = 'two'", "Harmless (#1)")
    breaking = commit(
        checkout, "vllm/config.py", "option = 40", "option = 41", "Count on (#1234)"
    )
    commit(checkout, "vllm/config.py", "option = 3", "option = 'three'", "Later (#5)")
    commit(checkout, "vllm/registry.py", "entry = 2", "entry = 'two'", "Else (#6)")
    report = run("HEAD", checkout=checkout)
    assert report.upstream["kind"] == "git"
    cause = cause_of(report)
    assert cause.commit == breaking
    assert (cause.subject, cause.pull_request) == ("Count on (#1234)", "1234")
    # The folder itself, a checkout, means its HEAD.
    assert cause_of(run(checkout)).commit == breaking


def test_first_release(
    run: Run, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = synthetic.home / "cache"
    archives = {}
    for minor, line in ((33, 40), (34, 40), (35, 41), (36, 41), (37, 41)):
        tree = synthetic.source(f"vllm-0.{minor}.0")
        replace_lines(tree / "vllm/config.py", {"option = 40": f"option = {line}"})
        replace_lines(tree / "vllm/config.py", {"option = 1": f"option = '{minor}'"})
        packed = synthetic.home / f"vllm-0.{minor}.0.tar.gz"
        with tarfile.open(packed, "w:gz") as tar:
            tar.add(tree, tree.name)
        digest = hashlib.sha256(packed.read_bytes()).hexdigest()
        (cache / digest).mkdir(parents=True)
        packed.rename(cache / digest / packed.name)
        archives[Version(f"0.{minor}.0")] = Artifact("", "vllm", packed.name, digest, 1)
    monkeypatch.setattr(history, "source_archives", lambda project: archives)
    monkeypatch.setattr(
        upstream, "source_archive", lambda project, version: archives[Version(version)]
    )
    cause = cause_of(run("0.37.0"))
    assert cause.release == "0.35.0"
    assert cause.tried < len(archives)


@pytest.mark.parametrize("first", range(9))
def test_bisection(first: int) -> None:
    steps = [str(number) for number in range(8)]
    found, tried = first_that_breaks(steps, lambda step: int(step) >= first)
    assert found == (str(first) if first < 8 else None)
    assert tried <= 4
