# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Speed of the real vLLM engine on a model of Flint's size with synthetic weights."""
