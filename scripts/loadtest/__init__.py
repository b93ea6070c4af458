# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Many streams at once against an OpenAI-compatible server, for minutes.

- ``cli``: the options.
- ``plan``: the requests, from a seed.
- ``stream``: one streaming completion, read token by token.
- ``load``: all streams at once, or a few alone.
- ``compare``: answers under load against the same requests alone.
- ``watch``: the server's requests, KV cache and memory.
- ``report``: what was wrong, the table and the JSON file.
- ``run``: the whole thing.
"""
