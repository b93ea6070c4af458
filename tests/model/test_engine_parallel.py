# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Tensor and pipeline parallel engines give the logits of one worker."""

import os

import pytest

from support.engine import Pass, run_engine
from support.logits import assert_float32, prompts_of, references

# vLLM binds each CPU worker to cores of its own, and by itself only to NUMA nodes.
_CORES = sorted(os.sched_getaffinity(0))
_BINDING = {"VLLM_CPU_OMP_THREADS_BIND": f"{_CORES[0]}|{_CORES[-1]}"}


TENSOR = {"tensor_parallel_size": 2}
# With enforce_eager, vLLM 0.32.0's CPU worker skips the warm-up that allocates what a
# pipeline stage receives, and fails for every model.
PIPELINE = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=["tp2", "pp2"])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_two_workers(checkpoint, parallel: dict[str, object], form: str) -> None:
    refs = references("tiny", "nvfp4", "float32")
    config = str(checkpoint("tiny", "nvfp4", "safetensors"))
    (answers,) = run_engine(
        [Pass(prompts_of(refs))],
        environment=_BINDING,
        model=str(checkpoint("tiny", "nvfp4", form)),
        hf_config_path=config,
        tokenizer=config,
        dtype="float32",
        distributed_executor_backend="mp",
        **parallel,
    )
    assert_float32(answers, refs)
