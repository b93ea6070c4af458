# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The one kind of error that ends the bootstrap."""


class BootstrapError(Exception):
    """Something is missing or failed; the message says what to do."""
