# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Every use that one file makes of the tree: imports, attributes, calls, overrides.

Types come from annotations, constructor calls and ``self``; where they do not show,
nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from patchset.rebase.drift.classes import (
    Class,
    Function,
    abstract_methods,
    as_class,
    decorators,
    member,
    mro,
    own_member,
    resolve_expr,
)
from patchset.rebase.drift.modules import (
    OUTSIDE,
    Found,
    Missing,
    Module,
    Modules,
    absolute,
)
from patchset.rebase.drift.signatures import (
    constructor_of,
    misfit,
    show,
    signature_of,
)


@dataclass(frozen=True)
class Use:
    """One use.

    Attributes:
        kind: "import", "attribute", "call", "override" or "abstract".
        line, name: where and what, the same in every tree.
        state: "found", "missing" or "unknown".
        detail: the signature that it meets or must keep to; or why a call misfits.
    """

    kind: str
    line: int
    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Instance:
    """A value whose class is known."""

    cls: Class


@dataclass(frozen=True)
class Method:
    """A function reached through a class or an instance."""

    cls: Class
    node: Function
    bound: bool


Value = object  # Found, Class, Instance, Method, or OUTSIDE


def uses_of(modules: Modules, module: Module) -> Iterator[Use]:
    """Every use that a module makes of the tree, its own module included."""
    assert module.node is not None
    finder = _Finder(modules, module)
    finder.block(module.node.body, {})
    yield from finder.found


