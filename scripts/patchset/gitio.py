# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The series as git commits, and back: the same bytes both ways."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from patchset.basis import plan_on_base, read_basis, result_ids
from patchset.errors import ConflictError, PatchsetError
from patchset.git import fixed_identity, git, git_dir
from patchset.gittree import MODE_EXEC
from patchset.pin import write_identity
from patchset.plan import PRISTINE, touched_paths
from patchset.repo import Repo, load_repo
from patchset.report import Item, Report
from patchset.series import SERIES_NAME, Patch, filename_for, parse_patch
from patchset.tree import unpack

# The commit that the patches stand on: the base, with the overlay laid over it.
BASE_TAG = "patchset-base"
_IDENTITY = fixed_identity("Flint patch set", "patchset@localhost")
# Everything that churns, or that a user's configuration could change, is fixed.
_FORMAT = [
    "--stdout",
    "-1",
    "--zero-commit",
    "--full-index",
    "--no-stat",
    "--no-signature",
    "--no-renames",
    "--no-numbered",
    "--subject-prefix=PATCH",
    "--no-attach",
    "--no-thread",
    "--no-base",
    "--no-cover-letter",
    "--no-notes",
    "--no-signoff",
    "--no-add-header",
    "--no-to",
    "--no-cc",
    "--no-from",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--encode-email-headers",
]
_FORMAT_SETTINGS = ("diff.suppressBlankEmpty=false", "i18n.logOutputEncoding=UTF-8")


def import_series(
    folder: Path, repo: Repo, archive: Path, *, touched_only: bool = False
) -> Report:
    """Make the new checkout `folder`: the base, the overlay, a commit each patch.

    Args:
        folder: must not exist.
        repo: the patch set.
        archive: the pinned source archive.
        touched_only: leave out files of the base that no patch touches; the patches
            come out the same.

    Raises:
        ConflictError: a patch does not apply; no folder is left behind.
    """
    touched = set(touched_paths(repo, full=True))

    def keep(path: str) -> bool:
        # Attributes decide what git writes after a hunk's @@.
        return path in touched or path.endswith(".gitattributes")

    unpack(archive, folder, keep if touched_only else lambda path: True)
    finished = False
    try:
        git(folder, "init", "--quiet", "--initial-branch=patchset")
        _commit(folder, f"vLLM {repo.pin.base.version}, from its source archive", ".")
        # One that supersedes a file of the base waits for the patch that deletes it.
        added = [f for f in repo.overlay if not (folder / f.path).exists()]
        for file in added:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.blob.data)
            path.chmod(0o755 if file.blob.mode == MODE_EXEC else 0o644)
        message = "The overlay: edit it in the patch set's own folder"
        _commit(folder, message, *(file.path for file in added))
        git(folder, "tag", BASE_TAG)
        for patch in repo.series:
            _am(folder, patch)
        finished = True
    finally:
        if not finished:
            shutil.rmtree(folder, ignore_errors=True)
    return Report(
        "import",
        str(folder),
        items=[Item("patch", patch.name, "committed") for patch in repo.series],
        summary=f"{len(repo.series)} commits on {BASE_TAG} in {folder}",
    )


def _commit(folder: Path, message: str, *paths: str) -> None:
    if paths:
        names = "\0".join(paths).encode()
        force = () if paths == (".",) else ("--force",)
        git(
            folder,
            "add",
            *force,
            "--pathspec-from-file=-",
            "--pathspec-file-nul",
            data=names,
        )
    git(folder, "commit", "--quiet", "--allow-empty", "-m", message, env=_IDENTITY)


def _am(folder: Path, patch: Patch) -> None:
    flags = (
        "--quiet --keep-non-patch --keep-cr --no-3way --committer-date-is-author-date"
    )
    names = {
        key: value for key, value in _IDENTITY.items() if key[:14] == "GIT_COMMITTER_"
    }
    try:
        git(folder, "am", *flags.split(), data=patch.data, env=names)
    except PatchsetError as exc:
        raise ConflictError(f"{patch.filename} does not apply: {exc}") from None


def export_series(checkout: Path, repo: Repo, *, onto: str | None = None) -> Report:
    """Write the commits of a checkout as ``patches/`` and its series file.

    Args:
        checkout: a git checkout with the patches as its last commits.
        repo: where they go.
        onto: the commit they stand on; by default the one `import_series` tagged,
            else the base's tag.

    Raises:
        PatchsetError: a merge, a commit of an overlay file, or two of one name.
    """
    if git_dir(checkout) is None:
        raise PatchsetError(f"{checkout} is no git checkout")
    if git(checkout, "status", "--porcelain", "-uno"):
        raise PatchsetError(f"{checkout} has changes that are not committed")
    base = onto or _base_of(checkout, repo)
    commits = git(checkout, "rev-list", "--reverse", f"{base}..HEAD").decode().split()
    patches = [format_commit(checkout, commit) for commit in commits]
    _refuse_strangers(checkout, base, patches, repo)
    items = _write(repo, patches)
    changed = sum(item.status != "unchanged" for item in items)
    return Report(
        "export",
        str(checkout),
        items=items,
        summary=f"{len(patches)} patches on {base}; {changed} files changed",
    )


