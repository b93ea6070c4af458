# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Says what a wheel is, and whether it is the patched wheel that the pin expects.

Three layers, so that no byte of a patched wheel can change unnoticed: RECORD covers
every member's contents; REPACK.json covers the compressed bytes, of which several
may unpack to the same contents; and the archive must be exactly what the writer
makes of its members, which covers headers, order, gaps and RECORD itself.
"""

from __future__ import annotations

import calendar
import json
from email.parser import HeaderParser
from pathlib import Path
from typing import BinaryIO, cast

from patchset import plan
from patchset.download import file_sha256
from patchset.errors import EXIT_CONFLICT
from patchset.identity import package_tree
from patchset.overlay import MARKER_PATH
from patchset.pin import Pin
from patchset.repo import Repo
from patchset.report import Report, TreeCheck
from patchset.wheel import REPACK_FILE, member_order
from patchset.wheel_file import BrokenWheelError, WheelFile
from patchset.wheel_meta import VERSION_FILE, WheelName, load_edits, write_record
from patchset.wheel_progress import ByteBar
from patchset.wheel_zip import RawZipWriter, ZipFormatError

PATCHED = "patched"
PRISTINE = "pristine"
FOREIGN = "foreign"


def verify_wheel(path: Path, repo: Repo) -> Report:
    """Check a wheel against the pin.

    Returns:
        A report with exit code 0 if it is the patched wheel and whole, else 1 and
        a note for each thing that differs.

    Raises:
        PatchsetError: The file cannot be read as a wheel at all.
    """
    report = Report("verify", str(path), kind="wheel", exit_code=EXIT_CONFLICT)
    with WheelFile(path) as wheel:
        flavour = _flavour(wheel.name)
        report.identity["base"] = f"vllm {repo.pin.base.version}"
        report.identity["version"] = wheel.name.version
        entries = wheel.package_entries(repo.pin)
        tree = package_tree(entries, repo.pin)
        if MARKER_PATH not in wheel.members:
            _unpatched(report, tree, path, repo.pin)
            return report
        report.state = PATCHED
        expected = repo.pin.identity.for_package(flavour)
        report.trees["package"] = TreeCheck(tree, expected)
        report.notes += _names(wheel, flavour, repo)
        report.notes += _marker(wheel, tree, repo, report)
        if tree != expected:
            report.notes += _tree_differences(wheel, repo)
        report.notes += _contents(wheel)
        report.notes += _form(wheel)
    if report.notes:
        report.summary = f"{path.name} is NOT the pinned patched wheel"
    else:
        report.exit_code = 0
        report.summary = f"{path.name} is the pinned patched wheel, every byte of it"
    return report


def _flavour(name: WheelName) -> str:
    local = name.version.partition("+")[2]
    return "cpu" if local.endswith(".cpu") or "cpu" in name.project else "cuda"


def _unpatched(report: Report, tree: str, path: Path, pin: Pin) -> None:
    for flavour in ("cuda", "cpu"):
        expected = pin.pristine.for_package(flavour)
        if tree == expected:
            report.state = PRISTINE
            report.trees["package"] = TreeCheck(tree, expected)
            digest = file_sha256(path)
            known = [w.name for w in pin.wheels.values() if w.sha256 == digest]
            what = f"the official wheel {known[0]}" if known else "an unofficial build"
            report.summary = (
                f"{path.name} is the base, not patched: {what} of vLLM "
                f"{pin.base.version}"
            )
            return
    report.state = FOREIGN
    report.identity.pop("base")
    report.trees["package"] = TreeCheck(tree, pin.identity.package)
    report.summary = f"{path.name} is neither patched nor the base of this patch set"


def _names(wheel: WheelFile, flavour: str, repo: Repo) -> list[str]:
    """Check the version wherever a wheel says it."""
    edits = load_edits(repo.root, flavour)
    version = edits.version(repo.pin.release)
    wanted = WheelName(edits.name.replace("-", "_"), version, wheel.name.tags)
    metadata = HeaderParser().parsestr(
        wheel.read_text(f"{wheel.dist_info}/METADATA"), headersonly=True
    )
    found = {
        "the file name": wheel.name.filename,
        "the dist-info folder": wheel.dist_info,
        "METADATA's Name": metadata["Name"],
        "METADATA's Version": metadata["Version"],
    }
    right = {
        "the file name": wanted.filename,
        "the dist-info folder": wanted.dist_info,
        "METADATA's Name": edits.name,
        "METADATA's Version": version,
    }
    notes = [
        f"{what} is {found[what]}, not {right[what]}"
        for what in right
        if found[what] != right[what]
    ]
    if f"version = '{version}'" not in wheel.read_text(VERSION_FILE):
        notes.append(f"{VERSION_FILE} does not say {version}")
    return notes


def _marker(wheel: WheelFile, tree: str, repo: Repo, report: Report) -> list[str]:
    """Check the file that the running vLLM reads its identity from."""
    try:
        found = json.loads(wheel.read(MARKER_PATH))
        report.identity["release"] = found["release"]
        report.identity["series_sha256"] = found["series_sha256"]
        claimed = {key: found[key] for key in ("series_sha256", "package_tree")}
    except (ValueError, KeyError, TypeError):
        return [f"{MARKER_PATH} is unreadable"]
    right = {
        "series_sha256": repo.pin.series_sha256,
        "package_tree": tree,
    }
    return [
        f"{MARKER_PATH}: {key} is {claimed[key]}, not {right[key] or '(not pinned)'}"
        for key in right
        if claimed[key] != right[key]
    ]


def _tree_differences(wheel: WheelFile, repo: Repo) -> list[str]:
    """Name the files that the series made otherwise than they are here."""
    planned = plan.plan_apply(repo, wheel.read_blob, full=False)
    names = sorted({*planned.edited, *(change.path for change in planned.changes)})
    if names:
        return [f"{name} is not as this patch set makes it" for name in names]
    return [
        "a file that the patch set does not touch differs from the base, or is "
        "missing or added"
    ]


def _contents(wheel: WheelFile) -> list[str]:
    """Check every member against RECORD, and RECORD against the members."""
    notes = []
    record = wheel.record()
    own = f"{wheel.dist_info}/RECORD"
    total = sum(info.file_size for info in wheel.members.values())
    with ByteBar("verify", total) as bar:
        for name, info in wheel.members.items():
            if name == own:
                continue
            if name not in record:
                notes.append(f"RECORD lacks {name}")
                continue
            try:
                found = (wheel.digest(name, bar), str(info.file_size))
            except BrokenWheelError as exc:
                notes.append(str(exc))
                continue
            if found != record[name]:
                notes.append(f"{name} is not as RECORD says")
    notes += [f"{name} is in RECORD only" for name in record.keys() - wheel.members]
    ordered = [(name, *record[name]) for name in _order(wheel) if name in record]
    if wheel.read_text(own) != write_record(ordered):
        notes.append("RECORD is not in the form that a repack gives it")
    return notes


def _order(wheel: WheelFile) -> list[str]:
    info = wheel.dist_info
    last = [f"{info}/{REPACK_FILE}", f"{info}/RECORD"]
    return [*member_order(set(wheel.members) - set(last), info), *last]


class _Mirror:
    """A file to write to that compares with what is there instead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0
        self.different_at: int | None = None

    def write(self, data: bytes) -> int:
        self._file.seek(self.position)
        if self.different_at is None and self._file.read(len(data)) != data:
            self.different_at = self.position
        self.position += len(data)
        return len(data)


