# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Serves a tiny Flint with the real `vllm serve` and talks to it as a client would.

- ``cli``: the options.
- ``server``: one `vllm serve` process with all its children.
- ``client``: what the OpenAI client asks for, and what counts as an answer.
- ``summary``: the table and the JSON file at the end.
- ``run``: the whole thing.
"""
