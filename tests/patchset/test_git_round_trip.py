# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The series as commits and back: the same bytes, whoever's git it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset.errors import ConflictError, PatchsetError
from patchset.gitio import export_series, import_series, refresh
from patchset.lint import lint
from patchset.series import filename_for, load_series, parse_patch
from support.synthetic_vllm import Synthetic, commit_edits, git, replace_lines, snapshot


def test_round_trip_is_byte_equal(synthetic: Synthetic, tmp_path: Path) -> None:
    before = snapshot(synthetic.root)
    checkout = tmp_path / "checkout"
    made = import_series(checkout, synthetic.repo, synthetic.archive)
    assert [item.status for item in made.items] == ["committed"] * 3
    (synthetic.root / "patches/model-register-flint.patch").unlink()
    (synthetic.root / "patches/series").write_text("# The order of the patches.\n")
    (synthetic.root / "patches/core-read-the-config-of-flint.patch").write_bytes(b"")
    (synthetic.root / "patches/doc-say-that-flint-is-tested.patch").unlink()
    (synthetic.root / "patches/core-read-the-config-of-flint.patch").unlink()
    report = export_series(checkout, synthetic.repo)
    assert [item.status for item in report.items] == ["new"] * 3 + ["rewritten"]
    assert snapshot(synthetic.root) == before
    again = export_series(checkout, synthetic.repo)
    assert {item.status for item in again.items} == {"unchanged"}


def test_untouched_files_do_not_matter(synthetic: Synthetic, tmp_path: Path) -> None:
    before = snapshot(synthetic.root)
    checkout = tmp_path / "checkout"
    import_series(checkout, synthetic.repo, synthetic.archive, touched_only=True)
    assert not (checkout / "setup.py").exists()
    export_series(checkout, synthetic.repo)
    assert snapshot(synthetic.root) == before


def test_import_is_reproducible(synthetic: Synthetic, tmp_path: Path) -> None:
    heads = []
    for name in ("one", "two"):
        import_series(tmp_path / name, synthetic.repo, synthetic.archive)
        heads.append(git(tmp_path / name, "rev-parse", "HEAD"))
    assert heads[0] == heads[1]


