# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Stops the patch set before, inside or after any change it makes to the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchset import fsops

STEPS = (
    "write_file",
    "rename",
    "unlink",
    "make_folder",
    "remove_folder",
    "remove_tree",
)
KILLED = 9


class Stopper:
    """Counts the steps and calls `stop` at the wanted one.

    Every function of `fsops` is two steps: before it, and inside it (a file half
    written, a folder half removed). With `after`, there is a third one after it:
    for errors, since to be killed there is to be killed before the next one.
    ``remove_folder`` is left out then: it cannot fail.
    """

    def __init__(
        self, at: int, stop: Callable[[], Any], *, after: bool = False
    ) -> None:
        self.at = at
        self.stop = stop
        self.after = after
        self.count = 0

    def __enter__(self) -> Stopper:
        self.patch = pytest.MonkeyPatch()
        for name in STEPS:
            if self.after and name == "remove_folder":
                continue
            self.patch.setattr(fsops, name, self._wrap(name, getattr(fsops, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        self.patch.undo()

    def _step(self) -> None:
        if self.count == self.at:
            self.count += 1
            self.stop()
        else:
            self.count += 1

    def _wrap(self, name: str, real: Callable) -> Callable:
        def inside(path: Path, *args: Any) -> None:
            if name == "write_file":
                path.write_bytes(args[0][: len(args[0]) // 2])
            elif name == "remove_tree" and path.is_dir():
                for file in sorted(path.rglob("*")):
                    if file.is_file():
                        file.unlink()
                        break

        def wrapped(*args: Any) -> None:
            self._step()
            if self.count == self.at:
                inside(*args)
            self._step()
            real(*args)
            if self.after:
                self._step()

        return wrapped


def count_steps(run: Callable[[], Any], *, after: bool = False) -> int:
    """How many steps `run` has."""
    with Stopper(-1, lambda: None, after=after) as stopper:
        run()
    return stopper.count


def run_killed(run: Callable[[], Any], at: int) -> bool:
    """Run in a child process that dies at step `at`.

    Returns:
        Whether it died there; False if it ended by itself before.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Stopper(at, lambda: os._exit(KILLED)):
                run()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED), "the child failed by itself"
    return code == KILLED