def _form(wheel: WheelFile) -> list[str]:
    """Check that the archive is what the writer makes of its own members."""
    order = _order(wheel)
    missing = [name for name in order if name not in wheel.members]
    if missing:
        return [f"{name} is missing" for name in missing]
    try:
        epoch = calendar.timegm(wheel.members[order[0]].date_time)
        origin = json.loads(wheel.read(order[-2]))
        claimed = origin["bytes_before_this_sha256"]
    except (ValueError, KeyError, TypeError):
        return [f"{REPACK_FILE} or a time stamp is unreadable"]
    with wheel.path.open("rb") as file:
        mirror = _Mirror(file)
        writer = RawZipWriter(cast(BinaryIO, mirror), epoch, _ignore)
        digest = ""
        try:
            for name in order:
                if name == order[-2]:
                    digest = writer.digest()
                writer.copy(wheel.raw, wheel.members[name])
            writer.close()
        except ZipFormatError as exc:
            return [str(exc)]
    notes = []
    if mirror.different_at is not None:
        notes.append(f"the archive's structure differs at byte {mirror.different_at}")
    elif mirror.position != wheel.path.stat().st_size:
        notes.append(f"the archive goes on after its end at byte {mirror.position}")
    if claimed != digest:
        notes.append(f"the compressed bytes are not the ones that {REPACK_FILE} names")
    return notes


def _ignore(count: int) -> None:
    del count
