# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line: exit codes, JSON, one-line errors, and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchset.cli import main
from support.synthetic_vllm import ROOT, Synthetic, replace_lines, snapshot

COMMAND = (sys.executable, str(ROOT / "scripts/patchset"))


def run(synthetic: Synthetic, *args: object, code: int = 0, **how: object) -> str:
    done = subprocess.run(
        [*COMMAND, *map(str, args), "--repo", str(synthetic.root)],
        capture_output=True,
        text=True,
        check=False,
        **how,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout or done.stderr


def test_exit_codes(synthetic: Synthetic) -> None:
    root = synthetic.source()
    assert "applied 3 patches and 4 new files" in run(synthetic, "apply", root)
    assert "already applied" in run(synthetic, "apply", root)
    assert "verified" in run(synthetic, "verify", root)
    (root / "setup.py").write_text("edited\n")
    assert "differs: setup.py" in run(synthetic, "apply", root, code=3)
    assert "not the pinned" in run(synthetic, "verify", root, code=1)
    conflicting = synthetic.source("conflicting")
    replace_lines(conflicting / "vllm/registry.py", {"entry = 60": "entry = 61"})
    text = run(synthetic, "apply", conflicting, code=1)
    assert "conflict     patch core-read-the-config-of-flint" in text
    assert "would-apply  patch doc-say-that-flint-is-tested" in text
    assert "        | entry = 61" in text
    old = synthetic.source("old")
    (old / "PKG-INFO").write_text("Version: 0.31.0\n")
    error = run(synthetic, "apply", old, code=2)
    assert error == (
        f"patchset apply: wrong base: {old} is vLLM 0.31.0, and this patch set is for "
        "0.32.0\n"
    )
    run(synthetic, "apply", code=2)
    run(synthetic, "no-such-command", root, code=2)


def test_edited_after_apply(synthetic: Synthetic) -> None:
    root = synthetic.source()
    run(synthetic, "apply", root)
    (root / "vllm/registry.py").write_text("edited\n")
    error = run(synthetic, "unapply", root, code=3)
    assert len(error.splitlines()) == 1
    assert "vllm/registry.py" in error


def test_json(synthetic: Synthetic) -> None:
    root = synthetic.source()
    report = json.loads(run(synthetic, "apply", root, "--json"))
    assert report["exit_code"] == 0
    assert report["state"] == "patched"
    assert report["trees"]["package"]["equal"] is True
    assert [item["status"] for item in report["items"]] == ["applied"] * 7
    (root / "PKG-INFO").write_text("Version: 0.31.0\n")
    report = json.loads(run(synthetic, "status", root, "--json", code=2))
    assert report["exit_code"] == 2
    assert "wrong base" in report["summary"]


def test_runs_as_a_module(synthetic: Synthetic) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "patchset", "status", synthetic.source()]
        + ["--repo", synthetic.root],
        env={"PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pristine" in done.stdout


@pytest.mark.parametrize("kind", ["source", "package"])
def test_core_needs_only_the_standard_library(synthetic: Synthetic, kind: str) -> None:
    """No installed package, no git, no network: as on an offline GPU machine."""
    root = getattr(synthetic, kind)()
    before = snapshot(root)
    bare = ("-I", "-S", str(ROOT / "scripts/patchset"))
    for command in ("status", "apply", "verify", "unapply"):
        done = subprocess.run(
            [sys.executable, *bare, command, str(root), "--repo", str(synthetic.root)],
            env={"PATH": "/nonexistent"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    after = snapshot(root)
    assert after == {path: before[path] for path in after}


def test_checkout_without_git_says_so(synthetic: Synthetic) -> None:
    root = synthetic.checkout()
    error = run(synthetic, "status", root, code=2, env={"PATH": "/nonexistent"})
    assert "needs git" in error


def test_broken_pipe(synthetic: Synthetic) -> None:
    done = subprocess.run(
        f"'{sys.executable}' '{ROOT}/scripts/patchset' status '{synthetic.source()}' "
        f"--repo '{synthetic.root}' | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_fetch_lint_and_tree(
    synthetic: Synthetic, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    where = ["--repo", str(synthetic.root)]
    assert main(["fetch", "source", *where]) == 0
    assert "as pinned" in capsys.readouterr().out
    assert main(["fetch", "no-such-thing", *where]) == 2
    assert main(["fetch", "source", "--from", str(synthetic.archive), *where]) == 0
    assert main(["lint", *where]) == 0
    new = tmp_path / "new"
    assert main(["tree", str(new), *where]) == 0
    assert main(["verify", str(new), *where]) == 0
    assert main(["tree", str(new), *where]) == 2
    assert main(["lint", "--archive", str(new / "setup.py"), *where]) == 2
    assert main(["import", str(tmp_path / "git"), *where]) == 0
    assert main(["export", str(tmp_path / "git"), *where]) == 0
    assert main(["refresh", *where]) == 0


def test_tree_that_cannot_be_patched_does_not_stay(
    synthetic: Synthetic, tmp_path: Path
) -> None:
    (synthetic.root / "vllm_overlay/docs").mkdir()
    (synthetic.root / "vllm_overlay/docs/new.md").write_text("identity is stale now\n")
    where = ["--repo", str(synthetic.root)]
    assert main(["tree", str(tmp_path / "new"), *where]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("pin.toml", "[base\n", "not valid TOML"),
        ("pin.toml", "[base]\n", "lacks the field"),
        ("patches/series", "missing.patch\n", "names missing.patch"),
        ("patches/series", "../pin.toml\n", "no patch file's name"),
        ("patches/series", "# nothing\n", "does not name"),
        ("patches/model-register-flint.patch", "hello\n", "not a commit"),
        ("vllm_overlay/vllm/models/flint/_patchset.json", "{}", "made by apply"),
    ],
)
def test_broken_repository(
    synthetic: Synthetic, name: str, text: str, why: str
) -> None:
    root = synthetic.source()
    (synthetic.root / name).write_text(text)
    error = run(synthetic, "status", root, code=2)
    assert why in error
    assert len(error.splitlines()) == 1


def test_series_named_twice(synthetic: Synthetic) -> None:
    series = synthetic.root / "patches/series"
    series.write_text(series.read_text() * 2)
    assert "names a patch twice" in run(synthetic, "lint", code=2)


def test_repository_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "scripts"
    copy.symlink_to(ROOT / "scripts")
    done = subprocess.run(
        [sys.executable, str(copy / "patchset"), "status", str(tmp_path)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "holds no vllm/ package" in done.stderr
