# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Reads CHANGELOG.md."""

from __future__ import annotations

import re
from pathlib import Path

from patchset.errors import PatchsetError

_HEADING = re.compile(r"^## (?P<version>\S+)(?P<rest>.*)$", re.M)


def section(path: Path, version: str, dated: bool = False) -> str:
    """Return what the changelog says of a version, without the heading.

    Args:
        path: the changelog.
        version: for example 0.32.0+flint.1.
        dated: whether the heading must have a date, instead of "unreleased".

    Raises:
        PatchsetError: it says nothing, or has no date.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise PatchsetError(f"cannot read {path}: {exc.strerror}") from None
    headings = list(_HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if heading["version"] != version:
            continue
        if dated and not re.fullmatch(r" - \d{4}-\d\d-\d\d", heading["rest"]):
            raise PatchsetError(
                f"{path.name} has no date for {version}; its heading has to be "
                f"`## {version} - YYYY-MM-DD`"
            )
        end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
        body = text[heading.end() : end].strip()
        if body:
            return f"{body}\n"
    raise PatchsetError(f"{path.name} says nothing of {version}")
