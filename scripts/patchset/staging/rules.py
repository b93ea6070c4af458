# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Holds the staged steps to vLLM's rules for contributions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from patchset.rebase.trees import Tree
from patchset.staging.steps import Plan, Step

OK, WRONG, PERSON = "ok", "wrong", "a person"

MAX_OPEN = 6  # pull requests of a contributor without write access
MAX_CORE = 500  # changed lines that need no RFC
MAX_BUGFIX = 250  # changed lines of a bug fix
_SPDX = b"SPDX-License-Identifier: Apache-2.0"
# What vLLM leaves out of the count: kernels, data, configs, tests, docs.
_NOT_CORE = re.compile(
    r"(?!vllm/)|vllm/model_executor/kernels/|vllm/models/[^/]+/ops/|.*\.(json|txt)$"
)


@dataclass(frozen=True)
class Ruling:
    """One rule, and how a step, or the whole of them, stands to it.

    Attributes:
        result: "ok", "wrong", or "a person" where only one can tell or act.
    """

    step: str
    rule: str
    result: str
    detail: str


@dataclass(frozen=True)
class Size:
    """Changed lines, added and removed, of one step."""

    all: int
    core: int
    files: int


def size_of(numstat: str) -> Size:
    """Count what `git diff --numstat` printed."""
    every = core = files = 0
    for line in numstat.splitlines():
        added, removed, path = line.split("\t")
        if added == "-":
            continue
        lines = int(added) + int(removed)
        every, files = every + lines, files + 1
        core += 0 if _NOT_CORE.match(path) else lines
    return Size(every, core, files)


def rule_step(
    step: Step, message: str, size: Size, changed: list[str], tree: Tree
) -> Iterator[Ruling]:
    """What the rules say of one step.

    Args:
        step: the step.
        message: its commit's message.
        size: its changed lines.
        changed: the files that it changes.
        tree: the upstream after it.
    """

    def ruling(rule: str, right: bool, detail: str = "") -> Ruling:
        return Ruling(step.name, rule, OK if right else WRONG, detail)

    signed = re.search(r"^Signed-off-by: .+ <.+>$", message, re.M)
    yield ruling("signed off (DCO)", bool(signed))
    helped = re.search(r"^(Assisted|Generated|Co-authored)-by: ", message, re.M)
    yield ruling("AI help disclosed by a trailer", bool(helped))
    title = re.match(r"(\[[^\]]+\])+ \S", step.subject)
    yield ruling("title starts with tags", bool(title), step.subject)
    bare = [
        path
        for path in changed
        if path.endswith(".py")
        and (blob := tree.read(path)) is not None
        and blob.data.strip()
        and _SPDX not in blob.data[:300]
    ]
    yield ruling("SPDX lines", not bare, ", ".join(bare))
    broken = list(_broken(changed, tree))
    yield ruling("Python compiles", not broken, "; ".join(broken))
    if "[Bugfix]" in step.subject:
        rule = f"bug fix below {MAX_BUGFIX} lines"
        yield ruling(rule, size.all < MAX_BUGFIX, f"{size.all} lines")
    detail = f"{size.core} core of {size.all} lines in {size.files} files"
    if size.core > MAX_CORE:
        detail += "; open an RFC issue first, and name it in the pull request"
        yield Ruling(step.name, f"RFC above {MAX_CORE} core lines", PERSON, detail)
    else:
        yield ruling(f"at most {MAX_CORE} core lines, no RFC", True, detail)
    for path, name in step.rows.items():
        found = neighbours(tree.text(path) or "", name)
        yield ruling("alphabetical order", *_in_order(found, path, name))


def rule_all(plan: Plan) -> Iterator[Ruling]:
    """What the rules say of all steps together."""
    count = len(plan.steps)
    yield Ruling(
        "all",
        f"at most {MAX_OPEN} open pull requests",
        OK if count <= MAX_OPEN else PERSON,
        f"{count} steps; most stand on others, so open the next when one is in",
    )
    yield Ruling(
        "all",
        "reviewed by a person",
        PERSON,
        "the submitter reads every line, runs the tests, and looks for duplicates "
        "before opening one",
    )


def _broken(changed: list[str], tree: Tree) -> Iterator[str]:
    for path in changed:
        if path.endswith(".py") and path in tree:
            try:
                ast.parse(tree.text(path) or "")
            except SyntaxError as exc:
                yield f"{path}: {exc}"


def neighbours(text: str, name: str) -> tuple[str, str] | None:
    """The names in the rows before and after a name's first row.

    Rows are dict entries or list items with a string first, and Markdown table rows.
    """
    row = re.compile(r'^(\s*)(?:"(\w+)"\s*[:,]|\|\s*`(\w+)`)')
    found = [m for line in text.splitlines() if (m := row.match(line))]
    depth = next((m[1] for m in found if name in (m[2], m[3])), None)
    names = [m[2] or m[3] for m in found if m[1] == depth]
    if name not in names:
        return None
    at = names.index(name)
    before = names[at - 1] if at else ""
    return before, names[at + 1] if at + 1 < len(names) else ""


def _in_order(found: tuple[str, str] | None, path: str, name: str) -> tuple[bool, str]:
    if found is None:
        return False, f"{path} has no row {name}"
    before, after = found
    right = before.lower() <= name.lower() and (
        not after or name.lower() <= after.lower()
    )
    return right, f"{path}: {before} < {name} < {after}"
