# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Holds the series and the overlay to their rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from patchset import report as reporting
from patchset.basis import Basis, plan_on_base, read_basis, result_ids
from patchset.errors import EXIT_CONFLICT, PatchsetError
from patchset.native import NATIVE
from patchset.overlay import OVERLAY_NAME
from patchset.repo import Repo
from patchset.report import Item, Report
from patchset.series import Patch, filename_for

CHECKS_PATH = "vllm/models/flint/patchset.py"
OK, WRONG = "ok", "wrong"
_ZERO_COMMIT = b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001"
_SUBJECT = re.compile(r"(\[[A-Z][A-Za-z0-9/+ -]*\])+ [A-Z]\S*( \S+)*[^.]")
_SHORTEST_BODY = 40  # characters; less explains nothing
_TRAILERS = {
    "Forwarded": re.compile(r"https://\S+|no|not-needed"),
    "Removal": re.compile(r".{10,}"),
    "Required": re.compile(r"yes|no"),
    "Signed-off-by": re.compile(r"[^<>]+ <[^<>@ ]+@[^<>@ ]+>"),
}


def lint(repo: Repo, archive: Path) -> Report:
    """Check every rule on every patch and overlay file.

    Args:
        repo: the patch set.
        archive: the pinned source archive.

    Returns:
        A report with one item for each patch, for the overlay files that are
        wrong, and for the series as a whole; exit code 1 if any is wrong.
    """
    basis = read_basis(archive, repo)
    result = Report("lint", str(repo.root))
    checks = registered_checks(repo)
    for patch in repo.series:
        wrong = [
            *_header_faults(patch),
            *_message_faults(patch),
            *_file_faults(patch, repo, basis),
        ]
        if patch.required and patch.name not in checks:
            wrong.append(f"Required: yes, but {CHECKS_PATH} has no check of that name")
        result.items.append(_item("patch", patch.name, wrong))
    for file in repo.overlay:
        result.items.append(
            _item("overlay", file.path, list(_overlay_faults(file.path, repo, basis)))
        )
    series = list(_series_faults(repo, basis))
    unknown = sorted(checks - {patch.name for patch in repo.series})
    series += [f"{CHECKS_PATH} checks {name}, which is no patch" for name in unknown]
    result.items.append(_item("series", "as a whole", series))
    faults = sum(item.status == WRONG for item in result.items)
    result.exit_code = EXIT_CONFLICT if faults else 0
    result.summary = (
        f"lint: {faults} of {len(result.items)} items are wrong"
        if faults
        else f"lint: {len(repo.series)} patches and {len(repo.overlay)} files are right"
    )
    return result


def _item(kind: str, name: str, faults: list[str]) -> Item:
    return Item(kind, name, WRONG if faults else OK, "; ".join(faults))


def _header_faults(patch: Patch) -> Iterator[str]:
    lines = patch.header.split(b"\n")
    if lines[0] != _ZERO_COMMIT:
        yield "the From line's commit must be zeroed (--zero-commit)"
    for name in (b"From: ", b"Date: ", b"Subject: [PATCH] "):
        if sum(line.startswith(name) for line in lines) != 1:
            yield f"the header needs one line '{name.decode()}...'"
    if not _SUBJECT.fullmatch(patch.subject):
        yield 'the subject must read "[Area] Do this", with no full stop'
    elif patch.filename != filename_for(patch.subject):
        yield f"the file must be called {filename_for(patch.subject)}"


def _message_faults(patch: Patch) -> Iterator[str]:
    if len(patch.body) < _SHORTEST_BODY or "overlay" not in patch.body.lower():
        yield "the body must say why this cannot live in the overlay"
    if re.search(r"^---$", patch.body, re.M):
        yield "no --- line and no diffstat (--no-stat)"
    for name, form in _TRAILERS.items():
        value = patch.trailer(name)
        if value is None:
            yield f"no trailer {name}"
        elif not form.fullmatch(value):
            yield f"{name}: {value!r} is not of the form {form.pattern}"
    names = [name for name, _ in patch.trailers if name != "Signed-off-by"]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two trailers {name}"


def _file_faults(patch: Patch, repo: Repo, basis: Basis) -> Iterator[str]:
    pin = repo.pin
    native = patch.trailer("Native") == "yes"
    for diff in patch.files:
        if diff.path in NATIVE and not native:
            yield f"touches native code ({diff.path}) without a trailer Native: yes"
        if diff.creates:
            yield f"makes {diff.path}: new files go to {OVERLAY_NAME}/"
        elif diff.deletes and diff.path not in pin.supersedes:
            yield f"deletes {diff.path}, which [overlay] supersedes does not name"
        elif diff.path not in basis.entries:
            yield f"touches {diff.path}, which the base does not have"
        if diff.old_mode != diff.new_mode and not (diff.creates or diff.deletes):
            yield f"changes the mode of {diff.path}"
        if diff.path in pin.cpu_blobs:
            yield f"touches {diff.path}, of which the CPU wheel has its own version"
        if diff.path in pin.source_globs:
            yield f"touches {diff.path}, a generated file"


def _overlay_faults(path: str, repo: Repo, basis: Basis) -> Iterator[str]:
    if path in basis.entries and path not in repo.pin.supersedes:
        yield "the base has this file; change it by a patch"
    if path in repo.pin.source_globs:
        yield "the pin calls this a generated file"


def _series_faults(repo: Repo, basis: Basis) -> Iterator[str]:
    deleted = {d.path for p in repo.series for d in p.files if d.deletes}
    for path in sorted(repo.pin.supersedes - deleted):
        yield f"[overlay] supersedes {path}, but no patch deletes it"
    try:
        plan = plan_on_base(basis, repo)
    except PatchsetError as exc:
        yield str(exc)
        return
    wrong = [item for item in plan.items if item.status != reporting.WOULD_APPLY]
    for item in wrong:
        yield f"{item.name} does not apply to the base ({item.status})"
    for item in plan.items:
        if item.kind == "patch" and item.detail:
            yield f"{item.name} applies only with an offset: {item.detail}"
    if wrong:
        return
    same_series = repo.pin.series_sha256 == repo.series_sha256
    if not same_series or result_ids(basis, plan, repo.pin) != repo.pin.identity:
        yield "pin.toml's identity is stale: run `python3 scripts/patchset refresh`"


def registered_checks(repo: Repo) -> set[str]:
    """The keys of the overlay's ``CHECKS`` dict literal, read without running it."""
    source = next((f for f in repo.overlay if f.path == CHECKS_PATH), None)
    if source is None:
        return set()
    try:
        module = ast.parse(source.blob.data)
    except SyntaxError as exc:
        raise PatchsetError(f"{CHECKS_PATH}: {exc}") from None
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        named = any(isinstance(t, ast.Name) and t.id == "CHECKS" for t in targets)
        if named and isinstance(node.value, ast.Dict):
            keys = [key for key in node.value.keys if isinstance(key, ast.Constant)]
            return {str(key.value) for key in keys}
    raise PatchsetError(f"{CHECKS_PATH} holds no dict literal CHECKS")
