# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The type of the fixture that rebases."""

from collections.abc import Callable

from patchset.rebase.results import RebaseReport

Run = Callable[..., RebaseReport]
