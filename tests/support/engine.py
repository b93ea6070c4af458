# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Real vLLM engines for tests, each in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_TIMEOUT = 600.0
# Arguments of an engine that is to run on all of Flint's kernels, or on stock layers.
ALL_KERNELS = {"additional_config": {"flint_kernels": True}}
STOCK_LAYERS = {"additional_config": {"flint_kernels": False}}


@dataclass(frozen=True)
class Pass:
    """One call, or one a prompt, of an engine's generate.

    Attributes:
        prompts: Token ids.
        batched: Whether all prompts go in one call.
        max_tokens: How many tokens to generate, greedily.
        prompt_logprobs: How many of the likeliest tokens to report at each position
            of the prompt; None for no prompt logprobs.
    """

    prompts: list[list[int]]
    batched: bool = True
    max_tokens: int = 32
    prompt_logprobs: int | None = 5


@dataclass(frozen=True)
class Answer:
    """What an engine made of one prompt of T tokens.

    Attributes:
        token_ids: The continuation.
        logprobs: Its log-probabilities.
        prompt_logprobs: T - 1 positions, each the logprob of the prompt's next token
            and of the likeliest ones, by token id.
        num_cached_tokens: Prompt tokens that the prefix cache supplied.
    """

    token_ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    num_cached_tokens: int = 0

    def next_token_logprobs(self, prompt: list[int]) -> np.ndarray:
        """Returns the logprob of each prompt token after the first, [T - 1]."""
        return np.array(
            [p[t] for p, t in zip(self.prompt_logprobs, prompt[1:], strict=True)]
        )


class EngineError(RuntimeError):
    """The engine did not come up or failed; the message is its output."""


def run_engine(
    passes: list[Pass],
    environment: dict[str, str] | None = None,
    log: Path | None = None,
    **engine: Any,
) -> list[list[Answer]]:
    """Starts an engine, serves the passes in order and stops it.

    Args:
        passes: What to generate.
        environment: Variables to set besides the usual ones.
        log: Where to write all that the engine's processes print.
        **engine: Arguments of `vllm.LLM`.

    Raises:
        EngineError: If it exits with an error.
    """
    defaults = {"enforce_eager": True, "max_model_len": 2048, "seed": 0}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {
            "engine": {**defaults, **engine},
            "passes": [asdict(p) for p in passes],
            "answer": str(answer),
        }
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Threads that wait for each other cost such a small model more than they
            # give, and most of all where cores are shared.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **os.environ,
            **(environment or {}),
        }
        child = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("engine_child.py"))],
            input=json.dumps(request),
            text=True,
            capture_output=True,
            timeout=_TIMEOUT,
            env=env,
        )
        if log is not None:
            log.write_text(child.stdout + child.stderr)
        if child.returncode:
            raise EngineError(child.stdout + child.stderr)
        raw = json.loads(answer.read_text())
    return [
        [
            Answer(
                a["token_ids"],
                a["logprobs"],
                [
                    {int(t): v for t, v in position.items()}
                    for position in a["prompt_logprobs"] or ()
                ],
                a["num_cached_tokens"] or 0,
            )
            for a in one_pass
        ]
        for one_pass in raw
    ]
