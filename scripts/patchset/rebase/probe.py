# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The necessity probe: without a patch, that patch's own test must fail.

A test that passes all the same shows that the patch is obsolete, or that the test
proves nothing.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from patchset.download import fetch
from patchset.errors import EXIT_CONFLICT, PatchsetError
from patchset.hunks import apply_file
from patchset.lint import registered_checks
from patchset.rebase.good import CPU_WHEEL
from patchset.rebase.place import place_patch
from patchset.rebase.results import CONFLICT, GONE
from patchset.rebase.site import Ran, make_site, run_python, write
from patchset.rebase.store import Store, archive_files
from patchset.rebase.trees import Tree
from patchset.rebase.upstream import BASE_REF
from patchset.repo import Repo
from patchset.report import Item, Report
from patchset.tree import base_archive

PROBES_NAME = "patches/probes.toml"
NEEDED, UNPROVEN, BROKEN, NO_TEST = "needed", "unproven", "broken", "no-test"
# What a test sees of a tree: the package, and what goes into wheels built from source.
_SEEN = ("vllm/", "MANIFEST.in")
_TIMEOUT = 600.0  # seconds a test
_CHECK = """\
import sys
from vllm.models.flint.patchset import CHECKS
sys.exit(0 if CHECKS[sys.argv[1]]() else "not in force")
"""


def probe(repo: Repo, names: Sequence[str] = ()) -> Report:
    """Run each patch's test with the whole series and without that patch.

    Args:
        repo: the patch set.
        names: the patches to probe; by default all.

    Raises:
        PatchsetError: a name is no patch's, or the pinned files cannot be had.
    """
    known = {patch.name for patch in repo.series}
    if unknown := sorted(set(names) - known):
        raise PatchsetError(f"no patch is called {', '.join(unknown)}")
    report = Report("probe", str(repo.root))
    with tempfile.TemporaryDirectory(prefix="patchset-") as temporary:
        store = Store(Path(temporary, "store.git"))
        try:
            files = archive_files(base_archive(repo), repo.pin.source_globs)
            base = Tree.at(store, store.import_files(BASE_REF, files))
            whole = _patched(repo, base, None)
            site = Path(temporary, "site")
            wheel = fetch(repo.pin.wheels[CPU_WHEEL])
            make_site(site, whole, wheel, repo.pin.base.version, repo.pin)
            _switch(site, base, whole)
            wanted = [p.name for p in repo.series if not names or p.name in names]
            for name in tqdm(wanted, "patches", disable=None):
                report.items.append(_probe(repo, name, base, whole, site))
        finally:
            store.close()
    wrong = [item for item in report.items if item.status != NEEDED]
    report.exit_code = EXIT_CONFLICT if wrong else 0
    count = len(report.items) - len(wrong)
    report.summary = (
        f"probe: {count} of {len(report.items)} patches are shown to be needed"
    )
    return report


def _patched(repo: Repo, base: Tree, without: str | None) -> Tree:
    """The base with the series, all but one of it, and the overlay.

    Raises:
        PatchsetError: a later patch does not fit without that one.
    """
    tree = origin = base
    for patch in repo.series:
        if patch.name != without:
            placed = place_patch(patch, tree, origin, {})
            if placed.status in (CONFLICT, GONE):
                raise PatchsetError(f"{patch.name} does not fit without it")
            tree = tree.changed(placed.changes)
        origin = origin.changed(
            {d.path: apply_file(d, origin.read(d.path)).after for d in patch.files}
        )
    return tree.changed({file.path: file.blob for file in repo.overlay})


def _probe(repo: Repo, name: str, base: Tree, whole: Tree, site: Path) -> Item:
    words = test_of(repo, name)
    if words is None:
        detail = f"neither a check nor a test in {PROBES_NAME}"
        return Item("patch", name, NO_TEST, detail)
    try:
        less = _patched(repo, base, name)
    except PatchsetError as exc:
        return Item("patch", name, BROKEN, str(exc))
    with_it = run_python(site, repo.root, words, _TIMEOUT)
    if with_it.code:
        return Item("patch", name, BROKEN, f"fails with it too: {_last(with_it)}")
    _switch(site, whole, less)
    try:
        without = run_python(site, repo.root, words, _TIMEOUT)
    finally:
        _switch(site, less, whole)
    if without.code == 0:
        return Item("patch", name, UNPROVEN, "its test passes without it")
    return Item("patch", name, NEEDED, f"without it: {_last(without)}")


def test_of(repo: Repo, name: str) -> list[str] | None:
    """The arguments for Python that run a patch's own test; None without one."""
    if name in registered_checks(repo):
        return ["-c", _CHECK, name]
    path = repo.root / PROBES_NAME
    tests = tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    if name not in tests:
        return None
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", tests[name]]


def _switch(site: Path, old: Tree, new: Tree) -> None:
    """Turn the site from one tree into another."""
    for path in sorted({*old.changes, *new.changes}):
        before, after = old.read(path), new.read(path)
        if before != after and path.startswith(_SEEN):
            write(site, path, after)


def _last(ran: Ran) -> str:
    lines = [line for line in ran.output.strip().splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (failed or lines or [f"exit code {ran.code}"])[-1].strip()
