# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Keeps one GitHub issue for each upstream version that we rebase onto."""
