# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Repacks an official wheel into the patched one, without compiling anything.

The series touches no native code, so the official wheel with the patches and the
overlay applied is the patched wheel. Members that do not change are copied as they
are; the result's bytes depend on the official wheel, the patch set and
SOURCE_DATE_EPOCH alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from patchset import plan
from patchset.download import file_sha256
from patchset.errors import ConflictError, PatchsetError
from patchset.identity import marker, package_tree, with_changes
from patchset.overlay import MARKER_PATH
from patchset.pin import Pin, WheelArtifact
from patchset.record import record_digest
from patchset.repo import Repo
from patchset.wheel_file import WheelFile
from patchset.wheel_meta import (
    VERSION_FILE,
    MetadataEdits,
    WheelName,
    edit_metadata,
    edit_version_file,
    edit_wheel_file,
    load_edits,
    write_record,
)
from patchset.wheel_progress import ByteBar
from patchset.wheel_series import added_requirements, refuse_native
from patchset.wheel_zip import ZIP_EPOCH, RawZipWriter

REPACK_FILE = "REPACK.json"
"""Member of dist-info that says what the wheel was made of."""

_MAX_EPOCH = 4354819199  # 2107-12-31, the last day a zip archive can hold


@dataclass(frozen=True)
class Repacked:
    """What a repack made.

    Attributes:
        path: The wheel.
        package_tree: Git tree id of its ``vllm/``.
        edits: Each metadata line that changed, old -> new.
    """

    path: Path
    package_tree: str
    edits: tuple[str, ...]


@dataclass(frozen=True)
class _Content:
    """Members of the result: new bytes, or copied from the official wheel."""

    new: dict[str, bytes]
    copied: dict[str, str]
    package_tree: str
    edits: tuple[str, ...]


