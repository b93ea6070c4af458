# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The RECORD of an installed package: what it says, checked and kept right."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from patchset.plan import Change


@dataclass(frozen=True)
class Row:
    """One line of a RECORD; `digest` is empty where it gives none."""

    path: str
    digest: str
    line: str


def parse_record(data: bytes) -> list[Row]:
    """The lines of a RECORD, each with its own bytes kept."""
    rows = []
    for line in data.decode("utf-8").splitlines(keepends=True):
        fields = next(csv.reader([line]), [])
        if fields:
            digest = fields[1] if len(fields) > 1 else ""
            rows.append(Row(fields[0], digest, line))
    return rows


def record_digest(data: bytes) -> str:
    """The hash of a file as RECORD writes it."""
    raw = hashlib.sha256(data).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def update_record(data: bytes, changes: Iterable[Change]) -> bytes:
    """The RECORD after `changes`; lines of other files keep their bytes."""
    rows = parse_record(data)
    newline = "\r\n" if rows and rows[0].line.endswith("\r\n") else "\n"
    lines = {row.path: row.line for row in rows}
    for change in changes:
        if change.after is None:
            lines.pop(change.path, None)
        else:
            content = change.after.data
            lines[change.path] = _line(
                change.path, record_digest(content), len(content), newline
            )
    return "".join(lines.values()).encode()


def _line(path: str, digest: str, size: int, newline: str) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator=newline).writerow([path, digest, size])
    return out.getvalue()


def differing_files(
    root: Path, data: bytes, skip: Callable[[str], bool] = lambda path: False
) -> list[str]:
    """Files below `root` that are missing or not as RECORD says."""
    wrong = []
    for row in parse_record(data):
        if not row.digest or skip(row.path):
            continue
        algorithm, _, expected = row.digest.partition("=")
        try:
            with (root / row.path).open("rb") as file:
                raw = hashlib.file_digest(file, algorithm).digest()
        except (OSError, ValueError):
            wrong.append(row.path)
            continue
        if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != expected:
            wrong.append(row.path)
    return wrong
