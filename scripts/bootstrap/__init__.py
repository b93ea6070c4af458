# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Makes the one environment that the quick start and the tests run in.

Needs Python >= 3.11 with nothing installed: only the standard library is used.

- ``system``: the interpreter's version, and packages of the operating system.
- ``console``: one line of progress, on a terminal or in a log.
- ``process``: child processes that end with us.
- ``pip_run``: runs pip and condenses what it prints.
- ``environment``: what the environment holds, and when it must be made again.
- ``lock``: writes requirements/*.txt; run by hand.
"""
