# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Applies, checks and maintains the Flint patch set on a pinned vLLM.

The core (apply, unapply, status, verify, lint) needs only the standard library
and no git. Layers, lowest first:

- ``errors``, ``gittree``, ``fsops``: exit codes, git object ids, durable writes.
- ``pin``, ``diff``, ``series``, ``overlay``, ``repo``: what the repository holds.
- ``sources``, ``listing``, ``identity``: what a target is and holds.
- ``plan``: decides, in memory, what the series does to a target.
- ``txn``: carries a plan out, all or nothing.
- ``apply``, ``verify``, ``lint``, ``gitio``, ``download``, ``wheel``: the commands.
- ``report``, ``cli``: what the user sees.
"""
