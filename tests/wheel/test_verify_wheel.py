# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Verifying a wheel: right ones pass, and no changed byte does."""

import shutil
import zipfile
from pathlib import Path

import pytest
from lab import HOOK_AFTER, INFO, OVERLAY, Lab

from patchset.errors import PatchsetError
from patchset.wheel import repack
from patchset.wheel_verify import verify_wheel


def verdict(wheel: Path, lab: Lab) -> int:
    """Return the exit code of `verify`."""
    try:
        return verify_wheel(wheel, lab.repo).exit_code
    except PatchsetError as error:
        return error.exit_code


def test_the_patched_wheel_passes(lab: Lab, patched: Path):
    report = verify_wheel(patched, lab.repo)
    assert (report.exit_code, report.state, report.notes) == (0, "patched", [])
    assert report.trees["package"].equal
    assert report.identity["release"] == "0.32.0+flint.1"


def test_a_wheel_with_another_clock_passes_too(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    dated = repack(lab.wheel, tmp_path, lab.repo).path
    assert verdict(dated, lab) == 0


def test_the_official_wheel_is_named_and_does_not_pass(lab: Lab):
    report = verify_wheel(lab.wheel, lab.repo)
    assert (report.exit_code, report.state) == (1, "pristine")
    assert "official wheel cpu-x86_64" in report.summary


def test_a_foreign_wheel_is_named_and_does_not_pass(lab: Lab, tmp_path: Path):
    foreign = tmp_path / lab.wheel.name
    shutil.copy(lab.wheel, foreign)
    with zipfile.ZipFile(foreign, "a") as archive:
        archive.writestr("vllm/extra.py", "x = 1\n")
    report = verify_wheel(foreign, lab.repo)
    assert (report.exit_code, report.state) == (1, "foreign")


def test_no_byte_can_change_unnoticed(lab: Lab, patched: Path, tmp_path: Path):
    """Every third byte of the file, each with another bit changed."""
    good = patched.read_bytes()
    bad = tmp_path / patched.name
    repo = lab.repo
    passed = []
    for place in range(0, len(good), 3):
        data = bytearray(good)
        data[place] ^= 1 << (place // 3 % 8)
        bad.write_bytes(data)
        try:
            if verify_wheel(bad, repo).exit_code == 0:
                passed.append(place)
        except PatchsetError:
            pass
    assert passed == []


def test_padding_bits_of_a_compressed_member_cannot_change(
    lab: Lab, patched: Path, tmp_path: Path
):
    """The last bits of a deflate stream may be anything: RECORD cannot see them."""
    with zipfile.ZipFile(patched) as archive:
        info = archive.getinfo("vllm/native.abi3.so")
    end = info.header_offset + 30 + len(info.filename) + info.compress_size
    undetected_by_record = 0
    for bit in range(8):
        data = bytearray(patched.read_bytes())
        data[end - 1] ^= 1 << bit
        bad = tmp_path / patched.name
        bad.write_bytes(data)
        with zipfile.ZipFile(bad) as archive:
            undetected_by_record += archive.testzip() is None
        assert verdict(bad, lab) == 1
    assert undetected_by_record > 0, "no padding bits here: this proves nothing"


@pytest.mark.parametrize("tail", [b"\0", b"PK\x05\x06" + bytes(18)])
def test_bytes_after_the_end_do_not_pass(lab: Lab, patched: Path, tail: bytes):
    patched.write_bytes(patched.read_bytes() + tail)
    assert verdict(patched, lab) != 0


@pytest.mark.parametrize("size", [0, 10, 1000, -1])
def test_a_truncated_wheel_does_not_pass(lab: Lab, patched: Path, size: int):
    patched.write_bytes(patched.read_bytes()[:size])
    assert verdict(patched, lab) != 0


def repackaged(wheel: Path, out: Path, changes: dict[str, bytes | None]) -> Path:
    """Return a copy with other members, written by zipfile."""
    target = out / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = changes.get(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name in changes.keys() - set(old.namelist()):
            new.writestr(name, changes[name] or b"")
    return target


def test_says_which_member_is_wrong(lab: Lab, patched: Path, tmp_path: Path):
    changes: dict[str, bytes | None] = {"vllm/native.abi3.so": b"evil"}
    notes = verify_wheel(repackaged(patched, tmp_path, changes), lab.repo).notes
    assert "vllm/native.abi3.so is not as RECORD says" in notes


def test_says_which_member_is_missing_or_added(lab: Lab, patched: Path, tmp_path: Path):
    changes = {"vllm/native.abi3.so": None, "vllm/extra.so": b"x"}
    notes = verify_wheel(repackaged(patched, tmp_path, changes), lab.repo).notes
    assert "vllm/native.abi3.so is in RECORD only" in notes
    assert "RECORD lacks vllm/extra.so" in notes


def test_says_which_file_the_series_made_otherwise(lab: Lab, tmp_path: Path):
    """A wheel of another patch set is sound in itself, and still not this one."""
    overlay = lab.root / "vllm_overlay" / OVERLAY
    ours = overlay.read_bytes()
    overlay.write_bytes(b"'''Another.'''\n")
    other = repack(lab.wheel, tmp_path, lab.repo, check_identity=False).path
    overlay.write_bytes(ours)
    report = verify_wheel(other, lab.repo)
    assert report.exit_code == 1
    assert not report.trees["package"].equal
    assert f"{OVERLAY} is not as this patch set makes it" in report.notes
    assert any("series_sha256" in note for note in report.notes)


def test_says_when_the_version_is_wrong(lab: Lab, patched: Path):
    renamed = patched.with_name(patched.name.replace("flint.1", "flint.2"))
    patched.rename(renamed)
    notes = verify_wheel(renamed, lab.repo).notes
    assert any(
        note.startswith("the file name is vllm-0.32.0+flint.2") for note in notes
    )


def test_a_wheel_without_its_origin_does_not_pass(
    lab: Lab, patched: Path, tmp_path: Path
):
    bare = repackaged(patched, tmp_path, {f"{INFO}/REPACK.json": None})
    assert f"{INFO}/REPACK.json is missing" in verify_wheel(bare, lab.repo).notes


def test_a_file_that_is_no_wheel_is_one_clear_error(lab: Lab, tmp_path: Path):
    path = tmp_path / lab.wheel.name
    path.write_text("hello\n")
    with pytest.raises(PatchsetError, match="damaged"):
        verify_wheel(path, lab.repo)


def test_the_series_in_this_test_does_something(lab: Lab, patched: Path):
    with zipfile.ZipFile(patched) as archive:
        assert archive.read("vllm/hook.py") == HOOK_AFTER
