# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs one vLLM engine over prompts; a process of its own, so that none leaks.

Reads a JSON request from standard input, writes a JSON answer to the file that it
names. See `engine.run_engine`. An engine with `disable_log_stats` false prints how many
requests lost their pages to others; one that hangs prints where, before it is stopped.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    prompt_logprobs = None
    if output.prompt_logprobs is not None:
        prompt_logprobs = [
            {token: entry.logprob for token, entry in position.items()}
            for position in output.prompt_logprobs[1:]
        ]
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [
            step[token].logprob
            for token, step in zip(
                completion.token_ids, completion.logprobs, strict=True
            )
        ],
        "prompt_logprobs": prompt_logprobs,
        "num_cached_tokens": output.num_cached_tokens,
    }


def main() -> None:
    """Serves the request."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    if "FLINT_TEST_VARIANTS" in os.environ:
        root = Path(__file__).parents[2]
        sys.path += [str(root / "tests"), str(root / "scripts")]
        from support.variants import offer_prebuilt

        offer_prebuilt()
    request = json.load(sys.stdin)
    faulthandler.dump_traceback_later(request["seconds"])
    llm = LLM(**request["engine"])
    passes = []
    for one_pass in request["passes"]:
        params = SamplingParams(
            temperature=0,
            max_tokens=one_pass["max_tokens"],
            logprobs=0,
            prompt_logprobs=one_pass["prompt_logprobs"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [TokensPrompt(prompt_token_ids=p) for p in one_pass["prompts"]]
        batches = [prompts] if one_pass["batched"] else [[p] for p in prompts]
        passes.append(
            [
                _answer(output)
                for batch in batches
                for output in llm.generate(batch, params, use_tqdm=False)
            ]
        )
    if not request["engine"].get("disable_log_stats", True):
        for metric in llm.get_metrics():
            if metric.name == "vllm:num_preemptions":
                print(f"{metric.name} {metric.value}", flush=True)
    Path(request["answer"]).write_text(json.dumps(passes))


if __name__ == "__main__":
    main()
