# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The gear "good": the rebased tree is imported, serves on a CPU, and compiles."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from patchset.download import fetch
from patchset.pin import Artifact
from patchset.rebase.carry import Carried
from patchset.rebase.proposal import propose
from patchset.rebase.releases import wheels
from patchset.rebase.results import CONFLICT, GONE, Check, RebaseReport
from patchset.rebase.site import make_site, run_python
from patchset.rebase.trees import Tree
from patchset.rebase.upstream import RELEASE, Upstream
from patchset.rebase.work import Work
from patchset.repo import Repo

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
CPU_WHEEL = "cpu-x86_64"
_ENGINE_TESTS = "tests/model/test_engine_logits.py"
_COMPILE_TESTS = "tests/*/test_*_targets.py"
_TIMEOUT = 3600.0  # seconds a check
_COMPILER = "cutlass"
_REQUIREMENTS = ("requirements/common.txt", "requirements/cpu.txt")
_IMPORT = """\
from vllm.models.flint import patchset
import vllm.models.flint.model
broken = [name for name, check in patchset.CHECKS.items() if not check()]
raise SystemExit(f"not in force: {', '.join(broken)}" if broken else 0)
"""


def run_good(
    report: RebaseReport,
    carried: Carried,
    work: Work,
    upstream: Upstream,
    repo: Repo,
    report_folder: Path | None,
) -> None:
    """Add the checks to the report; where all pass, record it and propose a pin."""
    stuck = [p.name for p in carried.patches if p.status in (CONFLICT, GONE)]
    if any(not p.made for p in carried.patches if p.name in stuck):
        detail = f"conflicts come first: {', '.join(stuck)}"
        report.checks.append(Check("CPU engine", NOT_RUN, detail))
        return
    wheel, borrowed = _binaries(upstream, repo)
    version = upstream.version or repo.pin.base.version
    site = work.folder / "site"
    make_site(site, carried.upstream, fetch(wheel), version, repo.pin)
    report.notes += _mismatches(carried.upstream)
    if borrowed:
        report.notes.append(borrowed)
    words = ["-c", _IMPORT]
    report.checks.append(_check("imports, patches in force", words, site, repo))
    if report.checks[-1].result == PASSED:
        words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        tests = [*words, _ENGINE_TESTS]
        report.checks.append(_check("CPU engine", tests, site, repo))
        if importlib.util.find_spec(_COMPILER):
            tests = [*words, *sorted(map(str, repo.root.glob(_COMPILE_TESTS)))]
            report.checks.append(_check("kernel compile", tests, site, repo))
        else:
            detail = "nvidia-cutlass-dsl is not installed here"
            report.checks.append(Check("kernel compile", NOT_RUN, detail))
    for check in report.checks:
        if check.result == PASSED:
            check.detail = borrowed
    if all(check.result == PASSED for check in report.checks) and not report.drift:
        work.record_good(report.upstream, repo)
        folder = (report_folder or work.folder) / "proposal"
        report.proposal = propose(folder, report, carried, work, upstream, repo)


def _check(name: str, words: list[str], site: Path, repo: Repo) -> Check:
    """Run one check; one that fails on the base too says nothing of the upstream."""
    ran = run_python(site, repo.root, words, _TIMEOUT)
    if not ran.code:
        return Check(name, PASSED, "", ran.seconds)
    control = run_python(None, repo.root, words, _TIMEOUT)
    if control.code:
        detail = f"fails here with the installed base too: {control.tail}"
        return Check(name, NOT_RUN, detail, ran.seconds + control.seconds)
    return Check(name, FAILED, ran.tail, ran.seconds)


def _binaries(upstream: Upstream, repo: Repo) -> tuple[Artifact, str]:
    """The CPU wheel for an upstream, and what to say if it is the base's."""
    pinned = repo.pin.wheels[CPU_WHEEL]
    platform = pinned.filename.rpartition("-")[2]
    if upstream.kind == RELEASE and upstream.version:
        if upstream.version == repo.pin.base.version:
            return pinned, ""
        for wheel in wheels(pinned.project, upstream.version):
            if wheel.filename.rpartition("-")[2] == platform:
                return wheel, ""
    return pinned, (
        f"there is no {pinned.project} wheel of this upstream: run with the binaries "
        f"of {repo.pin.base.version}"
    )


def _mismatches(tree: Tree) -> list[str]:
    """Requirements of the upstream that this environment does not meet."""
    found = []
    for path in _REQUIREMENTS:
        for line in (tree.text(path) or "").splitlines():
            try:
                requirement = Requirement(line.partition(" #")[0].strip())
            except InvalidRequirement:
                continue
            if requirement.marker and not requirement.marker.evaluate():
                continue
            try:
                have = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                continue
            if not requirement.specifier.contains(have, prereleases=True):
                found.append(f"upstream asks for {requirement}; here is {have}")
    return found
