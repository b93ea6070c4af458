# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routing and experts of Flint's sparse layers; ``ops/moe.py`` has the entries."""
