# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Applies, checks and maintains the Flint patch set on a pinned vLLM.

The core (apply, unapply, status, verify, lint) needs only the standard library, and
no git but for git checkouts. Layers, lowest first:

- ``errors``, ``gittree``, ``fsops``, ``git``: exit codes, git object ids, durable
  writes, running git.
- ``pin``, ``diff``, ``series``, ``overlay``, ``repo``: what the repository holds.
- ``hunks``, ``plan``, ``identity``, ``basis``: what the series makes of a tree, in
  memory, and the ids of the result.
- ``sources``, ``listing``, ``record``, ``examine``: what a target is and holds.
- ``txn``, ``opening``: carrying a plan out, all or nothing; repairing after a kill.
- ``apply``, ``unapply``, ``verify``, ``tree``, ``lint``, ``gitio``, ``download`` and
  ``wheel*``: the commands.
- ``report``, ``cli``: what the user sees.
"""
