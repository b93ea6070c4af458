# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Carries the patch set to another upstream, unattended, and says what stands there.

`command` is the entry. `upstream` finds the target, `store` keeps both trees as git
objects, `place` puts one patch onto a tree, `cause` explains a conflict, `drift`
compares what the overlay relies on, `good` runs the engine on the result, `proposal`
writes the pin that would follow, `results` and `render` are the report.
"""
