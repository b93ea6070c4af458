# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Every PTX instruction that `emulator` knows."""

from ptx import instructions, warp

HANDLERS = instructions.HANDLERS | warp.HANDLERS
