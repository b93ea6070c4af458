# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Writes the patch set that would follow: pin.toml, patches/, and its overlay.

A proposal is a folder like the repository's root. A person looks at it and moves it
in; nothing here touches the repository.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import tomlkit

from patchset.basis import tree_ids
from patchset.download import fetch
from patchset.git import git
from patchset.gitio import format_commit, refresh
from patchset.gittree import Entry, blob_id
from patchset.overlay import OVERLAY_NAME
from patchset.pin import PIN_NAME, Artifact, load_pin
from patchset.rebase.carry import Carried
from patchset.rebase.releases import wheels
from patchset.rebase.results import RebaseReport
from patchset.rebase.trees import Tree
from patchset.rebase.upstream import RELEASE, UPSTREAM_REF, Upstream
from patchset.rebase.work import Work
from patchset.repo import Repo, load_repo
from patchset.series import SERIES_NAME
from patchset.wheel_meta import VERSION_FILE

_TORCH = re.compile(r"^torch\s*==\s*([0-9.]+)", re.M)
_COMMIT = re.compile(r"commit_id = 'g?([0-9a-f]{7,40})'")


def propose(
    folder: Path,
    report: RebaseReport,
    carried: Carried,
    work: Work,
    upstream: Upstream,
    repo: Repo,
) -> str:
    """Write the proposal; what it lacks goes to the report's notes.

    Only a release can be pinned: for git or a directory it holds the patches alone.

    Returns:
        The folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / SERIES_NAME).parent.mkdir(parents=True)
    _write_series(folder, carried, work, repo)
    if upstream.kind == RELEASE and upstream.artifact is not None:
        shutil.copytree(
            repo.root / OVERLAY_NAME,
            folder / OVERLAY_NAME,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        archive = fetch(upstream.artifact)
        report.notes += _write_pin(folder, archive, carried, work, upstream, repo)
        refresh(load_repo(folder), archive)
    return str(folder)


def _write_series(folder: Path, carried: Carried, work: Work, repo: Repo) -> None:
    store = work.store.folder
    span = f"{UPSTREAM_REF}..{carried.series_end}"
    commits = git(store, "rev-list", "--reverse", "--first-parent", span)
    names = []
    for commit in commits.decode().split():
        patch = format_commit(store, commit)
        (folder / "patches" / patch.filename).write_bytes(patch.data)
        names.append(patch.filename)
    comments = [
        line
        for line in (repo.root / SERIES_NAME).read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    ]
    text = "".join(f"{line}\n" for line in [*comments, *names])
    (folder / SERIES_NAME).write_text(text, encoding="utf-8")


def _write_pin(
    folder: Path,
    archive: Path,
    carried: Carried,
    work: Work,
    upstream: Upstream,
    repo: Repo,
) -> list[str]:
    """Write pin.toml; return what could not be filled in."""
    assert upstream.artifact is not None and upstream.version is not None
    lacking = []
    document: Any = tomlkit.parse((repo.root / PIN_NAME).read_text(encoding="utf-8"))
    tree = Tree.at(work.store, UPSTREAM_REF)
    document["base"].update(
        {"version": upstream.version, "tag": f"v{upstream.version}"}
    )
    commit = _commit_of(archive)
    if commit:
        document["base"]["commit"] = commit
    else:
        lacking.append("the pin proposal lacks the base's commit")
    _fill(document["sdist"], upstream.artifact)
    torch = _TORCH.search(tree.text("requirements/cuda.txt") or "")
    cpu: Artifact | None = None
    for name, pinned in repo.pin.wheels.items():
        new = _same_platform(pinned, upstream.version)
        if new is None:
            lacking.append(
                f"the pin proposal lacks the wheel {name}: the index has no "
                f"{pinned.project} {upstream.version} for it"
            )
            del document["wheels"][name]
            continue
        _fill(document["wheels"][name], new)
        if torch:
            document["wheels"][name]["torch"] = torch[1]
        cpu = new if pinned.flavour == "cpu" and "x86_64" in name else cpu
    if torch:
        document["torch"]["cu130"] = torch[1]
    new_torch = _TORCH.search(tree.text("requirements/cpu.txt") or "")
    if new_torch:
        _renew_torch(document["metadata"]["cpu"], new_torch[1])
    document["overlay"]["supersedes"] = [item.path for item in carried.superseded]
    if cpu is not None:
        document["cpu_blobs"] = _cpu_blobs(fetch(cpu), tree, repo)
    else:
        lacking.append(
            "the pin proposal's cpu_blobs and package_cpu are the old base's"
        )
    path = folder / PIN_NAME
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    ids = tree_ids(dict(tree.entries), load_pin(folder))
    document["pristine"].update(vars(ids))
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    return lacking


def _renew_torch(metadata: Any, version: str) -> None:
    """Name the new torch in what the CPU wheel's metadata is told to say."""
    pin = re.compile(r"^torch==[0-9.]+")
    requires = metadata["requires"]
    for old in list(requires):
        if pin.match(old):
            new = f"torch=={version}"
            requires[pin.sub(new, old)] = pin.sub(new, requires.pop(old))


def _fill(table: Any, artifact: Artifact) -> None:
    for key in ("project", "filename", "sha256", "size"):
        table[key] = getattr(artifact, key)


def _same_platform(pinned: Artifact, version: str) -> Artifact | None:
    tags = pinned.filename.split("-", 2)[2]
    for wheel in wheels(pinned.project, version):
        if wheel.filename.split("-", 2)[2] == tags:
            return wheel
    return None


def _commit_of(archive: Path) -> str:
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name.partition("/")[2] == VERSION_FILE:
                file = tar.extractfile(member)
                assert file is not None
                match = _COMMIT.search(file.read().decode())
                return match[1] if match else ""
    return ""


def _cpu_blobs(wheel: Path, tree: Tree, repo: Repo) -> dict[str, str]:
    """The files that the CPU wheel has otherwise than the source."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            entry: Entry | None = tree.entries.get(name)
            if entry and name not in repo.pin.package_globs:
                blob = blob_id(archive.read(name))
                if blob != entry.blob:
                    found[name] = blob
    return found
