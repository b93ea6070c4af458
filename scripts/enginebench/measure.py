# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times of one engine: a token at each batch size, and the first token of a prompt."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

SHORT, LONG = 17, 145
_REPEATS = 3


def time_per_output_token(llm: Any, batch: int, context: int) -> float:
    """Returns seconds a decode step takes, from two generations of unlike length.

    Args:
        llm: The engine.
        batch: Requests that decode together.
        context: Tokens of each prompt.
    """
    prompts = _prompts(llm, batch, context)
    times = {}
    for length in (SHORT, LONG):
        times[length] = _median(partial(_generate, llm, prompts, length))
    return (times[LONG] - times[SHORT]) / (LONG - SHORT)


def time_to_first_token(llm: Any, prompt: int) -> float:
    """Returns seconds from a prompt of that many tokens to its first new token."""
    prompts = _prompts(llm, 1, prompt)
    return _median(partial(_generate, llm, prompts, 1))


def measure(
    llm: Any, batches: list[int], contexts: list[int], prompts: list[int]
) -> dict[str, Any]:
    """Times every combination; milliseconds, with a progress bar."""
    total = len(batches) * len(contexts) + len(prompts)
    decode, first = [], []
    with tqdm(total=total, desc="Measuring", unit="point") as progress:
        for context in contexts:
            for batch in batches:
                seconds = time_per_output_token(llm, batch, context)
                decode.append(
                    {"context": context, "batch": batch, "ms": round(1e3 * seconds, 3)}
                )
                progress.update()
        for prompt in prompts:
            seconds = time_to_first_token(llm, prompt)
            first.append({"prompt": prompt, "ms": round(1e3 * seconds, 2)})
            progress.update()
    return {"time_per_output_token": decode, "time_to_first_token": first}


def _prompts(llm: Any, batch: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng((batch, length))
    vocab = llm.llm_engine.model_config.get_vocab_size()
    return rng.integers(10, vocab, (batch, length)).tolist()


def _generate(llm: Any, prompts: list[list[int]], num_tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(
        max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
    )
    requests = [TokensPrompt(prompt_token_ids=p) for p in prompts]
    llm.generate(requests, params, use_tqdm=False)


def _median(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
