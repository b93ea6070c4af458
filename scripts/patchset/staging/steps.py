# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Reads the steps in which the patch set goes upstream."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from patchset.diff import FileDiff, parse_diff
from patchset.errors import PatchsetError
from patchset.gittree import Globs
from patchset.repo import Repo

FOLDER = "staging"
STEPS_NAME = f"{FOLDER}/steps.toml"


@dataclass(frozen=True)
class Step:
    """One commit and pull request; see the comments in staging/steps.toml."""

    name: str
    subject: str
    body: str
    patches: tuple[str, ...]
    overlay: tuple[str, ...]
    tests: tuple[str, ...]
    rows: dict[str, str] = field(default_factory=dict)

    def brings(self, path: str) -> bool:
        """Whether an overlay file goes with this step."""
        return path in Globs(self.overlay)


@dataclass(frozen=True)
class Plan:
    """All steps, and what none of them takes along: files, and lines by file."""

    steps: tuple[Step, ...]
    assisted_by: str
    leave_out: frozenset[str]
    drop: dict[str, tuple[str, ...]]


def load_steps(repo: Repo) -> Plan:
    """Read and check the steps.

    Raises:
        PatchsetError: a step is malformed, or a patch or overlay file is in none.
    """
    path = repo.root / STEPS_NAME
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        steps = tuple(
            Step(
                row["name"],
                row["subject"],
                row["body"].strip(),
                tuple(row["patches"]),
                tuple(row["overlay"]),
                tuple(row["tests"]),
                row.get("rows", {}),
            )
            for row in raw["step"]
        )
        plan = Plan(
            steps,
            raw["assisted-by"],
            frozenset(raw["leave-out"]),
            {name: tuple(lines) for name, lines in raw["drop"].items()},
        )
    except OSError as exc:
        raise PatchsetError(f"cannot read {path}: {exc.strerror}") from None
    except ValueError as exc:
        raise PatchsetError(f"{path} is not valid TOML: {exc}") from None
    except (KeyError, TypeError) as exc:
        raise PatchsetError(f"{path} lacks or misstates {exc}") from None
    _check(plan, repo, path)
    return plan


def _check(plan: Plan, repo: Repo, path: Path) -> None:
    named = [name for step in plan.steps for name in step.patches]
    known = [patch.name for patch in repo.series]
    if wrong := sorted(set(named) ^ set(known)) or sorted(
        {name for name in named if named.count(name) > 1}
    ):
        raise PatchsetError(
            f"{path}: every patch belongs to one step; see {', '.join(wrong)}"
        )
    for file in repo.overlay:
        if file.path in plan.leave_out:
            continue
        last = [step for step in plan.steps if step.brings(file.path)][-1:]
        if not last:
            raise PatchsetError(
                f"{path}: no step brings {file.path}; name it in one, or in leave-out"
            )
        if any(diff.path == file.path for diff in edits_of(repo, last[0])):
            raise PatchsetError(
                f"{path}: {last[0].name} edits {file.path}, and no later step brings "
                "it as it is"
            )


def edits_of(repo: Repo, step: Step) -> tuple[FileDiff, ...]:
    """A step's changes that only a pull request needs.

    They are to files of the upstream, and to overlay files, parts of which come with
    a later step.
    """
    folder = repo.root / FOLDER / "edits" / step.name
    return tuple(
        diff
        for path in sorted(folder.glob("*.patch"))
        for diff in parse_diff(path.read_bytes(), str(path))
    )


def files_of(repo: Repo, step: Step) -> dict[str, bytes]:
    """A step's own new files, tests for the most part, by their place."""
    folder = repo.root / FOLDER / "files" / step.name
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
