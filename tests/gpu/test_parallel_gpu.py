# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Flint's kernels on two ranks, at its real width, against the float64 reference.

Each rank has a GPU of its own, or both share one and talk through NCCL's sockets.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engine import ALL_KERNELS, OWN_MEMORY, STOCK_LAYERS, Pass, run_engine
from support.wide import WIDE, assert_no_further, wide_errors

# Prompts' lengths. What decodes together takes each path for experts: three launches
# with one token and two, two launches with 24, and the grouped GEMM.
BATCHES = ((7,), (45, 7), (9,) * 24, (5,) * 40)
# Requests of each batch that are held to the reference.
SAMPLE = 4
NEW_TOKENS = 8
ENGINE: dict[str, Any] = {
    **OWN_MEMORY,
    "dtype": "bfloat16",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 32, 40, 64]},
}
# Two ranks, and expert parallelism on them.
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
if torch.cuda.device_count() < 2:
    # With CUDA graphs such ranks hung at their first steps, and the GPU was idle.
    # FlashInfer's fused all-reduce wants memory that its ranks' GPUs share.
    TWO = {
        "ranks": 2,
        "enforce_eager": True,
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
    }
EXPERTS = TWO | {"enable_expert_parallel": True}
# What the model says once in each engine; ranks on one GPU are engines of their own.
SERVED = "Flint's kernels serve the routed experts"
NOT_USED = re.compile(r"Flint's [^\n]*? (?:not used|leave)[^\n]*")
SPREAD = (
    "Flint's expert kernels are not used: expert parallelism spreads a layer's tokens "
    "or experts over several ranks"
)


class Engines:
    """Serves the wide model in engines, each kind once a test run.

    Attributes:
        folder: Where the engines' output is.
    """

    def __init__(self, checkpoint: Any, folder: Path) -> None:
        self.folder = folder
        self._weights: Path = checkpoint("wide", "nvfp4", "safetensors")
        self._gguf: Path = checkpoint("wide", "nvfp4", "gguf")
        self._found: dict[str, tuple[np.ndarray, str]] = {}
        rng = np.random.default_rng(17)
        self._batches = [
            [rng.integers(10, WIDE.vocab_size, n).tolist() for n in lengths]
            for lengths in BATCHES
        ]

    def serve(self, name: str, stock: bool, **options: Any) -> tuple[np.ndarray, str]:
        """Returns what log-probabilities are off by, and what the engine printed."""
        if name not in self._found:
            log = self.folder / f"{name}.log"
            answers = run_engine(
                [
                    Pass(prompts, max_tokens=NEW_TOKENS, prompt_logprobs=0)
                    for prompts in self._batches
                ],
                log=log,
                model=str(self._weights if stock else self._gguf),
                hf_config_path=str(self._weights),
                tokenizer=str(self._weights),
                **(ENGINE | options),
                **(STOCK_LAYERS if stock else ALL_KERNELS),
            )
            errors = [
                wide_errors(batch[-SAMPLE:], prompts[-SAMPLE:], self._weights)
                for batch, prompts in zip(answers, self._batches, strict=True)
            ]
            self._found[name] = np.concatenate(errors), log.read_text()
        return self._found[name]

    def stock(self) -> np.ndarray:
        """What stock layers on one GPU are off by, on BF16 weights."""
        return self.serve("stock", stock=True)[0]


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(checkpoint, tmp_path_factory.mktemp("engines"))


def left_out(log: str) -> list[str]:
    """What the engine says that its kernels do not serve."""
    return sorted(set(NOT_USED.findall(log)))


@pytest.mark.parametrize("options", [{}, TWO], ids=["tp1", "tp2"])
def test_as_near_to_float64_as_stock_layers(
    engines: Engines, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    errors, log = engines.serve(name, stock=False, **options)
    print(f"{name} leaves out: {left_out(log)}")
    assert log.count(SERVED) == options.get("ranks", 1)
    assert_no_further(errors, engines.stock())


def test_two_ranks_take_the_same_kernels(engines: Engines) -> None:
    """Each rank's half of the model is served as the whole is, but rounds otherwise."""
    one, one_log = engines.serve("tp1", stock=False)
    two, two_log = engines.serve("tp2", stock=False, **TWO)
    assert left_out(two_log) == left_out(one_log)
    assert not np.array_equal(one, two), "both engines ran as one rank"


def test_expert_parallelism_is_left_to_vllm(engines: Engines) -> None:
    errors, log = engines.serve("ep2", stock=False, **EXPERTS)
    assert log.count(SPREAD) == EXPERTS.get("ranks", 1) and SERVED not in log
    # The other layers are on Flint's kernels all the same.
    _, two_log = engines.serve("tp2", stock=False, **TWO)
    others = [line for line in left_out(log) if line != SPREAD]
    assert others == left_out(two_log)
    assert_no_further(errors, engines.stock())
