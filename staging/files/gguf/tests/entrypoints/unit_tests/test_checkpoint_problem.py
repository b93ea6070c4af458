# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint's problem ends the command with one line; other errors do not."""

import argparse
from unittest.mock import patch

import pytest

from vllm.entrypoints.cli import main
from vllm.entrypoints.cli.collect_env import CollectEnvSubcommand
from vllm.models.flint.errors import FlintCheckpointError


def run_main(error: Exception) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise error

    with (
        patch("sys.argv", ["vllm", "collect-env"]),
        patch.object(CollectEnvSubcommand, "cmd", staticmethod(fail)),
    ):
        main.main()


def test_checkpoint_problem_is_one_line():
    with pytest.raises(SystemExit) as caught:
        run_main(FlintCheckpointError("model.gguf: it ends too early"))
    assert caught.value.code == "vllm: error: model.gguf: it ends too early"


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="something else"):
        run_main(RuntimeError("something else"))
