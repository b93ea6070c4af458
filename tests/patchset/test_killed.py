# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A command killed at any step leaves a tree that the next one repairs."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stopping import count_steps, run_killed

from patchset.apply import apply_tree, status_tree
from patchset.errors import DirtyTreeError
from patchset.report import Report
from patchset.unapply import unapply_tree
from patchset.verify import verify
from support.synthetic_vllm import Synthetic, folders, snapshot

STATE = (".flint-patchset",)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; only a dead machine does."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def contents(root: Path) -> dict:
    """Files and folders, without our own state and without bytecode."""
    files = {
        path: entry
        for path, entry in snapshot(root).items()
        if not path.startswith(STATE) and not path.endswith(".pyc")
    }
    return files | {path: None for path in folders(root) if not path.startswith(STATE)}


class Case:
    """A command on a tree, with the two whole states it goes between."""

    def __init__(self, synthetic: Synthetic, kind: str, command: Callable) -> None:
        self.repo = synthetic.repo
        self.command = command
        self.root = getattr(synthetic, kind)()
        self.origin = self.root.with_name("origin")
        pristine = contents(self.root)
        if command is unapply_tree:
            apply_tree(self.root, self.repo)
        shutil.copytree(self.root, self.origin)
        self.steps = count_steps(self.run)
        self.whole = {"pristine": pristine, "patched": contents(self.root)}
        if command is unapply_tree:
            self.whole = {"pristine": pristine, "patched": contents(self.origin)}

    def run(self) -> Report:
        return self.command(self.root, self.repo)

    def reset(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self.origin, self.root)


@pytest.fixture(
    params=[
        pytest.param(("package", apply_tree), id="apply-package"),
        pytest.param(("package", unapply_tree), id="unapply-package"),
        pytest.param(("source", apply_tree), id="apply-source"),
    ]
)
def case(synthetic: Synthetic, request: pytest.FixtureRequest) -> Case:
    return Case(synthetic, *request.param)


def test_killed_at_each_step(case: Case) -> None:
    halves, repaired = 0, 0
    following = itertools.cycle([status_tree, verify, apply_tree, unapply_tree])
    for step in range(case.steps):
        case.reset()
        assert run_killed(case.run, step)
        left = contents(case.root)
        halves += left not in case.whole.values()
        unfinished = (case.root / ".flint-patchset/txn").exists()
        command = next(following)
        report = command(case.root, case.repo)
        said = any("interrupted command" in note for note in report.notes)
        assert said == unfinished, f"step {step}: {report.notes}"
        repaired += said
        if command in (status_tree, verify):
            assert report.state in case.whole, f"step {step}: {report.text()}"
            assert contents(case.root) == case.whole[report.state], f"step {step}"
        elif command is apply_tree:
            assert report.exit_code == 0
            assert contents(case.root) == case.whole["patched"], f"step {step}"
        assert unapply_tree(case.root, case.repo).exit_code == 0
        assert contents(case.root) == case.whole["pristine"], f"step {step}"
        assert not (case.root / ".flint-patchset").exists()
    assert halves > 10, "no step left a half: this test tests nothing"
    assert repaired > halves


def test_repair_killed_at_each_step(case: Case) -> None:
    """Kill the command, then kill the repair, at every pair of a sample."""
    second = 0
    for step in range(0, case.steps, 7):
        for again in itertools.count(step % 3, 3):
            case.reset()
            assert run_killed(case.run, step)
            if not run_killed(lambda: status_tree(case.root, case.repo), again):
                break
            second += 1
            report = status_tree(case.root, case.repo)
            assert contents(case.root) == case.whole[report.state], (step, again)
            assert unapply_tree(case.root, case.repo).exit_code == 0
            assert contents(case.root) == case.whole["pristine"], (step, again)
    assert second > 30


def half_done(case: Case) -> None:
    """Kill the command where it leaves a half."""
    for step in range(case.steps // 2, case.steps):
        case.reset()
        run_killed(case.run, step)
        if contents(case.root) not in case.whole.values():
            return
    raise AssertionError("no half found")


def test_edit_after_a_kill_is_kept_and_named(case: Case) -> None:
    half_done(case)
    registry = case.root / "vllm/registry.py"
    registry.write_text("mine\n")
    before = snapshot(case.root)
    for command in (status_tree, verify, apply_tree, unapply_tree):
        with pytest.raises(DirtyTreeError, match="vllm/registry.py") as caught:
            command(case.root, case.repo)
        assert caught.value.exit_code == 3
        assert snapshot(case.root) == before


def test_checkout_is_repaired_too(synthetic: Synthetic) -> None:
    root, repo = synthetic.checkout(), synthetic.repo
    before = snapshot(root)
    assert run_killed(lambda: apply_tree(root, repo), 54)
    assert (root / ".git/flint-patchset/txn").is_dir()
    assert snapshot(root) != before
    report = status_tree(root, repo)
    assert report.state == "pristine"
    assert "rolled it back" in report.notes[0]
    assert snapshot(root) == before
    assert not (root / ".git/flint-patchset").exists()
