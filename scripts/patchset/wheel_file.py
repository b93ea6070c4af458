# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Reading a wheel: its members, its RECORD, and the git ids of its package."""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from patchset.errors import PatchsetError
from patchset.gittree import MODE_FILE, Blob, Entry
from patchset.pin import Pin
from patchset.plan import PACKAGE
from patchset.wheel_meta import WheelName, format_digest, read_record

_CHUNK = 1 << 20
# What zipfile raises, one way or another, where bytes of an archive are wrong.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,  # NotImplementedError among them
    ValueError,
)


class BrokenWheelError(PatchsetError):
    """The file is no wheel, or a damaged one."""


class WheelFile:
    """An open wheel.

    Attributes:
        path: The file.
        name: The parts of its file name.
        members: Name -> zip entry; folders are left out.
        dist_info: Name of its dist-info folder, as the members have it.
        raw: The file itself, for copying compressed bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = WheelName.parse(path.name)
        try:
            self.raw: BinaryIO = path.open("rb")
        except OSError as exc:
            raise PatchsetError(f"cannot read {path}: {exc.strerror}") from None
        try:
            self._zip = zipfile.ZipFile(self.raw)
            infos = [info for info in self._zip.infolist() if not info.is_dir()]
            self.members = {info.filename: info for info in infos}
            if len(self.members) != len(infos):
                raise BrokenWheelError(f"{path.name} has a member twice")
            self.dist_info = self._find_dist_info()
        except _DAMAGE as exc:
            self.raw.close()
            raise BrokenWheelError(f"{path.name} is damaged: {exc}") from None
        except BaseException:
            self.raw.close()
            raise

    def __enter__(self) -> WheelFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._zip.close()
        self.raw.close()

    def read(self, name: str) -> bytes:
        """Return one member.

        Raises:
            BrokenWheelError: It is missing or damaged.
        """
        if name not in self.members:
            raise BrokenWheelError(f"{self.path.name} has no {name}")
        return b"".join(self._chunks(name))

    def read_text(self, name: str) -> str:
        """Return one member as UTF-8 text."""
        try:
            return self.read(name).decode()
        except UnicodeDecodeError:
            raise BrokenWheelError(f"{self.path.name}: {name} is not UTF-8") from None

    def read_blob(self, name: str) -> Blob | None:
        """Return one member for the planner, or None where there is none."""
        return Blob(self.read(name)) if name in self.members else None

    def record(self) -> dict[str, tuple[str, str]]:
        """Return RECORD: path -> (hash field, size field)."""
        return read_record(self.read_text(f"{self.dist_info}/RECORD"))

    def digest(self, name: str, progress: Callable[[int], object]) -> str:
        """Return the hash of a member in RECORD's form.

        Args:
            name: The member.
            progress: Called with the number of bytes just read.
        """
        digest = hashlib.sha256()
        for chunk in self._chunks(name):
            digest.update(chunk)
            progress(len(chunk))
        return format_digest(digest.digest())

    def package_entries(self, pin: Pin) -> dict[str, Entry]:
        """Return path -> git blob of the package, generated files left out."""
        return {
            name: Blob(self.read(name), MODE_FILE).entry
            for name in self.members
            if name.startswith(PACKAGE) and name not in pin.package_globs
        }

    def _chunks(self, name: str) -> Iterator[bytes]:
        try:
            with self._zip.open(name) as member:
                while chunk := member.read(_CHUNK):
                    yield chunk
        except _DAMAGE as exc:
            raise BrokenWheelError(f"{self.path.name}: {name}: {exc}") from None

    def _find_dist_info(self) -> str:
        tops = {name.partition("/")[0] for name in self.members}
        found = sorted(top for top in tops if top.endswith(".dist-info"))
        if len(found) != 1:
            raise BrokenWheelError(
                f"{self.path.name} has {len(found)} dist-info folders, not one"
            )
        return found[0]
