# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The named things in a file: what two sides may both have added.

Text alone does not show that upstream has a table row, parameter or class of the
same name somewhere else in the file: both patches would apply, and the file would
hold two. A row's key says where it stands and what it is called, for example
``_TEXT_GENERATION_MODELS["FalconForCausalLM"]``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_CELL = re.compile(r"\|\s*(`[^`]+`)\s*\|")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[.*?\])?\s*[<>=!~;@]")


@dataclass(frozen=True)
class Row:
    """One named thing.

    Attributes:
        key: unique in the file; see the module's docstring.
        first, last: its lines, counted from 1.
        text: its source with all white space made one blank.
        whole: whether it fills its lines, so that they can be taken out.
    """

    key: str
    first: int
    last: int
    text: str
    whole: bool


def rows_of(path: str, text: str) -> dict[str, Row]:
    """The rows of a Python file, Markdown table, or requirements file.

    Other kinds, and Python that does not parse, have none.
    """
    lines = text.splitlines()
    found: dict[str, Row] = {}
    spans: Iterator[tuple[str, int, int]]
    if path.endswith((".py", ".pyi")):
        try:
            module = ast.parse(text)
        except (SyntaxError, ValueError):
            return {}
        spans = _python(module, "")
    elif path.endswith(".md"):
        spans = _by_line(lines, _CELL)
    elif path.endswith((".txt", ".in")) and "requirements" in path:
        spans = _by_line(lines, _REQUIREMENT)
    else:
        return {}
    twice: set[str] = set()
    for key, first, last in spans:
        source = lines[first - 1 : last]
        text = " ".join(" ".join(source).split())
        if key in found:
            twice.add(key)
        found[key] = Row(key, first, last, text, _whole(source))
    # A name that the file has twice says nothing about which of them is meant.
    return {key: row for key, row in found.items() if key not in twice}


def without_rows(text: str, rows: list[Row]) -> str:
    """The text without the lines of some whole rows."""
    gone = {line for row in rows for line in range(row.first, row.last + 1)}
    lines = text.splitlines(keepends=True)
    return "".join(line for i, line in enumerate(lines, 1) if i not in gone)


def _whole(source: list[str]) -> bool:
    """Whether the lines hold one item: no bracket opens here and closes elsewhere."""
    joined = "\n".join(source)
    pairs = (("(", ")"), ("[", "]"), ("{", "}"))
    balanced = all(joined.count(a) == joined.count(b) for a, b in pairs)
    return balanced and bool(source)


def _by_line(lines: list[str], form: re.Pattern[str]) -> Iterator[tuple[str, int, int]]:
    for number, line in enumerate(lines, 1):
        if match := form.match(line):
            yield match[1], number, number


def _python(node: ast.AST, scope: str) -> Iterator[tuple[str, int, int]]:
    """The rows below a node; `scope` names what encloses them."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            inner = f"{scope}[{ast.unparse(key) if key else '**'}]"
            if isinstance(key, ast.Constant):
                yield inner, key.lineno, value.end_lineno or key.lineno
            yield from _python(value, inner)
        return
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}{child.name}."
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            yield inner[:-1], first, child.end_lineno or first
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            target = (
                child.target if isinstance(child, ast.AnnAssign) else (child.targets[0])
            )
            inner = f"{scope}{ast.unparse(target)}"
            if isinstance(node, ast.Module | ast.ClassDef):
                yield inner, child.lineno, child.end_lineno or child.lineno
        elif isinstance(child, ast.arg):
            yield f"{scope}({child.arg})", child.lineno, child.end_lineno or 0
        elif isinstance(child, ast.alias):
            name = f"{scope}import {child.asname or child.name}"
            yield name, child.lineno, child.end_lineno or 0
        elif isinstance(child, ast.Call):
            inner = f"{scope}{ast.unparse(child.func)}"
        elif isinstance(child, ast.keyword) and child.arg:
            inner = f"{scope}({child.arg}=)"
            yield inner, child.lineno, child.end_lineno or child.lineno
        elif isinstance(child, ast.List | ast.Set | ast.Tuple):
            for item in child.elts:
                if isinstance(item, ast.Constant | ast.Name):
                    name = f"{scope}{{{ast.unparse(item)}}}"
                    yield name, item.lineno, item.end_lineno or item.lineno
        yield from _python(child, inner)
