# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times of one engine: a token at each batch size, and the first token of a prompt."""

import itertools
import statistics
import time
from typing import Any

import numpy as np

# Steps of a decode point: before the clock starts, and in each timed window.
WARM, WINDOW, WINDOWS = 8, 16, 5
_REPEATS = 3
# Tokens that a step may hold, vLLM's default for a server on a large GPU.
STEP_TOKENS = 8192

_ids = itertools.count()


class PointError(RuntimeError):
    """The engine could not run a point as it was asked for."""


def max_new_tokens(batch: int, context: int) -> int:
    """More than any request gets: early ones decode while the others are prefilled."""
    prefill = 2 * -(-batch * context // STEP_TOKENS) + batch
    return prefill + 2 * (WARM + WINDOW * WINDOWS)


def time_per_output_token(llm: Any, batch: int, context: int) -> float:
    """Returns seconds a decode step takes, when all requests decode together.

    Args:
        llm: The engine.
        batch: Requests that decode together.
        context: Tokens of each prompt.

    Raises:
        PointError: If the requests never decode all together.
    """
    engine = llm.llm_engine
    names = _add(engine, batch, context, max_new_tokens(batch, context))
    try:
        _decode(engine, batch, WARM)
        times = [_decode(engine, batch, WINDOW) for _ in range(WINDOWS)]
    finally:
        engine.abort_request(names, internal=True)
        _drain(engine)
    return statistics.median(times) / WINDOW


def time_to_first_token(llm: Any, prompt: int) -> float:
    """Returns seconds from a prompt of that many tokens to its first new token."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        _add(llm.llm_engine, 1, prompt, 1)
        _drain(llm.llm_engine)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def graph_ms(llm: Any, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of a decode step's CUDA graph, without what is outside it.

    The GPU's, and what the host takes to launch it.
    """
    llm.collective_rpc("bench_record_graphs")
    try:
        time_per_output_token(llm, batch, context)
    finally:
        replays = llm.collective_rpc("bench_graph_ms")[0]
    if not replays:
        raise PointError("no CUDA graph was replayed")
    # A prefill replays none or one of another size; the median is a decode step's.
    return {
        "batch": batch,
        "context": context,
        "replays": len(replays),
        "ms": round(statistics.median(gpu for gpu, _ in replays), 4),
        "host_ms": round(statistics.median(host for _, host in replays), 4),
    }


def _add(engine: Any, count: int, length: int, new_tokens: int) -> list[str]:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    rng = np.random.default_rng((count, length))
    vocab = engine.model_config.get_vocab_size()
    params = SamplingParams(
        max_tokens=new_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    return [
        engine.add_request(
            f"bench-{next(_ids)}", tokens_input(prompt.tolist()), params.clone()
        )
        for prompt in rng.integers(10, vocab, (count, length))
    ]


def _decode(engine: Any, batch: int, steps: int) -> float:
    """Seconds of so many steps in a row that gave every request a token."""
    done, start, last = 0, 0.0, 0.0
    # One step more than is timed: the clock starts with the first one's end.
    while done <= steps:
        outputs = engine.step()
        last = time.perf_counter()
        if any(output.finished for output in outputs):
            raise PointError("requests ended before all of them decoded together")
        if not engine.has_unfinished_requests():
            raise PointError("the engine has no requests left")
        # Late answers to requests that were called off.
        if not outputs:
            continue
        if len(outputs) < batch:
            done = 0
            continue
        if done == 0:
            start = last
        done += 1
    return last - start


def _drain(engine: Any) -> None:
    while engine.has_unfinished_requests():
        engine.step()
