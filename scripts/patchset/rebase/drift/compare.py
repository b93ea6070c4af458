# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Compares what the overlay relies on in the base with what the upstream offers."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from patchset.rebase.drift.modules import (
    Missing,
    Module,
    Modules,
    absolute,
    module_name,
)
from patchset.rebase.drift.uses import Use, uses_of
from patchset.rebase.results import Drift
from patchset.rebase.trees import Tree


def overlay_drift(overlay: Collection[str], base: Tree, upstream: Tree) -> list[Drift]:
    """What of the base the overlay's files use and the upstream no longer offers.

    Args:
        overlay: the overlay's paths.
        base, upstream: both trees with series and overlay in place.
    """
    old, new = Modules(base), Modules(upstream)
    found: list[Drift] = []
    for path in sorted(overlay):
        if path.startswith("vllm/") and path.endswith(".py"):
            found += _file_drift(path, old, new)
    found += _users(overlay, new)
    return found


def _file_drift(path: str, old: Modules, new: Modules) -> Iterator[Drift]:
    before = _uses(old, path)
    after = _uses(new, path)
    for key, now in after.items():
        was = before.get(key)
        if now.kind == "abstract":
            added = set(now.detail.split(", ")) - set(
                was.detail.split(", ") if was else []
            )
            if added - {""}:
                names = ", ".join(sorted(added))
                yield _drift(path, now, f"upstream's base class asks for {names}")
        elif now.kind == "override":
            if was and was.state == "found" and now.detail != was.detail:
                theirs = now.detail or "no base class has it"
                yield _drift(path, now, f"was {was.detail}; now {theirs}")
        elif now.state == "missing" and was and was.state == "found":
            yield _drift(path, now, now.detail or "upstream has no such name")
        elif now.state == "missing" and now.kind == "import":
            yield _drift(path, now, "upstream has no such name")
    # A class that went leaves no attribute or call to look at: its import tells.


def _uses(modules: Modules, path: str) -> dict[tuple, Use]:
    module = modules.get(module_name(path))
    if module is None or module.node is None:
        return {}
    found: dict[tuple, Use] = {}
    for use in uses_of(modules, module):
        found.setdefault((use.kind, use.line, _short(use)), use)
    return found


def _short(use: Use) -> str:
    """A name that is the same when its owner has moved to another module."""
    return use.name if use.kind == "import" else use.name.rpartition(".")[2]


def _drift(path: str, use: Use, detail: str) -> Drift:
    return Drift(use.kind, path, use.line, use.name, detail)


def _users(overlay: Collection[str], modules: Modules) -> Iterator[Drift]:
    """Upstream's files that import from overlay modules what these do not have."""
    ours = {module_name(path) for path in overlay if path.endswith(".py")}
    roots = {name for name in ours if name.rpartition(".")[0] not in ours}
    needles = [name.rpartition(".")[2].encode() for name in roots]
    for name in modules:
        if name in ours:
            continue
        path = name.replace(".", "/")
        blob = modules.tree.read(f"{path}.py") or modules.tree.read(
            f"{path}/__init__.py"
        )
        if blob is None or not any(needle in blob.data for needle in needles):
            continue
        module = modules.get(name)
        if module is not None and module.node is not None:
            yield from _user(module, ours, modules)


def _user(module: Module, ours: set[str], modules: Modules) -> Iterator[Drift]:
    assert module.node is not None
    for node in ast.walk(module.node):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = absolute(module, node)
        package = source.split(".")
        owned = any(".".join(package[:i]) in ours for i in range(1, len(package) + 1))
        if not owned:
            continue
        for alias in node.names:
            bound = alias.asname or alias.name
            if isinstance(modules.imported(module, node, bound, 0), Missing):
                detail = "upstream's own code imports it; our overlay has no such name"
                name = f"{source}.{alias.name}"
                yield Drift("user", module.path, node.lineno, name, detail)
