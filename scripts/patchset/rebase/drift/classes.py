# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Classes of a source tree: their bases, members and constructors."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from patchset.rebase.drift.modules import Found, Module, Modules

_PLAIN_BASES = {"object", "ABC", "Protocol", "Generic", "NamedTuple", "TypedDict"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Class:
    """A class and the module it stands in."""

    module: Module
    node: ast.ClassDef

    @property
    def title(self) -> str:
        """Its dotted name."""
        return f"{self.module.name}.{self.node.name}"


def resolve_expr(modules: Modules, module: Module, expr: ast.expr) -> Found | None:
    """What a dotted name in a module's top level leads to, if to the tree."""
    if isinstance(expr, ast.Name):
        found = modules.member(module, expr.id)
        return found if isinstance(found, Found) else None
    if isinstance(expr, ast.Attribute):
        owner = resolve_expr(modules, module, expr.value)
        if owner is not None and owner.node is None:
            found = modules.member(owner.module, expr.attr)
            return found if isinstance(found, Found) else None
    if isinstance(expr, ast.Subscript):
        return resolve_expr(modules, module, expr.value)
    return None


def as_class(found: object) -> Class | None:
    """The class that a name leads to, if it is one."""
    if isinstance(found, Found) and isinstance(found.node, ast.ClassDef):
        return Class(found.module, found.node)
    return None


def mro(modules: Modules, cls: Class) -> tuple[list[Class], bool]:
    """A class and its bases, depth first, and whether all of them are in the tree."""
    order: list[Class] = []
    closed = True

    def visit(one: Class) -> None:
        nonlocal closed
        if any(one.node is other.node for other in order):
            return
        order.append(one)
        for expr in one.node.bases:
            base = as_class(resolve_expr(modules, one.module, expr))
            if base is not None:
                visit(base)
            elif ast.unparse(expr).split("[")[0].split(".")[-1] not in _PLAIN_BASES:
                closed = False

    visit(cls)
    return order, closed


def own_member(cls: Class, name: str) -> ast.AST | None:
    """What a class body, or an assignment to self, binds to a name."""
    found: ast.AST | None = None
    for node in cls.node.body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            if not _is_overload(node):
                found = node
        elif isinstance(node, ast.AnnAssign) and _is_name(node.target, name):
            found = node
        elif isinstance(node, ast.Assign):
            if any(_is_name(target, name) for target in node.targets):
                found = node
        elif isinstance(node, ast.If):
            for branch in node.body:
                if getattr(branch, "name", None) == name:
                    found = branch
    if found is not None:
        return found
    for method in cls.node.body:
        if isinstance(method, Function):
            for inner in ast.walk(method):
                if _assigns_to_self(inner, name):
                    return inner
    return None


def _assigns_to_self(node: ast.AST, name: str) -> bool:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == name
        and _is_name(part.value, "self")
        for target in targets
        for part in ast.walk(target)
    )


def member(modules: Modules, cls: Class, name: str) -> tuple[Class, ast.AST] | None:
    """Where a class or one of its bases in the tree binds a name."""
    for one in mro(modules, cls)[0]:
        node = own_member(one, name)
        if node is not None:
            return one, node
    return None


def decorators(node: ast.AST) -> set[str]:
    """The last names of a definition's decorators."""
    found = set()
    for item in getattr(node, "decorator_list", []):
        call = item.func if isinstance(item, ast.Call) else item
        found.add(ast.unparse(call).rpartition(".")[2])
    return found


def abstract_methods(modules: Modules, cls: Class) -> set[str]:
    """Names that bases declare abstract and nothing before them implements."""
    seen: set[str] = set()
    missing: set[str] = set()
    for one in mro(modules, cls)[0]:
        for node in one.node.body:
            name = getattr(node, "name", None)
            if isinstance(node, Function) and name and name not in seen:
                seen.add(name)
                if "abstractmethod" in decorators(node):
                    missing.add(name)
        seen |= {
            target.id
            for node in one.node.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
    return missing


def is_dataclass(cls: Class) -> bool:
    """Whether a decorator or base makes the constructor from the fields."""
    return bool(decorators(cls.node) & {"dataclass", "config"}) or any(
        ast.unparse(base).endswith("NamedTuple") for base in cls.node.bases
    )


def _is_name(expr: ast.expr, name: str) -> bool:
    return isinstance(expr, ast.Name) and expr.id == name


def _is_overload(node: ast.AST) -> bool:
    return "overload" in decorators(node)
