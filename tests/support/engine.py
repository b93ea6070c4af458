# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Real vLLM engines for tests, each in a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_TIMEOUT = 600.0
# Arguments of an engine that is to run on all of Flint's kernels, or on stock layers.
ALL_KERNELS = {"additional_config": {"flint_kernels": True}}
STOCK_LAYERS = {"additional_config": {"flint_kernels": False}}
# Of an engine whose KV cache is not sized by profiling, so that what else runs on the
# GPU does not count.
OWN_MEMORY = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}


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


def preemptions(log: str) -> int:
    """Returns how many requests lost their pages, of an engine that counts them."""
    (count,) = re.findall(r"^vllm:num_preemptions (\d+)$", log, re.MULTILINE)
    return int(count)


class EngineError(RuntimeError):
    """The engine did not come up, failed or hung; the message is its output."""


def _rank_settings(ranks: int) -> list[dict[str, str]]:
    """Returns what each rank's process has in its environment besides."""
    if ranks == 1:
        return [{}]
    from vllm.utils.network_utils import get_open_port

    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_open_port()),
        "NCCL_SOCKET_IFNAME": "lo",
        # Ranks take turns on the GPU, so each message costs a few milliseconds.
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_BUFFSIZE": str(1 << 25),
        # Its all-reduce wants memory that its ranks' GPUs share.
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }
    # NCCL refuses two ranks of one host on one GPU, so each says it is another host.
    return [
        shared | {"RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
        for rank in range(ranks)
    ]


def _run_children(
    requests: list[Path], environments: list[dict[str, str]], log: Path
) -> None:
    """Runs a process for each request until all end; kills the rest if one fails."""
    deadline = time.monotonic() + _TIMEOUT
    command = [sys.executable, str(Path(__file__).with_name("engine_child.py"))]
    children: list[subprocess.Popen[bytes]] = []
    with log.open("w") as output:
        try:
            for request, env in zip(requests, environments, strict=True):
                with request.open() as stdin:
                    child = subprocess.Popen(
                        command,
                        stdin=stdin,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=env,
                        start_new_session=True,
                    )
                children.append(child)
            while any(child.poll() is None for child in children):
                if any(child.poll() for child in children):
                    break
                if time.monotonic() > deadline:
                    said = log.read_text()
                    raise EngineError(f"no answer within {_TIMEOUT:.0f} s\n{said}")
                time.sleep(0.05)
        finally:
            for child in children:
                # Their workers as well.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if any(child.returncode for child in children):
        raise EngineError(log.read_text())


def run_engine(
    passes: list[Pass],
    environment: dict[str, str] | None = None,
    log: Path | None = None,
    ranks: int = 1,
    **engine: Any,
) -> list[list[Answer]]:
    """Starts an engine, serves the passes in order and stops it.

    Args:
        passes: What to generate.
        environment: Variables to set besides the usual ones.
        log: Where to write all that the engine's processes print.
        ranks: With more than one, as many processes share the first GPU as the ranks
            of a tensor-parallel engine, each with a scheduler of its own.
        **engine: Arguments of `vllm.LLM`.

    Raises:
        EngineError: If it exits with an error or takes longer than `_TIMEOUT` seconds,
            or its ranks answer differently.
    """
    defaults = {"enforce_eager": True, "max_model_len": 2048, "seed": 0}
    if ranks > 1:
        defaults |= {
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True,
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = [folder / f"request-{rank}.json" for rank in range(ranks)]
        answers = [folder / f"answer-{rank}.json" for rank in range(ranks)]
        for request, answer in zip(requests, answers, strict=True):
            content = {
                "engine": {**defaults, **engine},
                "passes": [asdict(p) for p in passes],
                "answer": str(answer),
                "seconds": 0.95 * _TIMEOUT,
            }
            request.write_text(json.dumps(content))
        environments = [env | settings for settings in _rank_settings(ranks)]
        _run_children(requests, environments, log or folder / "log")
        raw, *others = (json.loads(answer.read_text()) for answer in answers)
    if any(other != raw for other in others):
        raise EngineError("the ranks of one engine gave different answers")
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
