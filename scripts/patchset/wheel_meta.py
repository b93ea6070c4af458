# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The metadata files of a wheel: names, RECORD, METADATA, WHEEL, _version.py."""

from __future__ import annotations

import base64
import csv
import io
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.pin import PIN_NAME

VERSION_FILE = "vllm/_version.py"


class WheelMetadataError(PatchsetError):
    """A metadata file is not what the pin says it is."""


@dataclass(frozen=True)
class WheelName:
    """The parts of a wheel's file name.

    Attributes:
        project: Distribution name, with underscores.
        version: PEP 440 version.
        tags: Compatibility tags, such as "cp38-abi3-manylinux_2_28_x86_64".
    """

    project: str
    version: str
    tags: str

    @classmethod
    def parse(cls, filename: str) -> WheelName:
        """Split a file name.

        Raises:
            WheelMetadataError: It is not the name of a wheel.
        """
        match = re.fullmatch(r"([^-]+)-([^-]+)-([^-]+-[^-]+-[^-]+)\.whl", filename)
        if not match:
            raise WheelMetadataError(
                f"{filename} is not the name of a wheel "
                "(PROJECT-VERSION-PYTHON-ABI-PLATFORM.whl)"
            )
        return cls(*match.groups())

    @property
    def filename(self) -> str:
        return f"{self.project}-{self.version}-{self.tags}.whl"

    @property
    def dist_info(self) -> str:
        return f"{self.project}-{self.version}.dist-info"


@dataclass(frozen=True)
class MetadataEdits:
    """What a repacked wheel's metadata says differently from the official one's.

    Attributes:
        name: Project name of the result.
        local: Last part of the local version, or "" for none.
        requires: Old requirement -> new requirement, whole Requires-Dist values.
        extras: Extras that the new requirements name.
        added: Requirements that the series adds; not in the pin file.
    """

    name: str = "vllm"
    local: str = ""
    requires: Mapping[str, str] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def version(self, release: str) -> str:
        """Return the version of the result, for a release such as 0.32.0+flint.1."""
        return f"{release}.{self.local}" if self.local else release


def load_edits(root: Path, flavour: str) -> MetadataEdits:
    """Read ``[metadata.FLAVOUR]`` of the pin file; no table means no edits.

    Raises:
        WheelMetadataError: The table has an unknown field.
    """
    raw = tomllib.loads((root / PIN_NAME).read_text(encoding="utf-8"))
    table = raw.get("metadata", {}).get(flavour, {})
    unknown = set(table) - {"name", "local", "requires", "extras"}
    if unknown:
        raise WheelMetadataError(
            f"{PIN_NAME}: [metadata.{flavour}] has unknown fields: {sorted(unknown)}"
        )
    if "extras" in table:
        table["extras"] = tuple(table["extras"])
    return MetadataEdits(**table)


def edit_metadata(
    text: str,
    official: WheelName,
    version: str,
    edits: MetadataEdits,
) -> tuple[str, list[str]]:
    """Return METADATA with the new version and the pinned edits, and what changed.

    Raises:
        WheelMetadataError: A line that an edit speaks of is not there once.
    """
    head, blank, body = text.partition("\n\n")
    lines = head.split("\n")
    replaced: list[str] = []

    def replace(old: str, new: str) -> None:
        if lines.count(old) != 1:
            raise WheelMetadataError(
                f'METADATA has "{old}" {lines.count(old)} times, not once'
            )
        if old != new:
            lines[lines.index(old)] = new
            replaced.append(f"{old}  ->  {new}")

    project = official.project.replace("_", "-")
    replace(f"Name: {project}", f"Name: {edits.name}")
    replace(f"Version: {official.version}", f"Version: {version}")
    added = [f"Requires-Dist: {requirement}" for requirement in edits.added]
    added += [f"Provides-Extra: {extra}" for extra in edits.extras]
    lines += added
    replaced += [f"added {line}" for line in added]
    for old, new in edits.requires.items():
        replace(f"Requires-Dist: {old}", f"Requires-Dist: {new}")
    return "\n".join(lines) + blank + body, replaced


def edit_wheel_file(text: str, tags: str) -> tuple[str, list[str]]:
    """Return WHEEL with the tags that the file name has, and what changed.

    The official wheels are renamed after they are built, so their WHEEL files
    speak of another platform; pip check reads the tags from there.
    """
    python, abi, platform = (part.split(".") for part in tags.split("-"))
    wanted = [f"Tag: {p}-{a}-{m}" for p in python for a in abi for m in platform]
    lines = text.rstrip("\n").split("\n")
    old = [line for line in lines if line.startswith("Tag: ")]
    kept = [line for line in lines if not line.startswith("Tag: ")]
    changed = [] if old == wanted else [f"{', '.join(old)}  ->  {', '.join(wanted)}"]
    return "\n".join([*kept, *wanted]) + "\n", changed


def edit_version_file(text: str, base: str, version: str) -> str:
    """Return vllm/_version.py with the patched version.

    Raises:
        WheelMetadataError: It does not hold the base's version in the known form.
    """
    numbers = ", ".join(base.split("."))
    local = version.partition("+")[2]
    for old, new in (
        (f"version = '{base}'", f"version = '{version}'"),
        (f"version_tuple = ({numbers})", f"version_tuple = ({numbers}, '{local}')"),
    ):
        if text.count(old) != 1:
            raise WheelMetadataError(f'{VERSION_FILE} has no single "{old}"')
        text = text.replace(old, new)
    return text


def format_digest(digest: bytes) -> str:
    """Return a SHA-256 digest in RECORD's form."""
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def read_record(text: str) -> dict[str, tuple[str, str]]:
    """Return path -> (hash field, size field).

    Raises:
        WheelMetadataError: A row is malformed, or a path stands there twice.
    """
    rows: dict[str, tuple[str, str]] = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) != 3:
            raise WheelMetadataError(f"RECORD has a row of {len(row)} fields: {row}")
        if row[0] in rows:
            raise WheelMetadataError(f"RECORD names {row[0]} twice")
        rows[row[0]] = (row[1], row[2])
    return rows


def write_record(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return RECORD's text for rows of (path, hash field, size field)."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
