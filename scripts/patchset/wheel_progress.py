# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A progress bar over bytes."""

from __future__ import annotations

from types import TracebackType

from patchset.errors import PatchsetError


class ByteBar:
    """Counts bytes on a tqdm bar; call it with the number of bytes just done.

    Shown on a terminal only: what it counts takes seconds.

    Raises:
        PatchsetError: tqdm is not installed.
    """

    def __init__(self, label: str, total: int) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            raise PatchsetError(
                "this command needs the tqdm package: pip install tqdm"
            ) from None
        self._bar = tqdm(
            total=total,
            desc=label,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None,
        )

    def __call__(self, count: int) -> None:
        self._bar.update(count)

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
