# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Each rule of the linter catches what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset.apply import apply_tree
from patchset.errors import PatchsetError
from patchset.gitio import export_series, import_series, refresh
from patchset.lint import lint
from patchset.unapply import unapply_tree
from support.synthetic_vllm import Synthetic, commit_edits, git, snapshot, write_files

NAME = "model-register-flint.patch"


def faults(synthetic: Synthetic) -> str:
    report = lint(synthetic.repo, synthetic.archive)
    wrong = [item for item in report.items if item.status == "wrong"]
    assert bool(wrong) == (report.exit_code == 1)
    return "\n".join(f"{item.name}: {item.detail}" for item in wrong)


def change_patch(synthetic: Synthetic, old: str, new: str) -> None:
    path = synthetic.root / "patches" / NAME
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_clean(synthetic: Synthetic) -> None:
    report = lint(synthetic.repo, synthetic.archive)
    assert report.exit_code == 0, report.text()
    assert report.summary == "lint: 3 patches and 4 files are right"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("From 0000", "From 1234", "commit must be zeroed"),
        ("Date: ", "Day: ", "one line 'Date: ...'"),
        ("From: ", "To: ", "one line 'From: ...'"),
        ("[PATCH] ", "", "one line 'Subject: [PATCH] ...'"),
        ("[PATCH] [Model]", "[PATCH] Model:", "the subject must read"),
        ("Register Flint\n", "Register Flint.\n", "the subject must read"),
        ("Register Flint\n", "register Flint\n", "the subject must read"),
        ("Register Flint\n", "Register Granite\n", "model-register-granite.patch"),
        ("The overlay cannot", "We cannot", "why this cannot live in the overlay"),
        ("that vLLM has.\n", "that vLLM has.\n---\n", "no --- line"),
        ("Forwarded: no\n", "", "no trailer Forwarded"),
        ("Forwarded: no\n", "Forwarded: maybe\n", "Forwarded: 'maybe'"),
        ("Forwarded: no\n", "Forwarded: no\nForwarded: no\n", "two trailers Forwarded"),
        ("Removal: when vLLM has Flint itself\n", "", "no trailer Removal"),
        ("Removal: when vLLM has Flint itself\n", "Removal: no\n", "Removal: 'no'"),
        ("Required: yes\n", "", "no trailer Required"),
        ("Required: yes\n", "Required: perhaps\n", "Required: 'perhaps'"),
        ("Signed-off-by: A Person <person@example.org>\n", "", "no trailer Signed-off"),
        ("<person@example.org>\n\n", "person@example.org\n\n", "Signed-off-by: "),
        ("100644\n", "100755\n", "changes the mode|does not apply"),
    ],
)
def test_patch_rules(synthetic: Synthetic, old: str, new: str, fault: str) -> None:
    change_patch(synthetic, old, new)
    found = faults(synthetic)
    assert any(part in found for part in fault.split("|")), found
    assert "identity is stale" in found or "does not apply" in found


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("csrc/kernel.cu", "native code"),
        ("setup.py", "native code"),
        ("vllm/platforms/__init__.py", "the CPU wheel has its own version"),
    ],
)
def test_files_a_patch_may_not_touch(
    synthetic: Synthetic, path: str, fault: str
) -> None:
    diff = (
        f"diff --git a/{path} b/{path}\nindex {'1' * 40}..{'2' * 40} 100644\n"
        f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n"
    )
    text = (synthetic.root / "patches" / NAME).read_text()
    head = text.partition("diff --git")[0]
    (synthetic.root / "patches" / NAME).write_text(head + diff)
    assert fault in faults(synthetic)
    (synthetic.root / "patches" / NAME).write_text(
        head.replace("Required: yes\n", "Required: yes\nNative: yes\n") + diff
    )
    assert "native code" not in faults(synthetic)


