# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Builds, tunes and compares the small-M GEMV of the overlay on one GPU."""