class _Finder:
    def __init__(self, modules: Modules, module: Module) -> None:
        self.modules, self.module = modules, module
        self.found: list[Use] = []
        self.cls: Class | None = None

    def note(
        self, kind: str, node: ast.AST, name: str, state: str, detail: str = ""
    ) -> None:
        line = getattr(node, "lineno", 0)
        self.found.append(Use(kind, line, name, state, detail))

    # Statements ----------------------------------------------------------------

    def block(self, body: list[ast.stmt], scope: dict[str, Value]) -> None:
        for node in body:
            self.statement(node, scope)

    def statement(self, node: ast.stmt, scope: dict[str, Value]) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.import_(node, scope)
        elif isinstance(node, Function):
            self.function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self.class_(node, scope)
        else:
            for expr in _expressions(node):
                self.infer(expr, scope)
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    scope[target.id] = self.quiet(node.value, scope)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                scope[node.target.id] = self.annotated(node.annotation)
            for part in ("body", "orelse", "finalbody"):
                self.block(getattr(node, part, []), scope)
            for handler in getattr(node, "handlers", []):
                self.block(handler.body, scope)
            for case in getattr(node, "cases", []):
                self.block(case.body, scope)

    def import_(
        self, node: ast.Import | ast.ImportFrom, scope: dict[str, Value]
    ) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name
            source = (
                absolute(self.module, node)
                if isinstance(node, ast.ImportFrom)
                else alias.name
            )
            if not self.modules.inside(source):
                continue
            if isinstance(node, ast.Import):
                result = self.modules.module_named(source)
                name = source
                bound = alias.asname or source.partition(".")[0]
            else:
                result = self.modules.imported(self.module, node, bound, 0)
                name = f"{source}.{alias.name}"
            state = "missing" if isinstance(result, Missing) else "found"
            self.note("import", node, name, state)
            scope[bound] = _value(result)

    def function(self, node: Function, scope: dict[str, Value]) -> None:
        inner = dict(scope)
        args = node.args
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]:
            inner[arg.arg] = self.annotated(arg.annotation)
        plain = [*args.posonlyargs, *args.args]
        if self.cls and plain and "staticmethod" not in decorators(node):
            first = plain[0].arg
            owner = self.cls
            inner[first] = owner if first == "cls" else Instance(owner)
        for item in node.decorator_list:
            self.infer(item, scope)
        self.block(node.body, inner)

    def class_(self, node: ast.ClassDef, scope: dict[str, Value]) -> None:
        outer, self.cls = self.cls, Class(self.module, node)
        for item in [*node.decorator_list, *node.bases]:
            self.infer(item, scope)
        self.overrides(self.cls)
        self.block(node.body, dict(scope))
        self.cls = outer

    def overrides(self, cls: Class) -> None:
        bases = mro(self.modules, cls)[0][1:]
        for node in cls.node.body:
            if not isinstance(node, Function) or node.name.startswith("__"):
                continue
            for base in bases:
                theirs = own_member(base, node.name)
                if isinstance(theirs, Function):
                    self.note(
                        "override",
                        node,
                        f"{cls.node.name}.{node.name}",
                        "found",
                        f"{base.title}.{node.name}{show(signature_of(theirs))}",
                    )
                    break
            else:
                self.note("override", node, f"{cls.node.name}.{node.name}", "unknown")
        names = ", ".join(sorted(abstract_methods(self.modules, cls)))
        self.note("abstract", cls.node, cls.node.name, "found", names)

    # Expressions ---------------------------------------------------------------

    def quiet(self, expr: ast.expr, scope: dict[str, Value]) -> Value:
        """The value of an expression that has been looked at already."""
        kept = self.found
        self.found = []
        try:
            return self.infer(expr, scope)
        finally:
            self.found = kept

    def infer(self, expr: ast.AST, scope: dict[str, Value]) -> Value:
        """Note every use in an expression; return its value where it shows."""
        if isinstance(expr, ast.Name):
            return scope.get(expr.id) or self.own_name(expr.id)
        if isinstance(expr, ast.Attribute):
            return self.attribute(expr, self.infer(expr.value, scope))
        if isinstance(expr, ast.Call):
            return self.call(expr, scope)
        inner = dict(scope) if _binds(expr) else scope
        for name in _binds(expr):
            inner[name] = OUTSIDE
        for child in ast.iter_child_nodes(expr):
            if isinstance(child, ast.expr | ast.comprehension | ast.keyword):
                self.infer(child, inner)
        return OUTSIDE

    def own_name(self, name: str) -> Value:
        node = self.module.names.get(name)
        if isinstance(node, ast.ClassDef):
            return Class(self.module, node)
        if isinstance(node, Function):
            return Found(self.module, node)
        return OUTSIDE

    def attribute(self, expr: ast.Attribute, owner: Value) -> Value:
        if isinstance(owner, Found) and owner.node is None:
            result = self.modules.member(owner.module, expr.attr)
            name = f"{owner.module.name}.{expr.attr}"
            if isinstance(result, Missing):
                self.note("attribute", expr, name, "missing")
                return OUTSIDE
            self.note("attribute", expr, name, "found")
            return _value(result)
        if isinstance(owner, Class | Instance):
            cls = owner if isinstance(owner, Class) else owner.cls
            place = member(self.modules, cls, expr.attr)
            name = f"{cls.title}.{expr.attr}"
            if place is None:
                self.note("attribute", expr, name, "missing")
                return OUTSIDE
            self.note("attribute", expr, name, "found")
            return self.member_value(cls, *place, isinstance(owner, Instance))
        return OUTSIDE

    def member_value(
        self, cls: Class, place: Class, node: ast.AST, instance: bool
    ) -> Value:
        if isinstance(node, Function):
            marks = decorators(node)
            if marks & {"property", "cached_property"}:
                return self.annotated(node.returns, place.module)
            bound = "staticmethod" not in marks and (instance or "classmethod" in marks)
            return Method(place, node, bound)
        if isinstance(node, ast.AnnAssign):
            return self.annotated(node.annotation, place.module)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = resolve_expr(self.modules, place.module, node.value.func)
            found = as_class(made)
            return Instance(found) if found else OUTSIDE
        return OUTSIDE

    def call(self, call: ast.Call, scope: dict[str, Value]) -> Value:
        if isinstance(call.func, ast.Name) and call.func.id == "super" and self.cls:
            bases = mro(self.modules, self.cls)[0][1:]
            return Instance(bases[0]) if bases else OUTSIDE
        target = self.infer(call.func, scope)
        for child in [*call.args, *[word.value for word in call.keywords]]:
            self.infer(child, scope)
        signature = None
        result: Value = OUTSIDE
        if isinstance(target, Class):
            signature, title = constructor_of(self.modules, target), target.title
            result = Instance(target)
        elif isinstance(target, Method):
            signature = signature_of(target.node, bound=target.bound)
            title = f"{target.cls.title}.{target.node.name}"
            result = self.annotated(target.node.returns, target.cls.module)
        elif isinstance(target, Found) and isinstance(target.node, Function):
            signature, title = signature_of(target.node), target.title
            result = self.annotated(target.node.returns, target.module)
        if signature is not None:
            why = misfit(call, signature)
            detail = f"{why}; it takes {show(signature)}" if why else ""
            self.note("call", call, title, "missing" if why else "found", detail)
        return result

    def annotated(self, node: ast.expr | None, module: Module | None = None) -> Value:
        """An instance of the class that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return OUTSIDE
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = [self.annotated(n, module) for n in (node.left, node.right)]
            known = [side for side in sides if isinstance(side, Instance)]
            return known[0] if len(known) == 1 else OUTSIDE
        if isinstance(node, ast.Name | ast.Attribute):
            found = as_class(resolve_expr(self.modules, module or self.module, node))
            return Instance(found) if found else OUTSIDE
        return OUTSIDE


def _value(result: object) -> Value:
    return as_class(result) or result


def _expressions(node: ast.stmt) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


def _binds(expr: ast.AST) -> list[str]:
    """The names that a comprehension or lambda binds for itself."""
    if isinstance(expr, ast.Lambda):
        return [arg.arg for arg in expr.args.args]
    return [
        name.id
        for generator in getattr(expr, "generators", [])
        for name in ast.walk(generator.target)
        if isinstance(name, ast.Name)
    ]