def _base_of(checkout: Path, repo: Repo) -> str:
    for name in (BASE_TAG, repo.pin.base.tag):
        if git(checkout, "rev-parse", "--verify", "--quiet", name, check=False):
            return name
    raise PatchsetError(
        f"{checkout} has neither a tag {BASE_TAG} nor {repo.pin.base.tag}; say with "
        "--onto which commit the patches stand on"
    )


def format_commit(checkout: Path, commit: str) -> Patch:
    """A commit as a patch of the series, the same bytes everywhere.

    Raises:
        PatchsetError: it is a merge or changes nothing.
    """
    settings = [word for setting in _FORMAT_SETTINGS for word in ("-c", setting)]
    data = git(checkout, *settings, "format-patch", *_FORMAT, commit)
    if not data:
        raise PatchsetError(f"commit {commit} of {checkout} is a merge or empty")
    return parse_patch(filename_for(parse_patch("a commit", data).subject), data)


def _refuse_strangers(
    checkout: Path, base: str, patches: list[Patch], repo: Repo
) -> None:
    merges = git(checkout, "rev-list", "--merges", f"{base}..HEAD").decode().split()
    if merges:
        raise PatchsetError(f"the series holds merges: {' '.join(merges)}")
    names = [patch.filename for patch in patches]
    for patch in patches:
        if names.count(patch.filename) > 1:
            raise PatchsetError(f"two commits would be called {patch.filename}")
        overlay = {file.path for file in repo.overlay}
        changed = {diff.path for diff in patch.files if not diff.deletes}
        strange = sorted(changed & overlay)
        if strange:
            raise PatchsetError(
                f"{patch.subject!r} changes overlay files ({', '.join(strange)}); "
                "change them in the overlay's own folder"
            )


def _write(repo: Repo, patches: list[Patch]) -> list[Item]:
    """Replace the series; the series file, which names the rest, comes last."""
    series = repo.root / SERIES_NAME
    comments = [
        line
        for line in series.read_text(encoding="utf-8").splitlines()
        if line[:1] == "#"
    ]
    text = "".join(f"{line}\n" for line in [*comments, *(p.filename for p in patches)])
    files = {patch.filename: patch.data for patch in patches}
    files[series.name] = text.encode()
    items = []
    for name, data in files.items():
        path = series.parent / name
        if path.is_file() and path.read_bytes() == data:
            items.append(Item("file", f"patches/{name}", "unchanged"))
            continue
        status = "rewritten" if path.exists() else "new"
        items.append(Item("file", f"patches/{name}", status))
        staged = path.with_name(f".{name}.new")
        staged.write_bytes(data)
        staged.replace(path)
    for path in sorted(series.parent.glob("*.patch")):
        if path.name not in files:
            path.unlink()
            items.append(Item("file", f"patches/{path.name}", "removed"))
    return items


def refresh(repo: Repo, archive: Path) -> Report:
    """Bring patches to their canonical bytes and renew the pin's identity.

    Raises:
        ConflictError: a patch does not apply to the base.
    """
    with tempfile.TemporaryDirectory(prefix="patchset-") as temporary:
        checkout = Path(temporary, "vllm")
        import_series(checkout, repo, archive, touched_only=True)
        result = export_series(checkout, repo)
    fresh = load_repo(repo.root)
    basis = read_basis(archive, fresh)
    plan = plan_on_base(basis, fresh)
    if plan.state != PRISTINE:
        names = [item.name for item in plan.items if item.status != "would-apply"]
        raise ConflictError(f"these do not fit the base: {', '.join(names)}")
    ids = result_ids(basis, plan, fresh.pin)
    renewed = write_identity(fresh.root, fresh.series_sha256, ids)
    result.command, result.target = "refresh", str(repo.root)
    result.identity = {
        "release": fresh.pin.release,
        "series_sha256": fresh.series_sha256,
        "source tree": ids.source,
        "package tree": ids.package,
        "package (CPU)": ids.package_cpu,
    }
    changed = sum(item.status != "unchanged" for item in result.items)
    result.summary = (
        f"refreshed: {changed} files of patches/ changed, the identity in pin.toml "
        + ("is new" if renewed else "was right")
    )
    return result
