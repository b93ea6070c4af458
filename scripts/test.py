#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs every test of this repository; arguments go to pytest.

Needs Python >= 3.11; makes the environment in .venv first. Runs in the repository's
root, whatever the working directory is.
"""

import os
import sys

from bootstrap.environment import ROOT
from bootstrap.launch import run_in_environment

if __name__ == "__main__":
    os.chdir(ROOT)
    run_in_environment(["-m", "pytest", *sys.argv[1:]])
