# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times the sparse block of the overlay on one GPU, beside vLLM's own."""
