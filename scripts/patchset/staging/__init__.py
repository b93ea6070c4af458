# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Makes the patch set a branch of reviewable commits on vLLM, and checks it there.

`steps` reads staging/steps.toml, `compose` makes the files of each step, `branch`
commits them, `hooks` runs vLLM's pre-commit configuration, `rules` holds the steps
to vLLM's rules, `texts` fills in the pull requests' template. Nothing is pushed.
"""
