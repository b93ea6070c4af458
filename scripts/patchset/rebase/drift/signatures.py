# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Signatures as source shows them, and whether a call fits one."""

from __future__ import annotations

import ast
import inspect
from inspect import Parameter, Signature

from patchset.rebase.drift.classes import Class, Function, is_dataclass, mro
from patchset.rebase.drift.modules import Modules


def signature_of(node: Function, *, bound: bool = False) -> Signature:
    """A function's signature without annotations; defaults read ``...``.

    Args:
        node: the definition.
        bound: whether to leave its first parameter out, as for a bound method.
    """
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    first_default = len(plain) - len(args.defaults)
    parameters = []
    for i, arg in enumerate(plain):
        kind = (
            Parameter.POSITIONAL_ONLY
            if i < len(args.posonlyargs)
            else Parameter.POSITIONAL_OR_KEYWORD
        )
        default = ... if i >= first_default else Parameter.empty
        parameters.append(Parameter(arg.arg, kind, default=default))
    if bound and parameters:
        del parameters[0]
    if args.vararg:
        parameters.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default_node in zip(args.kwonlyargs, args.kw_defaults):
        default = Parameter.empty if default_node is None else ...
        parameters.append(Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=default))
    if args.kwarg:
        parameters.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def constructor_of(modules: Modules, cls: Class) -> Signature | None:
    """What calling a class takes; None where the tree does not show it."""
    order, _ = mro(modules, cls)
    for one in order:
        for node in one.node.body:
            if isinstance(node, Function) and node.name == "__init__":
                return signature_of(node, bound=True)
        if is_dataclass(one):
            return _fields(modules, one)
        if any(
            isinstance(node, Function) and node.name == "__new__"
            for node in one.node.body
        ):
            continue  # it hands its arguments on to __init__
    return None


def _fields(modules: Modules, cls: Class) -> Signature | None:
    found: dict[str, Parameter] = {}
    for one in reversed(mro(modules, cls)[0]):
        for node in one.node.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(
                node.target, ast.Name
            ):
                continue
            text = ast.unparse(node)
            if "ClassVar" in text or "init=False" in text:
                continue
            default = Parameter.empty if node.value is None else ...
            # Keyword-only: fields of several classes need no order then.
            found[node.target.id] = Parameter(
                node.target.id, Parameter.POSITIONAL_OR_KEYWORD, default=default
            )
    ordered = sorted(found.values(), key=lambda p: p.default is not Parameter.empty)
    try:
        return Signature(ordered)
    except ValueError:
        return None


def misfit(call: ast.Call, signature: Signature) -> str:
    """Why a call does not fit a signature; "" if it does or cannot be told."""
    starred = any(isinstance(arg, ast.Starred) for arg in call.args)
    spread = any(word.arg is None for word in call.keywords)
    positional = [None for arg in call.args if not isinstance(arg, ast.Starred)]
    words = {word.arg: None for word in call.keywords if word.arg}
    try:
        if starred or spread:
            signature.bind_partial(*positional, **words)
        else:
            signature.bind(*positional, **words)
    except TypeError as exc:
        return str(exc)
    return ""


def show(signature: Signature) -> str:
    """A signature as text."""
    return str(
        signature.replace(
            parameters=[
                parameter.replace(default=_Dots())
                if parameter.default is not inspect.Parameter.empty
                else parameter
                for parameter in signature.parameters.values()
            ]
        )
    )


class _Dots:
    def __repr__(self) -> str:
        return "..."
