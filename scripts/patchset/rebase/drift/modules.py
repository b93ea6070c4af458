# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Modules of a source tree, their names, and where a name leads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from patchset.rebase.trees import Tree

_DEPTH = 20  # re-exports followed before giving up


@dataclass
class Module:
    """One module.

    Attributes:
        names: what its top level binds, the last binding of each name.
        dynamic: whether names may come at run time.
    """

    name: str
    path: str
    names: dict[str, ast.AST] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    dynamic: bool = False
    node: ast.Module | None = None

    @property
    def package(self) -> str:
        """What its relative imports start from."""
        if self.path.endswith("/__init__.py"):
            return self.name
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Found:
    """A module, class, function or value that a name leads to."""

    module: Module
    node: ast.AST | None = None  # None: the module itself

    @property
    def title(self) -> str:
        """Its dotted name."""
        name = getattr(self.node, "name", "")
        return f"{self.module.name}.{name}" if name else self.module.name


class Outside:
    """Something that the tree does not hold, such as torch, or cannot tell."""


class Missing:
    """A name that is not there."""


OUTSIDE, MISSING = Outside(), Missing()
Resolved = Found | Outside | Missing


class Modules:
    """All modules of one tree, parsed when asked for."""

    def __init__(self, tree: Tree, top: str = "vllm") -> None:
        self.tree, self.top = tree, top
        self._paths: dict[str, str] = {}
        for path in tree:
            if path.startswith(f"{top}/") and path.endswith(".py"):
                self._paths[module_name(path)] = path
        self._parsed: dict[str, Module | None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def get(self, name: str) -> Module | None:
        """A module; None where there is none or it does not parse."""
        if name not in self._parsed:
            self._parsed[name] = self._parse(name)
        return self._parsed[name]

    def _parse(self, name: str) -> Module | None:
        path = self._paths.get(name)
        text = path and self.tree.text(path)
        if path is None or text is None:
            return None
        module = Module(name, path)
        try:
            module.node = ast.parse(text)
        except SyntaxError:
            module.dynamic = True
            return module
        _collect(module, module.node.body)
        module.dynamic = "__getattr__" in module.names or "globals()" in text
        return module

    def inside(self, name: str) -> bool:
        """Whether a dotted name belongs to the tree's package."""
        return name.partition(".")[0] == self.top

    def member(self, module: Module, name: str, depth: int = 0) -> Resolved:
        """What a name of a module is: bound there, or a submodule."""
        node = module.names.get(name)
        submodule = f"{module.name}.{name}"
        if isinstance(node, ast.ImportFrom | ast.Import):
            return self.imported(module, node, name, depth + 1)
        if node is not None:
            return Found(module, node)
        if submodule in self._paths:
            found = self.get(submodule)
            return Found(found) if found else OUTSIDE
        for star in module.stars:
            source = self.get(star)
            if source is None:
                return OUTSIDE
            if depth < _DEPTH:
                result = self.member(source, name, depth + 1)
                if not isinstance(result, Missing):
                    return result
        return OUTSIDE if module.dynamic else MISSING

    def imported(
        self, module: Module, node: ast.Import | ast.ImportFrom, name: str, depth: int
    ) -> Resolved:
        """What an import statement binds to `name`."""
        if depth > _DEPTH:
            return OUTSIDE
        for alias in node.names:
            bound = alias.asname or alias.name
            if isinstance(node, ast.Import):
                if not alias.asname:
                    bound = alias.name.partition(".")[0]
                if bound == name:
                    return self.module_named(alias.name if alias.asname else bound)
            elif bound == name:
                source = absolute(module, node)
                if not self.inside(source):
                    return OUTSIDE
                found = self.get(source)
                if found is None:
                    return MISSING
                return self.member(found, alias.name, depth)
        return OUTSIDE

    def module_named(self, name: str) -> Resolved:
        """A module by its dotted name."""
        if not self.inside(name):
            return OUTSIDE
        found = self.get(name)
        return Found(found) if found else MISSING


def module_name(path: str) -> str:
    """The dotted name of a Python file."""
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name that an import takes its names from."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


def _collect(module: Module, body: list[ast.stmt]) -> None:
    """Bind what statements bind, whichever branch they are in."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            module.names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    module.stars.append(absolute(module, node))
                else:
                    module.names[alias.asname or alias.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                module.names[bound] = node
        else:
            for name in _bound(node):
                module.names.setdefault(name, node)
            for part in ("body", "orelse", "finalbody"):
                _collect(module, getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                _collect(module, handler.body)


def _bound(node: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [i.optional_vars for i in node.items if i.optional_vars]
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                yield part.id