def test_user_configuration_does_not_matter(
    synthetic: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(synthetic.root)
    config = tmp_path / "gitconfig"
    config.write_text(
        "[diff]\n noprefix = true\n context = 9\n algorithm = patience\n"
        " renames = copy\n interHunkContext = 5\n mnemonicPrefix = true\n"
        " suppressBlankEmpty = true\n"
        "[format]\n signature = mine\n numbered = true\n subjectPrefix = MINE\n"
        ' headers = "X-Mine: 1\\n"\n attach = true\n signOff = true\n from = Me <m@e>\n'
        " notes = true\n useAutoBase = true\n thread = true\n coverLetter = true\n"
        "[core]\n autocrlf = true\n abbrev = 5\n hooksPath = /nowhere\n"
        "[commit]\n gpgSign = true\n"
        "[color]\n ui = always\n"
        "[am]\n threeWay = true\n keepcr = false\n"
        "[user]\n name = Me\n email = m@e\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    refresh(synthetic.repo, synthetic.archive)
    assert snapshot(synthetic.root) == before


def test_refresh_mends_a_hand_made_patch(synthetic: Synthetic) -> None:
    """Wrong ids, shifted hunks and another name: what git apply takes, is mended."""
    before = snapshot(synthetic.root)
    patches = synthetic.root / "patches"
    text = (patches / "model-register-flint.patch").read_text()
    lines = text.splitlines(keepends=True)
    index = next(n for n, line in enumerate(lines) if line.startswith("index "))
    lines[index] = f"index {'1' * 40}..{'2' * 40} 100644\n"
    (patches / "model-register-flint.patch").unlink()
    text = "".join(lines)
    assert "@@ -8,6 +8,7 @@" in text
    (patches / "mine.patch").write_text(text.replace("@@ -8,6 +8,7", "@@ -3,6 +3,7"))
    series = (patches / "series").read_text()
    (patches / "series").write_text(series.replace("model-register-flint", "mine"))
    report = refresh(synthetic.repo, synthetic.archive)
    assert {item.name: item.status for item in report.items} == {
        "patches/model-register-flint.patch": "new",
        "patches/core-read-the-config-of-flint.patch": "unchanged",
        "patches/doc-say-that-flint-is-tested.patch": "unchanged",
        "patches/series": "rewritten",
        "patches/mine.patch": "removed",
    }
    assert snapshot(synthetic.root) == before


def test_refresh_renews_the_identity(synthetic: Synthetic) -> None:
    model = synthetic.root / "vllm_overlay/vllm/models/flint/model.py"
    model.write_text("class Flint: pass\n")
    old = synthetic.repo
    assert "is new" in refresh(old, synthetic.archive).summary
    new = synthetic.repo
    assert new.pin.series_sha256 == new.series_sha256 != old.pin.series_sha256
    assert new.pin.identity != old.pin.identity
    assert new.pin.pristine == old.pin.pristine
    assert "was right" in refresh(new, synthetic.archive).summary
    assert lint(new, synthetic.archive).exit_code == 0


def test_import_of_a_conflict_leaves_nothing(
    synthetic: Synthetic, tmp_path: Path
) -> None:
    path = synthetic.root / "patches/model-register-flint.patch"
    path.write_text(path.read_text().replace(" entry = 9\n", " entry = nine\n"))
    with pytest.raises(
        ConflictError, match="model-register-flint.patch does not apply"
    ):
        import_series(tmp_path / "checkout", synthetic.repo, synthetic.archive)
    assert list(tmp_path.glob("*checkout*")) == []


def test_import_needs_a_new_folder(synthetic: Synthetic) -> None:
    root = synthetic.source()
    with pytest.raises(PatchsetError, match="exists already"):
        import_series(root, synthetic.repo, synthetic.archive)
    assert (root / "setup.py").exists()


@pytest.fixture
def imported(synthetic: Synthetic, tmp_path: Path) -> Path:
    import_series(tmp_path / "checkout", synthetic.repo, synthetic.archive)
    return tmp_path / "checkout"


def test_export_of_a_new_commit(synthetic: Synthetic, imported: Path) -> None:
    edits = {"vllm/config.py": {"option = 20": "option = 'twenty'"}}
    commit_edits(imported, "[Core] Add one more option, and say so", "no", edits)
    report = export_series(imported, synthetic.repo)
    assert [item.status for item in report.items[-2:]] == ["new", "rewritten"]
    last = load_series(synthetic.root)[-1]
    assert last.name == "core-add-one-more-option-and-say-so"
    assert last.trailer("Required") == "no"
    refresh(synthetic.repo, synthetic.archive)
    assert lint(synthetic.repo, synthetic.archive).exit_code == 0


def test_export_refuses(synthetic: Synthetic, imported: Path, tmp_path: Path) -> None:
    before = snapshot(synthetic.root)

    def refused(why: str, **how: str) -> None:
        with pytest.raises(PatchsetError, match=why):
            export_series(imported, synthetic.repo, **how)
        assert snapshot(synthetic.root) == before

    replace_lines(imported / "vllm/config.py", {"option = 20": "option = 21"})
    refused("not committed")
    git(imported, "checkout", "--quiet", ".")
    (imported / "vllm/models/flint/model.py").write_text("changed\n")
    git(imported, "commit", "--quiet", "--all", "-m", "[Core] Change the overlay")
    refused("changes overlay files")
    git(imported, "reset", "--quiet", "--hard", "HEAD^")
    edits = {"vllm/config.py": {"option = 20": "option = 21"}}
    commit_edits(imported, "[Model] Register Flint", "no", edits)
    refused("two commits would be called model-register-flint.patch")
    git(imported, "reset", "--quiet", "--hard", "HEAD^")
    git(imported, "commit", "--quiet", "--allow-empty", "-m", "[Core] Nothing")
    refused("a merge or empty")
    git(imported, "reset", "--quiet", "--hard", "HEAD^")
    git(imported, "tag", "--delete", "patchset-base")
    refused("--onto")
    with pytest.raises(PatchsetError, match="no git checkout"):
        export_series(tmp_path, synthetic.repo)


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("[Kernel] Add it", "kernel-add-it.patch"),
        (
            "[Model][Quantization] Überall NVFP4!",
            "model-quantization-berall-nvfp4.patch",
        ),
        (
            "[Core] " + "word " * 20,
            "core-word-word-word-word-word-word-word-word-word-word-word.patch",
        ),
    ],
)
def test_file_names(subject: str, name: str) -> None:
    assert filename_for(subject) == name


def test_folded_and_encoded_headers(synthetic: Synthetic, imported: Path) -> None:
    subject = (
        "[Core] Read the option that everybody else has forgotten for änother year"
    )
    edits = {"vllm/config.py": {"option = 20": "option = 'zwölf'"}}
    git(imported, "config", "user.name", "ignored")
    commit_edits(imported, subject, "no", edits)
    export_series(imported, synthetic.repo)
    last = load_series(synthetic.root)[-1]
    assert last.subject == subject
    assert parse_patch(last.filename, last.data) == last
    refresh(synthetic.repo, synthetic.archive)
    assert load_series(synthetic.root)[-1].data == last.data
