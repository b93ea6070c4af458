# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs that are repeated, killed, or follow a person's fix; and their reports."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from patchset import fsops
from patchset.cli import main
from patchset.rebase.work import Work
from support.rebases import Run
from support.synthetic_vllm import Synthetic, git, replace_lines

CORE = "core-read-the-config-of-flint"


@pytest.fixture
def conflicting(synthetic: Synthetic) -> Path:
    upstream = synthetic.source("upstream")
    replace_lines(upstream / "vllm/config.py", {"option = 40": "option = 'forty-one'"})
    return upstream


def command(synthetic: Synthetic, *words: str) -> int:
    return main(["rebase", "--repo", str(synthetic.root), *words])


def test_second_run_is_one_line(
    synthetic: Synthetic, conflicting: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = synthetic.home / "report"
    words = ("--onto", str(conflicting), "--report", str(folder))
    assert command(synthetic, *words) == 1
    first = capsys.readouterr().out
    assert f"| {CORE} | conflict |" in first
    assert (folder / "report.md").read_text().strip() == first.strip()
    data = json.loads((folder / "report.json").read_text())
    assert [patch["status"] for patch in data["patches"]].count("conflict") == 1
    assert command(synthetic, *words) == 0
    second = capsys.readouterr().out
    assert second.count("\n") == 1
    assert "nothing changed" in second
    again = json.loads((folder / "report.json").read_text())
    assert again["patches"] == data["patches"]
    # A changed upstream is reported in full again.
    replace_lines(conflicting / "vllm/registry.py", {"entry = 2": "entry = 'two'"})
    assert command(synthetic, *words) == 1
    assert capsys.readouterr().out.count("\n") > 10


def test_killed_run_resumes(
    run: Run, conflicting: Path, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(conflicting, work_folder=synthetic.home / "whole")
    save = Work.save

    def die(work: Work, key: str, patches: list, report: object = None) -> None:
        save(work, key, patches, report)  # type: ignore[arg-type]
        if len(patches) == 2:
            os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Work, "save", die)
        try:
            run(conflicting, work_folder=synthetic.home / "killed")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    resumed = run(conflicting, work_folder=synthetic.home / "killed")
    assert (whole.resumed, resumed.resumed) == (0, 2)

    def told(report: object) -> str:
        text = json.dumps([vars(patch) for patch in report.patches], default=vars)  # type: ignore[attr-defined]
        return text.replace("/killed/", "/whole/")

    assert told(resumed) == told(whole)
    assert (resumed.exit_code, resumed.summary) == (whole.exit_code, whole.summary)


@pytest.mark.parametrize("damage", ["state.json", "store.git"])
def test_damaged_working_folder_is_made_anew(
    run: Run, conflicting: Path, synthetic: Synthetic, damage: str
) -> None:
    first = run(conflicting, work_folder=synthetic.home / "work")
    place = Path(first.store).parent / damage
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.write_bytes(place.read_bytes()[:100])
    again = run(conflicting, work_folder=synthetic.home / "work")
    assert not again.unchanged
    assert again.summary == first.summary


def mend(store: Path, folder: Path, branch: str, text: str | None) -> None:
    git(store, "worktree", "add", "--quiet", str(folder), branch)
    path = folder / "vllm/config.py"
    assert "<<<<<<< upstream" in path.read_text()
    if text is not None:
        lines = path.read_text().splitlines(keepends=True)
        start = next(i for i, line in enumerate(lines) if line.startswith("<<<<<<<"))
        path.write_text("".join(lines[:start]) + text)
    git(folder, "commit", "--quiet", "--all", "--allow-empty", "-m", "Mend it")


def test_resumes_after_a_fix_by_hand(
    run: Run, conflicting: Path, synthetic: Synthetic
) -> None:
    report = run(conflicting)
    store = Path(report.store)
    branch = f"fix/{report.branch.removeprefix('rebase/')}/{CORE}"
    assert branch in report.patches[1].fix
    mend(store, synthetic.home / "fix", branch, "option = 'ours'\n")
    mended = run(conflicting)
    assert not mended.unchanged
    assert mended.exit_code == 0
    assert [patch.made for patch in mended.patches] == ["machine", "hand", "machine"]
    assert "option = 'ours'" in git(store, "show", f"{mended.branch}:vllm/config.py")
    people = git(store, "log", "-4", "--format=%cn: %s", mended.branch).splitlines()
    assert people[2] == "A Person: [Core] Read the config of Flint"
    assert people[1].startswith("Flint patch set rebase: ")
    # The fix goes along when upstream moves on.
    replace_lines(conflicting / "vllm/config.py", {"option = 2": "option = 'two'"})
    later = run(conflicting)
    text = git(store, "show", f"{later.branch}:vllm/config.py")
    assert "option = 'two'" in text and "option = 'ours'" in text


def test_fix_with_marks_left_is_refused(
    run: Run, conflicting: Path, synthetic: Synthetic
) -> None:
    report = run(conflicting)
    branch = f"fix/{report.branch.removeprefix('rebase/')}/{CORE}"
    mend(Path(report.store), synthetic.home / "fix", branch, None)
    again = run(conflicting)
    assert again.exit_code == 1
    assert again.patches[1].made == ""
    assert "vllm/config.py still holds conflict marks" in again.patches[1].detail


def test_full_disk_is_one_line(
    synthetic: Synthetic,
    conflicting: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(path: Path, *args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(fsops, "write_file", full)
    assert command(synthetic, "--onto", str(conflicting)) == 2
    assert "No space left on device; run it again to go on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--onto", "no-such-place"), "neither a vLLM version nor a folder"),
        (("--onto", "main", "--checkout", "/"), "is no git checkout"),
    ],
)
def test_wrong_use(
    synthetic: Synthetic,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    assert command(synthetic, *words) == 2
    assert message in capsys.readouterr().err
