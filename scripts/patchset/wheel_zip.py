# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Writing a zip archive whose bytes depend on its members and one clock value only.

Members taken over from another archive keep their compressed bytes, so repacking
a wheel of some hundred megabytes costs a file copy. New members are stored without
compression: two zlib builds may compress the same bytes differently, and the new
members are a few hundred kilobytes.
"""

from __future__ import annotations

import hashlib
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_VERSION_NEEDED = 20
_MADE_BY_UNIX = (3 << 8) | _VERSION_NEEDED
_UTF8 = 0x800
_LIMIT = 0xFFFFFFFF
_MAX_MEMBERS = 0xFFFF
_CHUNK = 1 << 20
ZIP_EPOCH = 315532800
"""1980-01-01, the first moment that a zip archive can hold (seconds since 1970)."""


class ZipFormatError(ValueError):
    """The archive needs something that this writer or reader does not do."""


@dataclass(frozen=True)
class _Written:
    """What the central directory repeats about one member."""

    name: bytes
    flags: int
    method: int
    crc: int
    packed_size: int
    size: int
    offset: int
    mode: int


def dos_time(epoch: int) -> tuple[int, int]:
    """Return (date, time) in the zip format for seconds since 1970, in UTC."""
    moment = time.gmtime(max(epoch, ZIP_EPOCH))
    date = (moment.tm_year - 1980) << 9 | moment.tm_mon << 5 | moment.tm_mday
    return date, moment.tm_hour << 11 | moment.tm_min << 5 | moment.tm_sec // 2


def normal_mode(executable: bool) -> int:
    """Return the one mode that files of this kind get, whatever the umask was."""
    return stat.S_IFREG | (0o755 if executable else 0o644)


class RawZipWriter:
    """Writes members one after the other; `close` adds the directory.

    Args:
        out: Binary file, opened for writing at position 0.
        epoch: Time stamp of every member, seconds since 1970.
        progress: Called with the number of bytes just written.
    """

    def __init__(
        self, out: BinaryIO, epoch: int, progress: Callable[[int], object]
    ) -> None:
        self._out = out
        self._date, self._time = dos_time(epoch)
        self._progress = progress
        self._members: list[_Written] = []
        self._digest = hashlib.sha256()
        self._offset = 0

    def digest(self) -> str:
        """Return the SHA-256 of everything written so far, in hex."""
        return self._digest.hexdigest()

    def store(self, name: str, data: bytes, executable: bool = False) -> None:
        """Add a new member, uncompressed."""
        self._header(
            name,
            zipfile.ZIP_STORED,
            zlib.crc32(data),
            len(data),
            len(data),
            normal_mode(executable),
        )
        self._write(data)

    def copy(
        self, source: BinaryIO, info: zipfile.ZipInfo, name: str | None = None
    ) -> None:
        """Add a member of another archive without recompressing it.

        Args:
            source: The other archive's file.
            info: The member there.
            name: What it is called here; by default as there.

        Raises:
            ZipFormatError: The member is encrypted, a link, or too large.
        """
        mode = info.external_attr >> 16
        if info.flag_bits & 0x1:
            raise ZipFormatError(f"{info.filename} is encrypted")
        if mode and not stat.S_ISREG(mode):
            raise ZipFormatError(f"{info.filename} is not a plain file")
        source.seek(info.header_offset)
        header = source.read(_LOCAL.size)
        if len(header) != _LOCAL.size:
            raise ZipFormatError(f"the archive ends before {info.filename}")
        name_size, extra_size = _LOCAL.unpack(header)[9:]
        source.seek(name_size + extra_size, 1)
        self._header(
            name or info.filename,
            info.compress_type,
            info.CRC,
            info.compress_size,
            info.file_size,
            normal_mode(bool(mode & 0o111)),
        )
        left = info.compress_size
        while left:
            block = source.read(min(left, _CHUNK))
            if not block:
                raise ZipFormatError(f"the archive ends inside {info.filename}")
            self._write(block)
            left -= len(block)

    def close(self) -> None:
        """Write the central directory; the archive is complete after this."""
        start = self._offset
        for member in self._members:
            self._write(
                _CENTRAL.pack(
                    b"PK\x01\x02",
                    _MADE_BY_UNIX,
                    _VERSION_NEEDED,
                    member.flags,
                    member.method,
                    self._time,
                    self._date,
                    member.crc,
                    member.packed_size,
                    member.size,
                    len(member.name),
                    0,
                    0,
                    0,
                    0,
                    member.mode << 16,
                    member.offset,
                )
                + member.name
            )
        count = len(self._members)
        size = self._offset - start
        self._write(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0))

    def _header(
        self, name: str, method: int, crc: int, packed: int, size: int, mode: int
    ) -> None:
        encoded = name.encode()
        if max(packed, size, self._offset + packed) >= _LIMIT:
            raise ZipFormatError(f"{name} would need the 64-bit zip format")
        if len(self._members) >= _MAX_MEMBERS:
            raise ZipFormatError("too many members for one archive")
        flags = 0 if name.isascii() else _UTF8
        member = _Written(encoded, flags, method, crc, packed, size, self._offset, mode)
        self._members.append(member)
        self._write(
            _LOCAL.pack(
                b"PK\x03\x04",
                _VERSION_NEEDED,
                flags,
                method,
                self._time,
                self._date,
                crc,
                packed,
                size,
                len(encoded),
                0,
            )
            + encoded
        )

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._digest.update(data)
        self._offset += len(data)
        self._progress(len(data))
