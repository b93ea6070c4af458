# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The series: ``patches/series`` and the patches it names, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.header import decode_header, make_header
from email.parser import BytesHeaderParser
from pathlib import Path

from patchset.diff import FileDiff, parse_diff
from patchset.errors import PatchsetError

SERIES_NAME = "patches/series"
_TRAILER = re.compile(r"([A-Za-z][A-Za-z0-9-]*): (\S.*)")
_STEM_LENGTH = 60


@dataclass(frozen=True)
class Patch:
    """One patch of the series: a commit as ``git format-patch`` writes it.

    Attributes:
        filename: its name below patches/.
        data: its bytes.
        header: the mail header's bytes, without the blank line after it.
        subject: without "[PATCH]" and unfolded.
        body: between subject and trailers.
        trailers: (name, value) in order.
        files: what it does to each file.
    """

    filename: str
    data: bytes
    header: bytes
    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]
    files: tuple[FileDiff, ...]

    @property
    def name(self) -> str:
        """The file's stem: what reports and the overlay call the patch."""
        return self.filename.removesuffix(".patch")

    def trailer(self, name: str) -> str | None:
        """The last value of that trailer, or None."""
        values = [value for key, value in self.trailers if key == name]
        return values[-1] if values else None

    @property
    def required(self) -> bool:
        """Whether Flint must not load without it."""
        return self.trailer("Required") == "yes"


def load_series(root: Path) -> tuple[Patch, ...]:
    """Read every patch that ``patches/series`` names.

    Raises:
        PatchsetError: a file is missing, named twice, unnamed, or malformed.
    """
    path = root / SERIES_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise PatchsetError(f"cannot read the series file {path}: {exc}") from None
    names = [line.strip() for line in text.splitlines()]
    names = [name for name in names if name and not name.startswith("#")]
    if len(set(names)) != len(names):
        raise PatchsetError(f"{path} names a patch twice")
    patches = []
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.patch", name):
            raise PatchsetError(f"{path}: {name!r} is no patch file's name")
        try:
            data = (path.parent / name).read_bytes()
        except OSError as exc:
            raise PatchsetError(f"{path} names {name}: {exc}") from None
        patches.append(parse_patch(name, data))
    on_disk = {file.name for file in path.parent.glob("*.patch")}
    if unnamed := sorted(on_disk - set(names)):
        raise PatchsetError(f"{path} does not name {', '.join(unnamed)}")
    return tuple(patches)


def parse_patch(filename: str, data: bytes) -> Patch:
    """Split one mail-form patch into header, message and diff."""
    head, blank, rest = data.partition(b"\n\n")
    message, mark, diff = (b"\n" + rest).partition(b"\ndiff --git ")
    if not head.startswith(b"From ") or not blank or not mark:
        raise PatchsetError(
            f"{filename}: not a commit as git format-patch writes it; "
            "make it with `python3 scripts/patchset export <checkout>`"
        )
    parsed = BytesHeaderParser().parsebytes(head.partition(b"\n")[2] + b"\n\n")
    subject = str(make_header(decode_header(parsed.get("Subject", ""))))
    subject = re.sub(r"\s*\n\s*", " ", subject).removeprefix("[PATCH] ")
    body, trailers = _split_trailers(message.decode("utf-8", "replace"))
    return Patch(
        filename=filename,
        data=data,
        header=head,
        subject=subject,
        body=body,
        trailers=trailers,
        files=parse_diff(mark[1:] + diff, filename),
    )


def _split_trailers(message: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The last paragraph, if every line of it is a trailer."""
    paragraphs = re.split(r"\n{2,}", message.strip("\n"))
    matches = [_TRAILER.fullmatch(line) for line in paragraphs[-1].splitlines()]
    found = tuple((match[1], match[2]) for match in matches if match)
    if not matches or len(found) != len(matches):
        return "\n\n".join(paragraphs), ()
    return "\n\n".join(paragraphs[:-1]), found


def filename_for(subject: str) -> str:
    """The patch file's name: from its subject, without a number."""
    stem = ""
    for word in re.findall(r"[a-z0-9]+", subject.lower()):
        longer = f"{stem}-{word}" if stem else word[:_STEM_LENGTH]
        if len(longer) > _STEM_LENGTH:
            break
        stem = longer
    return f"{stem}.patch"