def source_epoch() -> int:
    """Return the time stamp of the result's members.

    Raises:
        PatchsetError: SOURCE_DATE_EPOCH is not a number that an archive can hold.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", str(ZIP_EPOCH))
    if not text.isascii() or not text.isdigit() or int(text) > _MAX_EPOCH:
        raise PatchsetError(
            f"SOURCE_DATE_EPOCH={text} is no time in seconds since 1970"
        )
    return int(text)


def official_wheel(path: Path, pin: Pin) -> WheelArtifact:
    """Return the pinned wheel that this file is, by its hash.

    Raises:
        PatchsetError: It is none of the pinned wheels.
    """
    name = WheelName.parse(path.name)
    if "flint" in name.version:
        raise PatchsetError(f"{path.name} is patched already; give the official wheel")
    try:
        digest = file_sha256(path)
    except OSError as exc:
        raise PatchsetError(f"cannot read {path}: {exc.strerror}") from None
    for wheel in pin.wheels.values():
        if wheel.sha256 == digest:
            return wheel
    kinds = ", ".join(pin.wheels)
    raise PatchsetError(
        f"{path.name} is none of the pinned wheels ({kinds}): its SHA-256 is {digest}"
    )


def repack(
    wheel: Path, out_dir: Path, repo: Repo, check_identity: bool = True
) -> Repacked:
    """Make the patched wheel.

    Args:
        wheel: One of the pinned official wheels.
        out_dir: Where the result goes; made if it does not exist.
        repo: The patch set.
        check_identity: Whether the result must be the pinned one.

    Raises:
        PatchsetError: The wheel or the series does not fit; nothing is left behind.
    """
    refuse_native(repo)
    added = tuple(added_requirements(repo))
    epoch = source_epoch()
    artifact = official_wheel(wheel, repo.pin)
    edits = replace(load_edits(repo.root, artifact.flavour), added=added)
    with WheelFile(wheel) as official:
        name = WheelName(
            edits.name.replace("-", "_"),
            edits.version(repo.pin.release),
            official.name.tags,
        )
        content = _content(official, artifact, name, edits, repo, check_identity)
        target = out_dir / name.filename
        partial = out_dir / f".{name.filename}.{os.getpid()}.partial"
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            size = wheel.stat().st_size
            with partial.open("wb") as out, ByteBar("repack", size) as bar:
                writer = RawZipWriter(out, epoch, bar)
                _write(writer, official, content, name.dist_info)
                out.flush()
                os.fsync(out.fileno())
            partial.replace(target)
        except OSError as exc:
            raise PatchsetError(f"cannot write {target}: {exc.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
    return Repacked(target, content.package_tree, content.edits)


def _content(
    official: WheelFile,
    artifact: WheelArtifact,
    name: WheelName,
    edits: MetadataEdits,
    repo: Repo,
    check_identity: bool,
) -> _Content:
    planned = _planned(official, artifact, repo)
    entries = with_changes(official.package_entries(repo.pin), planned.changes)
    tree = package_tree(entries, repo.pin)
    expected = repo.pin.identity.for_package(artifact.flavour)
    if check_identity and tree != expected:
        raise ConflictError(
            f"the result's package tree is {tree}, the pin file says "
            f"{expected or 'nothing'}; after a change of the series or the overlay run "
            "`python3 scripts/patchset refresh`"
        )
    new = {c.path: c.after.data for c in planned.changes if c.after is not None}
    new[MARKER_PATH] = marker(repo, tree).data
    version_file = official.read_text(VERSION_FILE)
    new[VERSION_FILE] = edit_version_file(
        version_file, repo.pin.base.version, name.version
    ).encode()

    old_info, info = official.dist_info, name.dist_info
    metadata, edited = edit_metadata(
        official.read_text(f"{old_info}/METADATA"), official.name, name.version, edits
    )
    wheel_text, retagged = edit_wheel_file(
        official.read_text(f"{old_info}/WHEEL"), name.tags
    )
    new[f"{info}/METADATA"] = metadata.encode()
    new[f"{info}/WHEEL"] = wheel_text.encode()

    gone = {c.path for c in planned.changes if c.after is None}
    gone.add(f"{old_info}/RECORD")
    copied = {
        _renamed(member, old_info, info): member
        for member in official.members
        if member not in gone and _renamed(member, old_info, info) not in new
    }
    return _Content(new, copied, tree, (*edited, *retagged))


def _planned(official: WheelFile, artifact: WheelArtifact, repo: Repo) -> plan.Plan:
    pristine = repo.pin.pristine.for_package(artifact.flavour)
    if package_tree(official.package_entries(repo.pin), repo.pin) != pristine:
        raise PatchsetError(
            f"{official.path.name} has the pinned hash but not the pinned package tree "
            f"{pristine}: the pin file contradicts itself"
        )
    planned = plan.plan_apply(repo, official.read_blob, full=False)
    if planned.state != plan.PRISTINE:
        names = [item.name for item in planned.items if item.conflicts]
        raise ConflictError(f"these patches do not fit the wheel: {', '.join(names)}")
    return planned


def _renamed(member: str, old_info: str, info: str) -> str:
    prefix = f"{old_info}/"
    return f"{info}/{member[len(prefix) :]}" if member.startswith(prefix) else member


def _write(
    writer: RawZipWriter, official: WheelFile, content: _Content, info: str
) -> None:
    old_record = official.record()
    rows = []
    for member in member_order({*content.new, *content.copied}, info):
        if member in content.new:
            data = content.new[member]
            writer.store(member, data)
            rows.append((member, record_digest(data), str(len(data))))
        else:
            source = content.copied[member]
            if not all(old_record.get(source, ("", ""))):
                raise PatchsetError(f"{official.path.name}: RECORD lacks {source}")
            writer.copy(official.raw, official.members[source], member)
            rows.append((member, *old_record[source]))
    origin = {
        "official_wheel": official.path.name,
        "package_tree": content.package_tree,
        "bytes_before_this_sha256": writer.digest(),
    }
    data = json.dumps(origin, indent=2).encode() + b"\n"
    member = f"{info}/{REPACK_FILE}"
    writer.store(member, data)
    rows += [(member, record_digest(data), str(len(data)))]
    rows += [(f"{info}/RECORD", "", "")]
    writer.store(f"{info}/RECORD", write_record(rows).encode())
    writer.close()


def member_order(names: set[str], info: str) -> list[str]:
    """Return members in the order of the archive: dist-info last, as pip likes it."""
    return sorted(names, key=lambda name: (name.startswith(f"{info}/"), name))
