# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Makes what a release publishes: wheels, checksums, bill of materials, notes.

- ``changelog``: the section of CHANGELOG.md that belongs to a version.
- ``build``: the files of a release.
- ``cli``: the command line.

The version is the one in pin.toml; nothing else says it.
"""
