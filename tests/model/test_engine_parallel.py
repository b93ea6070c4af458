# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tensor and pipeline parallel engines give the logits of one worker."""

import pytest

from support.engine import Pass, run_engine
from support.logits import assert_float32, prompts_of, references


@pytest.mark.parametrize(
    "parallel",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["tp2", "pp2"],
)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_two_workers(checkpoint, parallel: dict[str, int], form: str) -> None:
    refs = references("tiny", "nvfp4", "float32")
    config = str(checkpoint("tiny", "nvfp4", "safetensors"))
    (answers,) = run_engine(
        [Pass(prompts_of(refs))],
        model=str(checkpoint("tiny", "nvfp4", form)),
        hf_config_path=config,
        tokenizer=config,
        dtype="float32",
        distributed_executor_backend="mp",
        **parallel,
    )
    assert_float32(answers, refs)
