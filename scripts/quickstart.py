#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""From a fresh clone to a tiny Flint that answers over the OpenAI API.

Needs Python >= 3.11; makes the environment in .venv, then runs scripts/quickstart/.
"""

import sys
from pathlib import Path

from bootstrap.launch import run_in_environment
from quickstart.cli import parse

if __name__ == "__main__":
    parse(sys.argv[1:])  # answers --help and wrong use before anything is made
    package = Path(__file__).with_suffix("")
    run_in_environment([str(package), *sys.argv[1:]])
