# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Each thing that upstream can do to a patch gets its own word."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset.rebase.results import RebaseReport
from support.rebases import Run
from support.synthetic_vllm import PATCHES, Synthetic, git, replace_lines

REGISTER = "model-register-flint"
CORE = "core-read-the-config-of-flint"
DOC = "doc-say-that-flint-is-tested"


@pytest.fixture
def upstream(synthetic: Synthetic) -> Path:
    return synthetic.source("upstream")


def statuses(report: RebaseReport) -> dict[str, str]:
    return {patch.name: patch.status for patch in report.patches}


def result_of(report: RebaseReport, path: str) -> str:
    return git(Path(report.store), "show", f"{report.branch}:{path}")


def test_unchanged_upstream(run: Run, upstream: Path) -> None:
    report = run(upstream)
    assert statuses(report) == {REGISTER: "clean", CORE: "clean", DOC: "clean"}
    assert report.exit_code == 0
    assert report.drift == []
    assert "flint = 'Flint'" in result_of(report, "vllm/registry.py")
    assert "class Flint" in result_of(report, "vllm/models/flint/model.py")


def test_lines_above_move_it(run: Run, upstream: Path) -> None:
    replace_lines(upstream / "vllm/registry.py", {"entry = 2": "entry = 2\nnew = 1"})
    report = run(upstream)
    assert statuses(report)[REGISTER] == "clean-with-offset"
    assert "moves +1 lines" in report.patches[0].files[1].detail


def test_lines_beside_it_change(run: Run, upstream: Path) -> None:
    replace_lines(upstream / "vllm/registry.py", {"entry = 8": "entry = 'eight'"})
    report = run(upstream)
    assert statuses(report)[REGISTER] == "clean-with-offset"
    text = result_of(report, "vllm/registry.py")
    assert "entry = 'eight'\nentry = 9\nentry = 10\nflint = 'Flint'\n" in text


def test_upstreamed_patch(run: Run, upstream: Path) -> None:
    for path, edits in PATCHES[1][2].items():
        replace_lines(upstream / path, edits)
    report = run(upstream)
    assert statuses(report) == {
        REGISTER: "clean",
        CORE: "already-upstream",
        DOC: "clean",
    }
    assert report.patches[1].commit == ""
    assert report.exit_code == 0


def test_hand_made_conflict(run: Run, upstream: Path) -> None:
    replace_lines(upstream / "vllm/config.py", {"option = 40": "option = 'forty-one'"})
    report = run(upstream)
    assert statuses(report) == {REGISTER: "clean", CORE: "conflict", DOC: "clean"}
    assert report.exit_code == 1
    (trouble,) = report.patches[1].troubles
    assert (trouble.path, trouble.cause and trouble.cause.fate) == (
        "vllm/config.py",
        "changed",
    )
    assert trouble.cause is not None
    assert "option = 'forty-one'" in trouble.cause.now
    assert "option = 40" in trouble.expected
    # Neither of a conflicting patch's files is changed.
    assert "sixty" not in result_of(report, "vllm/registry.py")


def test_code_rewritten_in_its_place(run: Run, upstream: Path) -> None:
    """Joined into one line with other numbers: few lines are the same, names are."""
    path = upstream / "vllm/registry.py"
    text = path.read_text().replace("entry = 60\n", "entry, other = 60, 61\n")
    for number in (57, 58, 59, 61, 62, 63):
        text = text.replace(f"entry = {number}\n", "")
    path.write_text(text)
    cause = run(upstream).patches[1].troubles[0].cause
    assert cause is not None
    assert (cause.fate, cause.now) == ("changed", ("entry, other = 60, 61",))


def test_code_moved_to_another_file(run: Run, upstream: Path) -> None:
    path = upstream / "vllm/registry.py"
    lines = path.read_text().splitlines(keepends=True)
    (upstream / "vllm/rows.py").write_text("".join(lines[50:70]))
    path.write_text("".join(lines[:50] + ["other = 1\n"] * 20 + lines[70:]))
    report = run(upstream)
    assert statuses(report)[CORE] == "conflict"
    cause = report.patches[1].troubles[0].cause
    assert cause is not None
    assert (cause.fate, cause.where) == ("moved", "vllm/rows.py:7")


def test_code_vanished(run: Run, upstream: Path) -> None:
    path = upstream / "vllm/registry.py"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:50] + ["other = 1\n"] * 20 + lines[70:]))
    report = run(upstream)
    assert statuses(report)[CORE] == "conflict"
    cause = report.patches[1].troubles[0].cause
    assert cause is not None and cause.fate == "vanished"


def test_moved_file(run: Run, upstream: Path) -> None:
    (upstream / "vllm/config.py").rename(upstream / "vllm/settings.py")
    report = run(upstream)
    assert statuses(report)[CORE] == "target-gone"
    cause = report.patches[1].troubles[0].cause
    assert cause is not None
    assert (cause.fate, cause.where) == ("moved", "vllm/settings.py")
    assert "would fit there" in report.patches[1].files[0].detail
    assert report.exit_code == 1


def test_vanished_file(run: Run, upstream: Path) -> None:
    (upstream / "vllm/config.py").unlink()
    report = run(upstream)
    assert statuses(report)[CORE] == "target-gone"
    cause = report.patches[1].troubles[0].cause
    assert cause is not None and cause.fate == "vanished"


def test_upstream_has_its_own_row_elsewhere(run: Run, upstream: Path) -> None:
    """The text applies, and would leave two rows of one name."""
    path = upstream / "vllm/registry.py"
    replace_lines(path, {"entry = 70": "entry = 70\nflint = 'theirs'"})
    report = run(upstream)
    assert statuses(report)[REGISTER] == "superseded"
    assert report.patches[0].files[1].rows == ["flint"]
    text = result_of(report, "vllm/registry.py")
    assert "theirs" not in text and text.count("flint = ") == 1
    assert report.exit_code == 0


def test_upstream_has_files_of_its_own(run: Run, upstream: Path) -> None:
    """Ours win, file by file, and none of upstream's stays in our folder."""
    folder = upstream / "vllm/models/flint"
    folder.mkdir()
    (folder / "model.py").write_text("class Theirs: ...\n")
    (folder / "moe.py").write_text("class Moe: ...\n")
    (folder / "__init__.py").write_text("")
    (upstream / "vllm/user.py").write_text("from vllm.models.flint.moe import Moe\n")
    report = run(upstream)
    assert {item.path: item.outcome for item in report.superseded} == {
        "vllm/models/flint/__init__.py": "same",
        "vllm/models/flint/model.py": "replaced",
        "vllm/models/flint/moe.py": "removed",
    }
    assert "Theirs" not in result_of(report, "vllm/models/flint/model.py")
    listed = git(Path(report.store), "ls-tree", "-r", "--name-only", report.branch)
    assert "vllm/models/flint/moe.py" not in listed.splitlines()
    # And who still wants what is gone is named.
    assert [(d.kind, d.path, d.name) for d in report.drift] == [
        ("user", "vllm/user.py", "vllm.models.flint.moe.Moe")
    ]
