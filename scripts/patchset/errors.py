# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Errors that end a command, each with the exit code it stands for."""

from __future__ import annotations

EXIT_OK = 0
EXIT_CONFLICT = 1
EXIT_WRONG_BASE = 2
EXIT_DIRTY = 3


class PatchsetError(Exception):
    """Wrong base or wrong use; the message says what to do about it."""

    exit_code = EXIT_WRONG_BASE


class ConflictError(PatchsetError):
    """A patch does not fit, or something checked is not as it must be."""

    exit_code = EXIT_CONFLICT


class DirtyTreeError(PatchsetError):
    """The target holds edits that the patch set neither knows nor made."""

    exit_code = EXIT_DIRTY
