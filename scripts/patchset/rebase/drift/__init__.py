# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What the overlay relies on in vLLM, found in the source, without importing it."""