@pytest.mark.parametrize(
    ("mode", "side", "fault"),
    [
        ("new file", "+", "new files go to"),
        ("deleted file", "-", "supersedes does not"),
    ],
)
def test_new_and_deleted_files(
    synthetic: Synthetic, mode: str, side: str, fault: str
) -> None:
    made = side == "+"
    old, new = ("/dev/null", "b/vllm/x.py") if made else ("a/vllm/x.py", "/dev/null")
    ids = ("0" * 40, "1" * 40) if made else ("1" * 40, "0" * 40)
    text = (synthetic.root / "patches" / NAME).read_text()
    (synthetic.root / "patches" / NAME).write_text(
        text
        + f"diff --git a/vllm/x.py b/vllm/x.py\n{mode} mode 100644\n"
        + f"index {ids[0]}..{ids[1]}\n--- {old}\n+++ {new}\n"
        + f"@@ -{int(not made)},{int(not made)} +{int(made)},{int(made)} @@\n{side}x\n"
    )
    assert fault in faults(synthetic)


def test_required_patch_needs_a_check(synthetic: Synthetic) -> None:
    checks = synthetic.root / "vllm_overlay/vllm/models/flint/patchset.py"
    checks.write_text(
        "CHECKS = {'model-register-flint': None, 'no-such-patch': None}\n"
    )
    found = faults(synthetic)
    assert "core-read-the-config-of-flint: Required: yes, but" in found
    assert "checks no-such-patch, which is no patch" in found
    checks.write_text("CHECKS = {**OTHER}\nCHECKS = dict()\n")
    assert "model-register-flint: Required: yes, but" in faults(synthetic)
    checks.write_text("OTHER = {}\n")
    with pytest.raises(PatchsetError, match="no dict literal CHECKS"):
        lint(synthetic.repo, synthetic.archive)
    checks.write_text("CHECKS = {\n")
    with pytest.raises(PatchsetError, match="never closed"):
        lint(synthetic.repo, synthetic.archive)


def test_overlay_rules(synthetic: Synthetic) -> None:
    overlay = synthetic.root / "vllm_overlay"
    write_files(overlay, {"vllm/config.py": "", "vllm/native.so": ""})
    found = faults(synthetic)
    assert "vllm/native.so: the pin calls this a generated file" in found
    assert "vllm/config.py: the base has this file" in found
    assert "left in place by a patch" in found


def test_series_that_needs_an_offset(synthetic: Synthetic) -> None:
    change_patch(synthetic, "@@ -8,6 +8,7 @@", "@@ -3,6 +3,7 @@")
    assert "only with an offset" in faults(synthetic)


def test_stale_identity(synthetic: Synthetic) -> None:
    write_files(synthetic.root / "vllm_overlay", {"docs/flint.md": "new\n"})
    assert "identity is stale" in faults(synthetic)


def test_superseding_an_upstream_file(synthetic: Synthetic, tmp_path: Path) -> None:
    """A patch deletes it, the overlay has it, the pin names it: then it is right."""
    checkout = tmp_path / "checkout"
    import_series(checkout, synthetic.repo, synthetic.archive)
    git(checkout, "rm", "--quiet", "vllm/models/__init__.py")
    commit_edits(checkout, "[Model] Drop the models of the base", "no", {})
    export_series(checkout, synthetic.repo)
    write_files(synthetic.root / "vllm_overlay", {"vllm/models/__init__.py": "ours\n"})
    refresh(synthetic.repo, synthetic.archive)
    assert "supersedes does not name" in faults(synthetic)
    pin = synthetic.root / "pin.toml"
    named = 'supersedes = ["vllm/models/__init__.py"]'
    pin.write_text(pin.read_text().replace("supersedes = []", named))
    assert faults(synthetic) == ""
    root = synthetic.source()
    before = snapshot(root)
    assert apply_tree(root, synthetic.repo).exit_code == 0
    assert (root / "vllm/models/__init__.py").read_text() == "ours\n"
    assert unapply_tree(root, synthetic.repo).exit_code == 0
    assert snapshot(root) == before
    pin.write_text(pin.read_text().replace(named, 'supersedes = ["vllm/config.py"]'))
    assert "supersedes vllm/config.py, but no patch deletes it" in faults(synthetic)
