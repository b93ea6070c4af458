# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Finds what the patch set is to be carried to, and puts both trees into the store."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from patchset.download import fetch
from patchset.errors import PatchsetError
from patchset.git import git, git_dir
from patchset.pin import Artifact
from patchset.rebase.history import Commits, History, Releases
from patchset.rebase.releases import source_archive
from patchset.rebase.store import Store, archive_files, folder_files
from patchset.repo import Repo
from patchset.sources import detect
from patchset.tree import base_archive

RELEASE, GIT, FOLDER = "release", "git", "directory"
BASE_REF, UPSTREAM_REF = "refs/base/pinned", "refs/upstream/tip"


@dataclass(frozen=True)
class Upstream:
    """What the patch set is carried to.

    Attributes:
        onto: as it was asked for.
        kind: "release", "git" or "directory".
        version: the vLLM version, if it is known.
        identity: sha256 of the archive, commit, or git tree id of the directory.
        artifact: the release's source archive.
        path: the checkout or the directory.
    """

    onto: str
    kind: str
    version: str | None
    identity: str
    artifact: Artifact | None = None
    path: Path | None = None

    @property
    def slug(self) -> str:
        """A name for files and branches, the same for later states of it."""
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.onto).strip("-.") or "upstream"
        if self.kind == RELEASE:
            return words
        place = hashlib.sha256(f"{self.path}".encode()).hexdigest()[:8]
        return f"{words[-40:].strip('-.')}-{place}"

    def as_dict(self) -> dict[str, str]:
        """What a report says of it."""
        key = {RELEASE: "sha256", GIT: "commit", FOLDER: "tree"}[self.kind]
        return {
            "kind": self.kind,
            "version": self.version or "unknown",
            key: self.identity,
        }


def find_upstream(onto: str, checkout: Path | None, repo: Repo) -> Upstream:
    """Understand what ``--onto`` names.

    Args:
        onto: a version, a folder, or a git ref in `checkout`.
        checkout: the upstream's git checkout, for a ref.
        repo: the patch set.

    Raises:
        PatchsetError: it is none of these; or no network.
    """
    if checkout is not None:
        return _git_ref(onto, checkout, repo)
    if _is_version(onto):
        version = str(Version(onto.removeprefix("v")))
        artifact = source_archive(repo.pin.sdist.project, version)
        return Upstream(version, RELEASE, version, artifact.sha256, artifact)
    path = Path(onto)
    if not path.is_dir():
        raise PatchsetError(
            f"{onto!r} is neither a vLLM version nor a folder; for a git ref, name "
            "the upstream's checkout with --checkout"
        )
    if git_dir(path):
        return _git_ref("HEAD", path, repo)
    target = detect(path, repo.pin)
    digest = hashlib.sha256()
    for name, blob in folder_files(path, repo.pin.source_globs):
        digest.update(f"{name}\0{blob.entry.blob}\n".encode())
    return Upstream(onto, FOLDER, target.version, digest.hexdigest(), path=path)


def _is_version(text: str) -> bool:
    try:
        Version(text.removeprefix("v"))
    except InvalidVersion:
        return False
    return not Path(text).exists()


def _git_ref(ref: str, checkout: Path, repo: Repo) -> Upstream:
    if git_dir(checkout) is None:
        raise PatchsetError(f"{checkout} is no git checkout")
    command = ("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    commit = git(checkout, *command, check=False).decode().strip()
    if not commit:
        raise PatchsetError(f"{checkout} has no commit {ref!r}; fetch it first")
    tags = git(checkout, "tag", "--points-at", commit, check=False).decode().split()
    versions = [tag[1:] for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    version = versions[0] if versions else None
    return Upstream(ref, GIT, version, commit, path=checkout.resolve())


def load_trees(upstream: Upstream, repo: Repo, store: Store) -> tuple[str, str]:
    """Bring base and upstream into the store.

    Returns:
        The commits of the base and of the upstream.
    """
    pin = repo.pin
    if upstream.kind == GIT:
        assert upstream.path is not None
        command = ("rev-parse", "--path-format=absolute", "--git-path", "objects")
        store.borrow(Path(git(upstream.path, *command).decode().strip()))
        tip = upstream.identity
        own = _pinned_commit(store, upstream, repo)
        store.set_ref(UPSTREAM_REF, tip)
        if own:
            return own, tip
    marker = store.folder / "upstream-identity"
    base = store.commit_of(BASE_REF)
    if base is None:
        files = archive_files(base_archive(repo), pin.source_globs)
        base = store.import_files(BASE_REF, files)
    if upstream.kind == GIT:
        return base, upstream.identity
    known = marker.read_text() if marker.is_file() else ""
    found = store.commit_of(UPSTREAM_REF)
    if found is None or known != upstream.identity:
        if upstream.artifact is not None:
            files = archive_files(fetch(upstream.artifact), pin.source_globs)
        else:
            assert upstream.path is not None
            files = folder_files(upstream.path, pin.source_globs)
        found = store.import_files(UPSTREAM_REF, files)
        marker.write_text(upstream.identity)
    return base, found


def _pinned_commit(store: Store, upstream: Upstream, repo: Repo) -> str | None:
    """The base in the upstream's own history: then git can say what changed."""
    for name in (repo.pin.base.tag, repo.pin.base.commit):
        assert upstream.path is not None
        command = ("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        found = git(upstream.path, *command, check=False).decode().strip()
        if found:
            return found
    return None


def history_of(
    upstream: Upstream, repo: Repo, store: Store, base: str, tip: str
) -> History | None:
    """What can be bisected; None for a directory, and for git without the base."""
    if upstream.kind == GIT:
        merged = git(store.folder, "merge-base", base, tip, check=False)
        return Commits(store, merged.decode().strip(), tip) if merged else None
    if upstream.kind == RELEASE and upstream.version:
        paths = [diff.path for patch in repo.series for diff in patch.files]
        return Releases(repo.pin, upstream.version, paths)
    return None
